"""Reductions, scans, sorts and selections along dims."""

from __future__ import annotations

from typing import Final

from steptime.captured.graph import FLOATS, Node
from steptime.captured.ops import processor
from steptime.captured.ops.labels import (
    FIXED,
    Exchange,
    Labels,
    OperatorDims,
    Special,
    at_dim,
    labelled,
    numbered,
    terms_of,
    unlabelled,
)
from steptime.captured.ops.maps import GRADIENTS, per_element
from steptime.captured.ops.operator import Dims, Layouts, Measured, Operator
from steptime.captured.ops.placement import Placement, Reduction, partial
from steptime.captured.ops.views import replicated
from steptime.captured.ops.work import OperatorWork, Shape, input_type, integer, integers, moved
from steptime.cost.elementwise import pointwise_flops, sort_flops
from steptime.cost.memory_bound import passes_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num


def _over(node: Node) -> tuple[int, ...]:
    rank = node.inputs[0].type.rank
    return (
        tuple(each % rank for each in integers(node, "dim")) if rank and integers(node, "dim") else tuple(range(rank))
    )


def _reduction(how: Reduction | None = None, *, exchanged: bool = False, linear: bool = False) -> Dims:
    """Dims of a reduction: kept dims are independent; over a reduced dim each device has a term or exchanges numbers.

    Args:
        how: the reduction that combines the terms of devices; None: terms cannot be combined.
        exchanged: one all-reduce of numbers per row inside the operator finishes it.
        linear: it is a sum or a mean.
    """

    def rule(node: Node) -> OperatorDims:
        x, over = node.inputs[0].type, _over(node)
        names = numbered(x.rank)
        kept = [name for dim, name in enumerate(names) if dim not in over]
        outputs: list[Labels] = [
            tuple("." if dim in over else name for dim, name in enumerate(names))
            if type.rank == x.rank and x.rank
            else tuple(kept)
            if type.rank == len(kept)
            else unlabelled(type)
            for type in node.outputs
        ]
        special = {names[dim]: _reduced(node, kept, how, exchanged) for dim in over}
        given = [names, *(unlabelled(value.type) for value in node.inputs[1:])]
        terms = terms_of(node, ("self",)) if linear and x.dtype in FLOATS else ()
        return OperatorDims(dims=labelled(node, given, outputs, special), terms=terms)

    return rule


def _reduced(node: Node, kept: list[str], how: Reduction | None, exchanged: bool) -> Special:
    if how is not None and len(node.outputs) == 1:
        outputs: dict[int, Placement] = {0: partial(how)}
        return Special(kind="contracted" if how == "sum" else "reduced", outputs=outputs)
    if not exchanged:
        return Special(kind="indivisible")
    size = sum(type.size_bytes for type in node.outputs)
    return Special(kind="exchanged", exchange=Exchange(collective="all_reduce", size_bytes=size, across=tuple(kept)))


def along(*arguments: str) -> Dims:
    """Dims of scans, sorts and selections: all but the dim along which they run."""

    def rule(node: Node) -> OperatorDims:
        rank = node.inputs[0].type.rank
        at = at_dim(node, rank, default=-1)
        names = tuple(f"{FIXED}{name}" if dim == at else name for dim, name in enumerate(numbered(rank)))
        given = [names if value.type.rank == rank else unlabelled(value.type) for value in node.inputs]
        out = [
            names if type.rank == rank else tuple(name for name in names if not name.startswith(FIXED))
            for type in node.outputs
        ]
        return OperatorDims(dims=labelled(node, given, out), terms=terms_of(node, *((name,) for name in arguments)))

    return rule


def counted(node: Node) -> OperatorDims:
    """Dims of counts by value: each device counts its own elements."""
    names = numbered(node.inputs[0].type.rank)
    fixed = integer(node, "max", 0) > integer(node, "min", 0) or node.op == "bincount"
    special = {name: Special(kind=None if fixed else "indivisible") for name in names}
    given = [names, *(unlabelled(v.type) for v in node.inputs[1:])]
    return OperatorDims(dims=labelled(node, given, [(f"{FIXED}bins",)], special))


