"""The input of a pass (a graph as a scene) and its output (matches with the values that they replace)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal

from steptime.captured.graph import Node, Nodes, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.graph.strides import wrap
from steptime.rewrite.flow import Flow

Mode = Literal["inference", "training"]
Objective = Literal["time", "memory", "launches"]
BOTH: Final[tuple[Mode, ...]] = ("inference", "training")
OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "memory", "launches")


class Folds:
    """Constants that are computed from weights before the run; equal expressions are one constant."""

    def __init__(self) -> None:
        self.definitions: dict[str, Value] = {}
        self._names: dict[Value, str] = {}

    def constant(self, nodes: Nodes, value: Value) -> Value:
        """The constant that holds a value computed from weights; a weight itself is returned unchanged."""
        if value.node.op in SOURCES:
            return value
        name = self._names.setdefault(value, f"folded.{len(self._names)}")
        self.definitions[name] = value
        type = value.type
        return nodes.source("constant", name, TensorType(type.shape, type.dtype, type.strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A graph with the context of a pass."""

    flow: Flow
    folds: Folds = field(repr=False)
    on_cuda: bool
    """The device has CUDA's fused kernels."""

    @property
    def nodes(self) -> Nodes:
        """The table in which new nodes are made."""
        return self.flow.nodes

    def each(self, *ops: str) -> Iterator[Node]:
        """Nodes of the given operators in order; without arguments, all nodes."""
        if not ops:
            return iter(self.flow.operators)
        found = [nodes for op in dict.fromkeys(ops) if (nodes := self.flow.by_op.get(op))]
        if len(found) < 2:
            return iter(found[0] if found else ())
        return iter(sorted(chain.from_iterable(found), key=self.flow.number.__getitem__))

    def is_weight(self, value: Value | None) -> bool:
        """True if a value is the same in every run."""
        return value is not None and value.node in self.flow.constant

    def only_use(self, value: Value) -> bool:
        """True if only one node reads a value and the step does not return it."""
        return self.flow.uses[value] == 1 and value not in self.flow.wanted

    def constant(self, value: Value) -> Value:
        """The constant that holds a value computed from weights."""
        return self.folds.constant(self.nodes, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A place where a pass applies."""

    root: Node
    """Node whose module and types name the match in reports."""
    replace: Mapping[Value, Value]
    what: str
    """Text on the shapes and sizes of the match."""


Find = Callable[[Scene], Iterable[Match]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One kind of rewrite."""

    name: str
    matches: str
    condition: str
    makes: str
    source: str
    find: Find = field(repr=False)
    modes: tuple[Mode, ...] = BOTH
    tidy: bool = False
    """It only removes calls that cost nothing or repeat a value; it is applied without a prediction."""
    reorders: bool = False
    """It changes the order of sums or rounding between operators, so that results differ in the last bits."""
    fuses: bool = False
    """It needs a compiler that makes the fused kernel, such as Inductor or a runtime with fusion."""
    trades_memory: bool = False
    """It costs time and saves memory; it is applied if memory is the objective."""
    only_cuda: bool = False
    """Its fused kernel exists only on CUDA."""
    mutates: bool = False
    """It is a partially equal program with its correction."""


# -- reading patterns ---------------------------------------------------------------------------------------------


def number(node: Node, name: str) -> float | None:
    """The value of a numeric attribute; None: it is missing or not a number."""
    found = node.attribute(name)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def operands(node: Node) -> tuple[Value, Value] | None:
    """The two tensors of a sum or product without a factor; None: there are not two."""
    a, b = node.input("self"), node.input("other")
    if a is None or b is None or number(node, "alpha") not in (None, 1.0):
        return None
    return a, b


def is_op(value: Value | None, *ops: str) -> bool:
    """True if a value is the first result of one of the operators."""
    return value is not None and value.node.op in ops and value.index == 0


def last_dim(node: Node, type: TensorType) -> bool:
    """True if a reduction runs over the last dim only and keeps it."""
    dims = node.attribute("dim")
    listed = dims if isinstance(dims, tuple) else (dims,)
    kept = bool(node.attribute("keepdim", False))
    return kept and len(listed) == 1 and isinstance(listed[0], int) and wrap(listed[0], type.rank) == type.rank - 1


def shape_text(*types: TensorType) -> str:
    """Text of shapes, with the element type of the first.

    >>> shape_text(TensorType((2, 3), "bf16"), TensorType((3, 4), "bf16"))
    'bf16 2x3, 3x4'
    """
    shapes = ", ".join("x".join(map(str, type.shape)) or "scalar" for type in types)
    return f"{types[0].dtype} {shapes}"
