"""Rows of the operators that kinds of layers declare (:mod:`steptime.model.kinds`), and how tensor ranks cut them.

Channels and heads are cut over ``tp``; narrow tensors that all ranks need are summed over it. Recurrences run along the
whole sequence: each rank of a sequence axis hands its states to the next ones (an all-gather of the states of one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from steptime.cost.attention import causal_pairs
from steptime.model.spec import LayerKind, LayerOperator
from steptime.num import Num, ceil_div, minimum, where
from steptime.plan.attention import Heads, attention_rows, context_traffic, pairs_in_window
from steptime.plan.job import Job
from steptime.plan.rows import (
    SILENT,
    Core,
    Row,
    Shape,
    Traffic,
    activation,
    bias,
    fused_attention,
    grouped_matmul,
    matmul,
    norm,
    over,
    residual,
)

STATE_BYTES: Final = 4.0


class Ends(Protocol):
    """Rows of a strategy at the ends of a region."""

    def norm(self, shape: Shape, name: str, block: str) -> Row:
        """Row of a norm of the residual stream."""

    def into_block(self, shape: Shape, name: str, block: str, n: Num) -> Row:
        """Row of the product that enters a block."""

    def out_of_block(self, shape: Shape, name: str, block: str, k: Num, k_global: int) -> Row:
        """Row of the product that leaves a block."""

    def out_bias(self, shape: Shape, name: str, block: str) -> Row:
        """Row of the bias of the product that leaves a block."""

    def stream_elements(self, shape: Shape) -> Num:
        """Elements of the residual stream on one device."""


Rows = list[Row]
BLOCK: Final = "mixer"


def declared_rows(ends: Ends, s: Shape, operators: Iterable[LayerOperator], share: float = 1.0) -> Rows:
    """Rows of the operators of one layer; ``share``: sets of shared weights per layer."""
    out: Rows = []
    for each in operators:
        rows = ROWS[each.form](ends, s, each)
        out += shared_weights(rows, share) if each.shared else rows
    return out


def shared_weights(rows: Iterable[Row], share: float) -> Rows:
    """Rows in which weights that several layers share are counted once."""
    if share == 1.0:
        return list(rows)
    return [replace(row, weights=row.weights * share, replicated=row.replicated * share) for row in rows]


def of_job(job: Job, kind: LayerKind) -> Job:
    """The job with layers of one kind only; without a causal mask a window splits its tokens into parts."""
    model = kind.block
    parts = model.window if model.window and model.windowed_layers and not model.causal else job.document_length
    return replace(job, model=model, seq_len=kind.tokens or job.seq_len, document_length=parts)


def of_kind(rows: Iterable[Row], kind: LayerKind, share: Num) -> Rows:
    """Rows of a layer of one kind as its share of the mean layer."""
    return [replace(row, name=f"{kind.name}_{row.name}", kind=kind.name, share=row.share * share) for row in rows]


def _tokens(s: Shape, op: LayerOperator) -> Num:
    """Tokens of the operator on this device, for an input that is not sharded over ``tp``."""
    if not op.tokens:
        return s.tokens
    ranks: Num = getattr(s.plans, s.axis) if s.axis else 1
    return s.plans.micro_batch * ceil_div(op.tokens, ranks)


def _sharded(s: Shape, op: LayerOperator) -> Num:
    """Tokens of the operator in a sequence shard."""
    return s.sharded_tokens if not op.tokens else _tokens(s, op)


def _norm(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    row = ends.norm(s, op.name, BLOCK)
    if op.tokens or op.width:
        width = op.width or s.hidden
        row = norm(op.name, BLOCK, _sharded(s, op), width, element_bytes=s.element_bytes, kind=s.norm_kind)
    return [_keeping(replace(row, weights=op.parameters, replicated=op.parameters), op)]


def _residual(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    elements = ends.stream_elements(s) if not op.tokens else _tokens(s, op) * s.hidden
    return [residual(op.name, BLOCK, elements, element_bytes=s.element_bytes)]


def _into(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    (n, copied), depth = _columns(s, op), op.depth or s.hidden
    row = ends.into_block(s, op.name, BLOCK, n)
    if op.tokens or depth != s.hidden:
        tokens = _tokens(s, op)
        size = tokens * depth * s.element_bytes
        row = matmul(
            op.name,
            BLOCK,
            s.product(tokens, n, depth),
            kept_elements=_sharded(s, op) * depth,
            traffic=Traffic(s.gather(size), s.gather_again(size)),
        )
    if op.parameters:
        row = replace(row, weights=row.weights + op.parameters / s.tp)
    if "groups" in op.size:
        row = replace(row, replicated=copied * depth)
    return [_keeping(row, op), *_bias(s, op, _tokens(s, op), n)]


def _columns(s: Shape, op: LayerOperator) -> tuple[Num, Num]:
    """Columns on a rank, and the replicated ones among them: matrices of a group that several ranks share."""
    groups, width = op.size.get("groups", 0), op.size.get("group_width", 0)
    shared = ceil_div(groups, s.tp) * width
    return ceil_div(op.width - groups * width, s.tp) + shared, where(s.tp > groups, shared, 0)


def _out(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    rows = [_keeping(ends.out_of_block(s, op.name, BLOCK, ceil_div(op.depth, s.tp), op.depth), op)]
    return [*rows, ends.out_bias(s, f"{op.name}_bias", BLOCK)] if op.bias else rows


def _whole(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    tokens, depth = _sharded(s, op), op.depth or s.hidden
    product = s.product(tokens, op.width, depth)
    row = matmul(op.name, BLOCK, product, kept_elements=tokens * depth, replicated=op.width * depth)
    return [_keeping(row, op), *_bias(s, op, tokens, op.width, replicated=True)]


def _up(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    n, size = ceil_div(op.width, s.tp), s.tokens * op.depth * s.element_bytes
    row = matmul(
        op.name,
        BLOCK,
        s.product(s.tokens, n, op.depth),
        kept_elements=s.sharded_tokens * op.depth,
        traffic=Traffic(s.gather(size), s.gather_again(size)),
    )
    return [row, *_bias(s, op, s.tokens, n)]


def _narrow(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    k, sent = ceil_div(op.depth, s.tp), over("tp", "all_reduce", s.tokens * op.width * s.element_bytes)
    product = s.product(s.tokens, op.width, k)
    row = matmul(op.name, BLOCK, product, kept_elements=s.tokens * k, traffic=Traffic((sent,), (sent,)))
    return [_keeping(row, op)]


def _blocks(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of a block-diagonal product: one product per block; both matrices of a block have the same input."""
    blocks, copies = op.size["blocks"], op.width / op.depth
    local = blocks / s.tp
    width = op.depth / blocks
    product = s.product(s.tokens * local, width * copies, width)
    row = grouped_matmul(
        op.name, BLOCK, product, local, kept_elements=s.tokens * op.depth / s.tp, weights=op.parameters / s.tp
    )
    return [replace(row, expert=False)]


