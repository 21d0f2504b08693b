"""A graph as terms and back, with nothing rewritten: what the bridge keeps and what it writes otherwise."""

from __future__ import annotations

from math import inf

from steptime.captured.graph import Value
from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.saturation.bridge import Bridge, Lowering
from steptime.rewrite.saturation.egraph import CALL, LEAF, RESULT, ENode
from steptime.rewrite.saturation.extraction import cheapest_trees
from steptime.rewrite.scene import Folds


def round_trip(flow: Flow) -> Flow:
    """The graph whose operators are all made from their terms, where rules have a term for them."""
    bridge = Bridge(flow=flow, calls=False)
    bridge.add(flow)
    bridge.graph.rebuild()

    def price(node: ENode) -> float:
        return 1.0 if node[0] not in (LEAF, RESULT) else 0.0

    choice = cheapest_trees(bridge.graph, bridge.graph.classes, price)
    lowering = Lowering(bridge=bridge, choice=choice, folds=(folds := Folds()), steady=choice)
    wanted: list[Value] = [*flow.outputs, *(value for node in flow.kept for value in node.inputs)]
    ends = {value: lowering.value(bridge.of(value)) for value in wanted}
    changed = {old: new for old, new in ends.items() if old != new}
    return substituted(flow, changed, folds.definitions)


def represented(flow: Flow) -> float:
    """The part of the operators with inputs that rules have a term for."""
    bridge = Bridge(flow=flow, calls=False)
    bridge.add(flow)
    nodes = [node for node in flow.order if node.inputs]
    terms = sum(not bridge.graph.classes[bridge.of(node.value())].nodes.keys() <= {CALL, RESULT} for node in nodes)
    return terms / len(nodes) if nodes else inf
