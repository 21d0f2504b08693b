"""Choices that a search keeps at one value, and the effect of other values on the first plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from steptime.api.jobs import with_choices
from steptime.api.placed import placed_plan
from steptime.errors import UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.result import Estimate
from steptime.estimate.single import Setting, chance_of, estimate_plan, rules_broken
from steptime.options import SEARCHED, choices_of
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import Strategy
from steptime.plan.switches import STEP
from steptime.schedule import SCHEDULES
from steptime.search.modes import MODES
from steptime.search.planner import Change, Unsearched, WhyNot
from steptime.units import format_seconds

CHOICES: Final = ("graphs", "dispatcher", "overlap", "schedule", "context", "offload")
"""Choices of a job that a search keeps at one value unless the framework can switch them."""
KEPT: Final = ("etp", "sp", "shard", "recompute_every")
"""Columns of a plan that a search keeps at one value."""
LEAST: Final = 1e-3
"""Least share of the step that a change has to gain to be reported."""


def unsearched(setting: Setting, first: tuple[Strategy, Plans, float], given: Mapping[str, Any]) -> Unsearched:
    """Choices that a search left out, and single changes that make its first plan faster, at their fastest values.

    Args:
        setting: the job of the search.
        first: strategy, columns and step time (s) of the first plan.
        given: choices and columns that the user fixed.
    """
    strategy, plans, step_s = first
    of_experts = () if setting.job.model.experts is not None else ("dispatcher", "etp")
    names = [name for name in CHOICES if name not in (*setting.switched, *given, *of_experts)]
    kept = [name for name in KEPT if name not in (*given, *of_experts)]
    held = {**given, **{name: getattr(setting.job, name) for name in setting.switched}}
    found = []
    for name in names:
        times: dict[str, float] = {}
        for value, columns in _others(name, setting.job, plans):
            try:
                job = with_choices(setting.job, {**held, name: value})
            except UserError:
                continue
            e = evaluate(setting.method, strategy, job, setting.machine, plans.with_columns(columns))
            other = replace(setting, job=job)
            if not rules_broken(other, e) and chance_of(other, e) <= (setting.first_limit or 1.0):
                words = ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)
                times[words] = float(e.step_time_s)
        words = min(times, key=lambda each: times[each], default="")
        if words and times[words] < step_s * (1 - LEAST):
            found.append(Change(change=f"{name}={words}", step_time_s=times[words]))
    return Unsearched(names=(*names, *kept), faster=tuple(sorted(found, key=lambda one: one.step_time_s)))


def _others(name: str, job: Job, plans: Plans) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Other values of a choice that could make a plan faster, and columns of the plan that follow from them."""
    if name == "graphs" and job.graphs != STEP:
        yield STEP, {}
    if name == "dispatcher" and plans.ep > 1:
        yield from ((value, {}) for value in choices_of(name) if value != job.dispatcher)
    if name == "overlap":
        more = {axis for axis in ("tp", "pp", "ep") if getattr(plans, axis) > 1} - job.overlap
        yield from ((job.overlap | more, {}) for _ in range(bool(more)))
    if name == "context" and plans.cp > 1:
        yield from ((value, {}) for value in choices_of(name) if value != job.context)
    if name == "schedule" and plans.pp > 1:
        for row in SCHEDULES.values():
            known = row.bubble is not None and row.held is not None
            if known and row.synchronous and row.any_graph and not row.follows and row.name != job.schedule:
                yield row.name, {} if row.only_chunks is None else {"vpp": row.only_chunks}


def why_not(setting: Setting, first: tuple[Strategy, Plans, Estimate], given: Mapping[str, Any]) -> tuple[WhyNot, ...]:
    """Each axis that a first plan does not use, at degree 2: the fastest plan that takes the ranks from another axis.

    Args:
        setting: the job of the search.
        first: strategy, columns and estimate of the first plan.
        given: columns that the user fixed, which stay.
    """
    strategy, plans, best = first
    axes, limit = (*strategy.tensor_axes, "dp", "pp"), setting.first_limit or 1.0
    out = []
    for axis in ("tp", "cp", "pp", "dp"):
        if int(getattr(plans, axis)) > 1 or axis in given:
            continue
        how = strategy if axis in axes else setting.method.strategy("context")
        found = {}
        for other in axes:
            degree = int(getattr(plans, other))
            if other != axis and other not in given and degree % 2 == 0:
                columns = {axis: 2, other: degree // 2} | ({"vpp": 1} if (other, degree) == ("pp", 2) else {})
                changed = plans.with_columns(columns)
                placed = placed_plan(setting, MODES["corrected"], how.name, changed, None, SEARCHED)
                found[f"{axis} 2 ({other} {degree // 2})"] = (
                    placed,
                    evaluate(setting.method, how, setting.job, setting.machine, placed),
                )
        if found:
            # Infeasible plans come last, before them plans too likely to run out of memory, by step time.
            place = {
                change: (bool(rules_broken(setting, e)), chance_of(setting, e) > limit, float(e.step_time_s))
                for change, (_, e) in found.items()
            }
            change = min(found, key=lambda each: place[each])
            placed = found[change][0]
            out.append(_why(best, change, estimate_plan(setting, how, placed, what_ifs=False), limit))
    return tuple(out)


def _why(best: Estimate, change: str, e: Estimate, limit: float) -> WhyNot:
    """Reason why a plan is worse than the best: the group of terms that grows most, or the rule that it breaks."""
    if not e.feasible:
        return WhyNot(change=change, step_time_s=None, because=f"not feasible ({', '.join(e.reasons)})")
    if e.oom_probability > limit:
        risk = f"{100 * e.oom_probability:.1f} % to run out of memory"
        return WhyNot(change=change, step_time_s=e.step_time_s, because=risk)
    before, after = best.time.rollup(1), e.time.rollup(1)
    more = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    name = max(more, key=lambda each: more[each])
    because = f"{name} +{format_seconds(more[name])}" if more[name] > 0 else ""
    return WhyNot(change=change, step_time_s=e.step_time_s, because=because)
