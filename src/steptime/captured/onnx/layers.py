"""Rows of layers: convolution, pooling, normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.captured.aten import layers, maths, views
from steptime.captured.graph.program import Attribute, Nodes, Value
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.shapes import pad


def padding(
    call: OnnxCall, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], ...]:
    """Padding before and after each spatial dim, from ``auto_pad`` or ``pads``."""
    rank, auto = len(kernel), call.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for size, k, s, d in zip(call.type().shape[2:], kernel, stride, dilation, strict=True):
            total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
            small, large = total // 2, total - total // 2
            before.append(small if auto == "SAME_UPPER" else large)
            after.append(large if auto == "SAME_UPPER" else small)
        return before, after
    pads = (call.ints("pads") if auto == "NOTSET" else None) or (0,) * (2 * rank)
    if len(pads) != 2 * rank:
        raise ValueError(f"{2 * rank} pads are needed, not {len(pads)}")
    return list(pads[:rank]), list(pads[rank:])


def even_padding(
    nodes: Nodes, x: Value, before: list[int], after: list[int], value: float
) -> tuple[Value, tuple[int, ...]]:
    """What ATen's layers take: the same padding on both sides. Other padding becomes an operator of its own."""
    if before == after and min(before, default=0) >= 0:
        return x, tuple(before)
    return pad(nodes, x, [0, 0, *before], [0, 0, *after], value), (0,) * len(before)


@row("Conv")
def _conv(call: OnnxCall) -> Result:
    weight = call.weight(1)
    rank = weight.type.rank - 2
    stride = layers.spatial(call.ints("strides") or (1,), rank)
    dilation = layers.spatial(call.ints("dilations") or (1,), rank)
    before, after = padding(call, weight.type.shape[2:], stride, dilation)
    x, pads = even_padding(call.nodes, call.value(), before, after, 0.0)
    return layers.convolution(
        call.nodes, x, weight, _bias(call), stride=stride, padding=pads, dilation=dilation,
        groups=int(call.get("group", 1)),
    )  # fmt: skip


def _bias(call: OnnxCall) -> Value | None:
    """The bias; none where an exporter has filled in zeros."""
    filled = call.has(2) and call.tensor(2).uniform() == 0 and call.tensor(2).role("parameter") != "parameter"
    return None if filled else call.maybe_weight(2)


@row("ConvTranspose")
def _conv_transpose(call: OnnxCall) -> Result:
    weight = call.weight(1)
    kernel, rank = weight.type.shape[2:], weight.type.rank - 2
    stride = layers.spatial(call.ints("strides") or (1,), rank)
    dilation = layers.spatial(call.ints("dilations") or (1,), rank)
    extra = list(layers.spatial(call.ints("output_padding") or (0,), rank))
    auto, wanted = call.get("auto_pad", "NOTSET"), call.ints("output_shape")
    pads = call.ints("pads") or (0,) * (2 * rank)
    before, after = list(pads[:rank]), list(pads[rank:])
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        for n, (size, k, s, d) in enumerate(zip(call.type().shape[2:], kernel, stride, dilation, strict=True)):
            goal = size * s if wanted is None else wanted[-rank:][n]
            total = (size - 1) * s + extra[n] + d * (k - 1) + 1 - goal
            small, large = total // 2, total - total // 2
            before[n], after[n] = (small, large) if auto == "SAME_UPPER" else (large, small)
    # ATen crops the same on both sides; what is cropped less behind is output padding, what more, a slice.
    both = [max(n, 0) for n in before]
    extra = [e + b - a for e, a, b in zip(extra, after, both, strict=True)]
    made = layers.convolution(
        call.nodes, call.value(), weight, call.maybe_weight(2), stride=stride, padding=both, dilation=dilation,
        transposed=True, output_padding=[max(e, 0) for e in extra], groups=int(call.get("group", 1)),
    )  # fmt: skip
    for n, e in enumerate(extra):
        if e < 0:
            made = views.slice(call.nodes, made, n + 2, 0, made.type.shape[n + 2] + e)
    return made


