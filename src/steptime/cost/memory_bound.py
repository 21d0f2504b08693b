"""Time of operators that the memory bounds: norms, softmax, maps, look-ups; small ones by launch and cache.

What an operator moves and computes is counted in :mod:`steptime.cost.elementwise`; here is how long that takes.
Coefficients (`launch_s`, `efficiency`, ...) come from a profile of the device.
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
    lines and threads) up to the $r_1$ = `most_rows` that were measured (with more of them others hide that, and the
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
