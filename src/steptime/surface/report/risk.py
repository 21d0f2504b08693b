"""The chance that a plan runs out of memory on real devices, and what to try where it is large."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.estimate.result import Estimate
from steptime.search.planner import LIKELY
from steptime.surface.report import text as t


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
    risk = _risk(e)
    return None if risk is None else f"{risk}; try {' or '.join(_remedies(e, searched))}"


def _risk(e: Estimate) -> str | None:
    if not e.feasible or not e.memory_by_definition or e.oom_probability <= LIKELY:
        return None
    more = e.memory_by_definition["device"] - e.peak_memory_bytes
    return (
        f"warning: likely runs out of memory on real devices ({chance(e)}): the allocator and the driver need "
        f"{t.memory(more)} more than live tensors"
    )


def advice(plans: Sequence[Estimate], likely: Estimate | None) -> str | None:
    """What to say of ranked plans whose first likely runs out: the fastest of all that likely does not.

    Args:
        plans: those that are shown.
        likely: the fastest of the whole space that likely does not run out; None: there is none.
    """
    first = plans[0]
    if likely is None:
        risk = warning(first, searched=True)
        return None if risk is None else f"{risk}; no plan of this space likely fits"
    risk = _risk(first)
    if risk is None:
        return None
    shown = [rank for rank, e in enumerate(plans, 1) if e.plan == likely.plan]
    which = f"plan {shown[0]}" if shown else t.plan_label(likely.plan)
    change = t.change((likely.step_time_s - first.step_time_s) / first.step_time_s)
    return (
        f"{risk}; the fastest that likely fits is {which}: {t.seconds(likely.step_time_s)} ({change}), "
        f"P(oom) {chance(likely)}"
    )


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
