"""A recorder that also notes the values that a step returns and the contents of a module's constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Attribute, Category, Nodes, Value
from steptime.captured.record.problems import CaptureError
from steptime.captured.record.recorder import Recorder
from steptime.captured.record.values import Signature

LARGEST = 2**20
"""Largest number of elements of a module's constant whose contents are kept."""


@dataclass(slots=True)
class Watching:
    """Observations of one recording."""

    branches: tuple[bool, ...] = ()
    decides: bool = False
    """Branches that depend on data take the values of ``branches``, further ones True."""
    nodes: Nodes = field(default_factory=Nodes)
    outputs: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, object] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    _buffers: dict[str, Value] = field(default_factory=dict)

    def seen(self, recorder: Recorder, what: str, made: Any) -> None:
        """Note values of an output, a loss, or all updated tensors; labels of a loss are noted as inputs."""
        assert isinstance(recorder, _Watched)
        self.nodes = recorder.nodes
        if what == "labels":
            for name, tensor in made.items():
                recorder.labels(tensor, f"loss.{name}")
            return
        if what == "end":
            self._updated(recorder, made)
            return
        found = [leaf for leaf in parts.pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        for number, tensor in enumerate(found):
            self.outputs[what if len(found) == 1 else f"{what}.{number}"] = recorder.value(tensor)

    def _updated(self, recorder: _Watched, module: torch.nn.Module) -> None:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if recorder.is_written(tensor):
                self.outputs[f"{name}.new"] = recorder.value(tensor)
            elif tensor.grad is not None:
                self.outputs[f"{name}.grad"] = recorder.value(tensor.grad)
        for name, value in recorder.states():
            if value.node.op != "state":
                self.outputs[f"{name}.new"] = value


class _Watched(Recorder):  # type: ignore[no-untyped-call]
    """The recorder that reports to one ``Watching``."""

    watching: Watching

    def value(self, tensor: torch.Tensor) -> Value:
        """The current value of a tensor."""
        return self._read(tensor)[0]

    def is_written(self, tensor: torch.Tensor) -> bool:
        """True if the step has changed a weight or buffer, even if a view of it looks unchanged."""
        content = self._held[self._read(tensor)[1]].content
        return content is not None and content.node.op not in ("parameter", "buffer")

    def states(self) -> list[tuple[str, Value]]:
        """States of the optimiser with their current values."""
        return [(h.name, h.content) for h in self._held if h.category == "state" and h.content is not None]

    def name(self, tensor: torch.Tensor, category: Category, name: str) -> int:
        """Name the contents of a storage; inputs are noted in their order."""
        number = super().name(tensor, category, name)
        if category == "input":
            self.watching.inputs.append(self._read(tensor)[0])
        return number

    def labels(self, tensor: torch.Tensor, name: str) -> None:
        """Note a tensor as a further input if it is not a known weight."""
        if id(tensor.untyped_storage()) not in self._number:
            self.name(tensor, "input", name)

    def _storage(self, tensor: torch.Tensor, born: int, source: tuple[Category, str] | None = None) -> int:
        before = len(self._held)
        number = super()._storage(tensor, born, source)
        if number == before and source is None and number < len(self._held):
            real = tensor if type(tensor) is torch.Tensor else getattr(tensor, "constant", None)
            if real is not None and not real.is_meta and real.numel() <= LARGEST:
                with parts.without_modes():
                    self.watching.numbers[self._held[number].name] = real.detach().clone()
        return number

    def _arguments(self, known: Signature, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        inputs, attributes = super()._arguments(known, args, kwargs)
        more: list[tuple[str, Attribute]] = []
        for name, given in [*zip(known.arguments, args, strict=False), *kwargs.items()]:
            found = attribute_of(name, given)
            if found is not None and any(isinstance(item, torch.Tensor) for item in given):
                more.append(found)
        return inputs, [*attributes, *more]

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super()._call(func, args, kwargs)
        except parts.DataDependentOutputException:
            watching = self.watching
            is_truth = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
            if not watching.decides or not is_truth:
                raise
            at = len(watching.taken)
            if at >= MOST_BRANCHES:
                raise CaptureError(f"more than {MOST_BRANCHES} branches depend on data") from None
            way = watching.branches[at] if at < len(watching.branches) else True
            watching.taken.append(way)
            return way


MOST_BRANCHES = 64
"""Largest number of branches of one step; more suggest a loop whose end depends on data."""


def recorder_class(watching: Watching) -> type[Recorder]:
    """The class of recorders that report to a ``Watching``."""
    return type("Watched", (_Watched,), {"watching": watching})


def attribute_of(name: str, given: Any) -> tuple[str, Attribute] | None:
    """Attribute with the numbers of the given members of a list in which some tensors are None, else None.

    >>> attribute_of("indices", [None, 3.5])
    ('indices.at', (1,))
    """
    if not isinstance(given, (list, tuple)) or all(item is not None for item in given):
        return None
    return f"{name}.at", tuple(n for n, item in enumerate(given) if item is not None)
