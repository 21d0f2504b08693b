"""``steptime plan``: rank every parallel plan of a model on a number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import ANSWER, flag, number, row, takes
from steptime.options import ADAPTERS, CHOICES, SETTINGS

EXIT_NOTHING_FITS: Final = 3
#: Choices that ``--fix`` takes too, and that have an option of their own.
SHARED: Final = tuple(name for name in CHOICES if name not in ("schedule", "overlap", "offload", "attention"))
#: Options that say what a search is to look for.
GOALS: Final = ("objective", "deadline", "budget", "failures", "prices")


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
    return _run({**locals(), **job})


def _run(given: Mapping[str, Any]) -> int:
    """Run :func:`command` with the values of its parameters, by name."""
    from steptime import api
    from steptime.cli.job import job_from, needed, parse_fix, parse_limits, parse_share, plan_not_kept
    from steptime.cli.output import Progress

    model, fix, limit = given["model"], given["fix"] or (), given["limit"] or ()
    job = job_from(model, given["cluster"], o.settings_given(given), {})
    for_all = o.given(**{name: given[name] for name in SHARED})
    options: dict[str, Any] = {
        "fix": {**parse_fix(fix), **for_all},
        "limit": parse_limits(limit),
        "top": given["top"] or 10,
        **({} if given["oom_limit"] is None else {"oom_limit": parse_share("--oom-limit", given["oom_limit"])}),
        **o.given(placement=given["placement"]),
        **o.training_given(given),
        **o.given(**{name: given[name] for name in GOALS}),
    }
    draw = o.drawing("scatter", given["plot"])
    with Progress("plans") as progress:
        result = api.plan(job.model, needed(job, "a search"), **job.settings, **options, progress=progress)
    result = dataclasses.replace(result, notes=(*plan_not_kept(model, job), *result.notes))
    if draw is not None and result.plans:
        draw(result.to_json())
    if given["json"]:
        from steptime.cli.output import print_json

        print_json(result.to_json())
    else:
        from steptime.report.plan import print_plan_result

        words = [*(f"--fix {text}" for text in fix), *(f"--limit {text}" for text in limit)]
        asked = {"model": job.model, "cluster": job.cluster, "mode": None, **job.settings}
        print_plan_result(result, {**asked, "constraints": words}, top=given["top"], long=given["long"])
    return 0 if result.feasible else EXIT_NOTHING_FITS
