"""Baselines that solve parts exactly: axis by axis, tree by tree, the rest of a recipe; and the exact solver itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime.sharding.baselines import Budget, Meter, Trace, search
from steptime.sharding.ilp import EXACT, solve
from steptime.sharding.local_search import greedy
from steptime.sharding.presolve import Conflict, presolve
from steptime.sharding.problem import Problem, feasible, memories_bytes, only, pinned, total_s

PRICES: Final = (0.0, *(10.0**power for power in range(-3, 3)))
"""Prices of memory that are tried in turn, as shares of the total for the limit's bytes."""


def exact(meter: Meter, rng: np.random.Generator) -> None:
    """The integer linear program, to its default gap."""
    found = solve(meter.problem, time_limit_s=max(meter.left_s, 0.01))
    if found.choice is not None:
        meter.offer(found.choice)


def recipe(problem: Problem, options: Mapping[str, Iterable[int]], budget: Budget | None = None) -> Trace:
    """What a manual recipe costs: the nodes that it names keep to its options, the others follow as is best for them.

    Raises:
        UserError: the recipe names an unknown node, or only options that are illegal.
    """
    return replace(search("exact", pinned(problem, options), budget), method="recipe")


def priced(problem: Problem, price_s: float) -> Problem:
    """The problem without a limit, in which bytes cost: `price_s` for the whole limit, on the mean of the moments."""
    if not problem.limited or not price_s:
        return replace(problem, moments=(), limit_bytes=math.inf)
    per_byte = price_s / max(problem.limit_bytes, 1.0) / len(problem.moments)
    nodes = tuple(
        replace(node, cost_s=node.cost_s + per_byte * taken.sum(axis=1))
        for node, (_, taken) in zip(problem.nodes, problem.held, strict=True)
    )
    return replace(problem, nodes=nodes, moments=(), limit_bytes=math.inf)


def unit_of(meter: Meter) -> float:
    """Seconds of the cheapest option of each node alone: the scale of prices."""
    return max(float(sum(node.cost_s.min() for node in meter.soft.nodes)), 1e-300)


def axis_by_axis(meter: Meter, rng: np.random.Generator) -> None:
    """One axis of the mesh after the other, each solved exactly given the axes before it; later axes do nothing.

    A node without an option that does so keeps all that agree with the axes decided. The limit of memory holds
    for the last axis alone, so a price on memory rises until the choice fits.

    Raises:
        UserError: the problem has no tags.
    """
    problem = meter.problem
    if any(node.tags is None for node in problem.nodes):
        raise UserError(
            "hierarchical: options have no tags", hint="a problem needs the tag of each option along each axis"
        )
    axes = max((node.tags.shape[1] for node in problem.nodes if node.tags is not None), default=0)
    unit_s = unit_of(meter)
    for share in PRICES if problem.limited else PRICES[:1]:
        tags: list[Array] = [np.zeros(0, int) for _ in problem.nodes]
        for axis in range(axes):
            last = axis == axes - 1
            at = _with_tags(problem if last else priced(problem, share * unit_s), tags, axis)
            meter.spend(1)
            found = solve(at, gap=EXACT if not last else 1e-3, time_limit_s=max(meter.left_s, 0.01))
            if found.choice is None:
                break
            if last:
                meter.offer(found.choice)
            chosen = zip(problem.nodes, found.choice, strict=True)
            tags = [np.asarray(node.tags)[option, : axis + 1] for node, option in chosen]
        else:
            return


def _with_tags(problem: Problem, decided: list[Array], axis: int) -> Problem:
    """The problem in which nodes keep the tags decided along the first axes and do nothing along those after `axis`."""
    nodes = []
    for node, own in zip(problem.nodes, decided, strict=True):
        tags, legal = np.asarray(node.tags), np.isfinite(node.cost_s)
        agree = legal & (tags[:, : len(own)] == own).all(axis=1)
        still = agree & (tags[:, axis + 1 :] == 0).all(axis=1)
        nodes.append(only(node, np.flatnonzero(still if still.any() else agree)))
    return replace(problem, nodes=tuple(nodes))


def trees(meter: Meter, rng: np.random.Generator) -> None:
    """Dynamic programming: exact where reductions leave nothing of the graph, which they do for chains and trees.

    Elsewhere the other nodes are held and those of a random tree are solved exactly, tree after tree, from the greedy
    choice: the total never rises. A price on memory rises until the choice fits.
    """
    start = greedy(meter)
    unit_s = unit_of(meter)
    for share in PRICES if meter.problem.limited else PRICES[:1]:
        problem = priced(meter.soft, share * unit_s)
        whole = presolve(problem)
        if not isinstance(whole, Conflict) and not whole.problem.nodes:
            start = whole.recover([])
            meter.offer(start)
            meter.spend(1)
        else:
            start = _tree_by_tree(meter, problem, start, rng, forever=not meter.problem.limited)
        fits = (memories_bytes(meter.problem, start[None, :]) <= meter.problem.limit_bytes).all()
        if fits and feasible(meter.problem, start):
            return


STILL: Final = 8
"""Trees in a row that change nothing, after which the descent ends."""


def _tree_by_tree(meter: Meter, problem: Problem, choice: Array, rng: np.random.Generator, *, forever: bool) -> Array:
    still, score = 0, total_s(problem, choice)
    while forever or still < STILL:
        free = _forest(problem, rng)
        nodes = tuple(
            node if at in free else only(node, np.array([choice[at]])) for at, node in enumerate(problem.nodes)
        )
        part = presolve(replace(problem, nodes=nodes))
        if isinstance(part, Conflict):
            break
        better = part.recover([])
        new = total_s(problem, better)
        still = 0 if new < score * (1 - 1e-12) else still + 1
        if new <= score:
            choice, score = better, new
        meter.offer(choice)
        meter.spend(1)
    return choice


def _forest(problem: Problem, rng: np.random.Generator) -> set[int]:
    """Nodes, as many as a random order gives, that form no circle among them."""
    group = list(range(len(problem.nodes)))

    def root(node: int) -> int:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    free: set[int] = set()
    for node in rng.permutation(len(problem.nodes)).tolist():
        roots = [root(other) for other in {other for other, _ in problem.incident[node]} & free]
        if len(set(roots)) == len(roots):
            free.add(node)
            for each in roots:
                group[each] = node
    return free
