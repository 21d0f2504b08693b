"""The command ``steptime profile``: capture a real model, and show the cost of each operator and the peak memory."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, real
from steptime.errors import UserError, shorten
from steptime.options import MAX_SEQ
from steptime.report.plots.asked import drawing

if TYPE_CHECKING:
    from steptime.captured.formats.snapshot_reader import DeviceMemory

Dim = Annotated[list[str] | None, flag("--dim", metavar="NAME=N", help="Size of a named dim of an ONNX file.")]

MAX_DEPTH = 20
ENDINGS = {
    "snapshot": (".pickle", ".pkl"),
    "trace": (".pftrace", ".perfetto-trace", ".json"),
    "roofline": (".svg", ".png", ".pdf"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Paths of the files to write."""

    snapshot: Path | None
    trace: Path | None
    roofline: Path | None


def command(
    model: Annotated[
        str, positional(metavar="pkg.module:factory|FILE.py:factory|FILE.onnx", help="Factory or file of the model.")
    ],
    device: Annotated[
        str,
        flag(
            "--device", catalogue="device", metavar="DEVICE", help="Device or cluster of the catalogue, or a TOML file."
        ),
    ],
    batch: Annotated[int | None, number("--batch", "N", "Samples, if the factory takes them.")] = None,
    seq: o.Seq = None,
    inputs: Annotated[
        list[str] | None,
        flag("--input", metavar="[NAME=]8x1024[:int64]", help="Shape of an argument of forward; once for each."),
    ] = None,
    dim: Dim = None,
    dtype: Annotated[
        str | None,
        flag("--dtype", metavar="fp32|bf16|fp16", help="Element type of the weights; default: as the module is made."),
    ] = None,
    autocast: Annotated[str | None, flag("--autocast", metavar="bf16|fp16", help="Automatic mixed precision.")] = None,
    optimizer: Annotated[
        str | None,
        flag(
            "--optimizer",
            metavar="NAME",
            help="adamw (default), adam, sgd, sgd-momentum (each with -loop too, the first two with -fused), adagrad, "
            "rmsprop, adafactor or none.",
        ),
    ] = None,
    loss: o.Loss = None,
    inference: Annotated[bool, flag("--inference", help="The forward pass alone.")] = False,
    nonzero_share: Annotated[
        float | None,
        real("--nonzero-share", "SHARE", "Share of a mask to take as true where shapes depend on data."),
    ] = None,
    whole: Annotated[bool, flag("--no-fold", help="Record every block of a run of equal ones.")] = False,
    depth: Annotated[int, number("--depth", "N", "Levels of modules to show.", high=MAX_DEPTH)] = 3,
    snapshot: Annotated[
        Path | None,
        flag("--snapshot", metavar="FILE.pickle", help="Memory snapshot for pytorch.org/memory_viz."),
    ] = None,
    trace: Annotated[
        Path | None, flag("--trace", metavar="FILE.pftrace|.json", help="Trace for Perfetto, or Chrome JSON.")
    ] = None,
    roofline: Annotated[
        Path | None, flag("--roofline", "--plot", metavar="FILE", help="Roofline plot: .svg, .png or .pdf.")
    ] = None,
    measured: Annotated[
        Path | None,
        flag("--compare", metavar="FILE.pickle", help="A measured memory snapshot to compare with the prediction."),
    ] = None,
    predictor: o.Predictor = None,
    show_all: o.All = False,
    json: o.Json = False,
) -> None:
    """Capture one training step of a real model and cost it: time, memory, operators, modules.

    The factory returns a torch.nn.Module, or (module, inputs), or (module, inputs, loss). Importing it runs its code:
    use it on code that you trust. Weights are never allocated, no GPU is needed.
    """
    from steptime.api.jobs import CAPTURED_DEFAULT
    from steptime.captured.profiling import check_onnx, profile

    files = Files(snapshot=snapshot, trace=trace, roofline=roofline)
    _check(files)
    snapshot_measured = _measured(measured)
    if model.lower().endswith(".onnx"):
        check_onnx({
            "batch": batch, "seq": seq, "input": inputs, "dtype": dtype, "autocast": autocast, "optimizer": optimizer,
            "loss": loss, "nonzero-share": nonzero_share, "no-fold": whole,
        })  # fmt: skip
    if nonzero_share is not None and not 0 < nonzero_share <= 1:
        raise UserError(f"--nonzero-share {nonzero_share} is out of range", hint="more than 0, at most 1")
    found = profile(
        model, device, batch=batch, seq=seq, dtype=dtype, inputs=inputs or (), optimizer=optimizer or CAPTURED_DEFAULT,
        loss=loss, autocast=autocast, training=not inference, fold=not whole, nonzero_share=nonzero_share,
        dims=parse_dims(dim or []), predictor=predictor,
    )  # fmt: skip
    _write(found, files)
    compared = _compared(found, snapshot_measured)
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(**found.to_json(depth), **({"measured": compared} if compared else {})))
        return
    from steptime.captured.report.profile import print_captured_memory, print_profile, settings_lines

    print_profile(found.table, head=settings_lines(found), depth=depth, show_all=show_all)
    print_captured_memory(found)
    if compared:
        from steptime.captured.report.profile import print_measured

        print_measured(compared)


