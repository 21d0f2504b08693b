"""Memory that training software needs beyond live tensors of the rows: formats, buffers of the loss, workspaces.

One :class:`MemoryProfile` per framework; the sources stand after the table :data:`PROFILES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Facts of one framework's memory; the plain one adds nothing to what the rows keep."""

    name: str = "plain"
    weight_bytes: float | None = None
    """Bytes of a trained weight at rest; None: those of the dtype. 4: the fp32 weight is the master copy, so that the
    optimiser has none (FSDP2 with mixed precision: sharded fp32, gathered in the dtype of the run)."""
    placeholder_bytes: float = 0.0
    """Per parameter of one product of each shape: gradients handed to autograd where the real ones went into the
    buffer of all gradients. Transformer Engine keeps one placeholder per shape permanently."""
    layer_gradient_bytes: float = 0.0
    """Per parameter of a layer in its backward pass under ZeRO-3: whole gradients before they are scattered."""
    head_gradient_bytes: float = 0.0
    """Per parameter of the head in its backward pass, with any sharding: whole gradients."""
    logit_kept_bytes: float | None = None
    """Per logit from the loss to its backward pass; None: a copy in the dtype of the run and one in fp32."""
    logit_peak_bytes: float | None = None
    """Per logit at the worst moment of the loss; None: what is kept."""
    evaluated_logit_bytes: float = 0.0
    """Per logit of a mean sequence, in addition: logits of evaluated sequences that stay on the device."""
    loss_forward_bytes: float = 8.0
    """Traffic per logit of all kernels of the loss, forward: read and write once in fp32."""
    loss_backward_bytes: float = 8.0
    """Traffic per logit of all kernels of the loss, backward."""
    loss_conversion_bytes: float = 0.0
    """Each way, where logits are no fp32: to turn them into that, and their gradient back."""
    fused_head: bool = False
    """Head and loss are computed together in pieces (Liger): no logits are kept, both gradients are made forward."""
    workspace_bytes: float = 0.0
    """Workspaces of the matrix libraries, which the allocator counts."""
    bucket_bytes: float = 0.0
    """Buffers of traffic that are held throughout."""
    live_bytes: float = 0.0
    """Most bytes of gathered weights that ZeRO-3 keeps for the next pass; a smaller model keeps all of its weights."""
    update_bytes: float = 0.0
    """Per trained parameter of a rank while the optimiser steps: temporaries of one that works on all tensors at once
    (``foreach``), when no activations are left."""
    quantised_ends_bytes: float | None = None
    """Of a weight of embedding and head where those of the layers are quantised; None: those of the dtype."""
    gathered_logits: bool = False
    """Tensor-parallel ranks gather the logits before the loss, so that each holds those of the whole vocabulary."""
    gathered_inputs: bool = False
    """Inputs that tensor-parallel ranks gather from sequence shards are kept whole; else gathered again backward."""
    norm_bytes: float = 0.0
    """Kept per element of a norm beyond its input, where operators make the norm: its copy in fp32 and what the weight
    multiplies."""
    gate_bytes: float = 0.0
    """Kept per output of a gated activation beyond its inputs, where operators make it: the activated gate."""
    score_bytes: float = 0.0
    """Kept per score of unfused attention beyond the probabilities in the dtype of the run: those in fp32."""
    bf16_gradient_bytes: float = 0.0
    """Per parameter, in addition to gradients in the dtype of the run where it is bf16: gradients accumulated in
    fp32."""
    pure: bool = False
    """Weights, gradients and states all have the dtype of the run; there are no master weights."""
    narrow_frozen: bool = False
    """Frozen weights of a run with narrow products are stored in the narrow format."""
    narrow_weights: bool = False
    """Trained weights of products of layers too; without it they are stored in the dtype of the run."""
    frozen_bytes: float | None = None
    """Bytes of a frozen weight that is not quantised; None: those of the dtype of the run."""
    cast_bytes: float = 0.0
    """Kept per weight of a product from its forward to its backward pass, where weights at rest are wider than those
    in use: the copy that autocast makes."""
    adapter_bytes: float | None = None
    """Of a weight of an adapter, and of its gradient, whose states are then of fp32; None: as trained weights."""
    adapter_input_bytes: float = 0.0
    """Kept per element of the input of each projection with an adapter, in place of the input that the projections
    share: its copy in another format, or what dropout left of it and which elements that are; 0: they share it."""
    dequantised_bytes: float = 0.0
    """Per parameter of the largest quantised weight of a layer while the backward pass goes through it: the weight in
    the dtype of the run."""
    stream_bytes: float | None = None
    """Per element of the residual stream that a recomputed layer keeps where its weights are quantised; None: those of
    the dtype of the run."""
    trained_norm_bytes: float = 0.0
    """Of :attr:`norm_bytes` what only a norm keeps whose own weight is trained."""
    gradients_made: bool = False
    """Gradients are freed after a step and made by its first backward pass: there are none before it."""
    boundaries_on_host: bool = False
    """The inputs of recomputed layers wait in the host's memory."""
    joins_weights: bool = False
    """With ZeRO-1 and ZeRO-2 the trained weights of a rank are copied to one buffer before the first step."""
    updates_in_backward: bool = False
    """The optimiser steps parameter by parameter in the backward pass, so that no gradients are kept."""
    offloads_weights: bool = False
    """With the optimiser's states on the host, sharded weights are there too."""
    offloads_gradients: bool = False
    """With the optimiser's states on the host, its gradients are there too."""


