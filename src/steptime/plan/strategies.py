"""The corrected strategies: 1D tensor, 2D context and 2D SUMMA parallelism as tables of rows.

Shapes are rounded up (a rank of an uneven split has the larger share). Tensor parallelism is that of Megatron with
sequence parallelism (Korthikanti et al., arXiv 2205.05198): activations between blocks are sharded over the
sequence, gathered before a column-parallel product and scattered after a row-parallel one; the sharded input is
kept and gathered again in the backward pass.

A method turns a plan into rows and a step for one mode (corrected, or a reproduced paper). The corrected method allows
uneven stages and shares, and charges every link and every reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from steptime.errors import UnknownNameError
from steptime.model.spec import Experts
from steptime.num import Num, ceil_div, floor_div, maximum, minimum, where
from steptime.plan.attention import adapted, attention_rows, expert_rows, latent_rows, shared_gate
from steptime.plan.copies import boundary_element_bytes, quantised, unsharded, wide
from steptime.plan.declared import declared_rows, of_job, of_kind, shared_weights
from steptime.plan.job import Job, equal_but_for_ends, replica_micro_batches, virtual_stage
from steptime.plan.overlap import with_overlapped_transfers
from steptime.plan.plans import RULES, Plans, Rule
from steptime.plan.recompute import (
    kept_by_operators,
    layer_elements,
    leading_dense,
    loss_bytes,
    loss_row,
    recomputed,
    stopped_early,
)
from steptime.plan.rows import (
    Block,
    Row,
    Shape,
    Traffic,
    activation,
    bias,
    dropout,
    matmul,
    norm,
    over,
    residual,
    rope,
    summa_traffic,
)
from steptime.plan.stage_kinds import stage_shares
from steptime.registry import Registry


class Strategy(ABC):
    """A way to cut the tensors of a block: a table of rows in terms of the degrees."""

    name: ClassVar[str]
    tensor_axes: ClassVar[tuple[str, ...]]
    """Axes that cut tensors inside a layer."""
    gradient_axes: ClassVar[tuple[str, ...]]
    """Axes over which gradients are reduced and optimiser states sharded."""
    replicated_axis: ClassVar[str] = "tp"
    """Axis whose ranks all hold the weights that a row calls replicated."""

    def gradient_ranks(self, plans: Plans) -> Num:
        """Ranks that reduce a gradient together."""
        ranks: Num = 1
        for axis in self.gradient_axes:
            ranks = ranks * getattr(plans, axis)
        return ranks

    @abstractmethod
    def block(self, job: Job, plans: Plans) -> Block:
        """Rows of one layer and of what surrounds the layers, for one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """Layers on the first, on a middle (the fullest) and on the last stage."""

    first: Num
    middle: Num
    last: Num


class Method(ABC):
    """Rules of one mode that are the same for all its strategies."""

    name: ClassVar[str]
    strategies: ClassVar[Mapping[str, Strategy]]
    calibrated: ClassVar[bool]
    """True if fitted time models of a device replace the roofline."""
    optimizer_step: ClassVar[bool]
    """True if the optimiser's own time counts."""
    lone_rank_has_all_links: ClassVar[bool]
    """True if a group with one rank per domain still has `links_per_device` links."""
    rules: ClassVar[tuple[Rule, ...]]
    """Rules that make a plan impossible, without memory."""
    share_replicated_gradients: ClassVar[bool]
    """True if gradients of weights that tensor-parallel ranks replicate are reduced over these ranks."""

    def strategy(self, name: str) -> Strategy:
        """The strategy of a name.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        if name not in self.strategies:
            raise UnknownNameError("strategy", name, self.strategies)
        return self.strategies[name]

    @abstractmethod
    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Micro-batches of the replica with most of them."""

    @abstractmethod
    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """Layers per stage."""

    @abstractmethod
    def slow_link_share(self, plans: Plans) -> Num:
        """Share of a message that a link between domains is charged in the pipeline: 1, or a reproduced defect."""


