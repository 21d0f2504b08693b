"""``steptime rewrite --compile``, ``--lengths`` and ``--branch``: gain of compiling, buckets of lengths, branches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steptime.errors import UserError, shorten
from steptime.rewrite.buckets import Buckets, best_buckets, cost_of, parse_lengths, powers_of_two
from steptime_lab.compiling import Branched, Compiled, branched, broken, compiled, inductor_here, times_by_length

STEPS: Final = 10_000
"""Number of steps that share the time of compilations."""


def run(
    model: str,
    device: str,
    own: Mapping[str, Any],
    lengths: str | None,
    buckets: int,
    compile_s: float,
    branch: float | None,
    here: bool,
    json: bool,
) -> None:
    """Print the results of the given options.

    Raises:
        UserError: the model is an ONNX file, or cannot be captured.
    """
    from steptime.hardware import device_within
    from steptime.rewrite.rewriting import target_of
    from steptime.rewrite.trace import trace

    if model.lower().endswith(".onnx"):
        raise UserError("an ONNX file is not compiled by PyTorch", hint="give the module that it came from")
    target = device_within(device)
    given = {**own, "input": own["inputs"]}
    cuda = "cuda" if target.runs_cuda else "cpu"
    found: dict[str, Any] = {}
    if lengths is not None:
        shares = parse_lengths(_text(lengths))
        found["buckets"] = _buckets(model, target, given, shares, buckets, compile_s)
    from steptime.rewrite.recording import Watching

    module = None
    if here or branch is not None:
        module = target_of(model, given, with_memory=here)
        module.module.eval()
    if branch is not None and module is not None:
        found["branches"] = branched(module.module, module.inputs, target, branch, target=cuda, name=module.name)
    if here and module is not None:
        seen = Watching(decides=True)
        flow = trace(module.module, module.inputs, target=cuda, name=module.name, watching=seen).flow
        pieces = broken(module.module, module.inputs)
        inductor = inductor_here(module.module, module.inputs)
        found["compiled"] = compiled(flow, target, pieces=pieces, inductor=inductor)
    _show(found, json)


def _text(lengths: str) -> str:
    """The lengths as given, or read from a file."""
    if "=" in lengths or lengths.replace(",", "").isdigit():
        return lengths
    from steptime.store.files import read_text

    return read_text(Path(lengths), 2**24, f"--lengths {shorten(lengths)}")


def _buckets(
    model: str, device: Any, given: Mapping[str, Any], shares: Mapping[int, float], most: int, compile_s: float
) -> dict[str, Buckets]:
    """Buckets at powers of two, the best buckets of each number up to `most`, and every length by itself."""
    from steptime.rewrite.rewriting import target_of
    from steptime.rewrite.trace import trace

    powers = powers_of_two(shares)
    ends = sorted({min(shares), max(*shares, *powers), (min(shares) + max(*shares, *powers)) // 2})
    flows = {}
    for length in ends:
        module = target_of(model, {**given, "seq": length}, with_memory=False)
        module.module.eval()
        kind = "cuda" if device.runs_cuda else "cpu"
        flows[length] = trace(module.module, module.inputs, target=kind, name=module.name).flow
    times = times_by_length([*shares, *powers], flows, device)
    found = {"powers of two": cost_of(powers, shares, times.__getitem__, steps=STEPS, compile_s=compile_s)}
    exact = cost_of(list(shares), shares, times.__getitem__, steps=STEPS, compile_s=compile_s)
    for best in best_buckets(shares, most, times.__getitem__, steps=STEPS, compile_s=compile_s):
        found[f"best {len(best.tops)}"] = best
    return found | {"every length": exact}


def _show(found: Mapping[str, Any], json: bool) -> None:
    from dataclasses import asdict

    if json:
        from steptime.cli.output import document, print_json

        content = {
            name: {key: asdict(each) for key, each in value.items()} if name == "buckets" else value.to_json()
            for name, value in found.items()
        }
        print_json(document(**content))
        return
    from steptime.report import text as t

    out = t.console()
    if isinstance(made := found.get("compiled"), Compiled):
        _print_compiled(out, made)
    if isinstance(ways := found.get("branches"), Branched):
        t.heading(out, "branches on data")
        table = t.grid(("way", "chance", "step", "operators"))
        for path in ways.paths:
            way = " ".join("yes" if taken else "no" for taken in path.taken) or "none"
            table.add_row(way, t.percent(path.probability), t.seconds(path.step_time_s), t.count(path.operators))
        out.print(table)
        out.print(f"expected step {t.seconds(ways.step_time_s)}")
    if "buckets" in found:
        t.heading(out, f"buckets of lengths, {STEPS:,} steps")
        table = t.grid(("buckets", "padding", "step", "compilations", "with them", "lengths"), left=(0, 5))
        for name, each in found["buckets"].items():
            tops = " ".join(map(str, each.tops[:8])) + (" ..." if len(each.tops) > 8 else "")
            row = (t.percent(each.padding), t.seconds(each.step_time_s), f"{each.compilations:.1f}")
            table.add_row(name, *row, t.seconds(each.total_s), tops)
        out.print(table)


def _print_compiled(out: Any, made: Compiled) -> None:
    from steptime.report import text as t

    out.print(t.printable(f"{made.name} on {made.device}: what compiling gains"), style="bold")
    table = t.grid(("", "step", "launches", "moved"))
    rows = {"eager": made.eager, "compiled": made.fused}
    rows |= {} if made.graphed is None else {"with CUDA graphs": made.graphed}
    for name, totals in rows.items():
        figures = (t.seconds(totals["step_time_s"]), t.count(totals["launches"]), t.memory(totals["moved_bytes"]))
        table.add_row(name, *figures)
    out.print(table)
    out.print(f"predicted: {made.kernels} generated kernels, {made.library} calls of libraries")
    if made.inductor is not None:
        real = made.inductor
        line = f"Inductor here: {real.generated_kernels} generated kernels of {real.nodes_before_fusion} nodes"
        out.print(f"{line}, {real.layout_kernels} of them only for layouts of convolutions here;")
        out.print(f"{real.library_kernels} calls of libraries, compiled in {t.seconds(real.compile_s)}")
    t.heading(out, f"{len(made.pieces)} piece{'s' if len(made.pieces) != 1 else ''}")
    for number, piece in enumerate(made.pieces):
        why = f", ends at {piece.line}: {piece.reason}" if piece.reason else ""
        t.indented(out, t.printable(f"{number + 1}: {piece.operators} operators, {piece.guards:,} guards{why}"), 2)
