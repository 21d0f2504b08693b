"""Local shapes of a micro-batch under the corrected strategies, and the rows of the attention core."""

from __future__ import annotations

from steptime.cost.attention import causal_pairs
from steptime.num import Num, ceil_div, maximum, where
from steptime.plan.job import Job
from steptime.plan.plans import ATTENTION_RECOMPUTE, Plans
from steptime.plan.rows import Row, Transfer, fused_attention, over, unfused_attention


class Shape:
    """Local sizes of a micro-batch under a tensor axis ``tp`` and a sequence axis."""

    def __init__(self, job: Job, plans: Plans, sequence_axis: str | None) -> None:
        model = job.model
        self.job, self.plans, self.model, self.axis = job, plans, model, sequence_axis
        self.element_bytes, self.mask_bytes = job.precision.element_bytes, job.precision.mask_bytes
        self.hidden, self.seq_len = model.hidden, job.seq_len
        self.tp = plans.tp
        ranks: Num = getattr(plans, sequence_axis) if sequence_axis else 1
        self.local = ceil_div(job.seq_len, ranks)
        self.tokens = plans.micro_batch * self.local
        self.sharded_tokens = plans.micro_batch * ceil_div(self.local, plans.tp)
        self.heads, self.kv_heads = ceil_div(model.heads, plans.tp), ceil_div(model.kv_heads, plans.tp)
        self.query_width = self.heads * model.head_dim
        self.qkv_width = (self.heads + 2 * self.kv_heads) * model.head_dim
        self.ffn = ceil_div(model.ffn_hidden, plans.tp)
        self.ffn_in = self.ffn * (2 if model.gated_mlp else 1)
        self.vocab = ceil_div(model.vocab, plans.tp)
        self.norm_kind = "layer_norm" if model.norm == "layernorm" else "rms_norm"
        self.norm_weights = 2 if model.norm_bias else 1
        gathered_kv = where(ranks > 1, 2 * plans.micro_batch * job.seq_len * self.kv_heads * model.head_dim, 0)
        mlp = self.tokens * (where(plans.tp > 1, model.hidden, 0) + self.ffn_in)
        self.working_elements = maximum(mlp, 2 * gathered_kv)
        """Largest temporary: gathered input and inner gradient of the MLP, or gathered keys and values with theirs."""
        self.activation_bytes = self.tokens * model.hidden * self.element_bytes


def attention_pairs(shape: Shape, rows: Num) -> Num:
    """(query, key) pairs of a layer: causal or full; the mean over layers where some have a window."""
    model, length = shape.model, shape.seq_len
    if not model.causal:
        return rows * length
    whole = causal_pairs(rows, length)
    if model.window is None or model.window >= length or not model.windowed_layers:
        return whole
    window = model.window
    windowed = rows * (window - window * (window - 1) / (2 * length))
    share = model.windowed_layers / model.layers
    return (1 - share) * whole + share * windowed


def attention_rows(shape: Shape) -> tuple[Row, ...]:
    """Attention core on local heads; keys and values of other sequence shards are gathered."""
    model, batch, element = shape.model, shape.plans.micro_batch, shape.element_bytes
    rows = batch * shape.heads * shape.local
    keys = batch * shape.heads * shape.seq_len
    kv_rows = batch * shape.kv_heads * shape.seq_len
    kv_local = batch * shape.kv_heads * shape.local
    q = model.head_dim
    if shape.job.attention == "unfused":
        gathered = kv_rows * q * element
        return unfused_attention(
            ("scores", "softmax", "probability_dropout", "attend"), "attention", pairs=rows * shape.seq_len, rows=rows,
            keys=keys, kv_rows=kv_rows, head_dim=q, dropout=model.dropout, accumulate=1, element_bytes=element,
            mask_bytes=shape.mask_bytes, kept_scores=(rows + kv_local) * q, kept_attend=kv_local * q,
            recomputed=where(shape.plans.recompute == ATTENTION_RECOMPUTE, 1.0, 0.0),
            forward=_gathered(shape, gathered), backward=_gathered_and_scattered(shape, gathered),
        )  # fmt: skip
    gathered = 2 * kv_rows * q * element
    row = fused_attention(
        "fused_attention", "attention", pairs=attention_pairs(shape, rows), rows=rows, keys=keys, kv_rows=kv_rows,
        kv_rows_read=kv_rows, head_dim=q, dropout=int(model.dropout), accumulate=1, element_bytes=element,
        kept_elements=(rows + 2 * kv_local) * q + 2 * rows, tiles=_tiles(shape, rows),
        forward=_gathered(shape, gathered), backward=_gathered_and_scattered(shape, gathered),
    )  # fmt: skip
    return (row,)


def _gathered(shape: Shape, size_bytes: Num) -> tuple[Transfer, ...]:
    return (over(shape.axis, "all_gather", size_bytes),) if shape.axis else ()


def _gathered_and_scattered(shape: Shape, size_bytes: Num) -> tuple[Transfer, ...]:
    if not shape.axis:
        return ()
    return (over(shape.axis, "all_gather", size_bytes), over(shape.axis, "reduce_scatter", size_bytes))


def _tiles(shape: Shape, rows: Num) -> dict[str, Num]:
    """What a tiled kernel sees; a sequence shard is balanced, so each of its queries sees the mean number of keys."""
    model, whole = shape.model, shape.axis is None
    mean_keys = attention_pairs(shape, rows) / rows
    causal = whole and model.causal and not model.windowed_layers
    return {
        "batch": shape.plans.micro_batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "queries": shape.local,
        "seen_keys": shape.seq_len if causal else mean_keys, "causal": float(causal), "window": 0.0,
    }  # fmt: skip
