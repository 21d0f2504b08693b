"""Forward mode: how the outputs of a graph change with its inputs, as nodes of the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steptime.captured.aten.maths import add, full, mul, reduce, sub, unary
from steptime.captured.aten.views import expand, like, reshape
from steptime.captured.autodiff.backwards import note, pull, unknown
from steptime.captured.autodiff.table import BILINEAR, CONSTANT, FORWARD, LINEAR, MAPS, SYMMETRIC, Step, forward
from steptime.captured.graph.program import SOURCES, Graph, Node, Nodes, Program, Value, topological
from steptime.captured.graph.schedule import program_of
from steptime.errors import FieldError, UnknownNameError, first_few
from steptime.model.spec import FLOATS

Tangents = Sequence[Value | None]


def pushforward(nodes: Nodes, graph: Graph, tangents: Mapping[Value, Value]) -> tuple[Value | None, ...]:
    r"""Tangents of the outputs: :math:`\dot y_o = \sum_w \partial y_o / \partial w \, \dot w`.

    Args:
        nodes: the table of the graph.
        graph: what to differentiate.
        tangents: tangent of each value that moves.

    Returns:
        One tangent per output; None for an output that does not move.

    Raises:
        UserError: the tangent of an operator on the way is not known.
    """
    found = dict(tangents)
    for node in sorted(graph.nodes(), key=lambda n: n.number):
        _advance(nodes, node, found)
    return tuple(found.get(value) for value in graph.outputs)


def jvp(program: Program, of: str | Sequence[str] = "inputs") -> Program:
    r"""The forward pass of a captured program with its Jacobian-vector product, :math:`\dot y = J \dot x`.

    Each operator is followed by the operators of its tangent, so that what no later operator reads is freed at once.
    The tangents :math:`\dot x` are further inputs, named ``tangent.NAME``. The result is costed as any program is:
    ``steptime.profile(program, device)``.

    Args:
        program: a captured program; of a training step the forward pass is differentiated.
        of: what has a tangent: ``"inputs"``, ``"parameters"``, or names of inputs and parameters.

    Returns:
        A program whose outputs are the outputs that depend on ``of``, then their tangents.

    Raises:
        UserError: nothing has that name, no output depends on it, or the tangent of an operator is not known.

    The product of two matrices takes one product more, the bias of the sum has no tangent:

    >>> from steptime.captured.graph import TensorType
    >>> from steptime.captured.graph.schedule import program_of
    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((8, 3), "fp32"))
    >>> w = nodes.source("parameter", "w", TensorType((3, 4), "fp32"))
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((8, 4), "fp32")]).value()
    >>> z = nodes.apply("tanh", {"self": y}, outputs=[y.type]).value()
    >>> [call.node.op for call in jvp(program_of(Graph((z,)))).calls]
    ['mm', 'mm', 'tanh', 'tanh_backward']
    """
    nodes, modules, wanted = Nodes(), {}, _moving(program, of)
    copies: dict[Node, Node] = {}
    tangents: dict[Value, Value] = {}
    origins: dict[Node, Node] = {}
    path = {call.node: call.module for call in program.calls if call.phase == "forward"}
    for node in topological(path):
        inputs = tuple(copies[value.node].value(value.index) for value in node.inputs)
        copy = copies[node] = nodes.node(node.op, inputs, node.names, node.attributes, node.outputs)
        modules[copy] = path.get(node, "")
        if node in wanted:
            tangents[copy.value()] = nodes.source("input", f"tangent.{node.attribute('name')}", node.outputs[0])
        start = len(nodes)
        note(origins, _advance(nodes, copy, tangents), copy, start)
    read = {value for copy in copies.values() for value in copy.inputs}
    outputs = [value for value in tangents if value not in read]
    if not outputs or all(value.node.op in SOURCES for value in outputs):
        raise FieldError("jvp", "of", f"is {of!r}, on which no output depends")
    made = program_of(
        Graph((*outputs, *(tangents[value] for value in outputs))),
        name=f"{program.name} with tangents",
        module=lambda node: modules.get(origins.get(node, node), ""),
        source=program.source,
        batch=program.batch,
    )
    return replace(made, modules=program.modules)


def _moving(program: Program, of: str | Sequence[str]) -> set[Node]:
    """Sources of a program that have a tangent."""
    calls = (call.node for call in program.calls if call.phase == "forward")
    known = [n for n in topological(calls) if n.op in ("input", "parameter") and n.outputs[0].dtype in FLOATS]
    kinds = {"inputs": "input", "parameters": "parameter"}
    if isinstance(of, str) and of in kinds:
        return {node for node in known if node.op == kinds[of]}
    names = {str(node.attribute("name")): node for node in known}
    asked = [of] if isinstance(of, str) else list(of)
    for name in asked:
        if name not in names:
            raise UnknownNameError("input or parameter", name, names, otherwise=f"names: {first_few(list(names), 8)}")
    return {names[name] for name in asked}


def _advance(nodes: Nodes, node: Node, found: dict[Value, Value]) -> list[Value]:
    """Enter the tangents of a node's outputs, from those of its inputs, and return them."""
    given = [found.get(value) for value in node.inputs]
    if node.op in SOURCES or node.op in CONSTANT or all(tangent is None for tangent in given):
        return []
    new = {
        node.value(index): tangent
        for index, tangent in enumerate(_push(nodes, node, given))
        if tangent is not None and node.outputs[index].dtype in FLOATS
    }
    found |= new
    return list(new.values())


