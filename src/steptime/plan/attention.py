"""Rows of the attention core: full, causal or windowed; context ranks gather, pass on or exchange.

Latent attention has keys wider than values: $q_k$ and $q_v$. Two products of width $q$ do the work of one of each
where $q = (q_k + q_v) / 2$, which is the head width that the formulas get; kept bytes are counted exactly.
"""

from __future__ import annotations

from dataclasses import replace

from steptime.cost.attention import causal_pairs, fits_matrix_units, windowed_pairs
from steptime.cost.collective import ring_behind_share
from steptime.model.element_types import ELEMENT_BYTES
from steptime.num import Num, ceil_div, maximum, where
from steptime.plan.framework import COPIES
from steptime.plan.job import ATTENTION_DTYPES
from steptime.plan.plans import ATTENTION_RECOMPUTE, is_set
from steptime.plan.rows import Row, Transfer, fused_attention, move, over, unfused_attention
from steptime.plan.shapes import Shape

UNALIGNED = {"scores": "unaligned_scores", "attend": "unaligned_attend"}
"""Products of unfused attention that the matrix units do not take."""


class Heads:
    """Heads, queries and keys of one rank: with Ulysses whole sequences of fewer heads, else a sequence shard."""

    def __init__(self, s: Shape) -> None:
        ranks: Num = getattr(s.plans, s.axis) if s.axis else 1
        self.exchanged = s.axis == "cp" and s.job.context == "ulysses"
        cut = ranks if self.exchanged else 1
        self.ranks, self.batch, self.seq_len = ranks, s.plans.micro_batch, s.seq_len
        self.heads = ceil_div(s.heads, cut)
        self.kv_heads = maximum(ceil_div(s.kv_heads, cut), 1)
        self.queries = s.seq_len if self.exchanged else s.local
        self.rows = self.batch * self.heads * self.queries
        self.keys = self.batch * self.heads * s.seq_len
        self.kv_rows = self.batch * self.kv_heads * s.seq_len
        self.kv_local = self.batch * self.kv_heads * self.queries
        self.key_dim, self.value_dim = s.model.head_dim, s.value_dim
        self.head_dim = self.key_dim if self.key_dim == self.value_dim else (self.key_dim + self.value_dim) / 2

    @property
    def kept_elements(self) -> Num:
        """Queries, keys and values, without the statistics of the softmax."""
        if self.key_dim == self.value_dim:
            return (self.rows + 2 * self.kv_local) * self.key_dim
        return self.rows * self.key_dim + self.kv_local * (self.key_dim + self.value_dim)

    @property
    def ring_elements(self) -> Num:
        """Outputs that a ring keeps in its own order, apart from the input of the next product."""
        return where(self.ranks > 1, self.rows * self.value_dim, 0)


def attention_pairs(s: Shape, rows: Num) -> Num:
    """(query, key) pairs of a layer without a window: causal or full."""
    return causal_pairs(rows, s.attended) if s.model.causal else rows * s.attended


def windowed_share(s: Shape) -> float:
    """Share of the layers in which a window hides keys."""
    model = s.model
    if not model.causal or model.window is None or model.window >= s.attended:
        return 0.0
    return model.windowed_layers / model.layers


def attention_rows(s: Shape) -> tuple[Row, ...]:
    """Attention on local heads, with what context ranks exchange and what is copied from one layout to another."""
    heads, unfused = Heads(s), s.job.attention == "unfused"
    copied = s.job.unfused_copies if unfused else s.job.fused_copies
    core = _unfused(s, heads) if unfused else (*_quantised(s, heads), *_cores(s, heads))
    if not copied:
        return core
    again = where(is_set(s.plans.recompute, ATTENTION_RECOMPUTE), 1.0, 0.0) if unfused else 0.0
    sizes = {"inputs": heads.kept_elements, "context": heads.rows * heads.value_dim}
    inputs, context = (
        [replace(_copy(name, sizes[name] * s.element_bytes), recomputed=again)] if name in copied else []
        for name in COPIES
    )
    if not unfused:  # of one sequence, sequence first and batch first are the same
        context = [replace(row, share=where(s.plans.micro_batch > 1, 1.0, 0.0)) for row in context]
    return (*inputs, *core, *context)


def _quantised(s: Shape, heads: Heads) -> tuple[Row, ...]:
    """Queries, keys and values, and in backward the gradient of what attention returns, in the format of its products.

    Source: Transformer Engine, `fp8_dpa`, whose outputs stay in 16 bits.
    """
    if s.job.precision.attention_dtype not in ATTENTION_DTYPES:
        return ()
    read, written = s.element_bytes, ELEMENT_BYTES[s.job.precision.attention_dtype]
    inputs, gradient = heads.kept_elements, heads.rows * heads.value_dim
    return (
        move("attention_quantise", "attention", inputs * read, inputs * written, operator="move_forward"),
        move("attention_quantise_gradient", "attention", gradient * read, gradient * written,
             operator="move_backward"),
    )  # fmt: skip


def _copy(name: str, size: Num) -> Row:
    """Queries, keys and values, or what attention returns, read and written in the layout that comes next."""
    return move(f"attention_{name}_copy", "attention", size, size)


