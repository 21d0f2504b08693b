"""Best first over the multi-linear parts of a graph: each part gets its best mutant, equal parts the same one.

Parts end where a function is not linear, so that what is chosen for one leaves the others as they are: a graph of
several choices costs what its parts save together, and each part is a search of its own over few graphs. Source: Wang
et al., PET, OSDI 2021, section 6.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match
from steptime.rewrite.search.problem import Found, Problem

ALPHA: Final = 1.05
"""Graphs that cost more than this times the best are not looked at."""
BUDGET: Final = 200
"""Graphs that are priced."""


def best_first(problem: Problem, *, alpha: float = ALPHA, budget: int = BUDGET) -> Found:
    """The cheapest graph that mutants of the parts reach.

    Args:
        problem: the graph, the mutants as moves, the cost.
        alpha: how much above the best a graph may cost to be mutated further.
        budget: graphs that are priced at most.
    """
    best, least, numbers, priced = problem.flow, problem.start, count(), 1
    queue: list[tuple[float, int, Flow]] = [(least, next(numbers), best)]
    seen: set[tuple[Value, ...]] = {best.outputs}
    while queue and priced < budget:
        cost, _, flow = heapq.heappop(queue)
        if cost > alpha * least:
            break
        for made in _neighbours(problem, flow):
            if made.outputs in seen or priced >= budget:
                continue
            seen.add(made.outputs)
            priced += 1
            new = problem.cost.of_graph(made)
            if new < least:
                best, least = made, new
            if new <= alpha * least:
                heapq.heappush(queue, (new, next(numbers), made))
    stop = "the budget of graphs is spent" if priced >= budget else "no mutant within alpha of the best is left"
    return Found(flow=best, cost=least, bound=0.0, graphs=priced, stop=stop)


def _neighbours(problem: Problem, flow: Flow) -> Iterator[Flow]:
    """Graphs with one kind of part mutated wherever it is."""
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
                yield substituted(flow, replacements, problem.folds.definitions)
            except RefusedError:
                continue


def _kinds(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(sorted(repr((n.op, n.outputs, [v.type for v in n.inputs], n.attributes)) for n in nodes))
