"""A captured step as a pure graph of values, and the program that runs it.

There are no aliases or in-place writes: a :class:`Flow` has the values that the step returns, and every node computes
new values from old ones. Further facts of the program (when a node ran, in which module, over which memory) are kept
next to the nodes, so that the graph costs what ``steptime profile`` says and its peak follows from liveness.

Two kinds of nodes are never shared although their inputs are equal: recomputed ones, and unknown operators, which may
be impure. Random operators carry the number of their draw.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from steptime.captured.graph import (
    BEFORE,
    Attribute,
    Call,
    Category,
    Node,
    Nodes,
    Parameter,
    Phase,
    Program,
    Storage,
    Value,
)
from steptime.captured.graph.program import SOURCES
from steptime.captured.graph.strides import is_contiguous
from steptime.captured.ops import FREE, OPERATORS, VIEWS
from steptime.captured.ops.calls import AGAIN
from steptime.rewrite.retype import RefusedError, retyped

FUSED: Final = "fused"
"""Operator that runs several element-wise operators as one kernel; see :mod:`steptime.rewrite.fused`."""
CONV_RELU: Final = "cudnn_convolution_relu"
"""Convolution and ReLU as one kernel of cuDNN."""
COMPOSITE: Final = (FUSED, CONV_RELU)
"""Operators that are run and written as several operators."""
DATA_DEPENDENT: Final = frozenset(
    {
        "nonzero",
        "masked_select",
        "_local_scalar_dense",
        "item",
        "unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    }
)
"""Operators whose shapes, or whose result on the host, depend on data."""
WEIGHTS: Final = ("parameter", "buffer", "constant")
FILLS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("new_zeros", "zeros_like"), "zeros"),
    **dict.fromkeys(("new_ones", "ones_like"), "ones"),
    **dict.fromkeys(("new_full", "full_like"), "full"),
}
"""Operator that fills a tensor shaped like another one -> the operator without that input."""
_CATEGORIES: Final[Mapping[str, Category]] = {
    "parameter": "parameter",
    "buffer": "buffer",
    "input": "input",
    "state": "state",
    "constant": "buffer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a node in the step."""

    position: float
    phase: Phase = "forward"
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A step as a pure graph."""

    name: str
    nodes: Nodes
    outputs: tuple[Value, ...]
    """Values that the step returns: outputs; in training the loss, then updated values."""
    names: tuple[str, ...]
    places: Mapping[Node, Place] = field(repr=False)
    over: Mapping[Node, tuple[int | None, ...]] = field(default_factory=dict, repr=False)
    """Node that ran in place -> number of the overwritten input, for each output."""
    kept: tuple[Node, ...] = ()
    """Opaque nodes, which stay even if no node reads them."""
    definitions: Mapping[str, Value] = field(default_factory=dict, repr=False)
    """Name of a constant -> the expression over weights from which it is computed before the run."""
    training: bool = False
    numbers: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Name -> contents of constants that the module makes itself."""
    inputs: tuple[Value, ...] = ()
    """Inputs in the order in which the module takes them."""
    source: str = ""
    batch: int | None = None

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """Every node once, after its inputs; among ready nodes, in the order of the capture."""
        roots = [value.node for value in self.outputs] + list(self.kept)
        found = set(_below(roots))
        waiting = {node: len({value.node for value in node.inputs}) for node in found}
        users: dict[Node, list[Node]] = {}
        for node in sorted(found, key=lambda node: node.number):
            for source in {value.node for value in node.inputs}:
                users.setdefault(source, []).append(node)
        ready = [(self._position(node), node.number, node) for node in found if not waiting[node]]
        heapq.heapify(ready)
        out: list[Node] = []
        while ready:
            node = heapq.heappop(ready)[2]
            out.append(node)
            for user in users.get(node, ()):
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (self._position(user), user.number, user))
        return tuple(out)

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """Nodes that are not sources, in order."""
        return tuple(node for node in self.order if node.op not in SOURCES)

    @cached_property
    def by_op(self) -> Mapping[str, tuple[Node, ...]]:
        """Nodes of each operator, in order."""
        found: dict[str, list[Node]] = {}
        for node in self.operators:
            found.setdefault(node.op, []).append(node)
        return {op: tuple(nodes) for op, nodes in found.items()}

    @cached_property
    def number(self) -> Mapping[Node, int]:
        """Number of each node in the order."""
        return {node: n for n, node in enumerate(self.order)}

    def _position(self, node: Node) -> float:
        place = self.places.get(node)
        return -1.0 if place is None else place.position

    @cached_property
    def users(self) -> Mapping[Value, tuple[Node, ...]]:
        """Readers of each value, once per argument that reads it."""
        found: dict[Value, list[Node]] = {}
        for node in self.order:
            for value in node.inputs:
                found.setdefault(value, []).append(node)
        return {value: tuple(readers) for value, readers in found.items()}

    @cached_property
    def uses(self) -> Counter[Value]:
        """Number of reads of each value; a value that the step returns has one more."""
        count = Counter(value for node in self.order for value in node.inputs)
        count.update(self.outputs)
        return count

    @cached_property
    def wanted(self) -> frozenset[Value]:
        """The values that the step returns."""
        return frozenset(self.outputs)

    @cached_property
    def constant(self) -> frozenset[Node]:
        """Nodes with the same value in every run: weights that are not trained, and nodes computed from them."""
        out: set[Node] = set()
        for node in self.order:
            if node.op in SOURCES:
                steady = node.op in WEIGHTS and (not self.training or node.op == "constant")
            else:
                steady = is_pure(node) and all(value.node in out for value in node.inputs)
            if steady:
                out.add(node)
        return frozenset(out)

    def place(self, node: Node) -> Place:
        """Position of a node."""
        return self.places.get(node, Place(position=-1.0))

    def block(self, node: Node) -> str:
        """Module of a node with ``*`` for numbers of blocks: ``layers.*.attention``."""
        return ".".join("*" if part.isdigit() else part for part in self.place(node).module.split("."))

    def opaque(self) -> tuple[Node, ...]:
        """Nodes that no rewrite may touch, in order."""
        return tuple(node for node in self.order if is_opaque(node))

    def program(self) -> Program:
        """The program: calls in order, and lifetimes of storages; views and in-place writes own no storage."""
        order = [node for node in self.order if node.op not in SOURCES]
        plan = _Storages(self, order)
        calls = tuple(plan.call(number, node) for number, node in enumerate(order))
        return Program(
            name=self.name,
            calls=calls,
            storages=plan.storages(calls),
            parameters=plan.parameters(),
            source=self.source,
            batch=self.batch,
        )


