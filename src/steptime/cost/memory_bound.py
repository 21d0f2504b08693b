"""Operators that the memory bounds: their time, and the traffic of look-ups, scatters, fills and sorts.

Norms, softmax and maps are counted in :mod:`steptime.cost.elementwise`. Coefficients of the time (`launch_s`,
`efficiency`, ...) come from a profile of the device; small operators are bound by launch and cache.

Symbols: $M_r$ = `read_bytes`, $M_w$ = `written_bytes`, $M_i$ = `index_bytes`.
"""

from __future__ import annotations

from steptime.num import Num, maximum, minimum, soft_maximum

FLOOR_SHARPNESS = 4
"""Exponent of the norm that joins the host's floor and the device's time; the larger, the sharper the corner."""


def cached_Bps(
    moved_bytes: Num, memory_Bps: Num, l2_bytes: Num, efficiency: Num, cache_gain: Num, cache_share: Num
) -> Num:
    r"""Bandwidth that an operator sees when part of what it moves is still in the last-level cache.

    $$\beta' = \beta\,\big[\eta (1 - \chi) + \gamma \chi\big], \qquad \chi = \frac{1}{1 + (M / (c L))^2}$$

    where $M$ = `moved_bytes`, $\beta$ = `memory_Bps` of the datasheet, $\eta$ = `efficiency` of long streams,
    $\gamma$ = `cache_gain` = bandwidth of the cache over $\beta$, $L$ = `l2_bytes` and $c$ = `cache_share` the part of
    it that holds the data when the operator starts.

    Source: two-level roofline with a smooth step.

    >>> round(cached_Bps(1e12, 1e12, 1e7, 0.8, 3.0, 1.0) / 1e12, 6)
    0.8
    >>> round(cached_Bps(1e4, 1e12, 1e7, 0.8, 3.0, 1.0) / 1e12, 3)
    3.0
    """
    resident = 1 / (1 + (moved_bytes / (cache_share * l2_bytes)) ** 2)
    return memory_Bps * (efficiency * (1 - resident) + cache_gain * resident)


def memory_bound_s(
    moved_bytes: Num,
    rows: Num,
    reread_bytes: Num,
    vector_flops: Num,
    memory_Bps: Num,
    l2_bytes: Num,
    vector_flops_per_s: Num,
    launch_s: Num,
    floor_s: Num,
    efficiency: Num,
    cache_gain: Num,
    cache_share: Num,
    row_bytes: Num,
    reread: Num,
    vector_cost: Num,
    most_rows: Num,
) -> Num:
    r"""Time of one operator that reads and writes each element a few times.

    $$t = \Big(\big(\tau + \frac{M + q M_r}{\beta'(M)}
      + \frac{\min(r, r_1)\, m_0}{\beta'(M_1)} + \frac{a F}{R}\big)^4 + t_0^4\Big)^{1/4}$$

    where $M$ = `moved_bytes`, $r$ = `rows` that each cost $m_0$ = `row_bytes` more (narrow rows do not fill the
    lines and threads) up to the $r_1$ = `most_rows` that were measured (with more of them others overlap that, and the
    time tends to that of the bytes), $M_r$ = `reread_bytes` is read $q$ = `reread` more times where a row is too long
    for one block, $\beta'$ is `cached_Bps`, $M_1 = M \min(r_1 / r, 1)$ what the measured rows move, $F$ =
    `vector_flops` at $R/a$ (peak `vector_flops_per_s`, $a$ = `vector_cost`),
    $\tau$ = `launch_s` on the device, and $t_0$ = `floor_s` is the time of the host to launch it at all.

    Source: roofline, Williams et al. 2009, with a floor.

    >>> memory_bound_s(1.6e9, 1e4, 0, 0, 2e12, 1e6, 2e13, 5e-6, 1e-6, 0.8, 1, 1, 0, 0, 1, 1e4).__round__(6)
    0.001005
    """
    rate = cached_Bps(moved_bytes, memory_Bps, l2_bytes, efficiency, cache_gain, cache_share)
    measured = moved_bytes * minimum(most_rows / maximum(rows, 1.0), 1.0)
    edge_rate = cached_Bps(measured, memory_Bps, l2_bytes, efficiency, cache_gain, cache_share)
    moving = (moved_bytes + reread * reread_bytes) / rate + minimum(rows, most_rows) * row_bytes / edge_rate
    device = launch_s + moving + vector_cost * vector_flops / vector_flops_per_s
    return soft_maximum(device, floor_s, FLOOR_SHARPNESS)


