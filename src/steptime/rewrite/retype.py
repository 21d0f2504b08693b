"""Nodes on other inputs: views and element-wise operators take the strides of their new inputs."""

from __future__ import annotations

from typing import Final

from steptime.captured.graph import Node, Nodes, Value
from steptime.captured.ops import OPERATORS, VIEWS, making


class RefusedError(Exception):
    """Replacements cannot be made: they need each other's results, or a memory layout that has changed."""


def retyped(nodes: Nodes, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Outputs of an operator on other inputs with the same shapes and element types.

    Raises:
        RefusedError: the operator is a view of its input's memory, which now has another layout.

    >>> from steptime.captured.graph import TensorType
    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((2, 6), "fp32"))
    >>> node = making.reshape(nodes, x, (12,)).node
    >>> wide = making.slice(nodes, nodes.source("input", "w", TensorType((2, 8), "fp32")), 1, 0, 6)
    >>> [value.node.op for value in retyped(nodes, node, (wide,))]
    ['_unsafe_view']
    """
    if inputs == node.inputs:
        return tuple(node.value(index) for index in range(len(node.outputs)))
    same = all(a.type == b.type for a, b in zip(inputs, node.inputs, strict=True))
    outputs = node.outputs
    if not same and node.op in VIEWS:
        if OPERATORS[node.op].layouts != "view":
            raise RefusedError(node.op)
        return looked(nodes, node, inputs[0])
    if not same and node.op in POINTWISE and len(outputs) == 1:
        outputs = making.types_of(nodes.node(node.op, inputs, node.names, node.attributes, outputs))
    made = nodes.node(node.op, inputs, node.names, node.attributes, outputs)
    return tuple(made.value(index) for index in range(len(outputs)))


POINTWISE: Final = frozenset(name for name, row in OPERATORS.items() if row.layouts == "pointwise")
"""Operators whose result has the memory layout of their inputs."""
_SHAPED: Final = ("view", "_unsafe_view", "_reshape_alias")
_SAME: Final = ("detach", "alias", "lift_fresh")


def looked(nodes: Nodes, node: Node, x: Value) -> tuple[Value, ...]:
    """Outputs of a view of another tensor with the same shape, or of a copy if its strides do not allow a view."""
    if node.op in _SHAPED:
        return (making.reshape(nodes, x, node.outputs[0].shape),)
    if node.op in _SAME:
        return (x,)
    made = making.made(nodes, node.op, {node.names[0]: x}, dict(node.attributes))
    return tuple(made.value(index) for index in range(len(made.outputs)))
