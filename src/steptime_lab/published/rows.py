"""Rows and rules of the published transformer model: the operation tables of arXiv 2410.00273 with their defects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from steptime.cost.attention import causal_pairs
from steptime.num import Num, floor_div, where
from steptime.plan.job import Job
from steptime.plan.plans import ATTENTION_RECOMPUTE, Plans, Rule
from steptime.plan.rows import (
    Block,
    Core,
    Product,
    Row,
    Traffic,
    Transfer,
    activation,
    bias,
    dropout,
    fused_attention,
    matmul,
    norm,
    over,
    summa_traffic,
    unfused_attention,
)
from steptime.plan.strategies import CORRECTED, Method, StageSplit, Strategy


def _kept(fix: str) -> Any:
    """A switch that is on; ``fix`` says in one line what turning it off does."""
    return field(default=True, metadata={"fix": fix})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defects:
    """Switches of the kept defects. By default all are kept, which reproduces the published code to twelve digits."""

    summa_norm_width: bool = _kept("SUMMA norms are e/m1 wide, not l/m1")
    """The code hands the two norms of a SUMMA layer rows of $l/m_1$ elements, where a shard of the hidden dimension has
    $e/m_1$. Work, traffic, weights, kept bytes and the message between pipeline stages follow.
    The fix uses $e/m_1$."""
    free_slow_stage_links: bool = _kept("messages between stages pay for slow links too")
    """Where several stages share a fast domain, the code asks for the time of a message among one rank, which is zero,
    for the links that leave the domain. The fix charges them latency and bandwidth like any other link."""
    all_reduce_charged_once: bool = _kept("an all-reduce is two trips around the ring everywhere")
    """The code doubles the volume of an all-reduce only where its group both spans domains and shares them, and the
    latency never. The fix charges a reduce-scatter and an all-gather, each with its latency, for every group."""
    unsharded_row_biases: bool = _kept("biases after row-parallel products run on the sequence shard")
    r"""In 1D the code adds the two biases after row-parallel products to the whole activation $b\,l\,e$ on every rank,
    though the product's output was scattered over the sequence; in context parallelism it shards one over the sequence
    and the other over the hidden dimension. The fix runs each on $b\,l/(m_1 m_2)\,e$."""
    free_replicated_gradients: bool = _kept("gradients of replicated biases and norm weights are reduced")
    """Norm weights and sequence-sharded biases are the same on all ranks of an axis, whose gradients are partial sums;
    the code never reduces them. The fix adds one all-reduce over that axis per step."""
    local_key_reads: bool = _kept("backward attention reads the gathered keys and values")
    """The code gathers $K$ and $V$ for the backward pass but counts the reads of the local rows alone. The fix counts
    the reads of all $l$ rows."""
    no_causal_mask: bool = _kept("causal attention works on l(l+1)/2 pairs, not on l^2")
    """The code computes all $l^2$ (query, key) pairs for language models too. The fix counts $l(l+1)/2$ for a causal
    model with fused attention, and leaves other models as they are."""
    lone_rank_one_link: bool = _kept("a group with one rank per domain has all links of that rank")
    """The number of network links per device is not applied to groups with one rank in each domain, nor to messages
    between stages. The fix applies it. It is 1 in all systems of the paper, where this changes nothing."""
    whole_inputs_kept: bool = _kept("sharded inputs are kept and gathered again in backward")
    r"""Column-parallel products keep their gathered input, $b\,l\,e\,E$ on every rank. The fix keeps the shard,
    $1/m_1$ of it, and gathers it again in the backward pass: one all-gather more for each of the two products."""
    attention_output_kept_twice: bool = _kept("fused attention leaves its output to the projection to keep")
    """Fused attention keeps its output and the output projection keeps it again as its input. The fix counts it
    once."""
    no_optimizer_time: bool = _kept("the optimiser's own pass over its states takes time")
    """The step ends with the gradients' reduction. The fix adds the time to read and write the optimiser's states."""
    exact_filling: bool = _kept("a fast domain may be filled in part")
    """The code lists only placements that fill a fast domain exactly, so a domain of 72 and a power of two of devices
    have none. The fix lists the largest placements that fit, as the corrected space does."""
    equal_stages: bool = _kept("pipeline stages may differ by one layer")
    """The code takes only numbers of stages that divide the layers. The fix takes all up to the number of layers."""
    equal_shares: bool = _kept("shares of the batch may be uneven")
    """The code takes only replicas that divide the batch and micro-batches that divide a replica's share. The fix
    rounds the share and the number of micro-batches up."""

    def without(self, *names: str) -> Defects:
        """These defects without some of them.

        >>> Defects().without("no_causal_mask").no_causal_mask
        False
        """
        return replace(self, **dict.fromkeys(names, False))


FIXES: dict[str, str] = {f.name: f.metadata["fix"] for f in fields(Defects)}
"""Switch -> effect of turning it off, in one line."""

NONE = Defects().without(*FIXES)
"""Every defect corrected."""


class _Shape:
    """Local sizes under m1 = tp and m2 (sequence axis); every division floors on its own."""

    def __init__(self, job: Job, plans: Plans, second: str | None, defects: Defects) -> None:
        model, self.defects = job.model, defects
        self.element_bytes, self.mask_bytes = job.precision.element_bytes, job.precision.mask_bytes
        self.b, self.l, self.e, self.f = plans.micro_batch, job.seq_len, model.hidden, model.ffn_hidden
        self.m1, self.second = plans.tp, second
        self.m2: Num = getattr(plans, second) if second else 1
        self.head_dim = model.hidden // model.heads
        self.all_heads = model.heads
        self.heads = floor_div(model.heads, self.m1)
        self.local = floor_div(self.l, self.m2)
        self.shard = floor_div(self.local, self.m1)
        self.fl, self.el, self.qkvl = (floor_div(w, self.m1) for w in (self.f, self.e, 3 * self.e))

    def product(self, m: Num, n: Num, k: Num) -> Product:
        """Size of a product that counts 2k - 1 operations per output."""
        return Product(m=m, n=n, k=k, element_bytes=self.element_bytes, accumulate=0)


def _column(s: _Shape, name: str, block: str, n: Num) -> Row:
    tokens, size, whole = s.b * s.local, s.b * s.local * s.e * s.element_bytes, s.defects.whole_inputs_kept
    again = () if whole else (over("tp", "all_gather", size),)
    return matmul(
        name,
        block,
        s.product(tokens, n, s.e),
        kept_elements=(tokens if whole else s.b * s.shard) * s.e,
        traffic=Traffic(backward=(*again, over("tp", "reduce_scatter", size))),
    )


def _row(s: _Shape, name: str, block: str, k: Num) -> Row:
    tokens, size = s.b * s.local, s.b * s.local * s.e * s.element_bytes
    traffic = Traffic((over("tp", "reduce_scatter", size),))
    return matmul(name, block, s.product(tokens, s.e, k), kept_elements=tokens * k, traffic=traffic)


def _summa(s: _Shape, name: str, block: str, k: int, n: Num, panels: Num) -> Row:
    tokens = s.b * s.local
    activations, weights = tokens * k * s.element_bytes, k * n * s.element_bytes
    return matmul(
        name,
        block,
        replace(s.product(tokens, n, k), output_passes=panels, panels=panels),
        kept_elements=tokens * floor_div(k, s.m1),
        weights=floor_div(k, s.m2) * n,
        traffic=summa_traffic(activations, weights),
    )


def _norm(s: _Shape, name: str, block: str) -> Row:
    size = s.b * s.local * s.e * s.element_bytes
    traffic = Traffic((over("tp", "all_gather", size),), (over("tp", "reduce_scatter", size),))
    return norm(name, block, s.b * s.shard, s.e, element_bytes=s.element_bytes, traffic=traffic)


def _all_reduce(s: _Shape, plans: Plans, axis: str, size_bytes: Num) -> Transfer:
    """An all-reduce, or the volume of both halves only where the group spans domains and shares them."""
    if not s.defects.all_reduce_charged_once:
        return over(axis, "all_reduce", size_bytes)
    inside, ranks = plans.inside(axis), getattr(plans, axis)
    return over(axis, "reduce_scatter", size_bytes * where((inside > 1) & (ranks > inside), 2, 1))


def _summa_norm(s: _Shape, name: str, block: str, plans: Plans) -> Row:
    statistics = 2 * s.b * s.local * s.element_bytes
    gradients = (floor_div(2 * s.e, s.m1) + floor_div(2 * s.b * s.l, s.m2)) * s.element_bytes
    width = floor_div(s.l if s.defects.summa_norm_width else s.e, s.m1)
    traffic = Traffic((_all_reduce(s, plans, "tp", statistics),), (_all_reduce(s, plans, "tp", gradients),))
    return norm(name, block, s.b * s.local, width, element_bytes=s.element_bytes, traffic=traffic)


def _gather(s: _Shape, size_bytes: Num) -> tuple[Transfer, ...]:
    return (over(s.second, "all_gather", size_bytes),) if s.second else ()


def _gather_and_scatter(s: _Shape, size_bytes: Num) -> tuple[Transfer, ...]:
    return (*_gather(s, size_bytes), over(s.second, "reduce_scatter", size_bytes)) if s.second else ()


def _core(s: _Shape, pairs: Num, rows: Num, keys: Num) -> Core:
    """Size of the attention core with dropout, by the paper's count."""
    return Core(
        pairs=pairs,
        rows=rows,
        keys=keys,
        kv_rows=keys,
        head_dim=s.head_dim,
        element_bytes=s.element_bytes,
        dropout=True,
        accumulate=0,
    )


