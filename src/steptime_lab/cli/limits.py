"""``steptime limits``: limits of scale of a layer and a training run, set by data movement and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.api.request import MAX_COUNT
from steptime.cli import options as o
from steptime.cli.parser import flag, number
from steptime.errors import counted
from steptime.report import text as t
from steptime.report.plots.asked import drawing
from steptime.units import format_seconds
from steptime_lab.limits import Figure, Limits, ProductTime

if TYPE_CHECKING:
    from steptime_lab.scale import Curve

#: Parameter of the command -> dimension of its text, and parameter of the API.
QUANTITIES: Final = {
    "flops_8bit": ("flops_per_s", "flops_8bit_per_s"),
    "memory_bandwidth": ("Bps", "memory_Bps"),
    "network_bandwidth": ("Bps", "network_Bps"),
    "duration": ("s", "duration_s"),
    "layer_latency": ("s", "layer_latency_s"),
}


def _count(option: str, text: str) -> Any:
    return number(option, "N", text, 1, MAX_COUNT)


def _number(option: str, text: str, metavar: str = "N") -> Any:
    return flag(option, metavar=metavar, help=text)


def _quantity(option: str, unit: str, text: str) -> Any:
    return flag(option, metavar=f"'N {unit}'", help=text)


def command(
    d_in: Annotated[int | None, _count("--d-in", "Width of the layer's input; default 16384.")] = None,
    d_out: Annotated[int | None, _count("--d-out", "Width of its output; default 81920.")] = None,
    tokens: Annotated[float | None, _number("--tokens", "Tokens per micro-batch, all ranks; default 32768.")] = None,
    tp_in: Annotated[int | None, _count("--tp-in", "Ranks that share the input dim; default 8.")] = None,
    tp_out: Annotated[int | None, _count("--tp-out", "Ranks that share the output dim; default 40.")] = None,
    dp: Annotated[int | None, _count("--dp", "Data ranks; default 32.")] = None,
    width_bytes: Annotated[float | None, _number("--width-bytes", "Bytes per word; default 2.")] = None,
    device: Annotated[
        str | None,
        flag(
            "--device",
            catalogue="device",
            help="Catalogue name or cluster file; default: the H100 SXM5 of arXiv 2411.01137.",
        ),
    ] = None,
    flops_8bit: Annotated[
        str | None, _quantity("--flops-8bit", "TFLOP/s", "Dense 8-bit peak; default: the device's.")
    ] = None,
    memory_bandwidth: Annotated[
        str | None, _quantity("--memory-bandwidth", "GB/s", "Of device memory; default: the device's.")
    ] = None,
    network_bandwidth: Annotated[
        str | None,
        _quantity("--network-bandwidth", "GB/s", "Both directions together; default: the device's fastest links."),
    ] = None,
    utilization: Annotated[
        float | None, _number("--utilization", "Of peak and memory; default: the device's.", "SHARE")
    ] = None,
    duration: Annotated[
        str | None, _quantity("--duration", "days", "Longest training run; default three months.")
    ] = None,
    layer_latency: Annotated[
        str | None, _quantity("--layer-latency", "us", "Least time of one block; default: four kernels and reductions.")
    ] = None,
    batch_tokens: Annotated[
        float | None, _number("--batch-tokens", "Tokens per step of a run of 1e25 FLOP; default 2048^2.")
    ] = None,
    layers: Annotated[int | None, _count("--layers", "Blocks of a run of 1e25 FLOP; default 120.")] = None,
    tokens_per_parameter: Annotated[
        float | None, _number("--tokens-per-parameter", "Training tokens per parameter; default 20.")
    ] = None,
    curve: Annotated[
        bool, flag("--curve", help="Utilisation against training compute, under each rule of overlap.")
    ] = False,
    overlap: Annotated[
        list[str] | None,
        flag("--overlap", metavar="RULE", help="Of the curve: all, bandwidth or none; may be given again."),
    ] = None,
    batch_growth: Annotated[
        float | None, _number("--batch-growth", "Power of compute with which a step's tokens grow; default 1/6.")
    ] = None,
    fast_domain: Annotated[int | None, _count("--fast-domain", "Devices on the fast links, of the curve.")] = None,
    latency_factor: Annotated[
        float | None, _number("--latency-factor", "Of the curve: all latencies times this; default 1.")
    ] = None,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """How far a layer and a training run scale before data movement or latency stops them.

    The defaults are a layer on NVIDIA H100 SXM5 and a run of three months, after arXiv 2411.01137.
    The network moves a layer's activations; memory moves its weights; all of it overlaps with compute.
    """
    options = o.given(**{name: value for name, value in locals().items() if name not in ("json", "plot", "curve")})
    draw = drawing("limits", plot)
    options["overlap"] = _rules(options, curve=curve or plot is not None)
    result = _limits(options)
    if draw is not None:
        draw(result.to_json())
    if json:
        from steptime.cli.output import print_json

        print_json(result.to_json())
        return

    print_limits(result)


def _rules(given: Mapping[str, Any], *, curve: bool) -> Sequence[str]:
    """Rules of overlap of the curve: the given ones, else all; none without a curve."""
    from steptime.errors import UserError
    from steptime_lab.scale import OVERLAPS

    for name in ("overlap", "batch_growth", "fast_domain", "latency_factor"):
        if not curve and name in given:
            raise UserError(f"{_option(name)} is of the curve", hint="add --curve")
    return given.get("overlap") or (list(OVERLAPS) if curve else ())


def _limits(given: Mapping[str, Any]) -> Limits:
    """The limits; errors name the option in place of the parameter."""
    from steptime.errors import FieldError
    from steptime_lab.limits import limits

    names = {parameter: parameter for parameter in signature(limits).parameters}
    names |= {parameter: name for name, (_, parameter) in QUANTITIES.items()}
    parsed: dict[str, Any] = {
        QUANTITIES[name][1]: _parsed(name, text) for name, text in given.items() if name in QUANTITIES
    }
    options = {name: value for name, value in given.items() if name not in QUANTITIES}
    try:
        return limits(**options, **parsed)
    except FieldError as error:
        if error.where or error.field not in names:
            raise
        raise FieldError("", _option(names[error.field]), error.problem, hint=error.hint) from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parsed(name: str, text: str) -> float:
    from steptime.errors import FieldError, UserError
    from steptime.units import parse

    try:
        return parse(text, QUANTITIES[name][0])
    except UserError as error:
        raise FieldError("", _option(name), str(error)) from None


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
    if result.curves:
        _print_curves(result.curves)


def _print_curves(curves: Sequence[Curve]) -> None:
    """Print utilisation of the best plan by compute, with a column for each rule of overlap."""
    out = t.console()
    t.heading(out, "Utilisation of the peak by the best plan, by what overlaps")
    table = t.grid(("training compute", *(each.overlap for each in curves)))
    runs = [{run.compute_flops: run for run in each.runs} for each in curves]
    for flops in sorted({flops for each in runs for flops in each})[::2]:
        cells = [each.get(flops) for each in runs]
        table.add_row(f"{flops:.0e} FLOP", *(t.percent(run.utilization) if run else "0.0 %" for run in cells))
    for share in (0.9, 0.8, 0.5):
        table.add_row(f"{t.percent(share)} of the most", *(_flops(each.reaches(share)) for each in curves))
    table.add_row("largest in time", *(_flops(each.last_flops) for each in curves))
    out.print(table)


def _flops(value: float | None) -> str:
    return "none" if value is None else f"{value:.1e}"


def print_figures(figures: Sequence[Figure], products: Sequence[ProductTime]) -> None:
    """Write published figures next to figures of the formulas, and the table of products."""
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
