"""Manual recipes of parallel training as rules for inputs, parameters, updates and products.

A rule scores the options of an item by the number of mesh axes on which they follow the recipe; those with the highest
score are kept. If an axis does not divide a size, the recipe thus falls back to the axes that do. The solver decides
the rest.
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
"""Function of a sharding and the rank of its tensor: the number of axes on which it follows the recipe."""

BATCH: Final = shard(0)
COLUMNS: Final = ("columns", "out", "groups")
"""Names of the dims of output features in products and convolutions."""


def batch(sharding: Sharding, rank: int) -> int:
    """Score of sharding the first dim over all axes."""
    return sum(each == BATCH for each in sharding)


def outer_batch(sharding: Sharding, rank: int) -> int:
    """Score of sharding the first dim over all axes except the innermost, along which it is replicated."""
    return batch(sharding[:-1], rank) + sharding[-1].replicated


def whole(sharding: Sharding, rank: int) -> int:
    """Score of replication."""
    return sum(each.replicated for each in sharding)


def spread(sharding: Sharding, rank: int) -> int:
    """Score of sharding any dims over all axes."""
    return len(sharding) - whole(sharding, rank)


def inner_matrix(sharding: Sharding, rank: int) -> int:
    """Score of sharding matrices along any dim over the innermost axis, with replication over the others."""
    return whole(sharding[:-1], rank) + (rank > 1 and not sharding[-1].replicated)


def inner_features(sharding: Sharding, rank: int) -> int:
    """Score of replication over all axes except the innermost."""
    return whole(sharding[:-1], rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Rules of a recipe for inputs, parameters and updates, and dims of operators along the innermost axis."""

    inputs: Rule
    parameters: Rule
    updates: Rule
    inner: tuple[str, ...] = ()
    """Dims that forward operators shard over the innermost axis if they have one of them."""


RECIPES: Final[Mapping[str, Recipe]] = {
    "data parallel": Recipe(inputs=batch, parameters=whole, updates=whole),
    "sharded data parallel": Recipe(inputs=batch, parameters=spread, updates=spread),
    "zero-1": Recipe(inputs=batch, parameters=whole, updates=spread),
    "tensor parallel": Recipe(inputs=outer_batch, parameters=inner_matrix, updates=inner_matrix),
    "filter parallel": Recipe(inputs=outer_batch, parameters=inner_features, updates=inner_features, inner=COLUMNS),
}


def pins(built: Built, which: Recipe) -> dict[int, tuple[int, ...]]:
    """Options that a recipe allows, by item; items without a rule are left out."""
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
    """The search result with a recipe, or None and the reason why it cannot be followed.

    Args:
        name: one of :data:`RECIPES`.
        built: the options of the items.
        problem: the problem, with nodes in the order of the items.
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
    """True if even the least memory of each node exceeds the limit at some moment."""
    if problem.limit_bytes == inf:
        return False
    legal = [np.isfinite(node.cost_s) for node in problem.nodes]
    return any(
        moment.fixed_bytes + sum(float(taken[legal[node]].min()) for node, taken in moment.entries)
        > problem.limit_bytes
        for moment in problem.moments
    )
