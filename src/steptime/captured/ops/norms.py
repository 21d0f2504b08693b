"""Operators along rows: norms, softmax, losses, dropout, embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.graph import Attribute, Node
from steptime.captured.ops import processor
from steptime.captured.ops.labels import (
    Exchange,
    Labels,
    OperatorDims,
    Special,
    at_dim,
    by_name,
    labelled,
    labels,
    numbered,
    right_aligned,
    terms_of,
    unlabelled,
)
from steptime.captured.ops.maps import by_element, drawn
from steptime.captured.ops.operator import Dims, Layouts, Measured, Operator, Pieces
from steptime.captured.ops.pieces import Types
from steptime.captured.ops.placement import P, Placement, R, Reduction, partial
from steptime.captured.ops.work import (
    KernelCall,
    Kernels,
    OperatorWork,
    Shape,
    as_operator,
    input_type,
    integer,
    integers,
    looped,
    moved,
    stored_bytes,
)
from steptime.cost import elementwise as formulas
from steptime.cost.attention import softmax_backward_flops, softmax_flops
from steptime.cost.elementwise import pointwise_flops
from steptime.cost.memory_bound import labelled_bytes, streamed_bytes, zero_and_add_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num


def _layer_sizes(node: Node) -> dict[str, Num]:
    x = input_type(node, "input")
    width = math.prod(integers(node, "normalized_shape")) or x.shape[-1]
    return {"elements": x.elements, "rows": x.elements / width, "width": width, "element_bytes": x.element_bytes}


def _group_sizes(node: Node) -> dict[str, Num]:
    """Sizes of a group norm; a row has one mean: the channels of a group with all their pixels."""
    x = input_type(node, "input", "X")
    rows = integer(node, "N", x.shape[0]) * integer(node, "group", integer(node, "num_groups", 1))
    return {
        "elements": x.elements, "rows": rows, "width": integer(node, "C", x.shape[1]), "element_bytes": x.element_bytes
    }  # fmt: skip


def _batch_sizes(node: Node) -> dict[str, Num]:
    x = input_type(node, "input", "self")
    training = integer(node, "training", integer(node, "train", 1))
    return {
        "elements": x.elements, "channels": x.shape[1], "element_bytes": x.element_bytes, "training": training,
        "rows": x.shape[1], "width": x.elements / x.shape[1],
    }  # fmt: skip


def _batch_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """A loop for each channel of each image, if the statistics come from the batch and images have pixels."""
    planes = math.prod(input_type(node, "input", "self").shape[:2])
    own = s["training"] and not node.op.endswith(("no_training", "no_update")) and s["elements"] > planes
    name = "batch_norm_backward" if node.op.endswith("_backward") else "batch_norm"
    return looped(node, s, name, planes, s["elements"]) if own else moved(node, s)


def _softmax_sizes(node: Node) -> dict[str, Num]:
    x = input_type(node, "self", "grad_output")
    dim = integer(node, "dim", -1)
    width = x.shape[dim] if x.shape else 1
    return {"elements": x.elements, "rows": x.elements / max(width, 1), "pairs": x.elements, "width": width}


def _dropout_sizes(node: Node) -> dict[str, Num]:
    x = input_type(node, "input", "self", "grad_output")
    return {"elements": x.elements, "element_bytes": x.element_bytes, "mask_bytes": 1}


def _loss_sizes(node: Node) -> dict[str, Num]:
    target = input_type(node, "target")
    logits = input_type(node, "self")
    whole = sum(stored_bytes(output) for output in node.outputs)
    return {
        "rows": target.elements, "element_bytes": logits.element_bytes, "index_bytes": stored_bytes(target),
        "value_bytes": target.elements * logits.element_bytes, "whole_bytes": whole, "accumulate": 0, "operations": 1,
    }  # fmt: skip


def _embedding_sizes(node: Node) -> dict[str, Num]:
    indices = input_type(node, "indices")
    width = node.outputs[0].shape[-1]
    element = node.outputs[0].element_bytes
    tokens = indices.elements
    return {
        "tokens": tokens, "width": width, "element_bytes": element, "index_bytes": stored_bytes(indices),
        "value_bytes": tokens * width * element, "whole_bytes": stored_bytes(node.outputs[0]), "accumulate": 1,
        "operations": 1, "elements": tokens * width,
    }  # fmt: skip


def _bag_bytes(s: Shape) -> Num:
    """Traffic of an embedding bag: gathered rows and indices are read, sums are written."""
    return s["value_bytes"] + s["index_bytes"] + s["written_bytes"]


def _two(shape: Shape) -> Num:
    return 2.0


def norm_dims(node: Node) -> OperatorDims:
    """Dims of norms over the last dims: rows are independent; devices that split a row all-reduce two sums of it."""
    x = next(value.type for name, value in zip(node.names, node.inputs, strict=True) if name == "input")
    normed = len(integers(node, "normalized_shape")) or 1
    names = tuple(f"rows{dim}" if dim < x.rank - normed else f"width{dim}" for dim in range(x.rank))
    rows, width = names[: x.rank - normed], names[x.rank - normed :]
    table = {
        "weight": width,
        "bias": width,
        **dict.fromkeys(("grad_out", "grad_output", "input"), names),
        **dict.fromkeys(("mean", "rstd"), (*rows, *("." for _ in width))),
    }
    # Statistics of rank equal to the input's keep dims of one; gradients of weight and bias have the width alone.
    out: list[Labels] = [
        names
        if type.shape == x.shape
        else width
        if type.shape == x.shape[-normed:]
        else (*rows, *("." for _ in width))
        if type.rank == x.rank
        else unlabelled(type)
        for type in node.outputs
    ]
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == width}
    size = 2 * math.prod(x.shape[: x.rank - normed]) * 4
    exchange = Exchange(collective="all_reduce", size_bytes=size, across=rows)
    special = {
        **{name: Special(outputs=summed) for name in rows},
        **{name: Special(kind="exchanged", exchange=exchange) for name in width},
    }
    return OperatorDims(
        dims=labelled(node, by_name(node, table), out, special),
        terms=terms_of(node, ("grad_out",), ("grad_output",)) if node.op.endswith("_backward") else (),
    )


def _group_dims(node: Node) -> OperatorDims:
    """Dims of a group norm: images and groups of channels are independent; spatial dims share statistics."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name in ("input", "X"))
    groups = integer(node, "group", integer(node, "num_groups", 1))
    names = ("images", "groups", *(f"space{dim}" for dim in range(x.rank - 2)))
    table: dict[str, Labels] = {
        **dict.fromkeys(("input", "X", "grad_out"), names),
        "weight": ("groups",),
        "bias": ("groups",),
        **dict.fromkeys(("mean", "rstd"), ("images", "groups")),
    }
    out: list[Labels] = [
        names if type.shape == x.shape else ("groups",) if type.rank == 1 else ("images", "groups")
        for type in node.outputs
    ]
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == ("groups",)}
    exchange = Exchange(collective="all_reduce", size_bytes=2 * x.shape[0] * groups * 4, across=("images", "groups"))
    special = {
        "images": Special(outputs=summed),
        "groups": Special(units=groups),
        **{name: Special(kind="exchanged", exchange=exchange, outputs=summed) for name in names[2:]},
    }
    if groups == 1:
        special["groups"] = Special(kind="indivisible")
    dims = labelled(node, by_name(node, table), out, special)
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_out",)))


