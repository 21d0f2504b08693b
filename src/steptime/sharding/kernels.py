"""Operators whose devices exchange something while they run, or treat their own indices alone. Needs PyTorch.

Each is called with the pieces of one device and gives its pieces of the results, with the collectives that
:mod:`steptime.captured.ops.labels` names: sums over a split dim, the largest number of a row, the weight of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from steptime.errors import UserError
from steptime.sharding.devices import Devices, Piece, box_of
from steptime.sharding.script import Write


@dataclass(frozen=True, slots=True)
class Local:
    """A call on the pieces of one device."""

    devices: Devices
    run: Callable[..., Any]
    """The operator, with its arguments by name."""
    given: Mapping[str, Any]
    pieces: Mapping[str, Piece]
    writes: Sequence[Write]

    def plain(self, **changed: Any) -> Any:
        """The operator as it is, some arguments replaced."""
        return self.run(**{**self.given, **changed})

    def axes(self, name: str, dims: Iterable[int]) -> tuple[int, ...]:
        """Axes that divide dims of an input."""
        return tuple(sorted(axis for dim in dims for axis in self.pieces[name].layout.divided[dim]))

    def summed(self, axes: tuple[int, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sums over devices, all in one collective."""
        return tuple(self.devices.summed(axes, torch.stack(tensors)).unbind())


