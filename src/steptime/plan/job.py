"""The job: model, data and training method, the same for all candidate plans.

Its choices are tables: precisions, optimisers, pipeline schedules (:data:`steptime.schedule.SCHEDULES`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steptime.cost.host import IN_TURN
from steptime.cost.quantisation import (
    BLOCKWISE_GROUP,
    element_bytes,
    nf4_element_bytes,
    nvfp4_element_bytes,
)
from steptime.hardware.records import Device
from steptime.model.captured import CapturedModel
from steptime.model.spec import ELEMENT_BYTES, ModelSpec
from steptime.num import Num, ceil_div
from steptime.options import choices_of
from steptime.plan.framework import IDEAL, Framework
from steptime.plan.framework_file import habits_of, memory_profile_of
from steptime.plan.memory_profile import PLAIN, MemoryProfile, compiled
from steptime.plan.optimizers import OPTIMIZERS as OPTIMIZERS
from steptime.plan.optimizers import Optimizer as Optimizer
from steptime.registry import Registry
from steptime.schedule import SCHEDULES, Schedule
from steptime.schedule.schedules import PipelineBlock

if TYPE_CHECKING:
    from steptime.plan.plans import Plans


def virtual_stage(layers: Num, stages: Num, virtual_stages: Num) -> tuple[Num, Num]:
    r"""Layers of one virtual stage, and the number of layers that the first and the last one lack together.

    $$k = \left\lceil \frac{L}{p\,v} \right\rceil, \qquad d = p\,v\,k - L$$

    where $L$ = `layers`, $p$ = `stages`, $v$ = `virtual_stages` of each. Embedding and head take the places of the
    missing layers (:func:`equal_but_for_ends`).

    Source: Megatron-Core, `--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split` and
    `--pipeline-model-parallel-layout`.

    >>> virtual_stage(126, 16, 4), virtual_stage(61, 4, 4), virtual_stage(128, 16, 4)
    ((2, 2), (4, 3), (2, 0))
    """
    each = ceil_div(layers, stages * virtual_stages)
    return each, stages * virtual_stages * each - layers


def equal_but_for_ends(each: Num, lacking: Num) -> Any:
    """True if virtual stages of ``each`` layers are equal except the first and the last, which lack all missing layers.

    >>> equal_but_for_ends(4, 3), equal_but_for_ends(1, 3)
    (True, False)
    """
    return lacking <= 2 * each


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Formats of one training recipe."""

    name: str
    matrix_dtype: str
    """Dtype whose matrix rate products run at."""
    attention_dtype: str
    """Dtype whose matrix rate the two products of attention run at."""
    vector_dtype: str
    element_bytes: float
    """Bytes of a weight in use and of an activation element."""
    gradient_bytes: float
    master_weights: bool
    """True if the optimiser keeps its own fp32 copy of the weights."""
    mask_bytes: float = 1.0
    """Bytes of one dropout flag."""
    quantised_bytes: float | None = None
    """Bytes of an element with its scales in the format of operands of the layers' products, which the input kept for
    backward has too; None: the products take operands as stored."""
    block_scaled: bool = False
    """True if operands have a scale for each block of elements, which the matrix units apply if they can."""
    transposed_copy: bool = False
    """True if the product for the gradient of the weights takes a second, transposed copy of both operands (on devices
    that take narrow operands in one layout only: :meth:`on`)."""
    scaled_now: bool = False
    """True if the scale of a tensor follows its current largest magnitude, which an extra pass finds beforehand."""

    @property
    def wide_dtype(self) -> str:
        """Dtype whose rate products with operands as stored run at, while those of the layers are narrow."""
        return self.matrix_dtype if self.quantised_bytes is None else self.vector_dtype

    def attending_in(self, dtype: str) -> Precision:
        """The recipe with the products of attention in another format; output and kept tensors stay as they are.

        >>> PRECISIONS["fp8-te"].attending_in("fp8").attention_dtype
        'fp8'
        """
        return replace(self, attention_dtype=dtype)

    def on(self, device: Device) -> Precision:
        """The recipe on a device; if it takes narrow operands in both layouts, tensors with one scale need no copy.

        Formats with a scale per block keep both, as blocks along rows are not those along columns.

        Source: Transformer Engine, `nvte_is_non_tn_fp8_gemm_supported` and `Float8Quantizer::create_tensor`.
        """
        if self.block_scaled or not device.takes_either_layout:
            return self
        return replace(self, transposed_copy=False)


