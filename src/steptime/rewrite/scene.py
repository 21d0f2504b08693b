"""What a pass sees of a graph, and what it finds: matches with the values that they replace."""

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
    """Constants that are computed from weights before the run, each expression once."""

    def __init__(self) -> None:
        self.definitions: dict[str, Value] = {}
        self._names: dict[Value, str] = {}

    def constant(self, nodes: Nodes, value: Value) -> Value:
        """The constant that holds a value of weights; weights are themselves."""
        if value.node.op in SOURCES:
            return value
        name = self._names.setdefault(value, f"folded.{len(self._names)}")
        self.definitions[name] = value
        type = value.type
        return nodes.source("constant", name, TensorType(type.shape, type.dtype, type.strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A graph while a pass looks at it."""

    flow: Flow
    folds: Folds = field(repr=False)
    on_cuda: bool
    """The device has CUDA's fused kernels."""

    @property
    def nodes(self) -> Nodes:
        """The table in which new nodes are made."""
        return self.flow.nodes

    def each(self, *ops: str) -> Iterator[Node]:
        """Nodes of some operators, in order; all without any."""
        if not ops:
            return iter(self.flow.operators)
        found = [nodes for op in dict.fromkeys(ops) if (nodes := self.flow.by_op.get(op))]
        if len(found) < 2:
            return iter(found[0] if found else ())
        return iter(sorted(chain.from_iterable(found), key=self.flow.number.__getitem__))

    def is_weight(self, value: Value | None) -> bool:
        """Whether a value is the same in every run."""
        return value is not None and value.node in self.flow.constant

    def only_use(self, value: Value) -> bool:
        """Whether one node reads it and the step does not give it back."""
        return self.flow.uses[value] == 1 and value not in self.flow.wanted

    def constant(self, value: Value) -> Value:
        """The constant that holds a value computed from weights."""
        return self.folds.constant(self.nodes, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A place where a pass applies."""

    root: Node
    """The node by whose module and types it is named."""
    replace: Mapping[Value, Value]
    what: str
    """Shapes and sizes that matter, in words."""


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
    """It takes nothing but calls that cost nothing or give what is there: applied without asking the model."""
    reorders: bool = False
    """It changes the order of sums or the rounding between operators: results differ in the last bits."""
    fuses: bool = False
    """It needs a compiler that makes the fused kernel: Inductor, a runtime with fusion, or one's own."""
    trades_memory: bool = False
    """It costs time and saves memory: applied where memory is the objective."""
    only_cuda: bool = False
    """Its kernel is one on CUDA only."""
    mutates: bool = False
    """It is a partially equal program with what makes it exact."""


# -- reading patterns ---------------------------------------------------------------------------------------------


def number(node: Node, name: str) -> float | None:
    """An attribute that is a number."""
    found = node.attribute(name)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def operands(node: Node) -> tuple[Value, Value] | None:
    """The two tensors of a sum or product without a factor between them."""
    a, b = node.input("self"), node.input("other")
    if a is None or b is None or number(node, "alpha") not in (None, 1.0):
        return None
    return a, b


def is_op(value: Value | None, *ops: str) -> bool:
    """Whether a value is the first result of one of the operators."""
    return value is not None and value.node.op in ops and value.index == 0


def last_dim(node: Node, type: TensorType) -> bool:
    """Whether a reduction runs over the last dim and keeps it."""
    dims = node.attribute("dim")
    listed = dims if isinstance(dims, tuple) else (dims,)
    kept = bool(node.attribute("keepdim", False))
    return kept and len(listed) == 1 and isinstance(listed[0], int) and wrap(listed[0], type.rank) == type.rank - 1


def shape_text(*types: TensorType) -> str:
    """Shapes in words.

    >>> shape_text(TensorType((2, 3), "bf16"), TensorType((3, 4), "bf16"))
    'bf16 2x3, 3x4'
    """
    shapes = ", ".join("x".join(map(str, type.shape)) or "scalar" for type in types)
    return f"{types[0].dtype} {shapes}"
