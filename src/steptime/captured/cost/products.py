"""Work of operators that multiply matrices: products, fused attention, convolutions, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.cost.work import (
    KernelCall,
    OperatorRow,
    Shape,
    as_operator,
    input_type,
    integer,
    integers,
    moved,
)
from steptime.captured.cut.rules import turned
from steptime.captured.graph import Node
from steptime.cost.attention import (
    attention_backward_pair_flops,
    attention_pair_flops,
    causal_pairs,
    fused_attention_backward_bytes,
    fused_attention_backward_vector_flops,
    fused_attention_bytes,
    fused_attention_vector_flops,
    scores_flops,
)
from steptime.cost.convolution import channelwise, convolution_flops, implicit_product
from steptime.cost.elementwise import pointwise_flops
from steptime.cost.matmul import matmul_flops
from steptime.cost.recurrent import gate_flops, recurrent_backward_flops, recurrent_flops
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

PRODUCTS: Final[Mapping[str, OperatorRow]] = {
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


CAUSAL_TYPES: Final = (1, 2)
"""Values of ``custom_mask_type`` that mean a causal mask, from top left or from bottom right."""


def _geometry(node: Node, sequence: int) -> dict[str, Num]:
    """Sizes of the kernel; ``sequence`` is the dim of tokens, 2 in (batch, heads, tokens, head), 1 with it first."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    heads = 3 - sequence
    if len(q) == 3:  # sequences of many lengths end to end: tokens, heads, head
        return _packed(node)
    batch, queries, keys = q[0], q[sequence], k[sequence]
    return _attention_sizes(node, batch, (q[heads], k[heads]), (queries, keys), (q[3], v[3]))


def _packed(node: Node) -> dict[str, Num]:
    """Every sequence as long as the longest, since lengths are data."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    offsets = node.input("cum_seq_q") or node.input("cu_seqlens_q")
    batch = 1 if offsets is None else offsets.type.shape[0] - 1
    queries = integer(node, "max_q", integer(node, "max_seqlen_q", q[0]))
    keys = integer(node, "max_k", integer(node, "max_seqlen_k", k[0]))
    return _attention_sizes(node, batch, (q[1], k[1]), (queries, keys), (q[2], v[2]))


def _attention_sizes(
    node: Node, batch: int, heads: tuple[int, int], length: tuple[int, int], width: tuple[int, int]
) -> dict[str, Num]:
    causal = integer(node, "is_causal", int(integer(node, "custom_mask_type", 0) in CAUSAL_TYPES))
    (queries, keys), rows = length, batch * heads[0] * length[0]
    seen = batch * heads[0] * _unmasked(queries, keys) if causal else rows * keys
    return {
        "batch": batch, "heads": heads[0], "kv_heads": heads[1], "queries": queries, "seen_keys": keys,
        "causal": float(causal), "window": 0.0, "pairs": seen, "rows": rows,
        "keys": batch * heads[0] * keys, "kv_rows": batch * heads[1] * keys, "kv_rows_read": batch * heads[1] * keys,
        "head_dim": width[0], "qk_dim": width[0], "v_dim": width[1], "dropout": float(_dropout(node) > 0),
    }  # fmt: skip


def _dropout(node: Node) -> float:
    given = node.attribute("dropout_p", 0.0)
    return float(given) if isinstance(given, (int, float)) else 0.0


def _unmasked(queries: int, keys: int) -> Num:
    """Pairs of one head under a mask from top left: row i sees keys 0 to i."""
    beyond = max(queries - keys, 0) * keys
    rows = min(queries, keys)
    return causal_pairs(rows, rows) + beyond


_ATTENTION_FORWARD, _ATTENTION_BACKWARD = Formula(attention_pair_flops), Formula(attention_backward_pair_flops)


def _scores(s: Shape) -> Num:
    return scores_flops(s["pairs"], s["qk_dim"], 1)


def _forward(sequence: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: _geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _ATTENTION_FORWARD(s),
        vector_flops=Formula(fused_attention_vector_flops),
        moved_bytes=Formula(fused_attention_bytes),
        kernels=as_operator("fused_attention"),
    )


def _backward(sequence: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: _geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _ATTENTION_BACKWARD(s),
        repeated_flops=_scores,
        vector_flops=Formula(fused_attention_backward_vector_flops),
        moved_bytes=Formula(fused_attention_backward_bytes),
        launches=lambda s: 2.0,
        kernels=as_operator("fused_attention", backward=True),
    )


_HEADS_FIRST = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
_TOKENS_FIRST = ("_flash_attention", "_efficient_attention")

ATTENTION: Final[Mapping[str, OperatorRow]] = {
    **{name: _forward(2) for name in _HEADS_FIRST},
    **{f"{name}_backward": _backward(2) for name in _HEADS_FIRST},
    **{f"{name}_forward": _forward(1) for name in _TOKENS_FIRST},
    **{f"{name}_backward": _backward(1) for name in _TOKENS_FIRST},
    "_scaled_dot_product_attention_math_for_mps": _forward(2),
}


WINOGRAD_TAPS: Final = (3, 3)
"""Kernel that Winograd's algorithm takes, with stride and dilation one: cuDNN runs a dilated one by implicit products
(API reference of cudnnConvolutionForward, its table of algorithms)."""
FLOPS: Final = Formula(convolution_flops)


def _convolution_sizes(node: Node) -> dict[str, Num]:
    """Sizes for `convolution_flops`, channels in counted per group; a transposed one walks over its input's pixels."""
    tensors = (
        input_type(node, "input", "self"),
        input_type(node, "weight"),
        input_type(node, "grad_output") if node.input("grad_output") is not None else node.outputs[0],
    )
    x, w, y = (type.shape for type in tensors)
    groups, transposed = integer(node, "groups", 1), bool(integer(node, "transposed", 0))
    walked = x if transposed else y
    stride, dilation = integers(node, "stride"), integers(node, "dilation")
    dense = max(stride, default=1) == max(dilation, default=1) == groups == 1
    return {
        "batch": x[0], "pixels": math.prod(walked[2:]), "taps": math.prod(w[2:]), "groups": groups,
        "channels_in": w[1], "channels_out": w[0], "tensor_bytes": sum(type.size_bytes for type in tensors),
        "winograd_taps": float(w[2:] == WINOGRAD_TAPS and dense),
    }  # fmt: skip


