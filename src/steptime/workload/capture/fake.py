"""A module without its weights: parameters, buffers and inputs that have a shape and no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree


class Replaced:
    """Makes fake twins of tensors, one for each tensor however often it is met (tied weights stay tied).

    Use it inside a fake-tensor mode: what it makes is on the CPU, since the autograd engine of a PyTorch without CUDA
    cannot run a fake CUDA backward.
    """

    def __init__(self) -> None:
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin; a parameter stays a parameter."""
        found = self._twins.get(id(tensor))
        if found is None:
            with torch.device("cpu"):
                made = torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            found = self._twins[id(tensor)] = (tensor, made)
        return found[1]

    def of_tree(self, tree: Any) -> Any:
        """The same nest of lists, tuples, dicts (and registered classes) with every tensor replaced."""
        return _pytree.tree_map_only(torch.Tensor, self.twin, tree)


@contextmanager
def without_weights(module: torch.nn.Module, replaced: Replaced) -> Iterator[None]:
    """Put twins in place of all tensors that the module holds; the module is as before when it ends."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for child in module.modules():
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, child.__dict__)
            for table in tables:
                for name, held in list(table.items()):
                    if isinstance(held, torch.Tensor):
                        undo.append((table, name, held))
                        table[name] = replaced.twin(held)
        yield
    finally:
        for table, name, held in undo:
            table[name] = held


SMALL_ELEMENTS = 2**20
"""Tensors up to this size have values while a module is built, larger ones do not."""

_FILLED = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


class _LargeWithoutMemory(TorchFunctionMode):
    """Large new tensors are on the meta device, whatever fills them does nothing; small ones are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FILLED and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            sizes = [each for each in size if isinstance(each, int)]
            if math.prod(sizes) > SMALL_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(factory: Callable[[], Any]) -> Any:
    """What a factory returns, without memory for weights where that can be had.

    First on the meta device. A constructor that looks at values (``.item()``, ``.tolist()``) fails there: then on the
    CPU, with values in small tensors alone.
    """
    try:
        with torch.device("meta"):
            return factory()
    except (NotImplementedError, RuntimeError):
        with _LargeWithoutMemory():
            return factory()
