"""The registry: every operator of a graph, and what it costs on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.captured.cost import (
    attention,
    convolutions,
    maps,
    movements,
    normalisations,
    optimisers,
    products,
    recurrent,
)
from steptime.captured.cost.movements import VIEWS
from steptime.captured.cost.work import OperatorRow, Work, evaluate, moved
from steptime.captured.graph import Node

#: Family -> its table; an operator is in one of them.
FAMILIES: Final[Mapping[str, Mapping[str, OperatorRow]]] = {
    "product": products.TABLE, "attention": attention.TABLE, "convolution": convolutions.TABLE,
    "recurrent": recurrent.TABLE, "norm": normalisations.TABLE, "optimiser": optimisers.TABLE,
    "map": maps.TABLE, "move": movements.TABLE,
}  # fmt: skip

ROWS: Final[Mapping[str, tuple[str, OperatorRow]]] = {
    name: (family, row) for family, table in FAMILIES.items() for name, row in table.items()
}
"""Operator -> family and row."""

VIEW, UNKNOWN = "view", "unknown"
NOTHING: Final = Work(family=VIEW)
_UNKNOWN_ROW: Final = OperatorRow(kernels=moved)


def work_of(node: Node, *, inplace: bool = False) -> Work:
    """What a node costs on any device.

    A look at memory costs nothing. An operator that is in no table moves its inputs and outputs once, computes nothing
    that is known, and has the family ``unknown``.

    Args:
        node: the operator with its inputs.
        inplace: its output is written over an input.
    """
    if node.op in VIEWS:
        return NOTHING
    family, row = ROWS.get(node.op, (UNKNOWN, _UNKNOWN_ROW))
    return evaluate(row, node, family, inplace)
