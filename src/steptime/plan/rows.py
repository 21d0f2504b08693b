"""Records of strategy tables: one row per operator, with its transfers and kept bytes.

A strategy (1D tensor parallelism, context parallelism, SUMMA) is a list of rows in terms of the degrees. A row
names the operator and its *local* shape; :mod:`steptime.estimate.operators` maps the operator to its formulas.
:class:`Shape` has the local sizes of a micro-batch under the corrected strategies, and the transfers at the ends of a
region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.cost.experts import fullest_share, greatest_imbalance
from steptime.model.captured import Sharded
from steptime.model.spec import Experts, ModelSpec
from steptime.num import Num, ceil_div, minimum, where
from steptime.plan.job import Job
from steptime.plan.plans import Plans

WEIGHT_PRODUCTS = ("matmul", "blocked_matmul", "wide_matmul", "grouped_matmul")
"""Operators whose backward pass has a product for the gradient of the input and one for the gradient of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective over one axis of the mesh."""

    collective: str
    """``all_gather reduce_scatter all_reduce broadcast reduce``; ``all_to_all``; ``ring_exchange``: every rank's block
    visits all others."""
    axis: str
    size_bytes: Num
    """Bytes of the whole tensor (gathered, to be scattered, reduced or broadcast); for an ``all_to_all`` those of one
    rank, for a ``ring_exchange`` those of one rank's block."""
    group: Any = None
    """Group of other ranks than the axis, as of :class:`steptime.model.captured.Exchange`; None: the axis."""


class Traffic(NamedTuple):
    """Transfers of a row in its forward and in its backward pass."""

    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()


