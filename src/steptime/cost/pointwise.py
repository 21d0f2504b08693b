"""Work of operators that do the same to every element, and of reductions."""

from __future__ import annotations

from steptime.num import Num


def pointwise_flops(elements: Num, operations: Num) -> Num:
    r"""Vector operations of a map or a reduction: $F = x\,o$.

    where $x$ = `elements` are computed (of a reduction: read) with $o$ = `operations` each.

    Source: definition.

    >>> pointwise_flops(6, 2)
    12
    """
    return elements * operations


def window_flops(outputs: Num, taps: Num) -> Num:
    r"""Vector operations of a pooling: $F = y\,t$, one per tap of the window.

    where $y$ = `outputs` and $t$ = `taps` = height x width of the window.

    Source: definition.

    >>> window_flops(4, 9)
    36
    """
    return outputs * taps


def sort_flops(rows: Num, steps: Num, width: Num) -> Num:
    r"""Comparisons of a sort of $r$ = `rows` of $w$ = `width` elements in $s$ = `steps`: $F = r\,w\,s$.

    A radix sort of keys of $b$ bits takes a step per 8 bits; a merge sort $\log_2 w$.

    Source: Merrill and Grimshaw 2011 (radix sorting on GPUs: digits of a few bits, one pass each).

    >>> sort_flops(2, 4, 8)
    64
    """
    return rows * width * steps
