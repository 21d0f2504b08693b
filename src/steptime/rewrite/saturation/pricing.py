"""What e-nodes cost: each is made of ATen nodes on typed inputs, which are priced."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from steptime.captured.graph import Node, Nodes, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.rewrite.flow import Flow
from steptime.rewrite.retype import RefusedError, retyped
from steptime.rewrite.saturation.bridge import Bridge
from steptime.rewrite.saturation.egraph import CALL, LEAF, RESULT, Attribute, ENode, Sort
from steptime.rewrite.saturation.language import lowered
from steptime.rewrite.search.problem import CostModel, Metric

NOTHING: Final = 0.0
Key = tuple[str, tuple[Attribute, ...], tuple[Sort, ...], tuple[int, ...]]


@dataclass(kw_only=True)
class NodePrices:
    """Prices of e-nodes. Inputs are contiguous; a graph whose inputs have other strides may cost more, never less."""

    bridge: Bridge
    model: CostModel
    flow: Flow
    _known: dict[Key, tuple[float, ...]] = field(default_factory=dict)
    _scratch: Nodes = field(default_factory=Nodes)

    @property
    def limited(self) -> tuple[Metric, ...]:
        """Metrics that have a limit."""
        return tuple(self.model.limits)

    def __call__(self, node: ENode) -> tuple[float, ...]:
        """The cost of an e-node, then its metrics that have a limit."""
        op, attributes, children = node
        if op in (LEAF, RESULT):
            return (NOTHING,) * (1 + len(self.limited))
        graph = self.bridge.graph
        numbers = tuple(map(graph.find, children))
        # Equal arguments are read once, so which are equal is part of the key.
        same = tuple(numbers.index(each) for each in numbers)
        key = (op, attributes, tuple(graph.classes[each].sort for each in numbers), same)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._priced(key)
        return found

    def _priced(self, key: Key) -> tuple[float, ...]:
        op, attributes, sorts, same = key
        given = [
            self._scratch.source("input", f"{at}", TensorType(sort.shape, sort.dtype))
            for at, sort in zip(same, sorts, strict=True)
        ]
        try:
            if op == CALL:
                template = self.bridge.templates[int(attributes[0])]
                own = self._sum([template])
                made = retyped(self._scratch, template, tuple(given))
                other = self._sum(_above(made))
                return min(own, other)
            return self._sum(_above((lowered(self._scratch, op, attributes, given),)))
        except (RefusedError, ValueError, KeyError):
            if op == CALL:
                return self._sum([self.bridge.templates[int(attributes[0])]])
            return (inf,) * (1 + len(self.limited))

    def _sum(self, nodes: list[Node]) -> tuple[float, ...]:
        flow = self.flow
        cost = sum(self.model.of_node(flow, node) for node in nodes)
        limited = (sum(self.model.metrics(flow, node)[metric] for node in nodes) for metric in self.limited)
        return (cost, *limited)


def _above(values: tuple[Value, ...]) -> list[Node]:
    """Nodes that make values, without sources."""
    seen: dict[Node, None] = {}
    stack = [value.node for value in values]
    while stack:
        node = stack.pop()
        if node not in seen and node.op not in SOURCES:
            seen[node] = None
            stack += [value.node for value in node.inputs]
    return list(seen)
