"""Manual recipes of parallel training as rules for each kind of item: inputs, parameters, updates, products.

A rule scores the options of an item by the axes of the mesh on which they are as the recipe asks; those with the
highest score are kept. Where a size does not divide, the recipe so falls back to the axes on which it does. Everything
that a recipe does not name follows as is best for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

import numpy as np

from steptime.captured.ops.placement import Sharding, shard
from steptime.errors import UserError
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Item
from steptime.sharding.ilp import exact
from steptime.sharding.local_search import Budget, Trace, searched
from steptime.sharding.problem import Problem, pinned

Rule: TypeAlias = Callable[[Sharding, int], int]
"""Axes on which a sharding of a tensor of some rank is as it should be."""

BATCH: Final = shard(0)
COLUMNS: Final = ("columns", "out", "groups")
"""Dims of products and convolutions that are output features."""


def batch(sharding: Sharding, rank: int) -> int:
    """Sharded along the first dim over all axes."""
    return sum(each == BATCH for each in sharding)


def outer_batch(sharding: Sharding, rank: int) -> int:
    """Sharded along the first dim over all axes but the innermost, where it is replicated."""
    return batch(sharding[:-1], rank) + sharding[-1].replicated


def whole(sharding: Sharding, rank: int) -> int:
    """Replicated."""
    return sum(each.replicated for each in sharding)


def spread(sharding: Sharding, rank: int) -> int:
    """Sharded along any dims over all axes."""
    return len(sharding) - whole(sharding, rank)


def inner_matrix(sharding: Sharding, rank: int) -> int:
    """Matrices are sharded along any dim over the innermost axis, all else is replicated over the others."""
    return whole(sharding[:-1], rank) + (rank > 1 and not sharding[-1].replicated)


def inner_features(sharding: Sharding, rank: int) -> int:
    """Replicated over all axes but the innermost."""
    return whole(sharding[:-1], rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe asks of inputs, parameters and updates, and of operators along the innermost axis."""

    inputs: Rule
    parameters: Rule
    updates: Rule
    inner: tuple[str, ...] = ()
    """Dims of which operators that have one shard one over the innermost axis, in the forward pass."""


RECIPES: Final[Mapping[str, Recipe]] = {
    "data parallel": Recipe(inputs=batch, parameters=whole, updates=whole),
    "sharded data parallel": Recipe(inputs=batch, parameters=spread, updates=spread),
    "zero-1": Recipe(inputs=batch, parameters=whole, updates=spread),
    "tensor parallel": Recipe(inputs=outer_batch, parameters=inner_matrix, updates=inner_matrix),
    "filter parallel": Recipe(inputs=outer_batch, parameters=inner_features, updates=inner_features, inner=COLUMNS),
}


def pins(built: Built, which: Recipe) -> dict[int, tuple[int, ...]]:
    """Options that a recipe allows, by item; items that are not in it have all."""
    found = ((number, _allowed(item, built.ways[number], which)) for number, item in enumerate(built.flow.items))
    return {number: allowed for number, allowed in found if allowed}


def _allowed(item: Item, ways: tuple[Way, ...], which: Recipe) -> tuple[int, ...]:
    if item.kind == "operator":
        if item.phase != "forward":
            return ()
        return tuple(n for n, way in enumerate(ways) if way.strategy and way.strategy.dims[-1] in which.inner)
    rules = {"update": which.updates, "parameter": which.parameters, "input": which.inputs}
    rule = rules.get("update" if item.kind == "update" else item.node.op)
    if rule is None:
        return ()
    scores = [rule(way.outputs[0], item.node.outputs[0].rank) for way in ways]
    return tuple(n for n, score in enumerate(scores) if score == max(scores))


def followed(name: str, built: Built, problem: Problem, budget: Budget | None = None) -> tuple[Trace | None, str]:
    """What a recipe costs, or None and why it cannot be followed.

    Args:
        name: one of :data:`RECIPES`.
        built: what the options of the problem mean.
        problem: the problem, its nodes in the order of the items.
        budget: CPU seconds of the solver.
    """
    allowed = {problem.nodes[number].name: options for number, options in pins(built, RECIPES[name]).items()}
    try:
        if _too_large(pinned(problem, allowed)):
            return None, "does not fit"
        found = searched(exact, pinned(problem, allowed), budget, name="recipe")
    except UserError as error:
        return None, str(error)
    return (
        (found, "")
        if found.choice is not None
        else (None, f"nothing legal that fits was found in {found.cpu_s:.1f} CPU s")
    )


def _too_large(problem: Problem) -> bool:
    """Whether the least of each node alone is above the limit at some moment."""
    if problem.limit_bytes == inf:
        return False
    legal = [np.isfinite(node.cost_s) for node in problem.nodes]
    return any(
        moment.fixed_bytes + sum(float(taken[legal[node]].min()) for node, taken in moment.entries)
        > problem.limit_bytes
        for moment in problem.moments
    )
