r"""Misses of a cache by access pattern, in closed form: working sets, and rows that map to few sets.

A cache has $C$ bytes in lines of $L$ bytes, `sets` of `ways` lines each. Formulas count lines that are fetched; a line
is replaced when it was used least recently. They hold where an array starts at a multiple of a line.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, greatest_common_divisor, log2, maximum, minimum, where


def stream_misses(elements: Num, element_bytes: Num, line_bytes: Num) -> Num:
    r"""Lines that a pass over neighbouring elements fetches: $\lceil N E / L \rceil$.

    where $N$ = `elements` of $E$ = `element_bytes` each, in lines of $L$ = `line_bytes`. Every pass fetches them again,
    unless the array fits.

    Source: definition of a line.

    >>> stream_misses(1000, 8, 64)
    125
    """
    return ceil_div(elements * element_bytes, line_bytes)


def strided_misses(accesses: Num, stride_bytes: Num, line_bytes: Num) -> Num:
    r"""Lines that loads at equal distances fetch in one pass: $\lceil N \min(s / L, 1) \rceil$.

    where $N$ = `accesses` are $s$ = `stride_bytes` apart and lines have $L$ = `line_bytes`.

    Source: definition of a line.

    >>> strided_misses(1000, 32, 64), strided_misses(1000, 4096, 64)
    (500.0, 1000.0)
    """
    return ceil_div(accesses * minimum(stride_bytes / line_bytes, 1.0), 1.0)


def repeated_misses(footprint_lines: Num, passes: Num, cache_lines: Num) -> Num:
    r"""Lines fetched by passes over the same lines in one order, in a fully associative cache.

    $$n = \begin{cases} F & F \le c \\ p F & F > c \end{cases}$$

    where $F$ = `footprint_lines` are touched in each of $p$ = `passes`, and $c$ = `cache_lines`. Least-recently-used
    replacement keeps nothing of a cycle that exceeds the cache by one line.

    Source: R. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9 (1970).

    >>> repeated_misses(512, 3, 512), repeated_misses(513, 3, 512)
    (512, 1539)
    """
    return where(footprint_lines <= cache_lines, footprint_lines, passes * footprint_lines)


def stencil_rows_bytes(columns: Num, radius: Num, element_bytes: Num) -> Num:
    r"""Bytes that a stencil keeps so that each element is fetched once (layer condition): $W = (2 r + 1) n E$.

    where rows have $n$ = `columns` elements of $E$ = `element_bytes`, and the stencil reaches $r$ = `radius` rows up
    and down. The output streams through in addition.

    Source: H. Stengel et al., "Quantifying performance bottlenecks of stencil computations using the
    execution-cache-memory model", arXiv 1410.5010, section 3.

    >>> stencil_rows_bytes(1000, 1, 8)
    24000
    """
    return (2 * radius + 1) * columns * element_bytes


def stencil_misses(rows: Num, columns: Num, radius: Num, element_bytes: Num, line_bytes: Num, cache_bytes: Num) -> Num:
    r"""Lines that a stencil over $m \times n$ elements fetches of its input, and lines of its output.

    $$n_L = \frac{m n E}{L} (r' + 1), \qquad r' = \begin{cases} 1 & W \le C \\ 2 r + 1 & W > C \end{cases}$$

    where $m$ = `rows`, $n$ = `columns`, $E$ = `element_bytes`, $L$ = `line_bytes`, $C$ = `cache_bytes`, and $W$ of
    :func:`stencil_rows_bytes` together with the row of the output, which is loaded before it is written.

    Source: layer conditions, H. Stengel et al., arXiv 1410.5010, section 3.

    >>> stencil_misses(100, 1000, 1, 8, 64, 64e3), stencil_misses(100, 1000, 1, 8, 64, 16e3)
    (25000.0, 50000.0)
    """
    kept_bytes = stencil_rows_bytes(columns, radius, element_bytes) + columns * element_bytes
    lines = rows * columns * element_bytes / line_bytes
    return lines * (where(kept_bytes <= cache_bytes, 1, 2 * radius + 1) + 1)


def gather_lines(accesses: Num, table_lines: Num) -> Num:
    r"""Lines of a table that random accesses touch, on average: $n = T (1 - (1 - 1/T)^N)$.

    where $N$ = `accesses` go to $T$ = `table_lines` with equal probability.

    Source: expected number of occupied boxes, W. Feller, "An introduction to probability theory", volume 1.

    >>> round(gather_lines(1, 100), 9), round(gather_lines(100, 100), 2)
    (1.0, 63.4)
    """
    return table_lines * (1 - (1 - 1 / table_lines) ** accesses)


def gather_misses(accesses: Num, table_lines: Num, cache_lines: Num) -> Num:
    r"""Lines that random accesses to a table fetch, on average.

    $$n = \begin{cases} n_T & T \le c \\ n_f + (N - N_f) (1 - c / T) & T > c \end{cases}$$

    where $N$ = `accesses` go to $T$ = `table_lines` with equal probability, $c$ = `cache_lines` are for the table and
    $n_T$ is :func:`gather_lines`. The cache is full after $N_f = \ln(1 - c/T) / \ln(1 - 1/T)$ accesses; until then the
    fetches are the first accesses of lines, $n_f = \min(c, n_T)$.

    Source: independent references, W. King, "Analysis of demand paging algorithms", IFIP 1971: least-recently-used
    replacement keeps $c$ of $T$ equally likely lines.

    >>> gather_misses(1e6, 100, 100) < 100.001, gather_misses(1e6, 1000, 250) > 7.4e5
    (True, True)
    """
    kept = minimum(cache_lines / table_lines, 1 - 1e-12)
    first = minimum(cache_lines, gather_lines(accesses, table_lines))
    filling = minimum(accesses, log2(1 - kept) / log2(1 - 1 / table_lines))
    return where(
        table_lines <= cache_lines,
        gather_lines(accesses, table_lines),
        first + (accesses - filling) * (1 - kept),
    )


def sets_of_stride(stride_bytes: Num, sets: Num, line_bytes: Num) -> Num:
    r"""Number of sets to which addresses at equal distances map: $S' = S / \gcd(s / L, S)$.

    where addresses are $s$ = `stride_bytes` apart, a multiple of $L$ = `line_bytes`, and a cache has $S$ = `sets`. A
    distance that is a power of two, such as from row to row of a matrix, uses few sets: the lines of a column then
    evict each other while the rest of the cache is unused.

    Source: order of $s / L$ in the integers modulo $S$.

    >>> sets_of_stride(2048, 64, 64), sets_of_stride(2048 + 64, 64, 64)
    (2, 64)
    """
    return sets // greatest_common_divisor(stride_bytes // line_bytes, sets)


def rows_that_stay(stride_bytes: Num, sets: Num, ways: Num, line_bytes: Num) -> Num:
    r"""Lines at equal distances that a cache holds at a time: $n = w S'$.

    with $w$ = `ways` and $S'$ from :func:`sets_of_stride`. A tile with more rows loses lines even if it is smaller than
    the cache.

    Source: definition of a set.

    >>> rows_that_stay(2048, 64, 8, 64)
    16
    """
    return ways * sets_of_stride(stride_bytes, sets, line_bytes)


def least_padding(row_bytes: int, sets: int, line_bytes: int) -> int:
    r"""Bytes to add to a row so that a column uses every set: rows become an odd number of lines.

    $$p = \min\{p \ge 0 : L \mid r + p,\ \gcd((r + p) / L, S) = 1\}$$

    where $r$ = `row_bytes`, $S$ = `sets`, $L$ = `line_bytes`.

    Source: follows from :func:`sets_of_stride`.

    >>> least_padding(2048, 64, 64), least_padding(1000, 64, 64)
    (64, 88)
    """
    lines = -(-row_bytes // line_bytes)
    while greatest_common_divisor(lines, sets) != 1:
        lines += 1
    return lines * line_bytes - row_bytes


def boundary_hit_rate(above_bytes: Num, below_bytes: Num) -> Num:
    r"""Hit rate of a level from the traffic on both sides: $h = \max(1 - M_b / M_a,\ 0)$.

    with $M_a$ = `above_bytes` between it and the level above, $M_b$ = `below_bytes` between it and the level below; per
    line where both move lines, per load of $w$ bytes where the level above moves these.

    Source: definition.

    >>> boundary_hit_rate(456.0, 114.0)
    0.75
    """
    return maximum(1 - below_bytes / above_bytes, 0.0)


def average_access_s(hit_rates: tuple[Num, ...], latencies_s: tuple[Num, ...]) -> Num:
    r"""Mean time of a load through several levels.

    $$t = t_1 + (1 - h_1) (t_2 + (1 - h_2) (t_3 + \dots))$$

    where level $i$ takes $t_i$ of `latencies_s` (s) and finds the share $h_i$ of `hit_rates` of what reaches it; the
    last latency is that of memory.

    Source: J. Hennessy and D. Patterson, "Computer architecture", appendix B, average memory access time.

    >>> average_access_s((0.75, 0.5), (1.0, 4.0, 40.0))
    7.0
    """
    time_s: Num = latencies_s[-1]
    for rate, latency_s in zip(reversed(hit_rates), reversed(latencies_s[:-1]), strict=True):
        time_s = latency_s + (1 - rate) * time_s
    return time_s


def bandwidth_s(traffic_bytes: tuple[Num, ...], rates_Bps: tuple[Num, ...]) -> Num:
    r"""Time of traffic that overlaps at all levels: $t = \max_i M_i / \beta_i$.

    where level $i$ moves $M_i$ of `traffic_bytes` at $\beta_i$ of `rates_Bps`.

    Source: hierarchical roofline, T. Koskela et al., "A novel multi-level integrated roofline model approach for
    performance characterization", ISC 2018.

    >>> bandwidth_s((8e9, 1e9), (80e9, 5e9))
    0.2
    """
    time_s: Num = 0.0
    for moved_bytes, rate_Bps in zip(traffic_bytes, rates_Bps, strict=True):
        time_s = maximum(time_s, moved_bytes / rate_Bps)
    return time_s
