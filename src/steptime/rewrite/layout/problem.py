r"""The choice of layouts as an abstract problem, and the cost of a choice.

A vertex (an operator) has options; an option has a cost, gives each of its results one layout, and needs layouts of
values that it reads. A slot is one result with all its readers: a conversion of it into a layout is paid once.

$$\min_{x, y, r} \sum_{v,o} c_{vo} x_{vo} + \sum_{s,t} k_{st} y_{st} + \sum_n p_n r_n, \quad \sum_o x_{vo} = 1, \quad
\sum_{o \ni n} x_{vo} \le \sum_{a : g(a) \in A_n} x_{ua} + \sum_{t \in A_n} y_{st} + r_n$$

with $c$ the cost of an option, $k_{st}$ that of converting slot $s$ into layout $t$, $A_n$ the layouts that satisfy
need $n$, $g(a)$ the layout that option $a$ of the producer $u$ gives, and $p_n$ the cost of reading another layout.
Source: own; pairwise as in Jia et al., TASO, SOSP 2019, section 6, where each operator has a cost for each layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Need:
    """Requirement of an option on a value: allowed layouts, and the cost of reading another one."""

    slot: int
    allowed: frozenset[int]
    otherwise: float = math.inf


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an operator."""

    cost: float
    gives: tuple[int, ...]
    """Number of the layout of each result."""
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """One result: the vertex that makes it, its number there, and the cost of conversion into each layout."""

    vertex: int
    index: int
    convert: tuple[float, ...]
    """Cost of conversion into each layout; infinite if no copy can make it."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Vertices with options, and the slots between them; producers come before readers."""

    vertices: tuple[tuple[Option, ...], ...]
    slots: tuple[Slot, ...]

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Vertices that may read each slot."""
        found: list[dict[int, None]] = [{} for _ in self.slots]
        for vertex, options in enumerate(self.vertices):
            for option in options:
                for need in option.needs:
                    found[need.slot].setdefault(vertex)
        return tuple(tuple(each) for each in found)

    def slot_cost(self, slot: int, given: int, needs: Iterable[Need]) -> float:
        """Least cost to satisfy all needs on a slot, by conversions or by reading other layouts."""
        return self.conversions(slot, given, needs)[0]

    def conversions(self, slot: int, given: int, needs: Iterable[Need]) -> tuple[float, tuple[int, ...]]:
        """Least cost to satisfy all needs on a slot, and the layouts into which it is converted."""
        unmet = [need for need in needs if given not in need.allowed]
        if not unmet:
            return 0.0, ()
        prices = self.slots[slot].convert
        useful = {t for need in unmet for t in need.allowed if math.isfinite(prices[t])}
        best, chosen = math.inf, tuple[int, ...]()
        for count in range(len(useful) + 1):
            for targets in itertools.combinations(sorted(useful), count):
                cost = sum(prices[t] for t in targets)
                cost += sum(need.otherwise for need in unmet if need.allowed.isdisjoint(targets))
                if cost < best:
                    best, chosen = cost, targets
        return best, chosen

    def needs_of(self, choice: Sequence[int]) -> list[list[Need]]:
        """Needs on each slot under a choice."""
        found: list[list[Need]] = [[] for _ in self.slots]
        for options, chosen in zip(self.vertices, choice, strict=True):
            for need in options[chosen].needs:
                found[need.slot].append(need)
        return found

    def total(self, choice: Sequence[int]) -> float:
        """Cost of a choice with its best conversions."""
        out = sum(options[chosen].cost for options, chosen in zip(self.vertices, choice, strict=True))
        for number, (slot, needs) in enumerate(zip(self.slots, self.needs_of(choice), strict=True)):
            if needs:
                given = self.vertices[slot.vertex][choice[slot.vertex]].gives[slot.index]
                out += self.slot_cost(number, given, needs)
        return out
