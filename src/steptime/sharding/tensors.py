"""Tensors of a flow, and dims of them that are the same dim: through operators, views, and from maker to reader.

An input of an operator is a tensor of its own, distinct from the output that was made, because equal blocks read from
several makers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from steptime.captured.graph import TensorType
from steptime.sharding.flow import Flow, Item, Look
from steptime.sharding.options import Option, options

NOTHING: Final = Option(inputs=(), outputs=())


@dataclass(frozen=True, slots=True)
class Tie:
    """Two tensors, and the pairs of their dims that are the same dim."""

    first: int
    second: int
    dims: tuple[tuple[int, int], ...]
    """Dim of the first and dim of the second; both are split into the same pieces where an axis divides both."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Every tensor of a flow by number: outputs and inputs of items, and the views between them."""

    flow: Flow
    types: tuple[TensorType, ...]
    names: tuple[str, ...]
    outputs: tuple[tuple[int, ...], ...]
    """Tensors of each item's outputs."""
    inputs: tuple[tuple[int, ...], ...]
    """Tensors that each item reads; for a source and an update, their outputs."""
    ties: tuple[Tie, ...]
    views: dict[tuple[int, int, tuple[Look, ...]], int]
    """Item, output and views -> the result of the last view."""

    def ports(self, item: int, option: Option) -> Iterator[tuple[int, int | None]]:
        """Tensors of an item, each with the dim that an option splits; None: replicated or a partial sum."""
        for numbers, placements in ((self.inputs[item], option.inputs), (self.outputs[item], option.outputs)):
            for number, placement in zip(numbers, placements, strict=True):
                yield number, placement.dim

    def text(self, tensor: int, dim: int | None = None) -> str:
        """Text of a tensor, and of one of its dims, for messages."""
        shape = "x".join(map(str, self.types[tensor].shape))
        return f"{self.names[tensor]} of {shape or 'one element'}" + ("" if dim is None else f", dim {dim}")


def splits(item: Item) -> tuple[Option, ...]:
    """Options of an operator along one axis without terms, the replicated one first; other items have only that."""
    return tuple(o for o in options(item.node) if o.units > 0) if item.kind == "operator" else (NOTHING,)


def tensors_of(flow: Flow) -> Tensors:
    """All tensors of a flow."""
    return _Numbering(flow).tensors()


class _Numbering:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.types: list[TensorType] = []
        self.names: list[str] = []
        self.views: dict[tuple[int, int, tuple[Look, ...]], int] = {}
        self.ties: dict[tuple[int, int], Tie] = {}

    def tensors(self) -> Tensors:
        """Number all tensors."""
        outputs, inputs = [], []
        for item in self.flow.items:
            made = tuple(self._new(type, item.name, "output", n) for n, type in enumerate(item.node.outputs))
            reads = zip(item.node.inputs, item.node.names, strict=True) if item.kind == "operator" else ()
            read = tuple(self._new(value.type, f"{item.name}, its {name}", "", 0) for value, name in reads)
            outputs.append(made)
            inputs.append(read if item.kind == "operator" else made)
        for link in self.flow.links:
            at, looks = outputs[link.source][link.output], tuple[Look, ...]()
            for look in link.looks:
                looks = (*looks, look)
                at = self._view(at, (link.source, link.output, looks))
            self._same(at, inputs[link.target][link.input])
        return Tensors(
            flow=self.flow,
            types=tuple(self.types),
            names=tuple(self.names),
            outputs=tuple(outputs),
            inputs=tuple(inputs),
            ties=tuple(self.ties.values()),
            views=self.views,
        )

    def _new(self, type: TensorType, name: str, role: str, number: int) -> int:
        self.types.append(type)
        self.names.append(name if number == 0 else f"{name}, {role} {number}")
        return len(self.types) - 1

    def _view(self, before: int, key: tuple[int, int, tuple[Look, ...]]) -> int:
        if key not in self.views:
            item, look = self.flow.items[key[0]], key[2][-1]
            made = self.views[key] = self._new(
                look.node.outputs[look.output], f"{item.name}, seen by {look.node.op}", "", 0
            )
            dims = []
            for option in options(look.node):
                a, b = option.inputs[0].dim, option.outputs[look.output].dim
                if option.units > 0 and a is not None and b is not None:
                    dims.append((a, b))
            self.ties[before, made] = Tie(before, made, tuple(dims))
        return self.views[key]

    def _same(self, made: int, read: int) -> None:
        if made != read:
            shape = self.types[made].shape
            dims = tuple((dim, dim) for dim, size in enumerate(shape) if size > 1)
            self.ties[made, read] = Tie(made, read, dims)


def by_tensor(ties: Iterable[Tie]) -> dict[int, list[Tie]]:
    """Ties of each tensor, oriented so that it is the first."""
    out: dict[int, list[Tie]] = defaultdict(list)
    for tie in ties:
        out[tie.first].append(tie)
        out[tie.second].append(Tie(tie.second, tie.first, tuple((b, a) for a, b in tie.dims)))
    return out
