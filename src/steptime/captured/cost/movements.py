"""Operators that move, fill, look up, scatter, sort or pool; and those that only look at memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.cost.work import (
    KernelCall,
    OperatorRow,
    Shape,
    input_type,
    integer,
    integers,
    looped,
    moved,
    stored_bytes,
)
from steptime.captured.graph import Node
from steptime.cost.elementwise import sort_flops, window_flops
from steptime.cost.memory_bound import gather_bytes, passes_bytes, scatter_bytes, streamed_bytes, zero_and_add_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

_VIEWS = """
view _unsafe_view t transpose permute expand expand_as view_as slice select squeeze unsqueeze as_strided split
split_with_sizes chunk unbind diagonal detach alias narrow unfold view_as_real view_as_complex movedim
_reshape_alias lift lift_fresh mT mH swapaxes flatten unflatten ravel numpy_T data resolve_conj as_strided_scatter
set resize prim::device prim::layout prim::dtype sym_size sym_stride sym_numel sym_storage_offset is_pinned
parameter buffer input state constant empty empty_like empty_strided new_empty new_empty_strided empty_permuted
empty_quantized is_contiguous dim size stride result_type profiler::_record_function_enter_new
profiler::_record_function_exit record_stream _assert_async _assert_tensor_metadata _assert_scalar
sym_constrain_range tensor_split hsplit vsplit _nested_view_from_buffer reshape unsafe_split unsafe_chunk
_local_scalar_dense item is_same_size
"""
VIEWS: Final = frozenset(_VIEWS.split())
"""Operators that compute and move nothing: looks at memory that is there, sources, and questions about them."""

DIGITS: Final = {1: 1, 2: 2, 4: 4, 8: 8}
"""Passes of a radix sort by the bytes of a key."""


def _written(s: Shape) -> Num:
    return s["written_bytes"]


def _index_bytes(node: Node, *names: str) -> int:
    return sum(stored_bytes(value.type) for name in names for value in node.inputs_of(name))


def _source(node: Node) -> dict[str, Num]:
    """`copy_` reads its source alone; what it is written over is not read."""
    return {"read_bytes": stored_bytes(input_type(node, "src"))}


def _chosen(node: Node) -> dict[str, Num]:
    return {"index_bytes": _index_bytes(node, "index", "indices", "mask", "self" if node.op == "take" else "")}


def _put(values: str, accumulate: int) -> Callable[[Node], dict[str, Num]]:
    """Sizes of a scatter whose values have that argument name; a scalar value is written once per index."""

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
    """The gradient of a look at a part: zeros, and the part copied in."""
    grad = input_type(node, "grad_output", "grad")
    return {
        "value_bytes": stored_bytes(grad), "index_bytes": 0, "whole_bytes": stored_bytes(node.outputs[0]),
        "accumulate": 0,
    }  # fmt: skip


def _sorted(node: Node) -> dict[str, Num]:
    x = input_type(node, "self")
    width = x.shape[integer(node, "dim", -1)] if x.shape else 1
    rows = x.elements / max(width, 1)
    return {"rows": rows, "width": width, "steps": DIGITS.get(x.element_bytes, 4)}


def _chosen_largest(node: Node) -> dict[str, Num]:
    """Radix selection reads the keys once per digit and writes the chosen."""
    return {**_sorted(node), "passes": 1}


def _largest_bytes(s: Shape) -> Num:
    return s["steps"] * s["read_bytes"] + s["written_bytes"]


def _pooled(node: Node) -> dict[str, Num]:
    window = integers(node, "kernel_size")
    outputs = node.outputs[0].elements if node.outputs else 0
    if not window:  # adaptive: every input element once
        return {"outputs": input_type(node, "self").elements, "taps": 1}
    taps = math.prod(window) if len(window) > 1 else window[0] ** max(node.outputs[0].rank - 2, 1)
    return {"outputs": min(outputs, input_type(node, "self").elements), "taps": taps}


def _pool_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """A loop over the taps for each window; an adaptive one shares the input out over its windows."""
    backward = node.op.endswith("_backward")
    windows = (input_type(node, "grad_output") if backward else node.outputs[0]).elements
    steps = windows * s["taps"] if integers(node, "kernel_size") else input_type(node, "self").elements
    name = "max_pool" if "max" in node.op else "avg_pool"
    return looped(node, s, f"{name}_backward" if backward else name, windows, steps)


_COPY = OperatorRow(moved_bytes=Formula(streamed_bytes), kernels=moved)
_COPY_OVER = OperatorRow(sizes=_source, moved_bytes=Formula(streamed_bytes), kernels=moved)
_FILL = OperatorRow(moved_bytes=_written, kernels=moved)
_CHOOSE = OperatorRow(sizes=_chosen, moved_bytes=Formula(gather_bytes), kernels=moved)
_PART = OperatorRow(sizes=_part, moved_bytes=Formula(zero_and_add_bytes), launches=lambda s: 2.0, kernels=moved)
_SORT = OperatorRow(
    sizes=_sorted, vector_flops=Formula(sort_flops), moved_bytes=Formula(passes_bytes),
    launches=lambda s: 2.0 * s["steps"], kernels=moved,
)  # fmt: skip
_LARGEST = OperatorRow(
    sizes=_chosen_largest, vector_flops=Formula(sort_flops), moved_bytes=_largest_bytes, launches=lambda s: 2.0,
    kernels=moved,
)  # fmt: skip
_POOL = OperatorRow(sizes=_pooled, vector_flops=Formula(window_flops), kernels=_pool_kernels)


def _scatter(values: str, accumulate: int = 0) -> OperatorRow:
    return OperatorRow(sizes=_put(values, accumulate), moved_bytes=Formula(scatter_bytes), kernels=moved)


_POOLS = (
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "avg_pool1d",
    "max_pool3d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "max_pool2d", "mkldnn_max_pool2d",
)  # fmt: skip
_COPIES = (
    "_to_copy", "clone", "contiguous", "cat", "stack", "flip", "roll", "repeat", "constant_pad_nd", "tril", "triu",
    "repeat_interleave", "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "_reshape_copy", "to", "rot90", "diag_embed", "tile",
    "replication_pad2d_backward", "im2col", "col2im", "as_strided_copy", "view_copy", "_pin_memory", "slice_copy",
    "permute_copy", "expand_copy", "transpose_copy", "split_with_sizes_copy", "complex", "bucketize",
    "searchsorted", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "grid_sampler_2d",
    "upsample_bilinear2d_backward", "upsample_bicubic2d", "upsample_bicubic2d_backward", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "upsample_nearest3d_backward", "upsample_trilinear3d", "upsample_linear1d", "nonzero",
    "upsample_nearest1d", "upsample_nearest1d_backward", "grid_sampler_2d_backward", "narrow_copy",
)  # fmt: skip
_FILLS = (
    "fill", "zero", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "arange", "linspace", "eye", "scalar_tensor", "logspace", "tril_indices", "triu_indices",
    "_efficientzerotensor",
)  # fmt: skip
_SCATTERS = ("scatter", "scatter_reduce", "slice_scatter", "select_scatter", "diagonal_scatter")
_PARTS = (
    "slice_backward",
    "select_backward",
    "unfold_backward",
    "diagonal_backward",
    "value_selecting_reduction_backward",
)

TABLE: Final[Mapping[str, OperatorRow]] = {
    **dict.fromkeys(_COPIES, _COPY), **dict.fromkeys(_FILLS, _FILL), "copy": _COPY_OVER,
    **dict.fromkeys(
        ("index", "index_select", "gather", "take", "take_along_dim", "masked_select", "_unsafe_index"), _CHOOSE
    ),
    **dict.fromkeys(_SCATTERS, _scatter("src")),
    "scatter_add": _scatter("src", 1), "index_add": _scatter("source", 1), "index_copy": _scatter("source"),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put", "put"), _scatter("values")),
    "masked_scatter": _scatter("source"), "index_fill": _scatter("value"),
    **dict.fromkeys(_PARTS, _PART),
    "sort": _SORT, "argsort": _SORT, "msort": _SORT, "_unique2": _SORT,
    "topk": _LARGEST, "kthvalue": _LARGEST, "median": _LARGEST,
    **dict.fromkeys(_POOLS, _POOL),
}  # fmt: skip
