"""Further searches and recipes, for plans whose optimality was not proved in time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime.sharding.ilp import EXACT, solve
from steptime.sharding.local_search import Budget, Meter, Method, descend, searched
from steptime.sharding.planner import ENOUGH, ShardingPlan, descended, memory_of, step_of
from steptime.sharding.problem import ROUNDING, Problem, only
from steptime.sharding.recipes import RECIPES, followed

EACH_S: Final = 5.0
"""CPU seconds of each search or recipe."""
EVALUATIONS: Final = 1e6
"""Choices that a search evaluates, in about half a second."""
PRICES: Final = (0.0, *(10.0**power for power in range(-3, 3)))
"""Prices of memory that are tried in turn: of the whole limit, as a share of the total seconds."""


def with_others(
    found: ShardingPlan, gap: float, each_s: float = EACH_S, evaluations: float = EVALUATIONS
) -> ShardingPlan:
    """The plan, or a better one that other searches and recipes find if its gap is too large.

    Args:
        found: a plan without pinned items.
        gap: share above the bound at which nothing else is tried.
        each_s: CPU seconds of each search and recipe.
        evaluations: choices that a search may evaluate.
    """
    if found.gap <= max(gap, ENOUGH) or "interrupted" in found.stop:
        return found
    began, best = time.process_time(), found
    for name, choice in _choices(found, Budget(cpu_s=each_s, evaluations=evaluations)):
        step_s = step_of(found.built.parts_s(choice), found.overlaps)
        if step_s < best.step_s * (1 - ROUNDING) and _fits(found, choice):
            best = replace(found, choice=choice, stop=f"{found.stop}; the plan is of another search: {name}")
    return replace(best, cpu_s=found.cpu_s + time.process_time() - began)


def _choices(found: ShardingPlan, budget: Budget) -> Iterator[tuple[str, Array]]:
    built = found.built
    problem = built.problem()
    for name in (*SEARCHES, *RECIPES):
        trace = (
            followed(name, built, problem, budget)[0]
            if name in RECIPES
            else searched(SEARCHES[name], problem, budget, name=name)
        )
        if trace is not None and trace.choice is not None:
            choice = np.asarray(trace.choice)
            yield name, descended(built, problem, choice) if found.overlaps else choice


def _fits(found: ShardingPlan, choice: Array) -> bool:
    """True if a choice is within the limit at every call, or needs no more than the given plan."""
    limit = found.built.limit_bytes
    if limit == inf:
        return True
    peak_bytes = float(memory_of(found.built, choice)[1:].max())
    return peak_bytes <= max(limit, float(found.memory_bytes[1:].max())) * (1 + ROUNDING)


def priced(problem: Problem, price_s: float) -> Problem:
    """The problem without a limit but with a price of memory: `price_s` for the whole limit, as a mean over moments."""
    if not problem.limited or not price_s:
        return replace(problem, moments=(), limit_bytes=math.inf)
    per_byte = price_s / max(problem.limit_bytes, 1.0) / len(problem.moments)
    nodes = tuple(
        replace(node, cost_s=node.cost_s + per_byte * taken.sum(axis=1))
        for node, (_, taken) in zip(problem.nodes, problem.held, strict=True)
    )
    return replace(problem, nodes=nodes, moments=(), limit_bytes=math.inf)


def unit_of(meter: Meter) -> float:
    """Sum of the cheapest option of each node, in seconds: the scale of prices."""
    return max(float(sum(node.cost_s.min() for node in meter.soft.nodes)), 1e-300)


def axis_by_axis(meter: Meter, rng: np.random.Generator) -> None:
    """Solve one axis of the mesh after another exactly, given the earlier axes; later axes are replicated.

    A node without an option that is replicated there keeps all options that agree with the decided axes. The memory
    limit applies only to the last axis, so the price of memory rises until the choice fits.

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
    """The problem with the decided tags along the first axes, and replication along those after `axis`."""
    nodes = []
    for node, own in zip(problem.nodes, decided, strict=True):
        tags, legal = np.asarray(node.tags), np.isfinite(node.cost_s)
        agree = legal & (tags[:, : len(own)] == own).all(axis=1)
        still = agree & (tags[:, axis + 1 :] == 0).all(axis=1)
        nodes.append(only(node, np.flatnonzero(still if still.any() else agree)))
    return replace(problem, nodes=tuple(nodes))


SEARCHES: Final[dict[str, Method]] = {"hierarchical": axis_by_axis, "local": descend}
"""The baselines that find the best plans where memory is tight (``benchmarks/planners.md``)."""
