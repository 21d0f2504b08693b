"""The search that we recommend: passes first, equal blocks once, each part by what suits its size, then the seams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.best_first import ALPHA, BUDGET, best_first
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.exhaustive import exhaustive
from steptime.rewrite.search.parted import Inner, Parted, metaflow, seams
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Space, operators
from steptime.rewrite.search.split import MOST, blocks, movable, parts, spans

SMALL: Final = 20
"""Operators up to which all reachable graphs are tried."""
WHOLE_GRAPHS: Final = 4_000
PART_GRAPHS: Final = 256
"""Graphs that are made before the set of a small graph, or of a part, counts as too large to close."""
PART_BUDGET: Final = 128
"""Graphs that are followed in a part by best-first."""
WHOLE: Final = 4 * MOST
"""Operators up to which the whole graph is searched best-first too, as TASO does; greedily where it is larger."""
GREEDY: Final = 2_500
"""Graphs that are priced then."""
ROUNDS: Final = 3
"""Times that parts and seams are searched again after a change."""

Way = tuple[Flow, tuple[Move, ...]]


def recommended(
    problem: Problem,
    alpha: float = ALPHA,
    budget: int = BUDGET,
    control: Control | None = None,
    small: int = SMALL,
) -> Found:
    """Passes that pay, then parts of the graph: equal ones once, small ones by all their graphs, others best-first.

    Args:
        problem: graph, moves, cost.
        alpha: graphs below this many times the best are followed.
        budget: graphs that are followed by best-first over the whole graph, where it is small.
        control: when to stop before, and whom to tell.
        small: operators up to which all graphs of the whole graph are tried.

    The graph is searched from itself and from what the passes make of it, with fused chains as moves and with fusing
    last; the cheapest is kept, and the parts of MetaFlow's split are searched as well. It ends with a descent over the
    whole graph.
    """
    control = control or Control()
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    if operators(flow) <= small:
        found = exhaustive(problem, WHOLE_GRAPHS, control)
        if found.bound:
            return found
    ways = [(flow, ()), space.descended(flow)]
    graphs, kinds = 0, 0
    fusing = tuple(row for row in problem.moves if row.fuses)
    plain = replace(problem, moves=tuple(row for row in problem.moves if not row.fuses))
    for chosen in (problem, plain) if fusing else (problem,):
        parted = Parted(problem=chosen, control=control)
        ways += [_finished(space, _improved(parted, way, alpha)) for way in ways[:2]]
        graphs, kinds = graphs + parted.graphs, kinds + parted.kinds
    if not control.why():
        other = metaflow(problem, alpha, budget, control)
        graphs += other.graphs
        ways.append(_finished(space, (other.flow, other.path)))
    if not control.why():
        wide, most = (alpha, float("inf")) if operators(flow) <= WHOLE else (1.0, GREEDY)
        other = best_first(problem, alpha=wide, budget=budget, most=most, control=control, name="whole graph")
        graphs += other.graphs
        ways.append(_finished(space, (other.flow, other.path)))
    best, path = min(ways, key=lambda way: space.cost(way[0]))
    return Found(
        flow=best,
        cost=space.cost(best),
        bound=0.0,
        graphs=graphs + space.graphs,
        stop=control.why() or f"{kinds} kinds of parts searched",
        path=path,
    )


def _finished(space: Space, way: Way) -> Way:
    """A graph after a descent over all of it."""
    flow, more = space.descended(way[0])
    return flow, (*way[1], *more)


def _improved(parted: Parted, way: Way, alpha: float) -> Way:
    """A graph after its parts and then its seams were searched, until neither gains."""
    flow, path = way
    space = Space(problem=parted.problem)
    inner = _inner(parted, alpha)
    for _ in range(ROUNDS):
        cost = space.cost(flow)
        members = blocks(flow, movable(flow), MOST)
        flow, more = parted.each(flow, members, inner)
        path += more
        flow, more = parted.each(flow, seams(flow, blocks(flow, movable(flow), MOST)), inner)
        path += more
        if space.cost(flow) >= cost * (1 - EPSILON) or parted.control.why():
            break
    return flow, path


def _inner(parted: Parted, alpha: float) -> Inner:
    """Search of one part."""

    def inner(part: Problem) -> Found:
        space = Space(problem=part)
        flow = space.tidied(part.flow)
        if len(movable(flow)) > MOST * 2:
            return _split(part, flow)
        found = []
        if operators(flow) <= SMALL:
            found.append(exhaustive(part, PART_GRAPHS, parted.control))
            if found[0].bound:
                return found[0]
        for name in PART_SEARCHES:
            found.append(PART_SEARCHES[name](part, alpha, parted.control))
        flow, path = space.descended(flow)
        found.append(Found(flow=flow, cost=space.cost(flow), bound=0.0, graphs=space.graphs, stop="", path=path))
        best = min(found, key=lambda each: each.cost)
        return replace(best, graphs=sum(each.graphs for each in found))

    def _split(part: Problem, flow: Flow) -> Found:
        """A part that is too large, in parts of its own."""
        smaller = Parted(problem=part, control=parted.control)
        made, path = smaller.each(flow, parts(flow, movable(flow), spans(part, flow), MOST), inner)
        made, more = smaller.each(made, seams(made, parts(made, movable(made), {}, MOST)), inner)
        cost = part.cost.guided(made)
        return Found(flow=made, cost=cost, bound=0.0, graphs=smaller.graphs, stop="", path=(*path, *more))

    return inner


def _relaxed(part: Problem, alpha: float, control: Control) -> Found:
    return best_first(part, alpha=alpha, budget=PART_BUDGET, control=control, name="parts")


PartSearch = Callable[[Problem, float, Control], Found]

PART_SEARCHES: Final[dict[str, PartSearch]] = {"best-first": _relaxed}
"""Searches of parts that are too large for all their graphs; the cheapest result counts."""
