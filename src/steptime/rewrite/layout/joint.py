"""Substitutions and layouts together: best-first over graphs, each at the cost that it has in its best layouts.

What it is held against: substitutions alone (every value as recorded), layouts alone, and one after the other in both
orders. Source of the comparison: Jia et al., TASO, SOSP 2019, section 6 (joint optimisation).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steptime.captured.graph import Value
from steptime.captured.graph.program import SOURCES
from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.layout.laid import with_layouts
from steptime.rewrite.layout.model import layouts_under
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match, Pass, Scene, shape_text
from steptime.rewrite.search.problem import Found, Problem

ALPHA: Final = 1.05
"""Graphs that cost more than this times the best are not followed: MetaFlow's value."""
BUDGET: Final = 1000
"""Graphs that are priced at most: TASO's value."""
OWNED: Final = ("view elimination",)
"""Passes that choose layouts: a search over both leaves them to the layouts."""


def _copies(scene: Scene) -> Iterator[Match]:
    for node in scene.each("clone"):
        if node.inputs[0].node.op not in SOURCES:
            yield Match(root=node, replace={node.value(): node.inputs[0]}, what=shape_text(node.outputs[0]))


COPIES: Final = Pass(
    name="copy left out",
    matches="a copy that changes nothing but the layout",
    condition="layouts are chosen afterwards, and put in the copies that are needed",
    makes="what was copied, so that patterns see through it",
    source="Jia et al., TASO, SOSP 2019, section 6",
    find=_copies,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The cheapest graph that was met, before layouts are put in."""

    flow: Flow
    cost: float
    graphs: int
    whole: bool
    """Every graph that the moves reach was priced."""


def best_first(
    problem: Problem,
    cost: Callable[[Flow], float],
    moves: Sequence[Pass],
    *,
    alpha: float = ALPHA,
    budget: int = BUDGET,
) -> Searched:
    """Graphs in the order of their cost, each changed by every group of equal matches.

    Args:
        problem: the graph to begin with.
        cost: what a graph costs.
        moves: rewrites.
        alpha: graphs above this times the best cost are not followed; infinite: all are.
        budget: most graphs that are priced.
    """
    best, best_cost = problem.flow, cost(problem.flow)
    seen = {_name(best)}
    ties = itertools.count()
    waiting = [(best_cost, next(ties), best)]
    graphs, whole = 1, True
    while waiting and graphs < budget:
        at, _, flow = heapq.heappop(waiting)
        if at > alpha * best_cost:
            whole = False
            break
        for made in _changed(problem, flow, moves):
            if _name(made) in seen or graphs >= budget:
                continue
            seen.add(_name(made))
            graphs += 1
            price = cost(made)
            if price < best_cost:
                best, best_cost = made, price
            if price <= alpha * best_cost:
                heapq.heappush(waiting, (price, next(ties), made))
            else:
                whole = False
    return Searched(flow=best, cost=best_cost, graphs=graphs, whole=whole and not waiting)


def _name(flow: Flow) -> tuple[tuple[Value, ...], tuple[object, ...]]:
    return flow.outputs, flow.kept


def _changed(problem: Problem, flow: Flow, moves: Sequence[Pass]) -> Iterator[Flow]:
    """Graphs one move away: all equal matches of a pass made together, and where that is refused the first."""
    scene = problem.scene(flow)
    for move in moves:
        groups: dict[str, list[Match]] = defaultdict(list)
        for match in move.find(scene):
            groups[match.what].append(match)
        for members in groups.values():
            for some in (members, members[:1]) if len(members) > 1 else (members,):
                replacements: dict[Value, Value] = {}
                for match in some:
                    replacements |= match.replace
                try:
                    yield substituted(flow, replacements, problem.folds.definitions)
                except RefusedError:
                    continue
                break


def joint(problem: Problem, *, alpha: float = ALPHA, budget: int = BUDGET) -> Found:
    """The cheapest graph over substitutions and layouts together.

    Args:
        problem: graph, moves and cost.
        alpha: graphs above this times the best cost are not followed.
        budget: most graphs that are priced.

    Returns:
        The graph in its layouts; its bound is its cost where every graph that the moves reach was priced.
    """
    owner = layouts_under(problem.cost)
    found = best_first(problem, owner.cost, _moves(problem, COPIES), alpha=alpha, budget=budget)
    return _found(problem, found)


def _moves(problem: Problem, *more: Pass) -> tuple[Pass, ...]:
    return (*(move for move in problem.moves if move.name not in OWNED), *more)


def _found(problem: Problem, found: Searched) -> Found:
    laid = with_layouts(found.flow, problem.cost)
    stop = (
        "every graph was priced" if found.whole else "no graph within alpha of the best is left, or the budget is spent"
    )
    return Found(
        flow=laid.flow, cost=laid.cost, bound=laid.bound if found.whole else 0.0, graphs=found.graphs, stop=stop
    )


def substitutions_only(problem: Problem, *, alpha: float = ALPHA, budget: int = BUDGET) -> Found:
    """The cheapest graph with every value as it is recorded."""
    owner = layouts_under(problem.cost)

    def cost(flow: Flow) -> float:
        return owner.cost(flow, fixed=True)

    found = best_first(problem, cost, _moves(problem), alpha=alpha, budget=budget)
    return Found(
        flow=found.flow,
        cost=found.cost,
        bound=found.cost if found.whole else 0.0,
        graphs=found.graphs,
        stop="layouts as recorded",
    )


def layouts_only(problem: Problem) -> Found:
    """The graph as it is in its best layouts."""
    laid = with_layouts(problem.flow, problem.cost)
    return Found(flow=laid.flow, cost=laid.cost, bound=laid.bound, graphs=1, stop="no substitutions")


def compared(problem: Problem, *, alpha: float = ALPHA, budget: int = BUDGET) -> Mapping[str, Found]:
    """Either alone, one after the other in both orders, and both together.

    Args:
        problem: graph, moves and cost.
        alpha: as for :func:`joint`.
        budget: as for :func:`joint`.
    """
    given = layouts_under(problem.cost).cost(problem.flow, fixed=True)
    alone = substitutions_only(problem, alpha=alpha, budget=budget)
    laid = layouts_only(problem)
    then_laid = layouts_only(replace(problem, flow=alone.flow))
    then_substituted = substitutions_only(replace(problem, flow=laid.flow), alpha=alpha, budget=budget)
    return {
        "as given": Found(flow=problem.flow, cost=given, bound=-math.inf, graphs=1, stop="nothing was changed"),
        "substitutions only": alone,
        "layouts only": laid,
        "substitutions, then layouts": then_laid,
        "layouts, then substitutions": then_substituted,
        "joint": joint(problem, alpha=alpha, budget=budget),
    }
