"""Recomputation ``outputs``: selective checkpointing by operator, which keeps the output of every second product.

A layer keeps its input and the outputs of attention and of every second product: in the order query, key, value, out,
gate, up, down these are query, value, gate and down; without a gate query, value and the first product of the MLP.
Everything else that backward reads is made again: norms, rotations, keys, the stream after attention, the other half
of the MLP's first product and the activation. Of latent attention the compressed forms are kept, query, keys and values
made again. Of routed experts what was dispatched to them is kept, and all of their products but the last run again:
grouped products are no products to the policy. What tensor ranks scatter is kept as it arrives, and the inputs of
products are gathered again in any backward pass, so that no transfer is repeated.

Source: the policy of torchtitan's selective activation checkpointing (``op``), which counts the products of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from steptime.model.spec import ModelSpec
from steptime.num import Num, maximum, minimum, where
from steptime.plan.plans import Plans
from steptime.plan.rows import Row

#: Rows that run again as a whole; below products of which a gated MLP makes the half again.
AGAIN: Final = frozenset({
    "attention_norm", "mlp_norm", "qk_norm", "q_norm", "kv_norm", "post_attention_norm", "rope", "q", "q_up", "kv_up",
    "attention_out", "attention_dropout", "attention_residual", "activation", "expert_activation", "shared_activation",
    "mlp_inner_dropout", "q_down_bias", "kv_down_bias", "qkv_bias", "attention_out_bias", "mlp_in_bias",
    "expert_in", "expert_in_bias", "attention_inputs_copy", "attention_quantise", "attention_context_copy",
})  # fmt: skip
INTO: Final = ("mlp_in", "shared_in")
OUT_OF: Final = ("mlp_out", "shared_out")
#: Rows whose input is made again; ``post_mlp_norm`` and ``shared_scale`` read what a product out of a gated MLP keeps.
DROPPED: Final = frozenset({
    "q", "q_down", "q_up", "kv_down", "kv_up", "qkv", "qk_norm", "post_attention_norm", "mlp_in", "router", *OUT_OF,
    "expert_activation", "expert_out",
})  # fmt: skip
ATTEND: Final = ("attend", "unaligned_attend")
CORE: Final = ("fused_attention", "scores", "unaligned_scores", *ATTEND)
READS_DOWN: Final = ("post_mlp_norm", "shared_scale")


def by_outputs(row: Row, chosen: Any, model: ModelSpec, plans: Plans) -> Iterator[Row]:
    """The row as ``outputs`` has it in the ``chosen`` plans, and beside a product out of an MLP its kept output."""
    share = share_again(row, model)
    kept = where(chosen, kept_bytes(row, model, plans), row.kept_bytes)
    again, sent = row.recomputed, row.sent_again
    if share:
        again, sent = where(chosen, maximum(again, share), again), where(chosen, 0.0, sent)
    yield row.keeping(kept, recomputed=again, sent_again=sent)
    if row.name in OUT_OF and model.gated_mlp:
        output = row.shape["m"] * row.shape["n"] * row.shape["element_bytes"]
        yield Row(name=f"{row.name}_output", block=row.block, operator="nothing", shape={}, share=row.share,
                  kept_bytes=where(chosen, output, 0.0 * output))  # fmt: skip


def share_again(row: Row, model: ModelSpec) -> float:
    """Share of a row's forward pass that backward repeats: of query, key and value together the columns of keys."""
    if row.name == "qkv":
        return model.kv_heads / (model.heads + 2 * model.kv_heads)
    if row.name in INTO:
        return 0.5 if model.gated_mlp else 0.0
    return 1.0 if row.name in AGAIN else 0.0


def kept_bytes(row: Row, model: ModelSpec, plans: Plans) -> Num:
    """Bytes that a row keeps, at most as many as without this kind; a norm behind experts keeps what they give."""
    reads_kept = row.name in READS_DOWN and model.gated_mlp and (model.experts is None or row.name == "shared_scale")
    if row.name in DROPPED or reads_kept:
        return 0.0 * row.kept_bytes
    if row.name == "mlp_norm":
        return where(plans.tp > 1, row.kept_bytes, 0.0 * row.kept_bytes)
    if row.operator == "gated_activation":
        return minimum(row.kept_bytes, row.shape["elements"] * row.shape["element_bytes"])
    return without_inputs(row, model) if row.operator in CORE else row.kept_bytes


def without_inputs(row: Row, model: ModelSpec) -> Num:
    """Bytes that a row of :data:`CORE` keeps beside queries, keys and values that are made again."""
    return maximum(row.kept_bytes - _remade_elements(row, model) * row.shape["element_bytes"], 0.0)


def _remade_elements(row: Row, model: ModelSpec) -> Num:
    """Elements of a rank's own queries, keys and values that attention keeps otherwise and that are made again."""
    shape, latent = row.shape, model.latent
    queries, local = shape["rows"], shape["kv_rows"] * shape["rows"] / shape["keys"]
    keys = local * model.head_dim
    if row.operator in ATTEND:
        return 0.0 * local if latent is None else local * latent.v_head_dim
    if latent is None:
        return keys
    values = local * latent.v_head_dim if row.operator == "fused_attention" else 0.0
    return queries * model.head_dim + keys + values
