r"""Requests of a warp in closed form: sectors of global memory, bank conflicts, branch paths.

A warp is 32 threads that execute one instruction. Global memory is moved in sectors of 32 bytes, four to a line of 128;
shared memory has 32 banks, each of which serves one word of 4 bytes a cycle.

Source: NVIDIA, "CUDA C++ programming guide", sections on device memory accesses, shared memory (compute capability 5.x
and later) and SIMT architecture; "CUDA C++ best practices guide", coalesced access to global memory.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, greatest_common_divisor, maximum, minimum

WARP = 32
"""Threads of a warp."""
SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4
"""Bytes of a word of a bank."""


def warp_sectors(stride_bytes: Num, access_bytes: Num, offset_bytes: Num = 0) -> Num:
    r"""Sectors that one request of a warp touches when threads are at equal distances.

    $$n = \begin{cases} \lceil (o \bmod 32 + 31 s + e) / 32 \rceil & s \le 32 \\
        32\, \lceil (o \bmod 32 + e) / 32 \rceil & s > 32,\ 32 \mid s \end{cases}$$

    where thread $i$ reads $e$ = `access_bytes` from $o + i s$ on, with $o$ = `offset_bytes`, $s$ = `stride_bytes`.
    For other distances above 32 the formula is a lower bound.

    Source: NVIDIA, CUDA C++ best practices guide, coalesced access; exact count in :mod:`steptime_lab.hierarchy.warp`.

    >>> warp_sectors(4, 4), warp_sectors(8, 4), warp_sectors(4, 4, 4), warp_sectors(128, 4), warp_sectors(0, 4)
    (4, 8, 5, 32, 1)
    """
    start = offset_bytes % SECTOR_BYTES
    near = ceil_div(start + (WARP - 1) * stride_bytes + access_bytes, SECTOR_BYTES)
    return minimum(near, WARP * ceil_div(start + access_bytes, SECTOR_BYTES))


def coalescing(useful_bytes: Num, sectors: Num) -> Num:
    r"""Useful share of the moved bytes: $\eta = B / (32\, n)$.

    with $B$ = `useful_bytes` of a request, $n$ = `sectors`.

    Source: NVIDIA, CUDA C++ best practices guide.

    >>> coalescing(128, 4), coalescing(128, 32)
    (1.0, 0.125)
    """
    return useful_bytes / (SECTOR_BYTES * sectors)


def bank_conflict_ways(stride_words: Num) -> Num:
    r"""Cycles of one request to shared memory whose threads are at equal distances: $c = \gcd(s, 32)$.

    where $s$ = `stride_words` (words of 4 bytes): threads use $32 / c$ banks. A distance of 0 is a broadcast: 1.

    Source: order of $s$ in the integers modulo 32.

    >>> bank_conflict_ways(1), bank_conflict_ways(2), bank_conflict_ways(32), bank_conflict_ways(33)
    (1, 2, 32, 1)
    """
    return greatest_common_divisor(stride_words, BANKS) if not _is_zero(stride_words) else 1


def _is_zero(value: Num) -> bool:
    return not hasattr(value, "shape") and value == 0


def column_conflict_ways(row_words: Num, padding_words: Num) -> Num:
    r"""Cycles of a request that reads a column of a tile in shared memory: $c = \gcd(r + p, 32)$.

    with $r$ = `row_words`, $p$ = `padding_words` added to each row; one word of padding makes 32 columns free of
    conflicts.

    Source: NVIDIA, CUDA C++ best practices guide, shared memory in matrix multiplication.

    >>> column_conflict_ways(32, 0), column_conflict_ways(32, 1)
    (32, 1)
    """
    return bank_conflict_ways(row_words + padding_words)


def divergence_factor(paths: Num) -> Num:
    r"""Times that a warp issues an instruction whose threads take paths of one length: $p$ = `paths`, 1 to 32.

    Source: NVIDIA, CUDA C++ programming guide, SIMT architecture: paths are executed one after the other.

    >>> divergence_factor(1), divergence_factor(40)
    (1, 32)
    """
    return minimum(maximum(paths, 1), WARP)


def diverged_share(probability: Num) -> Num:
    r"""Share of warps whose threads take both sides of a branch: $1 - p^{32} - (1 - p)^{32}$.

    where each thread takes it with $p$ = `probability`, independently.

    Source: independent events.

    >>> diverged_share(0.0), round(diverged_share(0.5), 6), round(diverged_share(0.01), 2)
    (0.0, 1.0, 0.28)
    """
    return 1 - probability**WARP - (1 - probability) ** WARP


def warp_cost_factor(sectors: Num, least_sectors: Num, conflict_ways: Num, paths: Num) -> tuple[Num, Num, Num]:
    r"""Factors by which memory, shared memory and issue take longer than with ideal accesses.

    $$f = (n / n_0,\ c,\ p)$$

    with $n$ = `sectors`, $n_0$ = `least_sectors` of the same bytes in a row, $c$ = `conflict_ways`, $p$ = `paths`.

    Source: definition.

    >>> warp_cost_factor(32, 4, 1, 2)
    (8.0, 1, 2)
    """
    return sectors / least_sectors, conflict_ways, divergence_factor(paths)