def batch_dims(node: Node) -> OperatorDims:
    """Dims of a batch norm: channels are independent; images and pixels share statistics, unless these are given."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name in ("input", "self"))
    names = ("images", "channels", *(f"space{dim}" for dim in range(x.rank - 2)))
    table: dict[str, Labels] = {
        name: names if value.type.shape == x.shape else ("channels",) if value.type.rank == 1 else ()
        for name, value in zip(node.names, node.inputs, strict=True)
    }
    out: list[Labels] = [
        names if type.shape == x.shape else ("channels",) if type.shape == x.shape[1:2] else unlabelled(type)
        for type in node.outputs
    ]
    backward = node.op.endswith("_backward")
    training = integer(node, "training", integer(node, "train", 1)) and not node.op.endswith("no_training")
    exchange = Exchange(collective="all_reduce", size_bytes=2 * x.shape[1] * 4, across=("channels",))
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == ("channels",)}
    shared = Special(kind="exchanged", exchange=exchange) if training else Special(outputs=summed if backward else None)
    dims = labelled(node, by_name(node, table), out, {name: shared for name in names if name != "channels"})
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_out",)) if backward else ())


def _softmax_dims(node: Node) -> OperatorDims:
    """Dims of a softmax: rows are independent; devices that split a row exchange maximum and sum (backward: sum)."""
    x, backward = node.inputs[0].type, node.op.endswith("_backward_data")
    names, at = numbered(x.rank), at_dim(node, x.rank, default=-1)
    rows = tuple(name for dim, name in enumerate(names) if dim != at)
    size = x.elements // max(x.shape[at] if x.rank else 1, 1) * x.element_bytes * (1 if backward else 2)
    special = Special(kind="exchanged", exchange=Exchange(collective="all_reduce", size_bytes=size, across=rows))
    dims = labelled(node, [names] * len(node.inputs), [names], {names[at]: special} if names else None)
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)) if backward else ())


def _label_dims(node: Node) -> OperatorDims:
    """Dims of the negative log-likelihood: a mean divides by the weight of all rows, which devices add up.

    Split over classes, each device counts labels of its own classes, and the loss of a row is a term of a sum.
    """
    target = node.inputs_of("target")[0].type
    rows = tuple(f"rows{dim}" for dim in range(target.rank))
    scores = (rows[0], "classes", *rows[1:]) if target.rank else ("classes",)
    loss = node.outputs[0]
    mean, backward = integer(node, "reduction", 1) == 1, node.op.endswith("backward")
    table: dict[str, Labels] = {
        "self": scores,
        "target": rows,
        "weight": ("classes",),
        "grad_output": rows if node.inputs[0].type.rank else (),
    }
    if backward:
        dims = labelled(node, by_name(node, table), [scores], {"classes": Special(masked=True)})
        return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)))
    out = [rows if loss.rank == target.rank and rows else unlabelled(loss), *map(unlabelled, node.outputs[1:])]
    exchange = Exchange(collective="all_reduce", size_bytes=loss.element_bytes) if mean else None
    summed: dict[int, Placement] = {0: P, **({1: R if mean else P} if len(node.outputs) > 1 else {})}
    whole = any(out[0])
    by_row = Special(kind="contracted" if not whole else None, outputs=None if whole else summed, exchange=exchange)
    special = {
        **dict.fromkeys(rows, by_row),
        "classes": Special(outputs={0: P, **({1: R} if summed.get(1) else {})}, masked=True),
    }
    return OperatorDims(dims=labelled(node, by_name(node, table), out, special))


def _pair_dims(node: Node) -> OperatorDims:
    """Dims of element-wise losses, reduced or not."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name == "self")
    if node.outputs[0].rank == x.rank:
        return by_element(node)
    names = numbered(x.rank)
    how: Reduction = "avg" if integer(node, "reduction", 1) == 1 else "sum"
    special = {name: Special(kind="reduced" if how == "avg" else None, outputs={0: partial(how)}) for name in names}
    return OperatorDims(dims=labelled(node, [right_aligned(names, v.type) for v in node.inputs], [()], special))


