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
    r"""What is alive beside the kept activations at the peak.

    $$M = M_t + M_r$$

    where $M_t$ = `temporary_bytes` is the largest gathered input and gradient of one operator and $M_r$ =
    `recomputed_bytes` the activations of the one layer that full recomputation rebuilds.

    Source: Korthikanti et al., arXiv 2205.05198, section 5.

    >>> largest_temporary_bytes(2.0, 3.0)
    5.0
    """
    return temporary_bytes + recomputed_bytes


def gathered_weights_bytes(parameters: Num, ends_parameters: Num, bytes_each: Num, layers_at_once: Num) -> Num:
    r"""Weights that a sharded model holds whole: the layer that computes, the next one, and the ends of the model.

    $$M = (k P + P_e) E$$

    where $P$ = `parameters` of a layer, $k$ = `layers_at_once`, $P_e$ = `ends_parameters` of embedding and head, which
    stay gathered for the whole step, and $E$ = `bytes_each`.

    Source: FSDP, Zhao et al., arXiv 2304.11277, section 4.

    >>> gathered_weights_bytes(10, 5, 2, 2)
    50
    """
    return (layers_at_once * parameters + ends_parameters) * bytes_each
