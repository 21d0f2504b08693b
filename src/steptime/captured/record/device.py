"""Effects of real kernels that PyTorch's fake CPU kernels do not show: other operators on CUDA, workspaces, scratch.

On CUDA, PyTorch runs other operators for dropout, fused attention and the RMS norm. The fused RMS norm of CUDA saves
its input and one fp32 number a row (aten/src/ATen/native/cuda/layer_norm_kernel.cu); on the CPU it is decomposed into
single operators. Here it is an operator with the same arguments and results, and no computation.

On the CPU, oneDNN copies the tensors of convolutions into layouts with channels in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from steptime.captured import torch_parts as parts
from steptime.captured.record.cuda_attention import HALVES, attended_by_products, by_rows, widened_softmax
from steptime.num import round_up

SPACE = "steptime_cuda"
"""Namespace of operators that stand for those of CUDA; they are recorded without it."""

_library = torch.library.Library(SPACE, "DEF")
_library.define(
    "_fused_rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
)
_library.define("_fused_rms_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor rstd,"
                " Tensor? weight) -> (Tensor, Tensor)")  # fmt: skip


def _forward(input: Any, shape: Any, weight: Any, eps: Any) -> tuple[Any, Any]:
    rows = (*input.shape[: -len(shape)], *[1] * len(shape))
    return torch.empty_like(input), torch.empty(rows, dtype=torch.float32)


def _backward(gradient: Any, input: Any, shape: Any, rstd: Any, weight: Any) -> tuple[Any, Any]:
    return torch.empty_like(input), torch.empty(0) if weight is None else torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.shape = inputs[1]
    ctx.save_for_backward(inputs[0], inputs[2], output[1])


def _gradients(ctx: Any, gradient: Any, _rstd: Any) -> tuple[Any, None, Any, None]:
    input, weight, rstd = ctx.saved_tensors
    found = torch.ops.steptime_cuda._fused_rms_norm_backward(gradient, input, ctx.shape, rstd, weight)
    return found[0], None, None if weight is None else found[1], None


torch.library.register_fake(f"{SPACE}::_fused_rms_norm", _forward, lib=_library)
torch.library.register_fake(f"{SPACE}::_fused_rms_norm_backward", _backward, lib=_library)
torch.library.register_autograd(f"{SPACE}::_fused_rms_norm", _gradients, setup_context=_keep, lib=_library)


def fused_rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """RMS norm by the fused operator, with the arguments of `torch.nn.functional.rms_norm`."""
    return torch.ops.steptime_cuda._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


TARGETS = ("cpu", "cuda")
WIDEST_FLASH_HEAD = 256
"""Largest head width for which PyTorch uses flash attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""


_DROPOUT, _ATTENTION = functional.dropout, functional.scaled_dot_product_attention
_RMS_NORM = functional.rms_norm


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Call the operators that CUDA tensors would get; on fake tensors they run on any device.

    Dropout keeps a mask of one byte an element instead of a scaled one. Attention in half precision without a mask is
    flash attention, any other is memory-efficient attention; both apply dropout inside. Strides that no fused kernel
    accepts give single products. A softmax of half precision gives fp32 in one kernel; RMS norm is fused. The mode
    intercepts calls of a module; patched names intercept calls inside PyTorch's own functions (multi-head attention).
    """
    place: Any = functional
    place.dropout, place.scaled_dot_product_attention, place.rms_norm = _dropout, _attention, fused_rms_norm
    try:
        with _CudaKernels():
            yield
    finally:
        place.dropout, place.scaled_dot_product_attention, place.rms_norm = _DROPOUT, _ATTENTION, _RMS_NORM


class _CudaKernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DROPOUT:
            return _dropout(*args, **kwargs)
        if func is _ATTENTION:
            return _attention(*args, **kwargs)
        if func is _RMS_NORM:
            return fused_rms_norm(*args, **kwargs)
        made = widened_softmax(func, args, kwargs)
        if made is not None:
            return made
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _as_cuda_casts(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **kwargs)


WIDE = frozenset({
    "__pow__", "__rpow__", "pow", "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "softplus", "layer_norm", "group_norm", "norm", "nuclear_norm", "kl_div",
    "cosine_similarity", "dist", "pdist", "cdist", "renorm", "logsumexp", "nll_loss", "multilabel_margin_loss",
    "multi_margin_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
})  # fmt: skip
"""Functions that run in fp32 under automatic mixed precision on CUDA (aten/src/ATen/autocast_mode.h)."""
SUMMED_WIDE = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
"""Functions with fp32 inputs and results under automatic mixed precision on CUDA, unless they are given a type."""


def _as_cuda_casts(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments cast as by autocast on CUDA; on the CPU most of these functions run in half precision."""
    if name not in WIDE and (name not in SUMMED_WIDE or kwargs.get("dtype") is not None):
        return args, kwargs

    def widened(tensor: Any) -> Any:
        return tensor.to(torch.float32) if tensor.dtype in HALVES else tensor

    args, kwargs = parts.pytree.tree_map_only(torch.Tensor, widened, (args, kwargs))
    return args, kwargs


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0 or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if query.dim() != 4:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(kind) for each in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(kind)
    half = query.dtype in HALVES
    if not by_rows(query, key, value, attn_mask):
        return attended_by_products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if half and attn_mask is None and query.shape[-1] <= WIDEST_FLASH_HEAD:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return efficient(query, key, value, attn_mask, wanted, dropout_p, is_causal, scale=scale)[0]