def _fused_attention(s: _Shape, causal: bool) -> tuple[Row, ...]:
    rows, keys, d = s.b * s.heads * s.local, s.b * s.heads * s.l, s.defects
    gathered = 2 * keys * s.head_dim * s.element_bytes
    pairs = rows * s.l if d.no_causal_mask or not causal else causal_pairs(rows, s.l)
    row = fused_attention(
        "fusedla",
        "sa",
        replace(_core(s, pairs, rows, keys), kv_rows_read=rows if d.local_key_reads else keys),
        kept_elements=(4 if d.attention_output_kept_twice else 3) * rows * s.head_dim + 2 * rows,
        traffic=Traffic(_gather(s, gathered), _gather_and_scatter(s, gathered)),
    )
    return (row,)


def _unfused_attention(s: _Shape, recompute: Num) -> tuple[Row, ...]:
    rows, keys = s.b * s.heads * s.local, s.b * s.heads * s.l
    gathered = keys * s.head_dim * s.element_bytes
    made = unfused_attention(
        ("logits", "softmax", "dpr_at", "attend"),
        "sa",
        _core(s, rows * s.l, rows, keys),
        mask_bytes=s.mask_bytes,
        kept_scores=2 * rows * s.head_dim,
        kept_attend=rows * s.head_dim,
        recomputed=where(recompute == ATTENTION_RECOMPUTE, 1.0, 0.0),
        traffic=Traffic(_gather(s, gathered), _gather_and_scatter(s, gathered)),
    )
    return tuple(replace(row, remade_bytes=0.0) for row in made)  # the paper adds nothing to what is kept


