"""Fusion of element-wise chains into kernels, and recomputation of kept tensors in fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import VIEWS
from steptime.captured.ops.calls import AGAIN
from steptime.rewrite.flow import Flow, is_pure
from steptime.rewrite.fused import ROWS_AT_ONCE, fuse, is_map, is_member
from steptime.rewrite.scene import Match, Pass, Scene, operands, shape_text

MOST_MEMBERS: Final = 64
MOST_RESULTS: Final = 8
"""Largest number of results of one fused kernel. This and MOST_MEMBERS stand for limits on registers and arguments."""


def needs(flow: Flow) -> tuple[Mapping[Node, int], Mapping[Node, int]]:
    """The number of each node, and a bit mask of the nodes that it depends on, including itself."""
    number = {node: n for n, node in enumerate(flow.order)}
    out: dict[Node, int] = {}
    for node in flow.order:
        bits = 1 << number[node]
        for value in node.inputs:
            if value.node.op not in SOURCES:
                bits |= out[value.node]
        out[node] = bits
    return number, out


class Grower:
    """Grows groups from their last member upwards such that no node outside lies between members.

    Args:
        flow: the graph.
        domain: key that members of a group share; None: the node joins no group.
        most: limits of members and of results of a group.
    """

    def __init__(self, flow: Flow, domain: Callable[[Node], object], most: tuple[int, int]) -> None:
        self._flow, self._domain, self._most = flow, domain, most
        self._number, self._needs = needs(flow)
        self._grouped: set[Node] = set()

    def groups(self, *, least: int = 2) -> Iterator[list[Node]]:
        """Groups with at least ``least`` members, the last ones first."""
        for root in reversed(self._flow.order):
            if root not in self._grouped and self._domain(root) is not None:
                group = self._grown(root)
                if len(group) >= least:
                    self._grouped |= group
                    yield sorted(group, key=self._number.__getitem__)

    def _grown(self, root: Node) -> set[Node]:
        group, needs = {root}, self._needs[root]
        domain = self._domain(root)
        waiting = [value.node for value in root.inputs]
        while waiting and len(group) < self._most[0]:
            waiting.sort(key=lambda node: self._number.get(node, -1))
            node = waiting.pop()
            if node in group or node in self._grouped or self._domain(node) != domain:
                continue
            if not self._fits(node, group, needs):
                continue
            group.add(node)
            waiting += [value.node for value in node.inputs]
        return group

    def _fits(self, node: Node, group: set[Node], needs: int) -> bool:
        """True if no node outside both reads this node and feeds the group, and the results stay within the limit."""
        values = [node.value(index) for index in range(len(node.outputs))]
        outside = [user for value in values for user in self._flow.users.get(value, ()) if user not in group]
        if any(needs >> self._number[user] & 1 for user in outside):
            return False
        return len(self.results({*group, node})) <= self._most[1]

    def results(self, group: set[Node]) -> list[Node]:
        """Members that nodes outside the group read, or that the step returns."""
        return [node for node in group if any(self._leaves(node.value(n), group) for n in range(len(node.outputs)))]

    def _leaves(self, value: Value, group: set[Node]) -> bool:
        return value in self._flow.wanted or any(user not in group for user in self._flow.users.get(value, ()))


def _chains(scene: Scene) -> Iterator[Match]:
    flow = scene.flow

    def domain(node: Node) -> object:
        if not is_member(node, flow.uses) or node in flow.constant or node in flow.over:
            return None
        return node.outputs[0].shape, flow.place(node).phase

    grower = Grower(flow, domain, (MOST_MEMBERS, MOST_RESULTS))
    for group in grower.groups():
        results = sorted(grower.results(set(group)), key=group.index)
        if not results:
            continue
        made = fuse(scene.nodes, group, results)
        replace = {node.value(): made.value(index) for index, node in enumerate(results)}
        names = " ".join(dict.fromkeys(node.op.lstrip("_") for node in group))
        yield Match(
            root=group[-1], replace=replace, what=f"{len(group)} operators ({names}) {shape_text(group[-1].outputs[0])}"
        )


ACTIVATIONS: Final = frozenset(
    {"relu", "clamp", "hardtanh", "leaky_relu", "sigmoid", "silu", "hardswish", "hardsigmoid", "gelu", "tanh"}
)
"""Activations that convolution libraries support as epilogues."""


def _epilogues(scene: Scene) -> Iterator[Match]:
    """A convolution, optionally a sum with a tensor of its shape, and an activation become one kernel."""
    flow = scene.flow
    for node in scene.each("convolution"):
        members = [node]
        while node not in flow.constant and scene.only_use(members[-1].value()) and len(members) < 3:
            reader = flow.users[members[-1].value()][0]
            pair = operands(reader) if reader.op == "add" and len(members) == 1 else None
            added = pair is not None and pair[0] != pair[1] and pair[0].type.shape == pair[1].type.shape
            if not added and reader.op not in ACTIVATIONS:
                break
            members.append(reader)
            if not added:
                break
        end = members[-1]
        if end.op in ACTIVATIONS and end.outputs[0].shape == node.outputs[0].shape:
            made = fuse(scene.nodes, members, [end])
            names = " ".join(each.op for each in members)
            yield Match(root=end, replace={end.value(): made.value()}, what=f"{names} {shape_text(*end.outputs)}")


RECOMPUTED: Final = ROWS_AT_ONCE | {"_softmax"}
"""Operators, in addition to element-wise ones, that are cheap to recompute."""


def _recomputed(scene: Scene) -> Iterator[Match]:
    """Recompute cheap results that only the backward pass still reads and whose inputs are kept anyway."""
    flow, nodes = scene.flow, scene.nodes
    if not flow.training:
        return
    for number, node in enumerate(flow.order):
        cheap = (is_map(node) or node.op in RECOMPUTED) and is_pure(node) and node not in flow.over
        if not cheap or flow.place(node).phase != "forward":
            continue
        readers = _backward_readers(flow, node.value())
        if not readers or node.value() in flow.wanted or not all(_is_kept(flow, each, node) for each in node.inputs):
            continue
        copy = nodes.node(node.op, node.inputs, node.names, (*node.attributes, (AGAIN, number)), node.outputs).value()
        again = {node.value(): copy}
        for _, views in readers:
            for view in reversed(views):
                inputs = (again[view.inputs[0]], *view.inputs[1:])
                again[view.value()] = nodes.node(view.op, inputs, view.names, view.attributes, view.outputs).value()
        replace: dict[Value, Value] = {}
        for user in dict.fromkeys(user for user, _ in readers):
            inputs = tuple(again.get(each, each) for each in user.inputs)
            made = nodes.node(user.op, inputs, user.names, user.attributes, user.outputs)
            replace |= {user.value(index): made.value(index) for index in range(len(user.outputs))}
        yield Match(root=readers[0][0], replace=replace, what=f"{node.op} {shape_text(copy.type)}")


def _backward_readers(flow: Flow, value: Value) -> list[tuple[Node, tuple[Node, ...]]]:
    """Readers of a value in the backward pass in order, each with the views in between, the last view first."""
    found: list[tuple[Node, tuple[Node, ...]]] = []
    waiting: list[tuple[Value, tuple[Node, ...]]] = [(value, ())]
    while waiting:
        current, views = waiting.pop()
        for user in dict.fromkeys(flow.users.get(current, ())):
            if user.op in VIEWS and len(user.outputs) == 1 and user.value() not in flow.wanted:
                waiting.append((user.value(), (user, *views)))
            elif flow.place(user).phase == "backward":
                found.append((user, views))
    return sorted(found, key=lambda pair: flow.place(pair[0]).position)


def _is_kept(flow: Flow, value: Value, reader: Node) -> bool:
    """True if a value is kept for the backward pass in any case, because other nodes read it there."""
    while value.node.op in VIEWS and value.node.inputs:
        value = value.node.inputs[0]
    if value.node.op in SOURCES or value in flow.wanted:
        return True
    return any(user is not reader and user.attribute(AGAIN) is None for user, _ in _backward_readers(flow, value))


EPILOGUE: Final = Pass(
    name="convolution + activation",
    matches="a convolution, a residual added to it or none, and an activation",
    condition="inference; nothing else reads what is between; same shape",
    makes="one kernel whose epilogue adds and activates: no intermediate tensor goes through memory",
    source="Jia et al., MetaFlow, SysML 2019; cuDNN's fused convolutions, ONNX Runtime's FusedConv",
    find=_epilogues,
    modes=("inference",),
    fuses=True,
)

FUSION: Final = Pass(
    name="element-wise chain",
    matches="element-wise operators and norms of one shape and phase that feed one another; smaller inputs broadcast",
    condition="no value that leaves the group comes back into it; at most 64 operators and 8 results",
    makes="one kernel: inputs read once, results written once, one launch; what the backward pass reads is written out",
    source="seed document on fusion; PyTorch Inductor",
    find=_chains,
    fuses=True,
)

RECOMPUTE: Final = Pass(
    name="recompute when fused",
    matches="an element-wise result, a norm or a softmax that only the backward pass still reads, also through views",
    condition="training; its inputs are kept anyway; memory is the objective",
    makes="the same operator again in the backward pass, where the kernel of its readers takes it in if it can",
    source="Chen et al., arXiv 1604.06174; PyTorch's min-cut partitioner",
    find=_recomputed,
    modes=("training",),
    trades_memory=True,
)
