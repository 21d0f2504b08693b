"""Write a predicted step as a trace: Chrome JSON (chrome://tracing) or Perfetto packets (ui.perfetto.dev).

Both show nested spans on one track, and the memory in use by what it holds. Perfetto's protocol buffers need three
things: variable-length integers, length-prefixed fields, and field numbers.

Source: Perfetto, `protos/perfetto/trace/`: `trace.proto`, `trace_packet.proto`, `track_event/track_event.proto`,
`track_descriptor.proto`, `counter_descriptor.proto`, `debug_annotation.proto`, `interned_data/interned_data.proto`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from steptime.captured.graph import BEFORE, Call, Program
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.placement import Placement
from steptime.errors import InputFileError, UserError
from steptime.num import Array
from steptime.store.files import replace_file, unwritable


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file; a device or a pipe is written to directly.

    Raises:
        InputFileError: it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        replace_file(target.resolve(), data)
    except OSError as error:
        raise unwritable(path, error) from None
    except ValueError as error:
        raise InputFileError(repr(str(path)), f"not a path: {error}") from None


CALL_S: Final = 1e-6
"""Time of a call where none is predicted: one microsecond, so that the axis counts calls."""
WORKSPACE: Final = "workspace"


class Clock:
    """Start and end of each call in seconds since the start of the step; steps follow each other without a gap.

    >>> from steptime.captured.graph import Program
    >>> Clock(Program(name="empty", calls=(), storages=())).total_s
    0.0

    Raises:
        UserError: not one finite time >= 0 for each call.
    """

    def __init__(self, program: Program, seconds: Sequence[float] | None = None) -> None:
        count = len(program.calls)
        given = [CALL_S] * count if seconds is None else [float(value) for value in seconds]
        if len(given) != count:
            raise UserError(f"{len(given)} times for {count} calls", hint="one predicted time for each call")
        bad = next((n for n, value in enumerate(given) if not (math.isfinite(value) and value >= 0)), None)
        if bad is not None:
            raise UserError(
                f"call {bad} ({program.calls[bad].node.op}) takes {given[bad]} s", hint="a finite time >= 0"
            )
        self.start_s = [0.0, *accumulate(given)]
        self.total_s = self.start_s[-1]

    def seconds(self, call: int, *, end: bool = False) -> float:
        """Start or end of a call; calls beyond the last one are those of the next step."""
        if call == BEFORE:
            return 0.0
        count = len(self.start_s) - 1
        step, number = divmod(call, count) if count else (0, 0)
        return step * self.total_s + self.start_s[number + end if count else 0]

    def microsecond(self, call: int, *, end: bool = False) -> int:
        """The same in whole microseconds."""
        return round(self.seconds(call, end=end) * 1e6)

    def nanosecond(self, call: int, *, end: bool = False) -> int:
        """The same in whole nanoseconds."""
        return round(self.seconds(call, end=end) * 1e9)


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, a module or an operator while it runs: calls `first` to `last`. Spans nest; outer ones come first."""

    name: str
    category: str
    first: int
    last: int
    depth: int
    details: Mapping[str, str | int] = field(default_factory=dict)


def spans(program: Program) -> list[Span]:
    """Phases, in them the modules by path, in them the operators; views are left out, as they take no time.

    A module is one span as long as one call after the other is its own.
    """
    out: list[Span] = []
    for level, first, last in _groups(program):
        *outer, name = level
        if outer:
            path = ".".join(level[1:])
            details = {"module": path, "class": program.modules.get(path, "")}
            out.append(Span(name, "module", first, last, len(outer), details))
        else:
            out.append(Span(name, "phase", first, last, 0))
    for number, call in enumerate(program.calls):
        if not call.view:
            depth = len(_level(call))
            out.append(Span(call.node.op, "operator", number, number, depth, _details(call)))
    return sorted(out, key=lambda span: (span.first, span.depth))


