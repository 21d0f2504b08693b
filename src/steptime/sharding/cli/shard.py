"""``steptime shard``: the best shardings of a real module over a number of devices, with a bound."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steptime.cli import options as o
from steptime.errors import UnknownNameError, UserError
from steptime.plan.keys import MAX_DEVICES
from steptime.report import text as t
from steptime.store.files import refuse_unwritable, write_whole

if TYPE_CHECKING:
    from steptime.sharding.shard import Sharded


def command(
    model: Annotated[
        str, typer.Argument(metavar="pkg.module:factory|FILE.py:factory|FILE.onnx", help="What makes the model.")
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="Catalogue name or TOML file of the machines.")],
    gpus: Annotated[int, o.number("--gpus", "N", "Devices of the mesh.", 2, MAX_DEVICES)],
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", metavar="data=2,model=4", help="Axes, the innermost last; default: all of 1 and 2 axes."
        ),
    ] = None,
    batch: Annotated[int | None, o.number("--batch", "N", "Samples of the whole step.")] = None,
    seq: o.Seq = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[NAME=]8x1024[:int64]", help="Shape of an argument of forward; repeatable."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="fp32|bf16|fp16", help="Element type of the weights; default: as it is made."),
    ] = None,
    autocast: Annotated[
        str | None, typer.Option("--autocast", metavar="bf16|fp16", help="Automatic mixed precision.")
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd, ... or none.")] = "adamw",
    loss: o.Loss = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="'N GiB'", help="Memory of a device for tensors; default: what it has."),
    ] = None,
    annotate: Annotated[
        list[str] | None,
        typer.Option(
            "--annotate", metavar="'PATTERN=R S(0)'", help="Sharding of a parameter, input or result; repeatable."
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="'batch:data, heads:model'", help="Named dims and their axes.")
    ] = None,
    complete: Annotated[
        str, typer.Option("--complete", metavar="solve|propagate", help="How the rest follows from these two.")
    ] = "solve",
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Traffic of weights and gradients never overlaps with computation.")
    ] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Stages on sub-meshes too, with schedule, micro-batch and recomputation.")
    ] = False,
    further: Annotated[
        list[str] | None,
        typer.Option("--further", metavar="CLUSTER=N", help="With --pipeline: N devices of another kind; repeatable."),
    ] = None,
    seconds: Annotated[float, o.real("--seconds", "S", "Time limit of the search of each mesh.")] = 60.0,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE.py", help="Write the plan: DTensor placements, and the step to run."),
    ] = None,
    json: o.Json = False,
) -> None:
    """The best shardings of a real module's training step: how each weight and activation lies on a mesh of devices.

    Importing the file runs its code. Each operator is sharded along what it is: batch, features, heads, sequence,
    pixels. An integer program over all of them is solved with a bound; memory is that of the recorded tensors.
    """
    from steptime.cli.output import Progress
    from steptime.sharding.shard import shard
    from steptime.units import parse

    room = None if memory is None else parse(memory, "bytes")
    captured = o.given(batch=batch, seq=seq, dtype=dtype, autocast=autocast, loss=loss, memory_bytes=room)
    captured |= {"inputs": tuple(inputs or ()), "optimizer": optimizer}
    if export is not None:
        _check_export(export, pipeline)
    if pipeline:
        _print_pipeline(model, cluster, gpus, captured, further or (), json)
        return
    if complete not in ("solve", "propagate"):
        raise UnknownNameError("way to complete", complete, ("solve", "propagate"))
    given = o.given(layout=layout, mesh=mesh, annotate=annotate, complete=complete)
    with Progress("meshes") as progress:
        found = shard(
            model,
            cluster,
            gpus=gpus,
            overlaps=not no_overlap,
            seconds=seconds,
            runnable=export is not None,
            progress=progress,
            **captured,
            **given,
        )
    if export is not None:
        from steptime.sharding.export import python_file

        write_whole(export, python_file(found.best))
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    print_sharded(found)
    if export is not None:
        t.indented(t.console(), f"\nwritten: {export}; import it: PARAMETERS, UPDATES, INPUTS, trainer()", by=0)


def _check_export(path: Path, pipeline: bool) -> None:
    """Refuse before the search what could not be written after it.

    Raises:
        UserError: stages are not exported, the file is no Python file, or cannot be written.
    """
    if pipeline:
        raise UserError("--export with --pipeline", hint="a step of one mesh can be exported; leave --pipeline out")
    if path.suffix != ".py":
        raise UserError(f"--export {path} is no Python file", hint="name it FILE.py")
    refuse_unwritable(path)


def _print_pipeline(
    model: str, cluster: str, gpus: int, captured: dict[str, Any], further: Sequence[str], json: bool
) -> None:
    """The joint plan of stages and shardings.

    Raises:
        UserError: the batch is missing, or another kind of device is written otherwise.
    """
    from steptime.cli.output import Progress, print_json
    from steptime.sharding.cli.joint import print_joint
    from steptime.sharding.joint import joint

    batch = captured.pop("batch", None)
    if batch is None:
        raise UserError("a pipeline divides the samples of a step", hint="give --batch N")
    others = [text.rpartition("=") for text in further]
    for name, _, count in others:
        if not name or not count.isdecimal():
            raise UserError(f"--further {name or count!r} has no number of devices", hint="write dgx-a100=8")
    with Progress("sub-meshes") as progress:
        found = joint(
            model,
            cluster,
            gpus=gpus,
            global_batch=batch,
            further=[(name, int(count)) for name, _, count in others],
            progress=progress,
            **captured,
        )
    if json:
        print_json(found.to_json())
        return
    print_joint(found)


def print_sharded(found: Sharded) -> None:
    """Write the report to standard output."""
    out, plan, record = t.console(), found.best, found.to_json()
    out.print(t.printable(f"{found.model} on {found.cluster}, mesh {plan.built.mesh}"), style="bold")
    low, high = plan.bracket_s
    lines = [
        f"step {t.seconds(plan.step_s)} (bracket {t.seconds(low)} to {t.seconds(high)})",
        f"bound {t.seconds(plan.bound_s)}: no shardings on this mesh are faster by more than {t.percent(plan.gap)}; "
        f"{plan.stop}"
        if plan.bound_s
        else f"no bound: {plan.stop}",
        f"memory {t.memory(record['peak_memory_bytes'])}"
        + ("" if record["memory_limit_bytes"] is None else f" of {t.memory(record['memory_limit_bytes'])}"),
    ]
    if found.unknown:
        lines.append(
            f"on every device, nothing is known of their dims: {', '.join(found.unknown)} "
            f"({t.percent(found.unknown_share)} of computing)"
        )
    for line in lines:
        t.indented(out, line, by=0)
    out.print()
    table = t.grid(("time", "", "share"))
    total = sum(record["time"].values())
    for name, seconds in record["time"].items():
        hidden = " (overlaps with compute)" if plan.overlaps and name == "weights_and_gradients" else ""
        table.add_row(name.replace("_", " ") + hidden, t.seconds(seconds), t.share(seconds, total))
    out.print(table)
    if len(found.tried) > 1:
        out.print()
        meshes = t.grid(("mesh", "step"))
        for mesh, step_s, stop in found.tried:
            meshes.add_row(mesh, t.printable(stop) if step_s is None else t.seconds(step_s))
        out.print(meshes)
    out.print()
    parameters = t.grid(("parameter", "count", "sharding"), left=(0, 2))
    for (name, sharding), count in by_name(record["parameters"]).items():
        parameters.add_row(t.printable(name), str(count), sharding)
    out.print(parameters)


def by_name(shardings: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Parameters of lists under one name, with their number.

    >>> by_name({"h.0.w": "R S(0)", "h.1.w": "R S(0)", "norm": "R R"})
    {('h.*.w', 'R S(0)'): 2, ('norm', 'R R'): 1}
    """
    out: dict[tuple[str, str], int] = {}
    for name, sharding in shardings.items():
        key = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), sharding
        out[key] = out.get(key, 0) + 1
    return out
