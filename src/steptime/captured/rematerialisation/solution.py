"""What the solvers return: a schedule with its costs, or the least memory that would do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from steptime.captured.rematerialisation.chain import Chain, Schedule
from steptime.captured.rematerialisation.simulate import Simulation, simulate


class Costed(Protocol):
    """Anything with bytes and seconds."""

    @property
    def peak_bytes(self) -> float: ...  # noqa: D102
    @property
    def time_s(self) -> float: ...  # noqa: D102


Cost = TypeVar("Cost", bound=Costed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Something that was simulated."""

    run: Simulation

    @property
    def peak_bytes(self) -> float:
        """Largest number of bytes that live at once, the chain's input included."""
        return self.run.peak_bytes

    @property
    def time_s(self) -> float:
        """Time of all forward and backward runs."""
        return self.run.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Ran):
    """A schedule and what it costs."""

    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Nothing fits."""

    limit_bytes: float
    least_bytes: float
    """The smallest limit that would do."""


def solution(chain: Chain, schedule: Schedule) -> Solution:
    """A schedule with its costs."""
    return Solution(schedule=schedule, run=simulate(chain, schedule))


def pareto(found: Iterable[Cost]) -> tuple[Cost, ...]:
    """Those that no other beats in both memory and time, least memory first."""
    out: list[Cost] = []
    for one in sorted(found, key=lambda one: (one.peak_bytes, one.time_s)):
        if not out or one.time_s < out[-1].time_s * (1 - 1e-12):
            out.append(one)
    return tuple(out)
