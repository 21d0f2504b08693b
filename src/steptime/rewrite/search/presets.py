"""Named searches: starts, parts and limits of the best-first search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.best_first import ALPHA, BUDGET, CLOSED, GROWTH, best_first
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.parted import Inner, Parted, seams
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Space, operators
from steptime.rewrite.search.split import MOST, blocks, movable, parts, spans

SMALL: Final = 20
"""Largest number of operators of a graph of which all reachable graphs are tried."""
MOST_GRAPHS: Final = 10_000
"""Largest number of graphs that an exhaustive search follows."""
WHOLE_GRAPHS: Final = 4_000
PART_GRAPHS: Final = 256
"""Limit of graphs of a part, as ``WHOLE_GRAPHS`` of a small graph; beyond, its exhaustive search is given up."""
BLOCKS: Final = (MOST, 8)
"""Largest number of operators of a block that does not repeat; both limits are tried."""
PART_BUDGET: Final = 128
"""Largest number of graphs that are followed in a larger part."""
WHOLE: Final = 4 * MOST
"""Limit of operators of a graph also searched best-first as a whole, as in TASO; a larger one greedily."""
STRIDES: Final = {"alpha": inf, "budget": 64, "together": True}
"""Options of a search of few graphs without a cost limit, which makes moves at all equal places at once."""
GREEDY: Final = 6_000
"""Largest number of graphs that the greedy search of a large graph prices."""
ROUNDS: Final = 3
"""Largest number of rounds over parts and seams."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One search: the problem, its limits, and its stop conditions."""

    problem: Problem
    alpha: float = ALPHA
    budget: int = BUDGET
    control: Control = field(default_factory=Control)
    small: int = SMALL
    part: int = MOST
    """Largest number of operators of a part."""

    def whole(self, **options: float) -> Found:
        """Best-first search of the whole graph."""
        given = {"alpha": self.alpha, "budget": self.budget} | options
        return best_first(self.problem, control=self.control, name="whole graph", **given)  # type: ignore[arg-type]


def exhaustive(run: Run) -> Found:
    """Search of all reachable graphs, for up to some 20 operators; the least cost is proved if they are few."""
    return run.whole(alpha=inf, budget=MOST_GRAPHS)


def cuts(run: Run) -> Found:
    """Best-first search of parts between minimum cuts through few matches, then of the seams.

    Source: Jia et al., MetaFlow, SysML 2019, sections 4 and 5.
    """
    problem = run.problem
    flow = Space(problem=problem).tidied(problem.flow)
    if operators(flow) <= run.part:
        return run.whole()
    parted = Parted(problem=problem, control=run.control)

    def inner(part: Problem) -> Found:
        return replace(run, problem=part).whole()

    flow, path = _cut(parted, flow, inner, run.part)
    stop = run.control.why() or f"{parted.kinds} kinds of parts searched, each up to {run.budget:,} graphs"
    return _found(problem, flow, path, parted.graphs, stop)


def _cut(parted: Parted, flow: Flow, inner: Inner, most: int = MOST) -> tuple[Flow, tuple[Move, ...]]:
    """Search the parts between minimum cuts, then the seams."""
    flow, path = parted.each(flow, parts(flow, movable(flow), spans(parted.problem, flow), most), inner)
    flow, more = parted.each(flow, seams(flow, parts(flow, movable(flow), {}, most)), inner)
    return flow, (*path, *more)


def _found(problem: Problem, flow: Flow, path: tuple[Move, ...], graphs: int, stop: str) -> Found:
    return Found(flow=flow, cost=problem.cost.guided(flow), bound=None, graphs=graphs, stop=stop, path=path)