def parse_dims(texts: list[str]) -> dict[str, int]:
    """Sizes from ``NAME=N`` texts.

    Raises:
        UserError: a text has another form.

    >>> parse_dims(["batch=8"])
    {'batch': 8}
    """
    out = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isascii() or not value.isdigit() or not 0 < int(value) <= MAX_SEQ:
            raise UserError(f"--dim {shorten(text)!r} is no size", hint="write NAME=N, for example batch=8")
        out[name] = int(value)
    return out


def _check(files: Files) -> None:
    """Check suffixes and folders of the files to write, and the plotting library, before the work."""
    from steptime.store.files import is_file, refuse_unwritable

    for name, allowed in ENDINGS.items():
        path: Path | None = getattr(files, name)
        if path is None:
            continue
        if path.suffix not in allowed:
            raise UserError(f"--{name} {path}: the name must end in {' or '.join(allowed)}")
        if not path.parent.is_dir():
            raise UserError(f"--{name} {path}: there is no folder {path.parent}")
        special = os.path.exists(path) and not is_file(path) and not path.is_dir()  # noqa: PTH110 - as in is_file
        if not special:  # a device or a pipe is written to directly
            refuse_unwritable(path)
    if files.roofline is not None:
        from steptime.registry import require

        require("matplotlib", "a picture")


def _write(found: Any, files: Files) -> None:
    """Write the requested files."""
    seconds = found.table.seconds.tolist()
    if files.snapshot is not None:
        from steptime.captured.formats.memory_snapshot import write_memory_snapshot
        from steptime.captured.profiling import countable_sizes

        with countable_sizes():
            write_memory_snapshot(
                found.program, files.snapshot, seconds=seconds, placement=found.placement,
                workspaces=found.workspaces,
            )  # fmt: skip
    if files.trace is not None:
        from steptime.captured.formats.step_trace import write_trace

        write_trace(found.program, files.trace, seconds=seconds)
    if (draw := drawing("roofline", files.roofline)) is not None:
        draw(found.to_json())


def _measured(path: Path | None) -> DeviceMemory | None:
    """The device with the highest peak of a measured snapshot, read before the work; None without a snapshot."""
    if path is None:
        return None
    from steptime.captured.formats.snapshot_reader import read_snapshot

    return read_snapshot(path).device()


def _compared(found: Any, measured: DeviceMemory | None) -> dict[str, Any] | None:
    """Measured and predicted peaks; for a CUDA device also the other sizes, in total and by category."""
    if measured is None:
        return None
    peak, predicted = measured.peak_allocated_bytes, found.memory["allocated"]
    out = {"peak_bytes": peak, "predicted_bytes": predicted, "error": predicted / peak - 1 if peak else None}
    if found.placement is None:
        return out
    from steptime.captured.formats.snapshot_reader import compare_snapshot
    from steptime.captured.profiling import countable_sizes

    with countable_sizes():
        sides = compare_snapshot(found.placement, measured, workspaces=found.workspaces)
    rows = {"totals": sides.totals, "by_category": sides.by_category}
    return out | {name: [asdict(row) | {"relative": row.relative} for row in each] for name, each in rows.items()}
