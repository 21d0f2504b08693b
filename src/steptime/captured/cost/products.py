"""Products of matrices: plain, batched, scaled, grouped, of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.cost.work import OperatorRow, as_operator, input_type
from steptime.captured.cut.layouts import turned
from steptime.captured.graph import Node
from steptime.cost.matmul import matmul_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

#: Arguments that are the operand on the left of a product; ``self`` is the bias where there is a ``mat1``.
LEFT: Final = ("mat1", "self")

Sizes = Callable[[Node], Mapping[str, Num]]


def _product(left: str, right: str) -> Sizes:
    """``left`` is m x k, ``right`` k x n; leading dims of ``left`` that are not those of a batch are rows."""

    def sizes(node: Node) -> dict[str, Num]:
        a, b = _shape(node, left), _shape(node, right)
        return {
            "m": math.prod(a[:-1]), "n": b[-1] if len(b) > 1 else 1, "k": a[-1], "accumulate": 1,
            "turned": float(left_turned(node)),
        }  # fmt: skip

    return sizes


def _batched(left: str, right: str) -> Sizes:
    def sizes(node: Node) -> dict[str, Num]:
        a, b = _shape(node, left), _shape(node, right)
        return {"m": a[0] * a[1], "n": b[2], "k": a[2], "groups": a[0], "accumulate": 1}

    return sizes


def _linear(weight: str) -> Sizes:
    """``weight`` is n x k."""

    def sizes(node: Node) -> dict[str, Num]:
        a, w = _shape(node, "self", "input"), _shape(node, weight)
        return {"m": math.prod(a[:-1]), "n": w[0], "k": w[1], "accumulate": 1}

    return sizes


def _grouped(node: Node) -> dict[str, Num]:
    """Rows of one operand, or of both, are split among the groups by offsets."""
    a, b = _shape(node, "self"), _shape(node, "mat2")
    groups = b[0] if len(b) == 3 else a[0] if len(a) == 3 else _shape(node, "offs")[0]
    if len(a) == 2 and len(b) == 2:  # split along k: one result per group
        return {"m": a[0] * groups, "n": b[-1], "k": a[1] / groups, "groups": groups, "accumulate": 1}
    rows = a[0] if len(a) == 2 else a[0] * a[1]
    columns = b[-1] if len(b) == 3 else b[-1] / groups
    return {"m": rows, "n": columns, "k": a[-1], "groups": groups, "accumulate": 1}


def _listed(node: Node) -> dict[str, Num]:
    """Products of lists, each with its own dims."""
    pairs = zip(node.inputs_of("self"), node.inputs_of("mat2"), strict=True)
    sizes = [(a.type.shape, b.type.shape) for a, b in pairs]
    return {"listed_flops": sum(matmul_flops(a[0], b[1], a[1], 1) for a, b in sizes), "listed": len(sizes)}


def _inner(node: Node) -> dict[str, Num]:
    return {"m": 1, "n": 1, "k": node.inputs[0].type.elements, "accumulate": 1}


def _outer(node: Node) -> dict[str, Num]:
    return {"m": _shape(node, "vec1", "self")[0], "n": _shape(node, "vec2")[0], "k": 1, "accumulate": 1}


def left_turned(node: Node) -> bool:
    """Whether an operand on the left of a product is the transpose of what lies in memory."""
    left = next((value for name in LEFT if (value := node.input(name)) is not None), None)
    return left is not None and turned(left)


def _shape(node: Node, *names: str) -> tuple[int, ...]:
    return input_type(node, *names).shape


def _row(sizes: Sizes, operator: str = "matmul") -> OperatorRow:
    return OperatorRow(sizes=sizes, matrix_flops=Formula(matmul_flops), kernels=as_operator(operator))


_PLAIN = _row(_product("self", "mat2"))
_ADDED = _row(_product("mat1", "mat2"))

TABLE: Final[Mapping[str, OperatorRow]] = {
    "mm": _PLAIN, "_scaled_mm": _PLAIN, "_int_mm": _PLAIN, "matmul": _PLAIN,
    "addmm": _ADDED, "_addmm_activation": _ADDED,
    "bmm": _row(_batched("self", "mat2"), "grouped_matmul"),
    "baddbmm": _row(_batched("batch1", "batch2"), "grouped_matmul"),
    "addbmm": _row(_batched("batch1", "batch2"), "grouped_matmul"),
    "linear": _row(_linear("weight")), "mkldnn_linear": _row(_linear("weight")),
    "mkldnn::_linear_pointwise": _row(_linear("weight")),
    "mv": _row(_product("self", "vec")), "addmv": _row(_product("mat", "vec")),
    "dot": _row(_inner), "vdot": _row(_inner), "addr": _row(_outer), "outer": _row(_outer),
    "_foreach_mm": OperatorRow(
        sizes=_listed, matrix_flops=lambda s: s["listed_flops"], launches=lambda s: s["listed"],
        kernels=lambda node, s: (),
    ),
    "_grouped_mm": _row(_grouped, "grouped_matmul"), "_scaled_grouped_mm": _row(_grouped, "grouped_matmul"),
}  # fmt: skip
