"""Memory that real kernels need and PyTorch's fake kernels do not show: filled workspaces, scratch during a call."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from steptime.captured.record.convolution_scratch import convolution_scratch_bytes
from steptime.num import round_up

LONGEST_RUN = 33
"""Time steps for which a recurrent layer is run; its workspace is affine in them, so longer ones are extrapolated."""


def filled(func: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The result of a fake call with its workspace at full size."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        return (*output[:3], torch.empty(_recurrent_bytes(args), dtype=torch.uint8))
    return output


def _recurrent_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of what a oneDNN recurrent layer keeps for its backward pass."""
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
    """Size that one call with few time steps really has; the workspace depends on the processor."""
    with _disable_current_modes(), torch.enable_grad():
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
    """Bytes that a call needs while it runs and gives back before it ends."""
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return _recurrent_scratch_bytes(args)
    return convolution_scratch_bytes(func, args)


def _leading(width: int) -> int:
    """Leading dim that oneDNN gives a matrix of that width: a multiple of 16, never one of 256."""
    width = round_up(width, 16)
    return width + 16 if width % 256 == 0 else width


def _recurrent_scratch_bytes(args: tuple[Any, ...]) -> int:
    r"""Scratch of the backward pass of one oneDNN LSTM layer.

    $$4 \big([\ell(I) \ne I]\, G\, \ell(I) + [\ell(H) \ne H]\, G\, \ell(H) + (I + H + T B)\, \ell(G) + G\big)$$

    where $I$ and $H$ = input and hidden width, $G = 4H$ gates, $T B$ = time steps times batch, and $\ell$ = padded
    leading dim: both weights in two layouts, the bias, and the gradients of the gates; and a copy of an incoming
    gradient that is not contiguous.

    Source: allocations of oneDNN as the profiler of PyTorch 2.13 lists them.
    """
    length, batch, width = args[0].shape if not args[21] else (args[0].shape[1], args[0].shape[0], args[0].shape[2])
    gates, hidden = args[2].shape
    padded = sum(gates * _leading(n) for n in (width, hidden) if _leading(n) != n)
    copied = 0 if args[10].is_contiguous() else args[10].numel()
    return 4 * int(copied + padded + (width + hidden + length * batch) * _leading(gates) + gates)
