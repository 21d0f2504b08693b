"""Searches part by part: equal parts once, results put back at every place, then around the seams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Folds
from steptime.rewrite.search.best_first import ALPHA, BUDGET, best_first
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.region import Region, cut, put_back
from steptime.rewrite.search.space import EPSILON, Space, operators
from steptime.rewrite.search.split import MOST, movable, parts, spans

SEAM: Final = MOST // 2
"""Nodes on each side of a seam that are searched again."""

Inner = Callable[[Problem], Found]
"""Search of one part."""


@dataclass(kw_only=True)
class Parted:
    """Parts of one problem, and what was found of each kind."""

    problem: Problem
    control: Control
    graphs: int = 0
    kinds: int = 0
    """Parts that were searched; equal ones count once."""
    _known: dict[object, tuple[Found, Folds]] = field(default_factory=dict)

    def each(self, flow: Flow, members: Iterable[Sequence[Node]], inner: Inner) -> tuple[Flow, tuple[Move, ...]]:
        """The graph with every part searched, and the moves that were made.

        Args:
            flow: the graph.
            members: nodes of each part.
            inner: search of one part.
        """
        groups: dict[object, list[Region]] = defaultdict(list)
        for nodes in members:
            if len(nodes) > 1:
                region = cut(flow, nodes)
                groups[region.key, id(inner)].append(region)
        changes: list[tuple[dict[Value, Value], list[Move]]] = []
        for key, regions in groups.items():
            if self.control.why():
                break
            found, own = self._found(key, regions[0], inner)
            if not found.path:
                continue
            moves = [replace(move, count=move.count * len(regions)) for move in found.path]
            replacements: dict[Value, Value] = {}
            for region in regions:
                replacements |= put_back(region, found.flow, own, self.problem.folds)
            changes.append((replacements, moves))
        return self._joined(flow, changes)

    def _found(self, key: object, region: Region, inner: Inner) -> tuple[Found, Folds]:
        known = self._known.get(key)
        if known is None:
            own, cost = Folds(), self.problem.cost
            additive = replace(cost, limits={}, peak_limit_bytes=None, peak_weight=0.0)
            model = cost if cost.is_additive else additive
            found = inner(replace(self.problem, flow=region.flow, folds=own, cost=model))
            known = self._known[key] = found, own
            self.graphs += found.graphs
            self.kinds += 1
        return known

    def _joined(self, flow: Flow, changes: list[tuple[dict[Value, Value], list[Move]]]) -> tuple[Flow, tuple[Move, ...]]:
        """All changes together; where they cannot be, or together cost more, one after the other."""
        space, path = Space(problem=self.problem), list[Move]()
        cost = space.cost(flow)
        whole = {old: new for replacements, _ in changes for old, new in replacements.items()}
        made = self._made(space, flow, whole)
        if made is not None and space.cost(made) < cost * (1 - EPSILON):
            return made, tuple(move for _, moves in changes for move in moves)
        taken: dict[Value, Value] = {}
        best = flow
        for replacements, moves in changes:
            made = self._made(space, flow, {**taken, **replacements})
            after = cost if made is None else space.cost(made)
            if made is not None and after < cost * (1 - EPSILON):
                best, cost = made, after
                taken |= replacements
                path += moves
        return best, tuple(path)

    def _made(self, space: Space, flow: Flow, replacements: dict[Value, Value]) -> Flow | None:
        try:
            return space.tidied(substituted(flow, replacements, self.problem.folds.definitions)) if replacements else None
        except RefusedError:
            return None


def seams(flow: Flow, members: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Nodes on both sides of each border between parts that follow each other; none is in two lists."""
    order = movable(flow)
    number = {node: n for n, node in enumerate(order)}
    ends = [max((number[node] for node in nodes if node in number), default=-1) for nodes in members]
    out, last = [], 0
    for end in sorted(set(ends))[:-1]:
        begin, stop = max(end + 1 - SEAM, last), min(end + 1 + SEAM, len(order))
        if end + 1 - begin > 1:
            out.append(order[begin:stop])
            last = stop
    return out


def metaflow(
    problem: Problem, alpha: float = ALPHA, budget: int = BUDGET, control: Control | None = None, most: int = MOST
) -> Found:
    """Relaxed backtracking over parts of a graph: split by minimum cuts, searched, joined, then around the seams.

    Args:
        problem: graph, moves, cost.
        alpha: graphs below this many times the best are followed.
        budget: graphs that are followed, in each part.
        control: when to stop before, and whom to tell.
        most: nodes of a part.

    Source: Jia et al., MetaFlow, SysML 2019, sections 4 and 5.
    """
    control = control or Control()
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    if operators(flow) <= most:
        return best_first(problem, alpha=alpha, budget=budget, control=control, name="MetaFlow")
    parted = Parted(problem=problem, control=control)

    def inner(part: Problem) -> Found:
        return best_first(part, alpha=alpha, budget=budget, control=control, name="MetaFlow")

    members = parts(flow, movable(flow), spans(problem, flow), most)
    flow, path = parted.each(flow, members, inner)
    joints = parts(flow, movable(flow), {}, most)
    flow, more = parted.each(flow, seams(flow, joints), inner)
    cost = space.cost(flow)
    return Found(
        flow=flow,
        cost=cost,
        bound=0.0,
        graphs=parted.graphs,
        stop=control.why() or f"{parted.kinds} kinds of parts searched, each up to {budget:,} graphs",
        path=(*path, *more),
    )