def _backward_sizes(node: Node) -> dict[str, Num]:
    mask = integers(node, "output_mask") or (1, 1, 0)
    return {**_convolution_sizes(node), "of_data": float(bool(mask[0])), "of_weight": float(bool(mask[1]))}


def _backward_flops(s: Shape) -> Num:
    """Each gradient takes as many operations as the forward."""
    return int(s["of_data"] + s["of_weight"]) * FLOPS(s)


def _backward_bytes(s: Shape) -> Num:
    """Each gradient reads two of the three inputs; what differs in their sizes is averaged."""
    return s["read_bytes"] * (s["of_data"] + s["of_weight"]) * 2 / 3 + s["written_bytes"]


def _convolution_product(s: Shape, moved_bytes: Num, *, swapped: bool) -> Shape:
    """The implicit product; ``swapped``: channels in and out change places."""
    groups = s["groups"]
    inward, outward = s["channels_in"], s["channels_out"] / groups
    inward, outward = (outward, inward) if swapped else (inward, outward)
    rows, columns, depth = implicit_product(s["batch"] * s["pixels"], inward, outward, s["taps"], groups)
    return {
        "rows": rows, "columns": columns, "depth": depth, "moved_bytes": moved_bytes,
        "winograd_taps": s["winograd_taps"], "tensor_bytes": s["tensor_bytes"],
        "channelwise": channelwise(inward, outward, groups),
    }  # fmt: skip


