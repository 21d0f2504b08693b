"""``steptime shard``: the best shardings of a real module over a number of devices, with a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.captured.cli.profile import Dim, parse_dims
from steptime.cli import options as o
from steptime.cli.parser import flag, real
from steptime.errors import UnknownNameError, UserError
from steptime.report import text as t
from steptime.sharding.cli import options as own
from steptime.sharding.cli.lists import listed
from steptime.store.files import refuse_unwritable, write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.sharding.shard import Sharded

LEAST_SHARE: Final = 1e-6
"""Share of a step below which a report leaves a group of terms out."""
SHOWN: Final = 5
"""Largest number of conflicts, or replicated operators, that a report lists."""
WORDS: Final = {
    "memory_bound": "bound by memory",
    "tp_comm": "activations",
    "dp_comm": "weights and gradients",
    "host": "waits for the host",
    "scaling": "stragglers",
    "overhead": "ranks together",
}
"""Groups of terms in the words of the report."""


def command(
    model: own.Model,
    cluster: own.Cluster,
    gpus: own.Gpus,
    mesh: own.Mesh = None,
    batch: own.Batch = None,
    seq: o.Seq = None,
    inputs: Annotated[
        list[str] | None,
        flag("--input", metavar="[NAME=]8x1024[:int64]", help="Shape of an argument of forward; repeatable."),
    ] = None,
    dim: Dim = None,
    dtype: Annotated[
        str | None,
        flag("--dtype", metavar="fp32|bf16|fp16", help="Element type of the weights; default: as made."),
    ] = None,
    autocast: Annotated[str | None, flag("--autocast", metavar="bf16|fp16", help="Automatic mixed precision.")] = None,
    framework: o.Framework = None,
    optimizer: Annotated[str, flag("--optimizer", help="adamw, adam, sgd, ... or none.")] = "adamw",
    loss: o.Loss = None,
    memory: own.Memory = None,
    annotate: Annotated[
        list[str] | None,
        flag("--annotate", metavar="'PATTERN=R S(0)'", help="Sharding of a parameter, input or result; repeatable."),
    ] = None,
    layout: Annotated[
        str | None, flag("--layout", metavar="'batch:data, heads:model'", help="Named dims and their axes.")
    ] = None,
    complete: Annotated[
        str | None,
        flag("--complete", metavar="solve|propagate", help="How the rest follows from these two; default: solve."),
    ] = None,
    no_overlap: Annotated[
        bool, flag("--no-overlap", help="Traffic of weights and gradients never overlaps with computation.")
    ] = False,
    synchronised_norms: Annotated[
        bool,
        flag("--synchronised-norms", help="Batch norms take the statistics of the whole batch; with --export always."),
    ] = False,
    pipeline: Annotated[
        bool, flag("--pipeline", help="Stages on sub-meshes too, with schedule, micro-batch and recomputation.")
    ] = False,
    further: Annotated[
        list[str] | None,
        flag("--further", metavar="CLUSTER=N", help="With --pipeline: N devices of another kind; repeatable."),
    ] = None,
    seconds: Annotated[
        float | None,
        real("--seconds", "S", "Time limit of the search of each mesh; default: 60, with --pipeline 20."),
    ] = None,
    export: Annotated[
        Path | None,
        flag("--export", metavar="FILE.py", help="Write the plan as a file that runs on PyTorch's DTensor."),
    ] = None,
    json: o.Json = False,
) -> None:
    """The best shardings of a real module's training step: how each weight and activation lies on a mesh of devices.

    Importing the file runs its code. Each operator is sharded along what it is: batch, features, heads, sequence,
    pixels. An integer program over all of them is solved with a bound; memory is that of the recorded tensors.
    """
    from steptime.cli.output import Progress
    from steptime.registry import require
    from steptime.sharding.shard import shard

    require("highspy", "choosing shardings")
    _apart(
        pipeline,
        {"mesh": mesh, "annotate": annotate, "layout": layout, "complete": complete},
        further,
    )
    if complete not in (None, "solve", "propagate"):
        raise UnknownNameError("way to complete", str(complete), ("solve", "propagate"))
    limit_s = None if seconds is None else own.seconds_of("--seconds", seconds)
    captured = o.given(batch=batch, seq=seq, dtype=dtype, autocast=autocast, loss=loss, seconds=limit_s)
    captured |= o.given(framework=framework)
    captured |= o.given(memory_bytes=own.room_of(memory))
    captured |= {
        "inputs": tuple(inputs or ()),
        "dims": parse_dims(dim or []),
        "optimizer": optimizer,
        "overlaps": not no_overlap,
        "synchronised_norms": synchronised_norms,
    }
    if export is not None:
        _check_export(export, model, pipeline)
    if pipeline:
        _print_pipeline(model, cluster, gpus, captured, further or (), json)
        return
    given = o.given(layout=layout, mesh=mesh, annotate=annotate, complete=complete)
    with Progress("meshes") as progress:
        found = shard(model, cluster, gpus=gpus, runnable=export is not None, progress=progress, **captured, **given)
    if export is not None:
        from steptime.sharding.export import python_file

        write_whole(export, python_file(found.best))
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    print_sharded(found)
    if export is not None:
        t.indented(t.console(), f"\nwritten: {export}; import it: parallelize(), trainer()", by=0)


def _check_export(path: Path, model: str, pipeline: bool) -> None:
    """Check before the search that the plan can be exported after it.

    Raises:
        UserError: stages and ONNX files are not exported, the file is no Python file, or cannot be written.
    """
    if pipeline:
        raise UserError("--export with --pipeline", hint="a step of one mesh can be exported; leave --pipeline out")
    if model.lower().endswith(".onnx"):
        raise UserError("--export of an ONNX file, which has no module to run", hint="give the factory of the module")
    if path.suffix != ".py":
        raise UserError(f"--export {path} is no Python file", hint="name it FILE.py")
    refuse_unwritable(path)


def _apart(pipeline: bool, of_mesh: Mapping[str, object], further: Sequence[str] | None) -> None:
    """Reject options without effect: those of a single mesh with --pipeline, and --further without it."""
    if further and not pipeline:
        raise UserError("--further adds devices of another kind to a pipeline", hint="add --pipeline")
    name = next((name for name, value in of_mesh.items() if value), None) if pipeline else None
    if name is not None:
        raise UserError(
            f"--{name} is of one mesh; with --pipeline each stage has a mesh of its own",
            hint="leave one of the two out",
        )


def _print_pipeline(
    model: str, cluster: str, gpus: int, captured: dict[str, Any], further: Sequence[str], json: bool
) -> None:
    """Search and print the joint plan of stages and shardings.

    Raises:
        UserError: the model is an ONNX file, the batch is missing, or --further has another form.
    """
    from steptime.cli.output import Progress, print_json
    from steptime.sharding.cli.joint import print_joint
    from steptime.sharding.joint import joint

    if model.lower().endswith(".onnx"):
        hint = "give the factory of the module, or leave --pipeline out"
        raise UserError("--pipeline of an ONNX file, whose batch is that of the file", hint=hint)
    batch = captured.pop("batch", None)
    captured.pop("dims")
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
    for line in _lines(found, record):
        t.indented(out, line, by=0)
    out.print()
    table = t.grid(("time", "", "share"))
    for name, seconds in found.estimate.time.rollup(1).items():
        if seconds > LEAST_SHARE * found.step_s:
            table.add_row(WORDS.get(name, name.replace("_", " ")), t.seconds(seconds), t.share(seconds, found.step_s))
    table.add_row("step", t.seconds(found.step_s), t.share(found.step_s, found.step_s))
    out.print(table)
    hidden_s = found.estimate.overlapped.rollup(1).get("dp_comm", 0.0)
    if hidden_s:
        t.indented(out, f"weights and gradients travel {t.seconds(hidden_s)} more while the devices compute", by=0)
    if len(found.tried) > 1:
        out.print()
        meshes = t.grid(("mesh", "step"))
        for mesh, step_s, stop in found.tried:
            meshes.add_row(mesh, t.printable(stop) if step_s is None else t.seconds(step_s))
        out.print(meshes)
    lists = {"taken as true": record["taken_as_true"], "conflicts": record["conflicts"]}
    lists["replicated against the layout"] = [
        f"{each['item']} along {each['axis']}: {each['because']} ({t.percent(each['share_of_compute'])} of computing)"
        for each in record["unmatched"]
    ]
    for title, texts in lists.items():
        _print_some(out, title, texts)
    out.print()
    parameters = t.grid(("parameter", "count", "sharding"), left=(0, 2))
    for name, count, sharding in listed(record["parameters"]):
        parameters.add_row(t.printable(name), str(count), sharding)
    out.print(parameters)


def _lines(found: Sharded, record: Mapping[str, Any]) -> Iterator[str]:
    """Lines on step time, bound, memory, and operators that run whole on every device."""
    estimate = found.estimate
    low, high = estimate.step_time_bracket_s
    bracket = f"bracket {t.seconds(low)} to {t.seconds(high)}"
    yield f"step {t.seconds(found.step_s)} ({bracket}), MFU {t.percent(estimate.mfu)}"
    yield own.software_line(estimate)
    if found.bound_s > 0:
        bound = f"no shardings on this mesh are faster by more than {t.percent(found.gap)}"
        yield f"bound {t.seconds(found.bound_s)}: {bound}; {found.stop}"
    else:
        yield f"no bound: {found.stop}"
    limit, chance = record["memory_limit_bytes"], estimate.oom_probability
    within = "" if limit is None else f" of {t.memory(limit)} that plans may take"
    yield f"memory {t.memory(estimate.peak_memory_bytes)}{within}; {t.percent(chance)} to run out"
    if found.unknown:
        whole = f"{', '.join(found.unknown)} ({t.percent(found.unknown_share)} of computing)"
        yield f"whole on every device, without a dim that the mesh can divide: {whole}"


def _print_some(out: Console, title: str, texts: Sequence[str]) -> None:
    """Print the first texts under a title."""
    if not texts:
        return
    out.print()
    more = "" if len(texts) <= SHOWN else f", the first {SHOWN} (others: --json)"
    out.print(f"{title}: {len(texts)}{more}")
    for text in texts[:SHOWN]:
        t.indented(out, text, by=2)