def _unscaled(name: str, element_bytes: int, vector_dtype: str | None = None) -> Precision:
    """Recipe with all operators in one dtype, and fp32 master weights if an element has fewer than 4 bytes."""
    return Precision(
        name=name,
        matrix_dtype=name,
        attention_dtype=name,
        vector_dtype=vector_dtype or name,
        element_bytes=element_bytes,
        gradient_bytes=element_bytes,
        master_weights=element_bytes < 4,
    )


_FP8 = Precision(
    name="fp8",
    matrix_dtype="fp8",
    attention_dtype="bf16",
    vector_dtype="bf16",
    element_bytes=2,
    gradient_bytes=2,
    master_weights=True,
)
_FP8_TE = replace(_FP8, name="fp8-te", quantised_bytes=1.0, transposed_copy=True)
PRECISIONS: Registry[Precision] = Registry("dtype", "steptime.precisions")
for _precision in (
    _unscaled("fp32", 4),
    _unscaled("tf32", 4, vector_dtype="fp32"),
    _unscaled("fp16", 2),
    _unscaled("bf16", 2),
    _FP8,
    _FP8_TE,
    replace(_FP8_TE, name="fp8-tensorwise", scaled_now=True),
    replace(
        _FP8_TE,
        name="fp8-blockwise",
        quantised_bytes=float(element_bytes(8, BLOCKWISE_GROUP)),
        block_scaled=True,
    ),
    replace(_FP8_TE, name="mxfp8", quantised_bytes=float(element_bytes(8, 32, 1.0)), block_scaled=True),
    replace(
        _FP8_TE,
        name="nvfp4",
        matrix_dtype="fp4",
        quantised_bytes=nvfp4_element_bytes(),
        block_scaled=True,
    ),
):
    PRECISIONS.add(_precision.name, _precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Distribution of tokens over experts."""

    name: str
    """Name that the user gives."""
    shares: tuple[float, ...]
    """Share of the tokens by expert; they add up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685; with 4-bit weights QLoRA, arXiv 2305.14314)."""

    rank: int
    targets: str = "linear"
    """``linear``: every product of the layers; ``attention``: those of the attention block; or some of
    :data:`PROJECTION_NAMES`, joined by commas."""
    dora: bool = False
    """True if the length of each column of the sum is a parameter too (DoRA, arXiv 2402.09353)."""
    weight_bytes: float | None = None
    """Bytes of a frozen weight of the adapted products with its scales; None: bytes of the dtype."""


#: Bytes of a frozen weight of QLoRA: 4 bits and, with doubly quantised scales of blocks of 64, 0.127 bits.
QLORA_BYTES = nf4_element_bytes()
#: Groups of products that may have adapters.
TARGETS = ("linear", "attention")
#: Projections that may have adapters: names of PEFT's `target_modules` without `_proj`, and of latent attention.
PROJECTION_NAMES = ("q", "k", "v", "o", "gate", "up", "down", "q_down", "q_up", "kv_down", "kv_up")
#: Bytes of a gradient by the name of its dtype.
GRADIENT_BYTES = {dtype: float(ELEMENT_BYTES[dtype]) for dtype in choices_of("gradient_dtype")}
#: Values of ``graphs``, the part of a step that the host issues as one graph: nothing, all, or parts of each layer.
GRAPHS = ("none", "step")
GRAPH_PARTS = ("attention", "router", "preprocess")
"""Parts of a layer that may be one graph: attention with its norm, the router, and its preprocessing for sending."""
ALL_TO_ALL = "all_to_all"


def sample_noun(seq_len: int, *, images: bool = False) -> str:
    """Noun for the unit of a batch: sequence, image, or sample of a single token.

    >>> sample_noun(2048), sample_noun(197, images=True), sample_noun(1)
    ('sequence', 'image', 'sample')
    """
    return "image" if images else "sample" if seq_len == 1 else "sequence"


def replica_sequences(global_batch: int, replicas: Num) -> Num:
    r"""Sequences of the replica with most: $\lceil B / d \rceil$ of $B$ = `global_batch` on $d$ = `replicas`.

    >>> replica_sequences(100, 32), replica_sequences(96, 32)
    (4, 3)
    """
    return ceil_div(global_batch, replicas)


def replica_micro_batches(global_batch: int, replicas: Num, micro_batch: Num) -> Num:
    r"""Micro-batches of the replica that has most: $\lceil \lceil B / d \rceil / m \rceil$ of $m$ = `micro_batch`
    sequences each.

    >>> replica_micro_batches(100, 32, 3)
    2
    """
    return ceil_div(replica_sequences(global_batch, replicas), micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job on a number of devices."""

    model: ModelSpec
    gpus: int
    global_batch: int
    """Sequences per optimiser step."""
    seq_len: int
    precision: Precision
    optimizer: Optimizer
    attention: str = "fused"
    """``fused`` (flash), ``unfused``, or ``summa`` (scores blocked over both tensor axes)."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that overlaps with computation if it can: names of the option ``overlap``."""
    schedule: str = "1f1b"
    """Pipeline schedule, of :data:`steptime.schedule.SCHEDULES`, for plans without virtual stages by default."""
    before: float = 0.0
    """Tokens of the sequence before the slice that is the job, the mean over slices; 0 for whole sequences."""
    document_length: float | None = None
    """Tokens of a document in a packed sequence; attention stays within it. None: a sequence is one document."""
    graphs: str = "none"
    """Work that the host issues as one graph (CUDA graphs), of :data:`GRAPHS`: with ``step`` it issues no single
    operator and waits for no result of the device; with parts of :data:`GRAPH_PARTS`, joined by ``+``, it issues each
    part of a layer at once."""
    compile: bool = False
    """True if the step is compiled (torch.compile): norms, dropouts and masks that the framework runs as operators of
    PyTorch (``plain_norms``, ``separate_kernels``) become one kernel each, and the loss makes no copies
    (:func:`~steptime.plan.memory_profile.compiled`); products, attention and fused kernels stay.

    Source: torch.compile's documentation (Inductor fuses pointwise operators and reductions, and calls libraries for
    products and attention)."""
    dispatcher: str = ALL_TO_ALL
    """Way to send tokens to their experts: permutations around all-to-alls of the collective library, or one kernel."""
    offload: frozenset[str] = frozenset()
    """State that is kept on the host: names of the option ``offload``."""
    framework: Framework = IDEAL
    """Effects of the training software on the machine."""
    context: str = "all_gather"
    """Exchange of context ranks: ``all_gather`` (keys and values, before the kernel), ``ring`` (block by block, with
    overlap) or ``ulysses`` (all-to-all from sequence shards to head shards and back)."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean, if none are dropped."""
    expert_load: ExpertLoad | None = None
    """Shares of the tokens by expert, which determine the fullest rank; None: ``expert_imbalance``."""
    expert_capacity: float | None = None
    """Slots of an expert over its mean tokens; all slots are computed. None: no token is dropped."""
    exchange_once: bool = False
    """True if a token goes to its experts once per domain and rank (:func:`steptime.cost.experts.once_share`); else
    every copy is sent."""
    single_ring: bool = False
    """True if traffic of ZeRO-3 leaves a node by one NIC; else by the NICs of all devices."""
    root_unit: bool = False
    """ZeRO-3 gathers and reduces embedding and head together, around all layers; else each with the layers."""
    copied_parameters: bool = False
    """Parameters are copied out of the buffer that is gathered, and their gradients into that which is reduced."""
    stops_early: bool = False
    """Recomputation of a whole layer skips results that the backward pass does not read; else it is the whole layer."""
    fused_copies: frozenset[str] = frozenset()
    """Tensors that fused attention copies to another layout, of :data:`~steptime.plan.framework.COPIES`."""
    unfused_copies: frozenset[str] = frozenset()
    """Tensors that unfused attention copies to another layout."""
    complex_rope: bool = False
    """Rotary embeddings multiply complex numbers, three kernels; else one kernel rotates."""
    separate_kernels: bool = False
    """Dropout is a separate kernel before the residual addition, and unfused attention scales and masks its scores in
    separate kernels; else one kernel drops and adds, and the softmax scales and masks."""
    triangular_softmax: bool = False
    """The softmax of unfused causal attention reads half of the scores; else all."""
    asynchronous_tp: bool = False
    """The second gathering of a product's input and the sum of its input's gradient over ``tp`` each overlap with one
    of its two backward products; else they are exposed."""
    one_pass_norms: bool = False
    """The backward pass of a LayerNorm reads its input and its gradient once; else once for each of its results."""
    plain_norms: bool = False
    """RMSNorms are PyTorch's operators, each a kernel on fp32 copies; else one kernel (LayerNorms always are one)."""
    gradient_dtype: str | None = None
    """Dtype in which gradients are accumulated and reduced, of :data:`GRADIENT_BYTES`; None: that of the precision."""
    adapter: Adapter | None = None
    """Adapters that are trained instead of the weights."""
    scattered_messages: bool = False
    """Tensor-parallel ranks without sequence shards each send their part of a message to the next stage, which gathers
    it; else each sends the whole message."""
    answered_share: float = 1.0
    """Tokens with logits in the loss over the tokens that the model predicts; below 1 if a trainer computes logits of
    responses only."""
    evaluated_share: float = 1.0
    """Mean tokens of an evaluated sequence over those of the longest."""
    memory: MemoryProfile = PLAIN
    """Memory of the training software beyond live tensors."""
    captured: CapturedModel | None = None
    """Captured module, whose operators are the rows; ``model`` is a summary of it. None: the model is declared."""

    @property
    def sample(self) -> str:
        """Noun for the unit of the batch, in the singular (:func:`sample_noun`)."""
        return sample_noun(self.seq_len, images=self.model.vision is not None)

    @property
    def reads_sizes(self) -> bool:
        """True if the host reads from the device, at every router, the number of tokens of each expert.

        It does if no token is dropped, as host and collective library need the sizes of products and messages;
        DeepEP's host waits for the same numbers. A capacity fixes them beforehand, a whole step as a graph leaves them
        on the device, and a device that is its own host has them.

        Source: Megatron-Core, `megatron/core/transformer/moe/token_dispatcher.py` (synchronisation with the host, none
        with `drop_and_pad`); DeepEP's README (the host waits for a signal of the device).
        """
        graph, own_host = self.graphs == "step", self.framework.issue_sharpness == IN_TURN
        return self.model.experts is not None and self.expert_capacity is None and not (graph or own_host)

    @property
    def attended(self) -> float:
        """Tokens that attend to each other: a sequence, or a document in one."""
        return self.seq_len if self.document_length is None else min(self.seq_len, self.document_length)

    @property
    def is_cut(self) -> bool:
        """True if the model's sequences can be cut into the slices of the schedule."""
        slices = self.pipeline.usual_slices
        return slices == 1 or (self.model.causal and self.captured is None and slices <= self.seq_len)

    def slice_of(self, length: int, before: float, slices: int) -> Job:
        """One of ``slices`` slices of each sequence as a job; it also attends to the tokens before it.

        In packed documents a slice sees earlier tokens of its own document only: on average half of the document's
        tokens outside the slice.
        """
        if self.document_length is not None:
            before = max(self.attended - length, 0.0) / 2
        return replace(
            self,
            seq_len=length,
            before=before,
            global_batch=self.global_batch * slices,
            schedule="gpipe",
            document_length=None if self.document_length is None else min(self.attended, length),
        )

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one gradient."""
        return self.precision.gradient_bytes if self.gradient_dtype is None else GRADIENT_BYTES[self.gradient_dtype]

    @property
    def pipeline(self) -> Schedule:
        """The schedule whose closed forms hold for plans with and without virtual stages."""
        row = SCHEDULES[self.schedule]
        return SCHEDULES[row.interleaved_as] if row.interleaved_as else row

    def schedule_with(self, virtual_stages: int) -> str:
        """Name of the schedule of a plan with a number of virtual stages."""
        return self.pipeline.name if virtual_stages > 1 else self.schedule

    def counts(self, plans: Plans, micro_batches: Num) -> PipelineBlock:
        """Numbers of the pipelines of plans with these micro-batches, as arguments of the schedule's closed forms."""
        row = self.pipeline
        return PipelineBlock(
            ranks=plans.pp,
            chunks=plans.vpp,
            micro_batches=micro_batches,
            slices=row.usual_slices,
            per_update=row.usual_per_update,
        )

    def updates(self, plans: Plans) -> Num:
        """Updates of the weights in a step."""
        micro_batches = replica_micro_batches(self.global_batch, plans.dp, plans.micro_batch)
        return self.pipeline.updates(self.counts(plans, micro_batches))

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights have a separate pass."""
        return self.pipeline.splits

    @property
    def stages_held(self) -> int:
        """Stages of a pipeline that each rank holds: one, or two, of which another rank holds copies."""
        return self.pipeline.copies


def with_habits(job: Job, framework: str) -> Job:
    """The job under the defaults of a framework (:class:`~steptime.plan.framework.Habits`)."""
    habits, paired = habits_of(framework), {"pp"} if job.model.experts is None else {"pp", "ep"}
    # If passes run in pairs, this traffic overlaps with the opposite pass in any framework.
    by_schedule = frozenset(paired if job.pipeline.pairs else ())
    return replace(
        job,
        context=habits.context,
        scattered_messages=habits.scattered_messages,
        exchange_once=habits.exchange_once,
        single_ring=habits.single_ring,
        root_unit=habits.root_unit,
        separate_kernels=habits.separate_kernels and not job.compile,
        copied_parameters=habits.copied_parameters,
        stops_early=habits.stops_early,
        complex_rope=habits.complex_rope,
        fused_copies=habits.fused_copies,
        unfused_copies=habits.unfused_copies,
        triangular_softmax=habits.triangular_softmax,
        one_pass_norms=habits.one_pass_norms,
        plain_norms=habits.plain_norms and not job.compile,
        asynchronous_tp=habits.asynchronous_tp,
        dispatcher="deepep" if habits.exchange_once else ALL_TO_ALL,
        memory=compiled(memory_profile_of(framework)) if job.compile else memory_profile_of(framework),
        overlap=default_overlap(job, framework) | by_schedule,
        gradient_dtype=habits.gradient_dtype if job.precision.element_bytes < 4 else None,
    )


def dispatched_by(job: Job, dispatcher: str) -> Job:
    """The job with another dispatcher; all except the all-to-all send a token once over the same links.

    Source: DeepEP's README (normal kernels forward over NVLink what arrives over RDMA); HybridEP does the same.
    """
    return replace(job, dispatcher=dispatcher, exchange_once=dispatcher != ALL_TO_ALL)


def default_overlap(job: Job, framework: str) -> frozenset[str]:
    """Traffic that a framework overlaps in a job by default, for any schedule."""
    return habits_of(framework).overlap_with(job.offload, experts=job.model.experts is not None)
