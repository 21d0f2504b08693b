"""``steptime plan``: rank every parallel plan of a model on so many devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from steptime.surface.cli import options as o

EXIT_NOTHING_FITS: Final = 3
#: Parameters of the command that are handed to the API where they are given.
OPTIONS: Final = ("seq", "dtype", "optimizer", "strategy", "mode", "framework", "top")
#: Those that hold for every candidate, as ``--fix`` does.
FIXED: Final = ("context", "gradient_dtype", "expert_imbalance", "expert_capacity")


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
        list[str] | None, typer.Option("--limit", metavar="'KEY<=N'", help="Bound one degree. Repeatable.")
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
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """What :func:`command` does with the values of its parameters, by name."""
    from steptime.surface import api
    from steptime.surface.cli.constraints import parse_fix, parse_limits
    from steptime.surface.cli.job import refuse_run
    from steptime.surface.cli.progress import Progress

    refuse_run(given["model"])
    job = {name: given[name] for name in ("gpus", "global_batch")}
    options = o.given(**{name: given[name] for name in OPTIONS})
    options |= o.lora_of(given)
    fixed = o.given(**{name: given[name] for name in FIXED})
    options |= {"fix": {**parse_fix(given["fix"] or ()), **fixed}, "limit": parse_limits(given["limit"] or ())}
    with Progress("plans") as progress:
        result = api.plan(given["model"], given["cluster"], **job, **options, progress=progress)
    if given["json"]:
        from steptime.surface.cli.output import print_json

        print_json(result.to_json())
    else:
        from steptime.surface.report.plan import print_plan_result

        words = [
            *(f"--fix {text}" for text in given["fix"] or ()),
            *(f"--limit {text}" for text in given["limit"] or ()),
        ]
        named = {name: given[name] for name in ("model", "cluster", "mode")}
        print_plan_result(result, {**job, **named, "constraints": words})
    if not result.feasible:
        raise typer.Exit(EXIT_NOTHING_FITS)
