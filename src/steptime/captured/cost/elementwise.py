"""Work of operators that memory bounds: on every element, reductions, norms, losses, embeddings, optimiser steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
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
from steptime.captured.graph import Node, Value
from steptime.cost import elementwise
from steptime.cost.attention import softmax_backward_flops, softmax_flops
from steptime.cost.data_parallel import TENSORS_PER_LAUNCH, adam_flops, list_launches
from steptime.cost.elementwise import pointwise_flops, residual_bytes
from steptime.cost.memory_bound import labelled_bytes, streamed_bytes, zero_and_add_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

#: Vector operations per element -> maps that take that number. Functions of the library count as their polynomials do.
MAPS: Final[Mapping[int, str]] = {
    0: "bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor eq ne lt le gt ge"
    " where masked_fill isnan isinf isfinite sign sgn bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__"
    " __lshift__ __rshift__ signbit nan_to_num",
    1: "add sub rsub mul neg abs relu threshold threshold_backward clamp clamp_min clamp_max maximum minimum floor ceil"
    " round trunc fmod remainder hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp square"
    " floor_divide fmax fmin conj real imag prelu _prelu_kernel _prelu_kernel_backward relu6 frac heaviside",
    2: "addcmul hardswish hardsigmoid hardsigmoid_backward glu _add_relu",
    3: "addcdiv hardswish_backward",
    4: "div reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sigmoid sigmoid_backward tanh_backward"
    " true_divide",
    6: "silu softplus softplus_backward elu elu_backward celu selu logit log_sigmoid_forward xlogy",
    8: "gelu tanh erf erfc erfinv pow sin cos tan asin acos atan atan2 sinh cosh mish silu_backward glu_backward"
    " log_sigmoid_backward logaddexp float_power hypot polar lgamma digamma sinc",
    13: "gelu_backward mish_backward logit_backward",
}

#: Vector operations per input element -> reductions and scans.
REDUCTIONS: Final[Mapping[int, str]] = {
    0: "any all count_nonzero equal _is_all_true _is_any_true",
    1: "sum mean amax amin max min argmax argmin prod cumsum cumprod nansum trace cummax cummin aminmax diff"
    " bincount histc logcumsumexp _cummax_helper sum_to_size nanmean",
    3: "norm linalg_vector_norm std var var_mean std_mean _linalg_svd dist _weight_norm_interface"
    " _weight_norm_interface_backward",
    5: "logsumexp renorm cdist _cdist_forward _cdist_backward",
}

#: Random numbers: vector operations per element of the generator (Philox, Salmon et al. 2011: ten rounds for four).
RANDOM: Final[Mapping[int, str]] = {
    10: "bernoulli rand rand_like uniform random randint randint_like exponential geometric cauchy",
    20: "normal randn randn_like log_normal normal_functional multinomial",
}


ACTIVATION: Final = 6
"""Maps of at least this number of operations per element are timed as an activation; lighter ones as what they move."""


def _light(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """Two whole tensors in and one out is what was measured as an addition."""
    whole = s["moved_bytes"] == residual_bytes(s["elements"], s["element_bytes"])
    return as_operator("residual")(node, s) if whole else moved(node, s)


def _heavy(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return as_operator("activation", backward=node.op.endswith("_backward"))(node, s)


def _outputs(operations: int) -> OperatorRow:
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorRow(
        sizes=lambda node: sizes,
        vector_flops=Formula(pointwise_flops),
        kernels=_heavy if operations >= ACTIVATION else _light,
    )


def _inputs(operations: int) -> OperatorRow:
    def sizes(node: Node) -> dict[str, Num]:
        return {"operations": operations, "elements": max((v.type.elements for v in node.inputs), default=0)}

    return OperatorRow(sizes=sizes, vector_flops=Formula(pointwise_flops), kernels=moved)


def _drawn(operations: int) -> OperatorRow:
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorRow(
        sizes=lambda node: sizes, vector_flops=Formula(pointwise_flops), moved_bytes=lambda s: s["written_bytes"],
        kernels=moved,
    )  # fmt: skip


ELEMENTWISE: Final[Mapping[str, OperatorRow]] = {
    **{name: _outputs(count) for count, names in MAPS.items() for name in names.split()},
    **{name: _inputs(count) for count, names in REDUCTIONS.items() for name in names.split()},
    **{name: _drawn(count) for count, names in RANDOM.items() for name in names.split()},
}


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
_LOSS = OperatorRow(
    sizes=lambda node: {"operations": 4}, vector_flops=_FLOPS, moved_bytes=Formula(streamed_bytes), kernels=moved
)
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

NORMALISATIONS: Final[Mapping[str, OperatorRow]] = {
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


FUSED: Final = ("adam", "adamw", "sgd", "adagrad")
_LISTS = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma
log log10 log1p log2 max maximum minimum mul neg norm pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh
trunc
"""
LISTS: Final = frozenset(_LISTS.split())
"""Maps and reductions that PyTorch has over lists of tensors too."""


