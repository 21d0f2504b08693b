"""Captured graphs as terms of the rule language, and back.

Each operator becomes a call, which keeps it as it is with its price, and where rules know it also the term of its
meaning, in the same class. Sources are leaves: variables, and weights where they are constant. What draws random
numbers or is unknown is a call of its own. Values are equal whatever their strides; a graph that is made of terms has
the strides that its operators give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from steptime.captured.graph import Node, Value, topological
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import VIEWS
from steptime.model.spec import FLOATS
from steptime.rewrite.flow import Flow, is_pure
from steptime.rewrite.retype import retyped
from steptime.rewrite.saturation.definitions import DEFINITIONS
from steptime.rewrite.saturation.egraph import CALL, LEAF, RESULT, Attribute, EGraph, ENode, Sort
from steptime.rewrite.saturation.language import MOVEMENTS, lowered, shape_of
from steptime.rewrite.scene import Folds


@dataclass(frozen=True, slots=True)
class Terms:
    """Typed terms in an e-graph."""

    graph: EGraph

    def make(self, op: str, attributes: tuple[Attribute, ...], *children: int | None) -> int | None:
        """The class of an operator on classes; None where an argument is missing or the types do not fit it.

        What moves nothing is its argument.
        """
        given = tuple(self.graph.find(each) for each in children if each is not None)
        if len(given) != len(children):
            return None
        known = self.graph.lookup((op, attributes, given))
        if known is not None:
            return known
        classes = [self.graph.classes[each] for each in given]
        dtype, shapes = classes[0].sort.dtype, tuple(each.sort.shape for each in classes)
        if any(each.sort.dtype != dtype for each in classes) or (op not in MOVEMENTS and dtype not in FLOATS):
            return None
        shape = shape_of(op, attributes, shapes)
        if shape is None:
            return None
        if shape == shapes[0] and _moves_nothing(op, attributes, len(given)):
            return given[0]
        steady = all(each.steady for each in classes)
        return self.graph.add((op, attributes, given), Sort(shape, dtype), steady)

    @staticmethod
    def plain(value: float) -> int | float:
        """A number as a whole one where it is one."""
        return int(value) if value == int(value) else value


def _moves_nothing(op: str, attributes: tuple[Attribute, ...], arity: int) -> bool:
    if op in ("reshape", "slice", "expand", "pad", "enlarge"):
        return True
    if op == "permute":
        return attributes == tuple(range(-len(attributes), 0))
    return (op == "concat" and arity == 1) or (op == "scale" and attributes == (1,))


@dataclass(kw_only=True)
class Bridge:
    """Values of a graph as classes of an e-graph; more values can be added at any time."""

    flow: Flow
    graph: EGraph = field(default_factory=EGraph)
    calls: bool = True
    """Keep operators as calls next to their meaning."""
    classes: dict[Value, int] = field(default_factory=dict)
    leaves: list[Value] = field(default_factory=list)
    templates: list[Node] = field(default_factory=list)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.terms = Terms(self.graph)

    def add(self, flow: Flow) -> None:
        """All values of a graph."""
        for node in flow.order:
            self._node(node, flow.definitions)

    def of(self, value: Value, definitions: Mapping[str, Value] | None = None) -> int:
        """The class of a value; ``definitions`` says what constants are computed from."""
        for node in topological([value.node]) if value not in self.classes else ():
            self._node(node, definitions or {})
        return self.graph.find(self.classes[value])

    def _node(self, node: Node, definitions: Mapping[str, Value]) -> None:
        if node.value() in self.classes or (not node.outputs and node.value(-1) in self.classes):
            return
        if node.op in SOURCES:
            self.classes[node.value()] = self._source(node, definitions)
            return
        given = [self.graph.find(self.classes[value]) for value in node.inputs]
        define = DEFINITIONS.get(node.op) if is_pure(node) else None
        meanings = None if define is None else define(self.terms, node, given)
        found: dict[int, int] = {}
        for index, made in enumerate(meanings or ()):
            type = node.outputs[index]
            if made is not None and self.graph.classes[self.graph.find(made)].sort == Sort(type.shape, type.dtype):
                found[index] = made
        if len(found) < len(node.outputs) or not node.outputs or (self.calls and node.op not in VIEWS):
            for index, made in enumerate(self._call(node, tuple(given))):
                if index in found:
                    self.graph.union(found[index], made)
                found[index] = made
        self.classes |= {node.value(index): made for index, made in found.items()}

    def _source(self, node: Node, definitions: Mapping[str, Value]) -> int:
        behind = definitions.get(str(node.attribute("name", ""))) if node.op == "constant" else None
        if behind is not None:
            return self.of(behind, definitions)
        type = node.outputs[0]
        self.leaves.append(node.value())
        steady = node in self.flow.constant or node.op == "constant"
        return self.graph.add((LEAF, (len(self.leaves) - 1,), ()), Sort(type.shape, type.dtype), steady)

    def _call(self, node: Node, given: tuple[int, ...]) -> list[int]:
        sorts = tuple(self.graph.classes[each].sort for each in given)
        made = tuple(Sort(type.shape, type.dtype) for type in node.outputs)
        key = (node.op, node.names, node.attributes, sorts, made)
        number = self._known.setdefault(key, len(self.templates))
        if number == len(self.templates):
            self.templates.append(node)
        steady = is_pure(node) and all(self.graph.classes[each].steady for each in given)
        whole = made[0] if len(made) == 1 else Sort((), "tuple")
        call = self.graph.add((CALL, (number,), given), whole, steady)
        if len(made) != 1:
            self.classes[node.value(-1)] = call
        if len(made) == 1:
            return [call]
        return [self.graph.add((RESULT, (index,), (call,)), each, steady) for index, each in enumerate(made)]


@dataclass(kw_only=True)
class Lowering:
    """Values for chosen terms of an e-graph; a choice has one e-node for each class that is needed."""

    bridge: Bridge
    choice: Mapping[int, ENode]
    folds: Folds
    steady: Mapping[int, ENode]
    """E-nodes of classes that are constant in every run."""
    made: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    """Class -> its value, or all results of a call."""
    _weights: dict[int, tuple[Value, ...]] = field(default_factory=dict)

    def value(self, number: int) -> Value:
        """The value of a class."""
        graph = self.bridge.graph
        number = graph.find(number)
        self._build(number, self.made, lambda each: self._constant(each) if graph.classes[each].steady else None)
        return self.made[number][0]

    def _build(
        self, root: int, made: dict[int, tuple[Value, ...]], known: Callable[[int], tuple[Value, ...] | None]
    ) -> None:
        stack = [root]
        choice = self.steady if made is self._weights else self.choice
        while stack:
            number = stack[-1]
            if number in made:
                stack.pop()
                continue
            found = known(number)
            if found is None:
                node = choice[number]
                children = [self.bridge.graph.find(child) for child in node[2]]
                missing = [child for child in children if child not in made]
                if missing:
                    stack += missing
                    continue
                found = self.node(node, [made[child] for child in children])
            made[number] = found
            stack.pop()

    def _constant(self, number: int) -> tuple[Value, ...]:
        self._build(number, self._weights, lambda each: None)
        return tuple(self._folded(value) for value in self._weights[number])

    def _folded(self, value: Value) -> Value:
        """A weight, a look at one, or the constant that holds what is computed from weights."""
        source = value.node
        while source.op in VIEWS and source.inputs:
            source = source.inputs[0].node
        return value if source.op in SOURCES else self.folds.constant(self.bridge.flow.nodes, value)

    def node(self, node: ENode, given: list[tuple[Value, ...]]) -> tuple[Value, ...]:
        """Values of one e-node."""
        op, attributes, _ = node
        if op == LEAF:
            return (self.bridge.leaves[int(attributes[0])],)
        if op == RESULT:
            return (given[0][int(attributes[0])],)
        inputs = tuple(each[0] for each in given)
        if op == CALL:
            return retyped(self.bridge.flow.nodes, self.bridge.templates[int(attributes[0])], inputs)
        return (lowered(self.bridge.flow.nodes, op, attributes, inputs),)
