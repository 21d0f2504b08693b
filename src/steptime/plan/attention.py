"""Rows of the attention core: full, causal or windowed; context ranks gather, pass on or exchange keys and values.

Latent attention has keys wider than values: $q_k$ and $q_v$. Two products of width $q$ do the work of one of each
where $q = (q_k + q_v) / 2$, which is the head width that the formulas get; kept bytes are counted exactly.

Rows of a mixture of experts in place of the MLP.

Tokens of a rank's sequence shard choose experts; their copies go to the ranks of ``ep`` that have them (and are
gathered over ``etp`` where ranks share an expert), pass through two grouped products, and come back. The axes of the
experts divide the ranks of ``tp``, ``cp`` and ``dp`` in another way (parallel folding, arXiv 2504.14960). Ranks have
equal numbers of experts; the fullest one has ``Shape.expert_load`` times the mean of the rows. The probabilities weigh
the activation, so that the combination is a plain sum and keeps nothing.

Rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) under tensor parallelism.

The down projections work on the sequence shard with whole weights on every rank; the narrow latents, not the hidden
state, are gathered for the up projections, whose columns (heads) are cut. Keys and values are expanded for training.

Low-rank adapters (LoRA, arXiv 2106.09685): the weights are frozen, two narrow products added to each are trained.

A product of m x k by k x n gets m x k by k x r and m x r by r x n for every projection that it joins (queries, keys
and values; gate and up). Frozen products have no gradient of their weights; their input is kept where an adapter
needs it. With a 4-bit format of its own (QLoRA, arXiv 2305.14314) a weight is expanded before each product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from steptime.cost.attention import causal_pairs, fits_matrix_units, windowed_pairs
from steptime.cost.collective import ring_behind_share
from steptime.cost.experts import once_share
from steptime.model.spec import ELEMENT_BYTES, Experts, LatentAttention, ModelSpec
from steptime.num import Num, ceil_div, maximum, minimum, where
from steptime.options import choices_of
from steptime.plan.copies import NARROW
from steptime.plan.framework import COPIES
from steptime.plan.job import TARGETS, Adapter, Job
from steptime.plan.plans import ATTENTION_RECOMPUTE, is_set
from steptime.plan.rows import (
    SILENT,
    Core,
    Product,
    Row,
    Shape,
    Traffic,
    Transfer,
    activation,
    bias,
    fused_attention,
    grouped_matmul,
    matmul,
    move,
    norm,
    over,
    residual,
    rope,
    unfused_attention,
)

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
        self.keys = self.batch * self.heads * (s.seq_len + s.before)
        self.kv_rows = self.batch * self.kv_heads * (s.seq_len + s.before)
        self.kv_local = self.batch * self.kv_heads * self.queries
        self.key_dim, self.value_dim = s.model.head_dim, s.value_dim
        self.head_dim = self.key_dim if self.key_dim == self.value_dim else (self.key_dim + self.value_dim) / 2

    @property
    def kept_elements(self) -> Num:
        """Queries, keys and values, without the statistics of the softmax."""
        if self.key_dim == self.value_dim:
            return (self.rows + 2 * self.kv_local) * self.key_dim
        return self.rows * self.key_dim + self.kv_local * (self.key_dim + self.value_dim)

    def core(self, s: Shape, pairs: Num) -> Core:
        """Size of the attention core for a number of (query, key) pairs."""
        return Core(
            pairs=pairs,
            rows=self.rows,
            keys=self.keys,
            kv_rows=self.kv_rows,
            head_dim=self.head_dim,
            element_bytes=s.element_bytes,
            dropout=s.model.dropout,
        )

    @property
    def ring_elements(self) -> Num:
        """Elements of outputs that a ring keeps in its own order, in addition to the input of the next product."""
        return where(self.ranks > 1, self.rows * self.value_dim, 0)


def attention_pairs(s: Shape, rows: Num) -> Num:
    """(query, key) pairs of a layer without a window: causal or full, and all keys of earlier slices."""
    return (causal_pairs(rows, s.attended) if s.model.causal else rows * s.attended) + rows * s.before


def pairs_in_window(s: Shape, rows: Num, window: Num) -> Num:
    """(query, key) pairs of a causal layer with a window; a slice has the pairs up to its end less the earlier ones."""
    if not s.before:
        return windowed_pairs(rows, s.attended, window)
    until, each = s.attended + s.before, rows / s.attended
    both = (windowed_pairs(each * length, length, minimum(window, length)) for length in (until, s.before))
    return next(both) - next(both)


def windowed_share(s: Shape) -> float:
    """Share of the layers in which a window masks keys."""
    model = s.model
    if not model.causal or model.window is None or model.window >= s.attended + s.before:
        return 0.0
    return model.windowed_layers / model.layers


def attention_rows(s: Shape) -> tuple[Row, ...]:
    """Rows of attention on local heads, with traffic of context ranks and copies between layouts."""
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
    """Rows that cast queries, keys and values, and backward the gradient of the output, to the format of the products.

    Source: Transformer Engine, `fp8_dpa`, whose outputs stay in 16 bits.
    """
    if s.job.precision.attention_dtype not in choices_of("attention_dtype"):
        return ()
    read, written = s.element_bytes, ELEMENT_BYTES[s.job.precision.attention_dtype]
    inputs, gradient = heads.kept_elements, heads.rows * heads.value_dim
    return (
        move("attention_quantise", "attention", inputs * read, inputs * written, operator="move_forward"),
        move("attention_quantise_gradient", "attention", gradient * read, gradient * written, operator="move_backward"),
    )


def _copy(name: str, size: Num) -> Row:
    """Row that copies queries, keys and values, or the output of attention, to the layout of the next operator."""
    return move(f"attention_{name}_copy", "attention", size, size)


def _cores(s: Shape, heads: Heads) -> tuple[Row, ...]:
    """Rows of fused attention, separate for layers with and without a window."""
    share = windowed_share(s)
    if not share or s.model.window is None:
        return (_fused(s, heads, "fused_attention", attention_pairs(s, heads.rows), None),)
    whole, windowed = attention_pairs(s, heads.rows), pairs_in_window(s, heads.rows, s.model.window)
    rows = (
        replace(_fused(s, heads, "fused_attention", whole, 0), share=1.0 - share),
        replace(_fused(s, heads, "windowed_attention", windowed, s.model.window), share=share),
    )
    return tuple(row for row in rows if row.share)


def _fused(s: Shape, heads: Heads, name: str, pairs: Num, window: int | None) -> Row:
    row = fused_attention(
        name,
        "attention",
        heads.core(s, pairs),
        kept_elements=heads.kept_elements + 2 * heads.rows,
        tiles=_tiles(s, heads, pairs, window),
        traffic=context_traffic(s, heads, 2 * heads.kv_rows * heads.head_dim * s.element_bytes),
    )
    if s.model.attention_sinks:
        row = replace(row, weights=s.heads)
    if s.axis == "cp" and s.job.context == "ring":
        kept = row.kept_bytes + heads.ring_elements * s.element_bytes
        row = replace(row, overlaps=ring_behind_share(heads.ranks), kept_bytes=kept)
    return row


def _unfused(s: Shape, heads: Heads) -> tuple[Row, ...]:
    """Rows of unfused attention; backward repeats the scaling, while an added mask needs no kernel."""
    pairs, again = heads.rows * (s.seq_len + s.before), where(is_set(s.plans.recompute, ATTENTION_RECOMPUTE), 1.0, 0.0)
    scores, *rest = unfused_attention(
        ("scores", "softmax", "probability_dropout", "attend"),
        "attention",
        heads.core(s, pairs),
        mask_bytes=s.mask_bytes,
        kept_scores=(heads.rows + heads.kv_local) * heads.key_dim,
        kept_attend=heads.kv_local * heads.value_dim,
        recomputed=again,
        traffic=context_traffic(s, heads, heads.kv_rows * heads.head_dim * s.element_bytes),
    )
    if s.job.triangular_softmax and s.model.causal:
        rest = [replace(row, operator="triangular_softmax") if row.operator == "softmax" else row for row in rest]
    if not fits_matrix_units(heads.head_dim, s.element_bytes):
        scores, *rest = (replace(row, operator=UNALIGNED.get(row.operator, row.operator)) for row in (scores, *rest))
    if not s.job.separate_kernels:
        return (scores, *rest)
    size = pairs * s.element_bytes
    masking = (
        move("score_scale", "attention", size, size),
        move("score_mask", "attention", size, size, operator="move_forward"),
    )
    return (scores, *[replace(row, recomputed=again) for row in masking], *rest)


def context_traffic(s: Shape, heads: Heads, gathered: Num) -> Traffic:
    """Traffic of context ranks; ``gathered``: bytes of all keys and values that a kernel reads."""
    if not s.axis:
        return SILENT
    if heads.exchanged:
        queries = heads.rows * s.element_bytes
        there = queries * heads.key_dim + gathered
        both = (over(s.axis, "all_to_all", there), over(s.axis, "all_to_all", queries * heads.value_dim))
        return Traffic(both, both)
    if s.axis == "cp" and s.job.context == "ring":
        block = gathered / heads.ranks
        return Traffic((over(s.axis, "ring_exchange", block),), (over(s.axis, "ring_exchange", 2 * block),))
    gather = over(s.axis, "all_gather", gathered)
    return Traffic((gather,), (gather, over(s.axis, "reduce_scatter", gathered)))


def _tiles(s: Shape, heads: Heads, pairs: Num, window: int | None) -> dict[str, Num]:
    """Arguments of the tiled kernel per document; queries of a balanced sequence shard see the mean number of keys."""
    reaches = window is not None and window < s.attended + s.before
    alike = s.model.causal and (reaches or not s.model.windowed_layers or (s.model.window or 0) >= s.attended)
    causal = where((heads.ranks <= 1) | heads.exchanged, float(alike and not s.before), 0.0)
    documents = where(causal > 0, s.seq_len / s.attended, 1.0)
    return {
        "batch": heads.batch * documents,
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "queries": heads.queries / documents,
        "seen_keys": where(causal > 0, s.attended, pairs / heads.rows),
        "causal": causal,
        "window": float(window or 0) * float(reaches) * causal,
    }


EXPERT_BLOCK = "experts"
ROUTER_BYTES = 4.0
"""Bytes of an element in the router, which computes in fp32."""


def expert_rows(s: Shape, experts: Experts) -> list[Row]:
    """Rows of router, dispatch, experts and combination; the strategy's dense rows are the shared expert."""
    dispatch, combine = _moves(s, experts)
    return [*_router(s, experts), *dispatch, *_products(s, experts), *combine]


