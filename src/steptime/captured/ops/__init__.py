"""The table of operators: a row for each, by family, with its dims, work, kernels and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from steptime.captured.graph import Node, Value
from steptime.captured.ops.convolutions import CONVOLUTIONS, POOLS
from steptime.captured.ops.labels import OperatorDims
from steptime.captured.ops.lists import OPTIMISERS
from steptime.captured.ops.maps import MAPS, RANDOM
from steptime.captured.ops.moves import CHOICES, COPIES, FILLS
from steptime.captured.ops.norms import DROPOUTS, EMBEDDINGS, LOSSES, NORMS, SOFTMAXES
from steptime.captured.ops.operator import Dims, Family, Operator
from steptime.captured.ops.products import ATTENTION, MATRICES, PRODUCTS
from steptime.captured.ops.recurrent import RECURRENT
from steptime.captured.ops.reductions import REDUCTIONS, SCANS
from steptime.captured.ops.transforms import TRANSFORMS
from steptime.captured.ops.views import LOOKS, OTHERS
from steptime.captured.ops.work import OperatorWork
from steptime.errors import UserError
from steptime.registry import Registry

ROWS: Final[Sequence[Operator]] = (
    *PRODUCTS, *ATTENTION, *CONVOLUTIONS, *POOLS, *RECURRENT, *NORMS, *SOFTMAXES, *DROPOUTS, *LOSSES, *EMBEDDINGS,
    *MAPS, *RANDOM, *REDUCTIONS, *SCANS, *COPIES, *FILLS, *CHOICES, *LOOKS, *OTHERS, *OPTIMISERS, *TRANSFORMS,
)  # fmt: skip
"""Rows of all operators; operators that differ in their names alone share a row."""
OPERATORS: Final[dict[str, Operator]] = {name: row for row in ROWS for name in row.names.split()}
"""Operator -> its row."""


def register_operator(row: Operator) -> None:
    """Add the row of a custom operator (``torch.library``), named ``namespace::name``.

    A package can provide rows as objects of the entry point ``steptime.operators``.

    Raises:
        UserError: an operator of PyTorch with this name has a row, or the row is not complete.
    """
    names = row.names.split() if isinstance(row.names, str) else []
    needed = {
        "names are words in one text": bool(names),
        f"family is one of {', '.join(get_args(Family))}": row.family in get_args(Family),
        "work is an OperatorWork; without it an operator costs nothing": isinstance(row.work, OperatorWork),
        "dims is a function of a node": row.dims is None or callable(row.dims),
    }
    wrong = next((what for what, right in needed.items() if not right), "")
    if wrong:
        raise UserError(f"the row of {row.names or 'an operator'!r} is not complete: {wrong}")
    taken = next((name for name in names if OPERATORS.get(name) in ROWS), None)
    if taken is not None:
        raise UserError(f"the operator {taken} has a row already", hint="name a custom operator 'namespace::name'")
    OPERATORS.update(dict.fromkeys(names, row))


for _row in Registry[Operator]("operator", "steptime.operators").values():
    register_operator(_row)

OF_MATRICES: Final = tuple(row.names for row in MATRICES)
"""Names of the products of two matrices, with and without an addend."""
VIEWS: Final = frozenset(name for name, row in OPERATORS.items() if row.looks)
"""Operators whose first output is a view of the storage of their first input."""
FREE: Final = frozenset(name for name, row in OPERATORS.items() if row.work is None)
"""Operators that compute and move nothing: views, sources, and queries of metadata."""


def of_family(*families: Family) -> frozenset[str]:
    """Operators of the given families."""
    return frozenset(name for name, row in OPERATORS.items() if row.family in families)


def labelled_by(dims: Dims) -> frozenset[str]:
    """Operators whose dims the given function labels."""
    return frozenset(name for name, row in OPERATORS.items() if row.dims is dims)


def left_factor(node: Node) -> Value | None:
    """Left factor of a product; None for any other operator."""
    row = OPERATORS.get(node.op)
    return None if row is None or row.factors is None else node.input(row.factors[0])


def addend(node: Node) -> Value | None:
    """Tensor that is added to a product; None without one, and for any other operator."""
    factors = row.factors if (row := OPERATORS.get(node.op)) is not None else None
    given = zip(node.names, node.inputs, strict=True)
    return None if factors is None else next((value for name, value in given if name not in factors), None)


def dims_of(node: Node) -> OperatorDims | None:
    """Dims of a node; None for an operator without labels: every device runs the whole of it.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> nodes = Nodes()
    >>> x, w = (nodes.source("input", n, TensorType(shape, "fp32")) for n, shape in {"x": (8, 4), "w": (4, 6)}.items())
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((8, 6), "fp32")])
    >>> [(dim.name, dim.kind, dim.size) for dim in dims_of(y).dims]
    [('rows', 'batch', 8), ('columns', 'batch', 6), ('inner', 'contracted', 4)]
    """
    row = OPERATORS.get(node.op)
    return None if row is None or row.dims is None else row.dims(node)
