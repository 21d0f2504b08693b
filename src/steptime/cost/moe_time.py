"""Time of grouped products and of whole expert blocks on one device."""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum, minimum


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
    skewed: Num,
) -> Num:
    r"""Time of `groups` products of `rows` x `depth` by `depth` x `columns` in one kernel (or a few).

    $$t = \tau + (t_c^{\,p} + t_m^{\,p})^{1/p}, \qquad
      t_c = \frac{2\,G\,n\,(k + k_0)\,m_g\lceil m/m_g\rceil}{\varepsilon R}\,s\,
      \max\!\Big(1, \frac{S}{B}\Big)^{1/2}, \qquad t_m = \frac{W + A}{\eta\beta}$$

    where $G$ = `groups`, $m$ = `rows` of a group (padded to $m_g$ = `pad_rows`), $n$ = `columns`, $k$ = `depth`,
    $k_0$ = `start_depth`, $W$ = `weight_bytes` and $A$ = `activation_bytes` are moved, $B$ = tiles of $m_g$ by 128 on
    $S$ = `sm_count` processors (too few are partly made up for by splitting the depth), and $s$ = `skew` >= 1 where
    `skewed` is 1: the busiest group against the mean.

    Source: roofline with padding; grouped products of MegaBlocks, arXiv 2211.15841.

    >>> t = grouped_products_s(8, 1024, 4096, 4096, 0, 0, 1e15, 3e12, 132, 0, 0.8, 0.8, 64, 2, 0, 1, 0)
    >>> round(t / (2 * 8 * 1024 * 4096**2 / 0.8e15), 6)
    1.0
    """
    tiles = ceil_div(rows, pad_rows)
    blocks = groups * tiles * ceil_div(columns, 128)
    few = maximum(1, sm_count / blocks) ** 0.5
    flops = 2 * groups * tiles * pad_rows * columns * (depth + start_depth)
    imbalance = 1 + skewed * (skew - 1)
    compute = flops / (efficiency * matrix_flops_per_s) * few * imbalance
    memory = (weight_bytes + activation_bytes) / (memory_efficiency * memory_Bps)
    joined: Num = (compute**overlap + memory**overlap) ** (1 / overlap)
    return launch_s + joined
