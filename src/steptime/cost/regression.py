r"""Linear regressions of time on work, for a machine that was measured: each coefficient is a latency or a rate.

The two regressions $t = \tau_c + F / R$ and $t = \tau_m + M / \beta$ and their maximum are the baseline; the other
formulas add what a processor shows beyond it. All are linear in the latencies and the inverse rates, which
:mod:`steptime.measure.machine` fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from steptime.num import Num, ceil_div, maximum, where

SENT: Final[Mapping[str, Callable[[Num], Num]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "point_to_point": lambda n: 1.0,
}
"""Bytes that a rank sends, as a share of the size of a collective over n ranks (bandwidth-optimal algorithms)."""


def linear_s(moved_bytes: Num, latency_s: Num, rate_per_s: Num) -> Num:
    r"""One regression: $t = \tau + M / R$.

    where $\tau$ = `latency_s`, $M$ = `moved_bytes` (or any other work) and $R$ = `rate_per_s`.

    Source: Hockney 1994.

    >>> linear_s(1e9, 1e-3, 1e12)
    0.002
    """
    return latency_s + moved_bytes / rate_per_s


def linear_roofline_s(
    matrix_flops: Num,
    moved_bytes: Num,
    compute_latency_s: Num,
    flops_per_s: Num,
    memory_latency_s: Num,
    memory_Bps: Num,
) -> Num:
    r"""The larger of both regressions: $t = \max(\tau_c + F/R,\ \tau_m + M/\beta)$.

    where $F$ = `matrix_flops`, $R$ = `flops_per_s`, $M$ = `moved_bytes`, $\beta$ = `memory_Bps`, and $\tau_c, \tau_m$ =
    `compute_latency_s`, `memory_latency_s`.

    Source: roofline, Williams et al. 2009, with a latency on each side.

    >>> linear_roofline_s(1e9, 1e6, 1e-3, 1e12, 0.0, 1e9)
    0.002
    """
    compute = linear_s(matrix_flops, compute_latency_s, flops_per_s)
    return maximum(compute, linear_s(moved_bytes, memory_latency_s, memory_Bps))


def half_size_matmul_s(
    m: Num,
    n: Num,
    k: Num,
    turned: Num,
    loose: Num,
    odd: Num,
    latency_s: Num,
    flops_per_s: Num,
    m_half: Num,
    n_half: Num,
    k_half: Num,
    turned_flops_per_s: Num,
    turned_per_s: Num,
    loose_flops_per_s: Num,
    odd_flops_per_s: Num,
) -> Num:
    r"""A product whose rate falls off where a dim is small.

    $$t = \tau + \frac{2mnk}{R}\left(1 + \frac{m_{1/2}}{m} + \frac{n_{1/2}}{n} + \frac{k_{1/2}}{k}\right)
      + u\left(\frac{2mnk}{R_u} + \frac{mk}{P_u}\right) + l\,\frac{2mnk}{R_l} + o\,\frac{2mnk}{R_o}$$

    where $\tau$ = `latency_s`, $R$ = `flops_per_s` is reached by large products and $m_{1/2}$ = `m_half` is the `m` at
    which, the other dims being large, half of it is left; $n_{1/2}$ = `n_half` and $k_{1/2}$ = `k_half` in the same
    way: packing of operands and edges of tiles. $u$ = `turned` is 1 where the left operand lies in memory as its
    transpose, as in the gradient of weights, and 0 elsewhere: matrix units that want rows have it rearranged, once per
    element ($P_u$ = `turned_per_s`) and again for every block of columns ($R_u$ = `turned_flops_per_s`). $l$ = `loose`
    is 1 where rows lie off a boundary of 16 bytes (:func:`~steptime.cost.matmul.off_boundary`), $o$ = `odd` where they
    lie off one of 4 bytes as well: the GPU then loads operands in smaller pieces, by kernels of older architectures
    ($R_l$ = `loose_flops_per_s`, and $R_o$ = `odd_flops_per_s` for what comes on top).

    Source: half-performance length, Hockney and Jesshope 1981; one per dim, the transposed operand and the two
    boundaries are ours.

    >>> half_size_matmul_s(100, 1000, 1000, 0, 0, 0, 0.0, 2e8, 100, 0, 0, 1e8, 1e6, 1e8, 1e8)   # 1 s at the rate, twice
    2.0
    >>> half_size_matmul_s(100, 1000, 1000, 1, 0, 0, 0.0, 2e8, 100, 0, 0, 1e8, 1e6, 1e8, 1e8)   # and 0.1 s to rearrange
    4.1
    >>> half_size_matmul_s(100, 1000, 1000, 0, 1, 1, 0.0, 2e8, 100, 0, 0, 1e8, 1e6, 1e8, 2e8)   # 2 s for rows in pieces
    5.0
    """
    flops = 2 * m * n * k
    factor = 1 + m_half / m + n_half / n + k_half / k
    rearranged = flops / turned_flops_per_s + m * k / turned_per_s
    in_pieces = loose * flops / loose_flops_per_s + odd * flops / odd_flops_per_s
    return latency_s + flops * factor / flops_per_s + turned * rearranged + in_pieces


def streaming_s(
    moved_bytes: Num,
    result_bytes: Num,
    latency_s: Num,
    near_Bps: Num,
    far_Bps: Num,
    cache_bytes: Num,
    fresh_Bps: Num,
    fresh_from_bytes: Num,
) -> Num:
    r"""An operator that moves memory, with a cache in front of it.

    $$t = \tau + \frac{M}{\beta_n} + \max(M - C, 0)\left(\frac{1}{\beta_f} - \frac{1}{\beta_n}\right)
        + \frac{M_0}{\beta_0}\Big|_{M_0 \ge L}$$

    where $\tau$ = `latency_s`; of the $M$ = `moved_bytes` the first $C$ = `cache_bytes` go at $\beta_n$ = `near_Bps`
    and the rest at $\beta_f$ = `far_Bps`; a result of $M_0$ = `result_bytes`, if it has at least $L$ =
    `fresh_from_bytes`, is mapped afresh by the system at $\beta_0$ = `fresh_Bps`.

    Source: two-level memory; the mapping as in mallopt(3), M_MMAP_THRESHOLD_MAX.

    >>> streaming_s(3e9, 0.0, 0.0, 2e9, 1e9, 2e9, 1e9, 1e9)   # 2 GB at 2 GB/s, 1 GB at 1 GB/s
    2.0
    >>> streaming_s(2e9, 1e9, 0.0, 2e9, 2e9, 0.0, 1e9, 1e9)   # 2 GB at 2 GB/s, 1 GB mapped at 1 GB/s
    2.0
    """
    beyond = maximum(moved_bytes - cache_bytes, 0.0)
    fresh = where(result_bytes >= fresh_from_bytes, result_bytes, 0.0 * result_bytes)
    return latency_s + moved_bytes / near_Bps + beyond * (1 / far_Bps - 1 / near_Bps) + fresh / fresh_Bps


def blocked_convolution_s(
    rows: Num,
    columns: Num,
    depth: Num,
    tensor_bytes: Num,
    channelwise: Num,
    latency_s: Num,
    flops_per_s: Num,
    vector_flops_per_s: Num,
    memory_Bps: Num,
) -> Num:
    r"""A convolution, or one of its gradients, on tensors whose channels stand in blocks of 16.

    $$t = \tau + \frac{2\,m\,k\,n'}{R} + \frac{M}{\beta}, \qquad n' = 16 \lceil n / 16 \rceil$$

    where $m, n, k$ = `rows`, `columns`, `depth` are those of `implicit_product`, $M$ = `tensor_bytes` of the input, the
    output and the weights, of which each pass reads two and writes the third, $\beta$ = `memory_Bps`, and $\tau$ =
    `latency_s`. Where `channelwise` is 1, it is $2mkn/R_v$ instead: $R$ = `flops_per_s` is that of matrix products,
    $R_v$ = `vector_flops_per_s` that of channels one by one. Bytes are not hidden, because tensors are brought into
    blocks before, and back after.

    Source: blocked layouts (nChw16c) of oneDNN's documentation; latency, rates and their sum as in `additive_s`.

    >>> blocked_convolution_s(1000, 20, 50, 0.0, 0, 0.0, 3.2e6, 1e6, 1e9)   # 32 columns for 20
    1.0
    >>> blocked_convolution_s(1000, 20, 50, 0.0, 1, 0.0, 3.2e6, 1e6, 1e9)
    2.0
    """
    product = 2 * rows * depth * ceil_div(columns, 16) * 16
    work_s = where(channelwise > 0, 2 * rows * depth * columns / vector_flops_per_s, product / flops_per_s)
    return latency_s + work_s + tensor_bytes / memory_Bps


def short_loops_s(
    loops: Num,
    steps: Num,
    moved_bytes: Num,
    result_bytes: Num,
    latency_s: Num,
    loops_per_s: Num,
    steps_per_s: Num,
    memory_Bps: Num,
    fresh_Bps: Num,
    fresh_from_bytes: Num,
) -> Num:
    r"""An operator of many short loops: windows of pooling, planes of a batch norm.

    $$t = \tau + \frac{L}{R_l} + \frac{S}{R_s} + \frac{M}{\beta} + \frac{M_0}{\beta_0}\Big|_{M_0 \ge L_0}$$

    where $\tau$ = `latency_s`; $L$ = `loops` are begun at $R_l$ = `loops_per_s` and take $S$ = `steps` in all at
    $R_s$ = `steps_per_s`; $M$ = `moved_bytes` at $\beta$ = `memory_Bps`; a result of $M_0$ = `result_bytes`, if it has
    at least $L_0$ = `fresh_from_bytes`, is mapped afresh at $\beta_0$ = `fresh_Bps`, as in `streaming_s`.

    Source: startup and rate of a loop, Hockney and Jesshope 1981; their sum as in `additive_s`.

    >>> short_loops_s(10, 90, 0.0, 0.0, 0.0, 10.0, 90.0, 1e9, 1e9, 1e9)   # a second to begin them, a second of steps
    2.0
    >>> short_loops_s(0, 0, 2e9, 1e9, 0.0, 1.0, 1.0, 2e9, 1e9, 1e9)   # a second of memory, a second to map the result
    2.0
    """
    fresh = where(result_bytes >= fresh_from_bytes, result_bytes, 0.0 * result_bytes)
    looped_s = loops / loops_per_s + steps / steps_per_s
    return latency_s + looped_s + moved_bytes / memory_Bps + fresh / fresh_Bps


def resident_matmul_s(
    m: Num,
    n: Num,
    k: Num,
    groups: Num,
    biased: Num,
    moved_bytes: Num,
    working_bytes: Num,
    latency_s: Num,
    group_s: Num,
    flops_per_s: Num,
    m_half: Num,
    n_half: Num,
    k_half: Num,
    biased_Bps: Num,
    far_Bps: Num,
    cache_bytes: Num,
) -> Num:
    r"""A batch of equal products on a processor whose cache keeps a part of what a step works on.

    $$t = \tau + g\,\tau_g + \frac{2gmnk}{R}\left(1 + \frac{m_{1/2}}{m} + \frac{n_{1/2}}{n} + \frac{k_{1/2}}{k}\right)
      + u\,\frac{4gmn}{\beta_u} + \frac{M}{\beta}\max\left(1 - \frac{C}{W},\ 0\right)$$

    where $\tau$ = `latency_s`, each of $g$ = `groups` products begins in $\tau_g$ = `group_s`; $R$ = `flops_per_s` and
    the half sizes are those of `half_size_matmul_s`; $u$ = `biased` is 1 where a bias of fp32 is spread over the
    result first, at $\beta_u$ = `biased_Bps`. Of $M$ = `moved_bytes` (operands and result) a cache of $C$ =
    `cache_bytes` holds the share $C / W$, if $W$ = `working_bytes` is what the step goes through before it comes back;
    the rest comes from beyond, at $\beta$ = `far_Bps`.

    Source: half-performance length, Hockney and Jesshope 1981; the hit rate of random replacement under a cyclic sweep.

    >>> resident_matmul_s(100, 1000, 1000, 1, 0, 8e6, 1e6, 0.0, 0.0, 2e8, 100, 0, 0, 1e6, 1e6, 2e6)   # all in the cache
    2.0
    >>> resident_matmul_s(100, 1000, 1000, 1, 1, 8e6, 4e6, 0.0, 0.0, 2e8, 100, 0, 0, 4e5, 1e6, 2e6)   # half; and a bias
    7.0
    """
    factor = 1 + m_half / m + n_half / n + k_half / k
    spread_s = biased * 4 * groups * m * n / biased_Bps
    far = maximum(1 - cache_bytes / working_bytes, 0.0)
    return (
        latency_s
        + groups * group_s
        + 2 * groups * m * n * k * factor / flops_per_s
        + spread_s
        + moved_bytes * far / far_Bps
    )


def additive_s(
    matrix_flops: Num,
    vector_flops: Num,
    moved_bytes: Num,
    latency_s: Num,
    matrix_flops_per_s: Num,
    vector_flops_per_s: Num,
    memory_Bps: Num,
) -> Num:
    r"""Work that does not overlap: $t = \tau + F_m/R_m + F_v/R_v + M/\beta$.

    where $F_m, F_v$ = `matrix_flops`, `vector_flops` at $R_m, R_v$ = `matrix_flops_per_s`, `vector_flops_per_s`,
    $M$ = `moved_bytes` at $\beta$ = `memory_Bps`, and $\tau$ = `latency_s`.

    Source: definition.

    >>> additive_s(1e9, 1e9, 0.0, 0.0, 1e9, 1e9, 1e9)
    2.0
    """
    work = matrix_flops / matrix_flops_per_s + vector_flops / vector_flops_per_s
    return latency_s + work + moved_bytes / memory_Bps
