"""Kernels that PyTorch takes on CUDA where its CPU operators are others: dropout, fused attention, RMS norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from steptime.captured.record.rms_norm import fused_rms_norm
from steptime.errors import UserError

TARGETS = ("cpu", "cuda")
WIDEST_FLASH_HEAD = 256
"""Head width up to which PyTorch takes flash attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""


def check_target(name: str) -> str:
    """The name of a target.

    Raises:
        UserError: there is no such target.
    """
    if name not in TARGETS:
        raise UserError(f"target {name!r} is unknown", hint=f"one of {', '.join(TARGETS)}")
    return name


_DROPOUT, _ATTENTION = functional.dropout, functional.scaled_dot_product_attention
_RMS_NORM = functional.rms_norm


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Call the operators that CUDA tensors would get; on fake tensors they run on any device.

    Dropout keeps a mask of one byte an element instead of a scaled one; attention in half precision without a mask is
    flash attention, any other memory-efficient attention, and both drop out inside; RMS norm is fused. The mode sees
    what a module calls; what PyTorch's own functions call inside (multi-head attention) is found by name.
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
"""Functions that take and give fp32 there unless they are told a type."""


def _as_cuda_casts(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments as CUDA's autocast would cast them; on the CPU most of these run in half precision."""
    if name not in WIDE and (name not in SUMMED_WIDE or kwargs.get("dtype") is not None):
        return args, kwargs

    def widened(tensor: Any) -> Any:
        return tensor.to(torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    args, kwargs = _pytree.tree_map_only(torch.Tensor, widened, (args, kwargs))
    return args, kwargs


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0 or inplace:
        return torch._VF.dropout_(input, p, training) if inplace else torch._VF.dropout(input, p, training)  # type: ignore[attr-defined]
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if query.dim() != 4:
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(kind) for each in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
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
