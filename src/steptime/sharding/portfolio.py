"""Other searches and recipes for where the planner's time ended before its proof."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.sharding.baselines import Budget, search
from steptime.sharding.planner import ENOUGH, ShardingPlan, descended, memory_of, step_of
from steptime.sharding.problem import ROUNDING
from steptime.sharding.recipes import RECIPES, followed

SEARCHES: Final = ("hierarchical", "local")
"""Those that find the best plans of all baselines where memory is tight (``benchmarks/planners.md``)."""
EACH_S: Final = 5.0
"""CPU seconds of each."""


def with_others(found: ShardingPlan, gap: float, each_s: float = EACH_S) -> ShardingPlan:
    """The plan, or the best of what other searches and recipes find where its gap is above the one asked for.

    Args:
        found: a plan without pinned items.
        gap: share above the bound at which nothing else is tried.
        each_s: CPU seconds of each search and recipe.
    """
    if found.gap <= max(gap, ENOUGH) or "interrupted" in found.stop:
        return found
    began, best = time.process_time(), found
    for name, choice in _choices(found, each_s):
        step_s = step_of(found.built.parts_s(choice), found.overlaps)
        if step_s < best.step_s * (1 - ROUNDING) and _fits(found, choice):
            best = replace(found, choice=choice, stop=f"{found.stop}; the plan is of another search: {name}")
    return replace(best, cpu_s=found.cpu_s + time.process_time() - began)


def _choices(found: ShardingPlan, each_s: float) -> Iterator[tuple[str, Array]]:
    built, budget = found.built, Budget(cpu_s=each_s)
    problem = built.problem()
    for name in (*SEARCHES, *RECIPES):
        trace = followed(name, built, problem, budget)[0] if name in RECIPES else search(name, problem, budget)
        if trace is not None and trace.choice is not None:
            choice = np.asarray(trace.choice)
            yield name, descended(built, problem, choice) if found.overlaps else choice


def _fits(found: ShardingPlan, choice: Array) -> bool:
    """Whether a choice keeps to the limit at every call, or needs no more than the plan that is there."""
    limit = found.built.limit_bytes
    if limit == inf:
        return True
    peak_bytes = float(memory_of(found.built, choice)[1:].max())
    return peak_bytes <= max(limit, float(found.memory_bytes[1:].max())) * (1 + ROUNDING)