def _router(s: Shape, experts: Experts) -> list[Row]:
    tokens, count = s.sharded_tokens, experts.experts
    weights = count * (s.hidden + int(experts.router_bias))
    size = Product(m=tokens, n=count, k=s.hidden, element_bytes=ROUTER_BYTES)
    product = matmul("router", EXPERT_BLOCK, size, kept_elements=0, weights=weights)
    scores = tokens * count * ROUTER_BYTES
    choice = Row(
        name="router_top_k",
        block=EXPERT_BLOCK,
        operator="top_k",
        shape={"elements": tokens * count, "read_bytes": scores, "written_bytes": scores},
        kept_bytes=scores,
    )
    kept = tokens * s.hidden * s.element_bytes
    return [replace(product, operator="wide_matmul", kept_bytes=kept, replicated=weights), choice]


def _exchange(s: Shape, experts: Experts) -> tuple[Transfer, ...]:
    """All-to-all of tokens to experts, with the size that the fullest rank receives."""
    size = s.sent_rows * s.expert_load * s.hidden * s.element_bytes
    if s.job.exchange_once:
        size = size * once_share(
            s.choices,
            s.plans.ep,
            s.plans.inside("ep"),
            experts.experts,
            experts.groups,
            experts.groups_per_token,
        )
    return (over("ep", "all_to_all", size),)


