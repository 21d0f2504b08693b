"""Softmax and attention on CUDA where PyTorch runs other operators than on a CPU: casts inside kernels, and products.

A softmax of half precision whose result is fp32 is one kernel on CUDA, forward and backward
(aten/src/ATen/native/SoftMax.cpp, `half_to_float`): there is no copy of the input in fp32, and its gradient is made in
half precision at once. On a CPU the input is converted first. Under automatic mixed precision every softmax and every
cross-entropy works so.

Fused attention needs contiguous rows: where the last dim of a query, key, value or mask has another stride than 1,
PyTorch runs single products in fp32 (aten/src/ATen/native/transformers/sdp_utils_cpp.h,
`check_last_dim_stride_equals_1_dense`; attention.cpp, `_scaled_dot_product_attention_math`). The relative positions of
T5 are such a mask: a table of heads by pairs that is viewed as pairs by heads.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.nn import functional

HALVES: Final = (torch.float16, torch.bfloat16)
_CROSS_ENTROPY, _NLL = functional.cross_entropy, functional.nll_loss
_SOFTMAX: Final = {
    **dict.fromkeys((functional.softmax, torch.softmax, torch.Tensor.softmax), "_softmax"),
    **dict.fromkeys((functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), "_log_softmax"),
}
"""Function of PyTorch -> the operator that it calls."""
_BEFORE_SMOOTHING: Final = 5
"""Number of arguments of a cross-entropy between the classes and the smoothing of labels."""

_library = torch.library.Library("steptime_cuda", "FRAGMENT")


def _wide(self: Any, dim: int, half_to_float: bool) -> Any:
    return torch.empty_like(self, dtype=torch.float32)


def _narrow(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    return torch.empty_like(grad_output, dtype=input_dtype)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
    ctx.save_for_backward(output)


def _define(name: str) -> None:
    """Define an operator from half precision to fp32, with its gradient."""
    gradient = "Tensor grad_output, Tensor output, int dim, ScalarType input_dtype"
    _library.define(f"{name}(Tensor self, int dim, bool half_to_float) -> Tensor")
    _library.define(f"{name}_backward_data({gradient}) -> Tensor")
    torch.library.register_fake(f"steptime_cuda::{name}", _wide, lib=_library)
    torch.library.register_fake(f"steptime_cuda::{name}_backward_data", _narrow, lib=_library)
    backward = getattr(torch.ops.steptime_cuda, f"{name}_backward_data")

    def gradients(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        return backward(gradient, ctx.saved_tensors[0], ctx.dim, ctx.dtype), None, None

    torch.library.register_autograd(f"steptime_cuda::{name}", gradients, setup_context=_keep, lib=_library)


for _name in ("_softmax", "_log_softmax"):
    _define(_name)


def widened_softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a softmax or a cross-entropy whose cast to fp32 is a part of its kernel; None for any other call.

    Args:
        func: function of PyTorch.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if func is _CROSS_ENTROPY:
        return _cross_entropy(*args, **kwargs)
    if func not in _SOFTMAX:
        return None
    given = {name: value for name, value in kwargs.items() if name != "_stacklevel"}
    named = dict(zip(("input", "dim"), args, strict=False)) | given
    kinds = [one for one in (*args[2:], given.get("dtype")) if isinstance(one, torch.dtype)]
    return _softmax(_SOFTMAX[func], named.get("input"), named.get("dim"), kinds[0] if kinds else None)


def _softmax(name: str, input: Any, dim: Any, dtype: Any) -> Any:
    mixed = dtype is None and torch.is_autocast_enabled("cpu")
    if input is None or dim is None or input.dtype not in HALVES or not (mixed or dtype is torch.float32):
        return None
    return getattr(torch.ops.steptime_cuda, name)(input, int(dim) % max(input.dim(), 1), True)


def _cross_entropy(input: Any, target: Any, *args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> Any:
    """Cross-entropy against class numbers; None for probabilities and smoothed labels."""
    if label_smoothing or len(args) > _BEFORE_SMOOTHING or target.is_floating_point():
        return None
    logs = _softmax("_log_softmax", input, 1 if input.dim() > 1 else 0, None)
    return None if logs is None else _NLL(logs, target, *args, **kwargs)


def by_rows(*tensors: Any) -> bool:
    """True if the last dim of every tensor has stride 1."""
    return all(each is None or each.stride(-1) == 1 or each.shape[-1] == 1 for each in tensors)


def attended_by_products(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> Any:
    """Attention in single fp32 operators, as PyTorch runs it where no fused kernel accepts the tensors."""
    kind, root = query.dtype, math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    with torch.autocast("cpu", enabled=False):
        query, key, value = (each.float() if kind in HALVES else each for each in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        scores = (query * root) @ (key * root).transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=kind).masked_fill_(mask.logical_not(), float("-inf"))
        scores = scores if mask is None else scores.add_(mask)
        shares = torch.softmax(scores, -1)
        unseen = torch.isneginf(scores).all(-1, keepdim=True)
        shares = torch.where(unseen, torch.zeros((), dtype=shares.dtype), shares)
        if dropout_p:
            shares = torch.native_dropout(shares, dropout_p, True)[0]
        out = shares @ value
        if kind in HALVES:
            shares.to(kind)  # PyTorch casts it too, and discards the result
        return out.to(kind)
