"""Work and traffic of a mixture of experts, and of weights that are not trained or not stored as they are used.

Symbols: $m$ = `m` rows over all local experts, $g$ = `groups` local experts, $n$ = `n` and $k$ = `k` the widths of the
result and of the input, $E$ = `element_bytes`.
"""

from __future__ import annotations

from steptime.cost.matmul import matmul_flops
from steptime.num import Num


def grouped_matmul_bytes(m: Num, n: Num, k: Num, groups: Num, element_bytes: Num) -> Num:
    r"""Traffic of one product per expert: $M = (m k + g k n + m n) E$, every expert's weights read once.

    Source: definition; grouped products of MegaBlocks, arXiv 2211.15841.

    >>> grouped_matmul_bytes(4, 3, 2, 2, 2)
    64
    """
    return (m * k + groups * k * n + m * n) * element_bytes


def grouped_matmul_backward_bytes(m: Num, n: Num, k: Num, groups: Num, element_bytes: Num) -> Num:
    r"""Traffic of both gradients: twice that of `grouped_matmul_bytes`.

    Source: definition.

    >>> grouped_matmul_backward_bytes(4, 3, 2, 2, 2)
    128
    """
    return 2 * grouped_matmul_bytes(m, n, k, groups, element_bytes)


def input_gradient_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Operations of $dX = dY\,W^T$ alone, as frozen weights have it: $F = m k (2n - 1 + a)$.

    $m, n, k$ are those of the forward product and $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> input_gradient_flops(2, 3, 4, 1) == matmul_flops(2, 3, 4, 1)
    True
    """
    return matmul_flops(m, k, n, accumulate)


def top_k_flops(elements: Num) -> Num:
    r"""Vector operations of a router over $x$ = `elements` scores: softmax and one comparison per score, $F = 4x$.

    Source: count of operations.

    >>> top_k_flops(8)
    32
    """
    return 4 * elements


def moved_bytes(read_bytes: Num, written_bytes: Num) -> Num:
    r"""Traffic of a pass that reads $R$ = `read_bytes` and writes $W$ = `written_bytes`: $M = R + W$.

    Source: definition.

    >>> moved_bytes(3, 4)
    7
    """
    return read_bytes + written_bytes
