"""Operators that copy, fill, concatenate, gather or scatter elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from steptime.captured.graph import Attribute, Node, TensorType
from steptime.captured.ops import processor as here
from steptime.captured.ops.labels import (
    FIXED,
    Dim,
    Exchange,
    Labels,
    OperatorDims,
    Special,
    at_dim,
    by_name,
    fixed,
    labelled,
    numbered,
    right_aligned,
    terms_of,
    unlabelled,
    without,
)
from steptime.captured.ops.maps import Elementwise, by_element
from steptime.captured.ops.operator import Dims, Layouts, Measured, Operator, Pieces
from steptime.captured.ops.pieces import Types, shape_of_output
from steptime.captured.ops.placement import P, R, shard
from steptime.captured.ops.views import (
    expanded,
    looks,
    made,
    part,
    part_gradient,
    permuted,
    replicated,
    reshape,
    strided,
)
from steptime.captured.ops.work import STREAMED, OperatorWork, input_type, integer, integers, moved, stored_bytes
from steptime.cost.memory_bound import gather_bytes, scatter_bytes, zero_and_add_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num


def _index_bytes(node: Node, *names: str) -> int:
    return sum(stored_bytes(value.type) for name in names for value in node.inputs_of(name))


def _source(node: Node) -> dict[str, Num]:
    """Sizes of `copy_`, which reads its source and not its destination."""
    return {"read_bytes": stored_bytes(input_type(node, "src"))}


def _chosen(node: Node) -> dict[str, Num]:
    return {"index_bytes": _index_bytes(node, "index", "indices", "mask", "self" if node.op == "take" else "")}


def _put(values: str, accumulate: int) -> Callable[[Node], dict[str, Num]]:
    """Sizes of a scatter, from the argument name of its values; a scalar value is written once per index."""

    def sizes(node: Node) -> dict[str, Num]:
        given = node.input(values)
        index = next((node.input(name) for name in ("index", "indices", "mask") if node.input(name)), None)
        element = node.outputs[0].element_bytes if node.outputs else 0
        size = given.type.elements if given is not None else index.type.elements if index is not None else 0
        return {
            "value_bytes": size * element,
            "index_bytes": _index_bytes(node, "index", "indices", "mask"),
            "whole_bytes": stored_bytes(node.outputs[0]) if node.outputs else 0,
            "accumulate": max(accumulate, integer(node, "accumulate", 0)),
        }

    return sizes


def _part(node: Node) -> dict[str, Num]:
    """Sizes of the gradient of a slice: zeros with the slice copied in."""
    grad = input_type(node, "grad_output", "grad")
    return {
        "value_bytes": stored_bytes(grad), "index_bytes": 0, "whole_bytes": stored_bytes(node.outputs[0]),
        "accumulate": 0,
    }  # fmt: skip


def joined(node: Node) -> OperatorDims:
    """Dims of `cat` and `stack`; the dim of concatenation, which `stack` adds, is indivisible."""
    out = node.outputs[0]
    at, names = at_dim(node, out.rank), numbered(out.rank)
    inner = without(names, at) if node.op == "stack" else fixed(names, at)
    made = fixed(names, at)
    given = [inner if value.type.rank == len(inner) else unlabelled(value.type) for value in node.inputs]
    return OperatorDims(dims=labelled(node, given, [made]), terms=terms_of(node, ("tensors",)))


def padded(node: Node) -> OperatorDims:
    """Dims of paddings, flips, rolls and repeats: every dim that they leave unchanged."""
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
    """Dims of `tril` and `triu`: the batch dims; which elements of a matrix are kept depends on their position."""
    rank = node.outputs[0].rank
    names = tuple(f"{FIXED}d{dim}" if dim >= rank - 2 else f"d{dim}" for dim in range(rank))
    return looks(node, names, names)


def _indexed(node: Node, values: tuple[int, ...]) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
    """First indexed dim, labels of `self`, and labels of the gathered elements; None if the shapes do not tell."""
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
    """Dims of gathering by index: gathered positions, dims without an index, and masked rows.

    Rows and positions can be split together: an all-to-all then sends gathered elements to the device that needs them.
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
    """The dim that splits rows and gathered positions together, with an all-to-all of the gathered elements."""
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
    """Dims of values written or added at indices: masked rows; values that are added can be terms of a sum."""
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
    """Dims of `gather`: along its dim either the index is split, or the table, with masked rows."""
    x, chosen = node.inputs[0].type, node.inputs_of("index")[0].type
    at = at_dim(node, x.rank)
    names = tuple(f"d{dim}" if x.shape[dim] == chosen.shape[dim] else f"{FIXED}d{dim}" for dim in range(x.rank))
    own = tuple("row" if dim == at else name for dim, name in enumerate(names))
    out = tuple("chosen" if dim == at else name for dim, name in enumerate(names))
    given = [own if name == "self" else out for name in node.names]
    dims = labelled(node, given, [out], {"row": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self",)))


def scattered(node: Node) -> OperatorDims:
    """Dims of `scatter` and `scatter_add`: masked rows; values that are added can be terms of a sum."""
    x, chosen = node.inputs[0].type, node.inputs_of("index")[0].type
    at = at_dim(node, x.rank)
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
    """Dims of `index_select`, `index_add` and `index_copy`: an index along one dim."""
    x = node.inputs[0].type
    at = at_dim(node, x.rank)
    own = tuple("row" if dim == at else f"d{dim}" for dim in range(x.rank))
    chosen = tuple("chosen" if dim == at else f"d{dim}" for dim in range(x.rank))
    given = by_name(node, {"self": own, "source": chosen, "index": ("chosen",)})
    if node.op == "index_select":
        dims = labelled(node, given, [chosen], {"row": Special(masked=True)})
        return OperatorDims(dims=dims, terms=terms_of(node, ("self",)))
    lost = Special(kind="contracted", inputs={0: P}) if node.op == "index_add" else Special(kind="indivisible")
    dims = labelled(node, given, [own], {"row": Special(masked=True), "chosen": lost})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self", "source")) if node.op == "index_add" else ())


def _range(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """Attributes of the first piece of a range; the other pieces start later."""
    start, step = node.attribute("start", 0), node.attribute("step", 1)
    if isinstance(start, (int, float)) and isinstance(step, (int, float)):
        return {"end": start + step * outputs[0].shape[0]}
    return {}


_COPY = OperatorWork(moved_bytes=STREAMED, kernels=moved)
_COPY_OVER = OperatorWork(sizes=_source, moved_bytes=STREAMED, kernels=moved)
_FILL = OperatorWork(moved_bytes=lambda s: s["written_bytes"], kernels=moved)
_CHOOSE = OperatorWork(sizes=_chosen, moved_bytes=Formula(gather_bytes), kernels=moved)
_PART = OperatorWork(sizes=_part, moved_bytes=Formula(zero_and_add_bytes), launches=lambda s: 2.0, kernels=moved)


def _scatter(values: str, accumulate: int = 0) -> OperatorWork:
    return OperatorWork(sizes=_put(values, accumulate), moved_bytes=Formula(scatter_bytes), kernels=moved)


def _row(
    names: str, work: OperatorWork, dims: Dims | None = None, *, layouts: Layouts = "recorded",
    pieces: Pieces | None = None, processor: Measured | None = None,
) -> Operator:  # fmt: skip
    return Operator(
        names=names, family="move", work=work, dims=dims, layouts=layouts, pieces=pieces, processor=processor
    )


_SHAPE, _INPUT = shape_of_output("size", "shape"), shape_of_output("input_sizes")
_SELF: Final = Elementwise("self")
COPIES: Final = (
    Operator(
        names="_to_copy", family="move", work=_COPY, dims=_SELF, layouts="pointwise", processor=here.copied,
        operations=0,
    ),
    _row("clone contiguous", _COPY, _SELF, layouts="copy", processor=here.copied),
    _row("copy", _COPY_OVER, Elementwise("src"), processor=here.copied),
    _row("to bucketize", _COPY, by_element),
    _row("cat", _COPY, joined, layouts="joined", processor=here.joined),
    _row("stack", _COPY, joined, processor=here.joined),
    _row("constant_pad_nd flip roll", _COPY, padded, processor=here.copied),
    _row("repeat", _COPY, padded),
    _row("tril triu", _COPY, triangle),
    _row("diag_embed", _COPY, strided),
    _row("view_copy", _COPY, reshape, pieces=_SHAPE),
    _row("permute_copy transpose_copy", _COPY, permuted),
    _row("expand_copy", _COPY, expanded),
    _row("slice_copy split_with_sizes_copy", _COPY, part),
    _row("nonzero", _COPY, replicated),
    _row(
        "repeat_interleave _reshape_copy rot90 tile as_strided_copy _pin_memory complex searchsorted narrow_copy", _COPY
    ),
)  # fmt: skip
"""Copies."""
FILLS: Final = (
    _row("fill zero zeros_like ones_like full_like", _FILL, by_element),
    _row("zeros ones full new_zeros new_ones new_full", _FILL, made, pieces=_SHAPE),
    _row("arange", _FILL, made, pieces=_range),
    _row("scalar_tensor", _FILL, made),
    _row("linspace eye", _FILL, replicated),
    _row("logspace tril_indices triu_indices _efficientzerotensor", _FILL),
)
"""Tensors made from numbers."""
CHOICES: Final = (
    _row("index _unsafe_index", _CHOOSE, index),
    _row("index_select", _CHOOSE, by_index),
    _row("gather", _CHOOSE, gathered),
    _row("masked_select", _CHOOSE, replicated),
    _row("take take_along_dim", _CHOOSE),
    _row("scatter", _scatter("src"), scattered),
    _row("scatter_add", _scatter("src", 1), scattered),
    _row("scatter_reduce slice_scatter select_scatter diagonal_scatter", _scatter("src")),
    _row("index_add", _scatter("source", 1), by_index),
    _row("index_copy", _scatter("source"), by_index),
    _row("index_put _unsafe_index_put", _scatter("values"), index_put),
    _row("_index_put_impl put", _scatter("values")),
    _row("masked_scatter", _scatter("source")),
    _row("index_fill", _scatter("value")),
    _row("slice_backward select_backward", _PART, part_gradient, pieces=_INPUT),
    _row("unfold_backward diagonal_backward", _PART, strided),
    _row("value_selecting_reduction_backward", _PART),
)
"""Gathers, scatters, and gradients of slices."""
