"""``steptime plan``: rank every parallel plan of a model on a number of devices."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import ANSWER, flag, number, row, takes
from steptime.options import ADAPTERS, CHOICES, SETTINGS

EXIT_NOTHING_FITS: Final = 3
#: Choices with an option of their own that ``--fix`` takes too.
SHARED: Final = tuple(name for name in CHOICES if name not in ("schedule", "overlap", "offload", "attention"))


@takes({**{name: row(name) for name in (*SETTINGS, *SHARED, *ADAPTERS)}, **o.TRAINING})
def command(
    model: o.ModelOrRun,
    fix: Annotated[
        list[str] | None,
        flag(
            "--fix",
            metavar="KEY=VALUE",
            help="Keep one degree or choice, as tp=8, ep=16, sp=off, recompute=full. Repeatable.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        flag("--limit", metavar="'KEY<=N'", help="Bound a degree, or oom_probability (<=0.1). Repeatable."),
    ] = None,
    oom_limit: Annotated[
        str | None,
        flag(
            "--oom-limit",
            metavar="SHARE",
            help="Chance of running out of memory above which no plan is first (default 5 %; 1: any).",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        flag("--placement", metavar="default|search|ORDER", help="How ranks lie: an order as tp-cp-pp-dp."),
    ] = None,
    shardings: Annotated[
        str | None,
        flag(
            "--shardings",
            metavar="auto|all|none",
            help="Operators of a torch module one by one too; auto: of one without a run of equal blocks.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        flag("--objective", help="What is least: time of a step (default), goodput, energy, cost of the run."),
    ] = None,
    deadline: o.Deadline = None,
    budget: o.Budget = None,
    failures: o.Failures = None,
    prices: o.Prices = None,
    top: Annotated[
        int | None, number("--top", "K", "Plans to show; default 5, with --long and --json 10.", 1, 10_000)
    ] = None,
    long: Annotated[
        bool,
        flag("--long", help="Also the front of time and memory, and where the time goes.", group=ANSWER),
    ] = False,
    plot: o.Plot = None,
    json: o.Json = False,
    **job: Any,
) -> int:
    """Rank every parallel plan of a model on a number of devices, and say why the first is the best.

    Cluster, devices and batch are needed. Options win over RUN.toml, whose own plan is not kept. Exits with 3 when no
    plan fits; the nearest plan is printed nevertheless.
    """
    from steptime import api
    from steptime.cli.job import job_from, needed, parse_fix, parse_limits, parse_share, plan_not_kept
    from steptime.cli.output import Progress
    from steptime.report.plots.asked import drawing

    asked = job_from(model, job["cluster"], o.settings_given(job), {})
    options: dict[str, Any] = {
        "fix": {**parse_fix(fix or ()), **o.given(**{name: job[name] for name in SHARED})},
        "limit": parse_limits(limit or ()),
        "top": top or 10,
        **o.given(oom_limit=None if oom_limit is None else parse_share("--oom-limit", oom_limit), placement=placement),
        **o.given(shardings=shardings),
        **o.training_given(job),
        **o.given(objective=objective, deadline=deadline, budget=budget, failures=failures, prices=prices),
    }
    draw = drawing("scatter", plot)
    with Progress("plans") as progress:
        result = api.plan(asked.model, needed(asked, "a search"), **asked.settings, **options, progress=progress)
    result = dataclasses.replace(result, notes=(*plan_not_kept(model, asked), *result.notes))
    if draw is not None and result.plans:
        draw(result.to_json())
    if json:
        from steptime.cli.output import print_json

        print_json(result.to_json())
    else:
        from steptime.report.plan import print_plan_result

        said = {"model": asked.model, "cluster": asked.cluster, "mode": None, **asked.settings}
        print_plan_result(result, said, top=top, long=long)
    return 0 if result.feasible else EXIT_NOTHING_FITS
