"""Scratch of convolutions on the CPU: oneDNN copies tensors into layouts with channels in blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from steptime.num import round_up

PIXELS_FOR_ONE = 20480
"""Elements of a single image from which oneDNN is used for it."""


def convolution_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    r"""Bytes that a convolution in fp32 needs beside its results while it runs.

    Forward, with $x$, $w$, $y$ = bytes of input, weight and output and primes for their blocked copies:

    $$\max(x' + w' + y',\ y' + y) - y$$

    Backward, the gradient of the input first, then that of the weight:

    $$\max(y' + w' + x',\ x' + s x,\ x + y' + x' + w',\ x + w' + w) - x - w$$

    where $s$ = 2 with a stride (the gradient comes with channels last and is copied once more), else 1. Blocks have 16
    channels with AVX-512, else 8; an input with fewer channels than a block is not copied in the forward pass.

    Source: allocations of oneDNN as the profiler of PyTorch 2.13 lists them; the choice of oneDNN is that of ATen's
    `Convolution.cpp`.
    """
    if func is torch.ops.aten.convolution.default and _by_onednn(args[0], args[1], args[3], args[5], args[6], args[8]):
        return _forward_bytes(args[0], args[1], args[3:], args[8])
    if func is torch.ops.aten.convolution_backward.default and _by_onednn(
        args[1], args[2], args[4], args[6], args[7], args[9]
    ):
        return _backward_bytes(args[0], args[1], args[2], args[4], args[9], args[10])
    return 0


def _by_onednn(x: Any, weight: Any, stride: Any, dilation: Any, transposed: bool, groups: int) -> bool:
    if (
        transposed
        or x.dim() not in (3, 4, 5)
        or _channels_last(x)
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
    ):
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    kernel = tuple(weight.shape[2:])
    many = torch.get_num_threads() > 1 or x.shape[0] >= 16
    worth = max(stride) > 1 or max(dilation) > 1 or max(kernel) > 1 or many
    large = groups > 1 or min(kernel) > 3 or x.shape[0] > 1 or x.numel() > PIXELS_FOR_ONE
    return worth and large


def _channels_last(x: Any) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _block() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _blocked(channels: int, others: int) -> int:
    """Bytes of a copy whose channels are filled up to whole blocks."""
    block = _block()
    return 4 * round_up(channels, block) * others


def _weight_bytes(weight: Any, groups: int) -> int:
    taps = math.prod(weight.shape[2:])
    if groups > 1:
        return 4 * int(weight.numel())
    return _blocked(weight.shape[0], round_up(weight.shape[1], _block()) * taps)


def _forward_bytes(x: Any, weight: Any, rest: Any, groups: int) -> int:
    count = x.dim() - 2
    stride, padding, dilation = (list(each) * count if len(each) == 1 else each for each in rest[:3])
    pixels = 1
    for n in range(count):
        reach = dilation[n] * (weight.shape[2 + n] - 1)
        pixels *= (x.shape[2 + n] + 2 * padding[n] - reach - 1) // stride[n] + 1
    plain = 4 * x.shape[0] * weight.shape[0] * pixels
    out = _blocked(weight.shape[0], x.shape[0] * pixels)
    narrow = x.shape[1] < _block()
    into = 0 if narrow else _blocked(x.shape[1], x.numel() // x.shape[1])
    w = 4 * weight.numel() if narrow else _weight_bytes(weight, groups)
    return int(max(into + w + out, out + plain) - plain)


def _backward_bytes(gradient: Any, x: Any, weight: Any, stride: Any, groups: int, wanted: Any) -> int:
    y = _blocked(gradient.shape[1], gradient.numel() // gradient.shape[1])
    into, w = _blocked(x.shape[1], x.numel() // x.shape[1]), _weight_bytes(weight, groups)
    plain_x, plain_w = (4 * x.numel() if wanted[0] else 0), (4 * weight.numel() if wanted[1] else 0)
    highest = [0]
    if wanted[0]:
        highest += [y + w + into, into + plain_x * (2 if max(stride) > 1 else 1)]
    if wanted[1]:
        source = 0 if x.shape[1] < _block() else into
        highest += [plain_x + y + source + w, plain_x + w + plain_w]
    return int(max(max(highest) - plain_x - plain_w, 0))
