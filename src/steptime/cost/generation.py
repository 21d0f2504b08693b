"""Generation of tokens, one at a time, by a roofline: what a step reads, computes and sends."""

from __future__ import annotations

from steptime.num import Num, maximum


def cache_bytes_per_token(layers: Num, kv_width: Num, element_bytes: Num) -> Num:
    r"""Bytes of a token in the cache of keys and values: $c = L\,w\,E$.

    $L$ = `layers`, $w$ = `kv_width` elements of a token in a layer (two of all heads of keys and values, or the
    compressed ones of latent attention), $E$ = `element_bytes`.

    Source: definition; Pope et al., arXiv 2211.05102, section 3.3.

    >>> cache_bytes_per_token(32, 2 * 8 * 128, 2)
    131072
    """
    return layers * kv_width * element_bytes


def decode_step_s(weight_bytes: Num, cache_bytes: Num, memory_Bps: Num, flops: Num, flops_per_s: Num) -> Num:
    r"""Time of one token of every sequence that is generated at once.

    $$t = \max\Big(\frac{W + C}{\beta},\ \frac{F}{R}\Big)$$

    where $W$ = `weight_bytes` of the device are read, and $C$ = `cache_bytes` of its sequences, at $\beta$ =
    `memory_Bps`; $F$ = `flops` are computed at $R$ = `flops_per_s`.

    Source: roofline; Pope et al., arXiv 2211.05102, section 2.

    >>> decode_step_s(16e9, 4e9, 2e12, 1e12, 1e15)
    0.01
    """
    return maximum((weight_bytes + cache_bytes) / memory_Bps, flops / flops_per_s)


def generation_s(prefill_s: Num, step_s: Num, tokens: Num, exchange_s: Num, waves: Num) -> Num:
    r"""Time to generate all responses: $t = n\,(t_p + T\,(t_s + t_x))$.

    $n$ = `waves` of sequences one after the other, each with $t_p$ = `prefill_s` for its prompts and $T$ = `tokens`
    steps of $t_s$ = `step_s` and $t_x$ = `exchange_s` for what tensor ranks send.

    Source: definition; all responses of a wave are equally long.

    >>> round(generation_s(1.0, 0.01, 100, 0.001, 2), 6)
    4.2
    """
    return waves * (prefill_s + tokens * (step_s + exchange_s))


def forward_share_s(forward_s: Num, backward_s: Num, bubble_s: Num, other_s: Num) -> Num:
    r"""Time of a forward pass alone under the plan of a training step.

    $$t = f + x + B\,\frac{f}{f + b}$$

    where $f$ = `forward_s` and $b$ = `backward_s` are the passes with their transfers, $B$ = `bubble_s` the time in
    which the pipeline fills and drains, and $x$ = `other_s` what a forward pass needs as well.

    Source: stages of a pipeline fill with forward passes alone as with both, in proportion to a micro-batch's time.

    >>> forward_share_s(1.0, 2.0, 0.6, 0.1)
    1.3
    """
    return forward_s + other_s + bubble_s * forward_s / (forward_s + backward_s)
