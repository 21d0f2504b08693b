"""Work and traffic of matrix products."""

from __future__ import annotations

from steptime.num import Num


def matmul_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Floating-point operations of one product of $m \times k$ by $k \times n$.

    $$F = m n (2k - 1 + a)$$

    where each of the $mn$ outputs takes $k$ multiplications and $k-1$ additions, and $a$ = `accumulate` is 1 if the
    result is added to an accumulator (the field's $2mnk$) and 0 if it is not.

    Source: definition.

    >>> matmul_flops(2, 3, 4, 1), matmul_flops(2, 3, 4, 0)
    (48, 42)
    """
    return m * n * (2 * k - 1 + accumulate)


def matmul_backward_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Operations of both gradients of one product: $dX = dY\,W^T$ and $dW = X^T dY$.

    $$F = m k (2n - 1 + a) + k n (2m - 1 + a)$$

    with $m, n, k$ of the forward product and $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> matmul_backward_flops(2, 3, 4, 1) == 2 * matmul_flops(2, 3, 4, 1)
    True
    """
    return matmul_flops(m, k, n, accumulate) + matmul_flops(k, n, m, accumulate)


def matmul_bytes(m: Num, n: Num, k: Num, element_bytes: Num, output_passes: Num) -> Num:
    r"""Device-memory traffic of one product: each operand read once, the output written.

    $$M = (m k + k n + p\, m n) E$$

    where $E$ = `element_bytes` and $p$ = `output_passes` is how often the output goes through memory (1, or the
    number of panels of a blocked product that accumulates in memory).

    Source: arXiv 2410.00273, section on operation counts.

    >>> matmul_bytes(2, 3, 4, 2, 1)
    52
    """
    return (m * k + k * n + output_passes * m * n) * element_bytes


def matmul_backward_bytes(m: Num, n: Num, k: Num, element_bytes: Num, output_passes: Num) -> Num:
    r"""Traffic of both gradients: $dY$ twice, $W$, $X$, $dX$, $dW$ once each.

    $$M = 2 (m k + k n + p\, m n) E$$

    with the symbols of `matmul_bytes`.

    Source: arXiv 2410.00273, section on operation counts.

    >>> matmul_backward_bytes(2, 3, 4, 2, 1)
    104
    """
    return 2 * matmul_bytes(m, n, k, element_bytes, output_passes)


def blocked_matmul_flops(m: Num, n: Num, k: Num) -> Num:
    r"""Operations of a product in panels along $k$: every panel adds to an accumulator, $F = 2 m n k$.

    Source: definition.

    >>> blocked_matmul_flops(2, 3, 4)
    48
    """
    return 2 * m * n * k
