"""Search part by part: equal parts are searched once and replaced at every place; then the seams are searched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Folds
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.region import Region, cut, put_back
from steptime.rewrite.search.space import EPSILON, Space
from steptime.rewrite.search.split import MOST, movable

SEAM: Final = MOST // 2
"""Nodes on each side of a seam between parts that are searched again."""

Inner = Callable[[Problem], Found]
"""Function that searches one part."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Replacement of all parts of a kind."""

    replacements: dict[Value, Value]
    over: dict[Node, tuple[int | None, ...]]
    moves: list[Move]


@dataclass(kw_only=True)
class Parted:
    """Search state of the parts of one problem, with results by kind."""

    problem: Problem
    control: Control
    graphs: int = 0
    kinds: int = 0
    """Number of searched parts; equal parts count once."""
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
        changes: list[_Change] = []
        for key, regions in groups.items():
            if self.control.why():
                break
            found, own = self._found(key, regions[0], inner)
            if found.flow.outputs == regions[0].flow.outputs:
                continue
            moves = [replace(move, count=move.count * len(regions)) for move in found.path]
            replacements, over = dict[Value, Value](), dict[Node, tuple[int | None, ...]]()
            for region in regions:
                values, places = put_back(region, found.flow, own, self.problem.folds)
                replacements |= values
                over |= places
            changes.append(_Change(replacements, over, moves))
        return self._changed(flow, changes)

    def _found(self, key: object, region: Region, inner: Inner) -> tuple[Found, Folds]:
        known = self._known.get(key)
        if known is None:
            own = Folds()
            found = inner(replace(self.problem, flow=region.flow, folds=own, cost=self.problem.cost.of_parts()))
            known = self._known[key] = found, own
            self.graphs += found.graphs
            self.kinds += 1
        return known

    def _changed(self, flow: Flow, changes: list[_Change]) -> tuple[Flow, tuple[Move, ...]]:
        """The graph with all changes; if they conflict or do not gain together, with one after another."""
        space, path = Space(problem=self.problem), list[Move]()
        cost = space.cost(flow)
        made = self._made(space, flow, changes)
        if made is not None and space.cost(made) < cost * (1 - EPSILON):
            return made, tuple(move for change in changes for move in change.moves)
        accepted: list[_Change] = []
        best = flow
        for change in changes:
            made = self._made(space, flow, [*accepted, change])
            after = cost if made is None else space.cost(made)
            if made is not None and after < cost * (1 - EPSILON):
                best, cost = made, after
                accepted.append(change)
                path += change.moves
        return best, tuple(path)

    def _made(self, space: Space, flow: Flow, changes: Sequence[_Change]) -> Flow | None:
        replacements, over = dict[Value, Value](), dict(flow.over)
        for change in changes:
            replacements |= change.replacements
            over |= change.over
        if not replacements:
            return None
        try:
            made = substituted(replace(flow, over=over), replacements, self.problem.folds.definitions)
        except RefusedError:
            return None
        return space.tidied(made)


def seams(flow: Flow, members: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Nodes on both sides of each border between adjacent parts; no node is in two lists."""
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
