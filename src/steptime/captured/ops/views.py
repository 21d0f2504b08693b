"""Views, sources, and queries of metadata: operators that compute and move nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops.labels import (
    FIXED,
    Dim,
    Labels,
    OperatorDims,
    Special,
    Terms,
    at_dim,
    fixed,
    labelled,
    numbered,
    right_aligned,
    terms_of,
    unlabelled,
    without,
)
from steptime.captured.ops.maps import by_element
from steptime.captured.ops.operator import Dims, Layouts, Operator, Pieces
from steptime.captured.ops.pieces import shape_of_output
from steptime.captured.ops.placement import P, R, shard
from steptime.captured.ops.work import integers


def looks(node: Node, given: Labels, *out: Labels) -> OperatorDims:
    """Dims of a view of the first input; it is linear."""
    inputs = [given, *(unlabelled(value.type) for value in node.inputs[1:])]
    return OperatorDims(dims=labelled(node, inputs, out), terms=terms_of(node, node.names[:1]))


def regrouped(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of both shapes of a reshape: dims are merged and split within groups of equal product.

    Only the outermost dims of a group are one dim of the operator: a piece of them is a piece of the other shape. A
    piece of an inner dim of a merged group is strided, and is not a plain placement.

    >>> regrouped((2, 3, 8), (6, 2, 4))
    (('d0', '!d1', 'd2'), ('d0', 'd2', '!d2.1'))
    """
    was, now = ["."] * len(old), ["."] * len(new)
    at = to = 0
    while at < len(old) and to < len(new):
        start, begin, left, right = at, to, old[at], new[to]
        at, to = at + 1, to + 1
        while left != right:
            if left < right:
                left, at = left * old[at], at + 1
            else:
                right, to = right * new[to], to + 1
        outer = next((dim for dim in range(start, at) if old[dim] > 1), start)
        first = next((dim for dim in range(begin, to) if new[dim] > 1), begin)
        for dim in range(start, at):
            was[dim] = f"d{dim}" if dim == outer else f"{FIXED}d{dim}"
        for dim in range(begin, to):
            now[dim] = f"d{outer}" if dim == first else f"{FIXED}d{outer}.{dim - first}"
    return tuple(was), tuple(now)


def reshape(node: Node) -> OperatorDims:
    """Dims of a view of the same elements in another shape."""
    old, new = node.inputs[0].type.shape, node.outputs[0].shape
    if math.prod(old) == 0 or math.prod(old) != math.prod(new):
        return looks(node, unlabelled(node.inputs[0].type), unlabelled(node.outputs[0]))
    was, now = regrouped(old, new)
    dims = labelled(node, [was], [now], {name: _shared(was, now, old, new, name) for name in set(was) & set(now)})
    return OperatorDims(dims=dims, terms=terms_of(node, node.names[:1]))


def _shared(was: Labels, now: Labels, old: Sequence[int], new: Sequence[int], name: str) -> Special:
    """Limit on pieces of a label of both shapes: a piece has to be a piece of both outermost dims."""
    sizes = (1, 1) if name == "." else (old[was.index(name)], new[now.index(name)])
    return Special() if sizes[0] == sizes[1] else Special(units=math.gcd(*sizes))


def permuted(node: Node) -> OperatorDims:
    """Dims of transpositions and permutations."""
    rank = node.inputs[0].type.rank
    names = numbered(rank)
    order = [each % rank for each in integers(node, "dims")] if rank else []
    if node.op != "permute":
        a, b = (0, rank - 1) if node.op in ("t", "numpy_T") else (at_dim(node, rank, n) for n in ("dim0", "dim1"))
        order = list(range(rank))
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return looks(node, names, tuple(names[dim] for dim in order))


def same(node: Node) -> OperatorDims:
    """Dims of a view that is the same tensor."""
    names = numbered(node.inputs[0].type.rank)
    return looks(node, names, *(names for _ in node.outputs))


def expanded(node: Node) -> OperatorDims:
    """Dims of a broadcast; a new dim can be created in pieces."""
    names = numbered(node.outputs[0].rank)
    return looks(node, right_aligned(names, node.inputs[0].type), names)


def unsqueezed(node: Node) -> OperatorDims:
    """Dims of `unsqueeze`, which adds a dim of size 1."""
    names = numbered(node.inputs[0].type.rank)
    at = at_dim(node, node.outputs[0].rank)
    return looks(node, names, (*names[:at], ".", *names[at:]))


def part(node: Node) -> OperatorDims:
    """Dims of slices, selections and splits: all but the dim that they cut, unless they keep the whole of it."""
    x = node.inputs[0].type
    at, names = at_dim(node, x.rank), numbered(x.rank)
    if node.outputs and node.outputs[0].rank < x.rank:
        return looks(node, fixed(names, at), *(without(names, at) for _ in node.outputs))
    whole = len(node.outputs) == 1 and node.outputs[0].shape == x.shape
    names = names if whole else fixed(names, at)
    return looks(node, names, *(names for _ in node.outputs))


