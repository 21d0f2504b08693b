"""Norms, softmax, dropout, losses and embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from steptime.captured.cost.work import (
    KernelCall,
    OperatorRow,
    Shape,
    as_operator,
    input_type,
    integer,
    integers,
    looped,
    moved,
    stored_bytes,
)
from steptime.captured.graph import Node
from steptime.cost import elementwise
from steptime.cost.attention import softmax_backward_flops, softmax_flops
from steptime.cost.elementwise import pointwise_flops
from steptime.cost.memory_bound import labelled_bytes, streamed_bytes, zero_and_add_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

_E = _N = elementwise


def _layer_sizes(node: Node) -> dict[str, Num]:
    x = input_type(node, "input")
    width = math.prod(integers(node, "normalized_shape")) or x.shape[-1]
    return {"elements": x.elements, "rows": x.elements / width, "width": width, "element_bytes": x.element_bytes}


def _group_sizes(node: Node) -> dict[str, Num]:
    """A row is what shares a mean: channels of a group and all their pixels."""
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
    """A loop for each channel of each image, where the statistics are those of the batch and images have pixels."""
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
    """Chosen rows are read, their sums written."""
    return s["value_bytes"] + s["index_bytes"] + s["written_bytes"]


def _two(shape: Shape) -> Num:
    return 2.0


_FLOPS = Formula(pointwise_flops)
_LAYER = OperatorRow(
    sizes=_layer_sizes, vector_flops=Formula(_E.layer_norm_flops), moved_bytes=Formula(_E.layer_norm_bytes),
    kernels=as_operator("layer_norm"),
)  # fmt: skip
_LAYER_BACKWARD = OperatorRow(
    sizes=_layer_sizes, vector_flops=Formula(_E.layer_norm_backward_flops),
    moved_bytes=Formula(_E.layer_norm_backward_bytes), launches=_two,
    kernels=as_operator("layer_norm", backward=True),
)  # fmt: skip
_RMS = OperatorRow(
    sizes=_layer_sizes, vector_flops=Formula(_E.rms_norm_flops), moved_bytes=Formula(_E.rms_norm_bytes),
    kernels=as_operator("rms_norm"),
)  # fmt: skip
_RMS_BACKWARD = OperatorRow(
    sizes=_layer_sizes, vector_flops=Formula(_E.rms_norm_backward_flops), launches=_two,
    moved_bytes=Formula(_E.rms_norm_backward_bytes), kernels=as_operator("rms_norm", backward=True),
)  # fmt: skip
_GROUP = OperatorRow(
    sizes=_group_sizes, vector_flops=Formula(_E.layer_norm_flops),
    moved_bytes=Formula(_E.layer_norm_bytes), launches=_two, kernels=moved,
)  # fmt: skip
_GROUP_BACKWARD = OperatorRow(
    sizes=_group_sizes, vector_flops=Formula(_E.layer_norm_backward_flops),
    moved_bytes=Formula(_E.layer_norm_backward_bytes), launches=_two, kernels=moved,
)  # fmt: skip
_BATCH = OperatorRow(
    sizes=_batch_sizes, vector_flops=Formula(_N.batch_norm_flops), moved_bytes=Formula(_N.batch_norm_bytes),
    kernels=_batch_kernels,
)  # fmt: skip
_BATCH_BACKWARD = OperatorRow(
    sizes=_batch_sizes, vector_flops=Formula(_N.batch_norm_backward_flops),
    moved_bytes=Formula(_N.batch_norm_backward_bytes), kernels=_batch_kernels,
)  # fmt: skip
_SOFTMAX = OperatorRow(sizes=_softmax_sizes, vector_flops=Formula(softmax_flops), kernels=as_operator("softmax"))
_SOFTMAX_BACKWARD = OperatorRow(
    sizes=_softmax_sizes, vector_flops=Formula(softmax_backward_flops), kernels=as_operator("softmax", backward=True)
)
_DROPOUT = OperatorRow(
    sizes=_dropout_sizes, vector_flops=Formula(_E.dropout_flops), moved_bytes=Formula(_E.dropout_bytes),
    kernels=as_operator("dropout"),
)  # fmt: skip
_DROPOUT_BACKWARD = OperatorRow(
    sizes=_dropout_sizes, vector_flops=Formula(_E.dropout_flops), moved_bytes=Formula(_E.dropout_bytes),
    kernels=as_operator("dropout", backward=True),
)  # fmt: skip
_LABEL = OperatorRow(sizes=_loss_sizes, moved_bytes=Formula(labelled_bytes), kernels=moved)
_LABEL_BACKWARD = OperatorRow(sizes=_loss_sizes, moved_bytes=Formula(zero_and_add_bytes), launches=_two, kernels=moved)
_LOSS = OperatorRow(sizes=lambda node: {"operations": 4}, vector_flops=_FLOPS, moved_bytes=Formula(streamed_bytes),
                    kernels=moved)  # fmt: skip
_LOOK_UP = OperatorRow(
    sizes=_embedding_sizes, moved_bytes=Formula(_E.embedding_bytes), kernels=as_operator("embedding")
)
_LOOK_UP_BACKWARD = OperatorRow(
    sizes=_embedding_sizes, vector_flops=_FLOPS, moved_bytes=Formula(zero_and_add_bytes), launches=_two, kernels=moved
)
_BAG = OperatorRow(sizes=_embedding_sizes, vector_flops=_FLOPS, moved_bytes=_bag_bytes, kernels=moved)

_BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "batch_norm",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
    "_batch_norm_no_update", "_native_batch_norm_legit_no_training",
)  # fmt: skip
_BATCH_NORMS_BACKWARD = (
    "native_batch_norm_backward",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
    "batch_norm_backward",
)

TABLE: Final[Mapping[str, OperatorRow]] = {
    "native_layer_norm": _LAYER, "layer_norm": _LAYER, "native_layer_norm_backward": _LAYER_BACKWARD,
    "_fused_rms_norm": _RMS, "rms_norm": _RMS, "_fused_rms_norm_backward": _RMS_BACKWARD,
    "native_group_norm": _GROUP, "native_group_norm_backward": _GROUP_BACKWARD,
    **dict.fromkeys(_BATCH_NORMS, _BATCH), **dict.fromkeys(_BATCH_NORMS_BACKWARD, _BATCH_BACKWARD),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax"), _SOFTMAX),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _SOFTMAX_BACKWARD),
    "native_dropout": _DROPOUT, "_fused_dropout": _DROPOUT, "native_dropout_backward": _DROPOUT_BACKWARD,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "nll_loss"), _LABEL),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _LABEL_BACKWARD),
    **dict.fromkeys(
        ("mse_loss", "mse_loss_backward", "l1_loss", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss",
         "huber_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
         "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss"), _LOSS,
    ),
    "_embedding_bag": _BAG, "_embedding_bag_forward_only": _BAG,
    "_embedding_bag_backward": _LOOK_UP_BACKWARD, "_embedding_bag_dense_backward": _LOOK_UP_BACKWARD,
    "embedding": _LOOK_UP, "embedding_dense_backward": _LOOK_UP_BACKWARD,
}  # fmt: skip
