"""Modules without memory: parameters, buffers and inputs with a shape only."""

from __future__ import annotations

import dataclasses
import dis
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from steptime.captured import torch_parts as parts
from steptime.captured.record.compiler import compiling_nothing
from steptime.captured.record.results import fresh
from steptime.captured.record.values import ONES, Values
from steptime.errors import UserError

if TYPE_CHECKING:
    from steptime.captured.record.environment import Fakes


class Replaced:
    """Table of fake copies of tensors, one per tensor, so that tied weights stay tied.

    Use it inside a fake-tensor mode. Copies are on the CPU, since the autograd engine of a PyTorch without CUDA cannot
    run a fake CUDA backward.
    """

    def __init__(self, mode: Fakes) -> None:
        self.mode, self.values = mode, mode.values
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_inputs = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a tensor; a parameter stays a parameter."""
        found = self._twins.get(id(tensor))
        if found is None:
            with parts.DisableTorchFunction():
                found = self._twins[id(tensor)] = (tensor, self._copied(tensor))
        return found[1]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = fresh(self.mode, tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.requires_grad:
            made.requires_grad_()
        if isinstance(tensor, torch.nn.Parameter):
            vars(made)[parts.IS_PARAMETER] = True
        if not made.requires_grad:
            self._tell(self.values, tensor, made)
        return made

    def _tell(self, values: Values, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Record contents: of real tensors, for inputs only integers; integer inputs without values are ones."""
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and (whole or not self._of_inputs):
            values.put(made, tensor)
        elif self._of_inputs and whole:
            values.put_all(made, 1, frozenset({ONES}))

    @contextmanager
    def taking_inputs(self) -> Iterator[None]:
        """Treat tensors that are replaced meanwhile as inputs of the module."""
        self._of_inputs = True
        try:
            yield
        finally:
            self._of_inputs = False

    def of_tree(self, tree: Any) -> Any:
        """A tree of lists, tuples, dicts (and registered classes) with every tensor replaced."""
        return parts.pytree.tree_map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.copy(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: self.of_tree(getattr(leaf, name)) for name in fields})
        return leaf


def all_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module, its registered submodules, and modules in its lists, tuples and dicts."""
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


WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel", "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel", "FSDPModule": "fully_shard",
}  # fmt: skip
"""Class that splits a module among devices -> name of its wrapper for messages."""


def check_module(module: torch.nn.Module, name: str) -> None:
    """Refuse modules that cannot be captured.

    Raises:
        UserError: the shape of a weight is unknown before the first run, the module is split among devices, or its
            weights are constants.
    """
    for child in module.modules():
        wrapper = next((base.__name__ for base in type(child).__mro__ if base.__name__ in WRAPPERS), None)
        if wrapper is not None:
            hint = "return the module as it was before; `steptime plan` splits it among devices"
            raise UserError(f"{name}: {WRAPPERS[wrapper]} splits it or a part of it among devices", hint=hint)
        if isinstance(child, torch.jit.ScriptModule) and not hasattr(child, "training"):
            hint = "return the module as it was before torch.jit.freeze"
            raise UserError(f"{name}: weights of a frozen TorchScript module are constants", hint=hint)
    for path, weight in module.named_parameters():
        if torch.nn.parameter.is_lazy(weight):
            raise UserError(f"{name}: the shape of {path} is not known yet", hint="run the module once before")


def take_weights(module: torch.nn.Module, replaced: Replaced) -> None:
    """Replace all tensors of the module by fake copies; the caller keeps the originals."""
    for child in all_modules(module):
        tables: tuple[dict[str, Any], ...] = (*parts.tables_of(child), child.__dict__)
        for table in tables:
            for name, held in list(table.items()):
                if isinstance(held, torch.Tensor) and held.layout is torch.strided:
                    table[name] = replaced.copy(held)


class _WithLoss(torch.nn.Module):
    """A module and the trained parts of its loss under one root; names of these parts begin with ``loss``."""

    def __init__(self, module: torch.nn.Module, others: Mapping[str, Any]) -> None:
        super().__init__()
        parts.members_of(self)[""] = module
        parts.members_of(self).update({n: each for n, each in others.items() if isinstance(each, torch.nn.Module)})
        parts.tables_of(self)[0].update({n: each for n, each in others.items() if isinstance(each, torch.nn.Parameter)})

    def train(self, mode: bool = True) -> _WithLoss:
        """Set the mode of the module only; a teacher inside the loss keeps its mode."""
        parts.members_of(self)[""].train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the module itself."""
        return parts.members_of(self)[""](*args, **kwargs)