PIXELS_FOR_ONE = 20480
"""Number of elements above which a single image is convolved by oneDNN."""


def convolution_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    r"""Bytes that a convolution in fp32 needs in addition to its results while it runs.

    Forward, with $x$, $w$, $y$ = bytes of input, weight and output and primes for their blocked copies:

    $$\max(x' + w' + y',\ y' + y) - y$$

    Backward, the gradient of the input first, then that of the weight:

    $$\max(y' + w' + x',\ x' + s x,\ x + y' + x' + w',\ x + w' + w) - x - w$$

    where $s$ = 2 with a stride (the gradient comes with channels last and is copied once more), else 1. Blocks have 16
    channels with AVX-512, else 8; an input with fewer channels than a block is not copied in the forward pass.

    Source: allocations of oneDNN in the profiler of PyTorch 2.13; ATen's `Convolution.cpp` for the choice of oneDNN.
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
        or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
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


def _block() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _blocked(channels: int, others: int) -> int:
    """Bytes of a copy whose channels are padded to whole blocks."""
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


LONGEST_RUN = 33
"""Largest number of time steps that a recurrent layer is run for; its workspace, affine in them, is extrapolated."""


_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
WITH_WORKSPACES = frozenset((*_RECURRENT, "convolution", "convolution_backward"))
"""Operators for which :func:`filled` or :func:`scratch_bytes` has a rule."""


def filled(func: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The result of a fake call with its workspace at full size."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        return (*output[:3], torch.empty(_recurrent_bytes(args), dtype=torch.uint8))
    return output


def _recurrent_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the workspace that a oneDNN recurrent layer keeps for its backward pass."""
    shapes = tuple(tuple(given.shape) if isinstance(given, torch.Tensor) else None for given in args[:7])
    scalars = tuple(args[7:15])
    batch_first = bool(args[14])
    length = args[0].shape[1 if batch_first else 0]
    if not args[15]:
        return 0
    if length <= LONGEST_RUN:
        return _run_bytes(shapes, args[0].dtype, _frozen(scalars), length)
    short = _run_bytes(shapes, args[0].dtype, _frozen(scalars), 1)
    long = _run_bytes(shapes, args[0].dtype, _frozen(scalars), LONGEST_RUN)
    return short + (long - short) * (length - 1) // (LONGEST_RUN - 1)


def _frozen(scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(given) if isinstance(given, list) else given for given in scalars)


@cache
def _run_bytes(shapes: tuple[Any, ...], dtype: torch.dtype, scalars: tuple[Any, ...], length: int) -> int:
    """Workspace of one real call with few time steps, since its size depends on the processor."""
    with parts.without_modes(), torch.enable_grad():
        tensors = [None if shape is None else torch.zeros(shape, dtype=dtype) for shape in shapes]
        batch_first = bool(scalars[7])
        steps, width = length, shapes[0][2]
        batch = shapes[0][0 if batch_first else 1]
        shape = (batch, steps, width) if batch_first else (steps, batch, width)
        tensors[0] = torch.zeros(shape, dtype=dtype, requires_grad=True)
        given = [list(scalar) if isinstance(scalar, tuple) else scalar for scalar in scalars]
        workspace: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, *given, True)[3]
        return workspace.nbytes


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a call allocates while it runs and frees before it ends."""
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return _recurrent_scratch_bytes(args)
    return convolution_scratch_bytes(func, args)


def _leading(width: int) -> int:
    """Leading dim that oneDNN gives a matrix of ``width``: a multiple of 16, never one of 256."""
    width = round_up(width, 16)
    return width + 16 if width % 256 == 0 else width


def _recurrent_scratch_bytes(args: tuple[Any, ...]) -> int:
    r"""Scratch of the backward pass of one oneDNN LSTM layer.

    $$4 \big([\ell(I) \ne I]\, G\, \ell(I) + [\ell(H) \ne H]\, G\, \ell(H) + (I + H + T B)\, \ell(G) + G\big)$$

    where $I$ and $H$ = input and hidden width, $G = 4H$ gates, $T B$ = time steps times batch, and $\ell$ = padded
    leading dim: both weights in two layouts, the bias, and the gradients of the gates; and a copy of an incoming
    gradient that is not contiguous.

    Source: allocations of oneDNN in the profiler of PyTorch 2.13.
    """
    length, batch, width = args[0].shape if not args[21] else (args[0].shape[1], args[0].shape[0], args[0].shape[2])
    gates, hidden = args[2].shape
    padded = sum(gates * _leading(n) for n in (width, hidden) if _leading(n) != n)
    copied = 0 if args[10].is_contiguous() else args[10].numel()
    return 4 * int(copied + padded + (width + hidden + length * batch) * _leading(gates) + gates)
