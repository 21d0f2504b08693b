"""Dims of every operator of the graph IR: the tables of all families, by the operator's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.graph import Node
from steptime.sharding.dims_elementwise import ELEMENTS
from steptime.sharding.dims_products import PRODUCTS
from steptime.sharding.dims_views import VIEWS_AND_MOVES
from steptime.sharding.rows import OperatorDims

OPERATORS: Final[Mapping[str, Callable[[Node], OperatorDims]]] = {**ELEMENTS, **VIEWS_AND_MOVES, **PRODUCTS}
"""Operator -> what it says of the dims of a node."""


def dims_of(node: Node) -> OperatorDims | None:
    """Dims of a node; None for an operator that is in no table, which is kept replicated.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> nodes = Nodes()
    >>> x, w = (nodes.source("input", n, TensorType(shape, "fp32")) for n, shape in {"x": (8, 4), "w": (4, 6)}.items())
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((8, 6), "fp32")])
    >>> [(dim.name, dim.kind, dim.size) for dim in dims_of(y).dims]
    [('rows', 'batch', 8), ('columns', 'batch', 6), ('inner', 'contracted', 4)]
    """
    rule = OPERATORS.get(node.op)
    return None if rule is None else rule(node)