def _level(call: Call) -> tuple[str, ...]:
    return (call.phase, *(call.module.split(".") if call.module else ()))


def _groups(program: Program) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Each (phase, module, ...) with its first and last call, outer ones of equal end last."""
    stack: list[tuple[tuple[str, ...], int]] = []
    for number, call in enumerate(program.calls):
        level = _level(call)
        while stack and level[: len(stack[-1][0])] != stack[-1][0]:
            path, first = stack.pop()
            yield path, first, number - 1
        stack += [(level[:count], number) for count in range(len(stack) + 1, len(level) + 1)]
    for path, first in reversed(stack):
        yield path, first, len(program.calls) - 1


def _details(call: Call) -> dict[str, str | int]:
    out: dict[str, str | int] = {"module": call.module, "output": ", ".join(map(str, call.node.outputs[:4]))}
    if call.scratch_bytes:
        out["workspace_bytes"] = call.scratch_bytes
    if call.recomputed:
        out["recomputed"] = "yes"
    return out


def memory_by_kind(program: Program, rounding: int = 1) -> dict[str, Array]:
    """Bytes in use before the first call (entry 0) and while each runs, by category, workspace last; they add up."""
    liveness = Liveness(program, rounding=rounding)
    kinds: dict[str, Array] = {str(kind): values for kind, values in liveness.by_category().items()}
    scratch = liveness.in_use_bytes.copy()
    for values in kinds.values():
        scratch -= values
    if scratch.any():
        kinds[WORKSPACE] = scratch
    return kinds


def changes(values: Array) -> Iterator[tuple[int, int]]:
    """(entry, value) wherever the value is another one than before, the first entry included.

    >>> import numpy as np
    >>> list(changes(np.array([1, 1, 3])))
    [(0, 1), (2, 3)]
    """
    last: int | None = None
    for entry, value in enumerate(values.tolist()):
        if value != last:
            yield entry, int(value)
            last = value


PID: Final = 1
TID: Final = 1


def write_chrome_trace(
    program: Program,
    path: str | Path,
    *,
    seconds: Sequence[float] | None = None,
    rounding: int = 1,
    placement: Placement | None = None,
) -> None:
    """Write spans (phase, module, operator) and counters (bytes in use) of one step.

    Args:
        program: a recorded step.
        path: the file, by custom `*.json`.
        seconds: predicted time of each call; None: every call takes 1 µs.
        rounding: bytes to which each storage is rounded up, 512 for CUDA.
        placement: where given, its reserved and allocated bytes are counters too.

    Raises:
        UserError: `seconds` is not one time for each call.
        InputFileError: the file cannot be written.
    """
    document = chrome_trace(program, seconds=seconds, rounding=rounding, placement=placement)
    write_bytes(path, json.dumps(document, separators=(",", ":")).encode())


def chrome_trace(
    program: Program, *, seconds: Sequence[float] | None = None, rounding: int = 1, placement: Placement | None = None
) -> dict[str, Any]:
    """The trace as a document; times in microseconds, as the format has it.

    Source: Trace Event Format: phases X (complete), C (counter), M (metadata).
    """
    clock = Clock(program, seconds)
    events: list[dict[str, Any]] = [
        _metadata("process_name", program.name or "step"),
        _metadata("thread_name", "step (predicted)"),
    ]
    for span in spans(program):
        start, end = clock.seconds(span.first) * 1e6, clock.seconds(span.last, end=True) * 1e6
        events.append(
            {
                "ph": "X", "name": span.name, "cat": span.category, "pid": PID, "tid": TID, "ts": start,
                "dur": end - start, "args": dict(span.details),
            }
        )  # fmt: skip
    events += _counters(program, clock, rounding)
    if placement is not None:
        for name, values in (("reserved", placement.reserved_bytes), ("allocated", placement.allocated_bytes)):
            events += [_counter(clock, entry, f"{name} by the allocator", {"bytes": v}) for entry, v in changes(values)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"predicted_by": "steptime"}}


def _counters(program: Program, clock: Clock, rounding: int) -> list[dict[str, Any]]:
    """One stacked counter: every event carries all categories."""
    kinds = {kind: values.tolist() for kind, values in memory_by_kind(program, rounding).items()}
    out: list[dict[str, Any]] = []
    last: dict[str, int] | None = None
    for entry in range(len(program.calls) + 1 if kinds else 0):
        now = {kind: int(values[entry]) for kind, values in kinds.items()}
        if now != last:
            out.append(_counter(clock, entry, "memory in use (bytes)", now))
            last = now
    return out


def _counter(clock: Clock, entry: int, name: str, values: dict[str, int]) -> dict[str, Any]:
    call = entry - 1 if entry else BEFORE
    return {"ph": "C", "name": name, "pid": PID, "ts": clock.seconds(call) * 1e6, "args": values}


def _metadata(kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PID, "tid": TID, "args": {"name": name}}


PACKET: Final = 1
# TracePacket
TIMESTAMP, SEQUENCE_ID, TRACK_EVENT, INTERNED, FLAGS, TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60
CLEARED, NEEDED = 1, 2
"""Sequence flags: incremental state was cleared; this packet needs it."""
# TrackDescriptor, ProcessDescriptor, ThreadDescriptor, CounterDescriptor
UUID, NAME, PROCESS, THREAD, PARENT, COUNTER = 1, 2, 3, 4, 5, 8
UNIT, UNIT_BYTES = 3, 3
# TrackEvent
CATEGORIES, ANNOTATION, EVENT_TYPE, NAME_IID, TRACK_UUID, EVENT_NAMES, COUNTER_VALUE = 3, 4, 9, 10, 11, 2, 30
BEGIN, END, COUNT = 1, 2, 4
# DebugAnnotation, InternedData
INT_VALUE, STRING_VALUE, ANNOTATION_NAME = 4, 6, 10
EVENT_CATEGORIES: Final = 1

SEQUENCE: Final = 1
PROCESS_TRACK, STEP_TRACK, FIRST_COUNTER = 1, 2, 3


def write_perfetto(
    program: Program,
    path: str | Path,
    *,
    seconds: Sequence[float] | None = None,
    rounding: int = 1,
    placement: Placement | None = None,
) -> None:
    """Write slices (phase, module, operator) and counter tracks (bytes in use by category) of one step.

    Args:
        program: a recorded step.
        path: the file, by custom `*.pftrace`.
        seconds: predicted time of each call; None: every call takes 1 µs.
        rounding: bytes to which each storage is rounded up, 512 for CUDA.
        placement: where given, its reserved and allocated bytes are counter tracks too.

    Raises:
        UserError: `seconds` is not one time for each call.
        InputFileError: the file cannot be written.
    """
    write_bytes(path, perfetto(program, seconds=seconds, rounding=rounding, placement=placement))


def perfetto(
    program: Program, *, seconds: Sequence[float] | None = None, rounding: int = 1, placement: Placement | None = None
) -> bytes:
    """The trace as bytes; times in nanoseconds from 0 on."""
    clock = Clock(program, seconds)
    kinds = memory_by_kind(program, rounding)
    counters: dict[str, Array] = {f"in use: {kind}": values for kind, values in kinds.items()}
    if kinds:
        counters = {"in use": sum(kinds.values(), start=0 * next(iter(kinds.values()))), **counters}
    if placement is not None:
        counters |= {"reserved": placement.reserved_bytes, "allocated": placement.allocated_bytes}
    packets = [*_descriptors(program.name or "step", list(counters)), *_slices(spans(program), clock)]
    for number, values in enumerate(counters.values()):
        packets += _counts(FIRST_COUNTER + number, values, clock)
    return b"".join(field_bytes(PACKET, packet) for packet in packets)


# -- the wire format --------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A variable-length integer: 7 bits a byte, lowest first; negative ones as 64-bit two's complement.

    >>> varint(300).hex(), len(varint(-1))
    ('ac02', 10)
    """
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_int(number: int, value: int) -> bytes:
    """A field with an integer."""
    return varint(number << 3) + varint(value)