def equal_blocks(run: Run, most: int = MOST) -> Found:
    """Search equal blocks once, then their seams, until neither gains; parts that are too large are cut again."""
    parted = Parted(problem=run.problem, control=run.control)
    space, flow, path = Space(problem=run.problem), run.problem.flow, tuple[Move, ...]()

    def inner(part: Problem) -> Found:
        space = Space(problem=part)
        start = space.tidied(part.flow)
        if len(movable(start)) > MOST * 2:
            smaller = Parted(problem=part, control=run.control)
            return _found(part, *_cut(smaller, start, inner), smaller.graphs, "")
        far, budget = (inf, PART_GRAPHS) if operators(start) <= SMALL else (run.alpha, PART_BUDGET)
        best = best_first(part, alpha=far, budget=budget, control=run.control, name="parts")
        if best.bound is not None:
            return best
        made, steps = space.descended(start)
        graphs = best.graphs + space.graphs
        return min(best, _found(part, made, steps, graphs, ""), key=lambda each: each.cost)

    for _ in range(ROUNDS):
        cost = space.cost(flow)
        flow, more = parted.each(flow, blocks(flow, movable(flow), most), inner)
        flow, seam = parted.each(flow, seams(flow, blocks(flow, movable(flow), most)), inner)
        path = (*path, *more, *seam)
        if space.cost(flow) >= cost * (1 - EPSILON) or run.control.why():
            break
    return _found(run.problem, flow, path, parted.graphs, f"{parted.kinds} kinds of parts searched")


def recommended(run: Run) -> Found:
    """The best of several searches: from the graph and from its descent, by blocks, by cuts, and as a whole."""
    problem, control = run.problem, run.control
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    found = []
    if operators(flow) <= run.small:
        found.append(run.whole(alpha=inf, budget=WHOLE_GRAPHS))
        if found[0].stop == CLOSED:
            return found[0]
    done, path = space.descended(flow)
    starts = (_found(problem, flow, (), 0, ""), _found(problem, done, path, 0, ""))
    found += [*starts, *_ways(run, starts)]
    best = min(found, key=lambda each: each.cost)
    graphs = space.graphs + sum(each.graphs for each in found)
    return replace(best, bound=None, graphs=graphs, stop=control.why() or f"the best of {len(found)} ways")


def _ways(run: Run, starts: tuple[Found, ...]) -> Iterator[Found]:
    """The component searches of :func:`recommended`, each followed by a descent over the whole graph."""
    problem = run.problem
    plain = tuple(row for row in problem.moves if not row.fuses)
    for moves in (problem.moves, plain) if len(plain) < len(problem.moves) else (problem.moves,):
        for start, most in product(starts, BLOCKS):
            if run.control.why():
                return
            part = replace(run, problem=replace(problem, flow=start.flow, moves=moves))
            yield _finished(problem, start, equal_blocks(part, most))
    small = operators(starts[0].flow) <= WHOLE
    whole: dict[str, float] = {} if small else {"alpha": 1.0, "most": GREEDY}
    for way in (cuts, lambda each: each.whole(**whole), lambda each: each.whole(**STRIDES)):
        if not run.control.why():
            yield _finished(problem, starts[0], way(run))


def _finished(problem: Problem, start: Found, found: Found) -> Found:
    """A search result after a descent over the whole graph."""
    space = Space(problem=problem)
    flow, more = space.descended(found.flow)
    path = (*start.path, *found.path, *more)
    return _found(problem, flow, path, found.graphs + space.graphs, found.stop)


def mutated(run: Run) -> Found:
    """Search over mutants (corrected partially equal programs), then greedily over the other moves.

    Source: Wang et al., PET, OSDI 2021, section 6.
    """
    mutants = tuple(row for row in run.problem.moves if row.mutates)
    others = tuple(row for row in run.problem.moves if not row.mutates)
    part = replace(run, problem=replace(run.problem, moves=mutants))
    first = best_first(
        part.problem, alpha=run.alpha, budget=run.budget, together=True, control=run.control, name="mutants"
    )
    rest = replace(run, problem=replace(run.problem, flow=first.flow, moves=others))
    done = rest.whole(alpha=1.0, growth=GROWTH)
    return replace(done, path=(*first.path, *done.path), graphs=first.graphs + done.graphs, bound=None)


SEARCHES: Final[dict[str, Callable[[Run], Found]]] = {
    "greedy": lambda run: run.whole(alpha=1.0, growth=GROWTH),
    "metaflow": cuts,
    "taso": lambda run: run.whole(growth=GROWTH),
    "pet": mutated,
    "exhaustive": exhaustive,
    "recommended": recommended,
}
"""Name of a search -> function that runs it."""
OF_THE_WHOLE: Final = ("greedy", "taso", "exhaustive")
"""Searches that always treat the graph as a whole."""
