"""The chance that a plan runs out of memory on real devices, and what to try where it is large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steptime.estimate.result import Estimate
from steptime.surface.report import text as t

#: A plan above this chance of running out is warned about.
LIKELY: Final = 0.5


def chance(e: Estimate) -> str | None:
    """The chance of running out in percent; None where a paper is reproduced, whose model has none."""
    return t.percent(e.oom_probability) if e.memory_by_definition else None


def chance_line(e: Estimate) -> str | None:
    """The chance and what it rests on: the memory in use on the device; None where there is no chance."""
    value = chance(e)
    if value is None:
        return None
    return f"{value} to run out ({t.memory(e.memory_by_definition['device'])} with allocator and driver)"


def warning(e: Estimate, *, searched: bool = False) -> str | None:
    """One line on a plan that counts as feasible and likely runs out all the same; None for any other.

    Args:
        searched: the options named are those of a search.
    """
    if not e.feasible or not e.memory_by_definition or e.oom_probability <= LIKELY:
        return None
    more = e.memory_by_definition["device"] - e.peak_memory_bytes
    return (
        f"warning: likely runs out of memory on real devices ({chance(e)}): the allocator and the driver need "
        f"{t.memory(more)} more than live tensors; try {' or '.join(_remedies(e, searched))}"
    )


def roomier(plans: Sequence[Estimate]) -> str:
    """The fastest of some ranked plans that likely fits, if it is not the first; empty if there is none."""
    for rank, e in enumerate(plans, 1):
        if e.oom_probability <= LIKELY:
            return f"; plan {rank} is the fastest shown that likely fits" if rank > 1 else ""
    return ""


def _remedies(e: Estimate, searched: bool) -> list[str]:
    """Options that take less memory and that the plan has not yet."""
    plan, micro_batch = e.plan, e.plan.get("micro_batch", 1)
    out = []
    if plan.get("recompute", "none") != "full":
        out.append("--fix recompute=full" if searched else "--recompute full")
    if plan.get("zero", 1) < 3 and plan.get("pp", 1) == 1 and plan.get("dp", 1) > 1:
        out.append("--fix zero=3" if searched else "--zero 3")
    if micro_batch > 1:
        out.append(f"--limit 'micro_batch<={micro_batch // 2}'" if searched else f"--micro-batch {micro_batch // 2}")
    return out or ["more ranks of tp or pp"]