def streamed_bytes(read_bytes: Num, written_bytes: Num) -> Num:
    r"""One pass: $M = M_r + M_w$, every input read once and every output written once.

    Source: definition.

    >>> streamed_bytes(12, 4)
    16
    """
    return read_bytes + written_bytes


def gather_bytes(written_bytes: Num, index_bytes: Num) -> Num:
    r"""Chosen elements: $M = 2 M_w + M_i$ (what is chosen is read, and written; the index is read).

    Source: definition.

    >>> gather_bytes(16, 8)
    40
    """
    return 2 * written_bytes + index_bytes


def scatter_bytes(value_bytes: Num, index_bytes: Num, whole_bytes: Num, accumulate: Num, inplace: Num) -> Num:
    r"""Elements put into chosen places: $M = (2 + a) M_v + M_i + 2 (1 - p) M_t$.

    where $M_v$ = `value_bytes` are read and written, read again at their place if they are added ($a$ = `accumulate`
    is 1), $M_i$ = `index_bytes`, and the target of $M_t$ = `whole_bytes` is copied first unless $p$ = `inplace` is 1.

    Source: definition.

    >>> scatter_bytes(16, 8, 64, 1, 1), scatter_bytes(16, 8, 64, 0, 0)
    (56, 168)
    """
    return (2 + accumulate) * value_bytes + index_bytes + 2 * (1 - inplace) * whole_bytes


def zero_and_add_bytes(value_bytes: Num, index_bytes: Num, whole_bytes: Num, accumulate: Num) -> Num:
    r"""A target made of zeros, then values put into it: $M = M_t + (2 + a) M_v + M_i$.

    Symbols as in `scatter_bytes`: the gradient of a look-up ($a = 1$) or of a slice ($a = 0$).

    Source: definition.

    >>> zero_and_add_bytes(16, 8, 64, 1)
    120
    """
    return whole_bytes + (2 + accumulate) * value_bytes + index_bytes


def passes_bytes(read_bytes: Num, written_bytes: Num, steps: Num) -> Num:
    r"""Several passes over the data: $M = s (M_r + M_w)$, $s$ = `steps`, such as the digits of a radix sort.

    Source: Merrill and Grimshaw 2011.

    >>> passes_bytes(8, 16, 4)
    96
    """
    return steps * (read_bytes + written_bytes)


def labelled_bytes(rows: Num, element_bytes: Num, index_bytes: Num) -> Num:
    r"""One element of each row, chosen by its label: $M = r E + M_i$.

    where $r$ = `rows`, $E$ = `element_bytes` and $M_i$ = `index_bytes`: the negative log-likelihood.

    Source: definition.

    >>> labelled_bytes(4, 2, 32)
    40
    """
    return rows * element_bytes + index_bytes


def plain_rms_norm_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of an RMSNorm of PyTorch's operators, forward: $M = (4E + 28) x$.

    To fp32 (read $E$, write 4), the square (4, 4), its mean (4), the product with its root (4, 4), back (4, $E$), the
    product with the weights ($E$, $E$) for $x$ = `elements` of $E$ = `element_bytes`.

    Source: count of operations, `x.float().pow(2).mean(-1)`, as Llama's own code writes it.

    >>> plain_rms_norm_bytes(4, 2)
    144
    """
    return (4 * element_bytes + 28) * elements


def plain_rms_norm_backward_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of its backward pass: $M = (8E + 60) x$.

    The weights and their gradient ($6E$), to fp32 ($E$, 4), both factors of the product (28), mean and square (16),
    their sum (12), back (4, $E$) for $x$ = `elements` of $E$ = `element_bytes`.

    Source: count of operations of automatic differentiation.

    >>> plain_rms_norm_backward_bytes(4, 2)
    304
    """
    return (8 * element_bytes + 60) * elements
