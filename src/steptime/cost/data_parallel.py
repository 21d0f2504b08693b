"""Exposed time of the gradient and weight traffic of data parallelism."""

from __future__ import annotations

from steptime.num import Num, maximum, minimum, where

BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK = 4e7, 1e6
"""Least size of a bucket of gradients, and least for each rank that shares it (Megatron-Core)."""


def exposed_layerwise_s(one_layer_s: Num, layers: Num, behind_s: Num) -> Num:
    r"""Exposed part of one collective per layer, each running behind the computation of the next layer.

    $$t = T + \max(L - 1,\ 0) \max(T - t_\mathrm{layer},\ 0)$$

    where $T$ = `one_layer_s` is one layer's collective, $L$ = `layers` on the device and $t_\mathrm{layer}$ =
    `behind_s` the time of one layer of one micro-batch that can hide it. One layer's collective has nothing to
    hide behind.

    Source: arXiv 2410.00273, data parallelism.

    >>> exposed_layerwise_s(3.0, 5, 2.0)
    7.0
    """
    return one_layer_s + maximum(layers - 1, 0) * maximum(one_layer_s - behind_s, 0.0)


def layers_per_bucket(parameters: Num, ranks: Num, layers: Num) -> Num:
    r"""Layers whose gradients, or weights, travel as one message.

    $$b = \min\Big(\max\Big(\frac{\max(4 \cdot 10^7,\ 10^6\,r)}{P},\ 1\Big),\ \max(L, 1)\Big)$$

    where $P$ = `parameters` of one layer on a rank, $r$ = `ranks` that share them, and $L$ = `layers` on the device.
    The more ranks a ring has, the more hops a message makes, so that few long ones travel.

    Source: Megatron-Core, `DistributedDataParallelConfig.bucket_size`: 40 million parameters by default, and no less
    than 1 million for each rank; DeepSpeed's buckets of 500 million elements are longer still.

    >>> layers_per_bucket(1e7, 8, 32), layers_per_bucket(5e7, 256, 32), layers_per_bucket(5e7, 8, 32)
    (4.0, 5.12, 1.0)
    """
    shared = maximum(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * ranks) / where(parameters > 0, parameters, 1.0)
    return minimum(maximum(shared, 1.0), maximum(layers, 1.0))


def partly_hidden_s(hidden_s: Num, shown_s: Num, share: Num) -> Num:
    r"""Exposed part of traffic of which only a part hides behind computation.

    $$t = T_h + s\,(T_s - T_h)$$

    where $T_h$ = `hidden_s` is exposed when all that can hide does, $T_s$ = `shown_s` when nothing hides, and $s$ =
    `share` of the difference is exposed after all: streams share units, links and the host.

    Source: interpolation between the two limits.

    >>> partly_hidden_s(1.0, 5.0, 0.25)
    2.0
    """
    return hidden_s + share * (shown_s - hidden_s)


def adam_step_bytes(parameters: Num, state_bytes: Num, gradient_bytes: Num, weight_bytes: Num) -> Num:
    r"""Device-memory traffic of a clipped optimiser step over the parameters that a device owns.

    $$M = P\,(2 s + 4 g + w)$$

    where $P$ = `parameters`, the states of $s$ = `state_bytes` per parameter are read and written and the weight of
    $w$ = `weight_bytes` written. The gradient of $g$ = `gradient_bytes` is read for its norm, read and written to be
    clipped, and read by the update.

    Source: count of the passes over all tensors: norm, scaling, one fused update.

    >>> adam_step_bytes(1, 12, 2, 2)
    34
    """
    return parameters * (2 * state_bytes + 4 * gradient_bytes + weight_bytes)