def _inputs(operations: int) -> OperatorWork:
    def sizes(node: Node) -> dict[str, Num]:
        return {"operations": operations, "elements": max((v.type.elements for v in node.inputs), default=0)}

    return OperatorWork(sizes=sizes, vector_flops=Formula(pointwise_flops), kernels=moved)


DIGITS: Final = {1: 1, 2: 2, 4: 4, 8: 8}
"""Bytes of a key -> passes of a radix sort."""


def _sorted(node: Node) -> dict[str, Num]:
    x = input_type(node, "self")
    width = x.shape[integer(node, "dim", -1)] if x.shape else 1
    rows = x.elements / max(width, 1)
    return {"rows": rows, "width": width, "steps": DIGITS.get(x.element_bytes, 4)}


def _chosen_largest(node: Node) -> dict[str, Num]:
    """Sizes of a radix selection, which reads the keys once per digit and writes the selected ones."""
    return {**_sorted(node), "passes": 1}


def _largest_bytes(s: Shape) -> Num:
    return s["steps"] * s["read_bytes"] + s["written_bytes"]


_SORT = OperatorWork(
    sizes=_sorted, vector_flops=Formula(sort_flops), moved_bytes=Formula(passes_bytes),
    launches=lambda s: 2.0 * s["steps"], kernels=moved,
)  # fmt: skip
_LARGEST = OperatorWork(
    sizes=_chosen_largest, vector_flops=Formula(sort_flops), moved_bytes=_largest_bytes, launches=lambda s: 2.0,
    kernels=moved,
)  # fmt: skip


def _row(
    names: str, operations: int, dims: Dims | None = None, *, layouts: Layouts = "recorded",
    processor: Measured | None = None,
) -> Operator:  # fmt: skip
    """A reduction by its vector operations per element of the input."""
    return Operator(
        names=names, family="map", work=_inputs(operations), dims=dims, layouts=layouts, processor=processor
    )


_SUM, _MEAN, _MAX = map(processor.reduced, ("sum", "mean", "max"))
_PER_ROW: Final = _reduction(exchanged=True)
REDUCTIONS: Final = (
    _row("any", 0, _reduction("max"), layouts="reduction"),
    _row("all", 0, _reduction("min"), layouts="reduction"),
    _row("count_nonzero", 0, _reduction("sum")),
    _row("equal", 0, replicated),
    _row("_is_all_true _is_any_true", 0),
    _row("sum", 1, _reduction("sum", linear=True), layouts="reduction", processor=_SUM),
    _row("nansum", 1, _reduction("sum")),
    _row("mean", 1, _reduction("avg", linear=True), layouts="reduction", processor=_MEAN),
    _row("amax max", 1, _reduction("max"), layouts="reduction", processor=_MAX),
    _row("amin min", 1, _reduction("min"), layouts="reduction", processor=_MAX),
    _row("prod", 1, _reduction("product"), layouts="reduction", processor=_SUM),
    _row("argmax argmin", 1, along(), layouts="reduction", processor=_MAX),
    _row("trace aminmax diff sum_to_size nanmean", 1),
    _row("norm linalg_vector_norm std var", 3, _PER_ROW, layouts="reduction"),
    _row("var_mean std_mean", 3, _PER_ROW),
    _row("logsumexp", 5, _PER_ROW),
    _row("_linalg_svd dist _weight_norm_interface _weight_norm_interface_backward", 3),
    _row("renorm cdist _cdist_forward _cdist_backward", 5),
)
"""Reductions."""
SCANS: Final = (
    _row("cumsum", 1, along("self")),
    _row("cumprod cummax cummin logcumsumexp _cummax_helper", 1, along()),
    _row("bincount histc", 1, counted),
    Operator(names="sort argsort msort", family="move", work=_SORT, dims=along()),
    Operator(names="_unique2", family="move", work=_SORT),
    Operator(names="topk kthvalue median", family="move", work=_LARGEST, dims=along()),
    Operator(names="glu", family="map", work=per_element(2), dims=along(*GRADIENTS), layouts="pointwise"),
    Operator(names="glu_backward", family="map", work=per_element(8), dims=along(*GRADIENTS), layouts="pointwise"),
)
"""Scans, sorts, counts, and gated linear units."""
