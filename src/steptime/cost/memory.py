"""Device memory that a training step holds."""

from __future__ import annotations

from steptime.num import Num


def parameter_bytes(parameters: Num, bytes_each: Num, shards: Num) -> Num:
    r"""Weights, gradients or optimiser states of one device.

    $$M = P E / s$$

    where $P$ = `parameters` that the device computes with, $E$ = `bytes_each` and $s$ = `shards` among which the
    ranks of the data-parallel group divide them (1: every rank has all).

    Source: ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5.

    >>> parameter_bytes(1e9, 12, 8)
    1500000000.0
    """
    return parameters * bytes_each / shards


def activation_bytes(kept_bytes_per_layer: Num, layers: Num, in_flight: Num) -> Num:
    r"""Activations kept for the backward pass.

    $$M = A\, L\, m$$

    where $A$ = `kept_bytes_per_layer` of one micro-batch, $L$ = `layers` on the device and $m$ = `in_flight`
    micro-batches (see `steptime.cost.pipeline.micro_batches_in_flight`).

    Source: Korthikanti et al., arXiv 2205.05198, section 4.

    >>> activation_bytes(1e6, 4, 2)
    8000000.0
    """
    return kept_bytes_per_layer * layers * in_flight


def largest_temporary_bytes(temporary_bytes: Num, recomputed_bytes: Num) -> Num:
    r"""Memory alive at the peak in addition to the kept activations.

    $$M = M_t + M_r$$

    where $M_t$ = `temporary_bytes` is the largest gathered input and gradient of one operator and $M_r$ =
    `recomputed_bytes` the activations of the one layer, or of the parts of it, that recomputation makes again.

    Source: Korthikanti et al., arXiv 2205.05198, section 5.

    >>> largest_temporary_bytes(2.0, 3.0)
    5.0
    """
    return temporary_bytes + recomputed_bytes


def gathered_weights_bytes(
    parameters: Num, ends_parameters: Num, bytes_each: Num, layers_at_once: Num, trained: Num, gradient_bytes: Num
) -> Num:
    r"""Weights that a sharded model holds whole: the layer that computes, the next one, and the ends of the model.

    $$M = (k P + P_e) E + P_t E_g$$

    where $P$ = `parameters` of a layer, $k$ = `layers_at_once`, $P_e$ = `ends_parameters` of embedding and head, which
    stay gathered for the whole step, $E$ = `bytes_each`, and $P_t$ = `trained` parameters of the layer whose whole
    gradients of $E_g$ = `gradient_bytes` wait for their reduction. Weights of another format count as correspondingly
    more or fewer parameters.

    Source: FSDP, Zhao et al., arXiv 2304.11277, section 4.

    >>> gathered_weights_bytes(10, 5, 2, 2, 10, 4)
    90
    """
    return (layers_at_once * parameters + ends_parameters) * bytes_each + trained * gradient_bytes


def stashed_weights_bytes(parameters: Num, bytes_each: Num, shards: Num, versions: Num) -> Num:
    r"""Older versions of its weights that a stage keeps for backward passes that read what their forward pass read.

    $$M = (n - 1)\, \frac{P E}{s}$$

    where $P$ = `parameters` of $E$ = `bytes_each` are divided over $s$ = `shards`, and $n$ = `versions` are held at
    once (:func:`steptime.cost.pipeline_schedules.stashed_versions`), the current one among them.

    Source: Harlap et al. (PipeDream), arXiv 1806.03377, section 3.3.

    >>> stashed_weights_bytes(10, 2, 1, 4)
    60.0
    """
    return (versions - 1) * parameters * bytes_each / shards


def reserved_bytes(allocated_bytes: Num, slack: Num) -> Num:
    r"""Memory that the caching allocator takes from the device.

    $$M_r = M (1 + \phi)$$

    where $M$ = `allocated_bytes` at the peak and $\phi$ = `slack` is the share that rounding and splitting of blocks
    leave unused.

    Source: PyTorch, CUDA caching allocator; the share is fitted, see `steptime.estimate.memory_definitions`.

    >>> reserved_bytes(100.0, 0.25)
    125.0
    """
    return allocated_bytes * (1 + slack)


def device_bytes(reserved_bytes: Num, context_bytes: Num, communicators: Num, communicator_bytes: Num) -> Num:
    r"""Memory that is in use on the device, as its driver reports it.

    $$M_d = M_r + M_c + n\, M_n$$

    where $M_r$ = `reserved_bytes`, $M_c$ = `context_bytes` of the driver's context with the loaded kernels and
    $n$ = `communicators` with buffers of $M_n$ = `communicator_bytes` each.

    Source: NCCL, buffers per channel, peer and protocol of a communicator (`NCCL_BUFFSIZE`).

    >>> device_bytes(100.0, 10.0, 3, 5.0)
    125.0
    """
    return reserved_bytes + context_bytes + communicators * communicator_bytes


def held_buffers_bytes(parameters: Num, bytes_each: Num, bucket_bytes: Num, workspace_bytes: Num) -> Num:
    r"""Buffers that training software holds throughout.

    $$M = P E + M_b + M_w$$

    where $P$ = `parameters` of one product of each shape with placeholders of $E$ = `bytes_each` for their gradients,
    $M_b$ = `bucket_bytes` of buffers for traffic and $M_w$ = `workspace_bytes` of the matrix libraries.

    Source: Transformer Engine, gradient accumulation in the weight-gradient product; DeepSpeed, ZeRO buckets.

    >>> held_buffers_bytes(10, 2, 5, 3)
    28
    """
    return parameters * bytes_each + bucket_bytes + workspace_bytes
