r"""Contiguous stages and their sub-meshes by dynamic programming, with a bound.

A stage has units $i$ to $j - 1$ of a chain on a sub-mesh of $n$ devices of one kind. It adds $t$ seconds to the way of
a micro-batch through all stages, and $u$ seconds to the step if it is the slowest. The least

$$J = \sum_s t_s + \max_s u_s$$

is the least $S(U) + U$ over all $U$, where $S(U)$ is the least sum of stages whose $u \le U$. For $s$ stages,

$$F_s(i, d) = \min_{j > i,\, n \le d} t_s(i, j, n) + F_{s-1}(j, d - n), \qquad F_0(K, d) = 0$$

with $d$ the remaining devices of each kind. $S$ falls with $U$, so that $J \ge S(U_b) + U_a$ between two tried values
$U_a < U_b$: ranges whose bound is no better than the best known total are skipped.

Source: Zheng et al., "Alpa", arXiv 2201.12023, section 5.2, which tries every value; here there are also several kinds
of device, and costs depend on the place of a stage from the end (its micro-batches in flight).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final, NamedTuple

import numpy as np

from steptime.num import Array

GAP: Final = 1e-3
"""Share above the bound at which the search stops."""


ROWS: Final = 8
"""Number of first units whose stages are evaluated at once, so that the sums stay in the CPU cache."""


class SpanCosts(NamedTuple):
    """Costs of stages at one place from the end, [choice, first unit, unit after the last]; infinite: impossible."""

    each_s: Array
    """Seconds that a stage adds to the way of a micro-batch."""
    busy_s: Array
    """Seconds that a stage adds to the step if it is the slowest."""


class Stage(NamedTuple):
    """A run of units with one choice."""

    first: int
    end: int
    """Unit after the last."""
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The best stages."""

    stages: tuple[Stage, ...]
    total_s: float
    """Sum of all stages plus the slowest."""
    bound_s: float
    """Lower bound of ``total_s`` for all stages of these choices."""
    limits: int
    """Number of limits of the slowest stage that were tried."""


def split(
    costs: Sequence[SpanCosts],
    *,
    kind: Sequence[int],
    devices: Sequence[int],
    available: Sequence[int],
    counts: Iterable[int] | None = None,
    gap: float = GAP,
) -> Split | None:
    """The best stages of a chain; None: no stages are possible.

    Args:
        costs: costs by place from the end, one for each possible stage.
        kind: kind of devices of each choice, from 0.
        devices: devices of each choice.
        available: devices of each kind.
        counts: numbers of stages that are allowed; None: all.
        gap: share above the bound at which the search stops.

    >>> each = np.array([[[inf, 1.0, 3.0], [inf, inf, 2.0]]])          # units of 1 s and 2 s, one choice
    >>> found = split([SpanCosts(each, 3 * each)] * 2, kind=[0], devices=[1], available=[2], gap=0.0)
    >>> found.stages, found.total_s                                    # 1 + 2 + 3 x 2, not 3 + 3 x 3
    ((Stage(first=0, end=1, choice=0), Stage(first=1, end=2, choice=0)), 9.0)
    """
    search = _Search(costs, np.asarray(kind), np.asarray(devices), tuple(available))
    return search.best(tuple(range(1, len(costs) + 1) if counts is None else counts), gap)


