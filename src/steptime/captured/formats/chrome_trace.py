"""Write a predicted step as a Chrome trace (JSON), for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from steptime.captured.formats.binary import write_bytes
from steptime.captured.formats.timeline import Clock, changes, memory_by_kind, spans
from steptime.captured.graph import BEFORE, Program
from steptime.captured.graph.placement import Placement

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
