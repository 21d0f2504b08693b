r"""Time of ring collectives and of all-to-all exchanges over a group that lies in one or several fast domains.

A group of $n$ = `ranks` has $r$ = `inside` of its members in each fast domain, hence $n / r$ domains. Inside a
domain every rank sends at $\beta_f$ = `fast_Bps` (bytes/s, one direction, sustained); between domains $r$ rings run in
parallel, one per member, each at $\beta_s$ = `slow_Bps` per rank. $\alpha_f$ = `fast_latency_s` and
$\alpha_s$ = `slow_latency_s` are paid per hop. $S$ = `size_bytes` is always the whole tensor: gathered, to be
scattered, to be reduced or to be broadcast. An empty tensor or a group of one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from steptime.num import Num, maximum, where

BUS_SHARE: Final[Mapping[str, Callable[[Num], Num]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce"), lambda n: 1.0 + 0.0 * n),
}
"""Bytes that cross the busiest link at least, as a share of the size of a collective over n ranks.

Source: nccl-tests, doc/PERFORMANCE.md and the `GetBw` functions of its programs.
"""


def ring_transfer_s(
    sent_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""One trip around the ring in which every rank sends `sent_bytes` in all.

    $$t = \max\left(\frac{B}{r\,\beta_s}\Big|_{n>r},\ \frac{B}{\beta_f}\Big|_{r>1}\right)
        + \alpha_s \left(\frac{n}{r} - 1\right) + \alpha_f \left(n - \frac{n}{r}\right)$$

    where $B$ = `sent_bytes`: the slower of the two levels sets the pace, and the ring crosses $n/r - 1$ domain borders
    and $n - n/r$ links inside domains. The other symbols stand at the head of this module.

    Source: arXiv 2410.00273, communication time; bandwidth-optimal rings, Patarasuk and Yuan 2009.

    >>> ring_transfer_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)   # inside one domain: 1 GB at 100 GB/s
    0.01
    >>> ring_transfer_s(1e9, 8, 4, 100e9, 10e9, 0.0, 0.0)   # two domains, 4 NICs each: 1 GB at 40 GB/s
    0.025
    """
    domains = ranks / inside
    between_s = where(domains > 1, sent_bytes / (inside * slow_Bps), 0.0)
    within_s = where(inside > 1, sent_bytes / fast_Bps, 0.0)
    latency_s = slow_latency_s * (domains - 1) + fast_latency_s * (ranks - domains)
    return where(sent_bytes > 0, maximum(between_s, within_s) + latency_s, 0.0)


def ring_all_gather_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Ring all-gather of a tensor of $S$ bytes: each rank sends $B = S (n-1)/n$ around the ring.

    $$t = t_\mathrm{ring}\left(S \frac{n-1}{n}\right)$$

    with $t_\mathrm{ring}$ = `ring_transfer_s`; symbols at the head of this module.

    Source: arXiv 2410.00273; Thakur et al. 2005, section 4.1.

    >>> ring_all_gather_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)   # 7/8 of 10 ms
    0.00875
    """
    sent_bytes = size_bytes * (ranks - 1) / ranks
    return ring_transfer_s(sent_bytes, ranks, inside, fast_Bps, slow_Bps, fast_latency_s, slow_latency_s)


def ring_reduce_scatter_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Ring reduce-scatter of a tensor of $S$ bytes: the mirror image of the all-gather.

    $$t = t_\mathrm{ring}\left(S \frac{n-1}{n}\right)$$

    with $t_\mathrm{ring}$ = `ring_transfer_s`; symbols at the head of this module.

    Source: arXiv 2410.00273; Thakur et al. 2005, section 4.2.

    >>> ring_reduce_scatter_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)
    0.00875
    """
    return ring_all_gather_s(size_bytes, ranks, inside, fast_Bps, slow_Bps, fast_latency_s, slow_latency_s)


