"""Memory that training software needs beyond live tensors of the rows: formats, buffers of the loss, workspaces.

A framework's own is the table ``[memory]`` of its file, with sources; what fine-tuning stacks allocate is held against
captures of the real modules in benchmarks/finetuning.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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


def log_probabilities_of(profile: MemoryProfile) -> MemoryProfile:
    """The profile of a trainer that needs the log-probability of each token: preference and reinforcement learning.

    A head that is fused with the cross entropy of next tokens gives none, so that all logits are made. Trainers turn
    them to fp32 and keep these (4 bytes each); backward come the gradients of single rows and of all (8). Unsloth has a
    fused kernel of its own for them.

    Source: TRL, `selective_log_softmax` of trainer/utils.py, in its trainers of DPO, KTO, ORPO, PPO and GRPO unless
    `use_liger_kernel` is set; accelerate, `convert_outputs_to_fp32`.

    >>> log_probabilities_of(MemoryProfile(name="trl", fused_head=True)).logit_peak_bytes
    12.0
    """
    if not profile.fused_head or profile.name == "unsloth":
        return profile
    return replace(
        profile,
        fused_head=False,
        logit_kept_bytes=4.0,
        logit_peak_bytes=12.0,
        loss_forward_bytes=16.0,
        loss_backward_bytes=20.0,
        loss_conversion_bytes=6.0,
    )


def compiled(profile: MemoryProfile) -> MemoryProfile:
    """The profile where model and loss are compiled (torch.compile), for logits of 16 bits.

    What operators of a norm or an activation keep for each other is inside one kernel. The loss is two kernels: forward
    it reads the logits for the largest and the sum of a row and again for the loss (4 bytes each), backward it reads
    them and writes their gradient (4); no copy in fp32 is made, and the logits are all that is kept (2, with their
    gradient 4). A loss that does with less stays as it is.

    Source: torch.compile's documentation (Inductor fuses pointwise operators with reductions); count of accesses.

    >>> compiled(PLAIN).loss_forward_bytes, compiled(PLAIN).logit_kept_bytes
    (4.0, 2.0)
    """
    kept = profile.logit_kept_bytes
    return replace(
        profile,
        norm_bytes=0.0,
        trained_norm_bytes=0.0,
        gate_bytes=0.0,
        score_bytes=0.0,
        logit_kept_bytes=2.0 if kept is None else min(kept, 2.0),
        logit_peak_bytes=4.0 if profile.logit_peak_bytes is None else min(profile.logit_peak_bytes, 4.0),
        loss_forward_bytes=min(profile.loss_forward_bytes, 4.0),
        loss_backward_bytes=min(profile.loss_backward_bytes, 4.0),
        loss_conversion_bytes=0.0,
    )