def _summa_attention(s: _Shape, plans: Plans) -> tuple[Row, ...]:
    """Scores blocked over both axes; heads are not sharded."""
    q, across = floor_div(s.head_dim, s.m1), floor_div(s.l, s.m1)
    rows, keys, element = s.b * s.all_heads * s.local, s.b * s.all_heads * s.l, s.element_bytes
    pairs, held = rows * s.l, rows * across
    scores, heads = pairs * element, keys * q * element
    core: dict[str, Num] = {"pairs": pairs, "rows": rows, "keys": keys, "kv_rows": keys, "head_dim": q}
    core |= {"accumulate": 0, "element_bytes": element, "panels": plans.panels}
    send_scores, send_heads = over("tp", "broadcast", scores), over("tp2", "broadcast", heads)
    add_scores, add_heads = over("tp", "reduce", scores), over("tp2", "reduce", heads)
    logits = Row(
        name="logits",
        block="sa",
        operator="blocked_scores",
        shape=core,
        kept_bytes=2 * rows * q * element,
        panels=plans.panels,
        forward=(send_heads, add_scores),
        backward=(send_scores, send_heads, send_scores, add_heads),
    )
    statistics = (_all_reduce(s, plans, "tp", rows * element),)
    softmax = Row(
        name="softmax",
        block="sa",
        operator="softmax",
        kept_bytes=held * element,
        shape={"pairs": held, "rows": rows, "elements": held, "element_bytes": element},
        forward=statistics,
        backward=statistics,
    )
    attend = Row(
        name="attend",
        block="sa",
        operator="blocked_attend",
        shape=core,
        panels=plans.panels,
        kept_bytes=(held + rows * q) * element,
        forward=(send_scores, send_heads),
        backward=(send_heads, add_scores, send_scores, add_heads),
    )
    dropped = dropout("dpr_at", "sa", held, element_bytes=element, mask_bytes=s.mask_bytes)
    return logits, softmax, dropped, attend