@row("MaxPool", "AveragePool")
def _pool(call: OnnxCall) -> Result:
    nodes, kernel = call.nodes, call.ints("kernel_shape") or ()
    rank, average = len(kernel), call.op == "AveragePool"
    if rank not in (1, 2, 3) or rank != call.type().rank - 2:
        return None
    stride = layers.spatial(call.ints("strides") or (1,), rank)
    dilation = layers.spatial(call.ints("dilations") or (1,), rank)
    before, after = padding(call, kernel, stride, dilation)
    count = bool(call.get("count_include_pad", 0))
    ceil = bool(call.get("ceil_mode", 0))
    uneven = before != after or any(p > k // 2 for p, k in zip(before, kernel, strict=True))
    if (average and (any(d != 1 for d in dilation) or (uneven and not count))) or (uneven and ceil):
        return None
    x = call.value()
    if uneven:
        x = pad(nodes, x, [0, 0, *before], [0, 0, *after], 0.0 if average else float("-inf"))
        before = [0] * rank
    if rank == 1 and not average:
        x = views.unsqueeze(nodes, x, 2)
        kernel, stride, dilation, before = (1, *kernel), (1, *stride), (1, *dilation), [0, *before]
    if average:
        return layers.pool(
            nodes, f"avg_pool{rank}d", x, kernel=kernel, stride=stride, padding=before, ceil=ceil,
            count_include_pad=count or uneven,
        )[0]  # fmt: skip
    op = f"max_pool{len(kernel)}d_with_indices"
    if len(call.outputs) > 1:
        return None
    made = layers.pool(nodes, op, x, kernel=kernel, stride=stride, padding=before, ceil=ceil, dilation=dilation)[0]
    return views.squeeze(nodes, made, (2,)) if rank == 1 else made


@row("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: OnnxCall) -> Result:
    op = "mean" if call.op == "GlobalAveragePool" else "amax"
    return maths.reduce(call.nodes, op, call.value(), tuple(range(2, call.type().rank)), True)


@row("BatchNormalization")
def _batch_norm(call: OnnxCall) -> Result:
    training = bool(call.get("training_mode", 0))
    parts: dict[str, Value | None] = {
        "weight": call.weight(1), "bias": call.weight(2),
        "running_mean": call.tensor(3).of(call.nodes, "buffer"), "running_var": call.tensor(4).of(call.nodes, "buffer"),
    }  # fmt: skip
    made = layers.native_batch_norm(
        call.nodes, call.value(), parts, training=training, momentum=1.0 - float(call.get("momentum", 0.9)),
        eps=float(call.get("epsilon", 1e-5)),
    )  # fmt: skip
    if len(call.outputs) == 1:
        return made[0]
    # Running statistics are written in place; here they are what they were.
    return made[0], parts["running_mean"], parts["running_var"]


@row("InstanceNormalization")
def _instance_norm(call: OnnxCall) -> Result:
    x, eps = call.value(), float(call.get("epsilon", 1e-5))
    return layers.native_group_norm(call.nodes, x, call.weight(1), call.weight(2), groups=x.type.shape[1], eps=eps)[0]


@row("GroupNormalization")
def _group_norm(call: OnnxCall) -> Result:
    x, groups = call.value(), int(call.get("num_groups", 1))
    weight, bias = call.weight(1), call.weight(2)
    if weight.type.shape != (x.type.shape[1],):
        return None
    eps = float(call.get("epsilon", 1e-5))
    return layers.native_group_norm(call.nodes, x, weight, bias, groups=groups, eps=eps)[0]


@row("LayerNormalization", domain="com.microsoft")
@row("LayerNormalization")
def _layer_norm(call: OnnxCall) -> Result:
    shape = call.type().shape[call.axis(-1) :]
    scale, bias = call.weight(1), call.maybe_weight(2)
    scale = views.expand(call.nodes, scale, shape)
    bias = None if bias is None else views.expand(call.nodes, bias, shape)
    return layers.native_layer_norm(call.nodes, call.value(), scale, bias, shape, float(call.get("epsilon", 1e-5)))


@row("SkipLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(call: OnnxCall) -> Result:
    total = maths.add(call.nodes, call.value(), call.value(1))
    if call.has(4):
        total = maths.add(call.nodes, total, call.weight(4))
    shape = call.type().shape[-1:]
    eps = float(call.get("epsilon", 1e-12))
    made = layers.native_layer_norm(call.nodes, total, call.weight(2), call.maybe_weight(3), shape, eps)
    return (*made, total)


@row("SimplifiedLayerNormalization")
@row("RMSNormalization")
def _rms_norm(call: OnnxCall) -> Result:
    shape = call.type().shape[call.axis(-1) :]
    scale = views.expand(call.nodes, call.weight(1), shape)
    return layers.rms_norm(call.nodes, call.value(), scale, shape, float(call.get("epsilon", 1e-5)))


@row("LpNormalization")
def _lp_norm(call: OnnxCall) -> Result:
    x, axis = call.value(), call.axis(-1)
    shape = maths.reduced_shape(x.type.shape, (axis,), True)
    output = x.type.with_shape(*shape)
    attributes: dict[str, Attribute] = {"ord": int(call.get("p", 2)), "dim": (axis,), "keepdim": True}
    norm = call.nodes.apply("linalg_vector_norm", {"self": x}, attributes, outputs=[output]).value()
    return maths.div(call.nodes, x, norm)


@row("LRN")
def _lrn(call: OnnxCall) -> Result:
    """x / (k + alpha / n * sum of squares over n neighbouring channels) ** beta, as PyTorch composes it."""
    nodes, x, size = call.nodes, call.value(), int(call.get("size", 1))
    if x.type.rank != 4 or size < 1:
        return None
    n, c, h, w = x.type.shape
    square = pad(nodes, maths.mul(nodes, x, x), [0, (size - 1) // 2, 0, 0], [0, size // 2, 0, 0], 0.0)
    flat = views.reshape(nodes, square, (n, 1, c + size - 1, h * w))
    mean = layers.pool(nodes, "avg_pool2d", flat, kernel=(size, 1), stride=(1, 1), padding=(0, 0))[0]
    scaled = maths.mul(nodes, views.reshape(nodes, mean, (n, c, h, w)), float(call.get("alpha", 1e-4)))
    below = maths.power(nodes, maths.add(nodes, scaled, float(call.get("bias", 1.0))), float(call.get("beta", 0.75)))
    return maths.div(nodes, x, below)


@row("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _cross_entropy(call: OnnxCall) -> Result:
    """Mean or sum over all positions without class weights; other forms stay opaque."""
    reduction = call.get("reduction", "mean")
    if call.has(2) or reduction == "none":
        return None
    nodes, x, target = call.nodes, call.value(), call.value(1)
    log = layers.softmax(nodes, x, 1, log=True) if call.op.startswith("Softmax") else x
    whole = log
    if x.type.rank > 2:
        log = views.permute(nodes, log, (0, *range(2, x.type.rank), 1))
        rows = math.prod(target.type.shape)
        log = views.reshape(nodes, log, (rows, x.type.shape[1]))
        target = views.reshape(nodes, target, (rows,))
    attributes: dict[str, Attribute] = {
        "reduction": 1 if reduction == "mean" else 2,
        "ignore_index": int(call.get("ignore_index", -100)),
    }
    scalar = x.type.with_shape()
    made = nodes.apply("nll_loss_forward", {"self": log, "target": target}, attributes, outputs=[scalar, scalar])
    return (made.value(), whole) if len(call.outputs) > 1 else made.value()
