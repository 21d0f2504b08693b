"""Parts of a graph as separate graphs: equal parts are the same graph, searched once and replaced at each place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from steptime.captured.graph import Node, Value, topological
from steptime.captured.graph.program import SOURCES
from steptime.rewrite.flow import WEIGHTS, Flow, is_opaque, is_pure
from steptime.rewrite.retype import retyped
from steptime.rewrite.scene import Folds


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a graph as a separate graph."""

    flow: Flow = field(repr=False)
    """The part, with values at its border as inputs ``x.0``, ``x.1``, ... and weights as ``w.0``, ..."""
    sources: Mapping[Value, Value] = field(repr=False)
    """Source of the part -> value of the whole graph."""
    outputs: tuple[Value, ...] = field(repr=False)
    """Values of the whole graph for the part's outputs."""
    key: object = field(repr=False)
    """Key that is equal for parts that compute the same from other values and weights, in the same phases."""


def is_movable(node: Node) -> bool:
    """True if a node may be in a part: it is known and pure."""
    return node.op not in SOURCES and not is_opaque(node) and is_pure(node)


def cut(flow: Flow, members: Collection[Node]) -> Region:
    """Cut a part out of a graph.

    Args:
        flow: the graph.
        members: nodes of the part; constants that they read are added.
    """
    inside = set(members)
    order = _with_constants(flow, inside)
    cutter = _Cutter(flow)
    for node in order:
        cutter.add(node)
    outputs = tuple(value for node in order if node in inside for value in _left(flow, node, inside))
    made = cutter.made
    places = {made[node.value()].node: flow.place(node) for node in order if node.outputs}
    over = {made[node.value()].node: flow.over[node] for node in order if node in flow.over and node.outputs}
    part = Flow(
        name=flow.name,
        nodes=flow.nodes,
        outputs=tuple(made[value] for value in outputs),
        names=tuple(f"out.{n}" for n in range(len(outputs))),
        places=places,
        over=over,
        training=flow.training,
        inputs=tuple(value for value in cutter.sources if value.node.op == "input"),
    )
    phases = tuple(place.phase for place in places.values())
    return Region(flow=part, sources=cutter.sources, outputs=outputs, key=(part.outputs, phases, tuple(over.items())))


def _with_constants(flow: Flow, inside: set[Node]) -> list[Node]:
    """Members and the constants on which they depend, in order."""
    found = set(inside)
    stack = list(inside)
    while stack:
        for value in stack.pop().inputs:
            node = value.node
            if node in flow.constant and node.op not in SOURCES and node not in found:
                found.add(node)
                stack.append(node)
    return sorted(found, key=flow.number.__getitem__)


def _left(flow: Flow, node: Node, inside: set[Node]) -> list[Value]:
    """Values of a node that are read outside the part."""
    out = []
    for index in range(len(node.outputs)):
        value = node.value(index)
        if value in flow.wanted or any(user not in inside for user in flow.users.get(value, ())):
            out.append(value)
    return out


class _Cutter:
    """Builder of nodes on sources that are numbered in the order of reading."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.made: dict[Value, Value] = {}
        self.sources: dict[Value, Value] = {}

    def add(self, node: Node) -> None:
        """Add a node whose inputs are made or become sources."""
        inputs = tuple(self._value(value) for value in node.inputs)
        made = self._flow.nodes.node(node.op, inputs, node.names, node.attributes, node.outputs)
        for index in range(len(node.outputs)):
            self.made[node.value(index)] = made.value(index)

    def _value(self, value: Value) -> Value:
        found = self.made.get(value)
        if found is None:
            weight = value.node.op in WEIGHTS
            kind, letter = (value.node.op, "w") if weight else ("input", "x")
            found = self._flow.nodes.source(kind, f"{letter}.{len(self.sources)}", value.type)
            self.made[value] = found
            self.sources[found] = value
        return found


Over = Mapping[Node, tuple[int | None, ...]]


def put_back(region: Region, found: Flow, own: Folds, folds: Folds) -> tuple[dict[Value, Value], Over]:
    """Replacements of the values of a part, and the new nodes that run in place.

    Args:
        region: the part at its place.
        found: the rewritten graph of a part with the same key.
        own: constants computed from the weights of that part.
        folds: constants of the whole graph, to which they are added for the real weights.
    """
    nodes = region.flow.nodes
    made: dict[Value, Value] = dict(region.sources)
    over: dict[Node, tuple[int | None, ...]] = {}

    def value(wanted: Value) -> Value:
        for node in topological([wanted.node]):
            first = node.value() if node.outputs else None
            if first is None or first in made:
                continue
            name = str(node.attribute("name", ""))
            if node.op in SOURCES:
                made[first] = folds.constant(nodes, value(own.definitions[name])) if name in own.definitions else first
                continue
            for index, each in enumerate(retyped(nodes, node, tuple(made[v] for v in node.inputs))):
                made[node.value(index)] = each
                if node in found.over:
                    over[each.node] = found.over[node]
        return made[wanted]

    pairs = [(old, value(new)) for old, new in zip(region.outputs, found.outputs, strict=True)]
    return {old: new for old, new in pairs if new != old}, over
