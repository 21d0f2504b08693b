"""Content of the trace formats: nested spans of a program on one track, and the memory in use by category."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from steptime.captured.graph import BEFORE, Call, Program
from steptime.captured.graph.liveness import Liveness
from steptime.errors import UserError
from steptime.num import Array

CALL_S: Final = 1e-6
"""Time of a call without a prediction: one microsecond, so that the axis counts calls."""
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
        """Start or end of a call in seconds; calls beyond the last one belong to the next step."""
        if call == BEFORE:
            return 0.0
        count = len(self.start_s) - 1
        step, number = divmod(call, count) if count else (0, 0)
        return step * self.total_s + self.start_s[number + end if count else 0]

    def microsecond(self, call: int, *, end: bool = False) -> int:
        """Start or end of a call in whole microseconds."""
        return round(self.seconds(call, end=end) * 1e6)

    def nanosecond(self, call: int, *, end: bool = False) -> int:
        """Start or end of a call in whole nanoseconds."""
        return round(self.seconds(call, end=end) * 1e9)


@dataclass(frozen=True, slots=True)
class Span:
    """Time span of a phase, a module or an operator: calls `first` to `last`. Spans nest; outer ones come first."""

    name: str
    category: str
    first: int
    last: int
    depth: int
    details: Mapping[str, str | int] = field(default_factory=dict)


def spans(program: Program) -> list[Span]:
    """Spans of phases, of the modules in them by path, and of the operators; views take no time and are left out.

    Consecutive calls of a module are one span.
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
    """Each (phase, module, ...) with its first and last call; of spans with the same end, outer ones come last."""
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
    """Category -> bytes in use before the first call (entry 0) and during each call; workspace is last."""
    liveness = Liveness(program, rounding=rounding)
    kinds: dict[str, Array] = {str(kind): values for kind, values in liveness.by_category().items()}
    scratch = liveness.in_use_bytes.copy()
    for values in kinds.values():
        scratch -= values
    if scratch.any():
        kinds[WORKSPACE] = scratch
    return kinds
