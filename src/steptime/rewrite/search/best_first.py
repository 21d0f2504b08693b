"""Best-first search over the graphs that moves reach: the one search that all others are settings of."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Candidate, Grouped, Space, equal, operators, single

ALPHA: Final = 1.05
"""MetaFlow's: graphs that cost this many times the best are still followed."""
BUDGET: Final = 1000
"""TASO's: graphs that are followed."""
GROWTH: Final = 2.0
"""TASO's: graphs with more operators than this many times the first are dropped."""
LIMIT: Final = "limit of"
CLOSED: Final = "every reachable graph was priced"
OVER: Final = "nothing left below alpha times the best"


@dataclass(frozen=True, slots=True)
class _Way:
    """How a graph was reached: the moves, and how the graph was that they were made in."""

    moves: tuple[Move, ...]
    before: _Way | None

    @staticmethod
    def path(way: _Way | None) -> tuple[Move, ...]:
        """Moves in the order in which they were made."""
        out: list[tuple[Move, ...]] = []
        while way is not None:
            out.append(way.moves)
            way = way.before
        return tuple(move for moves in reversed(out) for move in moves)


@dataclass(kw_only=True)
class _Search:
    """Graphs that wait, cheapest first. One that waits is not made before its turn comes."""

    space: Space
    alpha: float
    largest: float
    grouped: Grouped
    best: Flow
    best_cost: float
    way: _Way | None = None
    followed: int = 0
    left_out: bool = False
    """A graph was dropped that moves reach."""
    _heap: list[tuple[float, int, Flow, _Way | None, Candidate | None]] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)
    _numbers: count[int] = field(default_factory=count)

    @property
    def limit(self) -> float:
        """Cost from which on graphs are not followed."""
        return inf if self.alpha == inf else self.alpha * self.best_cost

    def run(self, budget: int, most: float, control: Control, name: str) -> str:
        """Follow graphs until none waits, or the budget is spent; says why it ended."""
        heapq.heappush(self._heap, (self.best_cost, next(self._numbers), self.best, None, None))
        told = 0
        while self._heap:
            if why := control.why():
                return why
            estimate, _, flow, way, candidate = heapq.heappop(self._heap)
            if candidate is not None and estimate >= self.limit:
                return OVER
            if self.space.graphs >= most:
                return f"{self.space.graphs:,} graphs priced"
            if self.followed >= budget:
                return f"{LIMIT} {budget:,} graphs"
            self._follow(flow, way, candidate)
            control.saw(name, self.space.graphs - told, self.best_cost)
            told = self.space.graphs
        return OVER if self.left_out else CLOSED

    def _follow(self, flow: Flow, way: _Way | None, candidate: Candidate | None) -> None:
        if candidate is not None:
            made = self.space.made(flow, *candidate.matches)
            if made is None:
                return
            way = _Way(tuple(Move(row=candidate.row, flow=flow, match=each) for each in candidate.matches), way)
            flow = made
        key = Space.key(flow)
        if key in self._seen:
            return
        self._seen.add(key)
        cost = self.space.cost(flow)
        if cost < self.best_cost * (1 - EPSILON):
            self.best, self.best_cost, self.way = flow, cost, way
        if cost > self.limit * (1 + EPSILON) or operators(flow) > self.largest:
            self.left_out = True
            return
        self.followed += 1
        for each in self.space.candidates(flow, cost, self.grouped):
            if each.cost < self.limit:
                heapq.heappush(self._heap, (each.cost, next(self._numbers), flow, way, each))
            else:
                self.left_out = True


def best_first(
    problem: Problem,
    *,
    alpha: float = ALPHA,
    budget: int = BUDGET,
    growth: float = inf,
    most: float = inf,
    together: bool = False,
    control: Control | None = None,
    name: str = "best-first",
) -> Found:
    r"""Follow the cheapest graph that waits; graphs below $\alpha\,C^*$ wait, with $C^*$ the least cost so far.

    Args:
        problem: graph, moves, cost.
        alpha: 1 is greedy; above 1 a move may cost more for the sake of later ones; infinite: every graph waits.
        budget: graphs that are followed; the same graph counts once.
        growth: graphs with more operators than this many times the first are dropped.
        most: graphs that are priced.
        together: a move is made at all equal places at once.
        control: when to stop before, and whom to tell.
        name: of the search, for who watches.

    A graph that waits is priced by the operators that its move removes and adds, and made when its turn comes. Where
    no graph was dropped and none waits, all that the moves reach were priced, and the least cost is its own bound.
    Source: Jia et al., MetaFlow, SysML 2019, algorithm 1; growth: Jia et al., TASO, SOSP 2019, section 5.
    """
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    search = _Search(
        space=space,
        alpha=alpha,
        largest=growth * max(operators(flow), 1),
        grouped=equal if together else single,
        best=flow,
        best_cost=space.cost(flow),
    )
    why = search.run(budget, most, control or Control(), name)
    return Found(
        flow=search.best,
        cost=search.best_cost,
        bound=search.best_cost if why == CLOSED and not together else None,
        graphs=space.graphs,
        stop=why,
        path=_Way.path(search.way),
    )
