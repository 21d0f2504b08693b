r"""Mixtures of experts: work and traffic of grouped products and of stored weights, time of the exchange of tokens.

Symbols of products: $m$ = `m` rows over all local experts, $g$ = `groups` local experts, $n$ = `n` and $k$ = `k` the
widths of the result and of the input, $E$ = `element_bytes`.

Exchange (dispatch to the experts and combination of their results): a kernel of the library moves each chosen copy of a
token once, straight to the rank of its expert; it does not use the collectives. Symbols: $T$ = `tokens` of one rank,
$k$ = `top_k`, $E$ = `experts` in all, $n$ = `ranks`, $t$ = `inside` ranks of one NVLink domain, $b$ = `row_bytes` of a
token on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp
from typing import Final

import numpy as np

from steptime.cost.matmul import matmul_flops
from steptime.num import Num, ceil_div, maximum, minimum, soft_maximum, where


def grouped_matmul_bytes(m: Num, n: Num, k: Num, groups: Num, element_bytes: Num) -> Num:
    r"""Traffic of one product per expert: $M = (m k + g k n + m n) E$, every expert's weights read once.

    Source: definition; grouped products of MegaBlocks, arXiv 2211.15841.

    >>> grouped_matmul_bytes(4, 3, 2, 2, 2)
    64
    """
    return (m * k + groups * k * n + m * n) * element_bytes


def grouped_matmul_backward_bytes(m: Num, n: Num, k: Num, groups: Num, element_bytes: Num) -> Num:
    r"""Traffic of both gradients: twice that of `grouped_matmul_bytes`.

    Source: definition.

    >>> grouped_matmul_backward_bytes(4, 3, 2, 2, 2)
    128
    """
    return 2 * grouped_matmul_bytes(m, n, k, groups, element_bytes)


def input_gradient_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Operations of $dX = dY\,W^T$ alone, as frozen weights have it: $F = m k (2n - 1 + a)$.

    $m, n, k$ are those of the forward product and $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> input_gradient_flops(2, 3, 4, 1) == matmul_flops(2, 3, 4, 1)
    True
    """
    return matmul_flops(m, k, n, accumulate)


def top_k_flops(elements: Num) -> Num:
    r"""Vector operations of a router over $x$ = `elements` scores: softmax and one comparison per score, $F = 4x$.

    Source: count of operations.

    >>> top_k_flops(8)
    32
    """
    return 4 * elements


def greatest_imbalance(choices: Num, ranks: Num, experts: Num) -> Num:
    r"""Largest ratio of the tokens of one rank of experts to the mean.

    $$b = \frac{e \min(k, E/e)}{k}$$

    where each token chooses $k$ = `choices` of $E$ = `experts`, which $e$ = `ranks` share: at most $\min(k, E/e)$ of
    a token's choices are on one rank, and $k/e$ in the mean.

    Source: definition.

    >>> greatest_imbalance(2, 8, 8), greatest_imbalance(2, 1, 8)
    (4.0, 1.0)
    """
    return ranks * minimum(choices, experts / ranks) / choices


