"""A module without its weights: parameters, buffers and inputs that have a shape and no memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from steptime.errors import UserError


class Replaced:
    """Makes fake twins of tensors, one for each tensor however often it is met (tied weights stay tied).

    Use it inside a fake-tensor mode: what it makes is on the CPU, since the autograd engine of a PyTorch without CUDA
    cannot run a fake CUDA backward.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin; a parameter stays a parameter."""
        found = self._twins.get(id(tensor))
        if found is None:
            with torch.device(self._device):
                made = torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            found = self._twins[id(tensor)] = (tensor, made)
        return found[1]

    def of_tree(self, tree: Any) -> Any:
        """The same nest of lists, tuples, dicts (and registered classes) with every tensor replaced."""
        return _pytree.tree_map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.twin(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: self.of_tree(getattr(leaf, name)) for name in fields})
        return leaf


def all_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module's own, and those that stand unregistered in its lists, tuples and dicts."""
    found: dict[int, torch.nn.Module] = {}
    waiting = [module]
    while waiting:
        for child in waiting.pop().modules():
            if id(child) in found:
                continue
            found[id(child)] = child
            for value in child.__dict__.values():
                if isinstance(value, (dict, list, tuple)):
                    members = value.values() if isinstance(value, dict) else value
                    waiting += [each for each in members if isinstance(each, torch.nn.Module)]
    return list(found.values())


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")
"""Classes that split a module among devices."""


def check_module(module: torch.nn.Module, name: str) -> None:
    """Modules that cannot be captured as they are.

    Raises:
        UserError: the shape of a weight is not known before the first run, or the module is split among devices.
    """
    for child in module.modules():
        wrapper = next((base.__name__ for base in type(child).__mro__ if base.__name__ in WRAPPERS), None)
        if wrapper is not None:
            hint = "return the module itself; `steptime plan` splits it among devices"
            raise UserError(f"{name} is wrapped in {wrapper}", hint=hint)
    for path, weight in module.named_parameters():
        if torch.nn.parameter.is_lazy(weight):
            raise UserError(f"{name}: the shape of {path} is not known yet", hint="run the module once before")


def take_weights(module: torch.nn.Module, replaced: Replaced) -> None:
    """Put twins in place of all tensors that the module holds; whoever calls it keeps what was there."""
    for child in all_modules(module):
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, child.__dict__)
        for table in tables:
            for name, held in list(table.items()):
                if isinstance(held, torch.Tensor):
                    table[name] = replaced.twin(held)


@contextmanager
def without_closed_over(function: Any, replaced: Replaced) -> Iterator[None]:
    """Put twins in place of tensors that a function has from around it (targets of a loss)."""
    undo: list[tuple[Any, Any]] = []
    try:
        for cell in getattr(function, "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.Tensor):
                undo.append((cell, cell.cell_contents))
                cell.cell_contents = replaced.twin(cell.cell_contents)
        yield
    finally:
        for cell, held in undo:
            cell.cell_contents = held


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
    except (NotImplementedError, RuntimeError) as error:
        first = error
    try:
        with _LargeWithoutMemory():
            return factory()
    except RuntimeError as error:
        if str(error) == str(first):
            raise
        raise RuntimeError(f"{error} (and on the meta device: {first})") from None