def _moves(s: Shape, experts: Experts) -> tuple[list[Row], list[Row]]:
    """Rows of the way to the experts and of the way back; each sends forward what the other sends backward.

    Copies of tokens are sorted by expert, and again after the exchange if a rank has several experts. ``whole``: bytes
    of the rows of all ranks that share an expert.
    """
    one, sent, whole = (rows * s.hidden * s.element_bytes for rows in (s.sharded_tokens, s.sent_rows, s.expert_rows))
    exchanged = Traffic(_exchange(s, experts), _exchange(s, experts))
    gathered, scattered = (over("etp", "all_gather", whole),), (over("etp", "reduce_scatter", whole),)
    dispatch = [
        move("permute", EXPERT_BLOCK, one, sent, traffic=exchanged),
        move("sort_by_expert", EXPERT_BLOCK, whole, whole, traffic=Traffic(gathered, scattered)),
    ]
    combine = [
        move("sort_back", EXPERT_BLOCK, whole, whole, traffic=Traffic(scattered, gathered)),
        move("unpermute", EXPERT_BLOCK, sent, one, traffic=exchanged),
    ]
    return dispatch, combine


def _products(s: Shape, experts: Experts) -> list[Row]:
    rows, local = s.expert_rows, experts.experts / s.plans.ep
    into, width = s.expert_in, s.expert_width
    out = [
        grouped_matmul(
            "expert_in",
            EXPERT_BLOCK,
            s.product(rows, into, s.hidden),
            local,
            kept_elements=rows * s.hidden,
            weights=local * s.hidden * into,
        ),
    ]
    if experts.expert_bias:
        out.append(_bias(s, "expert_in_bias", rows, into, local))
    gate = activation(
        "expert_activation", EXPERT_BLOCK, rows * width, element_bytes=s.element_bytes, gated=s.model.gated_mlp
    )
    out += [
        gate,
        grouped_matmul(
            "expert_out",
            EXPERT_BLOCK,
            s.product(rows, s.hidden, width),
            local,
            kept_elements=rows * width,
            weights=local * width * s.hidden,
        ),
    ]
    if experts.expert_bias:
        out.append(_bias(s, "expert_out_bias", rows, s.hidden, local))
    return out


