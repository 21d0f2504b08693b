"""Choices that a search leaves at one value, and what another value of each makes of the first plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from steptime.api.jobs import with_choices
from steptime.errors import UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting, chance_of, rules_broken
from steptime.options import choices_of
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import Strategy
from steptime.plan.switches import STEP
from steptime.schedule import SCHEDULES
from steptime.search.planner import Change, Unsearched

CHOICES: Final = ("graphs", "dispatcher", "overlap", "schedule", "context", "offload")
"""Choices of a job that a search keeps at one value unless the framework can switch them."""
KEPT: Final = ("etp", "sp", "shard", "recompute_every")
"""Columns of a plan that it keeps at one value."""
LEAST: Final = 1e-3
"""Share of the step that a change has to gain to be named."""


def unsearched(setting: Setting, first: tuple[Strategy, Plans, float], given: Mapping[str, Any]) -> Unsearched:
    """What a search left out, and the changes that make its first plan faster, each alone with its fastest value.

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
                times[_words(value)] = float(e.step_time_s)
        words = min(times, key=lambda each: times[each], default="")
        if words and times[words] < step_s * (1 - LEAST):
            found.append(Change(change=f"{name}={words}", step_time_s=times[words]))
    return Unsearched(names=(*names, *kept), faster=tuple(sorted(found, key=lambda one: one.step_time_s)))


def _words(value: Any) -> str:
    return ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)


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