def _convolution_kernel(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return (KernelCall(operator="conv_fwd", shape=_convolution_product(s, s["moved_bytes"], swapped=False)),)


def _convolution_backward_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    each = s["moved_bytes"] / max(s["of_data"] + s["of_weight"], 1.0)
    calls = []
    if s["of_data"]:
        calls.append(KernelCall(operator="conv_bwd_data", shape=_convolution_product(s, each, swapped=True)))
    if s["of_weight"]:
        calls.append(KernelCall(operator="conv_bwd_weight", shape=_convolution_product(s, each, swapped=False)))
    return tuple(calls)


_CONVOLUTION_FORWARD = OperatorRow(sizes=_convolution_sizes, matrix_flops=FLOPS, kernels=_convolution_kernel)
_CONVOLUTION_BACKWARD = OperatorRow(
    sizes=_backward_sizes, matrix_flops=_backward_flops, moved_bytes=_backward_bytes,
    launches=lambda s: max(s["of_data"] + s["of_weight"], 1.0), kernels=_convolution_backward_kernels,
)  # fmt: skip

CONVOLUTIONS: Final[Mapping[str, OperatorRow]] = {
    **dict.fromkeys(
        (
            "convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution",
            "_slow_conv2d_forward", "miopen_convolution", "cudnn_convolution_relu", "conv2d",
            "mkldnn::_convolution_pointwise",
        ),
        _CONVOLUTION_FORWARD,
    ),
    "convolution_backward": _CONVOLUTION_BACKWARD, "convolution_backward_overrideable": _CONVOLUTION_BACKWARD,
}  # fmt: skip


GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}
"""Gates by the mode of cuDNN and oneDNN layers: ReLU, tanh, LSTM, GRU."""
RAW: Final = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
"""Operators that take the input as it is, and all layers."""
CELL_OPERATIONS: Final = 24
"""Vector operations per state of a fused cell: four gates of 5 and the state."""


def _layer(node: Node) -> dict[str, Num]:
    """oneDNN runs one layer in one direction at a time, with time first; the others all layers at once."""
    steps, batch, width = input_type(node, "input").shape
    if bool(integer(node, "batch_first", 0)) and node.op in RAW:
        steps, batch = batch, steps
    gates = GATES.get(integer(node, "mode", 2), 4)
    return {
        "batch": batch, "steps": steps, "width": width, "hidden": integer(node, "hidden_size", width), "gates": gates,
        "layers": integer(node, "num_layers", 1) if node.op in RAW else 1,
        "ways": 1 + integer(node, "bidirectional", 0) if node.op in RAW else 1,
    }  # fmt: skip


def _all_layers(first: Formula, s: Shape) -> Num:
    """Layers above the first see the states of all directions as input."""
    above = {**s, "width": s["hidden"] * s["ways"]}
    return s["ways"] * (first(s) + (s["layers"] - 1) * first(above))


_FLOPS, _BACKWARD_FLOPS, _GATES = Formula(recurrent_flops), Formula(recurrent_backward_flops), Formula(gate_flops)


def _weights_each_step(s: Shape) -> Num:
    """The matrix of the state is read at every step, all else once."""
    matrix = s["gates"] * s["hidden"] * s["hidden"] * s["element_bytes"] * s["layers"] * s["ways"]
    return s["read_bytes"] + s["written_bytes"] + (s["steps"] - 1) * matrix


def _recurrent_kernel(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """Layers of equal width, as the curves were measured: both products of a step at once."""
    return (KernelCall(operator="rnn_fwd", shape=_curve(s)),)


def _recurrent_backward_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return tuple(KernelCall(operator=f"rnn_bwd_{what}", shape=_curve(s)) for what in ("data", "weight"))


def _curve(s: Shape) -> Shape:
    products = (s["width"] + s["hidden"]) / s["hidden"]
    steps = s["steps"] * s["layers"] * s["ways"]
    return {**{n: s[n] for n in ("batch", "hidden", "gates", "element_bytes")}, "steps": steps, "products": products}


_RECURRENT_FORWARD = OperatorRow(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_FLOPS, s), vector_flops=lambda s: _all_layers(_GATES, s),
    moved_bytes=_weights_each_step, launches=lambda s: 2 * s["steps"] * s["layers"] * s["ways"],
    kernels=_recurrent_kernel,
)  # fmt: skip
_RECURRENT_BACKWARD = OperatorRow(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_BACKWARD_FLOPS, s),
    vector_flops=lambda s: 2 * _all_layers(_GATES, s), moved_bytes=lambda s: 2 * _weights_each_step(s),
    launches=lambda s: 3 * s["steps"] * s["layers"] * s["ways"], kernels=_recurrent_backward_kernels,
)  # fmt: skip


_CELL = OperatorRow(
    sizes=lambda _: {"operations": CELL_OPERATIONS}, vector_flops=Formula(pointwise_flops), kernels=moved
)

RECURRENT: Final[Mapping[str, OperatorRow]] = {
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _RECURRENT_FORWARD),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"), _RECURRENT_BACKWARD),
    **dict.fromkeys(
        ("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell",
         "_thnn_fused_gru_cell_backward"), _CELL,
    ),
}  # fmt: skip