def _bias(s: Shape, name: str, rows: Num, width: Num, local: Num) -> Row:
    return replace(
        bias(name, EXPERT_BLOCK, rows, width, element_bytes=s.element_bytes), weights=local * width, expert=True
    )


def shared_gate(s: Shape) -> list[Row]:
    """Rows of the gate of the shared expert: one sigmoid per token on its output."""
    tokens = s.sharded_tokens
    product = matmul("shared_gate", EXPERT_BLOCK, s.product(tokens, 1, s.hidden), kept_elements=0)
    scaled = residual("shared_scale", EXPERT_BLOCK, tokens * s.hidden, element_bytes=s.element_bytes)
    kept = tokens * s.hidden * s.element_bytes
    return [replace(product, operator="wide_matmul", replicated=product.weights), replace(scaled, kept_bytes=kept)]


LATENT_BLOCK = "attention"


def latent_rows(s: Shape, latent: LatentAttention, direct_query: Row) -> list[Row]:
    """Rows from the normed input to rotated queries and keys; ``direct_query`` is for queries without a latent."""
    head, rank = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.q_lora_rank
    rows: list[Row] = [direct_query]
    if rank is not None:
        rows = [
            *_down(s, "q_down", rank, kept=1),
            _latent_norm(s, "q_norm", rank),
            _up(s, "q_up", rank, s.heads * head, rank),
        ]
    wide = latent.kv_lora_rank + latent.qk_rope_head_dim
    rows += [*_down(s, "kv_down", wide, kept=0), _latent_norm(s, "kv_norm", latent.kv_lora_rank)]
    columns = s.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    rows.append(_up(s, "kv_up", latent.kv_lora_rank, columns, wide))
    turned = s.tokens * s.heads * (latent.qk_rope_head_dim + head)
    return [
        *rows,
        rope(LATENT_BLOCK, turned, element_bytes=s.element_bytes, by_complex=False),
    ]  # most of it is not rotated


