r"""Time of exchanges among ranks in which every rank has something else for, or from, each of the others.

The symbols are those of :mod:`steptime.cost.collective`: $n$ = `ranks`, of which $r$ = `inside` in each fast domain,
$\beta_f$ = `fast_Bps`, $\beta_s$ = `slow_Bps` per rank, $\alpha_f$ = `fast_latency_s`, $\alpha_s$ = `slow_latency_s`.
"""

from __future__ import annotations

from steptime.num import Num, maximum, where


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
