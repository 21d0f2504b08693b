"""Best first over the multi-linear parts of a graph: each part gets its best mutant, equal parts the same one.

Parts end where a function is not linear, so that what is chosen for one leaves the others as they are: a graph of
several choices costs what its parts save together, and each part is a search of its own over few graphs. Source: Wang
et al., PET, OSDI 2021, section 6.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.mutants.passes import MUTANT_PASSES
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match
from steptime.rewrite.search.best_first import taso
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem

ALPHA: Final = 1.05
"""Graphs that cost more than this times the best are not looked at."""
BUDGET: Final = 200
"""Graphs that are priced."""

Reached = tuple[Flow, tuple[Move, ...]]
"""A graph and the moves that lead to it."""


def pet(problem: Problem, alpha: float = ALPHA, budget: int = BUDGET, control: Control | None = None) -> Found:
    """The best mutant of each multi-linear part, then the other moves where each is cheaper at once.

    Args:
        problem: the graph, mutants and other moves, the cost.
        alpha: how much above the best a graph may cost to be mutated further.
        budget: graphs that are priced in either half.
        control: when to stop before.
    """
    control = control or Control()
    mutants = tuple(row for row in problem.moves if row in MUTANT_PASSES)
    others = tuple(row for row in problem.moves if row not in MUTANT_PASSES)
    mutated = best_first(replace(problem, moves=mutants), alpha=alpha, budget=budget, control=control)
    rest = replace(problem, flow=mutated.flow, moves=others)
    done = taso(rest, 1.0, budget, control=control)
    return replace(done, path=(*mutated.path, *done.path), graphs=mutated.graphs + done.graphs)


def best_first(
    problem: Problem, *, alpha: float = ALPHA, budget: int = BUDGET, control: Control | None = None
) -> Found:
    """The cheapest graph that mutants of the parts reach.

    Args:
        problem: the graph, the mutants as moves, the cost.
        alpha: how much above the best a graph may cost to be mutated further.
        budget: graphs that are priced at most.
        control: when to stop before.
    """
    control = control or Control()
    least, numbers, priced = problem.start, count(), 1
    best: Reached = (problem.flow, ())
    queue: list[tuple[float, int, Reached]] = [(least, next(numbers), best)]
    seen: set[tuple[Value, ...]] = {problem.flow.outputs}
    while queue and priced < budget and not control.why():
        cost, _, (flow, path) = heapq.heappop(queue)
        if cost > alpha * least:
            break
        for made, moves in _neighbours(problem, flow):
            if made.outputs in seen or priced >= budget:
                continue
            seen.add(made.outputs)
            priced += 1
            control.saw("mutants", 1, least)
            new = problem.cost.of_graph(made)
            if new < least:
                best, least = (made, (*path, *moves)), new
            if new <= alpha * least:
                heapq.heappush(queue, (new, next(numbers), (made, (*path, *moves))))
    spent = "the budget of graphs is spent" if priced >= budget else "no mutant within alpha of the best is left"
    return Found(flow=best[0], path=best[1], cost=least, bound=0.0, graphs=priced, stop=control.why() or spent)


def _neighbours(problem: Problem, flow: Flow) -> Iterator[Reached]:
    """Graphs with one kind of part mutated wherever it is, and the moves that do it."""
    scene = problem.scene(flow)
    for move in problem.moves:
        groups: dict[object, list[Match]] = {}
        touched: set[Node] = set()
        for match in move.find(scene):
            old, new = removed_and_added(flow, match.replace)
            nodes = {*old, *(value.node for value in match.replace)}
            if not touched & nodes:
                touched |= nodes
                groups.setdefault((_kinds(old), _kinds(new)), []).append(match)
        for members in groups.values():
            replacements = {old: new for match in members for old, new in match.replace.items()}
            try:
                made = substituted(flow, replacements, problem.folds.definitions)
            except RefusedError:
                continue
            yield made, tuple(Move(row=move, flow=flow, match=match) for match in members)


def _kinds(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(sorted(repr((n.op, n.outputs, [v.type for v in n.inputs], n.attributes)) for n in nodes))