def _down(s: Shape, name: str, width: Num, kept: int) -> list[Row]:
    """Down projection with whole weights on the sequence shard; both of them keep the same input, counted once."""
    row = matmul(
        name,
        LATENT_BLOCK,
        s.product(s.sharded_tokens, width, s.hidden),
        kept_elements=kept * s.sharded_tokens * s.hidden,
        replicated=s.hidden * width,
    )
    rows = [row]
    if s.model.qkv_bias:
        rows.append(
            bias(f"{name}_bias", LATENT_BLOCK, s.sharded_tokens, width, element_bytes=s.element_bytes, replicated=True)
        )
    return rows


def _latent_norm(s: Shape, name: str, width: Num) -> Row:
    tokens = s.sharded_tokens
    return norm(name, LATENT_BLOCK, tokens, width, element_bytes=s.element_bytes, kind="rms_norm", weights=width)


def _up(s: Shape, name: str, rank: Num, columns: Num, gathered: Num) -> Row:
    """Up projection with columns cut over ``tp``; ``gathered``: gathered width, with the rotary part for keys."""
    size = s.tokens * gathered * s.element_bytes
    return matmul(
        name,
        LATENT_BLOCK,
        s.product(s.tokens, columns, rank),
        kept_elements=s.sharded_tokens * rank,
        traffic=Traffic(s.gather(size), s.gather_again(size)),
    )


#: Product -> its projections, each with an adapter of its own, for products of another name than their projections.
PROJECTIONS = {
    "qkv": ("q", "k", "v"),
    "attention_out": ("o",),
    "mlp_in": ("gate", "up"),
    "mlp_out": ("down",),
    "shared_in": ("gate", "up"),
    "shared_out": ("down",),
}
#: Products whose columns are whole and whose rows are cut over the tensor ranks: their second matrix is whole.
ROW_PARALLEL = ("attention_out", "mlp_out", "shared_out")
FROZEN = {
    "matmul": "frozen_matmul",
    "wide_matmul": "frozen_wide_matmul",
    "grouped_matmul": "frozen_grouped_matmul",
    "bias": "frozen_bias",
    "embedding": "frozen_embedding",
}
PRODUCTS = ("matmul", "wide_matmul", "grouped_matmul")
FROZEN_PRODUCTS = tuple(FROZEN[name] for name in PRODUCTS)


def projections_of(name: str, model: ModelSpec, tp: Num = 1) -> dict[str, Num]:
    """Projections of a product by its name, each with its share of the columns on one of ``tp`` ranks.

    >>> from steptime.model.known import load_catalogue_model
    >>> llama = load_catalogue_model("llama3-8b")
    >>> projections_of("mlp_in", llama), projections_of("attention_out", llama)
    ({'gate': 0.5, 'up': 0.5}, {'o': 1.0})
    """
    if name == "qkv":
        kv = ceil_div(model.kv_heads, tp)
        heads = {"q": ceil_div(model.heads, tp) * (1 + model.attention_gate), "k": kv, "v": kv}
    else:
        heads = dict.fromkeys(PROJECTIONS.get(name, (name,)), 1)
    if not model.gated_mlp:
        heads.pop("gate", None)
    total: Num = sum(heads.values())
    return {each: count / total for each, count in heads.items()}


