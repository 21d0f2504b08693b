"""``steptime planners``: the planner compared with other searches and manual recipes, quality over CPU time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, number, real
from steptime.sharding.cli import options as own

if TYPE_CHECKING:
    from steptime_lab.planners.comparison import Comparison


def command(
    model: own.Model,
    cluster: own.Cluster,
    gpus: own.Gpus,
    mesh: own.Mesh = None,
    batch: own.Batch = None,
    seq: o.Seq = None,
    memory: own.Memory = None,
    dtype: Annotated[
        str | None,
        flag("--dtype", metavar="fp32|bf16|fp16", help="Element type of the weights; default: as made."),
    ] = None,
    framework: o.Framework = None,
    methods: Annotated[
        str | None, flag("--methods", metavar="A,B", help="Searches and recipes by name; default: all.")
    ] = None,
    cpu: Annotated[float, real("--cpu", "S", "CPU seconds of all searches together.")] = 2.0,
    seed: Annotated[int, number("--seed", "N", "Of the random numbers.", 0, 2**31 - 1)] = 0,
    plot: Annotated[
        Path | None, flag("--plot", metavar="FILE", help="Draw time over CPU seconds too (needs matplotlib).")
    ] = None,
    json: o.Json = False,
) -> None:
    """The planner of `steptime shard` next to other searches and manual recipes on one problem under one cost.

    Importing the file runs its code. Nothing overlaps, so that all times are sums. No method can be below the bound.
    """
    from steptime.cli.output import Progress
    from steptime.report.figure import refuse_plot
    from steptime_lab.planners.comparison import planners

    if plot is not None:
        refuse_plot(plot)
    with Progress("methods") as progress:
        found = planners(
            model,
            cluster,
            gpus=gpus,
            mesh=mesh,
            methods=named(methods),
            cpu_s=own.seconds_of("--cpu", cpu),
            seed=seed,
            memory_bytes=own.room_of(memory),
            progress=progress,
            **o.given(batch=batch, seq=seq, dtype=dtype, framework=framework),
        )
    if plot is not None:
        write_plot(found, plot)
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    print_comparison(found, plot)


def named(methods: str | None) -> tuple[str, ...] | None:
    """Names between commas, each once; the planner runs in any case.

    >>> named("greedy, planner,greedy,data parallel")
    ('greedy', 'data parallel')
    """
    from steptime.errors import UserError

    if methods is None:
        return None
    names = dict.fromkeys(each.strip() for each in methods.split(","))
    if names.pop("planner", "") is None and not names:
        raise UserError("--methods has the planner alone, which runs in any case", hint="name others, or leave it out")
    return tuple(names)


def print_comparison(found: Comparison, plot: Path | None = None) -> None:
    """Write the report to standard output."""
    from steptime.report import text as t

    out = t.console()
    out.print(t.printable(f"{found.model} on {found.cluster}, mesh {found.mesh}"), style="bold")
    t.indented(
        out, f"bound {t.seconds(found.bound_s)}: no shardings on this mesh are faster, where nothing overlaps", by=0
    )
    if found.estimate is not None:
        t.indented(out, own.software_line(found.estimate), by=0)
    out.print()
    table = t.grid(("method", "step", "over bound", "CPU s"))
    for each in found.entries:
        if each.step_s is None:
            table.add_row(each.name, "-", "-", f"{each.cpu_s:.2f}")
        else:
            table.add_row(
                each.name, t.seconds(each.step_s), t.change(each.step_s / found.bound_s - 1), f"{each.cpu_s:.2f}"
            )
    out.print(table)
    for each in found.entries:
        if each.step_s is None:
            t.indented(out, t.printable(f"{each.name}: {each.stop or 'nothing that fits'}"), by=0)
    if plot is not None:
        out.print(t.printable(f"\nDrawn in {plot}"), soft_wrap=True)


def write_plot(found: Comparison, path: Path) -> None:
    """Plot the best step time so far over CPU seconds on logarithmic axes, with the bound.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    from steptime.report.figure import drawn
    from steptime.report.text import printable

    with drawn(path) as figure:
        axes = figure.add_subplot()
        for each in found.entries:
            if each.step_s is not None:
                points = [(point.cpu_s, point.total_s) for point in each.points]
                points.append((max(each.cpu_s, points[-1][0]), each.step_s))
                axes.step(*zip(*points, strict=True), where="post", label=each.name)
        axes.axhline(found.bound_s, color="black", linestyle="--", label="bound")
        title = printable(f"{found.model} on {found.cluster}, {found.mesh.devices} devices")
        axes.set(xscale="log", yscale="log", xlabel="CPU time (s)", ylabel="step (s)", title=title)
        axes.legend(fontsize="x-small")