class Corrected(Strategy):
    """Base of the corrected strategies: the order of the rows."""

    def block(self, job: Job, plans: Plans) -> Block:
        """Rows of one layer, of the embedding and of the head; for cut sequences the rows of all slices."""
        slices = job.pipeline.usual_slices
        whole = self._block(job, plans)
        if slices == 1:
            return whole
        length = -(-job.seq_len // slices)
        return in_slices(self._block(job.slice_of(length, (job.seq_len - length) / 2, slices), plans), whole, slices)

    def _block(self, job: Job, plans: Plans) -> Block:
        """Rows of whole sequences."""
        shape = Shape(job, plans, self.sequence_axis)
        if job.model.kinds:
            return self._block_of_kinds(shape)
        layer = [*self._attention_block(shape), *self._mlp_block(shape)]
        last = (*self._head(shape), *self._predicted_tokens(shape))
        return Block(
            layer=tuple(finished(layer, job, plans)),
            first=tuple(unsharded(adapted(self._embedding(shape), job, layer=False), job, plans, end="embedding")),
            last=tuple(unsharded(wide(adapted(last, job, layer=False), job.precision), job, plans, end="head")),
            boundary_bytes=self.stream_elements(shape) * boundary_element_bytes(job),
            working_bytes=layer_elements(shape) * shape.element_bytes,
            loss_bytes=loss_bytes(shape) if job.model.vocab else 0.0,
            leading_dense=leading_dense(job.model),
        )

    def _block_of_kinds(self, s: Shape) -> Block:
        """The mean layer of the busiest stage: rows of each kind with its share of the layers there."""
        job, plans, model = s.job, s.plans, s.model
        layer: list[Row] = []
        working: Num = 0.0
        boundary = self.stream_elements(s)
        shares = stage_shares(job, plans)
        for kind in model.kinds:
            own, share = of_job(job, kind), kind.own_share
            shape = Shape(own, plans, self.sequence_axis)
            rows = shared_weights(self._attention_block(shape) if kind.attention else [], share)
            rows += declared_rows(self, shape, kind.operators, share)
            rows += shared_weights(self._mlp_block(shape) if kind.mlp else [], share)
            layer += of_kind(finished(rows, own, plans), kind, shares[kind.name])
            working = maximum(working, layer_elements(shape))
            boundary = maximum(boundary, self.stream_elements(shape))
        first = (*self._embedding(s), *declared_rows(self, s, model.stem))
        last = wide(adapted(self._head(s), job, layer=False), job.precision)
        return Block(
            layer=tuple(layer),
            first=tuple(unsharded(adapted(first, job, layer=False), job, plans, end="embedding")),
            last=tuple(unsharded(last, job, plans, end="head")),
            boundary_bytes=boundary * boundary_element_bytes(job),
            working_bytes=working * s.element_bytes,
            loss_bytes=loss_bytes(s) if model.vocab else 0.0,
        )

    sequence_axis: ClassVar[str | None]

    def _predicted_tokens(self, s: Shape) -> list[Row]:
        """Multi-token prediction (arXiv 2412.19437, section 2.2): one more layer and head per further token."""
        depth, model = s.model.mtp_depth, s.model
        if not depth:
            return []
        table = s.vocab * self.embedding_width(s) * where(s.plans.pp <= 1, 0.0, 1.0)
        token = Row(
            name="embedding",
            block="mtp",
            operator="embedding",
            weights=table / depth,
            shape={"tokens": s.tokens, "width": s.hidden, "element_bytes": s.element_bytes},
            forward=s.scatter(s.activation_bytes),
            backward=s.gather_gradient(s.activation_bytes),
        )
        joined = matmul(
            "projection",
            "mtp",
            s.product(s.sharded_tokens, s.hidden, 2 * s.hidden),
            kept_elements=2 * s.sharded_tokens * s.hidden,
            replicated=2 * s.hidden * s.hidden,
        )
        rows = [
            token,
            self.norm(s, "token_norm", "mtp"),
            self.norm(s, "state_norm", "mtp"),
            joined,
            *self._attention_block(s),
        ]
        rows += self._mlp_block(s, dense_share=1.0 if model.experts is None else 0.0)
        head = [row if row.operator != "matmul" else replace(row, weights=0.0 * row.weights) for row in self._head(s)]
        return [replace(row, name=f"mtp_{row.name}", share=row.share * depth) for row in (*rows, *head)]

    @abstractmethod
    def stream_elements(self, shape: Shape) -> Num:
        """Elements of the residual stream on one device."""

    @abstractmethod
    def norm(self, shape: Shape, name: str, block: str) -> Row:
        """A norm of the residual stream."""

    @abstractmethod
    def into_block(self, shape: Shape, name: str, block: str, n: Num) -> Row:
        """The product that enters a block: hidden -> n local columns."""

    @abstractmethod
    def out_of_block(self, shape: Shape, name: str, block: str, k: Num, k_global: int) -> Row:
        """The product that leaves a block: k local rows -> hidden."""

    @abstractmethod
    def out_bias(self, shape: Shape, name: str, block: str) -> Row:
        """Bias of the product that leaves a block."""

    def _attention_block(self, s: Shape) -> list[Row]:
        model = s.model
        rows = [self.norm(s, "attention_norm", "attention"), *self._queries_and_keys(s), *attention_rows(s)]
        if model.attention_gate:
            gate = activation("attention_gate", "attention", s.tokens * s.query_width, element_bytes=s.element_bytes)
            rows.append(replace(gate, kept_bytes=2 * gate.kept_bytes))
        whole_width = model.heads * s.value_dim
        rows.append(self.out_of_block(s, "attention_out", "attention", s.query_width, whole_width))
        if model.out_bias:
            rows.append(self.out_bias(s, "attention_out_bias", "attention"))
        return [*rows, *self._leave(s, "attention")]

    def _queries_and_keys(self, s: Shape) -> list[Row]:
        """Rows from the normed input to rotated queries, keys and values."""
        model = s.model
        if model.latent is not None:
            return latent_rows(s, model.latent, self.into_block(s, "q", "attention", s.heads * model.head_dim))
        rows = [self.into_block(s, "qkv", "attention", s.qkv_width)]
        if model.qkv_bias:
            lacking = 0 if model.key_bias else s.kv_heads * model.head_dim
            rows.append(self._inner_bias(s, "qkv_bias", "attention", s.qkv_width - lacking))
        if model.qk_norm != "none":
            rows.append(self._qk_norm(s))
        if model.position == "rope":
            rotated = s.tokens * (s.heads + s.kv_heads) * model.head_dim
            rows.append(rope("attention", rotated, element_bytes=s.element_bytes, by_complex=s.job.complex_rope))
        return rows

    inner_weights_replicated: ClassVar[bool] = False
    """True if ranks of the replicated axis hold the same slice of a weight inside a block."""

    def _inner_bias(self, s: Shape, name: str, block: str, width: Num) -> Row:
        replicated = self.inner_weights_replicated
        return bias(name, block, s.tokens, width, element_bytes=s.element_bytes, replicated=replicated)

    def _qk_norm(self, s: Shape) -> Row:
        model = s.model
        heads = s.heads + s.kv_heads
        per_head = model.qk_norm == "head"
        width = model.head_dim if per_head else heads * model.head_dim
        weights = 2 * model.head_dim if per_head else heads * model.head_dim
        rows = s.tokens * (heads if per_head else 1)
        row = norm("qk_norm", "attention", rows, width, element_bytes=s.element_bytes, kind="rms_norm", weights=weights)
        return row if per_head or self.inner_weights_replicated else replace(row, replicated=0.0)

    def _mlp_block(self, s: Shape, dense_share: float | None = None) -> list[Row]:
        dense = s.dense_share if dense_share is None else dense_share
        experts, shared_norm = s.model.experts, s.model.norms_per_layer == 1
        rows = [] if shared_norm else [self.norm(s, "mlp_norm", "mlp")]
        if dense:
            rows += shared_by(self._dense_mlp(s), dense)
        if experts is not None:
            rows += shared_by(self._expert_mlp(s, experts), 1.0 - dense)
        return [*rows, *self._leave(s, "mlp")]

    def _expert_mlp(self, s: Shape, experts: Experts) -> list[Row]:
        """Rows of routed experts, and of the shared one as a dense MLP of its own width."""
        width = experts.shared_ffn_hidden
        if not width:
            return expert_rows(s, experts)
        local = ceil_div(width, s.plans.tp)
        rows = [
            self.into_block(s, "shared_in", "experts", local * s.model.mlp_inputs),
            activation(
                "shared_activation", "experts", s.tokens * local, element_bytes=s.element_bytes, gated=s.model.gated_mlp
            ),
            self.out_of_block(s, "shared_out", "experts", local, width),
        ]
        # The router has the same input and keeps it.
        rows[0] = replace(rows[0], kept_bytes=0.0 * rows[0].kept_bytes)
        gate = shared_gate(s) if experts.shared_gate else []
        added = residual("shared_residual", "experts", self.stream_elements(s), element_bytes=s.element_bytes)
        return [*expert_rows(s, experts), *rows, *gate, added]

    def _dense_mlp(self, s: Shape) -> list[Row]:
        model, inner = s.model, s.tokens * s.ffn
        rows = [self.into_block(s, "mlp_in", "mlp", s.ffn_in)]
        if model.mlp_bias:
            rows.append(self._inner_bias(s, "mlp_in_bias", "mlp", s.ffn_in))
        rows.append(activation("activation", "mlp", inner, element_bytes=s.element_bytes, gated=model.gated_mlp))
        if model.mlp_dropout:
            rows.append(
                dropout("mlp_inner_dropout", "mlp", inner, element_bytes=s.element_bytes, mask_bytes=s.mask_bytes)
            )
        rows.append(self.out_of_block(s, "mlp_out", "mlp", s.ffn, model.ffn_hidden))
        if model.mlp_bias:
            rows.append(self.out_bias(s, "mlp_out_bias", "mlp"))
        return rows

    def _leave(self, s: Shape, block: str) -> list[Row]:
        """Rows that add a block's output to the residual stream; most often a dropout adds it in the same kernel."""
        rows = [self.norm(s, f"post_{block}_norm", block)] if s.model.norms_per_layer == 4 else []
        elements = self.stream_elements(s)
        if s.model.layer_scale:  # moves what a bias moves, and keeps its input
            scale = self.out_bias(s, f"{block}_scale", block)
            rows.append(replace(scale, kept_bytes=elements * s.element_bytes))
        apart = s.job.separate_kernels
        if s.model.dropout:
            rows.append(
                dropout(
                    f"{block}_dropout",
                    block,
                    elements,
                    element_bytes=s.element_bytes,
                    mask_bytes=s.mask_bytes,
                    operator="dropout" if apart else "dropout_add",
                )
            )
        if apart or not s.model.dropout:
            rows.append(residual(f"{block}_residual", block, elements, element_bytes=s.element_bytes))
        return rows

    def _embedding(self, s: Shape) -> tuple[Row, ...]:
        if s.model.vision is not None:
            return (patch_embedding(s),)
        if not s.model.vocab:
            return ()
        positions = s.model.max_positions * s.hidden if s.model.position == "learned" else 0
        token = Row(
            name="token_embedding",
            block="embedding",
            operator="embedding",
            shape={"tokens": s.tokens, "width": s.hidden, "element_bytes": s.element_bytes},
            weights=s.vocab * self.embedding_width(s) + positions,
            replicated=positions,
            forward=s.scatter(s.activation_bytes),
            backward=s.gather_gradient(s.activation_bytes),
        )
        return (token, self.norm(s, "embedding_norm", "embedding")) if s.model.embedding_norm else (token,)

    def embedding_width(self, shape: Shape) -> Num:
        """Columns of the token table on one device."""
        return shape.hidden

    def _head(self, s: Shape) -> tuple[Row, ...]:
        model = s.model
        rows = [self.norm(s, "final_norm", "head")] if model.final_norm else []
        if model.vision is not None and model.vision.head_outputs:
            return (*rows, classifier(s))
        if not model.vocab:
            return tuple(rows)
        head, predicted = (
            self.into_block(s, "logits", "head", s.vocab),
            s.tokens * model.predicted_share * s.job.answered_share,
        )
        shared = where(s.plans.pp <= 1, 0.0, 1.0) if model.tied_embeddings else 1.0
        head = replace(head, weights=head.weights * shared, shape={**head.shape, "m": predicted})
        if model.head_bias:
            rows.append(self._inner_bias(s, "logits_bias", "head", s.vocab))
        return (*rows, head, loss_row(s, predicted))


def in_slices(one: Block, whole: Block, slices: int) -> Block:
    """Rows of a slice, once per slice of a sequence, with the kept and boundary bytes of whole sequences."""

    def times(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple([replace(row, share=row.share * slices) for row in rows])

    held = replace(whole, working_bytes=one.working_bytes, loss_bytes=one.loss_bytes)
    return replace(held, layer=times(one.layer), first=times(one.first), last=times(one.last), whole=held)


def finished(rows: list[Row], job: Job, plans: Plans) -> list[Row]:
    """Rows of a layer after overlap, recomputation, frozen weights, quantisation and copies are applied."""
    rows = with_overlapped_transfers(
        kept_by_operators(rows, job.memory, plans, trained=job.adapter is None), job, plans
    )
    rows = adapted(recomputed(rows, plans.recompute, job.model, plans), job, layer=True, tp=plans.tp)
    if job.stops_early:
        rows = stopped_early(rows)
    return unsharded(quantised(rows, job, plans), job, plans)


def shared_by(rows: Iterable[Row], share: float) -> list[Row]:
    """Rows that a share of the layers has."""
    return [row if share == 1.0 else replace(row, share=row.share * share) for row in rows]


def patch_embedding(s: Shape) -> Row:
    """Row of the patch embedding on sharded tokens; its weights, positions and class token are replicated."""
    vision = s.model.vision
    if vision is None:
        raise ValueError("the model has no patches")
    k = vision.channels * vision.patch_size**2
    whole = int(vision.patch_bias) + int(vision.class_token) + int(vision.mask_token) + s.model.max_positions
    weights = (k + whole) * s.hidden
    return matmul(
        "patch_embedding",
        "embedding",
        s.product(s.sharded_tokens, s.hidden, k),
        kept_elements=s.sharded_tokens * k,
        weights=weights,
        replicated=weights,
    )


def classifier(s: Shape) -> Row:
    """Row of the head of a ViT on one token per image; its weights are replicated."""
    vision = s.model.vision
    if vision is None:
        raise ValueError("the model has no patches")
    batch, outputs = s.plans.micro_batch, vision.head_outputs
    weights = (s.hidden + int(vision.head_bias)) * outputs
    return matmul(
        "classifier",
        "head",
        s.product(batch, outputs, s.hidden),
        kept_elements=batch * s.hidden,
        weights=weights,
        replicated=weights,
    )


class Tensor1D(Corrected):
    """1D tensor parallelism with sequence parallelism."""

    name: ClassVar[str] = "1d"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp",)
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp",)
    sequence_axis: ClassVar[str | None] = None

    def stream_elements(self, shape: Shape) -> Num:
        """The residual stream is sharded over the sequence."""
        return shape.sharded_tokens * shape.hidden

    def norm(self, shape: Shape, name: str, block: str) -> Row:
        """A norm on the sequence shard; its weights are replicated over ``tp``."""
        weights = shape.norm_weights * shape.hidden * shape.model.norm_weights
        return norm(
            name,
            block,
            shape.sharded_tokens,
            shape.hidden,
            element_bytes=shape.element_bytes,
            kind=shape.norm_kind,
            weights=weights,
        )

    def into_block(self, shape: Shape, name: str, block: str, n: Num) -> Row:
        """Column parallel: gather the input; backward gather it again and scatter its gradient."""
        size = shape.activation_bytes
        return matmul(
            name,
            block,
            shape.product(shape.tokens, n, shape.hidden),
            kept_elements=shape.sharded_tokens * shape.hidden,
            traffic=Traffic(shape.gather(size), shape.gather_again(size)),
        )

    def out_of_block(self, shape: Shape, name: str, block: str, k: Num, k_global: int) -> Row:
        """Row parallel: scatter the output; backward gather its gradient."""
        size = shape.activation_bytes
        return matmul(
            name,
            block,
            shape.product(shape.tokens, shape.hidden, k),
            kept_elements=shape.tokens * k,
            traffic=Traffic(shape.scatter(size), shape.gather_gradient(size)),
        )

    def out_bias(self, shape: Shape, name: str, block: str) -> Row:
        """A bias on the sequence shard; replicated over ``tp``."""
        return bias(name, block, shape.sharded_tokens, shape.hidden, element_bytes=shape.element_bytes, replicated=True)


class Context2D(Tensor1D):
    """1D tensor parallelism times context parallelism; with ``cp`` = 1 it is 1D."""

    name: ClassVar[str] = "context"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp", "cp")
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp", "cp")
    sequence_axis: ClassVar[str | None] = "cp"


class Summa2D(Corrected):
    """SUMMA products on a ``tp`` x ``tp2`` grid; attention with heads over ``tp`` and the sequence over ``tp2``."""

    name: ClassVar[str] = "2d"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp", "tp2")
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp",)
    replicated_axis: ClassVar[str] = "tp2"
    inner_weights_replicated: ClassVar[bool] = True
    sequence_axis: ClassVar[str | None] = "tp2"

    def stream_elements(self, shape: Shape) -> Num:
        """The residual stream is cut over both axes."""
        return shape.tokens * ceil_div(shape.hidden, shape.tp)

    def embedding_width(self, shape: Shape) -> Num:
        """The token table is cut over both axes."""
        return ceil_div(shape.hidden, shape.plans.tp2)

    def norm(self, shape: Shape, name: str, block: str) -> Row:
        """A norm of rows that are cut over ``tp``: their statistics are reduced."""
        width = ceil_div(shape.hidden, shape.tp)
        weights = shape.norm_weights * width * shape.model.norm_weights
        statistics = (over("tp", "all_reduce", shape.norm_weights * shape.tokens * shape.element_bytes),)
        return norm(
            name,
            block,
            shape.tokens,
            width,
            element_bytes=shape.element_bytes,
            kind=shape.norm_kind,
            weights=weights,
            traffic=Traffic(statistics, statistics),
        )

    def into_block(self, shape: Shape, name: str, block: str, n: Num) -> Row:
        """SUMMA product from hidden."""
        return self._summa(shape, name, block, shape.hidden, n)

    def out_of_block(self, shape: Shape, name: str, block: str, k: Num, k_global: int) -> Row:
        """SUMMA product to hidden."""
        return self._summa(shape, name, block, k_global, ceil_div(shape.hidden, shape.tp))

    def out_bias(self, shape: Shape, name: str, block: str) -> Row:
        """A bias cut over ``tp``; replicated over ``tp2``."""
        width = ceil_div(shape.hidden, shape.tp)
        return bias(name, block, shape.tokens, width, element_bytes=shape.element_bytes, replicated=True)

    def _summa(self, s: Shape, name: str, block: str, k: int, n: Num) -> Row:
        activations, weights = s.tokens * k * s.element_bytes, k * n * s.element_bytes
        panels = s.plans.panels
        return matmul(
            name,
            block,
            replace(s.product(s.tokens, n, k), output_passes=panels, panels=panels),
            kept_elements=s.tokens * ceil_div(k, s.tp),
            weights=ceil_div(k, s.plans.tp2) * n,
            traffic=summa_traffic(activations, weights),
        )


STRATEGIES: Registry[Strategy] = Registry("strategy", "steptime.strategies")
for _strategy in (Tensor1D(), Context2D(), Summa2D()):
    STRATEGIES.add(_strategy.name, _strategy)


class CorrectedMethod(Method):
    """The default method."""

    name: ClassVar[str] = "corrected"
    strategies: ClassVar[Mapping[str, Strategy]] = STRATEGIES
    rules: ClassVar[tuple[Rule, ...]] = RULES
    calibrated: ClassVar[bool] = True
    optimizer_step: ClassVar[bool] = True
    lone_rank_has_all_links: ClassVar[bool] = True
    share_replicated_gradients: ClassVar[bool] = True

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Micro-batches of the replica with most; a smaller last one is charged as a whole one."""
        return replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch)

    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """Layers per stage; the remainder goes to the middle, then to the first: the ends have embedding and head.

        With virtual stages all are equal, except that the very first and the very last may lack layers, the last more;
        a folded pipeline has both on its first rank.
        """
        layers = job.model.layers
        least = floor_div(layers, plans.pp)
        over = layers - least * plans.pp
        each, lacking = virtual_stage(layers, plans.pp, plans.vpp)
        of_last = 0 * lacking if job.pipeline.folded else minimum(each, ceil_div(lacking, 2))
        cut, full = (plans.vpp > 1) & equal_but_for_ends(each, lacking), plans.vpp * each
        first = least + where((over > plans.pp - 2) & (over > 0), 1, 0)
        return StageSplit(
            first=where(cut, full - (lacking - of_last), first),
            middle=where(cut, full, least + where(over > 0, 1, 0)),
            last=where(cut, full - of_last, least),
        )

    def slow_link_share(self, plans: Plans) -> Num:
        """One, as every link is charged."""
        return 1.0


CORRECTED = CorrectedMethod()