def ring_all_reduce_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Ring all-reduce: a reduce-scatter and an all-gather.

    $$t = 2\, t_\mathrm{ring}\left(S \frac{n-1}{n}\right)$$

    with $t_\mathrm{ring}$ = `ring_transfer_s`; symbols at the head of this module.

    Source: Thakur et al. 2005, section 4.5; Patarasuk and Yuan 2009.

    >>> ring_all_reduce_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)   # 2 * 7/8 of 10 ms
    0.0175
    """
    sent_bytes = size_bytes * (ranks - 1) / ranks
    return 2 * ring_transfer_s(sent_bytes, ranks, inside, fast_Bps, slow_Bps, fast_latency_s, slow_latency_s)


def ring_broadcast_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Pipelined ring broadcast: all $S$ bytes pass every link once.

    $$t = t_\mathrm{ring}(S)\Big|_{n>1}$$

    with $t_\mathrm{ring}$ = `ring_transfer_s`; symbols at the head of this module.

    Source: arXiv 2410.00273.

    >>> ring_broadcast_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)
    0.01
    """
    sent_bytes = where(ranks > 1, size_bytes, 0.0 * size_bytes)
    return ring_transfer_s(sent_bytes, ranks, inside, fast_Bps, slow_Bps, fast_latency_s, slow_latency_s)


