"""Time of grouped products and of whole expert blocks on one device."""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum, minimum, soft_maximum


def experts_touched(experts: Num, tokens: Num, choices: Num) -> Num:
    r"""Experts that get at least one token, on average: $e\,(1 - (1 - c/e)^m)$.

    $m$ = `tokens` each choose $c$ = `choices` of $e$ = `experts` evenly.

    Source: expectation of independent choices.

    >>> experts_touched(8, 1, 2), round(experts_touched(8, 100, 2), 6)
    (2.0, 8.0)
    """
    untouched: Num = (1 - minimum(choices / experts, 1)) ** tokens
    return experts * (1 - untouched)


def grouped_products_s(
    groups: Num,
    rows: Num,
    columns: Num,
    depth: Num,
    weight_bytes: Num,
    activation_bytes: Num,
    matrix_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    launch_s: Num,
    efficiency: Num,
    memory_efficiency: Num,
    pad_rows: Num,
    overlap: Num,
    start_depth: Num,
    skew: Num,
    spread: Num,
) -> Num:
    r"""Time of `groups` products of `rows` x `depth` by `depth` x `columns` in one kernel (or a few).

    $$t = \tau + (t_c^{\,p} + t_m^{\,p})^{1/p}, \qquad
      t_c = \frac{2\,G\,n\,(k + k_0)\,m'}{\varepsilon R}\,
      \max\!\Big(1, \frac{S}{B}\Big)^{1/2}, \quad m' = \big((m e^s)^4 + m_g^4\big)^{1/4}, \quad
      t_m = \frac{W + A}{\eta\beta}$$

    where $G$ = `groups`, $m$ = `rows` of a group (padded to at least $m_g$ = `pad_rows`), $n$ = `columns`,
    $k$ = `depth`, $k_0$ = `start_depth`, $W$ = `weight_bytes` and $A$ = `activation_bytes` are moved,
    $B$ = tiles of 128 by 128 on $S$ = `sm_count` processors (too few are partly made up for by splitting the depth).
    The device reaches $\varepsilon$ = `efficiency` of $R$ = `matrix_flops_per_s` and $\eta$ = `memory_efficiency` of
    $\beta$ = `memory_Bps`; $p$ = `overlap`, and $\tau$ = `launch_s`.
    Where loads are skewed, the busiest of $e$ = `spread` ranks has $e^s$ times the mean, $s$ = `skew`; `spread` is 1
    for even loads.

    Source: roofline with padding; grouped products of MegaBlocks, arXiv 2211.15841.

    >>> t = grouped_products_s(8, 1024, 4096, 4096, 0, 0, 1e15, 3e12, 132, 0, 0.8, 0.8, 64, 2, 0, 0.5, 1)
    >>> round(t / (2 * 8 * 1024 * 4096**2 / 0.8e15), 4)
    1.0
    """
    padded = soft_maximum(rows * spread**skew, pad_rows, 4)
    blocks = groups * ceil_div(padded, 128) * ceil_div(columns, 128)
    few = maximum(1, sm_count / blocks) ** 0.5
    flops = 2 * groups * padded * columns * (depth + start_depth)
    compute = flops / (efficiency * matrix_flops_per_s) * few
    memory = (weight_bytes + activation_bytes) / (memory_efficiency * memory_Bps)
    return launch_s + soft_maximum(compute, memory, overlap)
