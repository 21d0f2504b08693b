"""``steptime limits``: how far a layer and a training run scale before data movement stops them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from steptime.errors import FieldError, UserError
from steptime.surface.cli import options as o

if TYPE_CHECKING:
    from steptime.study.limits import LimitDevice, LinearLayer

#: Largest dim, degree or depth that makes sense.
MAX_COUNT: Final = 10**9


def _count(option: str, text: str) -> Any:
    return typer.Option(option, metavar="N", min=1, max=MAX_COUNT, help=text)


def _quantity(option: str, unit: str, text: str) -> Any:
    return typer.Option(option, metavar=f"'N {unit}'", help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run whose length is bounded, and the laws that tie batch and depth to its compute."""

    duration_s: float
    layer_latency_s: float
    reference_batch_tokens: float
    reference_layers: float
    tokens_per_parameter: float


def limits(
    d_in: Annotated[int, _count("--d-in", "Width of the layer's input.")] = 16384,
    d_out: Annotated[int, _count("--d-out", "Width of its output.")] = 81920,
    tokens: Annotated[float, typer.Option("--tokens", metavar="N", help="Tokens per micro-batch, all ranks.")] = 32768,
    tp_in: Annotated[int, _count("--tp-in", "Ranks that share the input dim.")] = 8,
    tp_out: Annotated[int, _count("--tp-out", "Ranks that share the output dim.")] = 40,
    dp: Annotated[int, _count("--dp", "Data ranks.")] = 32,
    width_bytes: Annotated[float, typer.Option("--width-bytes", metavar="N", help="Bytes per word.")] = 2,
    flops_8bit: Annotated[str, _quantity("--flops-8bit", "TFLOP/s", "Dense 8-bit peak.")] = "1979 TFLOP/s",
    memory: Annotated[str, _quantity("--memory-bandwidth", "GB/s", "Of device memory.")] = "3352 GB/s",
    network: Annotated[str, _quantity("--network-bandwidth", "GB/s", "Both directions together.")] = "900 GB/s",
    utilization: Annotated[float, typer.Option("--utilization", metavar="SHARE", help="Of peak and memory.")] = 0.8,
    duration: Annotated[str, _quantity("--duration", "days", "Longest training run.")] = "91.3125 days",
    layer_latency: Annotated[str, _quantity("--layer-latency", "us", "Least time of one block.")] = "38 us",
    batch_tokens: Annotated[
        float, typer.Option("--batch-tokens", metavar="N", help="Tokens per step of a run of 1e25 FLOP.")
    ] = 2048**2,
    layers: Annotated[int, _count("--layers", "Blocks of a run of 1e25 FLOP.")] = 120,
    tokens_per_parameter: Annotated[
        float, typer.Option("--tokens-per-parameter", metavar="N", help="Training tokens per parameter.")
    ] = 20,
    json: o.Json = False,
) -> None:
    """How far a layer and a training run scale before data movement or latency stops them.

    The defaults are a layer on NVIDIA H100 SXM5 and a run of three months, after arXiv 2411.01137.
    The network moves a layer's activations; memory moves its weights; all of it overlaps with compute.
    """
    from steptime.study.limits import LimitDevice, LinearLayer

    device = LimitDevice(
        name="given",
        flops_per_s_8bit=_parsed("--flops-8bit", flops_8bit, "flops_per_s", 1e6, 1e24),
        memory_Bps=_parsed("--memory-bandwidth", memory, "Bps", 1e3, 1e21),
        network_Bps=_parsed("--network-bandwidth", network, "Bps", 1e3, 1e21),
        utilization=_within("--utilization", utilization, 1e-3, 1),
    )
    width = _within("--width-bytes", width_bytes, 0.125, 16)
    layer = LinearLayer(d_in=d_in, d_out=d_out, tp_in=tp_in, tp_out=tp_out, dp=dp, width_bytes=width)
    run = Run(
        duration_s=_parsed("--duration", duration, "s", 1.0, 1e12),
        layer_latency_s=_parsed("--layer-latency", layer_latency, "s", 1e-12, 1e6),
        reference_batch_tokens=_within("--batch-tokens", batch_tokens, 1, 1e15),
        reference_layers=layers,
        tokens_per_parameter=_within("--tokens-per-parameter", tokens_per_parameter, 1e-3, 1e9),
    )
    document = _document(layer, device, _within("--tokens", tokens, 1, 1e15), run)
    if json:
        from steptime.surface.cli.output import print_json

        print_json(document)
    else:
        _print(document)


#: The main command looks a command's function up under this name.
command = limits


def _within(option: str, value: float, low: float, high: float) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        nearest = "" if math.isnan(value) else f"; nearest: {min(max(value, low), high):g}"
        raise FieldError("", option, f"{value:g} is out of range", hint=f"allowed: {low:g} to {high:g}{nearest}")
    return value


def _parsed(option: str, text: str, dimension: str, low: float, high: float) -> float:
    from steptime.units import parse

    try:
        value = parse(text, dimension)
    except UserError as error:
        raise FieldError("", option, str(error)) from None
    return _within(option, value, low, high)


def _document(layer: LinearLayer, device: LimitDevice, tokens: float, run: Run) -> dict[str, Any]:
    """What is printed, as plain data in SI units."""
    from steptime.cost import limits as laws

    seconds = device.resources_s(layer, tokens)
    wall = laws.latency_wall_flops(
        run.duration_s,
        run.layer_latency_s,
        run.reference_batch_tokens,
        run.reference_layers,
        run.tokens_per_parameter,
    )
    device_numbers = asdict(device)
    del device_numbers["name"]
    return {
        "schema_version": 1,
        "layer": asdict(layer) | {"tokens": tokens, "parameters": layer.parameters, "devices": layer.devices},
        "device": device_numbers,
        "flop_s": seconds["flop"],
        "memory_s": seconds["memory"],
        "network_s": seconds["network"],
        "forward_backward_s": device.linear_layer_forward_backward_s(layer, tokens),
        "binding": device.binding(layer, tokens),
        "end_of_batch_s": device.linear_layer_end_of_batch_s(layer),
        "run": asdict(run),
        "latency_wall_flops": wall,
        "latency_wall_parameters": laws.optimal_parameters(wall, run.tokens_per_parameter),
        "latency_wall_tokens": laws.optimal_tokens(wall, run.tokens_per_parameter),
        "source": "arXiv 2411.01137",
    }


def _print(document: dict[str, Any]) -> None:
    from steptime.units import format_seconds

    layer, run = document["layer"], document["run"]
    print(
        f"Linear layer {layer['d_in']} x {layer['d_out']}, {layer['tokens']:g} tokens per micro-batch, "
        f"tp_in {layer['tp_in']} x tp_out {layer['tp_out']} x dp {layer['dp']} = {layer['devices']} devices"
    )
    print("\nForward and backward of one micro-batch (all resources overlap)")
    for name, title in (("flop", "compute"), ("memory", "device memory"), ("network", "network")):
        mark = "  <- binding" if name == document["binding"] else ""
        print(f"  {title:<14}{format_seconds(document[f'{name}_s']):>12}{mark}")
    print(f"\nGradient all-reduce at the end of a batch: {format_seconds(document['end_of_batch_s'])}")
    print(
        f"\nLatency wall of a run of {format_seconds(run['duration_s'])} at "
        f"{format_seconds(run['layer_latency_s'])} per block: {document['latency_wall_flops']:.3g} FLOP\n"
        f"  {document['latency_wall_parameters']:.3g} parameters, {document['latency_wall_tokens']:.3g} tokens; "
        "no number of devices trains a larger one in time"
    )
