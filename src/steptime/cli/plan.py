"""``steptime plan``: rank every parallel plan of a model on a number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from steptime.cli import options as o

EXIT_NOTHING_FITS: Final = 3
#: Options whose value is the same for all candidates.
FOR_ALL: Final = (
    "context",
    "gradient_dtype",
    "graphs",
    "dispatcher",
    "attention_dtype",
    "document_length",
    "expert_imbalance",
    "expert_capacity",
)
#: Options that say what a search is to look for.
GOALS: Final = ("objective", "deadline", "budget", "failures", "prices")


def command(
    model: o.ModelOrRun,
    cluster: o.Cluster = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    seq: o.Seq = None,
    dtype: o.Dtype = None,
    optimizer: o.Optimizer = None,
    strategy: o.StrategyOption = None,
    mode: o.ModeOption = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            "--fix",
            metavar="KEY=VALUE",
            help="Keep one degree or choice, as tp=8, ep=16, sp=off, recompute=full. Repeatable.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="'KEY<=N'", help="Bound a degree, or oom_probability (<=0.1). Repeatable."),
    ] = None,
    oom_limit: Annotated[
        str | None,
        typer.Option(
            "--oom-limit",
            metavar="SHARE",
            help="Chance of running out of memory above which no plan is first (default 5 %; 1: any).",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", metavar="default|search|ORDER", help="How ranks lie: an order as tp-cp-pp-dp."),
    ] = None,
    framework: o.Framework = None,
    lora_rank: o.LoraRank = None,
    lora_targets: o.LoraTargets = None,
    qlora: o.Qlora = None,
    dora: o.Dora = None,
    context: o.Context = None,
    gradient_dtype: o.GradientDtype = None,
    graphs: o.Graphs = None,
    dispatcher: o.Dispatcher = None,
    attention_dtype: o.AttentionDtype = None,
    document_length: o.DocumentLength = None,
    expert_imbalance: o.ExpertImbalance = None,
    expert_capacity: o.ExpertCapacity = None,
    tokens: o.Tokens = None,
    samples: o.Samples = None,
    epochs: o.Epochs = None,
    dataset_tokens: o.DatasetTokens = None,
    dataset_samples: o.DatasetSamples = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="What is least: time of a step (default), goodput, energy, cost of the run."),
    ] = None,
    deadline: o.Deadline = None,
    budget: o.Budget = None,
    failures: o.Failures = None,
    prices: o.Prices = None,
    top: Annotated[int, o.number("--top", "K", "Plans to show.", 1, 10_000)] = 10,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """Rank every parallel plan of a model on a number of devices, and say why the first is the best.

    Cluster, devices and batch are needed. Options win over RUN.toml, whose own plan is not kept. Exits with 3 when no
    plan fits; the nearest plan is printed nevertheless.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Run :func:`command` with the values of its parameters, by name."""
    from steptime import api
    from steptime.cli.job import job_from, needed, parse_fix, parse_limits, parse_share, plan_not_kept
    from steptime.cli.output import Progress

    model, fix, limit = given["model"], given["fix"] or (), given["limit"] or ()
    job = job_from(model, given["cluster"], o.settings_given(given), {})
    for_all = o.given(**{name: given[name] for name in FOR_ALL})
    options: dict[str, Any] = {
        "fix": {**parse_fix(fix), **for_all},
        "limit": parse_limits(limit),
        "top": given["top"],
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
        print_plan_result(result, {**asked, "constraints": words})
    if not result.feasible:
        raise typer.Exit(EXIT_NOTHING_FITS)