def _attention(s: _Shape, job: Job, plans: Plans) -> tuple[Row, ...]:
    if job.attention == "summa":
        return _summa_attention(s, plans)
    if job.attention == "unfused":
        return _unfused_attention(s, plans.recompute)
    return _fused_attention(s, job.model.causal)


Maker = Callable[[str, str], Row]
Biases = dict[str, tuple[Num, Num, bool]]
"""Bias -> tokens, width, and whether it is replicated over an axis whose ranks each process a part of the tokens."""


def _assemble(
    s: _Shape, job: Job, plans: Plans, products: dict[str, Row], biases: Biases, dropped: Num, norms: Maker
) -> Block:
    """The fourteen operations of a layer in their published order."""
    element, mask = s.element_bytes, s.mask_bytes
    inner = s.b * s.local * s.fl
    b = {
        name: bias(name, block, *biases[name][:2], element_bytes=element, replicated=biases[name][2])
        for name, block in (("fc1-bias", "mlp"), ("fc2-bias", "mlp"), ("vproj-bias", "sa"))
    }
    ln1 = norms("ln1", "mlp")
    return Block(
        layer=(
            products["fc1"],
            b["fc1-bias"],
            activation("act1", "mlp", inner, element_bytes=element),
            dropout("dpr1", "mlp", inner, element_bytes=element, mask_bytes=mask),
            products["fc2"],
            b["fc2-bias"],
            dropout("dpr2", "mlp", dropped, element_bytes=element, mask_bytes=mask),
            ln1,
            products["qkv"],
            *_attention(s, job, plans),
            products["vproj"],
            b["vproj-bias"],
            dropout("dpr_v", "sa", dropped, element_bytes=element, mask_bytes=mask),
            norms("ln2", "sa"),
        ),
        boundary_bytes=ln1.kept_bytes,
    )


def _linear_products(s: _Shape) -> dict[str, Row]:
    return {
        "fc1": _column(s, "fc1", "mlp", s.fl),
        "fc2": _row(s, "fc2", "mlp", s.fl),
        "qkv": _column(s, "qkv", "sa", s.qkvl),
        "vproj": _row(s, "vproj", "sa", s.el),
    }


class Published(Strategy):
    """A published strategy with some of its defects."""

    def __init__(self, defects: Defects) -> None:
        self.defects = defects


