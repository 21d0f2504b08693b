"""``steptime rewrite``: a cheaper equivalent graph of a real model, and what compiling it would gain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.captured.cli.profile import Dim, parse_dims
from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, real
from steptime.errors import UserError
from steptime.registry import Registry

if TYPE_CHECKING:
    from steptime.rewrite.rewriting import Rewriting

REPORTS: Final = Registry[Callable[..., None]]("report of a graph", "steptime.graph_reports")
"""Name -> function that prints a further report on a graph; ``compiled``: the gain of compiling."""


def command(
    model: Annotated[
        str | None,
        positional(metavar="pkg.module:factory|FILE.py:factory|FILE.onnx", help="What makes the model."),
    ] = None,
    device: Annotated[
        str | None, flag("--device", catalogue="device", metavar="DEVICE", help="Device or cluster, or a TOML file.")
    ] = None,
    objective: Annotated[str, flag("--objective", metavar="time|memory|launches", help="What to lower.")] = "time",
    training: Annotated[bool, flag("--training", help="The whole step; default: the forward pass.")] = False,
    everything: Annotated[
        bool, flag("--all", help="Apply every rewrite, also those within the doubt of the prediction.")
    ] = False,
    only: Annotated[list[str] | None, flag("--only", metavar="PASS", help="Try this pass; again for more.")] = None,
    measure: Annotated[bool, flag("--measure", help="Time each rewrite on this CPU, which decides.")] = False,
    layouts: Annotated[bool, flag("--layouts", help="Then choose the layout of every value.")] = False,
    mutants: Annotated[bool, flag("--mutants", help="Try partially equal programs, corrected.")] = False,
    output: Annotated[Path | None, flag("--output", "-o", metavar="FILE.py|.onnx", help="Write it.")] = None,
    picture: Annotated[Path | None, flag("--svg", metavar="FILE.svg", help="Draw before and after.")] = None,
    compiled: Annotated[bool, flag("--compile", help="What torch.compile gains, next to what it does here.")] = False,
    lengths: Annotated[
        str | None,
        flag("--lengths", metavar="128=0.5,512=0.5|FILE", help="Lengths and their shares: the best buckets."),
    ] = None,
    buckets: Annotated[int, number("--buckets", "N", "Buckets of lengths.", high=64)] = 4,
    compile_s: Annotated[float, real("--compile-seconds", "S", "Time of one compilation.")] = 30.0,
    branch: Annotated[float | None, real("--branch", "P", "Probability that a branch on data is taken.")] = None,
    search: Annotated[
        str | None,
        flag("--search", metavar="NAME", help="template, greedy, metaflow, taso, pet, ...; see docs."),
    ] = None,
    alpha: Annotated[float, real("--alpha", "A", "Searches follow graphs below A times the best.")] = 1.05,
    budget: Annotated[int, number("--budget", "N", "Graphs that a search follows.", high=10**9)] = 1000,
    weights: Annotated[
        str | None,
        flag("--weights", metavar="METRIC=W,...", help="Lower this sum: device_s, host_s, launches, ..."),
    ] = None,
    limit: Annotated[
        list[str] | None, flag("--limit", metavar="METRIC=N", help="Keep below it: peak_bytes=2e9, ...")
    ] = None,
    rules: Annotated[
        str | None, flag("--rules", metavar="shipped|FILE", help="Proved rules as moves of the search.")
    ] = None,
    search_seconds: Annotated[
        float | None, real("--search-seconds", "S", "Stop the search then, with the best so far.")
    ] = None,
    list_passes: Annotated[bool, flag("--passes", help="List the passes and stop.")] = False,
    batch: Annotated[int | None, number("--batch", "N", "Samples, if the factory takes them.")] = None,
    seq: o.Seq = None,
    inputs: Annotated[
        list[str] | None,
        flag("--input", metavar="[NAME=]8x1024[:int64]", help="Shape of an argument; once for each."),
    ] = None,
    dim: Dim = None,
    dtype: Annotated[str | None, flag("--dtype", metavar="fp32|bf16|fp16", help="Element type of the weights.")] = None,
    optimizer: Annotated[str | None, flag("--optimizer", metavar="NAME", help="As of profile.")] = None,
    loss: o.Loss = None,
    show_all: Annotated[bool, flag("--all-rows", help="List every rewrite.")] = False,
    json: o.Json = False,
) -> None:
    """Rewrite a real model to a cheaper equivalent graph, where the gain exceeds the doubt of the prediction.

    The factory returns a torch.nn.Module, or (module, inputs), or (module, inputs, loss). Importing it runs its code:
    use it on code that you trust. What is written was checked against the original on random inputs.
    """
    if list_passes:
        _list(json, mutants)
        return
    if model is None or device is None:
        raise UserError("rewrite needs a model and --device", hint="--passes lists what it knows")
    own: dict[str, Any] = {"batch": batch, "seq": seq, "inputs": inputs or (), "dtype": dtype}
    if compiled or lengths is not None or branch is not None:
        if output is not None or picture is not None:
            raise UserError("--compile, --lengths and --branch write no graph", hint="leave -o and --svg out")
        REPORTS["compiled"](model, device, own, lengths, buckets, compile_s, branch, compiled, json)
        return
    _check_picture(picture)
    from steptime.api.jobs import CAPTURED_DEFAULT
    from steptime.rewrite.cli.searching import options_of
    from steptime.rewrite.engine import objective_named
    from steptime.rewrite.rewriting import rewrite

    options = options_of(search, alpha, budget, weights, limit or [], search_seconds, rules)

    found = rewrite(
        model,
        device,
        search=options,
        objective=objective_named(objective),
        training=training,
        everything=everything,
        passes=only or (),
        measure=measure,
        layouts=layouts,
        mutants=mutants,
        output=output,
        optimizer=optimizer or CAPTURED_DEFAULT,
        loss=loss,
        dims=parse_dims(dim or []),
        **own,
    )
    _show(found, output, picture, show_all=show_all, json=json)


def _show(found: Rewriting, output: Path | None, picture: Path | None, *, show_all: bool, json: bool) -> None:
    """Write the picture to its file and the report to standard output."""
    if picture is not None:
        from steptime.rewrite.report.picture import svg
        from steptime.store.files import write_whole

        write_whole(picture, svg(found))
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(**found.to_json()))
        return
    from steptime.rewrite.report.rewriting import print_rewriting

    print_rewriting(found, [path for path in (output, picture) if path is not None], show_all=show_all)


def _list(json: bool, mutants: bool) -> None:
    from steptime.rewrite.report.rewriting import passes_json, print_passes

    if json:
        from steptime.cli.output import document, print_json

        print_json(document(passes=passes_json(mutants=mutants)))
        return
    print_passes(mutants=mutants)


def _check_picture(path: Path | None) -> None:
    if path is None:
        return
    from steptime.store.files import refuse_unwritable

    if path.suffix.lower() != ".svg":
        raise UserError(f"--svg {path}: the name must end in .svg")
    if not path.parent.is_dir():
        raise UserError(f"--svg {path}: there is no folder {path.parent}")
    refuse_unwritable(path)
