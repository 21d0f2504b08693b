"""Best-first search over the graphs that moves reach, on which all other searches are built."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Candidate, Grouped, Space, group_equivalent, operators, single

ALPHA: Final = 1.05
"""Default factor of MetaFlow: graphs that cost up to this multiple of the best are followed."""
BUDGET: Final = 1000
"""Default number of graphs that are followed, from TASO."""
GROWTH: Final = 2.0
"""Factor of TASO: graphs with more operators than this multiple of the first are dropped."""
LIMIT: Final = "limit of"
CLOSED: Final = "every reachable graph was priced"
OVER: Final = "nothing left below alpha times the best"


@dataclass(frozen=True, slots=True)
class _Way:
    """The way to a graph: the last moves, and the way to the graph before them."""

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
    """Queue of graphs, the cheapest first; a graph is built only when it is taken from the queue."""

    space: Space
    alpha: float
    largest: float
    grouped: Grouped
    best: Flow
    best_cost: float
    way: _Way | None = None
    followed: int = 0
    left_out: bool = False
    """A reachable graph was dropped."""
    _heap: list[tuple[float, int, Flow, _Way | None, Candidate | None]] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)
    _numbers: count[int] = field(default_factory=count)

    @property
    def limit(self) -> float:
        """Cost above which graphs are not followed."""
        return inf if self.alpha == inf else self.alpha * self.best_cost

    def run(self, budget: int, most: float, control: Control, name: str) -> str:
        """Follow graphs until the queue is empty or the budget is spent; returns the reason of the end."""
        heapq.heappush(self._heap, (self.best_cost, next(self._numbers), self.best, None, None))
        reported = 0
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
            control.saw(name, self.space.graphs - reported, self.best_cost)
            reported = self.space.graphs
        return OVER if self.left_out else CLOSED

    def _follow(self, flow: Flow, way: _Way | None, chosen: Candidate | None) -> None:
        if chosen is not None:
            made = self.space.applied(flow, *chosen.matches)
            if made is None:
                return
            way = _Way(tuple(Move(rewrite_pass=chosen.rewrite_pass, flow=flow, match=m) for m in chosen.matches), way)
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
    r"""Follow the cheapest graph in the queue, which has graphs below $\alpha\,C^*$ with $C^*$ the least cost so far.

    Args:
        problem: graph, moves, cost.
        alpha: 1 is greedy; above 1 a move may cost more if later ones gain; infinite: every graph is queued.
        budget: most graphs that are followed; equal graphs count once.
        growth: graphs with more operators than this multiple of the first are dropped.
        most: most graphs that are priced.
        together: make a move at all equal places at once.
        control: early stop and progress report.
        name: name of the search in the progress report.

    A queued graph is priced by the operators that its move removes and adds, and built when it is taken. If no graph
    was dropped and the queue is empty, all reachable graphs were priced, and the least cost is its own bound.
    Source: Jia et al., MetaFlow, SysML 2019, algorithm 1; growth: Jia et al., TASO, SOSP 2019, section 5.
    """
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    search = _Search(
        space=space,
        alpha=alpha,
        largest=growth * max(operators(flow), 1),
        grouped=group_equivalent if together else single,
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