def _read_bytes(node: Node) -> int:
    """Bytes of the lists; a tensor that stands at one place of two of them is read once.

    Parameters of equal blocks that were recorded once are one value at many places, and other tensors at each.
    """
    lists: dict[str, list[Value]] = {}
    for name, value in zip(node.names, node.inputs, strict=True):
        lists.setdefault(name, []).append(value)
    places = zip_longest(*lists.values())
    return sum(stored_bytes(value.type) for place in places for value in {*place} if value is not None)


def _lists(node: Node) -> dict[str, Num]:
    """Tensors and elements of the first list, and how many lists a launch walks over."""
    counts = Counter(node.names)
    first = node.names[0] if node.names else "self"
    members = [value.type for name, value in zip(node.names, node.inputs, strict=True) if name == first]
    lists = sum(count == len(members) for count in counts.values())
    return {
        "tensors": len(members), "elements": sum(member.elements for member in members), "operations": 1,
        "lists": max(lists, 1), "read_bytes": _read_bytes(node),
    }  # fmt: skip


def _launches(s: Shape) -> Num:
    """A result that is not written over a list is one more list."""
    lists = min(int(s["lists"] + 1 - s["inplace"]), max(TENSORS_PER_LAUNCH))
    return list_launches(s["tensors"], s["elements"], TENSORS_PER_LAUNCH[lists])


def _list_row(operations: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: {**_lists(node), "operations": operations}, vector_flops=Formula(pointwise_flops),
        launches=_launches, kernels=moved,
    )  # fmt: skip


_UNWRITTEN: Final = frozenset({"grads", "state_steps", "lr", "grad_scale", "found_inf"})
"""Arguments of fused optimisers that they only read."""


def _fused(node: Node) -> dict[str, Num]:
    """Weights and states are written; gradients only where they are unscaled on the way."""
    unwritten = _UNWRITTEN if node.input("grad_scale") is None else _UNWRITTEN - {"grads"}
    pairs = zip(node.names, node.inputs, strict=True)
    written = sum(stored_bytes(value.type) for name, value in pairs if name not in unwritten)
    return {**_lists(node), "written_bytes": written}


_FUSED = OperatorRow(sizes=_fused, vector_flops=Formula(adam_flops), launches=_launches, kernels=moved)
_MOVES = _list_row(0)

OPTIMISERS: Final[Mapping[str, OperatorRow]] = {
    **{
        f"_foreach_{name}": _list_row(count)
        for table in (MAPS, REDUCTIONS) for count, names in table.items() for name in names.split() if name in LISTS
    },
    "_foreach_powsum": _list_row(3), "_foreach_copy": _MOVES, "_foreach_clone": _MOVES, "_foreach_zero": OperatorRow(
        sizes=_lists, moved_bytes=lambda s: s["written_bytes"], launches=_launches, kernels=moved
    ),
    **{f"_fused_{name}": _FUSED for name in FUSED},
    "_amp_foreach_non_finite_check_and_unscale": _list_row(1), "_amp_update_scale": _list_row(1),
}  # fmt: skip