SILENT: Final = Traffic()
"""No transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Local sizes of the product of an activation (m x k) with a weight (k x n)."""

    m: Num
    n: Num
    k: Num
    element_bytes: float
    accumulate: int = 1
    """1 if the FLOPs of a sum of k products count 2k, 0 if they count 2k - 1."""
    output_passes: Num = 1
    """Number of times that the result is written."""
    panels: Num | None = None
    """Panels of a blocked product; None: the product is not blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """Local sizes of the attention core; symbols as in :mod:`steptime.cost.attention`."""

    pairs: Num
    rows: Num
    keys: Num
    kv_rows: Num
    head_dim: Num
    element_bytes: float
    dropout: bool
    accumulate: int = 1
    """1 if the FLOPs of a sum of k products count 2k, 0 if they count 2k - 1."""
    kv_rows_read: Num | None = None
    """Key rows that the fused kernel reads; None: ``kv_rows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Operator, direction and sizes with which a fitted model times a row of no strategy table."""

    operator: str
    backward: bool
    shape: Mapping[str, Num]
    launches: float = 1.0
    """Number of kernels that it launches, used if no fitted model times it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operator of a block, as one device sees it."""

    name: str
    block: str
    operator: str
    shape: Mapping[str, Num]
    """Arguments of the operator's formulas."""
    kept_bytes: Num = 0.0
    """Bytes kept from forward to backward, per micro-batch."""
    remade_bytes: Num = 0.0
    """Bytes that are made again in the backward pass of the layer instead of kept."""
    weights: Num = 0.0
    """Parameters on this device."""
    replicated: Num = 0.0
    """Parameters that all ranks of the replicated axis hold: their gradients are reduced over it once a step."""
    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()
    panels: Num | None = None
    """Panels of a blocked product whose transfers overlap it; None: transfers are serial."""
    recomputed: Num = 0.0
    """Share of its forward pass that runs again in the backward pass."""
    sent_again: Num = 1.0
    """Share of its forward transfers that run again with it."""
    runs_again: bool = True
    """True if its forward pass runs again when its layer is recomputed in full."""
    overlaps: Num = 0.0
    """Share of its own time with which its transfers may overlap; any time beyond it is exposed."""
    overlaps_near: bool = False
    """True if only transfers overlap whose ranks all share a fast domain."""
    overlaps_backward: Num = 0.0
    """Share of its backward time with which its transfers may overlap, at any place of the ranks."""
    share: Num = 1.0
    """Share of the layers that have the row, or its occurrences in a layer: a factor on its times, kept bytes and
    weights."""
    kind: str = ""
    """Kind of layers that has it (:class:`~steptime.model.spec.LayerKind`), if there are several."""
    expert: bool = False
    """True if its weights are of routed experts: cut over ``ep`` and ``etp``, reduced and sharded over ``edp``."""
    trained: bool = True
    """False for frozen weights: no gradient of them, no optimiser states."""
    weight_bytes: float = 0.0
    """Stored bytes of one frozen weight."""
    timing: Timing | None = None
    """Operator of a fitted model that times it; None: its own operator and shape."""
    issued: float = 1.0
    """Operators that the host issues for it in each direction with work."""

    def keeping(self, kept_bytes: Num, *, recomputed: Num, sent_again: Num | None = None) -> Row:
        """The row with ``kept_bytes``, the rest made again, and ``recomputed`` as share that runs again."""
        return replace(
            self,
            kept_bytes=kept_bytes,
            remade_bytes=self.remade_bytes + self.kept_bytes - kept_bytes,
            recomputed=recomputed,
            sent_again=self.sent_again if sent_again is None else sent_again,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one layer, and of the ends of the model on the first and the last stage."""

    layer: tuple[Row, ...]
    first: tuple[Row, ...] = ()
    """Rows of the embedding, only on the first stage."""
    last: tuple[Row, ...] = ()
    """Rows of final norm, head and loss, only on the last stage."""
    boundary_bytes: Num = field(default=0.0)
    """Bytes of the activation that one micro-batch hands from stage to stage, per device."""
    working_bytes: Num = field(default=0.0)
    """Largest temporary that is alive in addition to the kept activations."""
    loss_bytes: Num = field(default=0.0)
    """Largest temporary at the loss and in the backward pass of the head."""
    leading_dense: int = 0
    """Leading layers with a dense MLP before layers with experts."""
    sharded: Sharded | None = None
    """Parameter traffic and memory under a choice of shardings; None: they follow from the rows."""
    whole: Block | None = None
    """Rows of whole sequences, which determine sizes if the rows above are of slices; None: the rows above do."""


def matmul(
    name: str,
    block: str,
    size: Product,
    *,
    kept_elements: Num,
    weights: Num | None = None,
    replicated: Num = 0.0,
    traffic: Traffic = SILENT,
) -> Row:
    """Row of a product of an activation with a weight.

    Args:
        name: of the row.
        block: part of the layer.
        size: of the product.
        kept_elements: kept from forward to backward.
        weights: parameters on this device; None: k x n.
        replicated: parameters that all ranks of the replicated axis hold.
        traffic: transfers that the product needs.
    """
    return Row(
        name=name,
        block=block,
        operator="matmul" if size.panels is None else "blocked_matmul",
        shape={
            "m": size.m,
            "n": size.n,
            "k": size.k,
            "accumulate": size.accumulate,
            "element_bytes": size.element_bytes,
            "output_passes": size.output_passes,
        },
        kept_bytes=kept_elements * size.element_bytes,
        weights=size.k * size.n if weights is None else weights,
        replicated=replicated,
        panels=size.panels,
        forward=traffic.forward,
        backward=traffic.backward,
    )


def grouped_matmul(name: str, block: str, size: Product, groups: Num, *, kept_elements: Num, weights: Num) -> Row:
    """Row of one product per local expert; ``size.m`` counts the rows of all ``groups``, ``weights`` all parameters."""
    return Row(
        name=name,
        block=block,
        operator="grouped_matmul",
        shape={
            "m": size.m,
            "n": size.n,
            "k": size.k,
            "groups": groups,
            "accumulate": size.accumulate,
            "element_bytes": size.element_bytes,
        },
        kept_bytes=kept_elements * size.element_bytes,
        weights=weights,
        expert=True,
    )


def move(
    name: str,
    block: str,
    read_bytes: Num,
    written_bytes: Num,
    *,
    operator: str = "move",
    share: Num = 1.0,
    traffic: Traffic = SILENT,
) -> Row:
    """Row of a memory pass that rearranges or converts.

    Args:
        name: of the row.
        block: part of the layer.
        read_bytes: in one direction.
        written_bytes: in one direction.
        operator: ``move`` in both directions, ``move_forward``, ``move_backward``.
        share: share of the layers that have it, or occurrences per layer.
        traffic: transfers before or after the pass.
    """
    return Row(
        name=name,
        block=block,
        operator=operator,
        shape={"read_bytes": read_bytes, "written_bytes": written_bytes},
        share=share,
        forward=traffic.forward,
        backward=traffic.backward,
    )


def bias(name: str, block: str, tokens: Num, width: Num, *, element_bytes: float, replicated: bool = False) -> Row:
    """Row of a bias on tokens x width."""
    return Row(
        name=name,
        block=block,
        operator="bias",
        shape={"elements": tokens * width, "width": width, "element_bytes": element_bytes},
        weights=width,
        replicated=width if replicated else 0.0,
    )


def activation(name: str, block: str, elements: Num, *, element_bytes: float, gated: bool = False) -> Row:
    """Row of an activation function with ``elements`` outputs; a gated one has twice as many inputs, which are kept."""
    return Row(
        name=name,
        block=block,
        operator="gated_activation" if gated else "activation",
        shape={"elements": elements, "element_bytes": element_bytes},
        kept_bytes=(2 if gated else 1) * elements * element_bytes,
    )


def dropout(
    name: str, block: str, elements: Num, *, element_bytes: float, mask_bytes: float, operator: str = "dropout"
) -> Row:
    """Row of a dropout, which keeps its mask; operator ``dropout_add`` also adds it to the residual stream."""
    return Row(
        name=name,
        block=block,
        operator=operator,
        shape={"elements": elements, "element_bytes": element_bytes, "mask_bytes": mask_bytes},
        kept_bytes=elements * mask_bytes,
    )


def residual(name: str, block: str, elements: Num, *, element_bytes: float) -> Row:
    """Row of a residual addition on its own."""
    shape = {"elements": elements, "element_bytes": element_bytes}
    return Row(name=name, block=block, operator="residual", shape=shape)


def rope(block: str, elements: Num, *, element_bytes: float, by_complex: bool) -> Row:
    """Row of the rotary embedding of ``elements`` elements of queries and keys; ``by_complex``: by complex numbers."""
    shape = {"elements": elements, "element_bytes": element_bytes}
    by_complex = by_complex and element_bytes < 4
    return Row(name="rope", block=block, operator="complex_rope" if by_complex else "rope", shape=shape)


def norm(
    name: str,
    block: str,
    tokens: Num,
    width: Num,
    *,
    element_bytes: float,
    kind: str = "layer_norm",
    weights: Num | None = None,
    traffic: Traffic = SILENT,
) -> Row:
    """Row of a norm over rows of ``width`` elements; its input is kept.

    Args:
        name: of the row.
        block: part of the layer.
        tokens: on this device.
        width: columns on this device.
        element_bytes: of one element.
        kind: operator, such as ``rms_norm``.
        weights: parameters, which all ranks of the replicated axis hold; None: scale and shift of each column.
        traffic: transfers that its statistics need.
    """
    weights = 2 * width if weights is None else weights
    return Row(
        name=name,
        block=block,
        operator=kind,
        shape={"elements": tokens * width, "rows": tokens, "width": width, "element_bytes": element_bytes},
        kept_bytes=tokens * width * element_bytes,
        weights=weights,
        replicated=weights,
        forward=traffic.forward,
        backward=traffic.backward,
    )


def over(axis: str, collective: str, size_bytes: Num) -> Transfer:
    """Transfer over one axis: ``over("tp", "all_gather", b * l * e * 2)``."""
    return Transfer(collective=collective, axis=axis, size_bytes=size_bytes)


def summa_traffic(activation_bytes: Num, weight_bytes: Num) -> Traffic:
    """Transfers of a SUMMA product on a ``tp`` x ``tp2`` grid, whose activation and weight have these sizes in all."""
    return Traffic(
        (over("tp", "broadcast", activation_bytes), over("tp2", "broadcast", weight_bytes)),
        (
            over("tp2", "broadcast", weight_bytes),
            over("tp", "reduce", activation_bytes),
            over("tp", "broadcast", activation_bytes),
            over("tp2", "reduce", weight_bytes),
        ),
    )


def fused_attention(
    name: str,
    block: str,
    size: Core,
    *,
    kept_elements: Num,
    tiles: Mapping[str, Num] | None = None,
    traffic: Traffic = SILENT,
) -> Row:
    """Row of the attention core as one kernel.

    Args:
        name: of the row.
        block: part of the layer.
        size: of the core.
        kept_elements: kept from forward to backward.
        tiles: further arguments of the fitted model: batch, heads, kv_heads, queries, seen_keys, causal, window.
        traffic: what context ranks exchange.
    """
    return Row(
        name=name,
        block=block,
        operator="fused_attention",
        shape={
            "pairs": size.pairs,
            "rows": size.rows,
            "keys": size.keys,
            "kv_rows": size.kv_rows,
            "kv_rows_read": size.kv_rows if size.kv_rows_read is None else size.kv_rows_read,
            "dropout": int(size.dropout),
            "head_dim": size.head_dim,
            "accumulate": size.accumulate,
            "element_bytes": size.element_bytes,
            **(tiles or {}),
        },
        kept_bytes=kept_elements * size.element_bytes,
        forward=traffic.forward,
        backward=traffic.backward,
    )


def unfused_attention(
    names: tuple[str, str, str, str],
    block: str,
    size: Core,
    *,
    mask_bytes: float,
    kept_scores: Num,
    kept_attend: Num,
    recomputed: Num,
    traffic: Traffic = SILENT,
) -> tuple[Row, ...]:
    """Rows of scores, softmax, dropout and weighted sum as four kernels.

    Args:
        names: of the four rows.
        block: part of the layer.
        size: of the core.
        mask_bytes: of one dropout flag.
        kept_scores: elements that the product of queries and keys keeps in addition to the probabilities.
        kept_attend: elements that the weighted sum keeps in addition to the probabilities.
        recomputed: 1 if nothing of the size of the score matrix is kept, else 0.
        traffic: traffic of context ranks for each of the two products.
    """
    keep = 1.0 - recomputed
    pairs, element_bytes, dropout = size.pairs, size.element_bytes, size.dropout
    core: dict[str, Num] = {
        "pairs": pairs,
        "rows": size.rows,
        "keys": size.keys,
        "kv_rows": size.kv_rows,
        "head_dim": size.head_dim,
        "accumulate": size.accumulate,
        "element_bytes": element_bytes,
        "panels": 1,
    }
    softmax = {"pairs": pairs, "rows": size.rows, "elements": pairs, "element_bytes": element_bytes}
    mask = {"elements": pairs, "element_bytes": element_bytes, "mask_bytes": mask_bytes}
    again, remade = (share * pairs * element_bytes if dropout else 0.0 * pairs for share in (keep, recomputed))
    kept = (
        kept_scores * element_bytes,
        keep * pairs * element_bytes,
        keep * pairs * mask_bytes,
        again + kept_attend * element_bytes,
    )
    made = (0.0, recomputed * pairs * element_bytes, recomputed * pairs * mask_bytes, remade)
    operators = {"scores": core, "softmax": softmax, "dropout": mask, "attend": core}
    sends = {"scores": traffic, "attend": traffic}
    return tuple(
        Row(
            name=name,
            block=block,
            operator=operator,
            shape=shape,
            kept_bytes=kept_bytes,
            remade_bytes=remade_bytes,
            recomputed=0.0 if operator == "attend" else recomputed,
            forward=sends.get(operator, SILENT).forward,
            backward=sends.get(operator, SILENT).backward,
        )
        for name, (operator, shape), kept_bytes, remade_bytes in zip(names, operators.items(), kept, made, strict=True)
        if dropout or operator != "dropout"
    )


class Shape:
    """Local sizes of a micro-batch under a tensor axis ``tp`` and a sequence axis."""

    def __init__(self, job: Job, plans: Plans, sequence_axis: str | None) -> None:
        model = job.model
        self.job, self.plans, self.model, self.axis = job, plans, model, sequence_axis
        self.element_bytes, self.mask_bytes = job.precision.element_bytes, job.precision.mask_bytes
        self.hidden, self.seq_len = model.hidden, job.seq_len
        self.attended, self.before = job.attended, job.before
        self.tp = plans.tp
        ranks: Num = getattr(plans, sequence_axis) if sequence_axis else 1
        self.local = ceil_div(job.seq_len, ranks)
        self.tokens = plans.micro_batch * self.local
        self.sharded_tokens = plans.micro_batch * ceil_div(self.local, tensor_shares(plans))
        """Tokens of the residual stream on one rank: of a sequence shard, or without sequence parallelism all."""
        self.heads, self.kv_heads = ceil_div(model.heads, plans.tp), ceil_div(model.kv_heads, plans.tp)
        self.value_dim = model.head_dim if model.latent is None else model.latent.v_head_dim
        self.query_width = self.heads * self.value_dim
        self.qkv_width = (self.heads * (1 + model.attention_gate) + 2 * self.kv_heads) * model.head_dim
        self.ffn = ceil_div(model.ffn_hidden, plans.tp)
        self.ffn_in = self.ffn * model.mlp_inputs
        self.vocab = ceil_div(model.vocab, plans.tp)
        layer_norm = "one_pass_layer_norm" if job.one_pass_norms else "layer_norm"
        rms_norm = "plain_rms_norm" if job.plain_norms else "rms_norm"
        self.norm_kind = layer_norm if model.norm == "layernorm" else rms_norm
        self.norm_weights = 2 if model.norm_bias else 1
        whole = ranks > 1 if job.context == "all_gather" else ranks < 0
        self.gathered_kv = where(whole, 2 * plans.micro_batch * job.seq_len * self.kv_heads * model.head_dim, 0)
        """Keys and values of the whole sequence, where context ranks gather them."""
        self.activation_bytes = self.tokens * model.hidden * self.element_bytes

    def product(self, m: Num, n: Num, k: Num) -> Product:
        """Size of a product in the dtype of the job."""
        return Product(m=m, n=n, k=k, element_bytes=self.element_bytes)

    def gather(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Transfers before a column-parallel product; none without sequence parallelism, as its input is whole."""
        return self._sequence(size_bytes, ("all_gather",), ())

    def gather_again(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Backward transfers of a column-parallel product: its input again, and the gradient of the input."""
        return self._sequence(size_bytes, ("all_gather", "reduce_scatter"), ("all_reduce",))

    def scatter(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Transfers after a row-parallel product."""
        return self._sequence(size_bytes, ("reduce_scatter",), ("all_reduce",))

    def gather_gradient(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Backward transfers of a row-parallel product."""
        return self._sequence(size_bytes, ("all_gather",), ())

    def _sequence(self, size_bytes: Num, sharded: tuple[str, ...], whole: tuple[str, ...]) -> tuple[Transfer, ...]:
        """Transfers with or without sequence parallelism; a block with both has all, with size 0 where unused."""
        sp = self.plans.sp
        if not isinstance(sp, np.ndarray):
            return tuple([over("tp", kind, size_bytes) for kind in (sharded if sp else whole)])
        return (
            *(over("tp", kind, size_bytes * sp) for kind in sharded),
            *(over("tp", kind, size_bytes * (1 - sp)) for kind in whole),
        )

    @property
    def dense_share(self) -> float:
        """Share of the layers that have a dense MLP."""
        experts = self.model.experts
        return 1.0 if experts is None else (self.model.layers - experts.moe_layers) / self.model.layers

    @property
    def choices(self) -> int:
        """Number of experts that a token chooses."""
        return _experts(self.model).experts_per_token

    @property
    def sent_rows(self) -> Num:
        """Number of copies of this rank's tokens that it sends to experts."""
        return self.sharded_tokens * self.choices

    @property
    def expert_rows(self) -> Num:
        """Rows that the experts of the fullest rank compute; ranks that share an expert gather all of its rows."""
        return self.sent_rows * self.plans.etp * self.expert_load

    @property
    def expert_load(self) -> Num:
        """Rows that the fullest expert rank computes over the mean: its slots, or the job's load or imbalance."""
        if self.job.expert_capacity is not None:
            return self.job.expert_capacity
        load = self.job.expert_load
        if load is None and self.job.expert_imbalance == 1.0:
            return 1.0
        most = greatest_imbalance(self.choices, self.plans.ep, _experts(self.model).experts)
        given = self.job.expert_imbalance if load is None else fullest_share(load.shares, self.plans.ep)
        return minimum(given, most)

    @property
    def expert_width(self) -> Num:
        """Local width of one expert."""
        return ceil_div(_experts(self.model).expert_ffn_hidden, self.plans.etp)

    @property
    def expert_in(self) -> Num:
        """Columns of an expert's first product."""
        return self.expert_width * self.model.mlp_inputs


def _experts(model: ModelSpec) -> Experts:
    if model.experts is None:
        raise ValueError("the model has no experts")
    return model.experts


def tensor_shares(plans: Plans) -> Num:
    """Parts into which tensor ranks cut the sequence between products: ``tp``, or 1 without sequence parallelism."""
    if isinstance(plans.sp, np.ndarray):
        return where(plans.sp > 0, plans.tp, 1)
    return plans.tp if plans.sp else 1
