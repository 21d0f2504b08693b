"""``steptime plan``: rank every parallel plan of a model on so many devices."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from steptime.surface.cli import options as o

EXIT_NOTHING_FITS: Final = 3


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Catalogue name, config.json or TOML file.")],
    cluster: Annotated[str, typer.Option("--cluster", help="Catalogue name or TOML file of the machines.")],
    gpus: Annotated[int, o.GPUS],
    global_batch: Annotated[int, o.GLOBAL_BATCH],
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
    framework: o.Framework = None,
    lora_rank: o.LoraRank = None,
    lora_targets: o.LoraTargets = None,
    qlora: o.Qlora = None,
    context: o.Context = None,
    gradient_dtype: o.GradientDtype = None,
    expert_imbalance: o.ExpertImbalance = None,
    expert_capacity: o.ExpertCapacity = None,
    top: Annotated[int, o.number("--top", "K", "Plans to show.", 1, 10_000)] = 10,
    json: o.Json = False,
) -> None:
    """Rank every parallel plan of a model on so many devices, and say why the first is the best.

    Exits with 3 when no plan fits; what is nearest is printed all the same.
    """
    from steptime.surface import api
    from steptime.surface.cli.constraints import parse_fix, parse_limits
    from steptime.surface.cli.job import refuse_run
    from steptime.surface.cli.progress import Progress

    refuse_run(model)
    options = o.given(
        seq=seq, dtype=dtype, optimizer=optimizer, strategy=strategy, mode=mode, framework=framework, top=top
    )
    options |= o.lora_of(lora_rank, lora_targets, qlora)
    for_all = o.given(
        context=context, gradient_dtype=gradient_dtype, expert_imbalance=expert_imbalance,
        expert_capacity=expert_capacity,
    )  # fmt: skip
    options |= {"fix": {**parse_fix(fix or ()), **for_all}, "limit": parse_limits(limit or ())}
    with Progress("plans") as progress:
        result = api.plan(model, cluster, gpus=gpus, global_batch=global_batch, **options, progress=progress)
    if json:
        from steptime.surface.cli.output import print_json

        print_json(result.to_json())
    else:
        from steptime.surface.report.plan import print_plan_result

        words = [*(f"--fix {text}" for text in fix or ()), *(f"--limit {text}" for text in limit or ())]
        asked = {"gpus": gpus, "global_batch": global_batch, "model": model, "cluster": cluster, "mode": mode}
        print_plan_result(result, {**asked, "constraints": words})
    if not result.feasible:
        raise typer.Exit(EXIT_NOTHING_FITS)
