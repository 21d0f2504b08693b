"""Module and inputs in the element type of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steptime.errors import UnknownNameError

TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def named(module: Any) -> str:
    """Name of a module: that of its class."""
    return type(module).__name__


def converted(module: Any, dtype: str | None) -> tuple[Any, Callable[[Any], Any]]:
    """A copy of the module in that element type, and a function that converts the floating-point inputs.

    Raises:
        UnknownNameError: no such element type.
    """
    if dtype is None:
        return module, lambda inputs: inputs
    if dtype not in TYPES:
        raise UnknownNameError("element type", dtype, TYPES)
    import copy

    import torch

    wanted = getattr(torch, TYPES[dtype])
    if any(t.is_floating_point() and t.dtype != wanted for t in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).to(device="meta", dtype=wanted)

    def cast(inputs: Any) -> Any:
        def one(tensor: Any) -> Any:
            return tensor.to(wanted) if tensor.is_floating_point() else tensor

        return torch.utils._pytree.tree_map_only(torch.Tensor, one, inputs)

    return module, cast
