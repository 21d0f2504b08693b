"""Loops of sparse and dense vector kernels: bytes served by each level of memory, and the resulting time."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.num import Num, maximum, minimum


def missed_share(distance_bytes: Num, capacity_bytes: Num) -> Num:
    r"""Share of an array that a cache has evicted.

    $$m = \min\Big(\max\Big(\frac{D}{C} - \frac{1}{2},\ 0\Big),\ 1\Big)$$

    where $D$ = `distance_bytes` are the bytes of all arrays touched since the last touch of this one, itself included,
    and $C$ = `capacity_bytes`. With strict least-recently-used replacement a cache would evict all of it at $D > C$;
    with hashed sets and other replacement it evicts some before and keeps some after.

    Source: Mattson et al. 1970, reuse distances, at the granularity of whole arrays; the slope is assumed.

    >>> missed_share(4.0, 8.0), missed_share(8.0, 8.0), missed_share(16.0, 8.0)
    (0.0, 0.5, 1.0)
    """
    return minimum(maximum(distance_bytes / capacity_bytes - 0.5, 0.0), 1.0)


def loop_kernel_s(call_s: Num, elements: Num, element_s: Num, level_bytes: Sequence[Num], byte_s: Sequence[Num]) -> Num:
    r"""Time of a kernel that passes over arrays.

    $$t = t_0 + n\,c + \sum_l B_l\,b_l$$

    where $t_0$ = `call_s` is the time of the call, $n$ = `elements` take $c$ = `element_s` each with data in the first
    cache, and each level $l$ serves $B_l$ = `level_bytes` at $b_l$ = `byte_s` (s per byte).

    Source: execution-cache-memory model without overlap, Treibig and Hager 2009, arXiv 0905.0792.

    >>> loop_kernel_s(1.0, 10, 0.5, [4.0, 2.0], [0.25, 1.0])
    9.0
    """
    served: Num = 0.0
    for size, each_s in zip(level_bytes, byte_s, strict=True):
        served = served + size * each_s
    return call_s + elements * element_s + served


def sparse_product_s(
    nonzeros: Num, nonzero_s: Num, rows: Num, row_s: Num, gathers: Sequence[Num], gather_s: Sequence[Num]
) -> Num:
    r"""Time of the arithmetic and the gathers of $y = A x$ in rows.

    $$t = z\,c_z + n\,c_n + \sum_l g_l\,t_l$$

    where $z$ = `nonzeros` and $n$ = `rows` take $c_z$ = `nonzero_s` and $c_n$ = `row_s` each, and level $l$ serves
    $g_l$ = `gathers` of $x$ that are not prefetched, at $t_l$ = `gather_s`.

    Source: count of operations; Williams et al. 2009, section 5, on gathers.

    >>> sparse_product_s(10, 0.5, 2, 1.0, [1, 2], [1.0, 4.0])
    16.0
    """
    gathered: Num = 0.0
    for count, each_s in zip(gathers, gather_s, strict=True):
        gathered = gathered + count * each_s
    return nonzeros * nonzero_s + rows * row_s + gathered