def _cores(s: Shape, heads: Heads) -> tuple[Row, ...]:
    """Fused attention; in layers with a window, and in those without."""
    share = windowed_share(s)
    if not share or s.model.window is None:
        return (_fused(s, heads, "fused_attention", attention_pairs(s, heads.rows), None),)
    whole, windowed = causal_pairs(heads.rows, s.attended), windowed_pairs(heads.rows, s.attended, s.model.window)
    rows = (
        replace(_fused(s, heads, "fused_attention", whole, 0), share=1.0 - share),
        replace(_fused(s, heads, "windowed_attention", windowed, s.model.window), share=share),
    )
    return tuple(row for row in rows if row.share)


def _fused(s: Shape, heads: Heads, name: str, pairs: Num, window: int | None) -> Row:
    forward, backward = _transfers(s, heads, 2 * heads.kv_rows * heads.head_dim * s.element_bytes)
    row = fused_attention(
        name, "attention", pairs=pairs, rows=heads.rows, keys=heads.keys, kv_rows=heads.kv_rows,
        kv_rows_read=heads.kv_rows, head_dim=heads.head_dim, dropout=int(s.model.dropout), accumulate=1,
        element_bytes=s.element_bytes, kept_elements=heads.kept_elements + 2 * heads.rows,
        tiles=_tiles(s, heads, pairs, window), forward=forward, backward=backward,
    )  # fmt: skip
    if s.model.attention_sinks:
        row = replace(row, weights=s.heads)
    if s.axis == "cp" and s.job.context == "ring":
        kept = row.kept_bytes + heads.ring_elements * s.element_bytes
        row = replace(row, overlaps=ring_behind_share(heads.ranks), kept_bytes=kept)
    return row


def _unfused(s: Shape, heads: Heads) -> tuple[Row, ...]:
    """Kernels of their own; scaling is undone in the backward pass, a mask that is added needs none."""
    forward, backward = _transfers(s, heads, heads.kv_rows * heads.head_dim * s.element_bytes)
    pairs, again = heads.rows * s.seq_len, where(is_set(s.plans.recompute, ATTENTION_RECOMPUTE), 1.0, 0.0)
    scores, *rest = unfused_attention(
        ("scores", "softmax", "probability_dropout", "attend"), "attention", pairs=pairs,
        rows=heads.rows, keys=heads.keys, kv_rows=heads.kv_rows, head_dim=heads.head_dim, dropout=s.model.dropout,
        accumulate=1, element_bytes=s.element_bytes, mask_bytes=s.mask_bytes,
        kept_scores=(heads.rows + heads.kv_local) * heads.key_dim, kept_attend=heads.kv_local * heads.value_dim,
        recomputed=again, forward=forward, backward=backward,
    )  # fmt: skip
    if s.job.triangular_softmax and s.model.causal:
        rest = [replace(row, operator="triangular_softmax") if row.operator == "softmax" else row for row in rest]
    if not fits_matrix_units(heads.head_dim, s.element_bytes):
        scores, *rest = (replace(row, operator=UNALIGNED.get(row.operator, row.operator)) for row in (scores, *rest))
    if not s.job.separate_kernels:
        return (scores, *rest)
    size = pairs * s.element_bytes
    masking = (move("score_scale", "attention", size, size),
               move("score_mask", "attention", size, size, operator="move_forward"))  # fmt: skip
    return (scores, *[replace(row, recomputed=again) for row in masking], *rest)


def _transfers(s: Shape, heads: Heads, gathered: Num) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Forward and backward; ``gathered`` are the bytes of all keys and values that a kernel sees."""
    if not s.axis:
        return (), ()
    if heads.exchanged:
        queries = heads.rows * s.element_bytes
        there = queries * heads.key_dim + gathered
        both = (over(s.axis, "all_to_all", there), over(s.axis, "all_to_all", queries * heads.value_dim))
        return both, both
    if s.axis == "cp" and s.job.context == "ring":
        block = gathered / heads.ranks
        return (over(s.axis, "ring_exchange", block),), (over(s.axis, "ring_exchange", 2 * block),)
    gather = over(s.axis, "all_gather", gathered)
    return (gather,), (gather, over(s.axis, "reduce_scatter", gathered))


def _tiles(s: Shape, heads: Heads, pairs: Num, window: int | None) -> dict[str, Num]:
    """What a tiled kernel sees: documents; a sequence shard is balanced, its queries see the mean number of keys."""
    reaches = window is not None and window < s.attended
    alike = s.model.causal and (reaches or not s.model.windowed_layers or (s.model.window or 0) >= s.attended)
    causal = where((heads.ranks <= 1) | heads.exchanged, float(alike), 0.0)
    documents = where(causal > 0, s.seq_len / s.attended, 1.0)
    return {
        "batch": heads.batch * documents, "heads": heads.heads, "kv_heads": heads.kv_heads,
        "queries": heads.queries / documents, "seen_keys": where(causal > 0, s.attended, pairs / heads.rows),
        "causal": causal,
        "window": float(window or 0) * float(reaches) * causal,
    }  # fmt: skip
