"""The report of limits: a layer's times by resource, and the latency wall."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.errors import counted
from steptime.lab.limits.calls import Limits
from steptime.lab.limits.figures import Figure, ProductTime
from steptime.report import text as t
from steptime.units import format_seconds


def print_limits(result: Limits) -> None:
    """Write the report to standard output."""
    out, layer, run = t.console(), result.layer, result.run
    lines = [
        f"Linear layer {layer.d_in} x {layer.d_out}, {counted(result.tokens, 'token', f'{result.tokens:g}')} per "
        f"micro-batch, tp_in {layer.tp_in} x tp_out {layer.tp_out} x dp {layer.dp} = "
        f"{counted(layer.devices, 'device')}, {result.device.name}",
        "",
        "Forward and backward of one micro-batch (all resources overlap)",
    ]
    for name, title in (("flop", "compute"), ("memory", "device memory"), ("network", "network")):
        mark = "  <- binding" if name == result.binding else ""
        lines.append(f"  {title:<14}{format_seconds(result.resources_s[name]):>12}{mark}")
    lines += [
        "",
        f"Gradient all-reduce at the end of a batch: {format_seconds(result.end_of_batch_s)}",
        "",
        f"Latency wall of a run of {format_seconds(run.duration_s)} at {format_seconds(run.layer_latency_s)} per "
        f"block: {run.wall_flops:.3g} FLOP",
        f"  {run.wall_parameters:.3g} parameters, {run.wall_tokens:.3g} tokens; "
        "no number of devices trains a larger one in time",
        f"  extrapolated: {run.wall_batch_tokens:.3g} tokens per step, {t.count(run.wall_layers)} blocks "
        f"{t.count(run.wall_width)} wide",
    ]
    for line in lines:
        out.print(t.printable(line), soft_wrap=True)


def print_figures(figures: Sequence[Figure], products: Sequence[ProductTime]) -> None:
    """Write figures as they are stated beside those of the formulas, and the table of products."""
    out = t.console()
    table = t.grid(["figure", "stated", "computed", "difference", "source"], left=(0, 4))
    for each in figures:
        values = (format_seconds(v) if each.unit == "s" else f"{v:.3g} FLOP" for v in (each.stated, each.computed))
        table.add_row(each.name, *values, t.change(each.error), each.source)
    out.print(table)
    devices = list(dict.fromkeys(each.device for each in products))
    t.heading(out, "Product on three levels of memory, us (after the slash the weight gradient, where it differs)")
    table = t.grid(["weights, tokens", *devices])
    table.columns[0].no_wrap = True
    for shape in dict.fromkeys((each.rows, each.columns, each.tokens) for each in products):
        times = [each for each in products if (each.rows, each.columns, each.tokens) == shape]
        both = ((each.forward_s, each.weight_gradient_s) for each in times)
        cells = [" / ".join(dict.fromkeys(f"{value_s * 1e6:.4g}" for value_s in pair)) for pair in both]
        table.add_row(f"{shape[0]} x {shape[1]}, {shape[2]}", *cells)
    out.print(table)