def part_gradient(node: Node) -> OperatorDims:
    """Dims of the gradient of a slice: zeros around the slice."""
    out = node.outputs[0]
    at = at_dim(node, out.rank)
    names = fixed(numbered(out.rank), at)
    return looks(node, names if node.inputs[0].type.rank == out.rank else without(names, at), names)


def strided(node: Node) -> OperatorDims:
    """Dims of windows or diagonals of the memory: none is known, only linearity."""
    return looks(node, unlabelled(node.inputs[0].type), *map(unlabelled, node.outputs))


def source(node: Node) -> OperatorDims:
    """Dims of a source, which can have any placement."""
    return OperatorDims(dims=labelled(node, [], [numbered(node.outputs[0].rank)]))


def replicated(node: Node) -> OperatorDims:
    """No dims: a query of a whole tensor, or a value that every device needs whole."""
    return OperatorDims(
        dims=labelled(node, [unlabelled(v.type) for v in node.inputs], [unlabelled(t) for t in node.outputs])
    )


def made(node: Node) -> OperatorDims:
    """Dims of a tensor created from numbers, piece by piece; zeros are terms of any sum."""
    dims = [
        Dim(name=f"d{dim}", size=size, kind="batch", inputs=(R,) * len(node.inputs), outputs=(shard(dim),), equal=False)
        for dim, size in enumerate(node.outputs[0].shape)
        if size > 1
    ]
    inputs = tuple(R for _ in node.inputs)
    zeros = node.op in ("zeros", "new_zeros")
    return OperatorDims(
        dims=tuple(dims), terms=(Terms(name="terms of nothing", inputs=inputs, outputs=(P,)),) if zeros else ()
    )


TURNING: Final = ("t", "transpose", "permute", "numpy_T")
"""Views that exchange the dims of a matrix."""
KEEPING: Final = ("detach", "alias", "_to_copy")
"""Views, and the copy, that keep the order of dims in memory."""


def turned(value: Value) -> bool:
    """True if a matrix is the transpose of the one in memory: an odd number of its views exchange its dims."""
    out, node = False, value.node
    while node.op in (*TURNING, *KEEPING) and len(node.outputs[0].shape) == 2:
        out ^= node.op in TURNING
        node = node.inputs[0].node
    return out


def _look(names: str, dims: Dims | None, layouts: Layouts = "view", pieces: Pieces | None = None) -> Operator:
    return Operator(names=names, family="view", dims=dims, layouts=layouts, pieces=pieces, looks=True)


def _free(names: str, dims: Dims | None = None, pieces: Pieces | None = None) -> Operator:
    return Operator(names=names, family="view", dims=dims, pieces=pieces)


_SHAPE = shape_of_output("size", "shape")
LOOKS: Final = (
    _look("view _unsafe_view", reshape, pieces=_SHAPE),
    _look("_reshape_alias squeeze", reshape),
    _look("t transpose permute", permuted),
    _look("detach alias lift_fresh", same),
    _look("expand", expanded, pieces=_SHAPE),
    _look("unsqueeze", unsqueezed),
    _look("slice select split split_with_sizes unbind", part),
    _look("unsafe_split unsafe_split_with_sizes", part, "recorded"),
    _look("as_strided diagonal unfold view_as_real view_as_complex", strided, "recorded"),
)
"""Views: another shape, order or part of the storage of the first input."""
OTHERS: Final = (
    Operator(names="parameter buffer input state constant", family="source", dims=source),
    _free("reshape", reshape, _SHAPE),
    _free("flatten", reshape),
    _free("numpy_T swapaxes", permuted),
    _free("lift", same),
    _free("narrow chunk", part),
    _free("empty new_empty empty_strided new_empty_strided", made, _SHAPE),
    _free("empty_like", by_element),
    _free("_local_scalar_dense item is_same_size _assert_async _assert_tensor_metadata", replicated),
    _free(
        "expand_as view_as movedim mT mH unflatten ravel data resolve_conj as_strided_scatter set resize prim::device"
        " prim::layout prim::dtype sym_size sym_stride sym_numel sym_storage_offset is_pinned empty_permuted"
        " empty_quantized is_contiguous dim size stride result_type profiler::_record_function_enter_new"
        " profiler::_record_function_exit record_stream _assert_scalar sym_constrain_range tensor_split hsplit vsplit"
        " _nested_view_from_buffer unsafe_chunk"
    ),
)
"""Sources, uninitialised storage, and queries."""
