"""The report of limits: a layer's times by resource, and the latency wall."""

from __future__ import annotations

from steptime.errors import counted
from steptime.surface.limits import Limits
from steptime.surface.report import text as t
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
        f"  {result.wall_parameters:.3g} parameters, {result.wall_tokens:.3g} tokens; "
        "no number of devices trains a larger one in time",
    ]
    for line in lines:
        out.print(t.printable(line), soft_wrap=True)
