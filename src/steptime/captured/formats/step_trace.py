"""A predicted step of a recorded module as a trace: phases, modules and operators, and the memory in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from steptime.captured.formats.timeline import Clock, memory_by_kind, spans
from steptime.captured.graph import BEFORE, Program
from steptime.captured.graph.placement import Placement
from steptime.formats.trace import Count, Slices, Trace, chrome, perfetto
from steptime.num import Array
from steptime.store.files import write_bytes


def write_trace(
    program: Program,
    path: str | Path,
    *,
    seconds: Sequence[float] | None = None,
    rounding: int = 1,
    placement: Placement | None = None,
) -> None:
    """Write slices (phase, module, operator) and counters (bytes in use by category) of one step.

    Args:
        program: a recorded step.
        path: the file: `*.json` for Chrome JSON; any other name, by convention `*.pftrace`, for Perfetto.
        seconds: predicted time of each call; None: every call takes 1 µs.
        rounding: bytes to which each storage is rounded up, 512 for CUDA.
        placement: a placement whose reserved and allocated bytes are counters too.

    Raises:
        UserError: `seconds` is not one time for each call.
        InputFileError: the file cannot be written.
    """
    make = chrome_trace if Path(path).suffix == ".json" else perfetto_trace
    write_bytes(path, make(program, seconds=seconds, rounding=rounding, placement=placement))


def perfetto_trace(
    program: Program, *, seconds: Sequence[float] | None = None, rounding: int = 1, placement: Placement | None = None
) -> bytes:
    """The step as Perfetto packets: a counter for each category and one for their sum."""
    kinds = memory_by_kind(program, rounding)
    values: dict[str, Array] = {f"in use: {kind}": values for kind, values in kinds.items()}
    if kinds:
        values = {"in use": sum(kinds.values(), start=0 * next(iter(kinds.values()))), **values}
    if placement is not None:
        values |= {"reserved": placement.reserved_bytes, "allocated": placement.allocated_bytes}
    return perfetto(_trace(program, Clock(program, seconds), {"memory": values}))


def chrome_trace(
    program: Program, *, seconds: Sequence[float] | None = None, rounding: int = 1, placement: Placement | None = None
) -> bytes:
    """The step as Chrome JSON: one counter with a value for each category."""
    counts: dict[str, Mapping[str, Array]] = {"memory in use (bytes)": memory_by_kind(program, rounding)}
    if placement is not None:
        counts["reserved by the allocator"] = {"bytes": placement.reserved_bytes}
        counts["allocated by the allocator"] = {"bytes": placement.allocated_bytes}
    return chrome(_trace(program, Clock(program, seconds), counts))


def _trace(program: Program, clock: Clock, counts: Mapping[str, Mapping[str, Array]]) -> Trace:
    """Trace of one process with one track; entry 0 of counters is before the first call."""
    found = spans(program)
    names = {name: number for number, name in enumerate(dict.fromkeys(s.name for s in found))}
    categories = {name: number for number, name in enumerate(dict.fromkeys(s.category for s in found))}
    entries = [clock.nanosecond(call) for call in (BEFORE, *range(len(program.calls)))]

    def column(values: Sequence[int]) -> Array:
        return np.array(values, np.int64)

    return Trace(
        processes=[program.name or "step"], tracks=[(0, "step (predicted)")], names=list(names),
        categories=list(categories),
        slices=Slices(
            track=np.zeros(len(found), np.int64), start_ns=column([clock.nanosecond(s.first) for s in found]),
            end_ns=column([clock.nanosecond(s.last, end=True) for s in found]),
            name=column([names[s.name] for s in found]), category=column([categories[s.category] for s in found]),
            depth=column([s.depth for s in found]), details=[s.details for s in found],
        ),
        counts=[
            Count(process=0, name=name, time_ns=column(entries), values=values)
            for name, values in counts.items() if values
        ],
    )  # fmt: skip
