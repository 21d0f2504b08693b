"""Convolutions of any rank: plain, strided, grouped, transposed, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from steptime.captured.cost.work import KernelCall, OperatorRow, Shape, input_type, integer, integers
from steptime.captured.graph import Node
from steptime.cost.convolution import channelwise, convolution_flops, implicit_product
from steptime.estimate.operators import Formula
from steptime.num import Num

WINOGRAD_TAPS: Final = (3, 3)
FLOPS: Final = Formula(convolution_flops)


def _sizes(node: Node) -> dict[str, Num]:
    """Sizes for `convolution_flops`, channels in counted per group; a transposed one walks over its input's pixels."""
    tensors = (
        input_type(node, "input", "self"), input_type(node, "weight"),
        input_type(node, "grad_output") if node.input("grad_output") is not None else node.outputs[0],
    )  # fmt: skip
    x, w, y = (type.shape for type in tensors)
    groups, transposed = integer(node, "groups", 1), bool(integer(node, "transposed", 0))
    walked = x if transposed else y
    stride = integers(node, "stride")
    return {
        "batch": x[0], "pixels": math.prod(walked[2:]), "taps": math.prod(w[2:]), "groups": groups,
        "channels_in": w[1], "channels_out": w[0], "tensor_bytes": sum(type.size_bytes for type in tensors),
        "winograd_taps": float(w[2:] == WINOGRAD_TAPS and max(stride, default=1) == 1 and groups == 1),
    }  # fmt: skip


def _backward_sizes(node: Node) -> dict[str, Num]:
    mask = integers(node, "output_mask") or (1, 1, 0)
    return {**_sizes(node), "of_data": float(bool(mask[0])), "of_weight": float(bool(mask[1]))}


def _backward_flops(s: Shape) -> Num:
    """Each gradient takes as many operations as the forward."""
    return int(s["of_data"] + s["of_weight"]) * FLOPS(s)


def _backward_bytes(s: Shape) -> Num:
    """Each gradient reads two of the three inputs; what differs in their sizes is averaged."""
    return s["read_bytes"] * (s["of_data"] + s["of_weight"]) * 2 / 3 + s["written_bytes"]


def _product(s: Shape, moved_bytes: Num, *, swapped: bool) -> Shape:
    """The implicit product; ``swapped``: channels in and out change places."""
    groups = s["groups"]
    inward, outward = s["channels_in"], s["channels_out"] / groups
    inward, outward = (outward, inward) if swapped else (inward, outward)
    rows, columns, depth = implicit_product(s["batch"] * s["pixels"], inward, outward, s["taps"], groups)
    return {
        "rows": rows, "columns": columns, "depth": depth, "moved_bytes": moved_bytes,
        "winograd_taps": s["winograd_taps"], "tensor_bytes": s["tensor_bytes"],
        "channelwise": channelwise(inward, outward, groups),
    }  # fmt: skip


def _forward_kernel(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return (KernelCall(operator="conv_fwd", shape=_product(s, s["moved_bytes"], swapped=False)),)


def _backward_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    each = s["moved_bytes"] / max(s["of_data"] + s["of_weight"], 1.0)
    calls = []
    if s["of_data"]:
        calls.append(KernelCall(operator="conv_bwd_data", shape=_product(s, each, swapped=True)))
    if s["of_weight"]:
        calls.append(KernelCall(operator="conv_bwd_weight", shape=_product(s, each, swapped=False)))
    return tuple(calls)


_FORWARD = OperatorRow(sizes=_sizes, matrix_flops=FLOPS, kernels=_forward_kernel)
_BACKWARD = OperatorRow(
    sizes=_backward_sizes, matrix_flops=_backward_flops, moved_bytes=_backward_bytes,
    launches=lambda s: max(s["of_data"] + s["of_weight"], 1.0), kernels=_backward_kernels,
)  # fmt: skip

TABLE: Final[Mapping[str, OperatorRow]] = {
    **dict.fromkeys(
        (
            "convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution",
            "_slow_conv2d_forward", "miopen_convolution", "conv2d", "mkldnn::_convolution_pointwise",
        ),
        _FORWARD,
    ),
    "convolution_backward": _BACKWARD, "convolution_backward_overrideable": _BACKWARD,
}  # fmt: skip