def fullest_share(shares: Sequence[float], ranks: Num) -> Num:
    r"""Tokens of the fullest rank of experts over the mean, where experts have shares of the tokens.

    $$b = e\,\max_r \sum_{i = r E/e}^{(r+1) E/e - 1} s_i$$

    where $s_i$ = `shares` are those of $E$ experts, which add up to one, and each of $e$ = `ranks` holds $E/e$ in a
    row.

    Source: definition; ranks of Megatron-Core and DeepSpeed hold experts in a row.

    >>> fullest_share([0.5, 0.25, 0.125, 0.125], 2), fullest_share([0.5, 0.25, 0.125, 0.125], 4)
    (1.5, 2.0)
    """
    if isinstance(ranks, np.ndarray):
        distinct, inverse = np.unique(ranks, return_inverse=True)
        return np.array([fullest_share(shares, float(each)) for each in distinct])[inverse].reshape(ranks.shape)
    held = max(int(len(shares) // ranks), 1)
    return ranks * max(sum(shares[at : at + held]) for at in range(0, len(shares), held))


def kept_share(shares: Sequence[float], capacity: float) -> float:
    r"""Share of the choices that have a slot, where experts have shares of the tokens and equal slots.

    $$K = \sum_i \min\Big(s_i,\ \frac{c}{E}\Big)$$

    where $s_i$ = `shares` of $E$ experts add up to one, and $c$ = `capacity` is the slots of an expert over its mean.

    Source: definition; Fedus et al., arXiv 2101.03961, section 2.2.

    >>> kept_share([0.5, 0.25, 0.125, 0.125], 1.0), kept_share([0.25] * 4, 1.0)
    (0.75, 1.0)
    """
    return sum(min(share, capacity / len(shares)) for share in shares)


def zipf_shares(experts: int, exponent: float) -> list[float]:
    r"""Shares by rank of popularity: $s_i = i^{-a} / \sum_j j^{-a}$ for $i$ = 1 .. `experts`, $a$ = `exponent`.

    Source: Zipf's law.

    >>> [round(each, 3) for each in zipf_shares(3, 1.0)]
    [0.545, 0.273, 0.182]
    """
    weights = [(each + 1.0) ** -exponent for each in range(experts)]
    return [each / sum(weights) for each in weights]


def lognormal_shares(experts: int, sigma: float) -> list[float]:
    r"""Shares by rank of popularity whose logarithms are normal.

    $$s_i \propto \exp\Big(\sigma\,\Phi^{-1}\Big(\frac{i - 1/2}{E}\Big)\Big)$$

    $E$ = `experts`, $\sigma$ = `sigma` of the logarithm; the quantiles of $E$ equal parts, the largest first.

    Source: definition.

    >>> [round(each, 3) for each in lognormal_shares(3, 1.0)]
    [0.656, 0.249, 0.095]
    """
    from statistics import NormalDist  # here, as it loads more than all of an estimate does

    normal = NormalDist()
    weights = [exp(sigma * normal.inv_cdf((each + 0.5) / experts)) for each in reversed(range(experts))]
    return [each / sum(weights) for each in weights]


def drawn_shares(shares: Sequence[float], seed: int = 0) -> list[float]:
    """The `shares` in an order drawn once, with `seed`: the same one for as many experts.

    Source: definition.

    >>> sorted(drawn_shares([0.5, 0.3, 0.2])) == [0.2, 0.3, 0.5]
    True
    """
    order = np.random.default_rng(seed).permutation(len(shares))
    return [float(shares[at]) for at in order]


def places_reached(places: Num, choices: int, experts: Num) -> Num:
    r"""Places that a token reaches on average with different experts, which the places share evenly.

    $$\delta = m\,\Big(1 - \prod_{i=0}^{k-1} \frac{\max(E - E/m - i, 0)}{E - i}\Big)$$

    A token chooses $k$ = `choices` different ones of $E$ = `experts`, of which each of $m$ = `places` holds $E/m$. With
    one expert to a place it reaches $k$ places.

    Source: the chance of drawing none of a place without replacement (hypergeometric distribution).

    >>> places_reached(8, 2, 8), round(places_reached(4, 8, 256), 3), places_reached(1, 2, 8)
    (2.0, 3.614, 1.0)
    """
    missed: Num = 1.0
    for drawn in range(choices):
        missed = missed * maximum(experts - experts / places - drawn, 0.0) / maximum(experts - drawn, 1.0)
    return places * (1.0 - missed)


def once_share(choices: int, ranks: Num, inside: Num, experts: Num, groups: Num = 1, chosen: Num = 1) -> Num:
    r"""Share of the copies of a token that cross the slowest links where each place gets one copy and spreads it.

    $$s = \frac{\delta(m, k, E')}{k}, \quad
      m = \begin{cases} n\,M / G & G \le n \\ \delta(n, M, G) & G > n \end{cases}, \quad
      n = \begin{cases} r / t & r > t \\ r & \text{else} \end{cases}, \quad E' = E\,M / G$$

    A token chooses $k$ = `choices` of $E$ = `experts` on $r$ = `ranks`, $t$ = `inside` of them in each fast domain. It
    crosses the network once to each domain that has experts of it, and is forwarded there; inside one domain it goes
    once to each rank. Of these $n$ places it reaches $m$, where its experts lie in $M$ = `chosen` of $G$ = `groups`
    groups (all $n$ where $M = G$), and of those $\delta$ (:func:`places_reached`), with even choices of different
    experts; the way back sums before it sends.

    Source: the normal kernels of DeepEP (forwarding from the network to NVLink), Zhao et al. 2025; arXiv 2412.19437,
    section 3.2.2, and 2.1.2 for the groups.

    >>> once_share(2, 8, 8, 8), once_share(1, 64, 8, 64), round(once_share(8, 32, 8, 256), 3)   # of 4 domains 3.6
    (1.0, 1.0, 0.452)
    >>> round(8 * once_share(8, 64, 8, 256, 8, 4), 3)   # of 8 domains, of which a token may reach 4
    3.629
    >>> once_share(8, 64, 8, 256, 16, 16) == once_share(8, 64, 8, 256)
    True
    """
    places = where(ranks > inside, ranks / inside, ranks)
    if chosen < groups:
        places = where(places >= groups, places * chosen / groups, places_reached(places, int(chosen), groups))
        experts = experts * chosen / groups
    return places_reached(places, choices, experts) / choices


def paired_share(micro_batches: Num, virtual_stages: Num, stages: Num) -> Num:
    r"""Share of the passes of an interleaved pipeline that overlap with the opposite pass of another micro-batch.

    $$s = \max\Big(1 - \frac{(v - 1)\,p + p - 1}{v\,n},\ 0\Big)\Big|_{v>1} \qquad s = 0\big|_{v=1}$$

    A rank makes $v\,n$ forward passes, for $n$ = `micro_batches` through its $v$ = `virtual_stages`. Before its first
    backward pass it makes $(v - 1)\,p + 2\,(p - r - 1)$ of them as rank $r$ of $p$ = `stages`; the mean over the ranks
    stands for all. Without virtual stages there is no schedule that pairs them.

    Source: warm-up of the interleaved schedule, arXiv 2104.04473, section 2.2; Megatron-Core,
    `--overlap-moe-expert-parallel-comm`, which needs virtual stages.

    >>> paired_share(32, 2, 8), paired_share(4, 4, 4) < 0.1, paired_share(64, 1, 4)   # 15 of 64 passes are alone
    (0.765625, True, 0.0)
    """
    alone = (virtual_stages - 1) * stages + stages - 1
    return where(virtual_stages > 1, maximum(1.0 - alone / (virtual_stages * micro_batches), 0.0), 0.0)


def hidden_exchange_s(exchange_s: Num, behind_s: Num, share: Num) -> Num:
    r"""Overlapped time of the exchange of one pass that runs during the opposite pass of another micro-batch.

    $$t = s\,\min(t_x,\ t_c)$$

    where $t_x$ = `exchange_s` is the exchange of a layer in one direction, $t_c$ = `behind_s` what the same layer takes
    in the other direction without its exchange, and $s$ = `share` of the passes overlap with one.

    Source: arXiv 2412.19437, section 3.2.1.

    >>> hidden_exchange_s(5.0, 3.0, 1.0), hidden_exchange_s(2.0, 3.0, 0.5)
    (3.0, 1.0)
    """
    return share * minimum(exchange_s, behind_s)


def dual_paired_share(micro_batches: Num, stages: Num) -> Num:
    r"""Share of the passes under DualPipe that overlap with the opposite pass of another micro-batch.

    $$s = \max\Big(1 - \frac{p + 1}{n},\ 0\Big)$$

    where of the $n$ = `micro_batches` all but $p + 1$, $p$ = `stages`, shorten a step by running forward with
    another's backward pass; the others fill and drain the pipeline.

    Source: longest path of the schedule of arXiv 2412.19437, figure 5.

    >>> dual_paired_share(20, 8), dual_paired_share(4, 4)
    (0.55, 0.0)
    """
    return maximum(1.0 - (stages + 1) / micro_batches, 0.0)


#: Values of a block that share one scale (4 bytes) in 8-bit dispatch, and the bytes of the header of a message.
BLOCK: Final = 128
HEADER_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Coefficients of an exchange kernel on one machine in one direction (dispatch, or combine)."""

    start_s: float
    """Launch, and one round of flags."""
    expert_s: float
    """One expert more: its counter and flag."""
    Bps: float
    """Bandwidth of a rank inside its domain."""
    message_s: float
    """One message of one multiprocessor, whatever its size."""
    message_Bps: float
    """Bandwidth of one multiprocessor."""
    blend: float = 2.0
    """Overlap of link and multiprocessors: 1 one after the other, infinity only the slower one counts."""
    outer_start_s: float = 0.0
    """More of a start where ranks of other domains take part."""
    peer_s: float = 0.0
    """One domain more."""
    outer_Bps: float = 1e9
    """Bandwidth of a rank through its NIC."""


def exchange_of(coefficients: Mapping[str, object], way: str) -> Exchange:
    """One direction (``dispatch`` or ``combine``) of a mapping of names `way.field`.

    >>> one = {"start_s": 1e-5, "expert_s": 1e-8, "Bps": 3e11, "message_s": 1e-6, "message_Bps": 4e10}
    >>> exchange_of({f"dispatch_{k}": v for k, v in one.items()}, "dispatch").start_s
    1e-05
    """
    names = [f.name for f in fields(Exchange) if f"{way}_{f.name}" in coefficients]
    return Exchange(**{name: float(coefficients[f"{way}_{name}"]) for name in names})  # type: ignore[arg-type]


def row_bytes(hidden: Num, *, eight_bit: bool) -> Num:
    r"""Bytes of one token on the wire: $2h$ in bf16; in 8 bits $h + 4h/128$ with its scales, and a header.

    where $h$ = `hidden`, and `eight_bit` says which.

    >>> row_bytes(7168, eight_bit=True), row_bytes(7168, eight_bit=False)
    (7408.0, 14336.0)
    """
    return hidden * (1 + 4 / BLOCK) + HEADER_BYTES if eight_bit else 2.0 * hidden


def exchange_s(
    way: str, tokens: Num, top_k: Num, experts: Num, row: Num, ranks: Num, inside: Num, processors: float, one: Exchange
) -> Num:
    r"""Seconds of a low-latency dispatch or combine.

    $$t = \alpha + \alpha_E E + \alpha_1[N > 1] + \alpha_N (N - 1) + \max\Big(\big(W_0^q + M^q\big)^{1/q}, W_1\Big)$$

    $$W_0 = \frac{T k b}{\beta_0},\quad W_1 = \frac{T k b}{\beta_1} \cdot \frac{n - t}{n},\quad
      M = m \Big(\mu + \frac{b}{\beta_m}\Big),\quad
      P = \Big\lceil \frac{E}{\lceil E / P_0 \rceil} \Big\rceil$$

    The kernel gives every expert a group of warps, so with few experts only $P$ of the $P_0$ multiprocessors work:
    in a dispatch each of them takes $m = \lceil T / P \rceil$ tokens, and sends the $k$ copies of one at once; in a
    combine each takes $m = T k / P$ messages.

    Args:
        way: ``dispatch`` or ``combine``.
        tokens, top_k: $T$ and $k$.
        experts: $E$.
        row: $b$, see `row_bytes`.
        ranks, inside: $n$ and $t$; $N = n / t$ domains.
        processors: $P_0$, multiprocessors of the device.
        one: the coefficients $\alpha$ = `start_s`, $\alpha_E$ = `expert_s`, $\alpha_1$ = `outer_start_s`, $\alpha_N$ =
            `peer_s`, $\beta_0$ = `Bps`, $\beta_1$ = `outer_Bps`, $\mu$ = `message_s`, $\beta_m$ = `message_Bps`, $q$
            = `blend`.

    Source: the launch configuration of the low-latency kernels of DeepEP, Zhao et al. 2025; the form is ours.

    >>> plain = Exchange(start_s=1e-5, expert_s=0.0, Bps=1e11, message_s=1e-6, message_Bps=1e12, blend=1.0)
    >>> round(exchange_s("dispatch", 128, 8, 128, 1e4, 8, 8, 132, plain) * 1e6, 2)   # 10 + 102.4 + 1.01
    113.41
    """
    busy = ceil_div(experts, ceil_div(experts, processors))
    messages = ceil_div(tokens, busy) if way == "dispatch" else tokens * top_k / busy
    moved, domains = tokens * top_k * row, ranks / inside
    link_s, work_s = moved / one.Bps, messages * (one.message_s + row / one.message_Bps)
    inner_s = soft_maximum(link_s, work_s, one.blend)
    outer_s = moved * (1 - inside / ranks) / one.outer_Bps
    start_s = one.start_s + one.expert_s * experts + where(domains > 1, one.outer_start_s, 0.0)
    return start_s + one.peer_s * (domains - 1) + maximum(inner_s, outer_s)
