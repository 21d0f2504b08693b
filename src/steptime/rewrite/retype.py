"""Nodes on other inputs: views and element-wise operators take the strides of what they then read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.aten import views
from steptime.captured.aten.views import fresh, strides_of, tensor_type
from steptime.captured.graph import Attribute, Node, Nodes, Value
from steptime.captured.ops import OPERATORS, VIEWS


class RefusedError(Exception):
    """Replacements cannot be made: they need each other's results, or a layout in memory that is gone."""


def retyped(nodes: Nodes, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Outputs of an operator on other inputs of the same shapes and element types.

    Raises:
        RefusedError: the operator looks at the memory of its input, which has another layout now.

    >>> from steptime.captured.graph import TensorType
    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((2, 6), "fp32"))
    >>> node = views.reshape(nodes, x, (12,)).node
    >>> wide = views.slice(nodes, nodes.source("input", "w", TensorType((2, 8), "fp32")), 1, 0, 6)
    >>> [value.node.op for value in retyped(nodes, node, (wide,))]
    ['_unsafe_view']
    """
    if inputs == node.inputs:
        return tuple(node.value(index) for index in range(len(node.outputs)))
    same = all(a.type == b.type for a, b in zip(inputs, node.inputs, strict=True))
    outputs = node.outputs
    if not same and node.op in VIEWS:
        row = VIEW_ROWS.get(node.op)
        if row is None:
            raise RefusedError(node.op)
        return row(nodes, node, inputs[0])
    if not same and node.op in POINTWISE and len(outputs) == 1:
        type = outputs[0]
        outputs = (fresh(type.shape, type.dtype, [value.type for value in inputs]),)
    made = nodes.node(node.op, inputs, node.names, node.attributes, outputs)
    return tuple(made.value(index) for index in range(len(outputs)))


POINTWISE: Final = frozenset(name for name, row in OPERATORS.items() if row.layouts == "pointwise")
"""Operators whose result lies in memory as their inputs do."""

Row = Callable[[Nodes, Node, Value], tuple[Value, ...]]


def _integer(node: Node, name: str, default: int) -> int:
    found = node.attribute(name, default)
    return default if found is None else int(str(found))


def _integers(given: Attribute) -> tuple[int, ...]:
    return tuple(int(str(item)) for item in given) if isinstance(given, tuple) else (int(str(given)),)


def _slice(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    dim = _integer(node, "dim", 0)
    start, end = _integer(node, "start", 0), _integer(node, "end", x.type.shape[dim])
    return (views.slice(nodes, x, dim, start, end, _integer(node, "step", 1)),)


def _squeeze(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    dims = node.attribute("dim")
    return (views.squeeze(nodes, x, tuple(range(x.type.rank)) if dims is None else _integers(dims)),)


def _parts(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    outputs = tuple(tensor_type(type.shape, type.dtype, strides_of(x.type)) for type in node.outputs)
    made = nodes.node(node.op, (x,), node.names, node.attributes, outputs)
    return tuple(made.value(index) for index in range(len(outputs)))


def _unbind(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    dim = _integer(node, "dim", 0) % x.type.rank
    return tuple(views.select(nodes, x, dim, index) for index in range(x.type.shape[dim]))


def _same(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    return (x,)


def _transpose(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    return (views.transpose(nodes, x, _integer(node, "dim0", 0), _integer(node, "dim1", 1)),)


def _reshape(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    return (views.reshape(nodes, x, node.outputs[0].shape),)


#: View -> how it is made on a tensor with other strides.
VIEW_ROWS: Final[Mapping[str, Row]] = {
    "view": _reshape,
    "_unsafe_view": _reshape,
    "_reshape_alias": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "split": _parts,
    "split_with_sizes": _parts,
    "unbind": _unbind,
    "detach": _same,
    "alias": _same,
    "lift_fresh": _same,
    "t": lambda nodes, node, x: (views.t(nodes, x),),
    "permute": lambda nodes, node, x: (views.permute(nodes, x, _integers(node.attribute("dims"))),),
    "expand": lambda nodes, node, x: (views.expand(nodes, x, node.outputs[0].shape),),
    "select": lambda nodes, node, x: (views.select(nodes, x, _integer(node, "dim", 0), _integer(node, "index", 0)),),
    "unsqueeze": lambda nodes, node, x: (views.unsqueeze(nodes, x, _integer(node, "dim", 0)),),
}
