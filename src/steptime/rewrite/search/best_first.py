"""Best-first search over graphs, and the two published searches that are made of it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Space, operators

ALPHA: Final = 1.05
"""MetaFlow's: graphs that cost this many times the best are still followed."""
BUDGET: Final = 1000
"""TASO's: graphs that are followed."""
GROWTH: Final = 2.0
"""TASO's: graphs with more operators than this many times the first are dropped."""

LayoutCost = Callable[[Flow], float]
"""Cost of a graph with the best layouts of its tensors."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a graph was reached: the move, and how the graph was that it was made in."""

    move: Move
    before: Way | None


def path_of(way: Way | None) -> tuple[Move, ...]:
    """Moves in the order in which they were made."""
    out: list[Move] = []
    while way is not None:
        out.append(way.move)
        way = way.before
    return tuple(reversed(out))


@dataclass(kw_only=True)
class _Search:
    """Graphs that wait, cheapest first. One that waits is not made before its turn comes."""

    space: Space
    price: Callable[[Flow], float]
    alpha: float
    growth: float
    best: Flow
    best_cost: float
    most: float = float("inf")
    """Graphs that are priced."""
    way: Way | None = None
    popped: int = 0
    told: int = 0
    """Graphs that were reported."""
    _heap: list[tuple[float, int, Flow, Way | None, Move | None]] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)
    _numbers: count[int] = field(default_factory=count)
    _most: float = 0.0

    def start(self, flow: Flow) -> None:
        """Put the first graph in."""
        self._most = self.growth * max(operators(flow), 1)
        heapq.heappush(self._heap, (self.best_cost, next(self._numbers), flow, None, None))

    def run(self, budget: int, control: Control, name: str) -> str:
        """Follow graphs until none waits, or the budget is spent; says why it ended."""
        while self._heap:
            if why := control.why():
                return why
            estimate, _, flow, way, move = heapq.heappop(self._heap)
            if estimate >= self.alpha * self.best_cost and move is not None:
                return "nothing left below alpha times the best"
            if self.space.graphs >= self.most:
                return f"{self.space.graphs:,} graphs priced"
            if self.popped >= budget:
                return f"budget of {budget:,} graphs"
            self._follow(flow, way, move)
            control.saw(name, self.space.graphs - self.told, self.best_cost)
            self.told = self.space.graphs
        return "nothing left below alpha times the best"

    def _follow(self, flow: Flow, way: Way | None, move: Move | None) -> None:
        if move is not None:
            made = self.space.made(flow, move.match)
            if made is None:
                return
            flow, way = made, Way(move, way)
        key = Space.key(flow)
        if key in self._seen:
            return
        self._seen.add(key)
        cost = self.price(flow)
        if cost < self.best_cost * (1 - EPSILON):
            self.best, self.best_cost, self.way = flow, cost, way
        if cost > self.alpha * self.best_cost * (1 + EPSILON) or operators(flow) > self._most:
            return
        self.popped += 1
        for each in self.space.candidates(flow, cost):
            if each.cost < self.alpha * self.best_cost:
                move = Move(row=each.row, flow=flow, match=each.match)
                heapq.heappush(self._heap, (each.cost, next(self._numbers), flow, way, move))


def best_first(
    problem: Problem,
    *,
    alpha: float = ALPHA,
    budget: int = BUDGET,
    growth: float = float("inf"),
    most: float = float("inf"),
    layout_cost: LayoutCost | None = None,
    control: Control | None = None,
    name: str = "best-first",
) -> Found:
    r"""Follow the cheapest graph that waits; graphs below $\alpha\,C^*$ wait, with $C^*$ the least cost so far.

    Args:
        problem: graph, moves, cost.
        alpha: 1 is greedy; above 1 a move may cost more for the sake of later ones.
        budget: graphs that are followed; the same graph counts once.
        growth: graphs with more operators than this many times the first are dropped.
        most: graphs that are priced.
        layout_cost: cost of a graph with the best layouts; it then decides, instead of the model's.
        control: when to stop before, and whom to tell.
        name: of the search, for who watches.

    A graph that waits is priced by the operators that its move removes and adds, and made when its turn comes. Source:
    Jia et al., MetaFlow, SysML 2019, algorithm 1.
    """
    control = control or Control()
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    price = layout_cost or space.cost
    search = _Search(space=space, price=price, alpha=alpha, growth=growth, most=most, best=flow, best_cost=price(flow))
    search.start(flow)
    why = search.run(budget, control, name)
    return Found(
        flow=search.best, cost=search.best_cost, bound=0.0, graphs=space.graphs, stop=why, path=path_of(search.way)
    )


def taso(
    problem: Problem,
    alpha: float = ALPHA,
    budget: int = BUDGET,
    layout_cost: LayoutCost | None = None,
    control: Control | None = None,
) -> Found:
    """Best-first over whole graphs; those above twice the first one's operators are dropped.

    Args:
        problem: graph, moves, cost.
        alpha: TASO's own default is 1; its paper and MetaFlow relax it to 1.05.
        budget: graphs that are followed.
        layout_cost: cost of a graph with the best layouts of its tensors, decided together with the moves.
        control: when to stop before, and whom to tell.

    Source: Jia et al., TASO, SOSP 2019, section 5.
    """
    return best_first(
        problem, alpha=alpha, budget=budget, growth=GROWTH, layout_cost=layout_cost, control=control, name="TASO"
    )
