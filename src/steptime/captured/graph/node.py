"""The graph: interned nodes, values, and graphs as tuples of output values.

A node is an operator applied to values. Nodes are hash-consed: within one :class:`Nodes` the same operator on the same
values with the same attributes is the same object, so equality is identity, equal sub-graphs are shared, and what is
known of a node (its cost, its matches) can be remembered by it. Nothing is mutated after construction.

Operators are named as in ATen, without namespace and without the underscore of in-place forms
(``mm``, ``addmm``, ``convolution``, ``native_layer_norm``); a graph is pure, and what shares memory is said by the
:class:`~steptime.captured.graph.program.Program` that runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from steptime.captured.graph.types import TensorType

#: What an attribute may be: a number, a text, nothing, or a tuple of those.
Attribute = bool | int | float | str | None | tuple["Attribute", ...]

#: Operators without inputs that stand for what comes from outside: each has an attribute ``name``.
SOURCES = ("parameter", "buffer", "input", "state", "constant")


class Node:
    """An operator, its input values, its attributes and the types of its outputs.

    Equality and hash are those of the object: make nodes only with :meth:`Nodes.node`.
    """

    __slots__ = ("attributes", "inputs", "names", "number", "op", "outputs")

    op: str
    inputs: tuple[Value, ...]
    names: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...]
    outputs: tuple[TensorType, ...]
    number: int

    def __init__(
        self,
        op: str,
        inputs: tuple[Value, ...],
        names: tuple[str, ...],
        attributes: tuple[tuple[str, Attribute], ...],
        outputs: tuple[TensorType, ...],
        number: int,
    ) -> None:
        put = object.__setattr__
        put(self, "op", op)
        put(self, "inputs", inputs)
        put(self, "names", names)
        put(self, "attributes", attributes)
        put(self, "outputs", outputs)
        put(self, "number", number)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"nodes are immutable: {name!r} cannot be set")

    def attribute(self, name: str, default: Attribute = None) -> Attribute:
        """Attribute of that name, else ``default``."""
        for key, value in self.attributes:
            if key == name:
                return value
        return default

    def input(self, name: str) -> Value | None:
        """First input with that argument name, None where the operator was called without it."""
        for key, value in zip(self.names, self.inputs, strict=True):
            if key == name:
                return value
        return None

    def inputs_of(self, name: str) -> tuple[Value, ...]:
        """All inputs with that argument name: the members of a list of tensors."""
        return tuple(value for key, value in zip(self.names, self.inputs, strict=True) if key == name)

    def value(self, index: int = 0) -> Value:
        """One of its outputs."""
        return Value(self, index)

    def __repr__(self) -> str:
        arguments = [f"%{value.node.number}" for value in self.inputs]
        arguments += [f"{key}={value!r}" for key, value in self.attributes]
        return f"%{self.number} = {self.op}({', '.join(arguments)}) -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Value:
    """One output of a node."""

    node: Node
    index: int = 0

    @property
    def type(self) -> TensorType:
        """Its shape and element type."""
        return self.node.outputs[self.index]


class Nodes:
    """The table in which nodes are interned.

    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((2, 3), "fp32"))
    >>> w = nodes.source("parameter", "w", TensorType((3, 4), "fp32"))
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((2, 4), "fp32")])
    >>> nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((2, 4), "fp32")]) is y
    True
    >>> len(nodes)
    3
    """

    def __init__(self) -> None:
        self._table: dict[tuple[object, ...], Node] = {}

    def __len__(self) -> int:
        return len(self._table)

    def node(
        self,
        op: str,
        inputs: tuple[Value, ...],
        names: tuple[str, ...],
        attributes: tuple[tuple[str, Attribute], ...],
        outputs: tuple[TensorType, ...],
    ) -> Node:
        """The node of that operator on those values: the one that is there, else a new one."""
        key = (op, inputs, names, attributes, outputs)
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = Node(op, inputs, names, attributes, outputs, len(self._table))
        return found

    def apply(
        self,
        op: str,
        inputs: Mapping[str, Value | Sequence[Value] | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        outputs: Iterable[TensorType],
    ) -> Node:
        """A node from named arguments; a list of values is one argument, None an argument that is not given."""
        names: list[str] = []
        values: list[Value] = []
        for name, given in inputs.items():
            members = [] if given is None else [given] if isinstance(given, Value) else list(given)
            names += [name] * len(members)
            values += members
        return self.node(op, tuple(values), tuple(names), tuple((attributes or {}).items()), tuple(outputs))

    def source(self, kind: str, name: str, type: TensorType) -> Value:
        """A value from outside: a parameter, a buffer, an input, a state of the optimiser, a constant."""
        if kind not in SOURCES:
            raise ValueError(f"{kind!r} is not one of {SOURCES}")
        return self.node(kind, (), (), (("name", name),), (type,)).value()


@dataclass(frozen=True, slots=True)
class Graph:
    """Values that are wanted, and with them all nodes that they need."""

    outputs: tuple[Value, ...]

    def nodes(self) -> tuple[Node, ...]:
        """Every node once, each after its inputs."""
        return tuple(topological(value.node for value in self.outputs))

    def sources(self, kind: str) -> tuple[Node, ...]:
        """Its parameters, inputs, ... in order of first use."""
        return tuple(node for node in self.nodes() if node.op == kind)


def topological(roots: Iterable[Node]) -> Iterator[Node]:
    """Nodes below the roots, each once and after its inputs; no recursion, so depth has no limit."""
    done: set[Node] = set()
    for root in roots:
        stack = [(root, iter(root.inputs))]
        entered = {root}
        while stack:
            node, rest = stack[-1]
            child = next((v.node for v in rest if v.node not in done and v.node not in entered), None)
            if child is not None:
                entered.add(child)
                stack.append((child, iter(child.inputs)))
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
