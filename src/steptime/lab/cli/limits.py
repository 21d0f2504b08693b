"""``steptime limits``: how far a layer and a training run scale before data movement stops them."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from steptime.api.request import MAX_COUNT
from steptime.cli import options as o

if TYPE_CHECKING:
    from steptime.lab.limits.calls import Limits

#: Parameter of the command -> dimension of its text, and parameter of the API.
QUANTITIES: Final = {
    "flops_8bit": ("flops_per_s", "flops_8bit_per_s"), "memory_bandwidth": ("Bps", "memory_Bps"),
    "network_bandwidth": ("Bps", "network_Bps"), "duration": ("s", "duration_s"),
    "layer_latency": ("s", "layer_latency_s"),
}  # fmt: skip


def _count(option: str, text: str) -> Any:
    return typer.Option(option, metavar="N", min=1, max=MAX_COUNT, help=text)


def _number(option: str, text: str, metavar: str = "N") -> Any:
    return typer.Option(option, metavar=metavar, help=text)


def _quantity(option: str, unit: str, text: str) -> Any:
    return typer.Option(option, metavar=f"'N {unit}'", help=text)


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
        typer.Option("--device", help="Catalogue name or cluster file; default: the H100 SXM5 of arXiv 2411.01137."),
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
    json: o.Json = False,
) -> None:
    """How far a layer and a training run scale before data movement or latency stops them.

    The defaults are a layer on NVIDIA H100 SXM5 and a run of three months, after arXiv 2411.01137.
    The network moves a layer's activations; memory moves its weights; all of it overlaps with compute.
    """
    result = _limits(
        o.given(
            d_in=d_in, d_out=d_out, tokens=tokens, tp_in=tp_in, tp_out=tp_out, dp=dp, width_bytes=width_bytes,
            device=device, utilization=utilization, batch_tokens=batch_tokens, layers=layers,
            tokens_per_parameter=tokens_per_parameter,
        ),
        o.given(
            flops_8bit=flops_8bit, memory_bandwidth=memory_bandwidth, network_bandwidth=network_bandwidth,
            duration=duration, layer_latency=layer_latency,
        ),
    )  # fmt: skip
    if json:
        from steptime.cli.output import print_json

        print_json(result.to_json())
        return
    from steptime.lab.report.limits import print_limits

    print_limits(result)


def _limits(options: Mapping[str, Any], quantities: Mapping[str, str]) -> Limits:
    """The limits; what is wrong is told by the name of its option."""
    from steptime.errors import FieldError
    from steptime.lab.limits.calls import limits

    names = {parameter: parameter for parameter in signature(limits).parameters}
    names |= {parameter: name for name, (_, parameter) in QUANTITIES.items()}
    parsed: dict[str, Any] = {QUANTITIES[name][1]: _parsed(name, text) for name, text in quantities.items()}
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
