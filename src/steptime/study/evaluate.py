"""Computation of points into rows of one table with several kinds of rows.

Kinds: ``point`` (a summary of each point), ``plan`` (the fastest plans, by rank), ``front``, ``term``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from steptime.api.calls import fitting_plan
from steptime.api.jobs import Request
from steptime.api.request import job_choices
from steptime.api.searches import Search
from steptime.cli.output import plain
from steptime.errors import UserError
from steptime.estimate.result import Estimate
from steptime.estimate.single import estimate_plan
from steptime.search.modes import MODES
from steptime.search.planner import PlanResult, rank_plans
from steptime.study.hardware import cluster_with
from steptime.study.points import USUAL, Point, forget

Row = Mapping[str, Any]

_DEGREES: Final = (
    *("dp", "tp", "tp2", "cp", "pp", "vpp", "ep", "etp", "sp", "micro_batch", "micro_batches", "panels"),
    *("recompute_every", "zero", "shard"),
)
_AXES: Final = ("dp", "tp", "tp2", "cp", "pp")
#: Number of an estimate -> its name in a row.
_NUMBERS: Final = (
    *("step_time_s", "mfu", "hfu", "tokens_per_s_per_gpu", "samples_per_s", "model_flops"),
    *("peak_memory_bytes", "memory_capacity_bytes", "oom_probability"),
)
#: Column -> its type in SQL.
COLUMNS: Final[Mapping[str, str]] = {
    "point": "varchar",
    "kind": "varchar",
    "rank": "integer",
    "status": "varchar",
    "message": "varchar",
    "candidates": "bigint",
    "feasible_candidates": "bigint",
    "reasons": "varchar",
    **dict.fromkeys(_NUMBERS, "double"),
    "step_time_bracket_low_s": "double",
    "step_time_bracket_high_s": "double",
    "step_time_band_low_s": "double",
    "step_time_band_high_s": "double",
    "feasible": "boolean",
    "bottleneck": "varchar",
    "strategy": "varchar",
    **dict.fromkeys(_DEGREES, "bigint"),
    "recompute": "varchar",
    "schedule": "varchar",
    **{f"in_{axis}": "bigint" for axis in _AXES},
    "plan_json": "varchar",
    "quantity": "varchar",
    "path": "varchar",
    "value": "double",
}
OK, INFEASIBLE, REFUSED = "ok", "infeasible", "refused"


def solve(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The rows of some points; a point with a contradictory job has a message in place of plans."""
    forget()
    return [{"point": point.key, **row} for point in points for row in _rows(point)]


def _rows(point: Point) -> Iterator[Row]:
    try:
        found = _searched(point) if point.what == "plan" else _estimated(point)
    except UserError as error:
        yield {"kind": "point", "status": REFUSED, "message": " ".join(str(error).split())}
        return
    plans = (found,) if isinstance(found, Estimate) else found.plans
    yield {"kind": "point", "status": OK if found.feasible else INFEASIBLE, **_counts(found)}
    for rank, e in enumerate(plans, 1):
        yield {"kind": "plan", "rank": rank, **_numbers(e), **_plan(e.plan)}
        if point.keep.terms:
            yield from _terms(rank, e)
    if point.keep.front and isinstance(found, PlanResult):
        for rank, one in enumerate(found.pareto, 1):
            both = {name: one[name] for name in ("step_time_s", "peak_memory_bytes")}
            yield {"kind": "front", "rank": rank, **both, **_plan(one["plan"])}


def _counts(found: Estimate | PlanResult) -> Row:
    if isinstance(found, Estimate):
        return {"reasons": json.dumps(dict.fromkeys(found.reasons, 1), sort_keys=True)}
    reasons = json.dumps(dict(found.reasons), sort_keys=True)
    return {"reasons": reasons, "candidates": found.candidates, "feasible_candidates": found.feasible}


def _given(point: Point) -> dict[str, Any]:
    """Arguments that a search and an estimate have in common."""
    options = point.options
    return {
        "model": options["model"],
        "cluster": cluster_with(options["cluster"], point.hardware),
        "seq": options.get("seq"),
        "dtype": options.get("dtype", USUAL["dtype"]),
        "optimizer": options.get("optimizer", USUAL["optimizer"]),
        "framework": options.get("framework"),
        "lora": options.get("lora"),
    }


def _searched(point: Point) -> PlanResult:
    options, keep = point.options, point.keep
    choices, columns = job_choices(options.get("fix", {}))
    request = Request(**_given(point), mode=MODES[options.get("mode", "corrected")])
    search = Search(
        request=request,
        gpus=options["gpus"],
        global_batch=options["global_batch"],
        choices=choices,
        columns=columns,
        limit=options.get("limit", ()),
        strategy=options.get("strategy", USUAL["strategy"]),
    )
    setting, scope = search.prepared()
    ranked = partial(rank_plans, setting, scope.space, scope.strategies, scope.constraints)
    return ranked(top=keep.top, brief=not keep.front)


def _estimated(point: Point) -> Estimate:
    options = point.options
    asked = fitting_plan(
        **_given(point),
        gpus=options["gpus"],
        global_batch=options.get("global_batch"),
        strategy=options.get("strategy", USUAL["strategy"]),
        mode=options.get("mode", "corrected"),
        plan=options.get("plan"),
    )
    return estimate_plan(asked.setting, asked.strategy, asked.plans, what_ifs=False)


def _numbers(e: Estimate) -> Row:
    low, high = e.step_time_band_s or (None, None)
    return {
        **{name: getattr(e, name) for name in _NUMBERS},
        "step_time_bracket_low_s": e.step_time_bracket_s[0],
        "step_time_bracket_high_s": e.step_time_bracket_s[1],
        "step_time_band_low_s": low,
        "step_time_band_high_s": high,
        "feasible": e.feasible,
        "bottleneck": e.bottleneck,
    }


def _plan(plan: Row) -> Row:
    placement = plan.get("placement", {})
    return {
        **{name: plan[name] for name in ("strategy", *_DEGREES, "recompute", "schedule")},
        **{f"in_{axis}": placement.get(axis) for axis in _AXES},
        "plan_json": json.dumps(plain(plan), sort_keys=True),
    }


def _terms(rank: int, e: Estimate) -> Iterator[Row]:
    for quantity, terms in (("time_s", e.time), ("overlapped_s", e.overlapped), ("memory_bytes", e.memory)):
        for path, value in terms.items():
            yield {"kind": "term", "rank": rank, "quantity": quantity, "path": path, "value": value}
