"""What the training software makes of a machine: slowdowns, overlap and overheads of a named framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from steptime.cost.host import SHARPNESS
from steptime.num import Num, maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Uncertainty of the parameters of a framework, fitted to the residuals of measured runs."""

    doubts: Mapping[str, float]
    """Standard deviation of each parameter, of the logarithm (of shares: of the logit)."""
    device_doubt: float
    """Standard deviation of the logarithm of the device's own factor on products."""
    noise: float
    """Standard deviation of the logarithm of time of runs that are known exactly."""
    low: float
    """Quantiles of residuals in units of the standard deviation that all doubts make: of 5 % and of 95 %."""
    high: float
    source: str
    experts: float = 0.0
    """What models with experts add to the noise, as a standard deviation."""
    widening: float = 1.0
    """Factor on the band of a device that few sources have measured, of :func:`widening`."""


NORMAL_95 = 1.6449
"""95 % quantile of the normal distribution."""
PRIOR_SOURCES = 2
"""What is believed of a device before any source measured it counts as much as this many sources."""


def widening(sources: float) -> float:
    r"""Factor on the width of a band for a device that only a few sources have measured.

    $$w = \frac{t_\nu}{z}, \qquad t_\nu = z + \frac{z^3+z}{4\nu} + \frac{5z^5+16z^3+3z}{96\nu^2} +
      \frac{3z^7+19z^5+17z^3-15z}{384\nu^3}, \qquad \nu = n + n_0$$

    where $n$ = `sources`, $n_0$ = :data:`PRIOR_SOURCES`, and $t_\nu$ is the 95 % quantile of Student's distribution
    by its expansion around that of the normal, $z$: the spread between sources is itself known from $\nu$ of them.

    Source: Fisher and Cornish, The percentile points of distributions having known cumulants, Technometrics 2, 1960.

    >>> round(widening(0), 2), round(widening(3), 3), widening(1e9) == 1.0   # t: 2.92, 2.015, 1.645
    (1.75, 1.225, True)
    """
    z, nu = NORMAL_95, sources + PRIOR_SOURCES
    t = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    return round(t / z, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Parameters of one training framework; the ideal one changes nothing.

    Every parameter is a factor on a time of the model (1: as modelled), a share, or seconds. They may be arrays when
    many runs are composed at once.
    """

    name: str = "ideal"
    matrix: Num = 1.0
    """Time of matrix products in a running step over their time measured alone (clocks under load, layouts)."""
    narrow: Num = 1.0
    """Time of products in formats narrower than 16 bits over what :attr:`matrix` makes of them: scales, casts and
    layouts that a measurement of the product alone leaves out."""
    attention: Num = 1.0
    """Factor as :attr:`matrix`, of the attention core."""
    vector: Num = 1.0
    """Factor as :attr:`matrix`, of operators bound by memory: what is not fused costs more than once."""
    host_s: Num = 0.0
    """Time of the host to issue one operator of the model; below it the device waits."""
    tensor_links: Num = 1.0
    """Time of transfers over ``tp`` (and ``tp2``), hidden or not, over their time on free links."""
    context_links: Num = 1.0
    """The same over ``cp``."""
    expert_links: Num = 1.0
    """The same over ``ep``."""
    data_links: Num = 1.0
    """Time of gradient and weight traffic over its time on free links."""
    data_exposed: Num = 0.0
    """Share of the traffic that could overlap with computation but does not."""
    stage_links: Num = 1.0
    """Time of messages between stages over their time on free links."""
    router_s: Num = 0.0
    """Time that the device waits for the host at one router of experts, in each direction."""
    captured_wait: Num = 1.0
    """Share of it that is left where router and preprocessing are one graph."""
    stage_s: Num = 0.0
    """Time that the host loses per micro-batch and stage for starting it and waiting for its neighbours."""
    optimizer: Num = 1.0
    """Time of the optimiser step over one pass over its tensors."""
    step_s: Num = 0.0
    """Time that the ranks of a step spend on what they do together and no work explains: hooks and buckets of
    gradients, their norm, barriers of timers and logs (:func:`steptime.cost.host.step_overhead_s`)."""
    issue_sharpness: float = SHARPNESS
    """No parameter, but of the device: exponent of :func:`steptime.cost.host.issued_s`."""
    growth: Num = 0.0
    """Relative growth of the step per doubling of the devices beyond eight: stragglers and shared links."""
    spread: Spread | None = field(default=None, compare=False)
    """How far all this can be trusted; None: nothing is known, and estimates have no band."""

    def links(self, axis: str) -> Num:
        """Factor on transfers over an axis of the mesh."""
        factor: Num = getattr(self, AXIS_LINKS[axis])
        return factor


AXIS_LINKS = {
    "tp": "tensor_links",
    "tp2": "tensor_links",
    "etp": "tensor_links",
    "cp": "context_links",
    "ep": "expert_links",
}
LINKS = (*dict.fromkeys(AXIS_LINKS.values()), "data_links", "stage_links")
"""Parameters that are factors on transfers."""
PARAMETERS = tuple(f.name for f in fields(Framework) if f.name not in ("name", "issue_sharpness", "spread"))
FACTORS = tuple(name for name in PARAMETERS if getattr(Framework(), name) == 1.0)
"""Parameters that are factors on times."""
SHARES = frozenset({"data_exposed"})
"""Parameters between 0 and 1; all others are positive (or above :data:`LEAST`)."""
LEAST = {"data_links": 1.0, "stage_links": 1.0}
"""Least values: what travels as a whole takes no less than on free links; what overlaps is another parameter."""
TINY = 1e-9
"""What stands for nothing above a least value."""
BUSY = ("matrix", "narrow", "attention")
"""Parameters that a device's own factors multiply: its clock under load, and how well its kernels are known."""


def without_hiding(framework: Framework) -> Framework:
    """The framework where no transfer overlaps: its factors on links are at least 1.

    A factor below 1 was fitted to runs that overlap more than the model does.
    """
    whole: dict[str, Any] = {name: maximum(getattr(framework, name), 1.0) for name in LINKS}
    return replace(framework, **whole)


def to_fitted_scale(name: str, value: float) -> float:
    """A parameter on the scale on which it is fitted and doubted: logarithm (of what it has above its least value
    where :data:`LEAST` names one), of a share the logit.

    >>> to_fitted_scale("matrix", 1.0), to_fitted_scale("data_exposed", 0.5), to_fitted_scale("data_links", 2.0)
    (0.0, 0.0, 0.0)
    """
    return float(np.log(value / (1 - value)) if name in SHARES else np.log(max(value - LEAST.get(name, 0.0), TINY)))


def from_fitted_scale(name: str, fitted: Num) -> Num:
    """The inverse of :func:`to_fitted_scale`, of one value or of many."""
    out: Num = 1 / (1 + np.exp(-fitted)) if name in SHARES else LEAST.get(name, 0.0) + np.exp(fitted)
    return out


IDEAL = Framework()


MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes of common frameworks other than ``dp``."""


def piped_stage(zero: int, stages: int) -> int:
    """The ZeRO stage that a stage amounts to with a number of pipeline stages.

    A pipeline keeps the weights gathered and reduces gradients once per step, so that what shards all of both runs as
    ZeRO-1 there (torchtitan: `fsdp_reshard_after_forward`, by default off with a pipeline).

    >>> piped_stage(3, 1), piped_stage(3, 4), piped_stage(0, 4)
    (3, 1, 0)
    """
    return zero if stages == 1 else min(zero, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Defaults and features of a framework: facts of its documentation, not fitted."""

    gradient_dtype: str | None = None
    """Dtype in which gradients are accumulated and reduced; None: that of the precision."""
    context: str = "all_gather"
    """What context-parallel ranks exchange."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that runs behind computation where it can."""
    kernel: str = "newest"
    """Fused attention kernel, of :data:`KERNELS`."""
    scattered_messages: bool = False
    """Tensor-parallel ranks each send their part of a message between stages, and gather it where it arrives."""

    exchange_once: bool = False
    """Tokens cross to their experts by kernels that send no copy twice over the same links (DeepEP, HybridEP)."""
    single_ring: bool = False
    """What ZeRO-3 gathers and reduces travels over one ring, and so over one NIC of each node."""
    root_unit: bool = False
    """ZeRO-3 gathers embedding and head before all layers and reduces them after all, as one unit (FSDP1)."""

    copied_parameters: bool = False
    """FSDP copies each parameter out of the buffer that it gathers, and its gradient into one (FSDP2)."""

    stops_early: bool = False
    """Recomputation of a whole layer ends before what the backward pass does not read: the second product of an MLP."""

    fused_copies: frozenset[str] = frozenset()
    """What fused attention copies from one layout of batch, sequence and heads into another, of :data:`COPIES`."""

    unfused_copies: frozenset[str] = frozenset()
    """What unfused attention copies from one layout into another."""

    complex_rope: bool = False
    """Rotary embeddings multiply complex numbers in fp32, which the compiler of PyTorch fuses with nothing."""

    triangular_softmax: bool = False
    """The softmax of unfused causal attention reads half of the scores, the unmasked scores, and each once."""

    asynchronous_tp: bool = False
    """Backward, traffic over ``tp`` of a product that gathers its input overlaps with its two products, each with one
    (:func:`steptime.plan.overlap.with_overlapped_gradients`)."""

    one_pass_norms: bool = False
    """Backward, a LayerNorm reads its input once (Apex's FastLayerNorm, Transformer Engine), not for each result."""

    separate_kernels: bool = False
    """What others fuse has kernels of its own: a dropout, before the residual addition, and the scaling and masking of
    the scores of unfused attention, before the softmax."""

    fp8: str = "fp8-te"
    """Recipe that it means by FP8 without further words."""

    selective: str = "attention"
    """What it recomputes when asked to do so selectively, in the words of a plan."""

    parts: str = ""
    """What it can recompute of a layer, other than all of it, for least time per byte; empty: nothing that is tried."""

    expert_parts: str = ""
    """The same of models with experts."""

    plain_norms: bool = False
    """RMSNorms are operators of the framework, each a kernel on fp32 copies; else one kernel."""

    recompute: str = "none"
    """What it recomputes unless told otherwise."""

    zero: int = 1
    """ZeRO stage that it runs unless told otherwise, without a pipeline."""

    within_node: bool = False
    """By default the devices of a node shard the states, and the nodes hold copies (HSDP)."""

    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """ZeRO stages that it has, without a pipeline."""

    axes: frozenset[str] = frozenset(MODEL_AXES)
    """Axes that it has other than ``dp``."""

    def zero_with(self, stages: int) -> int:
        """ZeRO stage by default, with a number of pipeline stages (:func:`piped_stage`).

        >>> habits_of("torchtitan").zero_with(1), habits_of("torchtitan").zero_with(4), habits_of("ddp").zero_with(4)
        (3, 1, 0)
        """
        return piped_stage(self.zero, stages)

    def stages_with(self, stages: int) -> frozenset[int]:
        """ZeRO stages that it has with a number of pipeline stages.

        >>> sorted(habits_of("torchtitan").stages_with(1)), sorted(habits_of("torchtitan").stages_with(2))
        ([0, 2, 3], [0, 1])
        """
        return frozenset(piped_stage(stage, stages) for stage in self.zero_stages)

    def overlap_with(self, offload: frozenset[str], *, experts: bool) -> frozenset[str]:
        """Traffic that overlaps by default where ``offload`` is kept on the host; without experts no
        ``ep``."""
        own = self.overlap if experts else self.overlap - {"ep"}
        return own | ({"offload"} if "activations" in offload else set())


COPIES = ("inputs", "context")
"""What attention may copy from one layout into another: queries, keys and values; what it returns."""
#: Fused attention kernel -> its time over that of cuDNN's, by architecture.
KERNELS: Mapping[str, Mapping[str, float]] = {
    "newest": {},
    "flash4": {"blackwell": 0.85},
    "flash2": {"hopper": 1.7, "blackwell": 2.5},
    "sdpa": {"hopper": 1.7},
    "flash1": {"ampere": 2.0, "ampere-rtx": 2.0, "ada": 2.0, "hopper": 3.4, "blackwell": 5.0},
}
"""FlashAttention-2 takes half the time of its predecessor (arXiv 2307.08691); on Hopper the third takes 1.5 to 2 times
less (arXiv 2407.08608) and is as fast as cuDNN; on Blackwell assumed by the growth of the matrix rate. The fourth,
for Blackwell, is said to be up to 1.3 times as fast as cuDNN there; in the mean of shapes less, assumed.
`sdpa` is PyTorch's `scaled_dot_product_attention` as torchtitan calls it: FlashAttention-2, but cuDNN on Blackwell."""


def kernel_factor(kernel: str, architecture: str | None) -> float:
    """Time of a fused attention kernel over that of the newest of all architectures, on one of them.

    >>> kernel_factor("flash2", "hopper"), kernel_factor("flash2", "ampere"), kernel_factor("newest", None)
    (1.7, 1.0, 1.0)
    """
    return KERNELS[kernel].get(architecture or "", 1.0)


_CONTEXT, _ALL = frozenset({"context"}), frozenset(COPIES)
_CORE = Habits(gradient_dtype="fp32", context="ring", scattered_messages=True, one_pass_norms=True)
_LOCAL: Mapping[str, Any] = {"fused_copies": _ALL, "unfused_copies": _CONTEXT, "triangular_softmax": True}
_MEGATRON = replace(_CORE, asynchronous_tp=True, **_LOCAL)
_DEEPSPEED_2021 = Habits(
    kernel="flash2",
    overlap=frozenset(),
    single_ring=True,
    zero=3,
    axes=frozenset({"tp", "pp", "ep"}),
    **_LOCAL,
)
_FULLY_SHARDED = Habits(
    kernel="flash2",
    zero=3,
    zero_stages=frozenset({0, 2, 3}),
    stops_early=True,
    unfused_copies=_ALL,
)
_PER_PARAMETER = replace(_FULLY_SHARDED, copied_parameters=True)
_BY_OPERATOR = "norm+activation+outputs"
_OPERATORS: Mapping[str, Any] = dict.fromkeys(("selective", "parts", "expert_parts"), _BY_OPERATOR)
_TORCHAO = replace(_PER_PARAMETER, kernel="sdpa", fp8="fp8-tensorwise", **_OPERATORS)
_DATA_ONLY: frozenset[str] = frozenset()
_TRAINER = Habits(
    kernel="flash2",
    zero=0,
    axes=_DATA_ONLY,
    unfused_copies=_ALL,
    separate_kernels=True,
    plain_norms=True,
    stops_early=True,
)
"""Modules of Hugging Face's transformers under its Trainer: DDP, or FSDP and DeepSpeed where asked for."""
_CHECKPOINTED = replace(_TRAINER, recompute="full")
HABITS: Mapping[str, Habits] = {
    **dict.fromkeys(("transformers", "peft", "axolotl"), _TRAINER),
    **dict.fromkeys(("trl", "ms-swift"), _CHECKPOINTED),
    "llama-factory": replace(_CHECKPOINTED, stops_early=False),
    "unsloth": replace(_CHECKPOINTED, stops_early=False, separate_kernels=False, plain_norms=False),
    "litgpt": replace(_TRAINER, zero_stages=frozenset({0, 3})),
    "paddlenlp": Habits(kernel="flash2", zero=2, plain_norms=True, separate_kernels=True),
    "megatron": replace(_MEGATRON, zero_stages=frozenset({0, 1})),
    "megatron-2021": replace(
        _MEGATRON,
        overlap=frozenset(),
        zero=0,
        zero_stages=frozenset({0}),
        axes=frozenset({"tp", "pp"}),
        one_pass_norms=False,
        asynchronous_tp=False,
    ),
    "megatron-core": replace(
        _CORE,
        exchange_once=True,
        overlap=frozenset({"dp", "tp", "ep"}),
        parts="mlp",
        expert_parts="norm+activation+up_projection",
    ),
    "megatron-deepspeed": Habits(kernel="flash2", scattered_messages=True, **_LOCAL),
    "megatron-deepspeed-2021": replace(_DEEPSPEED_2021, scattered_messages=True, zero=1),
    "megascale": Habits(
        scattered_messages=True,
        overlap=frozenset({"dp", "tp"}),
        zero_stages=frozenset({0, 1, 2}),
        one_pass_norms=True,
    ),
    "torchtitan": replace(_TORCHAO, gradient_dtype="fp32", complex_rope=True),
    "torchtune": replace(
        _PER_PARAMETER,
        zero_stages=frozenset({2, 3}),
        axes=frozenset({"tp", "cp"}),
        **_OPERATORS,
    ),
    "fms-fsdp": replace(
        _FULLY_SHARDED,
        within_node=True,
        zero_stages=frozenset({0, 3}),
        axes=_DATA_ONLY,
        selective="full",
        root_unit=True,
    ),
    "automodel": replace(_TORCHAO, exchange_once=True),
    "composer-fsdp": replace(_FULLY_SHARDED, kernel="flash1", axes=_DATA_ONLY, root_unit=True),
    **dict.fromkeys(("deepspeed", "colossalai"), Habits(kernel="flash2")),
    "deepspeed-2021": _DEEPSPEED_2021,
    "ddp": Habits(
        separate_kernels=True,
        zero=0,
        zero_stages=frozenset({0}),
        axes=_DATA_ONLY,
        unfused_copies=_CONTEXT,
    ),
    "llm.c": Habits(zero_stages=frozenset({0, 1}), axes=_DATA_ONLY),
    "maxtext": Habits(zero=3, zero_stages=frozenset({0, 1, 3}), stops_early=True, parts="norm+attention_out+mlp"),
    "paxml": Habits(zero=3, zero_stages=frozenset({0, 3}), stops_early=True),
}
"""Megatron-LM accumulates and reduces in fp32 (`--accumulate-allreduce-grads-in-fp32` with bf16); torchtitan reduces in
fp32, and rotates by complex numbers (its `apply_rotary_emb`; pytorch/torchtitan issue 15 for what the compiler makes of
that). Megatron-LM passes keys and values round a ring, torchtitan gathers them (`context_parallel_rotate_method`
allgather, its default). NeMo's recipes run transfers over tp behind products (`tp_comm_overlap`), and so does MegaScale
(arXiv 2402.15627, section 3.2). PyTorch's own fused attention is FlashAttention-2; MPT under Composer used the Triton
kernel of the first. Megatron-LM scatters messages between stages over the tensor-parallel ranks and gathers them on the
fast links (arXiv 2104.04473, section 4.1), as does DeepSpeed's pipeline (`pipe_partitioned`). The recipes of
Megatron-Core and NeMo Automodel for models with experts dispatch by DeepEP or HybridEP; that a pipeline with virtual
stages also overlaps the exchange with another micro-batch (`overlap_moe_expert_parallel_comm`, in some of the recipes)
is assumed. Megatron-LM of 2021 reduced gradients after the last backward pass, and so does DeepSpeed unless
`overlap_comm` is set (off by default then). That its ZeRO-3 of 2021 used one NIC of each node is assumed: the runs
that arXiv 2104.04473, table 2, compares with move their weights no faster. Selective recomputation is that of
attention in Megatron-LM (arXiv 2205.05198); torchtitan, and what follows it, decides operator by operator (its
`activation_checkpoint.selective_ac_option = "op"`); fms-fsdp takes whole blocks, by default all
(`selective_checkpointing` 1). Megatron-Core recomputes modules (`--recompute-modules`): mlp of dense layers; of experts
the activation, with the norms and the projections of latent attention (moe_act, layernorm, mla_up_proj), which drop
their outputs. Models in plain PyTorch write scores / sqrt(d) + mask before `softmax` (BERT and GPT-2 of Hugging Face's
transformers, eager), each a kernel without a compiler; Megatron has one (`masked_softmax_fusion`, on by default). FP8
of torchtitan and NeMo Automodel is that of torchao, by default with the scale of each tensor as it is
(`Float8LinearConfig`, recipe tensorwise); Transformer Engine's takes that of former steps (DelayedScaling).
Recomputation that stops early is PyTorch's without `use_reentrant` (`checkpoint_wrapper`, which users of FSDP take),
and what XLA leaves of recomputed code that nothing reads; Megatron and DeepSpeed have checkpoint functions of their own
that run all of a layer, as PyTorch's with `use_reentrant` does. MaxText keeps by name (`remat_policy` custom): in its
recipes for TPU v7 queries, keys and values and what attention makes of them. Others as :class:`Habits` says. The
attention of Megatron-LM without Transformer Engine, and of its forks, makes what it returns contiguous, and for
FlashAttention its queries, keys and values too (`FlashSelfAttention`), whose result is so already where a micro-batch
is one sequence. BERT of DeepLearningExamples multiplies views and copies what it returns; without fusion the 4-D
products of PyTorch copy what they read. What `scaled_dot_product_attention` returns has the layout of its queries.
Megatron-LM's fused softmax of causal attention reads the unmasked scores once (`scaled_upper_triang_masked_softmax`).
Its norms are Apex's FastLayerNorm since the end of 2021 (`--no-persist-layer-norm` undoes it), of MegaScale assumed.
Since then sums of gradients overlap with products, in the order of launches that `CUDA_DEVICE_MAX_CONNECTIONS` 1 keeps;
Megatron-Core, which does not ask for it on Blackwell, is taken to overlap what `tp_comm_overlap` does and no more.

ZeRO stages and axes. FSDP shards weights, gradients and states, ZeRO-3; without resharding after the forward pass
(`fsdp_reshard_after_forward` of torchtitan and torchtune, SHARD_GRAD_OP of Composer) it is ZeRO-2, with replicas only
or NO_SHARD it is DDP. fms-fsdp has `sharding_strategy` fsdp, hsdp and ddp, and takes hsdp, shards within a node
(`train_config` in its fms_fsdp/config/training.py); torchtitan shards over all ranks (`data_parallel_replicate_degree`
1, `data_parallel_shard_degree` -1 in its config), as do PyTorch's FSDP (FULL_SHARD) and DeepSpeed. PyTorch's DDP keeps
a whole copy on every rank. What is in no wrapped block stays with FSDP1's root unit (`FullyShardedDataParallel`, as
fms-fsdp and Composer use it), gathered first and reduced last; FSDP2's users (torchtitan, torchtune, NeMo Automodel)
wrap embedding and head too, and each parameter is copied (:mod:`steptime.plan.copies`). torchtune has
`tensor_parallel_dim` and `context_parallel_dim`. MaxText shards over `ici_fsdp_parallelism` (-1, the rest of the
devices, by default), or the states alone (`shard_optimizer_over_data`); paxml in the same way over its data axis.
Megatron-LM of 2021 had neither its distributed optimiser nor context and expert ranks; later
`--use-distributed-optimizer` is ZeRO-1, and Megatron-Core adds `--data-parallel-sharding-strategy` optim, optim_grads
and optim_grads_params of its FSDP (`--use-megatron-fsdp`), with tp, cp and ep but without pipeline. llm.c has `-z` 0
and 1 and data parallelism alone. DeepSpeed has all stages, and Ulysses since 2023 (arXiv 2309.14509); what its users
take is assumed, as of others without one default of their own."""


def habits_of(name: str) -> Habits:
    """Habits of a framework; of one without an entry the defaults."""
    return HABITS.get(name, Habits())