PLAIN = MemoryProfile()
_CORE = MemoryProfile(
    name="megatron-core",
    placeholder_bytes=2.0,
    head_gradient_bytes=2.0,
    logit_kept_bytes=2.0,
    logit_peak_bytes=2.0,
    loss_forward_bytes=6.0,
    loss_backward_bytes=4.0,
    workspace_bytes=64 * MIB,
    narrow_frozen=True,
)
_MEGATRON = MemoryProfile(
    name="megatron",
    head_gradient_bytes=2.0,
    logit_kept_bytes=4.0,
    logit_peak_bytes=6.0,
    loss_forward_bytes=32.0,
    loss_backward_bytes=8.0,
    loss_conversion_bytes=6.0,
    workspace_bytes=8 * MIB,
)
_MEGATRON_DEEPSPEED = replace(
    _MEGATRON, name="megatron-deepspeed", bucket_bytes=2e9, live_bytes=2e9, bf16_gradient_bytes=4.0
)
_EAGER: Mapping[str, Any] = {"loss_forward_bytes": 16.0, "loss_backward_bytes": 20.0, "loss_conversion_bytes": 6.0}
_FSDP2 = MemoryProfile(
    name="torchtitan",
    weight_bytes=4.0,
    layer_gradient_bytes=6.0,
    head_gradient_bytes=6.0,
    logit_kept_bytes=6.0,
    logit_peak_bytes=14.0,
    workspace_bytes=32 * MIB,
    **_EAGER,
)
_DEEPSPEED = MemoryProfile(
    name="deepspeed",
    layer_gradient_bytes=2.0,
    head_gradient_bytes=2.0,
    fused_head=True,
    workspace_bytes=32 * MIB,
    bucket_bytes=2e9,
    live_bytes=2e9,
    update_bytes=2.0 + 4.0,
    joins_weights=True,
    offloads_gradients=True,
    loss_forward_bytes=6.0,
    loss_backward_bytes=0.0,
)
SCALING = MemoryProfile(
    name="scaling",
    gathered_logits=True,
    logit_kept_bytes=8.0,
    logit_peak_bytes=16.0,
    gathered_inputs=True,
    norm_bytes=6.0,
    gate_bytes=2.0,
    score_bytes=4.0,
    workspace_bytes=8 * MIB,
    **_EAGER,
)
_TRAINER = MemoryProfile(
    name="hf-trainer",
    pure=True,
    update_bytes=2.0,
    quantised_ends_bytes=5.0,
    logit_kept_bytes=12.0,
    logit_peak_bytes=20.0,
    evaluated_logit_bytes=20.0,
    norm_bytes=6.0,
    gate_bytes=2.0,
    score_bytes=4.0,
    workspace_bytes=8 * MIB,
    **_EAGER,
)
_MODULES: Mapping[str, Any] = {
    "norm_bytes": 4.0,
    "trained_norm_bytes": 2.0,
    "gradients_made": True,
    "stream_bytes": 4.0,
    "gate_bytes": 2.0,
    "score_bytes": 4.0,
    "logit_kept_bytes": 6.0,
    "logit_peak_bytes": 14.0,
    "quantised_ends_bytes": 5.0,
    "adapter_bytes": 4.0,
    "adapter_input_bytes": 2.0,
    "dequantised_bytes": 2.0,
    "workspace_bytes": 8 * MIB,
    **_EAGER,
}
"""What the modules of Hugging Face's transformers keep, whoever trains them; with PEFT's adapters."""
_TRANSFORMERS = MemoryProfile(name="transformers", pure=True, **_MODULES)
_WIDE: Mapping[str, Any] = {"weight_bytes": 4.0, "cast_bytes": 2.0}
_DROPPED = 3.0
"""Of an element of an adapter's input after dropout: the element and whether it was left."""
_FINE_TUNING: Mapping[str, MemoryProfile] = {
    "transformers": _TRANSFORMERS,
    "peft": replace(_TRANSFORMERS, name="peft"),
    "trl": replace(_TRANSFORMERS, name="trl", pure=False, fused_head=True, frozen_bytes=4.0, **_WIDE),
    "ms-swift": replace(_TRANSFORMERS, name="ms-swift", adapter_input_bytes=_DROPPED),
    "llama-factory": replace(_TRANSFORMERS, name="llama-factory", pure=False, **_WIDE),
    "axolotl": replace(_TRANSFORMERS, name="axolotl"),
    "unsloth": MemoryProfile(
        name="unsloth",
        pure=True,
        fused_head=True,
        quantised_ends_bytes=2.0,
        adapter_bytes=4.0,
        dequantised_bytes=2.0,
        gradients_made=True,
        boundaries_on_host=True,
        workspace_bytes=8 * MIB,
        loss_forward_bytes=4.0,
        loss_backward_bytes=4.0,
    ),
    "litgpt": MemoryProfile(
        name="litgpt",
        pure=True,
        update_bytes=2.0,
        quantised_ends_bytes=2.0,
        logit_kept_bytes=4.0,
        logit_peak_bytes=6.0,
        norm_bytes=4.0,
        gate_bytes=2.0,
        score_bytes=4.0,
        adapter_input_bytes=_DROPPED,
        dequantised_bytes=2.0,
        gradients_made=True,
        workspace_bytes=8 * MIB,
        **_EAGER,
    ),
    "paddlenlp": MemoryProfile(
        name="paddlenlp",
        norm_bytes=4.0,
        gate_bytes=2.0,
        score_bytes=4.0,
        logit_kept_bytes=6.0,
        logit_peak_bytes=14.0,
        workspace_bytes=8 * MIB,
        **_EAGER,
    ),
}
PROFILES: Mapping[str, MemoryProfile] = {
    **_FINE_TUNING,
    "hf-trainer": _TRAINER,
    "scaling": SCALING,
    "megatron-core": _CORE,
    "megatron": _MEGATRON,
    "megatron-2021": replace(_MEGATRON, name="megatron-2021"),
    "megatron-deepspeed": _MEGATRON_DEEPSPEED,
    "megatron-deepspeed-2021": replace(_MEGATRON_DEEPSPEED, name="megatron-deepspeed-2021"),
    "torchtune": MemoryProfile(
        name="torchtune",
        pure=True,
        logit_kept_bytes=2.0,
        logit_peak_bytes=3.0,
        layer_gradient_bytes=2.0,
        head_gradient_bytes=2.0,
        workspace_bytes=8 * MIB,
        **_EAGER,
    ),
    "ddp": MemoryProfile(name="ddp", **_EAGER),
    "torchtitan": _FSDP2,
    "fms-fsdp": replace(_FSDP2, name="fms-fsdp"),
    "composer-fsdp": replace(
        _FSDP2,
        name="composer-fsdp",
        logit_kept_bytes=2.0,
        logit_peak_bytes=4.0,
        loss_forward_bytes=4.0,
        loss_backward_bytes=4.0,
        loss_conversion_bytes=0.0,
    ),
    "automodel": replace(_FSDP2, name="automodel"),
    "maxtext": MemoryProfile(name="maxtext", weight_bytes=4.0, logit_kept_bytes=2.0, logit_peak_bytes=4.0),
    "deepspeed": _DEEPSPEED,
    "deepspeed-2021": replace(
        _DEEPSPEED,
        name="deepspeed-2021",
        fused_head=False,
        loss_forward_bytes=_MEGATRON.loss_forward_bytes,
        loss_backward_bytes=_MEGATRON.loss_backward_bytes,
        loss_conversion_bytes=_MEGATRON.loss_conversion_bytes,
    ),
}
"""Sources. Megatron Core with Transformer Engine: its linear layers return a placeholder of the weight's shape and
dtype where gradients are accumulated in the weight-gradient product, cached per shape; the head's own is made each
time; the fused cross entropy overwrites the logits with their gradient; cuBLAS and Transformer Engine take 32 MiB of
workspace each on Hopper and later. Megatron: the vocabulary-parallel cross entropy keeps fp32 probabilities and turns
their gradient to the dtype of the run. Its kernels turn logits to fp32 (6 bytes of traffic), look for the maximum (4),
subtract it (8), exponentiate (8), add up (4), divide (8), and backward multiply (8) and turn to the dtype of the run
(6); the fused one reads twice and writes (6), and backward scales (4). PyTorch's own: to fp32 (6), a softmax that reads
three times (16); backward the gradient of the choice (4), of the softmax (16), to the dtype of the run (6). torchtitan:
fp32 shards, gathered in bf16, reduced in fp32 (arXiv 2410.06511); ``cross_entropy`` of fp32 logits holds the bf16
logits, the log-probabilities, the gradient of those and of the logits. DeepSpeed: two reduction buckets of 5e8 elements
(`reduce_bucket_size`, `overlap_comm`), with ZeRO-3 up to 1e9 live parameters (`stage3_max_live_parameters`); before its
optimiser steps it joins the gradients of a rank (2) and turns them to fp32 (4), as it does with zeros when the states
are made (`initialize_optimizer_states` of runtime/zero/stage_1_and_2.py); with the optimiser on
the host the partitioned gradients follow it (arXiv 2101.06840); its BF16 optimiser accumulates gradients in fp32 next
to those in bf16. torchtune trains in bf16 throughout, its AdamW states included, and turns an eighth of the logits at a
time to fp32. MPT under Composer has a fused cross entropy (`loss_fn: fused_crossentropy`), which reads twice forward,
and reads and writes backward; that of Liger makes gradients forward. MaxText keeps weights in fp32 (`weight_dtype`,
base.yml); XLA turns logits to fp32 as it reads them, which holds them and their gradient.

Aleph Alpha's scaling (src/scaling of Aleph-Alpha/scaling): the head gathers the logits of all tensor ranks
(`ColumnParallelLinear`, `parallel_output=False`) and `CrossEntropyLoss` turns them to fp32; a norm gathers the
sequence before the products, which keep it; SwiGLU is `silu(x) * gate`; the softmax can be one of fp32, whose
gradients are so too. The buffers of the pipeline have two slots at least, whose outputs stay until they are written
again (`required_buffer_count` of pipeline_schedule/train.py, `pipe_buffer.get` in parallel_module.py): logits 2 and
those of the micro-batch before 2; of the loss log-probabilities 4, gradients of both 8. Assumed: that where ranks
gather, nothing of their parts 2, joined 2, and its gradient 2 is free before the backward pass is done, and that a
norm of 2023 that no kernel fuses computes in fp32 (copy 4, normalised 2).

Fine-tuning stacks: what their modules allocate, held against captures of the real ones in benchmarks/finetuning.md;
their versions and defaults stand in :mod:`steptime.plan.stacks`. Modules of transformers: a norm turns its input to
fp32 (4, in place of the 2 of the input, which the norm itself does not keep) and multiplies its result in the dtype of
the run (2, kept where the weight is trained) by the weight; `silu` is made before the product with the other half (2);
`ForCausalLMLoss` turns the logits (2) to fp32, keeps log-probabilities (4) and backward has gradients of both (8).
With autocast a weight in fp32 (TRL, which loads so unless `model_init_kwargs` says otherwise; LLaMA-Factory, which
turns what is trained to fp32 unless `pure_bf16`) is copied to bf16 for each product (2), and the copy is kept for the
backward pass. PEFT's adapters are in fp32 (`autocast_adapter_dtype`), so that under autocast each projection has its
own copy of its input, to fp32 and back (2), and with dropout its flags (1). With 4-bit weights embedding, norms and so
the residual stream are in fp32 (`prepare_model_for_kbit_training`). Gradients are set to none after a step
(`zero_grad`). bitsandbytes turns a 4-bit weight to bf16 in each product, forward and backward (`MatMul4Bit`). TRL's
`chunked_nll` and Unsloth's fused loss make the logits of a few tokens at a time. Unsloth's kernels (norms, SwiGLU,
adapters) keep what fused ones do, and its checkpoints move the inputs of layers to the host. LitGPT makes
log-probabilities in bf16 in chunks of 128 tokens. PaddleNLP trains with O2: weights in bf16, the master copy and
states in fp32.

Hugging Face's Trainer, with a checkpoint in bf16 that is trained as it is: ``AdamW`` of PyTorch works on all tensors at
once (``foreach``, whose temporaries have the size of the parameters); models turn logits to fp32 (4), shift them (4),
and cross entropy has log-probabilities (4) and gradients of both (8); norms copy to fp32 (4) and back (2); embeddings
and head of a quantised base are in fp32, the head also in bf16 under autocast (`prepare_model_for_kbit_training` of
peft); evaluation keeps its logits on the device unless `eval_accumulation_steps` says otherwise, fitted as those of
five sequences in fp32."""


def log_probabilities_of(profile: MemoryProfile) -> MemoryProfile:
    """The profile of a trainer that needs the log-probability of each token: preference and reinforcement learning.

    A head that is fused with the cross entropy of next tokens gives none, so that all logits are made. Trainers turn
    them to fp32 and keep these (4 bytes each); backward come the gradients of single rows and of all (8). Unsloth has a
    fused kernel of its own for them.

    Source: TRL, `selective_log_softmax` of trainer/utils.py, in its trainers of DPO, KTO, ORPO, PPO and GRPO unless
    `use_liger_kernel` is set; accelerate, `convert_outputs_to_fp32`.

    >>> log_probabilities_of(PROFILES["trl"]).logit_peak_bytes
    12.0
    """
    if not profile.fused_head or profile.name == "unsloth":
        return profile
    return replace(profile, fused_head=False, logit_kept_bytes=4.0, logit_peak_bytes=12.0, **_EAGER)


def memory_profile_of(framework: str) -> MemoryProfile:
    """Profile of a framework; of one without an entry the plain one.

    >>> memory_profile_of("torchtitan").weight_bytes, memory_profile_of("ideal").name
    (4.0, 'plain')
    """
    return PROFILES.get(framework, PLAIN)
