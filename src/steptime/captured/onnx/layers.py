"""Rows of layers: convolution, pooling, normalisation, losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.shapes import expanded, pad

Ints = tuple[int, ...]


def _windows(call: OnnxCall, kernel: Sequence[int]) -> tuple[Ints, Ints, Ints, Ints]:
    """Strides, dilations, and the padding before and after each spatial dim, from ``auto_pad`` or ``pads``."""
    rank, auto = len(kernel), call.get("auto_pad", "NOTSET")
    stride, dilation = call.ints("strides") or (1,) * rank, call.ints("dilations") or (1,) * rank
    pads = (call.ints("pads") if auto == "NOTSET" else None) or (0,) * (2 * rank)
    sizes = call.tensor(0).shape[2:]
    if len(pads) != 2 * rank or {len(stride), len(dilation), len(sizes)} != {rank}:
        raise ValueError(f"{rank} strides and dilations and {2 * rank} pads are needed for {len(sizes)} dims")
    if min((*stride, *dilation), default=1) < 1:
        raise ValueError(f"a window with strides {stride} and dilations {dilation} does not fit {sizes}")
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        return stride, dilation, pads[:rank], pads[rank:]
    whole = [
        max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
    ]
    small, large = tuple(n // 2 for n in whole), tuple(n - n // 2 for n in whole)
    return stride, dilation, *((small, large) if auto == "SAME_UPPER" else (large, small))


@row("Conv")
def _conv(call: OnnxCall) -> Result:
    x, weight = call.x(), call.weight(1)
    stride, dilation, before, after = _windows(call, weight.shape[2:])
    if before != after or min(before, default=0) < 0:  # PyTorch pads both sides equally
        x, before = pad(x, (0, 0, *before), (0, 0, *after), 0.0), (0,) * len(before)
    groups, none = int(call.get("group", 1)), (0,) * len(before)
    return torch.convolution(x, weight, _bias(call), stride, before, dilation, False, none, groups)


def _bias(call: OnnxCall) -> torch.Tensor | None:
    """The bias; None if an exporter has filled in zeros."""
    filled = call.has(2) and call.tensor(2).uniform() == 0 and call.tensor(2).role("parameter") != "parameter"
    return None if filled else call.maybe_weight(2)


@row("ConvTranspose")
def _conv_transpose(call: OnnxCall) -> Result:
    x, weight = call.x(), call.weight(1)
    kernel, rank = weight.shape[2:], weight.dim() - 2
    stride, dilation = call.ints("strides") or (1,) * rank, call.ints("dilations") or (1,) * rank
    extra = list(call.ints("output_padding") or (0,) * rank)
    auto, wanted = call.get("auto_pad", "NOTSET"), call.ints("output_shape")
    pads = call.ints("pads") or (0,) * (2 * rank)
    before, after = list(pads[:rank]), list(pads[rank:])
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        for n, (size, k, s, d) in enumerate(zip(x.shape[2:], kernel, stride, dilation, strict=True)):
            goal = size * s if wanted is None else wanted[-rank:][n]
            total = (size - 1) * s + extra[n] + d * (k - 1) + 1 - goal
            small, large = total // 2, total - total // 2
            before[n], after[n] = (small, large) if auto == "SAME_UPPER" else (large, small)
    # PyTorch crops both sides equally: less cropping at the end is output padding, more is a slice.
    both = [max(n, 0) for n in before]
    extra = [e + b - a for e, a, b in zip(extra, after, both, strict=True)]
    more, groups = [max(e, 0) for e in extra], int(call.get("group", 1))
    made = torch.convolution(x, weight, call.maybe_weight(2), stride, both, dilation, True, more, groups)
    for n, e in enumerate(extra):
        made = made.narrow(n + 2, 0, made.shape[n + 2] + e) if e < 0 else made
    return made


_MAX = (torch.max_pool1d_with_indices, torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.max_pool3d_with_indices)
_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@row("MaxPool", "AveragePool")
def _pool(call: OnnxCall) -> Result:
    x, kernel, average = call.x(), call.ints("kernel_shape") or (), call.op == "AveragePool"
    rank = len(kernel)
    if rank not in (1, 2, 3) or rank != x.dim() - 2 or (not average and any(call.outputs[1:])):
        return None
    stride, dilation, before, after = _windows(call, kernel)
    count, ceil = bool(call.get("count_include_pad", 0)), bool(call.get("ceil_mode", 0))
    uneven = before != after or any(p > k // 2 for p, k in zip(before, kernel, strict=True))
    if (average and (any(d != 1 for d in dilation) or (uneven and not count))) or (uneven and ceil):
        return None
    if uneven:
        x, before = pad(x, (0, 0, *before), (0, 0, *after), 0.0 if average else float("-inf")), (0,) * rank
    if average:
        return _AVERAGE[rank - 1](x, kernel, stride, before, ceil, count or uneven)
    return _MAX[rank - 1](x, kernel, stride, before, dilation, ceil)[0]


@row("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: OnnxCall) -> Result:
    x, function = call.x(), torch.mean if call.op == "GlobalAveragePool" else torch.amax
    return function(x, tuple(range(2, x.dim())), True)


@row("BatchNormalization")
def _batch_norm(call: OnnxCall) -> Result:
    mean, variance = call.x(3, "buffer"), call.x(4, "buffer")
    training, share = bool(call.get("training_mode", 0)), 1.0 - float(call.get("momentum", 0.9))
    eps = float(call.get("epsilon", 1e-5))
    made = F.batch_norm(call.x(), mean, variance, call.weight(1), call.weight(2), training, share, eps)
    return made, mean, variance


@row("InstanceNormalization", "GroupNormalization")
def _group_norm(call: OnnxCall) -> Result:
    x = call.x()
    groups = int(call.get("num_groups", 1)) if call.op == "GroupNormalization" else x.shape[1]
    if call.tensor(1).shape != (x.shape[1],):
        return None
    return F.group_norm(x, groups, call.weight(1), call.weight(2), float(call.get("epsilon", 1e-5)))


@row("LayerNormalization")
@row("LayerNormalization", domain="com.microsoft")
def _layer_norm(call: OnnxCall) -> Result:
    x, bias = call.x(), call.maybe_weight(2)
    shape = x.shape[call.axis(-1) :]
    scale, bias = expanded(call.weight(1), shape), None if bias is None else expanded(bias, shape)
    return torch.native_layer_norm(x, shape, scale, bias, float(call.get("epsilon", 1e-5)))


@row("SkipLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(call: OnnxCall) -> Result:
    total = call.x() + call.x(1)
    total = total + call.weight(4) if call.has(4) else total
    eps, shape = float(call.get("epsilon", 1e-12)), total.shape[-1:]
    return (*torch.native_layer_norm(total, shape, call.weight(2), call.maybe_weight(3), eps), total)


@row("SimplifiedLayerNormalization", "RMSNormalization")
def _rms_norm(call: OnnxCall) -> Result:
    x = call.x()
    shape = x.shape[call.axis(-1) :]
    return F.rms_norm(x, shape, expanded(call.weight(1), shape), float(call.get("epsilon", 1e-5)))


@row("LpNormalization")
def _lp_norm(call: OnnxCall) -> Result:
    x = call.x()
    return x / torch.linalg.vector_norm(x, int(call.get("p", 2)), (call.axis(-1),), True)


@row("LRN")
def _lrn(call: OnnxCall) -> Result:
    """Local response norm by the operators of PyTorch, with the shorter half of the window before each channel."""
    x, size = call.x(), int(call.get("size", 1))
    if x.dim() != 4 or size < 1:
        return None
    n, c, h, w = x.shape
    square = pad(x * x, (0, (size - 1) // 2, 0, 0), (0, size // 2, 0, 0), 0.0).reshape(n, 1, -1, h * w)
    mean = F.avg_pool2d(square, (size, 1), 1).reshape(n, c, h, w)
    scale = mean * float(call.get("alpha", 1e-4)) + float(call.get("bias", 1.0))
    return x / scale ** float(call.get("beta", 0.75))


@row("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _cross_entropy(call: OnnxCall) -> Result:
    x = call.x()
    log = torch.log_softmax(x, 1) if call.op.startswith("Softmax") else x
    mean, ignored = call.get("reduction", "mean"), int(call.get("ignore_index", -100))
    return F.nll_loss(log, call.x(1), call.maybe(2), reduction=mean, ignore_index=ignored), log
