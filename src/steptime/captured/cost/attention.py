"""Fused attention, forward and backward, under the names that PyTorch gives its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.captured.cost.work import OperatorRow, Shape, as_operator, input_type, integer
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
from steptime.estimate.operators import Formula
from steptime.num import Num

CAUSAL_TYPES: Final = (1, 2)
"""Values of ``custom_mask_type`` that mean a causal mask, from top left or from bottom right."""


def _geometry(node: Node, sequence: int) -> dict[str, Num]:
    """Sizes of the kernel; ``sequence`` is the dim of tokens, 2 in (batch, heads, tokens, head), 1 with it first."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    heads = 3 - sequence
    if len(q) == 3:  # sequences of many lengths end to end: tokens, heads, head
        return _packed(node)
    batch, queries, keys = q[0], q[sequence], k[sequence]
    return _sizes(node, batch, (q[heads], k[heads]), (queries, keys), (q[3], v[3]))


def _packed(node: Node) -> dict[str, Num]:
    """Every sequence as long as the longest, since lengths are data."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    offsets = node.input("cum_seq_q") or node.input("cu_seqlens_q")
    batch = 1 if offsets is None else offsets.type.shape[0] - 1
    queries = integer(node, "max_q", integer(node, "max_seqlen_q", q[0]))
    keys = integer(node, "max_k", integer(node, "max_seqlen_k", k[0]))
    return _sizes(node, batch, (q[1], k[1]), (queries, keys), (q[2], v[2]))


def _sizes(
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


_FORWARD, _BACKWARD = Formula(attention_pair_flops), Formula(attention_backward_pair_flops)


def _scores(s: Shape) -> Num:
    return scores_flops(s["pairs"], s["qk_dim"], 1)


def _forward(sequence: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: _geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _FORWARD(s),
        vector_flops=Formula(fused_attention_vector_flops),
        moved_bytes=Formula(fused_attention_bytes),
        kernels=as_operator("fused_attention"),
    )


def _backward(sequence: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: _geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _BACKWARD(s),
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

TABLE: Final[Mapping[str, OperatorRow]] = {
    **{name: _forward(2) for name in _HEADS_FIRST},
    **{f"{name}_backward": _backward(2) for name in _HEADS_FIRST},
    **{f"{name}_forward": _forward(1) for name in _TOKENS_FIRST},
    **{f"{name}_backward": _backward(1) for name in _TOKENS_FIRST},
    "_scaled_dot_product_attention_math_for_mps": _forward(2),
}