def is_opaque(node: Node) -> bool:
    """True if an operator is unknown, or its shapes depend on data.

    >>> from steptime.captured.graph import TensorType
    >>> node = Nodes().apply("mylib::op", {}, outputs=[TensorType((2,), "fp32")])
    >>> is_opaque(node)
    True
    """
    if node.op in SOURCES or node.op == FUSED:
        return False
    return node.op in DATA_DEPENDENT or node.op not in OPERATORS


def is_pure(node: Node) -> bool:
    """True if a node gives equal results from equal inputs: it is known, not random, and not a source."""
    names = {name for name, _ in node.attributes}
    return not (is_opaque(node) or node.op in SOURCES or names & {"draw", AGAIN})


def _below(roots: Iterable[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [value.node for value in node.inputs]


def substituted(
    flow: Flow,
    replacements: Mapping[Value, Value],
    definitions: Mapping[str, Value],
) -> Flow:
    """The graph with values replaced, and all nodes that depend on them made again.

    Args:
        flow: the graph.
        replacements: value -> its replacement, which may depend on values that are replaced themselves.
        definitions: constants that the new values read.

    Raises:
        RefusedError: a replacement depends on the value that it replaces, or a node needs a memory layout that has
            changed.
    """
    builder = _Builder(flow, replacements)
    outputs = tuple(builder.value(value) for value in flow.outputs)
    kept = tuple(builder.node(node) for node in flow.kept)
    return replace(
        flow,
        outputs=outputs,
        kept=kept,
        places=builder.places,
        over=builder.over,
        definitions={**flow.definitions, **definitions},
    )


class _Builder:
    """Builder of nodes on replaced inputs, without recursion."""

    def __init__(self, flow: Flow, replacements: Mapping[Value, Value]) -> None:
        self._flow, self._replacements = flow, replacements
        self._made: dict[Node, tuple[Value, ...]] = {}
        self.places: dict[Node, Place] = {}
        self.over: dict[Node, tuple[int | None, ...]] = {}
        self._origin: dict[Node, Place] = {}
        for old, new in replacements.items():
            for node in _below([new.node]):
                if node not in flow.places:
                    self._origin.setdefault(node, flow.place(old.node))

    def final(self, value: Value) -> Value:
        """The last value in the chain of replacements of a value."""
        seen = {value}
        while value in self._replacements:
            value = self._replacements[value]
            if value in seen:
                raise RefusedError
            seen.add(value)
        return value

    def value(self, value: Value) -> Value:
        """The value in the new graph for a value of the old one."""
        last = self.final(value)
        self.node(last.node)
        return self._made[last.node][last.index]

    def node(self, root: Node) -> Node:
        """The node in the new graph for a node of the old one."""
        stack, entered = [root], set[Node]()
        while stack:
            node = stack[-1]
            if node in self._made:
                stack.pop()
                continue
            inputs = [self.final(value) for value in node.inputs]
            missing = [value.node for value in inputs if value.node not in self._made]
            if missing:
                if node in entered:
                    raise RefusedError
                entered.add(node)
                stack += missing
                continue
            self._make(node, tuple(self._made[value.node][value.index] for value in inputs))
            stack.pop()
        return self._made[root][0].node if root.outputs else root

    def _make(self, node: Node, inputs: tuple[Value, ...]) -> None:
        made = retyped(self._flow.nodes, node, inputs)
        self._made[node] = made
        place = self._flow.places.get(node) or self._origin.get(node)
        for value in made:
            fresh = value.node
            while place is not None and fresh not in self.places and fresh.op not in SOURCES:
                self.places[fresh] = place
                fresh = fresh.inputs[0].node if fresh.inputs else fresh
        if node in self._flow.over and made:
            self.over[made[0].node] = self._flow.over[node]


def removed_and_added(flow: Flow, replacements: Mapping[Value, Value]) -> tuple[list[Node], list[Node]]:
    """Nodes that replacements remove and nodes that they add, found without building the graph."""
    uses, new, stack = Counter[Value](), set[Node](), [value.node for value in replacements.values()]
    while stack:
        node = stack.pop()
        if node in new or node in flow.places or node.op in SOURCES:
            continue
        new.add(node)
        uses.update(node.inputs)
        stack += [value.node for value in node.inputs]
    for old, value in replacements.items():
        moved = flow.uses[old]
        uses[value] += moved
        uses[old] -= moved
    dead: list[Node] = []
    waiting = [old.node for old in replacements]
    gone: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in gone or node in flow.kept or node.op in SOURCES:
            continue
        if any(flow.uses[node.value(i)] + uses[node.value(i)] > 0 for i in range(len(node.outputs))):
            continue
        gone.add(node)
        dead.append(node)
        for value in node.inputs:
            uses[value] -= 1
            waiting.append(value.node)
    return dead, list(new)


class _Storages:
    """Numbers, births and last uses of storages of a graph in a given order."""

    def __init__(self, flow: Flow, order: list[Node]) -> None:
        self._flow = flow
        self._number: dict[Value, int] = {}
        self._rows: list[list[object]] = []
        self._sources = [node for node in flow.order if node.op in SOURCES]
        for node in self._sources:
            self._new(node.value(), BEFORE, None, _CATEGORIES[node.op], str(node.attribute("name", "")))
        last: dict[Value, int] = {}
        for number, node in enumerate(order):
            for value in node.inputs:
                last[value] = number
        for number, node in enumerate(order):
            self._run(number, node, last)
        for value in flow.outputs:
            self._freed(self._number[value], None)

    def _new(self, value: Value, born: int, freed: int | None, category: Category, name: str = "") -> None:
        self._number[value] = len(self._rows)
        self._rows.append([value.type.size_bytes, born, freed, category, name])

    def _freed(self, storage: int, at: int | None) -> None:
        if self._rows[storage][1] != BEFORE:
            self._rows[storage][2] = at

    def _run(self, number: int, node: Node, last: Mapping[Value, int]) -> None:
        for value in node.inputs:
            self._freed(self._number[value], number)
        over = self._flow.over.get(node, ())
        for index in range(len(node.outputs)):
            value = node.value(index)
            if node.op in VIEWS and node.inputs:
                self._number[value] = self._number[node.inputs[0]]
                continue
            at = over[index] if index < len(over) else None
            under = None if at is None else node.inputs[at]
            if under is not None and last.get(under) == number and under not in self._flow.wanted:
                self._number[value] = self._number[under]
            else:
                self._new(value, number, number, "temporary")

    def call(self, number: int, node: Node) -> Call:
        """The call of a node, with the numbers of its storages."""
        place = self._flow.place(node)
        return Call(
            node,
            place.phase,
            place.module,
            tuple(self._number[value] for value in node.inputs),
            tuple(self._number[node.value(index)] for index in range(len(node.outputs))),
            view=node.op in VIEWS and bool(node.inputs),
            inplace=node in self._flow.over,
            recomputed=place.phase == "backward" and node.attribute(AGAIN) is not None and not is_opaque(node),
        )

    def storages(self, calls: tuple[Call, ...]) -> tuple[Storage, ...]:
        """All storages; one that lives from the forward into the backward pass is an activation."""
        out = []
        for size, born, freed, category, name in self._rows:
            begin, end = int(str(born)), None if freed is None else int(str(freed))
            kind = str(category)
            if kind == "temporary" and calls[begin].phase == "forward" and self._flow.training:
                later = calls[-1 if end is None else end].phase != "forward"
                kind = "activation" if later else kind
            out.append(Storage(int(str(size)), begin, end, kind, str(name)))  # type: ignore[arg-type]
        return tuple(out)

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters with their storages."""
        return tuple(
            Parameter(
                name=str(node.attribute("name", "")),
                storage=self._number[node.value()],
                elements=node.outputs[0].elements,
                size_bytes=node.outputs[0].size_bytes,
                trained=self._flow.training,
                dtype=node.outputs[0].dtype,
            )
            for node in self._sources
            if node.op == "parameter"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Calls of a captured program that the graph does not need."""

    node: Node
    times: int
    """Number of calls that are saved."""
    dead: bool
    """No node reads the result; if False, the same result was computed before."""


def flow_of(
    program: Program,
    nodes: Nodes,
    outputs: Mapping[str, Value],
    *,
    training: bool,
    numbers: Mapping[str, object] | None = None,
    inputs: tuple[Value, ...] = (),
) -> tuple[Flow, tuple[Repeat, ...]]:
    """A program as a graph, and the calls that the graph saves: repeated ones, and ones without readers.

    Args:
        program: a recorded step in which every block was recorded.
        nodes: the table of its nodes.
        outputs: values that the step returns, by name.
        training: weights change with every step.
        numbers: contents of constants.
        inputs: inputs of the module in order.
    """
    walk = _Walk(nodes)
    for number, call in enumerate(program.calls):
        walk.run(number, call)
    flow = Flow(
        name=program.name,
        nodes=nodes,
        outputs=tuple(walk.now(value) for value in outputs.values()),
        names=tuple(outputs),
        places=walk.places,
        over=walk.over,
        kept=tuple(walk.kept),
        training=training,
        numbers=numbers or {},
        inputs=inputs,
        source=program.source,
        batch=program.batch,
    )
    reached = set(flow.order)
    free = (node for node in walk.times if node.op not in FREE)
    repeats = [
        Repeat(node=node, times=walk.times[node] - (node in reached), dead=node not in reached)
        for node in free
        if walk.times[node] > 1 or node not in reached
    ]
    return flow, tuple(repeats)


class _Walk:
    """Walk over the calls in order, which makes new nodes where they may not be shared."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._now: dict[Value, Value] = {}
        self.places: dict[Node, Place] = {}
        self.over: dict[Node, tuple[int | None, ...]] = {}
        self.kept: list[Node] = []
        self.times: Counter[Node] = Counter()

    def now(self, value: Value) -> Value:
        """The current value, as of the last call that gave it."""
        return self._now.get(value, value)

    def run(self, number: int, call: Call) -> None:
        """Process one call."""
        node = self._filled(call.node)
        inputs = tuple(self.now(value) for value in node.inputs)
        alone = is_opaque(node) or call.recomputed
        attributes: tuple[tuple[str, Attribute], ...] = node.attributes
        if alone and node.attribute("draw") is None:
            attributes = (*attributes, (AGAIN, number))
        made = node
        if inputs != node.inputs or attributes != node.attributes:
            made = self._nodes.node(node.op, inputs, node.names, attributes, node.outputs)
        for index in range(len(node.outputs)):
            self._now[call.node.value(index)] = made.value(index)
        self.places.setdefault(made, Place(position=float(number), phase=call.phase, module=call.module))
        self.times[made] += 1
        if is_opaque(node):
            self.kept.append(made)
        if call.inplace and call.writes:
            at = tuple(call.reads.index(w) if w in call.reads else None for w in call.writes)
            self.over.setdefault(made, at)

    def _filled(self, node: Node) -> Node:
        """A fill without the tensor that gives its shape, whose contents do not matter."""
        op, type = FILLS.get(node.op), node.outputs[0] if node.outputs else None
        if op is None or type is None or not is_contiguous(type):
            return node
        kept = {name: value for name, value in node.attributes if name not in ("size", "dtype", "memory_format")}
        given: dict[str, Attribute] = {"size": type.shape, **kept, "dtype": type.dtype}
        return self._nodes.node(op, (), (), tuple(given.items()), (type,))
