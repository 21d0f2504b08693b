"""Losses by name, and the loss that a module returns itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree

from steptime.errors import UserError

#: A function from the module's output to a scalar, or the name of one of `LOSSES`.
Loss = str | Callable[[Any], torch.Tensor]


def main_output(output: Any) -> torch.Tensor:
    """The tensor that a loss is taken of: the output, its ``logits``, or its first floating-point tensor."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    found = _floating_point(output)
    if not found:
        raise ValueError("the module returns no floating-point tensor to take a loss of")
    return found[0]


def _floating_point(output: Any) -> list[torch.Tensor]:
    return [t for t in _pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def given_loss(output: Any) -> Any:
    """What a module returns under the name ``loss``, or None."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def own_loss(output: Any) -> torch.Tensor:
    """The loss a module returns itself (a scalar, ``.loss``, ``["loss"]``, last scalar), else the sum of its output."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else output.sum()
    given = given_loss(output)
    if isinstance(given, torch.Tensor):
        return given
    scalars = [t for t in _floating_point(output) if t.numel() == 1 and t.requires_grad]
    return scalars[-1] if scalars else main_output(output).sum()


def cross_entropy(output: Any) -> torch.Tensor:
    """Cross entropy of the last dim against one class a row, all rows counted.

    Raises:
        UserError: the output has no dim.
    """
    logits = main_output(output)
    if not logits.dim():
        raise UserError("cross-entropy is taken of logits, and the module returns one number",
                        hint="where that number is the loss: --loss own")  # fmt: skip
    rows = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.int64))


def mean_square(output: Any) -> torch.Tensor:
    """Mean squared error against a target of the same shape."""
    values = main_output(output)
    return functional.mse_loss(values, torch.empty_like(values))


LOSSES: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "own": own_loss, "cross-entropy": cross_entropy, "mse": mean_square,
    "sum": lambda output: main_output(output).sum(), "mean": lambda output: main_output(output).mean(),
}  # fmt: skip
