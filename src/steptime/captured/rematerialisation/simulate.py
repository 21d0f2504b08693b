"""Bytes and seconds of a schedule on a chain: the one definition that solvers and tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptime.captured.rematerialisation.chain import Action, Chain, Kind
from steptime.errors import UserError


class ScheduleError(UserError):
    """A schedule that reads what is not there, or that does not end with the gradient of the first input."""

    def __init__(self, position: int, action: Action | None, problem: str) -> None:
        self.position = position
        self.action = action
        super().__init__(f"schedule: action {position}{f' ({action})' if action else ''}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule costs."""

    peak_bytes: float
    """Largest number of bytes that live at once, the chain's input included."""
    time_s: float
    recomputed_forward_s: float
    """Time of the forward runs after the first of each segment."""
    forward_runs: tuple[int, ...]
    """Forward runs of each segment."""
    action_bytes: tuple[float, ...]
    """Peak of each action."""


def simulate(chain: Chain, schedule: Sequence[Action]) -> Simulation:
    """Execute a schedule with the rules of :mod:`~steptime.captured.rematerialisation.chain`.

    Raises :class:`ScheduleError` at the first action that is not legal.

    With $x = 10$, $s = 30$ and no gradients, keeping all of three segments needs 30 bytes of inputs and 90 of saved
    activations:

    >>> from steptime.captured.rematerialisation.chain import Segment, keep_all
    >>> chain = Chain(segments=(Segment(forward_s=1, backward_s=2, input_bytes=10, saved_bytes=30),) * 3)
    >>> simulate(chain, keep_all(3)).peak_bytes
    120.0
    """
    machine = _Machine(chain)
    for position, action in enumerate(schedule):
        machine.step(position, action)
    return machine.result(len(schedule))


class _Machine:
    """The state while a schedule runs."""

    def __init__(self, chain: Chain) -> None:
        self.segments = chain.segments
        self.count = len(chain)
        self.x, self.d = chain.boundary_bytes, chain.gradient_bytes
        self.present = [True] + [False] * self.count
        self.saved = [False] * self.count
        self.pins = [False, *(one.output_in_backward for one in chain.segments)]
        self.gradient: int | None = None
        self.live: float = self.x[0]
        self.runs = [0] * self.count
        self.time_s = 0.0
        self.recomputed_s = 0.0
        self.peaks: list[float] = []

    def step(self, position: int, action: Action) -> None:
        kind, i = action
        if not 0 <= i < self.count + (kind is Kind.DISCARD):
            raise ScheduleError(position, action, f"there is no segment {i}; the chain has {self.count}")
        if not self.present[i]:
            raise ScheduleError(position, action, f"activation {i} is not in memory")
        if kind is Kind.BACKWARD:
            self._backward(position, action)
        elif kind is Kind.DISCARD:
            self._discard(position, action)
        else:
            self._forward(position, action)

    def _pinned(self, i: int) -> bool:
        """Whether the caller, or the saved state of the segment after or before, holds the activation."""
        return i == 0 or (i < self.count and self.saved[i]) or (self.pins[i] and self.saved[i - 1])

    def _release(self, i: int) -> None:
        if self.present[i] and not self._pinned(i):
            self.present[i] = False
            self.live -= self.x[i]

    def _forward(self, position: int, action: Action) -> None:
        kind, i = action
        one = self.segments[i]
        copy = self.x[i + 1] if self.present[i + 1] else 0.0
        self.live += self.x[i + 1]
        if kind is Kind.SAVE:
            if self.saved[i]:
                raise ScheduleError(position, action, "what it saves is in memory already")
            self.saved[i] = True
            self.live += one.saved_bytes
            self.peaks.append(self.live + one.saving_transient_bytes)
        else:
            self.peaks.append(self.live + one.forward_transient_bytes)
        self.live -= copy
        self.present[i + 1] = True
        if kind is Kind.FORWARD:
            self._release(i)
        self.time_s += one.forward_s
        if self.runs[i]:
            self.recomputed_s += one.forward_s
        self.runs[i] += 1

    def _backward(self, position: int, action: Action) -> None:
        i = action.segment
        one = self.segments[i]
        if self.gradient is None and i == self.count - 1:
            self.live += self.d[self.count]
        elif self.gradient != i + 1:
            raise ScheduleError(position, action, f"the gradient of activation {i + 1} is not in memory")
        if not self.saved[i]:
            raise ScheduleError(position, action, "what its backward reads was not saved")
        self._release(i + 1)
        self.live += self.d[i]
        self.peaks.append(self.live + one.backward_transient_bytes)
        self.live -= self.d[i + 1] + one.saved_bytes
        self.saved[i] = False
        self._release(i + 1)
        self._release(i)
        self.gradient = i
        self.time_s += one.backward_s

    def _discard(self, position: int, action: Action) -> None:
        if self._pinned(action.segment):
            raise ScheduleError(position, action, "this activation must stay: the caller or a backward needs it")
        self.peaks.append(self.live)
        self._release(action.segment)

    def result(self, length: int) -> Simulation:
        if self.gradient != 0:
            raise ScheduleError(length, None, "the schedule ends before the backward of segment 0")
        return Simulation(
            peak_bytes=max(self.peaks), time_s=self.time_s, recomputed_forward_s=self.recomputed_s,
            forward_runs=tuple(self.runs), action_bytes=tuple(self.peaks),
        )  # fmt: skip
