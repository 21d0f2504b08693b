"""Neighbours of a graph: matches of moves, priced by the nodes that they remove and add, and built on demand."""

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
"""Largest number of rounds of tidying or of a descent."""
EPSILON: Final = 1e-9
"""Relative difference below which two costs are equal."""

Key = tuple[tuple[Value, ...], tuple[Node, ...]]
Grouped = Callable[[Flow, Iterable[Match]], Iterable[tuple[Match, ...]]]
"""Function from the matches of a pass to groups of matches that are applied together."""


def replacements_of(matches: Iterable[Match]) -> dict[Value, Value]:
    """All replacements of some matches."""
    return {old: new for match in matches for old, new in match.replace.items()}


def single(_: Flow, matches: Iterable[Match]) -> Iterator[tuple[Match, ...]]:
    """Each match as its own group."""
    return ((match,) for match in matches)


def group_equivalent(flow: Flow, matches: Iterable[Match]) -> Iterator[tuple[Match, ...]]:
    """Groups of matches that remove and add the same kinds of nodes and do not overlap."""
    groups: dict[object, list[Match]] = defaultdict(list)
    for match in non_overlapping(flow, matches):
        old, new = removed_and_added(flow, match.replace)
        # Nodes made of weights alone are not compared.
        groups[kinds(n for n in old if n not in flow.constant), kinds(new)].append(match)
    return map(tuple, groups.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A graph that is not built yet."""

    cost: float
    """Cost of the resulting graph: by removed and added operators if the cost is additive, else of the built graph."""
    rewrite_pass: Pass
    matches: tuple[Match, ...]


@dataclass(kw_only=True)
class Space:
    """Graphs that the moves of a problem reach; after every move that is not tidy, all tidy moves are applied."""

    problem: Problem
    graphs: int = 0
    """Graphs that were priced."""
    passes: tuple[Pass, ...] = field(init=False)
    tidy: tuple[Pass, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.passes = tuple(rewrite_pass for rewrite_pass in self.problem.moves if not rewrite_pass.tidy)
        self.tidy = tuple(rewrite_pass for rewrite_pass in self.problem.moves if rewrite_pass.tidy)

    @staticmethod
    def key(flow: Flow) -> Key:
        """Key that is equal only for equal graphs with the same table of nodes."""
        return flow.outputs, flow.kept

    def cost(self, flow: Flow) -> float:
        """Cost that guides the search."""
        return self.problem.cost.guided(flow)

    def candidates(self, flow: Flow, cost: float, grouped: Grouped = single) -> Iterator[Candidate]:
        """Graphs that are one move away; ``grouped`` decides which matches of a move are applied together."""
        scene = self.problem.scene(flow)
        for rewrite_pass in self.passes:
            for matches in grouped(flow, rewrite_pass.find(scene)):
                found = self.priced(flow, cost, *matches)
                if found is not None:
                    yield Candidate(found, rewrite_pass, matches)

    def priced(self, flow: Flow, cost: float, *matches: Match) -> float | None:
        """Cost after some matches; None: they cannot be applied."""
        self.graphs += 1
        model = self.problem.cost
        if not model.is_additive:
            made = self.applied(flow, *matches)
            return None if made is None else self.cost(made)
        old, new = removed_and_added(flow, replacements_of(matches))
        return cost + sum(model.of_node(flow, n) for n in new) - sum(model.of_node(flow, n) for n in old)

    def applied(self, flow: Flow, *matches: Match) -> Flow | None:
        """The tidied graph after some matches; None: they cannot be applied."""
        try:
            return self.tidied(substituted(flow, replacements_of(matches), self.problem.folds.definitions))
        except RefusedError:
            return None

    def tidied(self, flow: Flow) -> Flow:
        """The graph with all tidy moves applied."""
        for _ in range(ROUNDS):
            before = flow
            for rewrite_pass in self.tidy:
                flow = self._all(flow, list(rewrite_pass.find(self.problem.scene(flow))))
            if flow is before:
                return flow
        return flow

    def _all(self, flow: Flow, matches: list[Match]) -> Flow:
        """The graph with tidy matches applied, as far as they can be applied together."""
        while matches:
            try:
                return substituted(flow, replacements_of(matches), self.problem.folds.definitions)
            except RefusedError:
                matches = matches[: len(matches) // 2]
        return flow

    def descended(self, flow: Flow, passes: Iterable[Pass] | None = None) -> tuple[Flow, tuple[Move, ...]]:
        """Make moves that lower the cost, all matches of a pass at once, until none does; returns graph and moves."""
        cost, path = self.cost(flow), list[Move]()
        chosen = self.passes if passes is None else tuple(passes)
        for _ in range(ROUNDS):
            start = cost
            for rewrite_pass in chosen:
                flow, cost, moves = self._one(flow, cost, rewrite_pass)
                path += moves
            if cost >= start * (1 - EPSILON):
                break
        return flow, tuple(path)

    def _one(self, flow: Flow, cost: float, rewrite_pass: Pass) -> tuple[Flow, float, list[Move]]:
        """Apply the non-overlapping matches of one pass that lower the cost; if together they do not, only the best."""
        paying: list[tuple[float, int, Match]] = []
        for match in rewrite_pass.find(self.problem.scene(flow)):
            after = self.priced(flow, cost, match)
            if after is not None and after < cost * (1 - EPSILON):
                paying.append((after, len(paying), match))
        paying.sort()
        together = non_overlapping(flow, [match for _, _, match in paying])
        for group in (together, together[:1]) if len(together) > 1 else (together,):
            made = self.applied(flow, *group) if group else None
            after = cost if made is None else self.cost(made)
            if made is not None and after < cost * (1 - EPSILON):
                return made, after, [Move(rewrite_pass=rewrite_pass, flow=flow, match=match) for match in group]
        return flow, cost, []


def non_overlapping(flow: Flow, matches: Iterable[Match]) -> list[Match]:
    """A greedy subset of matches that do not overlap."""
    touched: set[Node] = set()
    chosen = []
    for match in matches:
        nodes = {*removed_and_added(flow, match.replace)[0], *(value.node for value in match.replace)}
        if not touched & nodes:
            touched |= nodes
            chosen.append(match)
    return chosen


def operators(flow: Flow) -> int:
    """Number of operators that are computed in every run and are not views."""
    return sum(node.op not in VIEWS and node not in flow.constant for node in flow.operators)
