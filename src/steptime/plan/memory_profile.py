"""Memory that training software needs beyond live tensors of the rows: formats, buffers of the loss, workspaces.

Values of a framework are the table ``[memory]`` of its file, with sources; benchmarks/finetuning.md compares those of
fine-tuning stacks with captures of the real modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Memory of one framework; the plain profile adds nothing to the kept bytes of the rows."""

    name: str = "plain"
    weight_bytes: float | None = None
    """Bytes of a trained weight at rest; None: bytes of the dtype. 4: the fp32 weight is the master copy, so that the
    optimiser has none (FSDP2 with mixed precision: sharded fp32, gathered in the dtype of the run)."""
    placeholder_bytes: float = 0.0
    """Bytes per parameter of placeholders that autograd gets for gradients, as the real ones went into the buffer of
    all gradients. Transformer Engine keeps one placeholder per shape of product permanently."""
    layer_gradient_bytes: float = 0.0
    """Bytes of whole gradients per parameter of a layer in its backward pass under ZeRO-3, before the scatter."""
    head_gradient_bytes: float = 0.0
    """Bytes of whole gradients per parameter of the head in its backward pass, under any sharding."""
    logit_kept_bytes: float | None = None
    """Bytes per logit from the loss to its backward pass; None: a copy in the dtype of the run and one in fp32."""
    logit_peak_bytes: float | None = None
    """Bytes per logit at the peak of the loss; None: the kept bytes."""
    evaluated_logit_bytes: float = 0.0
    """Further bytes per logit of a mean sequence: logits of evaluated sequences that stay on the device."""
    loss_forward_bytes: float = 8.0
    """Bytes of traffic per logit of all forward kernels of the loss; default: read and write once in fp32."""
    loss_backward_bytes: float = 8.0
    """Bytes of traffic per logit of all backward kernels of the loss."""
    loss_conversion_bytes: float = 0.0
    """Bytes of traffic per logit and direction for conversion of logits to fp32, and of their gradient back."""
    fused_head: bool = False
    """Head and loss are computed together in pieces (Liger): no logits are kept, forward makes both gradients."""
    workspace_bytes: float = 0.0
    """Bytes of workspaces of the matrix libraries, which the allocator counts."""
    bucket_bytes: float = 0.0
    """Bytes of communication buffers that are held throughout."""
    live_bytes: float = 0.0
    """Limit of gathered weights that ZeRO-3 keeps for the next pass, in bytes; a smaller model keeps all weights."""
    update_bytes: float = 0.0
    """Bytes of temporaries per trained parameter of a rank during the optimiser's step, if it works on all tensors at
    once (``foreach``); no activations are left then."""
    quantised_ends_bytes: float | None = None
    """Bytes of a weight of embedding and head if weights of the layers are quantised; None: bytes of the dtype."""
    gathered_logits: bool = False
    """Tensor-parallel ranks gather the logits before the loss, so that each holds the whole vocabulary."""
    gathered_inputs: bool = False
    """Inputs that tensor-parallel ranks gather from sequence shards are kept whole; else gathered again backward."""
    norm_bytes: float = 0.0
    """Kept bytes per element of a norm beyond its input, if the norm is several operators: its fp32 copy and the factor
    of the weight."""
    gate_bytes: float = 0.0
    """Kept bytes per output of a gated activation beyond its inputs, if it is several operators: the activated gate."""
    score_bytes: float = 0.0
    """Kept bytes per score of unfused attention beyond probabilities in the dtype of the run: their fp32 copy."""
    bf16_gradient_bytes: float = 0.0
    """Bytes per parameter of gradients accumulated in fp32, in addition to bf16 gradients of a bf16 run."""
    pure: bool = False
    """Weights, gradients and states all have the dtype of the run; there are no master weights."""
    narrow_frozen: bool = False
    """Frozen weights of a run with narrow products are stored in the narrow format."""
    narrow_weights: bool = False
    """Trained weights of products of layers are stored in the narrow format; else in the dtype of the run."""
    frozen_bytes: float | None = None
    """Bytes of a frozen weight that is not quantised; None: bytes of the dtype of the run."""
    cast_bytes: float = 0.0
    """Kept bytes per weight of a product from its forward to its backward pass: the copy that autocast makes if weights
    at rest are wider than weights in use."""
    adapter_bytes: float | None = None
    """Bytes of a weight of an adapter and of its gradient, with fp32 states; None: as other trained weights."""
    adapter_input_bytes: float = 0.0
    """Kept bytes per element of the input of each projection with an adapter, in place of a shared input: a copy in
    another format, or the input after dropout with its mask; 0: the projections share the input."""
    dequantised_bytes: float = 0.0
    """Bytes per parameter of the largest quantised weight of a layer during its backward pass: the weight in the dtype
    of the run."""
    stream_bytes: float | None = None
    """Bytes per element of the residual stream that a recomputed layer keeps if its weights are quantised; None: bytes
    of the dtype of the run."""
    trained_norm_bytes: float = 0.0
    """Part of :attr:`norm_bytes` that only a norm with a trained weight keeps."""
    gradients_made: bool = False
    """Gradients are freed after a step and allocated by its first backward pass: there are none before it."""
    boundaries_on_host: bool = False
    """The inputs of recomputed layers are kept in the host's memory."""
    joins_weights: bool = False
    """With ZeRO-1 and ZeRO-2 the trained weights of a rank are copied to one buffer before the first step."""
    updates_in_backward: bool = False
    """The optimiser steps parameter by parameter in the backward pass, so that no gradients are kept."""
    offloads_weights: bool = False
    """With the optimiser's states on the host, sharded weights are on the host too."""
    offloads_gradients: bool = False
    """With the optimiser's states on the host, gradients are on the host too."""


PLAIN = MemoryProfile()


def log_probabilities_of(profile: MemoryProfile) -> MemoryProfile:
    """The profile of a trainer that needs the log-probability of each token: preference and reinforcement learning.

    A head fused with the cross entropy of next tokens gives no log-probabilities, so that all logits are made. Trainers
    convert them to fp32 and keep these (4 bytes each); backward adds the gradients of single rows and of all (8).
    Unsloth has a fused kernel for them.

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
    """The profile with model and loss compiled (torch.compile), for logits of 16 bits.

    Operators of a norm or an activation are one kernel, which keeps nothing in between. The loss is two kernels:
    forward reads the logits for the largest and the sum of a row and again for the loss (4 bytes each), backward reads
    them and writes their gradient (4). There is no fp32 copy, and only the logits are kept (2 bytes, 4 with their
    gradient). A loss that needs less stays as it is.

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
