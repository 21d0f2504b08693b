"""Write a predicted step as a Perfetto trace (TrackEvent packets), for ui.perfetto.dev.

Protocol buffers need three things: variable-length integers, length-prefixed fields, and field numbers.

Source: Perfetto, `protos/perfetto/trace/`: `trace.proto`, `trace_packet.proto`, `track_event/track_event.proto`,
`track_descriptor.proto`, `counter_descriptor.proto`, `debug_annotation.proto`, `interned_data/interned_data.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from steptime.captured.formats.binary import write_bytes
from steptime.captured.formats.timeline import Clock, Span, changes, memory_by_kind, spans
from steptime.captured.graph import BEFORE, Program
from steptime.captured.graph.placement import Placement
from steptime.num import Array

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
