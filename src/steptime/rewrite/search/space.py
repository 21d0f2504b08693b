"""The graphs next to a graph: matches of the moves, priced by what they remove and add, and made when wanted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops import VIEWS
from steptime.rewrite.engine import kinds
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match, Pass
from steptime.rewrite.search.problem import Move, Problem

ROUNDS: Final = 16
"""Times that tidying, or a descent, is tried again after a change."""
EPSILON: Final = 1e-9
"""Part of a cost below which two costs are equal."""

Key = tuple[tuple[Value, ...], tuple[Node, ...]]
Grouped = Callable[[Flow, Iterable[Match]], Iterable[tuple[Match, ...]]]
"""Matches of a row -> those of them that are made at once."""


def replacements_of(matches: Iterable[Match]) -> dict[Value, Value]:
    """What some matches replace."""
    return {old: new for match in matches for old, new in match.replace.items()}


def single(_: Flow, matches: Iterable[Match]) -> Iterator[tuple[Match, ...]]:
    """Each match by itself."""
    return ((match,) for match in matches)


def equal(flow: Flow, matches: Iterable[Match]) -> Iterator[tuple[Match, ...]]:
    """Matches that remove and add the same kinds of nodes and do not touch each other, together."""
    groups: dict[object, list[Match]] = defaultdict(list)
    for match in apart(flow, matches):
        old, new = removed_and_added(flow, match.replace)
        # Which weights a match reads makes no difference.
        groups[kinds(n for n in old if n not in flow.constant), kinds(new)].append(match)
    return map(tuple, groups.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A graph that is not made yet."""

    cost: float
    """Cost of the graph that it leads to, by the operators that it removes and adds."""
    row: Pass
    matches: tuple[Match, ...]


@dataclass(kw_only=True)
class Space:
    """Graphs of a problem, reached by its moves; moves that are tidy are made at once after each other move."""

    problem: Problem
    graphs: int = 0
    """Graphs that were priced."""
    rows: tuple[Pass, ...] = field(init=False)
    tidy: tuple[Pass, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = tuple(row for row in self.problem.moves if not row.tidy)
        self.tidy = tuple(row for row in self.problem.moves if row.tidy)

    @staticmethod
    def key(flow: Flow) -> Key:
        """What two graphs with the same table of nodes have in common only if they are the same."""
        return flow.outputs, flow.kept

    def cost(self, flow: Flow) -> float:
        """Cost by which the search goes."""
        return self.problem.cost.guided(flow)

    def candidates(self, flow: Flow, cost: float, grouped: Grouped = single) -> Iterator[Candidate]:
        """Graphs that are one move away; ``grouped`` says which matches of it are made together."""
        scene = self.problem.scene(flow)
        for row in self.rows:
            for matches in grouped(flow, row.find(scene)):
                found = self.priced(flow, cost, *matches)
                if found is not None:
                    yield Candidate(found, row, matches)

    def priced(self, flow: Flow, cost: float, *matches: Match) -> float | None:
        """Cost after some matches; None where they cannot be made."""
        self.graphs += 1
        model = self.problem.cost
        if not model.is_additive:
            made = self.made(flow, *matches)
            return None if made is None else self.cost(made)
        old, new = removed_and_added(flow, replacements_of(matches))
        return cost + sum(model.of_node(flow, n) for n in new) - sum(model.of_node(flow, n) for n in old)

    def made(self, flow: Flow, *matches: Match) -> Flow | None:
        """The graph with matches made, tidied; None where they cannot be."""
        try:
            return self.tidied(substituted(flow, replacements_of(matches), self.problem.folds.definitions))
        except RefusedError:
            return None

    def tidied(self, flow: Flow) -> Flow:
        """The graph with all tidy moves made."""
        for _ in range(ROUNDS):
            before = flow
            for row in self.tidy:
                flow = self._all(flow, list(row.find(self.problem.scene(flow))))
            if flow is before:
                return flow
        return flow

    def _all(self, flow: Flow, matches: list[Match]) -> Flow:
        """The graph with matches made that cost nothing, as far as they can be made together."""
        while matches:
            try:
                return substituted(flow, replacements_of(matches), self.problem.folds.definitions)
            except RefusedError:
                matches = matches[: len(matches) // 2]
        return flow

    def descended(self, flow: Flow, rows: Iterable[Pass] | None = None) -> tuple[Flow, tuple[Move, ...]]:
        """Follow moves that lower the cost, all matches of a row at once, until none does: a graph and its way."""
        cost, path = self.cost(flow), list[Move]()
        chosen = self.rows if rows is None else tuple(rows)
        for _ in range(ROUNDS):
            start = cost
            for row in chosen:
                flow, cost, moves = self._one(flow, cost, row)
                path += moves
            if cost >= start * (1 - EPSILON):
                break
        return flow, tuple(path)

    def _one(self, flow: Flow, cost: float, row: Pass) -> tuple[Flow, float, list[Move]]:
        """One row: its matches that pay and do not touch each other, together; else the best of them alone."""
        paying: list[tuple[float, int, Match]] = []
        for match in row.find(self.problem.scene(flow)):
            after = self.priced(flow, cost, match)
            if after is not None and after < cost * (1 - EPSILON):
                paying.append((after, len(paying), match))
        paying.sort()
        together = apart(flow, [match for _, _, match in paying])
        for group in (together, together[:1]) if len(together) > 1 else (together,):
            made = self.made(flow, *group) if group else None
            after = cost if made is None else self.cost(made)
            if made is not None and after < cost * (1 - EPSILON):
                return made, after, [Move(row=row, flow=flow, match=match) for match in group]
        return flow, cost, []


def apart(flow: Flow, matches: Iterable[Match]) -> list[Match]:
    """The first of some matches, and those after it that remove nothing of them."""
    touched: set[Node] = set()
    chosen = []
    for match in matches:
        nodes = {*removed_and_added(flow, match.replace)[0], *(value.node for value in match.replace)}
        if not touched & nodes:
            touched |= nodes
            chosen.append(match)
    return chosen


def operators(flow: Flow) -> int:
    """Number of operators that are computed in every run and are no views."""
    return sum(node.op not in VIEWS and node not in flow.constant for node in flow.operators)
