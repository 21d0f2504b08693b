"""Reverse mode: the gradients of a graph, as nodes of the same table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from steptime.captured.aten.maths import add, full, sum_to
from steptime.captured.autodiff import elementwise, layers, reductions, views  # noqa: F401  (they fill the tables)
from steptime.captured.autodiff.table import CONSTANT, MAPS, REVERSE, Pulled, Step, storages
from steptime.captured.graph.program import SOURCES, Graph, Node, Nodes, Value, topological
from steptime.errors import InternalError, UserError
from steptime.model.spec import FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """A graph with its gradients."""

    forward: Graph
    """What was differentiated."""
    graph: Graph
    """Its outputs are those of the forward graph, then the gradients in the order of `wanted`."""
    wanted: Mapping[Value, Value]
    """Gradient of each value that was asked for; values that no output depends on are missing."""
    saved: tuple[Value, ...]
    """Values of the forward graph that the backward nodes read."""
    origins: Mapping[Node, Node]
    """Backward node -> the forward node whose rule made it."""

    @property
    def backward(self) -> tuple[Node, ...]:
        """Nodes that the gradients add, in the order in which they were made: each after its inputs."""
        known = set(self.forward.nodes())
        return tuple(sorted((n for n in self.graph.nodes() if n not in known), key=lambda n: n.number))

    @property
    def saved_storages(self) -> tuple[Value, ...]:
        """Owners of what is saved, without parameters and buffers, which are there anyway."""
        return tuple(v for v in storages(self.saved) if v.node.op not in ("parameter", "buffer", "constant"))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages that the forward pass keeps for the backward pass."""
        return sum(value.type.size_bytes for value in self.saved_storages)


def gradients(
    nodes: Nodes, graph: Graph, wanted: Iterable[Value] | None = None, seeds: Sequence[Value | None] | None = None
) -> Gradients:
    r"""Gradients of a graph by reverse accumulation.

    For outputs :math:`y_o` with seeds :math:`s_o` it derives, for each wanted value w,

    .. math:: \bar w = \sum_o s_o \, \partial y_o / \partial w

    The operators of the backward nodes are the ones that PyTorch runs, so their costs and what they keep are its too.

    Args:
        nodes: the table of the graph.
        graph: what to differentiate.
        wanted: values whose gradients are asked for; default: all parameters.
        seeds: gradient of each output; default: ones, as ``loss.backward()`` has it. None where nothing flows back.

    Raises:
        UserError: the gradient of an operator on the way is not known.

    >>> from steptime.captured.graph.program import TensorType
    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((8, 3), "fp32"))
    >>> w = nodes.source("parameter", "w", TensorType((3, 4), "fp32"))
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((8, 4), "fp32")])
    >>> result = gradients(nodes, Graph((y.value(),)))
    >>> [node.op for node in result.backward], result.saved_bytes
    (['ones', 't', 'mm'], 96)
    """
    asked = tuple(n.value() for n in graph.sources("parameter")) if wanted is None else tuple(wanted)
    order = sorted(graph.nodes(), key=lambda node: node.number)
    active = _active(order, asked)
    found: dict[Value, Value] = {}
    ones = [full(nodes, value.type.shape, 1, value.type.dtype) for value in graph.outputs] if seeds is None else seeds
    for output, seed in zip(graph.outputs, ones, strict=True):
        if seed is not None and output.node in active and output.type.dtype in FLOATS:
            _accumulate(nodes, found, output, seed)
    origins: dict[Node, Node] = {}
    for node in reversed(order):
        if node in active and node.op not in SOURCES:
            start = len(nodes)
            note(origins, _pull(nodes, node, active, found), node, start)
    known = {value: found[value] for value in asked if value in found}
    whole = Graph((*graph.outputs, *known.values()))
    inside = set(order)
    later = [node for node in topological(value.node for value in known.values()) if node not in inside]
    saved = dict.fromkeys(v for node in sorted(later, key=lambda n: n.number) for v in node.inputs if v.node in inside)
    return Gradients(forward=graph, graph=whole, wanted=known, saved=tuple(saved), origins=origins)


def _active(order: Sequence[Node], asked: Sequence[Value]) -> set[Node]:
    """Nodes through which a gradient flows: wanted ones, and those with such a node among their inputs."""
    active = {value.node for value in asked}
    for node in order:
        differentiable = node.op not in CONSTANT and any(type.dtype in FLOATS for type in node.outputs)
        if differentiable and any(_flows(value, active) for value in node.inputs):
            active.add(node)
    return active


def _flows(value: Value, active: set[Node]) -> bool:
    return value.node in active and value.type.dtype in FLOATS


def _accumulate(nodes: Nodes, found: dict[Value, Value], value: Value, grad: Value) -> None:
    if grad.type.shape != value.type.shape:
        raise InternalError(f"the gradient of {value.node!r} has the shape {grad.type.shape}")
    found[value] = grad if value not in found else add(nodes, found[value], grad)


def note(origins: dict[Node, Node], made: Iterable[Value], node: Node, start: int) -> None:
    """Nodes that were made from number ``start`` on come from that node."""
    stack = [value.node for value in made]
    while stack:
        new = stack.pop()
        if new.number >= start and new not in origins:
            origins[new] = node
            stack += [value.node for value in new.inputs]


def _pull(nodes: Nodes, node: Node, active: set[Node], found: dict[Value, Value]) -> list[Value]:
    """Add what one node sends back to its inputs; the sums that this made."""
    grads = tuple(found.get(node.value(index)) for index in range(len(node.outputs)))
    if all(grad is None for grad in grads):
        return []
    needed = frozenset(name for name, value in zip(node.names, node.inputs, strict=True) if _flows(value, active))
    pulled = pull(Step(nodes, node, grads, needed))
    for name in dict.fromkeys(node.names):
        if name not in needed:
            continue
        given = pulled.get(name)
        members = [given] if given is None or isinstance(given, Value) else list(given)
        for value, grad in zip(node.inputs_of(name), members, strict=True):
            if grad is not None and _flows(value, active):
                if node.op in MAPS:
                    grad = sum_to(nodes, grad, value.type.shape)
                _accumulate(nodes, found, value, grad)
    return [found[value] for value in node.inputs if value in found]


def pull(step: Step) -> Pulled:
    """Gradients of the arguments of one node.

    Raises:
        UserError: there is no rule for the operator, or not for this form of it.
    """
    rule = REVERSE.get(step.node.op)
    if rule is None:
        raise unknown(step.node, "gradient")
    try:
        return rule(step)
    except NotImplementedError as what:
        raise unknown(step.node, "gradient", str(what)) from None


def unknown(node: Node, what: str, form: str = "") -> UserError:
    """The error for an operator without a rule."""
    shapes = ", ".join(str(value.type) for value in node.inputs)
    return UserError(
        f"the {what} of the operator {node.op!r} is not known{f' with {form}' if form else ''}: {node.op}({shapes})",
        hint=f"enter a rule with steptime.captured.autodiff.{'reverse' if what == 'gradient' else 'forward'}",
    )