def _own(indices: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices from the beginning of a piece, and which of them point into it."""
    inside = (indices >= start) & (indices < start + size)
    return torch.where(inside, indices - start, 0), inside


def _embedding(call: Local) -> Any:
    piece = call.pieces["weight"]
    start, size = call.devices.box(piece)[0]
    if size == piece.shape[0]:
        return call.plain()
    indices, inside = _own(call.given["indices"], start, size)
    return call.plain(indices=indices) * inside.unsqueeze(-1)


def _embedding_backward(call: Local) -> Any:
    write = call.writes[0]
    assert write.layout is not None
    start, size = box_of(write.layout, write.type.shape, call.devices.sizes, call.devices.at)[0]
    if size == write.type.shape[0]:
        return call.plain()
    if call.given.get("scale_grad_by_freq"):
        raise UserError("an embedding scaled by frequency cannot be run with its rows sharded")
    indices, inside = _own(call.given["indices"], start, size)
    padding = call.given.get("padding_idx", -1)
    own = padding - start if start <= padding < start + size else -1
    grad = call.given["grad_output"] * inside.unsqueeze(-1)
    return call.plain(grad_output=grad, indices=indices, padding_idx=own)


def _label_loss(call: Local) -> Any:
    """Loss of the labels that point into the device's classes, over the weight of all rows."""
    rows, classes = call.axes("target", (0,)), call.axes("self", (1,))
    reduction, weight, target = call.given["reduction"], call.given.get("weight"), call.given["target"]
    if (not rows and not classes) or (not classes and reduction != 1):
        return call.plain()
    start, size = call.devices.box(call.pieces["self"])[1]
    if classes and weight is not None:
        raise UserError("a loss with weights of classes cannot be run with its classes sharded")
    valid = target != call.given["ignore_index"]
    own, inside = _own(target, start, size)
    scores = call.given["self"].gather(1, own.unsqueeze(1)).squeeze(1)
    each = valid.to(scores.dtype) if weight is None else weight[own] * valid
    losses = -scores * each * inside
    if reduction == 0:
        return losses, losses.new_zeros(())
    total = each.sum()
    if reduction == 1:
        (total,) = call.summed(rows, total) if rows else (total,)
        return losses.sum() / total, total
    return losses.sum(), total


def _label_loss_backward(call: Local) -> Any:
    if not call.axes("self", (1,)):
        return call.plain()
    start, size = call.devices.box(call.pieces["self"])[1]
    target, ignored = call.given["target"], call.given["ignore_index"]
    own, inside = _own(target, start, size)
    return call.plain(target=torch.where(inside & (target != ignored), own, -100), ignore_index=-100)


def _softmax(logarithm: bool) -> Callable[[Local], Any]:
    def run(call: Local) -> Any:
        x, dim = call.given["self"], call.given["dim"]
        axes = call.axes("self", (dim % x.dim(),))
        if not axes:
            return call.plain()
        x = x - call.devices.summed(axes, x.amax(dim, keepdim=True), "max")
        total = call.devices.summed(axes, x.exp().sum(dim, keepdim=True))
        return x - total.log() if logarithm else x.exp() / total

    return run


def _softmax_backward(logarithm: bool) -> Callable[[Local], Any]:
    def run(call: Local) -> Any:
        grad, output, dim = call.given["grad_output"], call.given["output"], call.given["dim"]
        axes = call.axes("output", (dim % output.dim(),))
        if not axes:
            return call.plain()
        total = call.devices.summed(axes, (grad if logarithm else grad * output).sum(dim, keepdim=True))
        return grad - output.exp() * total if logarithm else (grad - total) * output

    return run


def _normed_dims(call: Local) -> tuple[list[int], int]:
    """Dims that are normalised, and the elements in them of the whole tensor."""
    piece = call.pieces["input"]
    rank = len(call.given["normalized_shape"])
    dims = list(range(len(piece.shape) - rank, len(piece.shape)))
    return dims, int(torch.Size(piece.shape[-rank:]).numel())


def _layer_norm(call: Local) -> Any:
    dims, count = _normed_dims(call)
    axes = call.axes("input", dims)
    if not axes:
        return call.plain()
    x = call.given["input"]
    mean, square = (each / count for each in call.summed(axes, *(y.sum(dims, keepdim=True) for y in (x, x * x))))
    rstd = (square - mean * mean + call.given["eps"]).rsqrt()
    return _scaled((x - mean) * rstd, call.given.get("weight"), call.given.get("bias")), mean, rstd


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm_backward(call: Local) -> Any:
    dims, count = _normed_dims(call)
    axes = call.axes("input", dims)
    if not axes:
        return call.plain()
    grad, rstd, wanted = call.given["grad_out"], call.given["rstd"], call.given["output_mask"]
    normed = (call.given["input"] - call.given["mean"]) * rstd
    scaled = _scaled(grad, call.given.get("weight"), None)
    a, b = call.summed(axes, *(y.sum(dims, keepdim=True) for y in (scaled, scaled * normed)))
    rows = list(range(grad.dim() - len(dims)))
    made = (rstd * (scaled - a / count - normed * b / count), (grad * normed).sum(rows), grad.sum(rows))
    return tuple(each if want else None for each, want in zip(made, wanted, strict=True))


def _by_channel(x: Any, rank: int) -> Any:
    return None if x is None else x.view(1, -1, *(1,) * (rank - 2))


def _batch_norm(call: Local) -> Any:
    piece, x = call.pieces["input"], call.given["input"]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    axes = call.axes("input", dims)
    if not axes or not call.given["training"]:
        return call.plain()
    count = torch.Size(piece.shape).numel() // piece.shape[1]
    mean, square = (each / count for each in call.summed(axes, x.sum(dims), (x * x).sum(dims)))
    spread, momentum = square - mean * mean, call.given["momentum"]
    for name, new in (("running_mean", mean), ("running_var", spread * count / (count - 1))):
        if call.given.get(name) is not None:
            call.given[name].mul_(1 - momentum).add_(new, alpha=momentum)
    rstd = (spread + call.given["eps"]).rsqrt()
    m, r, w, b = (_by_channel(y, x.dim()) for y in (mean, rstd, call.given.get("weight"), call.given.get("bias")))
    return _scaled((x - m) * r, w, b), mean, rstd


def _batch_norm_backward(call: Local) -> Any:
    piece, x, grad = call.pieces["input"], call.given["input"], call.given["grad_out"]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    axes = call.axes("input", dims)
    if not axes or not call.given["train"]:
        return call.plain()
    count = torch.Size(piece.shape).numel() // piece.shape[1]
    m, r, w = (_by_channel(call.given.get(y), x.dim()) for y in ("save_mean", "save_invstd", "weight"))
    normed = (x - m) * r
    a, b = call.summed(axes, grad.sum(dims), (grad * normed).sum(dims))
    inner = grad - (_by_channel(a, x.dim()) + normed * _by_channel(b, x.dim())) / count
    made = (_scaled(inner * r, w, None), b, a)
    return tuple(each if want else None for each, want in zip(made, call.given["output_mask"], strict=True))


KERNELS: Final[Mapping[str, Callable[[Local], Any]]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _label_loss,
    "nll_loss_backward": _label_loss_backward,
    "_softmax": _softmax(False),
    "_log_softmax": _softmax(True),
    "_softmax_backward_data": _softmax_backward(False),
    "_log_softmax_backward_data": _softmax_backward(True),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
}
"""Operator -> what one device does."""