def with_loss(module: torch.nn.Module, loss: Any) -> torch.nn.Module:
    """A module together with the modules and parameters of its loss; the module itself if the loss has none."""
    known = {id(one) for one in (*all_modules(module), *module.parameters())}
    others = dict(_parts("loss", loss, known))
    return _WithLoss(module, others) if others else module


def _parts(name: str, held: Any, known: set[int]) -> Iterator[tuple[str, torch.nn.Module | torch.nn.Parameter]]:
    """Modules and parameters that a callable holds in its closure, attributes, arguments and globals."""
    if id(held) in known or isinstance(held, (str, type, ModuleType)):
        return
    known.add(id(held))
    inner: dict[Any, Any] = {}
    if isinstance(held, (torch.nn.Module, torch.nn.Parameter)):
        yield name, held
    elif isinstance(held, (dict, list, tuple)):
        inner = held if isinstance(held, dict) else dict(enumerate(held))
    elif isinstance(held, MethodType):
        inner = {"self": held.__self__, "method": held.__func__}
    elif isinstance(held, partial):
        inner = {"function": held.func, **dict(enumerate(held.args)), **held.keywords}
    elif isinstance(held, FunctionType) and held.__module__.partition(".")[0] != "torch":
        read = {one.argval for one in dis.get_instructions(held) if one.opname == "LOAD_GLOBAL"}
        inner = {word: held.__globals__.get(word) for word in sorted(read)}
        inner |= dict(zip(held.__code__.co_freevars, map(_content, held.__closure__ or ()), strict=True))
    elif name == "loss":
        inner = getattr(held, "__dict__", {})
    for word, each in inner.items():
        yield from _parts(f"{name}.{word}", each, known)


def _content(cell: CellType) -> Any:
    """Content of a cell of a closure; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@contextmanager
def without_closed_over(function: Any, replaced: Replaced) -> Iterator[Mapping[str, Any]]:
    """Replace tensors in the closure of a function (targets of a loss) by fake copies, and yield these by name."""
    undo: list[tuple[Any, Any]] = []
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    made: dict[str, Any] = {}
    try:
        for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
            if isinstance(_content(cell), torch.Tensor):
                undo.append((cell, cell.cell_contents))
                made[name] = cell.cell_contents = replaced.copy(cell.cell_contents)
        yield made
    finally:
        for cell, held in undo:
            cell.cell_contents = held


SMALL_ELEMENTS = 2**20
"""Largest number of elements of tensors with values while a module is built."""

_FILLED = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


class _IntegersWithValues(TorchFunctionMode):
    """Make small new tensors of integers or booleans real, as later code may read indices and shapes from them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in parts.constructors() or kwargs.get("device") is not None:
            return made
        if not isinstance(made, torch.Tensor) or made.device.type != "meta" or made.numel() > SMALL_ELEMENTS:
            return made
        if made.is_floating_point() or made.is_complex():
            return made
        return func(*args, **{**kwargs, "device": "cpu"})


class _LargeWithoutMemory(TorchFunctionMode):
    """Put large new tensors on the meta device, where fills do nothing; small ones are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FILLED and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            sizes = [each for each in size if isinstance(each, int)]
            if math.prod(sizes) > SMALL_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@compiling_nothing()
def build(factory: Callable[[], Any]) -> Any:
    """Result of a factory, without memory for weights if possible.

    The first attempt has only integers in memory. Constructors that mix these with other tensors fail, so the second
    runs on the meta device. Constructors that read values (``.item()``, ``.tolist()``) fail there, so the third runs on
    the CPU, with values only in small tensors.
    """
    try:
        with _seeded(), torch.device("meta"), _IntegersWithValues():
            return factory()
    except (NotImplementedError, RuntimeError):
        pass
    try:
        with _seeded(), torch.device("meta"):
            return factory()
    except (NotImplementedError, RuntimeError) as error:
        first = error
    try:
        with _seeded(), _LargeWithoutMemory():
            return factory()
    except RuntimeError as error:
        if str(error) == str(first):
            raise
        raise RuntimeError(f"{error} (and on the meta device: {first})") from None


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed random numbers, and restore the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