class Tensor1D(Published):
    """1D tensor parallelism."""

    name: ClassVar[str] = "1d"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp",)
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp",)

    def block(self, job: Job, plans: Plans) -> Block:
        """The block; biases of row-parallel products run on the whole activation, or on the sequence shard."""
        s = _Shape(job, plans, None, self.defects)
        row = (s.b * s.l, s.e, False) if self.defects.unsharded_row_biases else (s.b * s.shard, s.e, True)
        biases: Biases = {"fc1-bias": (s.b * s.l, s.fl, False), "fc2-bias": row, "vproj-bias": row}
        dropped = s.b * floor_div(s.l, s.m1) * s.e
        return _assemble(s, job, plans, _linear_products(s), biases, dropped, lambda n, k: _norm(s, n, k))


class Context2D(Published):
    """Tensor parallelism over heads and hidden, context parallelism over the sequence."""

    name: ClassVar[str] = "context"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp", "cp")
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp", "cp")

    def block(self, job: Job, plans: Plans) -> Block:
        """The block; biases of row-parallel products are sharded in two ways, or both over the sequence."""
        s = _Shape(job, plans, "cp", self.defects)
        row = (s.b * s.shard, s.e, True)
        biases: Biases = {
            "fc1-bias": (s.b * s.local, s.fl, False),
            "fc2-bias": row,
            "vproj-bias": (s.b * s.local, s.el, False) if self.defects.unsharded_row_biases else row,
        }
        dropped = s.b * floor_div(s.l, s.m1 * s.m2) * s.e
        return _assemble(s, job, plans, _linear_products(s), biases, dropped, lambda n, k: _norm(s, n, k))


class Summa2D(Published):
    """2D tensor parallelism: SUMMA products, context-parallel attention."""

    name: ClassVar[str] = "2d"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp", "tp2")
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp",)
    replicated_axis: ClassVar[str] = "tp2"

    def block(self, job: Job, plans: Plans) -> Block:
        """The block; activations and weights are cut over both axes."""
        s = _Shape(job, plans, "tp2", self.defects)
        products = {
            "fc1": _summa(s, "fc1", "mlp", s.e, s.fl, plans.panels),
            "fc2": _summa(s, "fc2", "mlp", s.f, s.el, plans.panels),
            "qkv": _summa(s, "qkv", "sa", s.e, s.qkvl, plans.panels),
            "vproj": _summa(s, "vproj", "sa", s.e, s.el, plans.panels),
        }
        tokens = s.b * s.local
        biases: Biases = {
            "fc1-bias": (tokens, s.fl, True),
            "fc2-bias": (tokens, s.el, True),
            "vproj-bias": (tokens, s.el, True),
        }
        norms: Maker = lambda name, block: _summa_norm(s, name, block, plans)  # noqa: E731
        return _assemble(s, job, plans, products, biases, tokens * s.el, norms)


class PublishedMethod(Method):
    """The published model with all its defects, or with some of them."""

    name: ClassVar[str] = "published"
    calibrated: ClassVar[bool] = False
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, defects: Defects = Defects()) -> None:
        self.defects = defects
        strategies: tuple[Strategy, ...] = (Tensor1D(defects), Context2D(defects), Summa2D(defects))
        vars(self).update(
            strategies={s.name: s for s in strategies},
            optimizer_step=not defects.no_optimizer_time,
            lone_rank_has_all_links=not defects.lone_rank_one_link,
            share_replicated_gradients=not defects.free_replicated_gradients,
        )

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Micro-batches of a replica; remainders are dropped, or rounded up as in the corrected method."""
        if not self.defects.equal_shares:
            return CORRECTED.micro_batches(job, plans)
        return floor_div(floor_div(job.global_batch, plans.dp), plans.micro_batch)

    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """Layers of stages: equal, or uneven as in the corrected method."""
        if not self.defects.equal_stages:
            return CORRECTED.stage_split(job, plans)
        layers = floor_div(job.model.layers, plans.pp)
        return StageSplit(first=layers, middle=layers, last=layers)

    def slow_link_share(self, plans: Plans) -> Num:
        """Share of the slow links' time: 0 where ``in_pp > 1``, since the code times a message among one rank."""
        return where(plans.in_pp > 1, 0.0, 1.0) if self.defects.free_slow_stage_links else 1.0


PUBLISHED = PublishedMethod()