def ring_reduce_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Pipelined ring reduction to one root: the mirror image of the broadcast.

    $$t = t_\mathrm{ring}(S)\Big|_{n>1}$$

    with $t_\mathrm{ring}$ = `ring_transfer_s`; symbols at the head of this module.

    Source: arXiv 2410.00273.

    >>> ring_reduce_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0)
    0.01
    """
    return ring_broadcast_s(size_bytes, ranks, inside, fast_Bps, slow_Bps, fast_latency_s, slow_latency_s)


def point_to_point_s(size_bytes: Num, link_Bps: Num, latency_s: Num) -> Num:
    r"""One message over one link.

    $$t = \alpha + S / \beta$$

    where $S$ = `size_bytes`, $\beta$ = `link_Bps` and $\alpha$ = `latency_s`.

    Source: Hockney 1994.

    >>> point_to_point_s(1e9, 100e9, 5e-6)
    0.010005
    """
    return latency_s + size_bytes / link_Bps


def ring_behind_share(ranks: Num) -> Num:
    r"""Share of an operator's own time behind which what goes round a ring for it can run.

    $$s = \frac{n-1}{n}$$

    where $n$ = `ranks`: the operator works on one of $n$ pieces while the next one travels, and with one of them, the
    rank's own, nothing does. With $T$ for the operator and $C$ for the $n-1$ steps of the ring together, the last of
    them ends after $T/n + (n-1)\max(C/(n-1), T/n) = T + \max(C - sT, 0)$.

    Source: Wang et al., Overlap communication with dependent computation via decomposition, ASPLOS 2023; ring
    attention alike, arXiv 2310.01889.

    >>> ring_behind_share(4), ring_behind_share(1)
    (0.75, 0.0)
    """
    return (ranks - 1) / ranks


def shown_beside_s(sent_s: Num, work_s: Num) -> Num:
    r"""Exposed time of transfers that overlap with the work that needs them or makes what they carry.

    $$t = \max(T - t_\mathrm{busy},\ 0)$$

    where $T$ = `sent_s` is the time of the transfers and $t_\mathrm{busy}$ = `work_s` that of the work with which
    they may run: of a product over a ring the part of :func:`ring_behind_share`; of a product in $n_b$ panels all of
    it, next to $T = n_b T_1$, while the transfers $T_1$ of the first panel always show.

    Source: SUMMA, van de Geijn and Watts 1997; overlap as in arXiv 2410.00273.

    >>> shown_beside_s(4.0, 3.0), shown_beside_s(2.0, 3.0)
    (1.0, 0.0)
    """
    return maximum(sent_s - work_s, 0.0)


def all_to_all_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r"""Every rank sends an $n$-th of its tensor to each of the others.

    $$t = \max\left(\frac{S}{n} \frac{r-1}{\beta_f},\ \frac{S}{n} \frac{n-r}{\beta_s}\right)
        + \alpha_f (r - 1) + \alpha_s (n - r)$$

    where $S$ = `size_bytes` is what one rank holds; messages inside the domain and to others use different links.

    Source: pairwise exchange, Thakur et al. 2005, section 4.4.

    >>> round(all_to_all_s(1e9, 8, 8, 100e9, 10e9, 0.0, 0.0), 6)    # 7/8 of 10 ms
    0.00875
    >>> round(all_to_all_s(1e9, 16, 8, 100e9, 10e9, 0.0, 0.0), 6)   # 8/16 of 100 ms
    0.05
    """
    part_bytes = size_bytes / ranks
    between_s, within_s = part_bytes * (ranks - inside) / slow_Bps, part_bytes * (inside - 1) / fast_Bps
    latency_s = fast_latency_s * (inside - 1) + slow_latency_s * (ranks - inside)
    return where(size_bytes > 0, maximum(between_s, within_s) + latency_s, 0.0)


def rotated_s(ranks: Num, inside: Num, near_s: Num, far_s: Num) -> Num:
    r"""Every rank's block visits all others: $n - 1$ messages from neighbour to neighbour.

    $$t = (n - 1) \max\left(t_n\big|_{r>1},\ t_f\big|_{n>r}\right)$$

    where $t_n$ = `near_s` is a message inside a domain, $t_f$ = `far_s` one to another domain. A ring crosses a domain
    border with one link, so that the slowest message sets the pace of every step.

    Source: ring attention, Liu et al., arXiv 2310.01889, section 3.

    >>> rotated_s(4, 4, 0.001, 0.01), rotated_s(4, 2, 0.001, 0.01), rotated_s(4, 1, 0.1, 0.01)
    (0.003, 0.03, 0.03)
    """
    steps: Num = ranks - 1
    return steps * maximum(where(inside > 1, near_s, 0.0), where(ranks > inside, far_s, 0.0))


def ring_exchange_s(
    size_bytes: Num, ranks: Num, inside: Num, fast_Bps: Num, slow_Bps: Num, fast_latency_s: Num, slow_latency_s: Num
) -> Num:
    r""":func:`rotated_s` with messages that take their latency and their bytes over the rate of a link.

    $$t_n = \alpha_f + \frac{S}{\beta_f}, \qquad t_f = \alpha_s + \frac{S}{\beta_s}$$

    where $S$ = `size_bytes` is one rank's block; nothing is sent of an empty one.

    Source: as :func:`rotated_s`; messages of Hockney 1994.

    >>> ring_exchange_s(1e8, 4, 4, 100e9, 10e9, 0.0, 0.0), ring_exchange_s(1e8, 4, 2, 100e9, 10e9, 0.0, 0.0)
    (0.003, 0.03)
    """
    near_s, far_s = fast_latency_s + size_bytes / fast_Bps, slow_latency_s + size_bytes / slow_Bps
    return where(size_bytes > 0, rotated_s(ranks, inside, near_s, far_s), 0.0)


def algorithm_Bps(size_bytes: Num, seconds: Num) -> Num:
    r"""Algorithm bandwidth (`algbw` of nccl-tests): size of the collective over its time.

    $$B_a = S / t$$

    where $S$ = `size_bytes` and $t$ = `seconds`; 0 where nothing takes time.

    Source: nccl-tests, doc/PERFORMANCE.md.

    >>> algorithm_Bps(1e9, 0.01)
    100000000000.0
    """
    return where(seconds > 0, size_bytes / where(seconds > 0, seconds, 1.0), 0.0 * size_bytes)


def bus_Bps(kind: str, size_bytes: Num, ranks: Num, seconds: Num) -> Num:
    r"""Bus bandwidth (`busbw` of nccl-tests): what the busiest link carries, whatever the number of ranks.

    $$B_b = f(n)\, S / t$$

    where $f$ is :data:`BUS_SHARE` of `kind` for $n$ = `ranks`, $S$ = `size_bytes` and $t$ = `seconds`. It can be held
    against the bandwidth of the hardware; above it, switches have added up.

    Source: nccl-tests, doc/PERFORMANCE.md.

    >>> bus_Bps("all_reduce", 1e9, 8, 0.0175), bus_Bps("all_gather", 1e9, 8, 0.00875), bus_Bps("reduce", 1e9, 8, 0.01)
    (100000000000.0, 100000000000.0, 100000000000.0)
    """
    return BUS_SHARE[kind](ranks) * algorithm_Bps(size_bytes, seconds)


def reduction_s(added_bytes: Num, memory_Bps: Num) -> Num:
    r"""Arithmetic of a reduction: adding what has come in to what is there.

    $$t = \gamma V, \qquad \gamma = 3 / \beta_m$$

    where $V$ = `added_bytes` are the bytes of partial sums that a rank adds up and $\beta_m$ = `memory_Bps` is the rate
    at which device memory streams: an addition reads two numbers and writes one.

    Source: Chan et al. 2007, section 3 (the model); traffic as of :func:`steptime.cost.elementwise.residual_bytes`.

    >>> reduction_s(1e9, 3e12)
    0.001
    """
    return 3 * added_bytes / memory_Bps
