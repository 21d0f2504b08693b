"""The graph IR: types of tensors, interned nodes, graphs as tuples of output values, and programs that run them.

A node is an operator applied to values. Nodes are hash-consed: within one :class:`Nodes` the same operator on the same
values with the same attributes is the same object, so equality is identity, equal sub-graphs are shared, and results
for a node (its cost, its matches) can be cached by node. Nothing is mutated after construction.

Operators are named as in ATen, without namespace and without the underscore of in-place forms (``mm``). A graph is
pure; the :class:`~steptime.captured.graph.program.Program` that runs it records which values share memory.

A program has the calls of one step in execution order, and the storages that they read and write. The graph defines
what is computed; the program defines when, by which module, in which phase, and in which memory. Views are calls
without new storage, in-place operators write into an existing storage, recomputation calls a node a second time.
Frameworks free a storage when its last reference goes; the program records at which call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from steptime.errors import UserError
from steptime.model.spec import ELEMENT_BYTES


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose last dim varies fastest.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements per dim), element type, and strides in elements (`None`: contiguous).

    >>> TensorType((2, 3), "bf16").size_bytes
    12
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UserError(
                f"element type {self.dtype!r} is unknown", hint=f"it is one of {', '.join(sorted(ELEMENT_BYTES))}"
            )

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements, each counted once."""
        return self.elements * self.element_bytes

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


#: Value of an attribute: a number, a string, None, or a tuple of attributes.
Attribute = bool | int | float | str | None | tuple["Attribute", ...]

#: Operators without inputs that stand for values from outside; each has an attribute ``name``.
SOURCES = ("parameter", "buffer", "input", "state", "constant")


class Node:
    """An operator, its input values, its attributes and the types of its outputs.

    Equality is identity: make nodes only with :meth:`Nodes.node`.
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
        """The attribute ``name``, else ``default``."""
        for key, value in self.attributes:
            if key == name:
                return value
        return default

    def input(self, name: str) -> Value | None:
        """First input with that argument name; None if the operator was called without it."""
        for key, value in zip(self.names, self.inputs, strict=True):
            if key == name:
                return value
        return None

    def inputs_of(self, name: str) -> tuple[Value, ...]:
        """All inputs with that argument name: the members of a list of tensors."""
        return tuple(value for key, value in zip(self.names, self.inputs, strict=True) if key == name)

    def value(self, index: int = 0) -> Value:
        """One output of the node."""
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
        """Shape, element type and strides."""
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
        """The node of an operator on values; an equal node of the table is reused."""
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
    """Output values, and with them all nodes that they depend on."""

    outputs: tuple[Value, ...]

    def nodes(self) -> tuple[Node, ...]:
        """Every node once, each after its inputs."""
        return tuple(topological(value.node for value in self.outputs))

    def sources(self, kind: str) -> tuple[Node, ...]:
        """Source nodes of one kind, such as ``parameter``, in order of first use."""
        return tuple(node for node in self.nodes() if node.op == kind)


def topological(roots: Iterable[Node]) -> Iterator[Node]:
    """Nodes that the roots depend on, each once and after its inputs; iterative, so depth has no limit."""
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


Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

Category = Literal["parameter", "buffer", "input", "gradient", "state", "activation", "temporary"]
"""Content of a storage: `activation` lives from the forward into the backward pass, `temporary` does not."""

BEFORE = -1
"""Number of the call that allocates storages which exist before the step."""
OUTSIDE = "outside."
"""Prefix of the name of a storage from before the step that has no name of its own: a constant, an empty cache."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory.

    `born` is the number of the call that allocates it (`BEFORE`: it exists before the step). `freed` is the number of
    the call during which its last reference goes: it lives until that call ends. None: alive at the end.
    """

    size_bytes: int
    born: int
    freed: int | None
    category: Category
    name: str = ""
    """Parameter, input or state that it holds; else empty."""

    def copy(self, born: int, freed: int | None, name: str) -> Storage:
        """A copy with another lifetime and name; programs have thousands, and ``dataclasses.replace`` is slow."""
        return Storage(self.size_bytes, born, freed, self.category, name)


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an operator: its node, phase, module and storages."""

    node: Node
    phase: Phase
    module: str
    """Path of the module whose forward or backward pass it belongs to; empty outside any module."""
    reads: tuple[int, ...]
    """Number of the storage of each input of the node."""
    writes: tuple[int, ...]
    """Number of the storage of each output of the node."""
    view: bool = False
    """Its output is a view of the storage of its input: nothing is computed or moved."""
    inplace: bool = False
    """Its output is written over one of its inputs."""
    recomputed: bool = False
    """It is a forward operator that runs again in the backward pass."""
    scratch_bytes: int = 0
    """Temporary memory while it runs, in addition to the storages."""

    def copy(self, module: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Call:
        """A copy with another module and storages; programs have thousands, and ``dataclasses.replace`` is slow."""
        return Call(
            self.node, self.phase, module, reads, writes, self.view, self.inplace, self.recomputed, self.scratch_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A weight of the module."""

    name: str
    storage: int
    elements: int
    size_bytes: int
    trained: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One recorded step."""

    name: str
    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    """Path of each module -> name of its class."""
    source: str = ""
    """Origin of the recording, for provenance."""
    folded: tuple[str, ...] = ()
    """Runs of equal blocks of which a few were recorded and then unrolled."""
    unfolded: str = ""
    """Reason why equal blocks were recorded one by one; empty if they were not."""
    batch: int | None = None
    """Samples of the step; None if unknown."""
    assumed: tuple[str, ...] = ()
    """Assumptions about unknown numbers, each with the line of code that needs it."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook."""
        return f"<Program {self.name}: {len(self.calls):,} calls, {self.parameter_count:,} parameters>"

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones once."""
        seen = {parameter.storage: parameter.elements for parameter in self.parameters}
        return sum(seen.values())