def _inner_norm(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of a norm over columns that ranks cut, or over a tensor that all ranks have."""
    size = op.size
    cut: Num = 1 if size.get("whole") else s.tp
    per_token = size.get("rows", 1)
    local = ceil_div(per_token, cut) if per_token > 1 else 1
    width = op.width / per_token if per_token > 1 else ceil_div(op.width, cut)
    weights = op.parameters if per_token > 1 else op.parameters / cut
    row = norm(op.name, BLOCK, s.tokens * local, width, element_bytes=s.element_bytes, kind="rms_norm", weights=weights)
    row = row if per_token > 1 or size.get("whole") else replace(row, replicated=0.0 * weights)
    return [_keeping(row, op)]


def _convolution(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    channels, copied = _columns(s, op)
    elements, each = s.tokens * channels, op.parameters / op.width
    return [
        Row(
            name=op.name,
            block=BLOCK,
            operator="convolution",
            shape={"elements": elements, "kernel": op.size["kernel"], "element_bytes": s.element_bytes},
            kept_bytes=elements * s.element_bytes,
            weights=channels * each,
            replicated=copied * each,
        )
    ]


def _gate(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of a gate, which keeps both factors, or one if the kernel before it keeps the source of the other."""
    elements = s.tokens * ceil_div(op.width, s.tp)
    row = activation(op.name, BLOCK, elements, element_bytes=s.element_bytes, gated=True)
    return [replace(row, kept_bytes=op.size.get("factors", 2) * elements * s.element_bytes)]


def _pass(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    return [activation(op.name, BLOCK, _sharded(s, op) * op.width, element_bytes=s.element_bytes)]


def _table(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    return [
        Row(name=op.name, block=BLOCK, operator="nothing", shape={}, weights=op.parameters, replicated=op.parameters)
    ]


def _selective_scan(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    channels, state = ceil_div(op.width, s.tp), op.size["state"]
    shape = {"tokens": s.tokens, "channels": channels, "state": state, "element_bytes": s.element_bytes}
    # Kept are the step size and both matrices; the product that made these keeps the input. A kernel of the whole
    # layer makes its input and the step size again.
    kept = s.tokens * ((channels if op.kept else 0) + 2 * state) * s.element_bytes
    return [_recurrence(s, op, "selective_scan", shape, kept, channels * state)]


def _ssd(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of SSD (Mamba-2); ranks with fewer heads than a group share the input and output matrices of the group.

    The backward kernel makes its inputs again from those of the convolution; only the step sizes are kept.
    """
    size = op.size
    heads, groups = ceil_div(size["heads"], s.tp), ceil_div(size["groups"], s.tp)
    shape = {
        "tokens": s.tokens,
        "heads": heads,
        "head_dim": size["head_dim"],
        "state": size["state"],
        "groups": groups,
        "chunk": _chunk(s, size),
        "element_bytes": s.element_bytes,
    }
    kept = s.tokens * heads * s.element_bytes
    return [_recurrence(s, op, "ssd", shape, kept, heads * size["head_dim"] * size["state"])]


def _linear(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    size = op.size
    heads, keys, values = ceil_div(size["heads"], s.tp), size["key_dim"], size["value_dim"]
    shape = {
        "tokens": s.tokens,
        "heads": heads,
        "key_dim": keys,
        "value_dim": values,
        "chunk": _chunk(s, size),
        "element_bytes": s.element_bytes,
    }
    kept = s.tokens * heads * (2 * keys + values + 2) * s.element_bytes
    if op.form == "delta_rule":  # the inverse within a chunk
        kept = kept + s.tokens * heads * shape["chunk"] * s.element_bytes
    return [_recurrence(s, op, op.form, shape, kept, heads * keys * values)]


def _linear_recurrence(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    channels = ceil_div(op.width, s.tp)
    shape = {"tokens": s.tokens, "channels": channels, "element_bytes": s.element_bytes}
    kept = 4 * s.tokens * channels * s.element_bytes
    return [_recurrence(s, op, "linear_recurrence", shape, kept, channels)]


def _recurrence(s: Shape, op: LayerOperator, operator: str, shape: Mapping[str, Num], kept: Num, states: Num) -> Row:
    """Row of a recurrence; ``states``: elements of the states that it hands over for one sequence."""
    traffic = SILENT
    if s.axis is not None:
        ranks: Num = getattr(s.plans, s.axis)
        handed = over(s.axis, "all_gather", s.plans.micro_batch * states * STATE_BYTES * where(ranks > 1, ranks, 0))
        traffic = Traffic((handed,), (handed,))
    return Row(
        name=op.name,
        block=BLOCK,
        operator=operator,
        shape=shape,
        kept_bytes=kept,
        weights=op.parameters / s.tp,
        forward=traffic.forward,
        backward=traffic.backward,
    )


def _chunk(s: Shape, size: Mapping[str, float]) -> float:
    """Tokens of a chunk; a shorter sequence is one chunk."""
    return min(size["chunk"], s.seq_len)


def _index_scores(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of the indexer of sparse attention, whole on each rank: it chooses for the sequence shard, for all heads."""
    size, rows = op.size, s.sharded_tokens
    pairs = causal_pairs(rows, s.attended) + rows * s.before
    chosen = pairs_in_window(s, rows, minimum(size["top_k"], s.attended + s.before))
    shape = {
        "pairs": pairs,
        "chosen": chosen,
        "index_rows": rows,
        "index_heads": size["heads"],
        "index_dim": size["head_dim"],
        "element_bytes": s.element_bytes,
    }
    return [Row(name=op.name, block=BLOCK, operator="index_scores", shape=shape)]


def _cross(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    """Row of cross-attention; context ranks exchange keys and values as in attention."""
    heads, context = Heads(s), op.size["context"] or s.seq_len
    queries, columns = heads.rows, s.plans.micro_batch * context
    core = Core(
        pairs=queries * context,
        rows=queries,
        keys=columns * heads.heads,
        kv_rows=columns * heads.kv_heads,
        head_dim=heads.head_dim,
        element_bytes=s.element_bytes,
        dropout=s.model.dropout,
    )
    local = core.kv_rows / (1 if heads.exchanged else heads.ranks)
    tiles = {
        "batch": heads.batch,
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "queries": heads.queries,
        "seen_keys": context,
        "causal": 0.0,
        "window": 0.0,
    }
    row = fused_attention(
        op.name,
        BLOCK,
        core,
        kept_elements=(queries + 2 * local) * heads.head_dim + 2 * queries,
        tiles=tiles,
        traffic=context_traffic(s, heads, 2 * core.kv_rows * heads.head_dim * s.element_bytes),
    )
    return [replace(row, weights=op.parameters, replicated=op.parameters)]


def _core(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    rows = list(attention_rows(s))
    return [replace(rows[0], weights=rows[0].weights + op.parameters), *rows[1:]]


def _opaque(ends: Ends, s: Shape, op: LayerOperator) -> Rows:
    size = op.size
    share: Num = 1.0 / s.tp if size["cut"] else 1.0
    tokens = s.tokens * share
    shape = {"matrix_flops": tokens * size["flops"], "moved_bytes": tokens * size["moved"]}
    weights = op.parameters * share
    return [
        Row(
            name=op.name,
            block=BLOCK,
            operator="opaque",
            shape=shape,
            kept_bytes=tokens * size["kept"],
            weights=weights,
            replicated=0.0 * weights if size["cut"] else weights,
        )
    ]


def _keeping(row: Row, op: LayerOperator) -> Row:
    return row if op.kept else replace(row, kept_bytes=0.0 * row.kept_bytes)


def _bias(s: Shape, op: LayerOperator, tokens: Num, width: Num, *, replicated: bool = False) -> Rows:
    if not op.bias:
        return []
    row = bias(f"{op.name}_bias", BLOCK, tokens, width, element_bytes=s.element_bytes, replicated=replicated)
    return [row]


ROWS: Final[Mapping[str, Callable[[Ends, Shape, LayerOperator], Rows]]] = {
    "norm": _norm,
    "residual": _residual,
    "into": _into,
    "out": _out,
    "whole": _whole,
    "up": _up,
    "narrow": _narrow,
    "blocks": _blocks,
    "inner_norm": _inner_norm,
    "convolution": _convolution,
    "gate": _gate,
    "pass": _pass,
    "table": _table,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
    "delta_rule": _linear,
    "linear_attention": _linear,
    "linear_recurrence": _linear_recurrence,
    "index_scores": _index_scores,
    "cross": _cross,
    "core": _core,
    "opaque": _opaque,
}
"""Form of an operator -> function that makes its rows."""
