r"""Cycles of a product whose sums stay in vector registers, and of the code around its inner loop.

A register tile has $r$ = `rows` times $v$ = `vectors` sums, each a vector of $w$ = `lanes` elements. A step along the
depth multiplies $r$ broadcast elements of the left operand by $v$ vectors of the right one.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum


def vector_registers(rows: Num, vectors: Num) -> Num:
    r"""Vector registers of a tile, for sums, the vectors of one step and one broadcast element: $r v + v + 1$.

    with $r$ = `rows`, $v$ = `vectors`; the condition of register tiling with a depth of 1.

    Source: lecture notes on machine-learning systems, Register-aware tiling.

    >>> vector_registers(6, 4), vector_registers(8, 4)
    (29, 37)
    """
    return rows * vectors + vectors + 1


def step_cycles(rows: Num, vectors: Num, registers: Num, fma_per_clock: Num, latency: Num, loads_per_clock: Num) -> Num:
    r"""Cycles of one step along the depth.

    $$c = \max\Big(\frac{r v}{f},\ l,\ \frac{v + r / 2 + 2 s}{q}\Big), \qquad s = \max(r v + v + 1 - R, 0)$$

    with $r$ = `rows`, $v$ = `vectors`, $R$ = `registers`; $f$ = `fma_per_clock` multiply-adds of vectors and $q$ =
    `loads_per_clock` vectors start in a cycle, a sum waits $l$ = `latency` cycles (clock) for the one before it; a
    broadcast is half a load; each of $s$ spilled sums is loaded and stored.

    Source: G. Van Zee and R. van de Geijn, "BLIS", ACM TOMS 41 (2015); T. Low et al., "Analytical modeling is enough
    for high-performance BLIS", ACM TOMS 43 (2016), for the latency; the bound of ports is counted.

    >>> step_cycles(6, 2, 32, 1, 4, 1), step_cycles(2, 1, 32, 1, 4, 1), step_cycles(12, 3, 32, 1, 4, 1)
    (12.0, 4, 36.0)
    """
    spilled = maximum(vector_registers(rows, vectors) - registers, 0)
    ports = (vectors + rows / 2 + 2 * spilled) / loads_per_clock
    return maximum(maximum(rows * vectors / fma_per_clock, latency), ports)


def tile_steps(m: Num, n: Num, k: Num, rows: Num, columns: Num) -> Num:
    r"""Steps along the depth of all register tiles: $\lceil m / r \rceil \lceil n / c \rceil k$.

    with $m$ = `m`, $n$ = `n`, $k$ = `k`, $r$ = `rows`, $c$ = `columns` of a tile (elements). Tiles at the edges are
    computed whole.

    Source: count.

    >>> tile_steps(100, 64, 10, 8, 32)
    260
    """
    return ceil_div(m, rows) * ceil_div(n, columns) * k


def lost_share(needed: Num, room: Num) -> Num:
    r"""Share of reused data that a level has evicted: $\max(1 - Z / N, 0)$.

    with $N$ = `needed` and $Z$ = `room` in one unit (bytes or lines).

    Source: approximation; with least-recently-used replacement a loop slightly too large loses everything, with
    prefetching or random replacement less.

    >>> lost_share(100.0, 200.0), lost_share(400.0, 100.0)
    (0.0, 0.75)
    """
    return maximum(1 - room / needed, 0.0)
