"""Operators on images: convolution, pooling, resampling, padding of planes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from steptime.captured.graph import Attribute, Node, TensorType
from steptime.captured.ops import processor
from steptime.captured.ops.labels import (
    Exchange,
    Labels,
    OperatorDims,
    Special,
    by_name,
    labelled,
    numbers_of,
    terms_of,
    unlabelled,
)
from steptime.captured.ops.operator import Layouts, Operator, Pieces
from steptime.captured.ops.pieces import Types, shape_of_output
from steptime.captured.ops.placement import P, Placement, shard
from steptime.captured.ops.work import (
    STREAMED,
    KernelCall,
    OperatorWork,
    Shape,
    input_type,
    integer,
    integers,
    looped,
    moved,
)
from steptime.cost.convolution import channelwise, convolution_flops, implicit_product
from steptime.cost.elementwise import window_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

WINOGRAD_TAPS: Final = (3, 3)
"""Kernel size that Winograd's algorithm accepts, with stride and dilation one: cuDNN runs a dilated convolution as an
implicit product (API reference of cudnnConvolutionForward, table of algorithms)."""


FLOPS: Final = Formula(convolution_flops)


def _convolution_sizes(node: Node) -> dict[str, Num]:
    """Sizes for `convolution_flops`: input channels per group, pixels of the output (transposed: of the input)."""
    tensors = (
        input_type(node, "input", "self"),
        input_type(node, "weight"),
        input_type(node, "grad_output") if node.input("grad_output") is not None else node.outputs[0],
    )
    x, w, y = (type.shape for type in tensors)
    groups, transposed = integer(node, "groups", 1), bool(integer(node, "transposed", 0))
    walked = x if transposed else y
    stride, dilation = integers(node, "stride"), integers(node, "dilation")
    dense = max(stride, default=1) == max(dilation, default=1) == groups == 1
    return {
        "batch": x[0], "pixels": math.prod(walked[2:]), "taps": math.prod(w[2:]), "groups": groups,
        "channels_in": w[1], "channels_out": w[0], "tensor_bytes": sum(type.size_bytes for type in tensors),
        "winograd_taps": float(w[2:] == WINOGRAD_TAPS and dense),
    }  # fmt: skip


def _backward_sizes(node: Node) -> dict[str, Num]:
    mask = integers(node, "output_mask") or (1, 1, 0)
    return {**_convolution_sizes(node), "of_data": float(bool(mask[0])), "of_weight": float(bool(mask[1]))}


def _backward_flops(s: Shape) -> Num:
    """Operations of the backward pass: each gradient takes the operations of the forward pass."""
    return int(s["of_data"] + s["of_weight"]) * FLOPS(s)


def _backward_bytes(s: Shape) -> Num:
    """Traffic of the backward pass: each gradient reads two of the three inputs, taken as two thirds of their bytes."""
    return s["read_bytes"] * (s["of_data"] + s["of_weight"]) * 2 / 3 + s["written_bytes"]


def _convolution_product(s: Shape, moved_bytes: Num, *, swapped: bool) -> Shape:
    """Sizes of the implicit product; ``swapped``: input and output channels change places."""
    groups = s["groups"]
    inward, outward = s["channels_in"], s["channels_out"] / groups
    inward, outward = (outward, inward) if swapped else (inward, outward)
    rows, columns, depth = implicit_product(s["batch"] * s["pixels"], inward, outward, s["taps"], groups)
    return {
        "rows": rows, "columns": columns, "depth": depth, "moved_bytes": moved_bytes,
        "winograd_taps": s["winograd_taps"], "tensor_bytes": s["tensor_bytes"],
        "channelwise": channelwise(inward, outward, groups),
    }  # fmt: skip


def _convolution_kernel(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return (KernelCall(operator="conv_fwd", shape=_convolution_product(s, s["moved_bytes"], swapped=False)),)


def _convolution_backward_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    each = s["moved_bytes"] / max(s["of_data"] + s["of_weight"], 1.0)
    calls = []
    if s["of_data"]:
        calls.append(KernelCall(operator="conv_bwd_data", shape=_convolution_product(s, each, swapped=True)))
    if s["of_weight"]:
        calls.append(KernelCall(operator="conv_bwd_weight", shape=_convolution_product(s, each, swapped=False)))
    return tuple(calls)


def _convolution_dims(node: Node) -> OperatorDims:
    """Dims: images, channels (or groups of channels), and spatial dims, whose edges neighbours exchange."""
    backward = "grad_output" in node.names
    grouped, space = _grouped_channels(node), _spatial(node)
    result = ("images", "groups" if grouped else "out", *space)
    names: dict[str, Labels] = {"grad_output": result, "weight": _weight_labels(node), "bias": ("out",)}
    x = next(name for name in ("input", "self") if name in node.names)
    names[x] = ("images", "groups" if grouped else "in", *space)
    to: list[Labels] = [names["grad_output"]]
    if backward:
        mask = integers(node, "output_mask") or (1, 1, 0)
        to = [each for each, kept in zip((names[x], names["weight"], ("out",)), mask, strict=True) if kept]
    special = _convolution_specials(node, to, backward)
    dims = labelled(node, by_name(node, names), to, special)
    bias = ("bias",) if "bias" in node.names else ()
    groups = [("grad_output",)] if backward else [(x, *bias), ("weight", *bias)]
    return OperatorDims(dims=dims, terms=terms_of(node, *groups))


def _grouped_channels(node: Node) -> bool:
    return integer(node, "groups", 1) > 1


def _spatial(node: Node) -> tuple[str, ...]:
    rank = node.inputs_of("weight")[0].type.rank - 2
    return tuple(f"space{dim}" for dim in range(rank))


def _weight_labels(node: Node) -> Labels:
    pair = ("groups", "!in") if _grouped_channels(node) else ("out", "in")
    pair = (pair[1], pair[0]) if integer(node, "transposed", 0) and not _grouped_channels(node) else pair
    return (*pair, *(f"!tap{dim}" for dim in range(len(_spatial(node)))))


def _convolution_specials(node: Node, to: list[Labels], backward: bool) -> dict[str, Special]:
    """Gradients sum over dims that they lack; the bias is a term where channels are summed, its gradient is whole."""
    out: dict[str, Special] = {}
    for name in ("images", "out", "in"):
        summed = (n for n, each in enumerate(to) if name not in each and (name, each) != ("in", ("out",)))
        bias = numbers_of(node, "bias") if name == "in" and not backward else ()
        out[name] = Special(outputs=dict.fromkeys(summed, P) if backward else {}, inputs=dict.fromkeys(bias, P))
    for dim, name in enumerate(_spatial(node)):
        summed = (n for n, each in enumerate(to) if name not in each)
        out[name] = _window(node, dim, dict.fromkeys(summed, P) if backward else {})
    if _grouped_channels(node):  # the bias and its gradient are by channel, and channels go with their groups
        inputs = {number: shard(0) for number in numbers_of(node, "bias")}
        biases = {n: shard(0) for n, each in enumerate(to) if each == ("out",)}
        out["groups"] = Special(units=integer(node, "groups", 1), inputs=inputs, outputs=biases)
        out["out"] = Special(kind="indivisible")
    return out


def reach(kernel: int, stride: int, padding: int, dilation: int, transposed: bool = False) -> tuple[int, int]:
    """Rows that a piece needs from the previous and from the next piece, where strides divide the rows evenly.

    >>> reach(3, 1, 1, 1), reach(7, 2, 3, 1), reach(2, 2, 0, 1)
    ((1, 1), (3, 2), (0, 0))
    """
    span = dilation * (kernel - 1)
    if transposed:
        return max((span - padding) // stride, 0), max((padding + stride - 1) // stride, 0)
    return padding, max(span + 1 - stride - padding, 0)


def _window(node: Node, dim: int, lost: Mapping[int, Placement]) -> Special:
    x = next(node.inputs_of(name)[0].type for name in ("input", "self") if name in node.names)
    y = node.inputs_of("grad_output")[0].type if "grad_output" in node.names else node.outputs[0]
    weight = node.inputs_of("weight")[0].type
    each = [_of_dim(node, name, dim, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    turned = bool(integer(node, "transposed", 0))
    inner, outer = (y, x) if turned else (x, y)
    if inner.shape[2 + dim] != outer.shape[2 + dim] * each[0]:
        return Special(kind="indivisible")
    rows = sum(reach(weight.shape[2 + dim], each[0], each[1], each[2], turned))
    if not rows:
        return Special(units=outer.shape[2 + dim], outputs=lost)
    row = math.prod(x.shape) // x.shape[2 + dim] * x.element_bytes
    if "grad_output" in node.names:  # the same rows of the gradient, and the sums at the edges of the neighbour
        row += math.prod(y.shape) // y.shape[2 + dim] * y.element_bytes
    across = ("images", "in", "groups", *(name for n, name in enumerate(_spatial(node)) if n != dim))
    exchange = Exchange(collective="halo", size_bytes=rows * row, across=across)
    return Special(kind="halo", units=outer.shape[2 + dim], outputs=lost, exchange=exchange)


def _of_dim(node: Node, name: str, dim: int, default: int) -> int:
    given = integers(node, name) or (default,)
    return given[dim] if dim < len(given) else given[-1]


def _convolved(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """Attributes of a piece: groups are divided with the channels; the bias has the size of its gradient."""
    number = next(n for n, name in enumerate(node.names) if name in ("input", "self"))
    groups = node.attribute("groups", 1)
    made: dict[str, Attribute] = {}
    if isinstance(groups, int) and groups > 1:
        made["groups"] = groups * inputs[number].shape[1] // node.inputs[number].type.shape[1]
    if "grad_output" in node.names and node.attribute("bias_sizes"):
        made["bias_sizes"] = (inputs[node.names.index("grad_output")].shape[1],)
    return made


_FORWARD = OperatorWork(sizes=_convolution_sizes, matrix_flops=FLOPS, kernels=_convolution_kernel)
_BACKWARD = OperatorWork(
    sizes=_backward_sizes, matrix_flops=_backward_flops, moved_bytes=_backward_bytes,
    launches=lambda s: max(s["of_data"] + s["of_weight"], 1.0), kernels=_convolution_backward_kernels,
)  # fmt: skip
CONVOLUTIONS: Final = (
    Operator(
        names="convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution conv2d"
        " _slow_conv2d_forward miopen_convolution",
        family="convolution", work=_FORWARD, dims=_convolution_dims, layouts="kernel", pieces=_convolved,
        processor=processor.convolution,
    ),
    Operator(
        names="mkldnn::_convolution_pointwise", family="convolution", work=_FORWARD, layouts="kernel",
        processor=processor.convolution,
    ),
    Operator(
        names="cudnn_convolution_relu", family="convolution", work=_FORWARD, processor=processor.convolution
    ),
    Operator(
        names="convolution_backward convolution_backward_overrideable", family="convolution", work=_BACKWARD,
        dims=_convolution_dims, layouts="kernel", pieces=_convolved,
    ),
)  # fmt: skip
"""Convolutions and their backward passes."""


def _pooled_sizes(node: Node) -> dict[str, Num]:
    window = integers(node, "kernel_size")
    outputs = node.outputs[0].elements if node.outputs else 0
    if not window:  # adaptive: every input element once
        return {"outputs": input_type(node, "self").elements, "taps": 1}
    taps = math.prod(window) if len(window) > 1 else window[0] ** max(node.outputs[0].rank - 2, 1)
    return {"outputs": min(outputs, input_type(node, "self").elements), "taps": taps}


def _pool_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """A loop over the taps for each window; adaptive pooling divides the input among its windows."""
    backward = node.op.endswith("_backward")
    windows = (input_type(node, "grad_output") if backward else node.outputs[0]).elements
    steps = windows * s["taps"] if integers(node, "kernel_size") else input_type(node, "self").elements
    name = "max_pool" if "max" in node.op else "avg_pool"
    return looped(node, s, f"{name}_backward" if backward else name, windows, steps)


def _pooled_dims(node: Node) -> OperatorDims:
    """Dims of pooling and resizing: images and channels are independent; so are pixels if windows do not overlap."""
    x = node.inputs[0].type
    wide = next((v.type for name, v in zip(node.names, node.inputs, strict=True) if name == "self"), x)
    rank = node.outputs[0].rank
    first = rank - (3 if "3d" in node.op else 1 if "1d" in node.op else 2)
    small = x if node.op.endswith("_backward") else node.outputs[0]
    names = [f"d{dim}" if dim < first else f"space{dim}" for dim in range(rank)]
    halos = {f"space{dim}": _pooled_window(node, wide, small, dim, first) for dim in range(first, rank)}
    given = [names if v.type.rank == rank else unlabelled(v.type) for v in node.inputs]
    out = [names for _ in node.outputs]
    linear = () if "max" in node.op and not node.op.endswith("_backward") else terms_of(node, node.names[:1])
    return OperatorDims(dims=labelled(node, given, out, halos), terms=linear)


def _pooled_window(node: Node, wide: TensorType, small: TensorType, dim: int, first: int) -> Special:
    kernel, n = integers(node, "kernel_size"), dim - first
    stride = integers(node, "stride") or kernel
    pads, spread = integers(node, "padding") or (0,), integers(node, "dilation") or (1,)
    if not kernel or ("max" in node.op and len(node.names) > 1 and node.op.endswith("_backward")) or wide.rank <= dim:
        return Special(kind="indivisible")
    size, step, pad, apart = (each[n] if n < len(each) else each[-1] for each in (kernel, stride, pads, spread))
    if wide.shape[dim] != small.shape[dim] * step or "max" in node.op:
        return Special(kind="indivisible")
    rows = pad + max(apart * (size - 1) + 1 - step - pad, 0)
    if not rows:
        return Special(units=small.shape[dim])
    row = wide.elements // wide.shape[dim] * wide.element_bytes * rows
    return Special(
        kind="halo",
        units=small.shape[dim],
        exchange=Exchange(collective="halo", size_bytes=row, across=tuple(f"d{each}" for each in range(first))),
    )


_POOL = OperatorWork(sizes=_pooled_sizes, vector_flops=Formula(window_flops), kernels=_pool_kernels)
_RESAMPLED = OperatorWork(moved_bytes=STREAMED, kernels=moved)


def _planes(
    names: str, work: OperatorWork = _RESAMPLED, layouts: Layouts = "images", pieces: Pieces | None = None
) -> Operator:
    return Operator(names=names, family="move", work=work, dims=_pooled_dims, layouts=layouts, pieces=pieces)


_SIZE: Final = shape_of_output("input_size")
POOLS: Final = (
    _planes(
        "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices avg_pool2d"
        " avg_pool2d_backward avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward", _POOL,
    ),
    _planes(
        "avg_pool1d max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d"
        " _adaptive_avg_pool3d_backward", _POOL, "recorded",
    ),
    Operator(names="max_pool2d", family="move", work=_POOL, layouts="images"),
    Operator(names="adaptive_max_pool2d adaptive_max_pool2d_backward mkldnn_max_pool2d", family="move", work=_POOL),
    _planes("upsample_nearest2d upsample_bilinear2d"),
    _planes("upsample_nearest2d_backward upsample_bilinear2d_backward", pieces=_SIZE),
    _planes(
        "upsample_bicubic2d_backward upsample_nearest1d_backward upsample_nearest3d_backward upsample_linear1d_backward"
        " upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
        " _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward",
        layouts="recorded",
        pieces=_SIZE,
    ),
    _planes(
        "upsample_bicubic2d _upsample_nearest_exact2d upsample_nearest1d upsample_linear1d upsample_nearest3d"
        " upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d"
        " _upsample_nearest_exact3d reflection_pad2d reflection_pad2d_backward replication_pad2d"
        " replication_pad2d_backward",
        layouts="recorded",
    ),
    Operator(
        names="pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im grid_sampler_2d grid_sampler_2d_backward",
        family="move", work=_RESAMPLED,
    ),
)  # fmt: skip
"""Pooling, resampling and padding of images."""
