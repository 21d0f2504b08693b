r"""A chain of segments, and schedules of its forward and backward pass with their cost in bytes and seconds.

Segment $i$ of $N$ reads the boundary activation $a_i$ and makes $a_{i+1}$; its backward reads the gradient
$\delta_{i+1}$ and makes $\delta_i$. A segment that runs *without saving* leaves only $a_{i+1}$; one that runs
*saving* also leaves $s_i$, the tensors that its backward reads in addition to its input. Five actions move the state:

======== ==================== ===================================== ===================================================
name     needs                bytes at its peak, beyond what lives  leaves
======== ==================== ===================================== ===================================================
``Fn``   $a_i$                $x_{i+1} + f_i$                       $a_{i+1}$; $a_i$ is released
``Fck``  $a_i$                $x_{i+1} + f_i$                       $a_{i+1}$, $a_i$
``Fall`` $a_i$                $x_{i+1} + s_i + g_i$                 $a_{i+1}$, $a_i$, $s_i$
``B``    $a_i$, $s_i$,        $d_i + b_i$ (and $d_N$ if it is the   $\delta_i$; $a_i$, $s_i$, $\delta_{i+1}$ and
         $\delta_{i+1}$       first backward)                       $a_{i+1}$ are released
``D``    $a_i$                0                                     nothing of $a_i$
======== ==================== ===================================== ===================================================

$x_i$ are the bytes of $a_i$, $d_i$ those of $\delta_i$, $f_i, g_i, b_i$ the transient bytes of a forward without
saving, of a saving forward and of the backward. Six rules complete the table:

* The input $a_0$ belongs to the caller: it counts at all times and is never released.
* $\delta_N$ exists from the first backward on, not before.
* Saved activations hold the input that they were computed from: $a_i$ stays as long as $s_i$.
* Where ``output_in_backward`` of segment $i$ is set (its backward reads its output, as that of ReLU or softmax),
  $a_{i+1}$ stays as long as $s_i$; else it is released before the backward of segment $i$ begins, if it still lives.
* The output of a segment that runs again is a new tensor; a copy that lived is released after the run.
* Parameters, their gradients and the optimizer's state are no part of a chain: subtract them from the limit.

The model is that of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains", arXiv 1911.13214, with three refinements: a segment need not keep its output for its backward, the transient
of a saving forward is a number of its own, and $\delta_N$ does not live during the first forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import reduce
from numbers import Real
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from steptime.errors import FieldError, UserError
from steptime.num import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One segment: times in seconds, sizes in bytes.

    Raises :class:`~steptime.errors.FieldError` where a number is negative or not finite.
    """

    forward_s: float
    """Time of one forward run, the same with and without saving."""
    backward_s: float
    input_bytes: float
    """Bytes of the boundary activation that it reads, $x_i$."""
    saved_bytes: float
    """Bytes that its backward reads other than its input and output, $s_i$."""
    gradient_bytes: float = 0.0
    """Bytes of the gradient of its input, $d_i$; 0 for a first segment whose input needs none."""
    forward_transient_bytes: float = 0.0
    """Bytes at the peak of a forward without saving, beyond its input and its output, $f_i$."""
    saving_transient_bytes: float = 0.0
    """Bytes at the peak of a saving forward, beyond its input, its output and what it saves, $g_i$."""
    backward_transient_bytes: float = 0.0
    """Bytes at the peak of the backward, beyond what it reads and the gradient that it makes, $b_i$."""
    output_in_backward: bool = False
    """True if its backward reads its output."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "output_in_backward":
                check_number("segment", item.name, getattr(self, item.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Segments in forward order, and the sizes of the last output and its gradient.

    Raises :class:`~steptime.errors.FieldError` where there is no segment, or a size is negative or not finite.

    >>> chain = Chain(segments=(Segment(forward_s=1, backward_s=2, input_bytes=10, saved_bytes=30),) * 3)
    >>> len(chain), chain.boundary_bytes, chain.base_s
    (3, (10, 10, 10, 0.0), 9)
    """

    segments: tuple[Segment, ...]
    output_bytes: float = 0.0
    """Bytes of the last output, $x_N$; nearly 0 where the last segment is the loss."""
    output_gradient_bytes: float = 0.0
    """Bytes of its gradient, $d_N$."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            raise FieldError("chain", "segments", "is empty", hint="give at least one segment")
        check_number("chain", "output_bytes", self.output_bytes)
        check_number("chain", "output_gradient_bytes", self.output_gradient_bytes)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def boundary_bytes(self) -> tuple[float, ...]:
        r"""$x_0 \dots x_N$."""
        return (*(one.input_bytes for one in self.segments), self.output_bytes)

    @property
    def gradient_bytes(self) -> tuple[float, ...]:
        r"""$d_0 \dots d_N$."""
        return (*(one.gradient_bytes for one in self.segments), self.output_gradient_bytes)

    @property
    def base_s(self) -> float:
        """Time of one forward and one backward of every segment: that of a schedule without recomputation."""
        return sum(one.forward_s + one.backward_s for one in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The numbers of a chain of N segments as arrays, in the symbols of this module."""

    x: Array
    """Boundary activations, $x_0 ... x_N$."""
    d: Array
    """Gradients of the boundaries, $d_0 ... d_N$."""
    saved: Array
    """Saved activations, $s_i$."""
    forward: Array
    """Transient of a forward without saving, $f_i$."""
    saving: Array
    """Transient of a saving forward, $g_i$."""
    backward: Array
    """Transient of the backward, $b_i$."""
    pins: Array
    """1 where the backward reads the output."""
    forward_s: Array
    backward_s: Array

    @property
    def backward_peak(self) -> Array:
        r"""Peak of the backward beyond its input: $s_i + d_{i+1} + d_i + b_i$, plus $x_{i+1}$ where it is read."""
        peak: Array = self.saved + self.d[1:] + self.d[:-1] + self.backward + self.pins * self.x[1:]
        return peak


