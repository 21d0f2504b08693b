"""``steptime schedules``: all pipeline schedules, or one with its rules; ``steptime simulate``: a step, played."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from steptime.cli import options as o


def schedules(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one, with its order.")] = None,
    ranks: Annotated[int, o.number("--ranks", "P", "Ranks of the pipeline.", 1, 4096)] = 8,
    micro_batches: Annotated[int, o.number("--micro-batches", "M", "Micro-batches of a step.", 1, 65_536)] = 32,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the order of NAME for PyTorch's pipelining.")
    ] = None,
    json: o.Json = False,
) -> None:
    """List pipeline schedules: bubble, activations, versions of weights; or show one.

    Closed forms for equal stages whose forward passes and both parts of the backward pass take the same time.
    """
    from dataclasses import asdict

    from steptime.cli.output import document, print_json
    from steptime.errors import UserError
    from steptime.report.simulation import print_schedules
    from steptime.schedule import SCHEDULES
    from steptime.schedule.pytorch_csv import csv_text
    from steptime.schedule.summary import notes_of, summary
    from steptime.store.files import write_bytes

    rows = summary(ranks, micro_batches)
    if name is None:
        if csv is not None:
            raise UserError("--csv writes one schedule", hint="name it: steptime schedules zb-v --csv FILE")
        if json:
            print_json(document(schedules=[asdict(row) for row in rows]))
        else:
            print_schedules(rows, ranks, micro_batches)
        return
    schedule = SCHEDULES[name]
    table = schedule.actions(ranks, schedule.usual_chunks, micro_batches, slices=schedule.usual_slices)
    if csv is not None:
        write_bytes(csv, csv_text(table).encode())
    own = [row for row in rows if row.name == name]
    if json:
        print_json(document(**asdict(own[0]), order=[table.of_rank(rank) for rank in range(ranks)]))
        return
    print_schedules(own, ranks, micro_batches)
    print(notes_of(own))
    for rank in range(min(ranks, 8)):
        print(f"rank {rank}: {' '.join(table.of_rank(rank)[:24])}{' ...' if len(table.of_rank(rank)) > 24 else ''}")


@o.describes_job(after="model")
def simulate(
    model: o.ModelOrRun,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace: for Perfetto, or as .json for Chrome."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the order for PyTorch's pipelining.")
    ] = None,
    stage_times: Annotated[
        Path | None, typer.Option("--stage-times", metavar="FILE", help="CSV of measured times of the stages' passes.")
    ] = None,
    overhead: Annotated[
        float, o.real("--overhead", "SECONDS", "More time of each micro-batch on each rank, for --stage-times.")
    ] = 0.0,
    slow_rank: Annotated[
        list[str] | None,
        typer.Option("--slow-rank", metavar="RANK:FACTOR", help="A slow rank; 3:1.2: passes of rank 3 take 1.2 times."),
    ] = None,
    jitter: Annotated[
        float, o.real("--jitter", "SHARE", "Standard deviation of the factor on each pass, for --samples.")
    ] = 0.05,
    samples: Annotated[int, o.number("--samples", "N", "Steps with jitter.", 0, 10_000)] = 0,
    seed: Annotated[int, o.number("--seed", "N", "Of the samples.", 0, 2**31)] = 0,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Play one step of a pipeline action by action: any schedule, its bubble by cause, memory by rank, a trace.

    Takes the options of estimate. --schedule is a name of the command schedules, or a CSV file of PyTorch's pipelining;
    --vpp is the number of virtual stages of a rank.
    """
    from steptime.api.simulation import Observed, csv_of
    from steptime.api.simulation import simulate as play
    from steptime.cli.estimate import plan_given, written_given
    from steptime.cli.job import job_from, needed
    from steptime.cli.output import print_json
    from steptime.formats.simulated_trace import trace_of
    from steptime.formats.trace import chrome, perfetto
    from steptime.report.simulation import print_simulation
    from steptime.schedule.pytorch_csv import csv_text
    from steptime.store.files import write_bytes

    asked = job_from(model, job["cluster"], o.settings_given(job), plan_given(job, written_given(job)))
    schedule = asked.plan.get("schedule") or ("interleaved" if asked.plan.get("vpp", 1) > 1 else "1f1b")
    found = play(
        asked.model,
        needed(asked, "a simulation"),
        schedule=schedule,
        observed=Observed(
            stage_times=stage_times, overhead_s=overhead, slow_ranks=dict(map(_slow_rank, slow_rank or ()))
        ),
        jitter=jitter,
        samples=samples,
        seed=seed,
        plan=asked.plan,
        **asked.settings,
    )
    if trace is not None:
        made = trace_of(found.simulation, found.memory, found.message_bytes)
        write_bytes(trace, chrome(made) if trace.suffix == ".json" else perfetto(made))
    if csv is not None:
        write_bytes(csv, csv_text(csv_of(found)).encode())
    if json:
        print_json(found.to_json())
        return
    print_simulation(found)


def _slow_rank(given: str) -> tuple[int, float]:
    """Rank and factor of an option."""
    from steptime.errors import UserError, shown

    rank, _, factor = given.partition(":")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise UserError(f"--slow-rank {shown(given)}", hint="a rank and a factor, as 3:1.2") from None