def _embedding_dims(node: Node) -> OperatorDims:
    """Dims of an embedding: tokens, width, and rows, of which each device looks up its own."""
    rank = node.inputs_of("indices")[0].type.rank
    tokens = tuple(f"tokens{dim}" for dim in range(rank))
    given = by_name(node, {"weight": labels("rows width"), "indices": tokens})
    dims = labelled(node, given, [(*tokens, "width")], {"rows": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("weight",)))


def _embedding_gradient_dims(node: Node) -> OperatorDims:
    """Dims of the gradient of an embedding: gradients of tokens are added up by row."""
    rank = node.inputs_of("indices")[0].type.rank
    tokens = tuple(f"tokens{dim}" for dim in range(rank))
    given = by_name(node, {"grad_output": (*tokens, "width"), "indices": tokens})
    dims = labelled(node, given, [labels("rows width")], {"rows": Special(masked=True)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)))


def _rows(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    return {"num_weights": outputs[0].shape[0]}


def _normed(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    given = node.attribute("normalized_shape")
    rank = len(given) if isinstance(given, tuple) else 1
    x = inputs[next(n for n, name in enumerate(node.names) if name == "input")]
    return {"normalized_shape": x.shape[x.rank - rank :]}


def _group_normed(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    number = next(n for n, name in enumerate(node.names) if name in ("input", "X"))
    x, whole = inputs[number], node.inputs[number].type
    group = node.attribute("group", 1)
    groups = int(group) if isinstance(group, int) else 1
    return {
        "N": x.shape[0],
        "C": x.shape[1],
        "HxW": math.prod(x.shape[2:]),
        "group": groups * x.shape[1] // whole.shape[1],
    }


_FLOPS = Formula(pointwise_flops)


def _normalised(
    sizes: Callable[[Node], Mapping[str, Num]],
    name: str,
    kernels: Kernels,
    launches: int = 1,
) -> OperatorWork:
    """Work from the formulas ``NAME_flops`` and ``NAME_bytes``."""
    return OperatorWork(
        sizes=sizes, vector_flops=Formula(getattr(formulas, f"{name}_flops")),
        moved_bytes=Formula(getattr(formulas, f"{name}_bytes")), kernels=kernels, launches=lambda s: float(launches),
    )  # fmt: skip


def _row(
    names: str, work: OperatorWork, dims: Dims | None = None, *, layouts: Layouts = "recorded",
    pieces: Pieces | None = None, processor: Measured | None = None,
) -> Operator:  # fmt: skip
    return Operator(
        names=names, family="norm", work=work, dims=dims, layouts=layouts, pieces=pieces, processor=processor
    )


_LAYER = _normalised(_layer_sizes, "layer_norm", as_operator("layer_norm"))
_LAYER_BACKWARD = _normalised(_layer_sizes, "layer_norm_backward", as_operator("layer_norm", backward=True), 2)
_RMS = _normalised(_layer_sizes, "rms_norm", as_operator("rms_norm"))
_RMS_BACKWARD = _normalised(_layer_sizes, "rms_norm_backward", as_operator("rms_norm", backward=True), 2)
_BATCH = _normalised(_batch_sizes, "batch_norm", _batch_kernels)
_BATCH_BACKWARD = _normalised(_batch_sizes, "batch_norm_backward", _batch_kernels)
_SOFTMAX = OperatorWork(sizes=_softmax_sizes, vector_flops=Formula(softmax_flops), kernels=as_operator("softmax"))
_SOFTMAX_BACKWARD = OperatorWork(
    sizes=_softmax_sizes, vector_flops=Formula(softmax_backward_flops), kernels=as_operator("softmax", backward=True)
)
_DROPOUT, _DROPOUT_BACKWARD = (
    _normalised(_dropout_sizes, "dropout", as_operator("dropout", backward=backward)) for backward in (False, True)
)
_LABEL = OperatorWork(sizes=_loss_sizes, moved_bytes=Formula(labelled_bytes), kernels=moved)
_LABEL_BACKWARD = OperatorWork(sizes=_loss_sizes, moved_bytes=Formula(zero_and_add_bytes), launches=_two, kernels=moved)
_LOSS = OperatorWork(
    sizes=lambda node: {"operations": 4}, vector_flops=_FLOPS, moved_bytes=Formula(streamed_bytes), kernels=moved
)
_LOOK_UP = OperatorWork(
    sizes=_embedding_sizes, moved_bytes=Formula(formulas.embedding_bytes), kernels=as_operator("embedding")
)
_LOOK_UP_BACKWARD = OperatorWork(
    sizes=_embedding_sizes, vector_flops=_FLOPS, moved_bytes=Formula(zero_and_add_bytes), launches=_two, kernels=moved
)
_BAG = OperatorWork(sizes=_embedding_sizes, vector_flops=_FLOPS, moved_bytes=_bag_bytes, kernels=moved)

NORMS: Final = (
    _row("native_layer_norm", _LAYER, norm_dims, layouts="rows", pieces=_normed, processor=processor.layer_norm),
    _row("layer_norm", _LAYER, norm_dims, pieces=_normed, processor=processor.layer_norm),
    _row("native_layer_norm_backward", _LAYER_BACKWARD, norm_dims, layouts="rows", pieces=_normed),
    _row("_fused_rms_norm", _RMS, norm_dims, layouts="rows", pieces=_normed),
    _row("rms_norm", _RMS, norm_dims, pieces=_normed),
    _row("_fused_rms_norm_backward", _RMS_BACKWARD, norm_dims, pieces=_normed),
    _row(
        "native_group_norm", _normalised(_group_sizes, "layer_norm", moved, 2), _group_dims, layouts="rows",
        pieces=_group_normed,
    ),
    _row(
        "native_group_norm_backward", _normalised(_group_sizes, "layer_norm_backward", moved, 2), _group_dims,
        layouts="rows", pieces=_group_normed,
    ),
    _row(
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"
        " _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_with_update_functional"
        " _batch_norm_no_update miopen_batch_norm batch_norm",
        _BATCH, batch_dims, layouts="images", processor=processor.batch_norm,
    ),
    _row(
        "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward",
        _BATCH_BACKWARD, batch_dims, layouts="images",
    ),
)  # fmt: skip
"""Norms by statistics of a row, a group or a channel."""
SOFTMAXES: Final = (
    _row("_softmax", _SOFTMAX, _softmax_dims, layouts="rows", processor=processor.softmax),
    _row("softmax _safe_softmax", _SOFTMAX, _softmax_dims, processor=processor.softmax),
    _row("_log_softmax", _SOFTMAX, _softmax_dims, layouts="rows"),
    _row("log_softmax", _SOFTMAX, _softmax_dims),
    _row("_softmax_backward_data _log_softmax_backward_data", _SOFTMAX_BACKWARD, _softmax_dims, layouts="rows"),
)
"""Softmax and its logarithm."""
DROPOUTS: Final = (
    _row("native_dropout _fused_dropout", _DROPOUT, drawn),
    _row("native_dropout_backward", _DROPOUT_BACKWARD, by_element),
)
"""Dropout."""
LOSSES: Final = (
    _row("nll_loss_forward nll_loss2d_forward", _LABEL, _label_dims),
    _row("nll_loss", _LABEL),
    _row("nll_loss_backward nll_loss2d_backward", _LABEL_BACKWARD, _label_dims),
    _row(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
        " soft_margin_loss", _LOSS, _pair_dims,
    ),
    _row(
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward", _LOSS, by_element
    ),
)  # fmt: skip
"""Losses."""
EMBEDDINGS: Final = (
    _row("embedding", _LOOK_UP, _embedding_dims),
    _row("embedding_dense_backward", _LOOK_UP_BACKWARD, _embedding_gradient_dims, pieces=_rows),
    _row("_embedding_bag _embedding_bag_forward_only", _BAG),
    _row("_embedding_bag_backward _embedding_bag_dense_backward", _LOOK_UP_BACKWARD),
)
"""Embeddings and embedding bags."""