@dataclass
class _Search:
    costs: Sequence[SpanCosts]
    kind: Array
    devices: Array
    available: tuple[int, ...]

    @property
    def units(self) -> int:
        """Length of the chain."""
        return int(self.costs[0].each_s.shape[1])

    @cached_property
    def grain(self) -> tuple[int, ...]:
        """Greatest common divisor of the choices' devices, for each kind."""
        return tuple(int(np.gcd.reduce(self.devices[self.kind == k])) or 1 for k in range(len(self.available)))

    @cached_property
    def groups(self) -> list[tuple[tuple[int, ...], Array]]:
        """Grains of each kind, with the choices that take them."""
        keys: dict[tuple[int, ...], list[int]] = {}
        for choice, (kind, count) in enumerate(zip(self.kind.tolist(), self.devices.tolist(), strict=True)):
            taken = [0] * len(self.available)
            taken[kind] = count // self.grain[kind]
            keys.setdefault(tuple(taken), []).append(choice)
        room = [have // grain for have, grain in zip(self.available, self.grain, strict=True)]
        return [
            (taken, np.array(choices))
            for taken, choices in keys.items()
            if all(a <= b for a, b in zip(taken, room, strict=True))
        ]

    def best(self, counts: tuple[int, ...], gap: float) -> Split | None:
        """The best split, from a search over ranges of limits that takes the one with the least bound first."""
        values = np.unique(np.concatenate([each.busy_s[np.isfinite(each.busy_s)] for each in self.distinct]))
        if not len(values):
            return None
        last = len(values) - 1
        tables = self.tables(values[last])
        least, best, bound_s, tried = self.sum_s(tables, counts), inf, inf, 1
        if least == inf:
            return None
        found = self.walked(tables, values[last], counts)
        best = self.total_s(found)
        # A range is (low, high], and high was tried: its sum plus the value after low bounds all limits in it.
        ranges = [(least + values[0], -1, last, least)]
        while ranges:
            bound, low, high, least = heapq.heappop(ranges)
            bound_s = min(bound_s, bound)
            if bound >= best * (1 - gap):
                break
            bound_s = inf
            if high - low <= 1:
                bound_s = bound
                break
            middle = (low + high) // 2
            tables = self.tables(values[middle])
            sum_s, tried = self.sum_s(tables, counts), tried + 1
            if sum_s < inf:
                here = self.walked(tables, values[middle], counts)
                if self.total_s(here) < best:
                    found, best = here, self.total_s(here)
                heapq.heappush(ranges, (sum_s + values[low + 1], low, middle, sum_s))
            heapq.heappush(ranges, (least + values[middle + 1], middle, high, least))
        return Split(stages=found, total_s=best, bound_s=min(bound_s, best), limits=tried)

    @cached_property
    def distinct(self) -> list[SpanCosts]:
        """The distinct costs among all places."""
        return list({id(each): each for each in self.costs}.values())

    def total_s(self, stages: Sequence[Stage]) -> float:
        """Sum of all stages plus the slowest."""
        at = [(self.costs[len(stages) - 1 - n], (s.choice, s.first, s.end)) for n, s in enumerate(stages)]
        return float(sum(c.each_s[place] for c, place in at) + max(c.busy_s[place] for c, place in at))

    def tables(self, limit_s: float) -> list[Array]:
        """Least seconds from each unit to the end, one table per number of stages: [unit, grains of each kind]."""
        rest = np.full((self.units + 1, *(h // g + 1 for h, g in zip(self.available, self.grain, strict=True))), inf)
        rest[-1] = 0.0
        out, made = [rest], None
        for number, costs in enumerate(self.costs):
            if number == 0 or costs is not self.costs[number - 1]:
                made = [self.least(costs, choices, limit_s) for _, choices in self.groups]
            out.append(self.before(made or [], out[-1]))
        return out

    @staticmethod
    def least(costs: SpanCosts, choices: Array, limit_s: float) -> Array:
        """Least seconds of each span over the choices of one group."""
        out: Array = np.where(costs.busy_s[choices] <= limit_s, costs.each_s[choices], inf).min(axis=0)
        return out

    def before(self, made: Sequence[Array], rest: Array) -> Array:
        """The table with one more stage."""
        out = np.full(rest.shape, inf)
        deeper = (1,) * (rest.ndim - 1)
        for (taken, _), each_s in zip(self.groups, made, strict=True):
            left = rest[(slice(None), *(slice(0, n - t) for n, t in zip(rest.shape[1:], taken, strict=True)))]
            into = out[(slice(None), *(slice(t, None) for t in taken))]
            for first in range(0, self.units, ROWS):
                rows = each_s[first : first + ROWS]
                ends = np.flatnonzero(np.isfinite(rows).any(axis=0))
                if len(ends):
                    least = (rows[:, ends].reshape(len(rows), -1, *deeper) + left[ends]).min(axis=1)
                    place = slice(first, first + len(rows))
                    np.minimum(into[place], least, out=into[place])
        return out

    def sum_s(self, tables: Sequence[Array], counts: Iterable[int]) -> float:
        """The least sum of stages."""
        return min((float(tables[count][0].flat[-1]) for count in counts if count < len(tables)), default=inf)

    def walked(self, tables: Sequence[Array], limit_s: float, counts: Iterable[int]) -> tuple[Stage, ...]:
        """The stages with the least sum."""
        count = min((n for n in counts if n < len(tables)), key=lambda n: float(tables[n][0].flat[-1]))
        place, left, out = 0, tuple(n - 1 for n in tables[0].shape[1:]), []
        for number in range(count, 0, -1):
            costs, options = self.costs[number - 1], []
            for taken, choices in self.groups:
                after = tuple(have - need for have, need in zip(left, taken, strict=True))
                if min(after) >= 0:
                    each = np.where(costs.busy_s[choices, place] <= limit_s, costs.each_s[choices, place], inf)
                    total = each + tables[number - 1][(slice(None), *after)]
                    at = np.unravel_index(int(total.argmin()), total.shape)
                    options.append((float(total[at]), int(choices[at[0]]), int(at[1]), after))
            _, choice, end, left = min(options)
            out.append(Stage(place, end, choice))
            place = end
        return tuple(out)
