"""The fused RMS norm of CUDA, which PyTorch writes out in single operators on the CPU.

CUDA keeps the input as it is and one fp32 number a row (aten/src/ATen/native/cuda/layer_norm_kernel.cu); the operators
below have the same arguments and results, and no computation.
"""

from __future__ import annotations

from typing import Any

import torch

SPACE = "steptime_cuda"
"""Namespace of operators that stand for CUDA's; they are recorded under the name after it."""

_library = torch.library.Library(SPACE, "DEF")
_library.define("_fused_rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps)"
                " -> (Tensor, Tensor)")  # fmt: skip
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
    """As `torch.nn.functional.rms_norm`."""
    return torch.ops.steptime_cuda._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
