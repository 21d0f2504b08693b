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