def field_bytes(number: int, value: bytes) -> bytes:
    """A field with a text or a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return field_bytes(number, value.encode("utf-8", "replace"))


# -- packets ----------------------------------------------------------------------------------------------------------


def _descriptors(name: str, counters: list[str]) -> Iterator[bytes]:
    sequence = field_int(SEQUENCE_ID, SEQUENCE)
    process = field_int(1, 1) + _text(6, name)
    thread = field_int(1, 1) + field_int(2, 1) + _text(5, "step (predicted)")
    first = field_int(UUID, PROCESS_TRACK) + field_bytes(PROCESS, process)
    yield sequence + field_int(FLAGS, CLEARED) + field_bytes(TRACK_DESCRIPTOR, first)
    step = field_int(UUID, STEP_TRACK) + field_int(PARENT, PROCESS_TRACK) + field_bytes(THREAD, thread)
    yield sequence + field_bytes(TRACK_DESCRIPTOR, step)
    for number, title in enumerate(counters):
        unit = field_bytes(COUNTER, field_int(UNIT, UNIT_BYTES))
        track = field_int(UUID, FIRST_COUNTER + number) + field_int(PARENT, PROCESS_TRACK) + _text(NAME, title) + unit
        yield sequence + field_bytes(TRACK_DESCRIPTOR, track)


def _event(time_ns: int, body: bytes, interned: bytes = b"") -> bytes:
    head = field_int(TIMESTAMP, time_ns) + field_int(SEQUENCE_ID, SEQUENCE) + field_int(FLAGS, NEEDED)
    return head + (field_bytes(INTERNED, interned) if interned else b"") + field_bytes(TRACK_EVENT, body)


class _Names:
    """Names are written once and then referred to by number."""

    def __init__(self, field: int) -> None:
        self._field = field
        self._known: dict[str, int] = {}

    def number(self, name: str) -> tuple[int, bytes]:
        """Number of a name, and what to write the first time it is used."""
        known = self._known.get(name)
        if known is not None:
            return known, b""
        number = self._known[name] = len(self._known) + 1
        return number, field_bytes(self._field, field_int(1, number) + _text(2, name))


def _slices(found: list[Span], clock: Clock) -> Iterator[bytes]:
    names, categories = _Names(EVENT_NAMES), _Names(EVENT_CATEGORIES)
    track = field_int(TRACK_UUID, STEP_TRACK)
    close = field_int(EVENT_TYPE, END) + track
    open_spans: list[Span] = []
    for span in found:
        while open_spans and open_spans[-1].last < span.first:
            yield _event(clock.nanosecond(open_spans.pop().last, end=True), close)
        name, new_name = names.number(span.name)
        category, new_category = categories.number(span.category)
        body = field_int(EVENT_TYPE, BEGIN) + track + field_int(NAME_IID, name) + field_int(CATEGORIES, category)
        body += b"".join(_annotation(key, value) for key, value in span.details.items() if value != "")
        yield _event(clock.nanosecond(span.first), body, new_category + new_name)
        open_spans.append(span)
    while open_spans:
        yield _event(clock.nanosecond(open_spans.pop().last, end=True), close)


def _annotation(key: str, value: str | int) -> bytes:
    given = field_int(INT_VALUE, value) if isinstance(value, int) else _text(STRING_VALUE, value)
    return field_bytes(ANNOTATION, _text(ANNOTATION_NAME, key) + given)


def _counts(track: int, values: Array, clock: Clock) -> Iterator[bytes]:
    for entry, value in changes(values):
        body = field_int(EVENT_TYPE, COUNT) + field_int(TRACK_UUID, track) + field_int(COUNTER_VALUE, value)
        yield _event(clock.nanosecond(entry - 1 if entry else BEFORE), body)