def _targeted(row: Row, job: Job, adapter: Adapter, tp: Num) -> dict[str, Num]:
    """Projections of a product of a layer that have adapters, with their shares of its columns."""
    if row.operator != "matmul" or row.name == "router":
        return {}
    found = projections_of(row.name, job.model, tp)
    if adapter.targets in TARGETS:
        return found if adapter.targets == "linear" or row.block == "attention" else {}
    return {name: share for name, share in found.items() if name in adapter.targets.split(",")}


def adapted(rows: Iterable[Row], job: Job, *, layer: bool, tp: Num = 1) -> list[Row]:
    """The rows with frozen weights; in a ``layer``, with adapters added to the products."""
    adapter = job.adapter
    if adapter is None:
        return [_copied(row, job) for row in rows] if job.memory.cast_bytes else list(rows)
    out: list[Row] = []
    for row in rows:
        targeted = _targeted(row, job, adapter, tp) if layer else {}
        stored = layer and row.operator in PRODUCTS and row.name != "router" and adapter.weight_bytes is not None
        out += _frozen(row, job, adapter.weight_bytes if stored else None, layer)
        if targeted:
            out += _adapter(row, job, adapter, targeted)
    return out


def _copied(row: Row, job: Job) -> Row:
    """A row that keeps the copy of its weights that autocast makes for the product and the backward pass reads."""
    if row.operator not in PRODUCTS and row.operator not in FROZEN_PRODUCTS:
        return row
    return replace(row, kept_bytes=row.kept_bytes + row.weights * job.memory.cast_bytes)


def _frozen(row: Row, job: Job, weight_bytes: float | None, layer: bool) -> list[Row]:
    element = job.precision.element_bytes
    # The adapter's first product keeps the input instead; without an adapter nothing needs it.
    kept = 0.0 * row.kept_bytes if row.operator in PRODUCTS else row.kept_bytes
    wide = job.memory.frozen_bytes
    stored = (element if wide is None else wide) if weight_bytes is None else weight_bytes
    if not layer and job.adapter is not None and job.adapter.weight_bytes is not None:
        stored = job.memory.quantised_ends_bytes or element
    narrow = job.precision.quantised_bytes
    if layer and weight_bytes is None and job.memory.narrow_frozen and narrow is not None and row.operator in NARROW:
        stored = narrow
    frozen = replace(
        row,
        operator=FROZEN.get(row.operator, row.operator),
        trained=False,
        kept_bytes=kept,
        replicated=0.0,
        weight_bytes=stored,
    )
    if weight_bytes is None:
        return [_copied(frozen, job) if wide is not None else frozen]
    expanded = move(f"{row.name}_dequantise", row.block, row.weights * weight_bytes, row.weights * element)
    return [replace(expanded, share=row.share), frozen]


def _adapter(row: Row, job: Job, adapter: Adapter, targeted: Mapping[str, Num]) -> list[Row]:
    element, rank = job.precision.element_bytes, adapter.rank
    m, n, k = row.shape["m"], row.shape["n"] * sum(targeted.values()), row.shape["k"]
    projections = len(targeted)
    first: Num = projections * rank * k
    second: Num = rank * n
    cut = row.name in ROW_PARALLEL
    narrow = Product(m=m, n=projections * rank, k=k, element_bytes=element)
    dropped = job.memory.adapter_input_bytes
    kept = projections * m * k * dropped if dropped else row.kept_bytes
    down = matmul(f"{row.name}_adapter_down", row.block, narrow, kept_elements=kept / element, weights=first)
    # The second product adds to the frozen one's result, which is read and written again.
    wide = Product(m=m, n=n, k=rank, element_bytes=element, output_passes=2)
    inner = m * projections * rank
    if adapter.dora:  # its scale is trained, so that both results that it multiplies are kept
        inner, second = inner + 2 * m * n, second + n
    up = matmul(f"{row.name}_adapter_up", row.block, wide, kept_elements=inner, weights=second)
    return [
        replace(down, share=row.share, replicated=0.0 if cut else first),
        replace(up, share=row.share, replicated=second if cut else 0.0),
    ]