def _push(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    if node.op in FORWARD:
        return FORWARD[node.op](nodes, node, given)
    if node.op in LINEAR:
        return _linear(nodes, node, given)
    if node.op in BILINEAR:
        return [_product(nodes, node, given, BILINEAR[node.op])]
    if node.op in MAPS:
        return [_map(nodes, node, given)]
    if node.op in SYMMETRIC:
        step = Step(nodes, node, (given[0], *(None for _ in node.outputs[1:])), frozenset(node.names[:1]))
        pulled = pull(step)[node.names[0]]
        return [pulled if isinstance(pulled, Value) else None]
    raise unknown(node, "forward derivative")


def _zeros(nodes: Nodes, value: Value) -> Value:
    return full(nodes, value.type.shape, 0, value.type.dtype)


def _linear(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """The operator itself on the tangents; what does not move counts as zero."""
    arguments = LINEAR[node.op]
    if any(t is not None and name not in arguments for t, name in zip(given, node.names, strict=True)):
        raise unknown(node, "forward derivative")
    inputs = tuple(
        value if name not in arguments else tangent or _zeros(nodes, value)
        for value, name, tangent in zip(node.inputs, node.names, given, strict=True)
    )
    attributes = tuple((k, 0.0 if node.op == "constant_pad_nd" and k == "value" else v) for k, v in node.attributes)
    made = nodes.node(node.op, inputs, node.names, attributes, node.outputs)
    return [made.value(index) for index in range(len(made.outputs))]


def _sum(nodes: Nodes, parts: list[Value]) -> Value | None:
    total = None
    for part in parts:
        total = part if total is None else add(nodes, total, part)
    return total


def _with(nodes: Nodes, node: Node, changed: dict[str, Value], dropped: tuple[str, ...] = ()) -> Value:
    """The same operator with some arguments replaced and some left out."""
    pairs = [
        (name, changed.get(name, value))
        for name, value in zip(node.names, node.inputs, strict=True)
        if name not in dropped
    ]
    values = tuple(value for _, value in pairs)
    return nodes.node(node.op, values, tuple(name for name, _ in pairs), node.attributes, node.outputs).value()


def _product(nodes: Nodes, node: Node, given: Tangents, factors: tuple[str, str], *, drop: str = "") -> Value | None:
    """The rule of the product: each factor's tangent with the other factor."""
    by_name = dict(zip(node.names, given, strict=True))
    parts = []
    for name in factors:
        tangent = by_name[name]
        if tangent is not None:
            parts.append(_with(nodes, node, {name: tangent}, (drop,)))
    return _sum(nodes, parts)


def _map(nodes: Nodes, node: Node, given: Tangents) -> Value | None:
    """Derivative times tangent; the Jacobian is diagonal, so the reverse rule gives it."""
    parts = []
    for name, tangent in zip(node.names, given, strict=True):
        if tangent is None:
            continue
        whole = expand(nodes, tangent, node.outputs[0].shape)
        grads = (whole, *(None for _ in node.outputs[1:]))
        pulled = pull(Step(nodes, node, grads, frozenset((name,)))).get(name)
        if isinstance(pulled, Value):
            parts.append(pulled)
    return _sum(nodes, parts)


@forward("addmm", "baddbmm")
def _addmm(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    plain = nodes.node("mm" if node.op == "addmm" else "bmm", node.inputs[1:], ("self", "mat2"), (), node.outputs)
    alpha, beta = (node.attribute(name, 1) for name in ("alpha", "beta"))
    product = _product(nodes, plain, given[1:], ("self", "mat2"))
    parts = [] if product is None else [_times(nodes, product, alpha)]
    if given[0] is not None:
        parts.append(_times(nodes, expand(nodes, given[0], node.outputs[0].shape), beta))
    return [_sum(nodes, parts)]


def _times(nodes: Nodes, x: Value, factor: object) -> Value:
    return x if factor == 1 or not isinstance(factor, (int, float)) else mul(nodes, x, factor)


@forward("convolution")
def _convolution(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    result = _product(nodes, node, given, ("input", "weight"), drop="bias")
    tangent = dict(zip(node.names, given, strict=True)).get("bias")
    if tangent is not None:
        shape = node.outputs[0].shape
        column = reshape(nodes, tangent, (1, shape[1], *(1 for _ in shape[2:])))
        whole = expand(nodes, column, shape)
        result = whole if result is None else add(nodes, result, whole)
    return [result]


@forward("_log_softmax")
def _log_softmax(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """dx - sum(softmax dx)."""
    tangent, dim = given[0], node.attribute("dim", -1)
    assert tangent is not None and isinstance(dim, int)
    weighted = mul(nodes, unary(nodes, "exp", node.value()), tangent)
    return [sub(nodes, tangent, reduce(nodes, "sum", weighted, (dim,), True))]


@forward("native_layer_norm")
def _layer_norm(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """The Jacobian of the normalisation is symmetric; weight and bias are linear after it."""
    tangents = dict(zip(node.names, given, strict=True))
    x, weight, mean, rstd = node.inputs[0], node.input("weight"), node.value(1), node.value(2)
    parts: list[Value] = []
    moved = tangents["input"]
    if moved is not None:
        inputs = {"grad_out": moved, "input": x, "mean": mean, "rstd": rstd}
        shape = node.attribute("normalized_shape")
        attributes = {"normalized_shape": shape, "output_mask": (True, False, False)}
        back = nodes.apply("native_layer_norm_backward", inputs, attributes, outputs=[like(x.type)]).value()
        parts.append(back if weight is None else mul(nodes, back, weight))
    slope = tangents.get("weight")
    if slope is not None:
        parts.append(mul(nodes, mul(nodes, sub(nodes, x, mean), rstd), slope))
    shift = tangents.get("bias")
    if shift is not None:
        parts.append(expand(nodes, shift, node.outputs[0].shape))
    return [_sum(nodes, parts), None, None]


@forward("nll_loss_forward")
def _nll_loss(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """Linear in the logarithms of the probabilities."""
    tangent = given[0]
    assert tangent is not None
    return [_with(nodes, node, {"self": tangent}), None]


@forward("mse_loss")
def _mse_loss(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """2 (x - y) (dx - dy), reduced as the loss is: 0 not at all, 1 to the mean, 2 to the sum."""
    x, target = node.inputs
    moved, other = given
    change = moved if moved is not None else _zeros(nodes, x)
    change = change if other is None else sub(nodes, change, other)
    product = mul(nodes, mul(nodes, sub(nodes, x, target), change), 2)
    reduction = node.attribute("reduction", 1)
    if reduction == 0:
        return [product]
    return [reduce(nodes, "mean" if reduction == 1 else "sum", product, range(x.type.rank), False)]


@forward("max_pool2d_with_indices")
def _max_pool(nodes: Nodes, node: Node, given: Tangents) -> Tangents:
    """The tangent at the places of the largest elements."""
    tangent, shape = given[0], node.outputs[0].shape
    assert tangent is not None
    lead = tangent.type.shape[:-2]
    flat = reshape(nodes, tangent, (*lead, tangent.type.shape[-2] * tangent.type.shape[-1]))
    index = reshape(nodes, node.value(1), (*lead, shape[-2] * shape[-1]))
    attributes = {"dim": len(lead)}
    found = nodes.apply(
        "gather", {"self": flat, "index": index}, attributes, outputs=[flat.type.with_shape(*index.type.shape)]
    )
    return [reshape(nodes, found.value(), shape), None]
