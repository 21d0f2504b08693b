"""``steptime schedules``: all pipeline schedules, or one with its rules; ``steptime simulate``: a step, played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, real, takes


def schedules(
    name: Annotated[str | None, positional(metavar="[NAME]", help="Show one, with its order.")] = None,
    ranks: Annotated[int, number("--ranks", "P", "Ranks of the pipeline.", 1, 4096)] = 8,
    micro_batches: Annotated[int, number("--micro-batches", "M", "Micro-batches of a step.", 1, 65_536)] = 32,
    csv: Annotated[
        Path | None, flag("--csv", metavar="FILE", help="Write the order of NAME for PyTorch's pipelining.")
    ] = None,
    search: Annotated[bool, flag("--search", help="Search for a faster one; for the options below.")] = False,
    times: Annotated[
        str | None,
        flag("--times", metavar="F,I,W", help="Seconds of the passes; of each stage with colons: 1:1:2,..."),
    ] = None,
    message: Annotated[float | None, real("--message", "SECONDS", "From rank to rank.")] = None,
    memory: Annotated[
        str | None,
        flag("--memory", metavar="N", help="Micro-batches that fit into a rank; of each rank with colons."),
    ] = None,
    chunks: Annotated[int | None, number("--chunks", "1|2", "Stages of a rank; default: both.", 1, 2)] = None,
    seconds: Annotated[float | None, real("--seconds", "S", "Search so long, not by work.")] = None,
    seed: Annotated[int, number("--seed", "N", "Of the search.", 0, 2**31)] = 0,
    json: o.Json = False,
) -> None:
    """List pipeline schedules: bubble, activations, versions of weights; show one; or search for a better one.

    Closed forms for equal stages whose forward passes and both parts of the backward pass take the same time.
    """
    if search:
        _searched(name, ranks, micro_batches, (times, message, memory, chunks, seconds, seed), csv, json)
        return
    from dataclasses import asdict

    from steptime.cli.output import document, print_json
    from steptime.errors import UserError
    from steptime.schedule import SCHEDULES
    from steptime.simulation.pytorch_csv import csv_text
    from steptime.simulation.report import print_schedules
    from steptime.simulation.summary import notes_of, summary
    from steptime.store.files import write_bytes

    _no_search({"times": times, "message": message, "memory": memory, "chunks": chunks, "seconds": seconds})
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


def _no_search(given: dict[str, object]) -> None:
    """Refuse options of the search where --search is not given."""
    from steptime.errors import UserError

    for name, value in given.items():
        if value is not None:
            raise UserError(f"--{name} is of a search", hint="add --search")


def _searched(
    name: str | None, ranks: int, micro_batches: int, asked: tuple[Any, ...], csv: Path | None, json: bool
) -> None:
    """Search, and show what was found next to the named schedules."""
    from steptime.cli.output import print_json
    from steptime.errors import UserError
    from steptime.simulation.pytorch_csv import csv_text
    from steptime.simulation.search import search_schedule
    from steptime.simulation.search_report import print_found, progress_line
    from steptime.store.files import write_bytes

    times, message, memory, chunks, seconds, seed = asked
    if name is not None:
        raise UserError(f"--search finds a schedule of its own; got the name {name}", hint="leave the name out")
    parts = ("1,1,1" if times is None else times).split(",")
    if len(parts) != 3:
        raise UserError(f"--times {times}: {len(parts)} times", hint="three, as in --times 1,1.2,0.8")
    forward, inputs, weights = (_numbers(f"--times {times}", part) for part in parts)
    with progress_line() as progress:
        found = search_schedule(
            ranks,
            micro_batches,
            times=(forward, inputs, weights),
            message_s=0.0 if message is None else message,
            memory=float("inf") if memory is None else _numbers(f"--memory {memory}", memory),
            chunks=chunks,
            seconds=seconds,
            seed=seed,
            progress=progress,
        )
    if csv is not None:
        write_bytes(csv, csv_text(found.found.table).encode())
    if json:
        print_json(found.to_json())
    else:
        print_found(found)


def _numbers(option: str, text: str) -> float | list[float]:
    """A number, or several with colons between them."""
    from steptime.errors import UserError

    try:
        numbers = [float(each) for each in text.split(":")]
    except ValueError:
        raise UserError(f"{option}: {text!r} is no number", hint="a number, or numbers with colons: 1:1:2") from None
    return numbers[0] if len(numbers) == 1 else numbers


@takes(o.JOB)
def simulate(
    model: o.ModelOrRun,
    trace: Annotated[
        Path | None,
        flag("--trace", metavar="FILE", help="Write a trace: for Perfetto, or as .json for Chrome."),
    ] = None,
    csv: Annotated[Path | None, flag("--csv", metavar="FILE", help="Write the order for PyTorch's pipelining.")] = None,
    stage_times: Annotated[
        Path | None, flag("--stage-times", metavar="FILE", help="CSV of measured times of the stages' passes.")
    ] = None,
    overhead: Annotated[
        float, real("--overhead", "SECONDS", "More time of each micro-batch on each rank, for --stage-times.")
    ] = 0.0,
    slow_rank: Annotated[
        list[str] | None,
        flag("--slow-rank", metavar="RANK:FACTOR", help="A slow rank; 3:1.2: passes of rank 3 take 1.2 times."),
    ] = None,
    jitter: Annotated[
        float, real("--jitter", "SHARE", "Standard deviation of the factor on each pass, for --samples.")
    ] = 0.05,
    samples: Annotated[int, number("--samples", "N", "Steps with jitter.", 0, 10_000)] = 0,
    seed: Annotated[int, number("--seed", "N", "Of the samples.", 0, 2**31)] = 0,
    balance: Annotated[
        bool, flag("--balance", help="Split the layers so that the step is fastest, and compare.")
    ] = False,
    layout: Annotated[
        str | None, flag("--layout", metavar="TEXT", help="Megatron-Core's layout: 'Et*3|(tt|)*29m|L'.")
    ] = None,
    rank_speeds: Annotated[
        str | None,
        flag("--rank-speeds", metavar="LIST", help="Relative speed of each rank: 1,1,0.5,0.5 or 1*2,0.5*2."),
    ] = None,
    rank_memory: Annotated[
        str | None, flag("--rank-memory", metavar="LIST", help="Memory of each rank: 80GiB*8,40GiB*8.")
    ] = None,
    plot: o.Plot = None,
    timeline: Annotated[bool, flag("--timeline", help="With --json: every pass too.")] = False,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Play one step of a pipeline action by action: any schedule, its bubble by cause, memory by rank, a trace.

    Takes the options of estimate. --schedule is a name of the command schedules, or a CSV file of PyTorch's pipelining;
    --vpp is the number of virtual stages of a rank.
    """
    from steptime.cli.job import asked_job, needed
    from steptime.cli.output import print_json
    from steptime.formats.trace import chrome, perfetto
    from steptime.report.plots.asked import drawing
    from steptime.simulation.pytorch_csv import csv_text
    from steptime.simulation.report import print_simulation
    from steptime.simulation.run import Observed, csv_of
    from steptime.simulation.stages import simulate_stages
    from steptime.simulation.trace import trace_of
    from steptime.store.files import write_bytes

    draw = drawing("timeline", plot)
    asked = asked_job(model, job)
    found = simulate_stages(
        asked.model,
        needed(asked, "a simulation"),
        balance=balance,
        layout=layout,
        rank_speeds=rank_speeds,
        rank_memory=rank_memory,
        observed=Observed(stage_times=stage_times, overhead_s=overhead, slow_ranks=_slow_ranks(slow_rank or ())),
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
    if draw is not None:
        draw(found.to_json(timeline=True))
    if json:
        print_json(found.to_json(timeline=timeline))
        return
    print_simulation(found)


def _slow_ranks(given: Sequence[str]) -> dict[int, float]:
    """Factor by rank; UserError: an option is not RANK:FACTOR, or a rank is given twice."""
    from steptime.errors import UserError, shown

    found: dict[int, float] = {}
    for text in given:
        rank, _, factor = text.partition(":")
        try:
            number, value = int(rank), float(factor)
        except ValueError:
            raise UserError(f"--slow-rank {shown(text)}", hint="a rank and a factor, as 3:1.2") from None
        if found.setdefault(number, value) != value:
            raise UserError(
                f"--slow-rank {number}: factors {found[number]:g} and {value:g}", hint="a rank has one factor"
            )
    return found
