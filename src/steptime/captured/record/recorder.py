"""The recorder of every ATen call of a step, with its module and the storages that it reads, writes and frees.

Hooks give the module of a call in the forward pass, sequence numbers of autograd in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as hooks

from steptime.captured import torch_parts as parts
from steptime.captured.graph import BEFORE, Attribute, Call, Category, Nodes, Phase, Storage, TensorType, Value
from steptime.captured.graph.program import OUTSIDE
from steptime.captured.record.device import WITH_WORKSPACES, filled, scratch_bytes
from steptime.captured.record.environment import Fakes
from steptime.captured.record.results import NEW
from steptime.captured.record.training import scalar_read
from steptime.captured.record.values import DEVICE, Signature, attribute, signature, tensors_in, type_of


class Paths:
    """Tracks the path of the running module.

    Autograd numbers its nodes in the order in which the forward pass makes them; a node of the backward pass has the
    number of its forward operator, which gives its module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._path = {id(child): path for path, child in module.named_modules()}
        self._owner = {
            id(parameter): name.rpartition(".")[0]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self._stack: list[str] = []
        self._of_sequence: dict[int, str] = {}
        self._next = 0
        self._last = ""

    @property
    def inside(self) -> bool:
        """True if the forward of a module runs (in the backward pass: runs again)."""
        return bool(self._stack)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow every module's forward."""
        self._next = parts.sequence_number()
        enter = hooks.register_module_forward_pre_hook(self._enter)
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        self.note()
        self._stack.append(self._path.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        self.note()
        if self._stack:
            self._stack.pop()

    @contextmanager
    def inside_of(self, path: str) -> Iterator[None]:
        """Assign calls meanwhile to a path."""
        self.note()
        self._stack.append(path)
        try:
            yield
        finally:
            self.note()
            self._stack.pop()

    def note(self) -> None:
        """Assign the autograd nodes since the last note to the running module."""
        now = parts.sequence_number()
        path = self._stack[-1] if self._stack else ""
        for number in range(self._next, now):
            self._of_sequence[number] = path
        self._next = now

    def current(self, *, backward: bool) -> str:
        """Path of the module whose forward or backward runs; sums of autograd in between belong to the last module."""
        self.note()
        if self._stack:
            self._last = self._stack[-1]
            return self._last
        node = parts.current_node()
        if node is None:
            self._last = self._last if backward else ""
            return self._last
        variable = getattr(node, "variable", None)
        if variable is not None:
            self._last = self._owner.get(id(variable), self._last)
        else:
            self._last = self._of_sequence.get(parts.number_of(node), self._last)
        return self._last


Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


@dataclass(slots=True)
class _Held:
    """A storage while it is recorded."""

    size_bytes: int
    born: int
    freed: int | None = None
    category: Category = "temporary"
    name: str = ""
    content: Value | None = None
    """The value that was written last."""
    layout: Layout | None = None
    """Layout of the content."""
    storage: weakref.ref[Any] | None = None
    """Weak reference that tells when the storage is freed."""
    views: dict[Layout, Value] = field(default_factory=dict)
    """Layout -> value, for views of the present content."""


class Recorder(parts.NotCompiled, parts.TorchDispatchMode):
    """Dispatch mode that records calls; run it inside a fake-tensor mode.

    It keeps no reference to any tensor: storages have numbers, and a weak reference tells when each is freed, at the
    same time as for the allocator.
    """

    def __init__(self, paths: Paths, fakes: Fakes, nonzero_share: float | None = None) -> None:
        super().__init__()
        self.fakes = fakes
        self._nonzero_share = nonzero_share
        self.nodes = Nodes()
        self.calls: list[Call] = []
        self.phase: Phase = "forward"
        self._paths = paths
        self._held: list[_Held] = []
        self._number: dict[int, int] = {}
        self._types: dict[tuple[object, ...], TensorType] = {}
        self._draws = 0
        self._outside = 0

    # -- storages -----------------------------------------------------------------------------------------------------

    def name(self, tensor: torch.Tensor, category: Category, name: str) -> int:
        """Set category and name of the storage of a tensor; an unknown storage existed before the step."""
        number = self._storage(tensor, BEFORE, source=(category, name))
        held = self._held[number]
        held.category, held.name = category, held.name or name
        return number

    def never_made(self, tensor: torch.Tensor) -> None:
        """Mark a state that exists only because the optimiser was initialised with all parameters."""
        self._held[self._storage(tensor, BEFORE)].size_bytes = 0

    def _storage(self, tensor: torch.Tensor, born: int, source: tuple[Category, str] | None = None) -> int:
        storage = tensor.untyped_storage()
        number = self._number.get(id(storage))
        if number is not None:
            return number
        number = len(self._held)
        held = _Held(storage.nbytes(), born)
        self._held.append(held)
        self._number[id(storage)] = number
        held.storage = weakref.ref(storage, partial(self._free, id(storage), number))
        if born == BEFORE:
            category, name = source or ("input", f"{OUTSIDE}{self._outside}")
            self._outside += source is None
            kind = {"gradient": "state"}.get(category, category)
            held.category, held.name = category, name
            held.layout = _layout(tensor)
            held.content = self.nodes.source(kind, name, self._type(tensor, held.layout))
            held.views[held.layout] = held.content
        return number

    def _free(self, address: int, number: int, _gone: object) -> None:
        if self._number.get(address) == number:
            del self._number[address]
        held = self._held[number]
        held.storage = None
        held.freed = len(self.calls) - 1
        held.views.clear()
        held.content = None

    def _type(self, tensor: torch.Tensor, layout: Layout) -> TensorType:
        shape, strides, _, dtype = layout
        found = self._types.get((shape, strides, dtype))
        if found is None:
            found = self._types[shape, strides, dtype] = type_of(tensor)
        return found

    # -- values -------------------------------------------------------------------------------------------------------

    def _read(self, tensor: torch.Tensor) -> tuple[Value, int]:
        number = self._storage(tensor, BEFORE)
        held, layout = self._held[number], _layout(tensor)
        value = held.views.get(layout)
        if value is None:
            value = self._look(held, tensor, layout)
        return value, number

    def _look(self, held: _Held, tensor: torch.Tensor, layout: Layout) -> Value:
        """View of a content that was written after the tensor was made."""
        assert held.content is not None
        shape, strides, offset, _ = layout
        attributes: tuple[tuple[str, Attribute], ...] = (("size", shape), ("stride", strides), ("offset", offset))
        node = self.nodes.node("as_strided", (held.content,), ("self",), attributes, (self._type(tensor, layout),))
        held.views[layout] = node.value()
        return node.value()

    def _write(self, number: int, layout: Layout, value: Value) -> None:
        """Set a new content; other views of the storage become invalid."""
        held = self._held[number]
        if held.content is not None and held.layout != layout and value.type.elements < held.content.type.elements:
            shape, strides, offset, _ = layout
            attributes: tuple[tuple[str, Attribute], ...] = (("size", shape), ("stride", strides), ("offset", offset))
            names, old = ("self", "src"), held.content
            whole = self.nodes.node("as_strided_scatter", (old, value), names, attributes, (old.type,))
            held.content = whole.value()
            held.views = {layout: value}
            return
        held.content, held.layout, held.views = value, layout, {layout: value}

    # -- calls --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].device
        with parts.DisableTorchFunction():
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = signature(func)
        if known.query:
            return func(*args, **kwargs)
        path = self._paths.current(backward=self.phase == "backward")
        inputs, attributes = self._arguments(known, args, kwargs)
        output = self._call(func, args, kwargs)
        scratch = scratch_bytes(func, args) if known.name in WITH_WORKSPACES else 0
        self._record(known, path, inputs, attributes, output, args, kwargs, scratch)
        return output

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on fake tensors; a shape that depends on a mask follows from ``nonzero_share``."""
        if self._nonzero_share is not None and func is torch.ops.aten.nonzero.default:
            try:
                return func(*args, **kwargs)
            except parts.DynamicOutputShapeException:
                mask = args[0]
                rows = max(round(self._nonzero_share * mask.numel()), 1)
                return torch.empty((rows, mask.dim()), dtype=torch.int64)
        if self.phase == "optimizer" and func is torch.ops.aten._local_scalar_dense.default:
            return scalar_read(func, args)
        output = self.fakes.again(func, args, kwargs, tensors_in((args, kwargs)))
        output = func(*args, **kwargs) if output is NEW else output
        return filled(func, args, output) if signature(func).name in WITH_WORKSPACES else output

    def _arguments(self, known: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Tensors as (name, value, storage), and all other arguments as attributes."""
        inputs: list[tuple[str, Value, int]] = []
        attributes: list[tuple[str, Attribute]] = []
        for name, given in [*zip(known.arguments, args, strict=False), *kwargs.items()]:
            if isinstance(given, torch.Tensor):
                inputs.append((name, *self._read(given)))
            elif isinstance(given, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in given):
                inputs += [(name, *self._read(item)) for item in given if isinstance(item, torch.Tensor)]
            elif given is not None and name != "device":
                attributes.append((name, attribute(given)))
        return inputs, attributes

    def _record(
        self, known: Signature, path: str, inputs: Any, attributes: Any, output: Any, args: Any, kwargs: Any,
        scratch: int,
    ) -> None:  # fmt: skip
        read = {storage for _, _, storage in inputs}
        written = tensors_in(known.writes(args, kwargs)) if known.written else []
        results = tensors_in(output) or written
        before, now = len(self._held), len(self.calls)
        layouts = [_layout(tensor) for tensor in results]
        numbers = [self._storage(tensor, now) for tensor in results]
        if known.random:
            self._draws += 1
            attributes = [*attributes, ("draw", self._draws)]
        node = self.nodes.node(
            known.name, tuple([value for _, value, _ in inputs]), tuple([name for name, _, _ in inputs]),
            tuple(attributes), tuple(map(self._type, results, layouts)),
        )  # fmt: skip
        mutated = {self._storage(tensor, now) for tensor in written}
        over = [number in mutated for number in numbers]
        for index, (number, layout) in enumerate(zip(numbers, layouts, strict=True)):
            if over[index] or number >= before or number not in read:
                self._write(number, layout, node.value(index))
            else:
                self._held[number].views[layout] = node.value(index)
        view = bool(numbers) and not written and read.issuperset(numbers)
        call = Call(
            node, self.phase, path, tuple([storage for _, _, storage in inputs]), tuple(numbers), view,
            bool(over) and all(over), self.phase == "backward" and self._paths.inside, scratch,
        )  # fmt: skip
        self.calls.append(call)

    # -- result -------------------------------------------------------------------------------------------------------

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Record calls meanwhile in a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def storages(self) -> tuple[Storage, ...]:
        """All recorded storages; those that live from the forward into the backward pass are activations."""
        phases = [call.phase for call in self.calls]
        out = []
        for held in self._held:
            category = held.category
            if category == "temporary" and held.born != BEFORE and phases[held.born] == "forward":
                end = len(phases) - 1 if held.freed is None else held.freed
                category = "activation" if end >= 0 and phases[end] != "forward" else category
            out.append(Storage(held.size_bytes, held.born, held.freed, category, held.name))
        return tuple(out)


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
