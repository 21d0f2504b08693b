"""Dims of operators that look at, move, join, choose or make elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from steptime.captured.cost.work import integer, integers
from steptime.captured.graph import Node, TensorType
from steptime.sharding.placement import P, R, shard
from steptime.sharding.rows import (
    FIXED,
    Dim,
    Exchange,
    Labels,
    OperatorDims,
    Special,
    Terms,
    by_name,
    labelled,
    labels,
    numbered,
    right_aligned,
    terms_of,
    unlabelled,
)

Rule = Callable[[Node], OperatorDims]


def _fixed(names: Sequence[str], at: int) -> tuple[str, ...]:
    return tuple(f"{FIXED}{name}" if dim == at else name for dim, name in enumerate(names))


def _without(names: Sequence[str], at: int) -> tuple[str, ...]:
    return tuple(name for dim, name in enumerate(names) if dim != at)


def _dim_of(node: Node, rank: int, name: str = "dim", default: int = 0) -> int:
    return (integers(node, name) or (default,))[0] % max(rank, 1)


def _looks(node: Node, given: Labels, *out: Labels) -> OperatorDims:
    """A look at the first input; it is linear."""
    inputs = [given, *(unlabelled(value.type) for value in node.inputs[1:])]
    return OperatorDims(dims=labelled(node, inputs, out), terms=terms_of(node, node.names[:1]))


def regrouped(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of both shapes of a reshape: dims are joined and split within groups of equal product.

    Of a group only the outermost dims are one dim of the operator: a piece of them is a piece of the other shape. A
    piece of an inner dim of a joined group lies in strides, and is no plain placement.

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
    """View of the same elements in another shape."""
    old, new = node.inputs[0].type.shape, node.outputs[0].shape
    if math.prod(old) == 0 or math.prod(old) != math.prod(new):
        return _looks(node, unlabelled(node.inputs[0].type), unlabelled(node.outputs[0]))
    was, now = regrouped(old, new)
    dims = labelled(
        node, [was], [now], {name: Special(units=_shared(was, now, old, new, name)) for name in set(was) & set(now)}
    )
    return OperatorDims(dims=dims, terms=terms_of(node, node.names[:1]))


def _shared(was: Labels, now: Labels, old: Sequence[int], new: Sequence[int], name: str) -> int:
    """A piece has to be a piece of both outermost dims."""
    return math.gcd(old[was.index(name)], new[now.index(name)]) if name != "." else 1


def permuted(node: Node) -> OperatorDims:
    """Dims in another order."""
    rank = node.inputs[0].type.rank
    names = numbered(rank)
    order = [each % rank for each in integers(node, "dims")] if rank else []
    if node.op != "permute":
        a, b = (0, rank - 1) if node.op in ("t", "numpy_T") else (_dim_of(node, rank, n) for n in ("dim0", "dim1"))
        order = list(range(rank))
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return _looks(node, names, tuple(names[dim] for dim in order))


def same(node: Node) -> OperatorDims:
    """The same tensor again."""
    names = numbered(node.inputs[0].type.rank)
    return _looks(node, names, *(names for _ in node.outputs))


def expanded(node: Node) -> OperatorDims:
    """Broadcast: a new dim is made in pieces."""
    names = numbered(node.outputs[0].rank)
    return _looks(node, right_aligned(names, node.inputs[0].type), names)


def unsqueezed(node: Node) -> OperatorDims:
    """A new dim of one."""
    names = numbered(node.inputs[0].type.rank)
    at = _dim_of(node, node.outputs[0].rank)
    return _looks(node, names, (*names[:at], ".", *names[at:]))


def part(node: Node) -> OperatorDims:
    """Slices, selections and splits: anything but the dim that they cut, unless they keep all of it."""
    x = node.inputs[0].type
    at, names = _dim_of(node, x.rank), numbered(x.rank)
    if node.outputs and node.outputs[0].rank < x.rank:
        return _looks(node, _fixed(names, at), *(_without(names, at) for _ in node.outputs))
    whole = len(node.outputs) == 1 and node.outputs[0].shape == x.shape
    names = names if whole else _fixed(names, at)
    return _looks(node, names, *(names for _ in node.outputs))


def part_gradient(node: Node) -> OperatorDims:
    """Zeros with a part in them."""
    out = node.outputs[0]
    at = _dim_of(node, out.rank)
    names = _fixed(numbered(out.rank), at)
    return _looks(node, names if node.inputs[0].type.rank == out.rank else _without(names, at), names)


def strided(node: Node) -> OperatorDims:
    """Windows or diagonals of the memory: nothing is known of the dims, so only terms pass."""
    return _looks(node, unlabelled(node.inputs[0].type), *map(unlabelled, node.outputs))


def joined(node: Node) -> OperatorDims:
    """Members lie one after another along a dim; `stack` makes the dim. Empty members have no part in it."""
    out = node.outputs[0]
    at, names = _dim_of(node, out.rank), numbered(out.rank)
    inner = _without(names, at) if node.op == "stack" else _fixed(names, at)
    made = _fixed(names, at)
    given = [inner if value.type.rank == len(inner) else unlabelled(value.type) for value in node.inputs]
    return OperatorDims(dims=labelled(node, given, [made]), terms=terms_of(node, ("tensors",)))


def padded(node: Node) -> OperatorDims:
    """Dims that are not padded, turned or repeated."""
    x, out = node.inputs[0].type, node.outputs[0]
    turned = {each % max(x.rank, 1) for each in integers(node, "dims")} if node.op in ("flip", "roll") else set()
    if node.op == "roll" and not turned:
        turned = set(range(x.rank))
    names = [
        f"{FIXED}d{dim}"
        if (dim >= out.rank - x.rank and x.shape[dim - out.rank + x.rank] != out.shape[dim]) or dim in turned
        else f"d{dim}"
        for dim in range(out.rank)
    ]
    given = [right_aligned(names, value.type) for value in node.inputs]
    if node.op == "constant_pad_nd" and node.attribute("value") not in (None, 0, 0.0):
        return OperatorDims(dims=labelled(node, given, [names]))
    return OperatorDims(dims=labelled(node, given, [names]), terms=terms_of(node, node.names[:1]))


def triangle(node: Node) -> OperatorDims:
    """Matrices are apart; which elements of one are kept depends on their place."""
    rank = node.outputs[0].rank
    names = tuple(f"{FIXED}d{dim}" if dim >= rank - 2 else f"d{dim}" for dim in range(rank))
    return _looks(node, names, names)


def made(node: Node) -> OperatorDims:
    """Made from numbers alone, in pieces; zeros are terms of any sum."""
    dims = [
        Dim(name=f"d{dim}", size=size, kind="batch", inputs=tuple(R for _ in node.inputs), outputs=(shard(dim),))
        for dim, size in enumerate(node.outputs[0].shape)
        if size > 1
    ]
    inputs = tuple(R for _ in node.inputs)
    zeros = node.op in ("zeros", "new_zeros")
    return OperatorDims(
        dims=tuple(dims), terms=(Terms(name="terms of nothing", inputs=inputs, outputs=(P,)),) if zeros else ()
    )


def embedding(node: Node) -> OperatorDims:
    """Rows of a table by index: tokens, width, and rows, of which each device looks up its own."""
    rank = node.inputs_of("indices")[0].type.rank
    tokens = tuple(f"tokens{dim}" for dim in range(rank))
    given = by_name(node, {"weight": labels("rows width"), "indices": tokens})
    dims = labelled(node, given, [(*tokens, "width")], {"rows": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("weight",)))


def embedding_gradient(node: Node) -> OperatorDims:
    """Gradients of tokens added up by row."""
    rank = node.inputs_of("indices")[0].type.rank
    tokens = tuple(f"tokens{dim}" for dim in range(rank))
    given = by_name(node, {"grad_output": (*tokens, "width"), "indices": tokens})
    dims = labelled(node, given, [labels("rows width")], {"rows": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)))


def _indexed(node: Node, values: tuple[int, ...]) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
    """Where the indexed dims begin, labels of `self`, and labels of the chosen; None where shapes do not tell."""
    x = node.inputs[0].type
    given = [value.type for value in node.inputs_of("indices")]
    if any(type.dtype == "bool" for type in given) or not given:
        return None
    rank = max(type.rank for type in given)
    chosen = tuple(max(t.shape[d - rank + t.rank] for t in given if d >= rank - t.rank) for d in range(rank))
    names = numbered(x.rank)
    for at in range(x.rank - len(given) + 1):
        if x.shape[:at] + chosen + x.shape[at + len(given) :] == values:
            own = tuple(f"row{dim}" if at <= dim < at + len(given) else name for dim, name in enumerate(names))
            return at, own, (*names[:at], *(f"chosen{dim}" for dim in range(rank)), *names[at + len(given) :])
    return None


def index(node: Node) -> OperatorDims:
    """Elements by index: what is chosen, what is not indexed, and the rows of which each device has its own.

    Rows and choices can be split together: what is chosen then travels to who asked for it.
    """
    found = _indexed(node, node.outputs[0].shape)
    if found is None:
        return strided(node)
    at, own, out = found
    indices = tuple(name for name in out if name.startswith("chosen"))
    given = [own] + [right_aligned(indices, value.type) for value in node.inputs[1:]]
    one = len(node.inputs) == 2
    rows = {name: Special(masked=True, kind=None if one else "indivisible") for name in own if name.startswith("row")}
    dims = labelled(node, given, [out], rows)
    if one and indices:
        dims = (*dims, *_dispatched(node, at, out, node.outputs[0]))
    return OperatorDims(dims=dims, terms=terms_of(node, ("self",)))


def _dispatched(node: Node, at: int, names: Labels, moved: TensorType) -> tuple[Dim, ...]:
    """Rows and their choices both in pieces, first dims to first dims; all-to-all of what is chosen."""
    inputs = tuple(
        shard(at) if name in ("self", "values") else shard(0) if value.type.rank else R
        for name, value in zip(node.names, node.inputs, strict=True)
    )
    size = min(node.inputs[0].type.shape[at], moved.shape[at])
    if size < 2:
        return ()
    across = tuple(name for name in names if not name.startswith("chosen"))
    exchange = Exchange(collective="all_to_all", size_bytes=moved.size_bytes, across=across)
    return (
        Dim(name="dispatched", size=size, kind="exchanged", inputs=inputs, outputs=(shard(at),), exchange=exchange),
    )


def index_put(node: Node) -> OperatorDims:
    """Values put or added at indices: rows of which each device writes its own, and, added, terms by value."""
    x = node.inputs[0].type
    values = next((v.type for v in node.inputs_of("values")), None)
    found = _indexed(node, values.shape) if values is not None else None
    if found is None:
        return strided(node) if values is None else OperatorDims(dims=())
    at, own, out = found
    indices = tuple(name for name in out if name.startswith("chosen"))
    table: dict[str, Labels] = {"self": own, "values": out}
    given = [
        right_aligned(indices, v.type) if name == "indices" else table[name]
        for name, v in zip(node.names, node.inputs, strict=True)
    ]
    added, one = bool(integer(node, "accumulate", 0)), node.names.count("indices") == 1
    special = {
        name: Special(masked=True, kind="batch" if one else "indivisible") for name in own if name.startswith("row")
    }
    lost = Special(kind="contracted", inputs={0: P}) if added else Special(kind="indivisible")
    special |= dict.fromkeys(indices, lost)
    dims = labelled(node, given, [own], special)
    if one and indices and x.rank:
        dims = (*dims, *_dispatched(node, at, out, values or x))
    return OperatorDims(dims=dims, terms=terms_of(node, ("self", "values")))


def gathered(node: Node) -> OperatorDims:
    """`gather`: along its dim the index alone is split, or the table, of which each device has its own."""
    x, chosen = node.inputs[0].type, node.inputs_of("index")[0].type
    at = _dim_of(node, x.rank)
    names = tuple(f"d{dim}" if x.shape[dim] == chosen.shape[dim] else f"{FIXED}d{dim}" for dim in range(x.rank))
    own = tuple("row" if dim == at else name for dim, name in enumerate(names))
    out = tuple("chosen" if dim == at else name for dim, name in enumerate(names))
    given = [own if name == "self" else out for name in node.names]
    dims = labelled(node, given, [out], {"row": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self",)))


def scattered(node: Node) -> OperatorDims:
    """`scatter` and `scatter_add`: rows are apart; added, the values can be terms."""
    x, chosen = node.inputs[0].type, node.inputs_of("index")[0].type
    at = _dim_of(node, x.rank)
    src = node.inputs_of("src")
    fits = [
        x.shape[dim] == chosen.shape[dim] and all(v.type.shape[dim] == x.shape[dim] for v in src)
        for dim in range(x.rank)
    ]
    names = tuple(f"d{dim}" if fits[dim] else f"{FIXED}d{dim}" for dim in range(x.rank))
    own = tuple("row" if dim == at else name for dim, name in enumerate(names))
    out = tuple("chosen" if dim == at else name for dim, name in enumerate(names))
    given = [own if name == "self" else out for name in node.names]
    added = node.op == "scatter_add"
    lost = Special(kind="contracted", inputs={0: P}) if added else Special(kind="indivisible")
    dims = labelled(node, given, [own], {"row": Special(masked=True), "chosen": lost})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self", "src")) if src else ())


def by_index(node: Node) -> OperatorDims:
    """`index_select` and `index_add`: like an index along one dim."""
    x = node.inputs[0].type
    at = _dim_of(node, x.rank)
    own = tuple("row" if dim == at else f"d{dim}" for dim in range(x.rank))
    chosen = tuple("chosen" if dim == at else f"d{dim}" for dim in range(x.rank))
    given = by_name(node, {"self": own, "source": chosen, "index": ("chosen",)})
    if node.op == "index_select":
        dims = labelled(node, given, [chosen], {"row": Special(masked=True)})
        return OperatorDims(dims=dims, terms=terms_of(node, ("self",)))
    lost = Special(kind="contracted", inputs={0: P}) if node.op == "index_add" else Special(kind="indivisible")
    dims = labelled(node, given, [own], {"row": Special(masked=True), "chosen": lost})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self", "source")) if node.op == "index_add" else ())


def spatial(node: Node) -> OperatorDims:
    """Pooling and resizing: images and channels are apart; windows that do not overlap split the pixels too."""
    x = node.inputs[0].type
    wide = next((v.type for name, v in zip(node.names, node.inputs, strict=True) if name == "self"), x)
    rank = node.outputs[0].rank
    first = rank - (3 if "3d" in node.op else 1 if "1d" in node.op else 2)
    small = x if node.op.endswith("_backward") else node.outputs[0]
    names = [f"d{dim}" if dim < first else f"space{dim}" for dim in range(rank)]
    halos = {f"space{dim}": _pooled(node, wide, small, dim, first) for dim in range(first, rank)}
    given = [names if v.type.rank == rank else unlabelled(v.type) for v in node.inputs]
    out = [names for _ in node.outputs]
    linear = () if "max" in node.op and not node.op.endswith("_backward") else terms_of(node, node.names[:1])
    return OperatorDims(dims=labelled(node, given, out, halos), terms=linear)


def _pooled(node: Node, wide: TensorType, small: TensorType, dim: int, first: int) -> Special:
    kernel, n = integers(node, "kernel_size"), dim - first
    stride = integers(node, "stride") or kernel
    pads, spread = integers(node, "padding") or (0,), integers(node, "dilation") or (1,)
    if not kernel or ("max" in node.op and len(node.names) > 1 and node.op.endswith("_backward")) or wide.rank <= dim:
        return Special(kind="indivisible")
    size, step, pad, apart = (each[n] if n < len(each) else each[-1] for each in (kernel, stride, pads, spread))
    if wide.shape[dim] != small.shape[dim] * step or "max" in node.op:
        return Special(kind="indivisible")
    rows = pad + max(apart * (size - 1) + 1 - step - pad, 0)
    if not rows:
        return Special(units=small.shape[dim])
    row = wide.elements // wide.shape[dim] * wide.element_bytes * rows
    return Special(
        kind="halo",
        units=small.shape[dim],
        exchange=Exchange(collective="halo", size_bytes=row, across=tuple(f"d{each}" for each in range(first))),
    )


def counted(node: Node) -> OperatorDims:
    """Counts by value: each device counts its own elements."""
    names = numbered(node.inputs[0].type.rank)
    fixed = integer(node, "max", 0) > integer(node, "min", 0) or node.op == "bincount"
    special = {name: Special(kind=None if fixed else "indivisible") for name in names}
    given = [names, *(unlabelled(v.type) for v in node.inputs[1:])]
    return OperatorDims(dims=labelled(node, given, [(f"{FIXED}bins",)], special))


def source(node: Node) -> OperatorDims:
    """What comes from outside lies as it is asked for."""
    return OperatorDims(dims=labelled(node, [], [numbered(node.outputs[0].rank)]))


def replicated(node: Node) -> OperatorDims:
    """A question about a whole tensor, or a value that every device needs whole."""
    return OperatorDims(
        dims=labelled(node, [unlabelled(v.type) for v in node.inputs], [unlabelled(t) for t in node.outputs])
    )


_POOLS = [
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool2d_backward",
    "avg_pool3d",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward",
    "upsample_nearest2d",
    "upsample_nearest2d_backward",
    "upsample_bilinear2d",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d",
    "upsample_bicubic2d_backward",
    "_upsample_nearest_exact2d",
    "upsample_nearest1d",
    "upsample_nearest1d_backward",
    "upsample_linear1d",
    "upsample_nearest3d",
    "upsample_nearest3d_backward",
    "upsample_trilinear3d",
    "reflection_pad2d",
    "reflection_pad2d_backward",
    "replication_pad2d",
    "replication_pad2d_backward",
    "max_pool3d_with_indices_backward",
]
VIEWS_AND_MOVES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "squeeze", "flatten"], reshape),
    **dict.fromkeys(["t", "transpose", "permute", "numpy_T", "swapaxes"], permuted),
    **dict.fromkeys(("detach", "alias", "lift_fresh", "lift"), same),
    "expand": expanded,
    "unsqueeze": unsqueezed,
    **dict.fromkeys(
        ["slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk", "unsafe_split"], part
    ),
    **dict.fromkeys(("slice_backward", "select_backward"), part_gradient),
    **dict.fromkeys(
        [
            "as_strided",
            "diagonal",
            "unfold",
            "view_as_real",
            "view_as_complex",
            "diagonal_backward",
            "unfold_backward",
            "diag_embed",
        ],
        strided,
    ),
    **dict.fromkeys(("cat", "stack"), joined),
    **dict.fromkeys(("constant_pad_nd", "flip", "roll", "repeat"), padded),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(
        [
            "zeros",
            "ones",
            "full",
            "new_zeros",
            "new_ones",
            "new_full",
            "empty",
            "new_empty",
            "empty_strided",
            "new_empty_strided",
            "rand",
            "randn",
            "randint",
            "arange",
            "scalar_tensor",
        ],
        made,
    ),
    "embedding": embedding,
    "embedding_dense_backward": embedding_gradient,
    **dict.fromkeys(("index", "_unsafe_index"), index),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), index_put),
    "gather": gathered,
    **dict.fromkeys(("scatter", "scatter_add"), scattered),
    **dict.fromkeys(("index_select", "index_add", "index_copy"), by_index),
    **dict.fromkeys(_POOLS, spatial),
    **dict.fromkeys(("histc", "bincount"), counted),
    **dict.fromkeys(["parameter", "buffer", "input", "state", "constant"], source),
    **dict.fromkeys(
        [
            "_local_scalar_dense",
            "item",
            "linspace",
            "eye",
            "is_same_size",
            "_assert_async",
            "nonzero",
            "_assert_tensor_metadata",
            "masked_select",
            "equal",
        ],
        replicated,
    ),
}