def columns_of(chain: Chain) -> Columns:
    """The numbers of a chain, one array for each."""
    rows = [
        (one.saved_bytes, one.forward_transient_bytes, one.saving_transient_bytes, one.backward_transient_bytes,
         one.output_in_backward, one.forward_s, one.backward_s)
        for one in chain.segments
    ]  # fmt: skip
    saved, forward, saving, backward, pins, forward_s, backward_s = np.array(rows, float).T
    return Columns(
        x=np.array(chain.boundary_bytes, float), d=np.array(chain.gradient_bytes, float), saved=saved, forward=forward,
        saving=saving, backward=backward, pins=pins, forward_s=forward_s, backward_s=backward_s,
    )  # fmt: skip


class Kind(StrEnum):
    """The five actions; the value is the name in a printed schedule."""

    FORWARD = "Fn"
    """Forward; nothing is saved and the input is released."""
    CHECKPOINT = "Fck"
    """Forward; only the input is saved."""
    SAVE = "Fall"
    """Forward; everything that the backward needs is saved."""
    BACKWARD = "B"
    DISCARD = "D"
    """The boundary activation before the segment is released."""


class Action(NamedTuple):
    """One action on one segment, or for :attr:`Kind.DISCARD` on one boundary."""

    kind: Kind
    segment: int

    def __str__(self) -> str:
        return f"{self.kind}{self.segment}"


Schedule = tuple[Action, ...]


def described(schedule: Iterable[Action]) -> str:
    """A schedule in one line.

    >>> described(keep_all(2))
    'Fall0 Fall1 B1 B0'
    """
    return " ".join(map(str, schedule))


def dropped(segments: Sequence[int]) -> Schedule:
    """Forward runs of neighbouring segments that keep only the input of the first, to run again before their backward.

    >>> described(dropped((2, 3)))
    'Fck2 Fn3'
    """
    return tuple(Action(Kind.CHECKPOINT if i == segments[0] else Kind.FORWARD, i) for i in segments)


def keep_all(count: int) -> Schedule:
    """The schedule of ``count`` segments that saves everything and runs nothing twice."""
    forward = tuple(Action(Kind.SAVE, i) for i in range(count))
    return forward + tuple(Action(Kind.BACKWARD, i) for i in reversed(range(count)))


def check_number(where: str, field: str, value: object, *, positive: bool = False) -> None:
    """Raise ``FieldError`` unless a value is a finite number of at least 0, or above 0 if ``positive``."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        allowed = "a finite number above 0" if positive else "a finite number of at least 0"
        raise FieldError(where, field, f"is {value!r}; allowed is {allowed}")


def check_limit(limit_bytes: float) -> None:
    """Raise ``FieldError`` if a limit is negative or not a number; infinity is allowed."""
    if limit_bytes != math.inf:
        check_number("limit", "limit_bytes", limit_bytes)


def common_divisor(sizes: Sequence[float]) -> float:
    """Largest whole number of which every size is a multiple; 0 if there is none, or all are 0.

    >>> common_divisor([8, 12.0, 0]), common_divisor([0.5, 2])
    (4.0, 0.0)
    """
    if not all(float(size).is_integer() for size in sizes):
        return 0.0
    return float(reduce(math.gcd, map(int, sizes), 0))


class ScheduleError(UserError):
    """A schedule reads a tensor that is not in memory, or does not end with the gradient of the first input."""

    def __init__(self, position: int, action: Action | None, problem: str) -> None:
        self.position = position
        self.action = action
        super().__init__(f"schedule: action {position}{f' ({action})' if action else ''}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Cost of a schedule."""

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
        """True if the caller, or the saved state of the next or previous segment, holds the activation."""
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


class Costed(Protocol):
    """An object with a peak in bytes and a time in seconds."""

    @property
    def peak_bytes(self) -> float: ...  # noqa: D102
    @property
    def time_s(self) -> float: ...  # noqa: D102


Cost = TypeVar("Cost", bound=Costed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A result with a simulation."""

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
    """A schedule with its cost."""

    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No schedule fits in the limit."""

    limit_bytes: float
    least_bytes: float
    """The smallest feasible limit."""


def solution(chain: Chain, schedule: Schedule) -> Solution:
    """Simulate a schedule."""
    return Solution(schedule=schedule, run=simulate(chain, schedule))


def pareto(found: Iterable[Cost]) -> tuple[Cost, ...]:
    """Results that no other beats in both memory and time, least memory first."""
    out: list[Cost] = []
    for one in sorted(found, key=lambda one: (one.peak_bytes, one.time_s)):
        if not out or one.time_s < out[-1].time_s * (1 - 1e-12):
            out.append(one)
    return tuple(out)
