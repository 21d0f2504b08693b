"""Optimisers that treat a matrix as a matrix: operations of an update, and states beyond those of each element."""

from __future__ import annotations

from typing import Final

from steptime.num import Num, ceil_div, maximum, minimum, where

NEWTON_SCHULZ_STEPS: Final = 5
"""Steps of Muon's iteration; arXiv 2502.16982, algorithm 1."""
BLOCK: Final = 1024
"""Rows and columns of a block of Shampoo at most; arXiv 2309.06497, section 3."""
ROOT_EVERY: Final = 50
"""Steps between two inverse roots of Shampoo; arXiv 2309.06497, section 5."""
LARGEST_SIDE: Final = 10_000
"""Sides that are longer SOAP leaves out; arXiv 2409.11321, section 6.1, and its public implementation."""
BASIS_EVERY: Final = 10
"""Steps between two bases of SOAP; arXiv 2409.11321, section 6.1."""
EIGEN: Final = 9.0
"""Operations of an eigendecomposition with vectors, in cubes of the side; Golub and Van Loan, section 8.3.5."""
QR: Final = 8.0 / 3.0
"""Operations of a QR decomposition with its orthogonal factor, in cubes of the side; the same, section 5.2."""


def newton_schulz_flops(rows: Num, columns: Num) -> Num:
    r"""Operations that make a matrix nearly orthogonal, as Muon does with its momentum.

    $$F = K\,(4\,s^2 l + 2\,s^3), \qquad s = \min(m, n),\ l = \max(m, n)$$

    where each of the $K = 5$ steps on a matrix of $m$ = `rows` and $n$ = `columns` has the products
    $A = X X^\top$ ($2 s^2 l$), $A A$ ($2 s^3$) and $(b A + c A A) X$ ($2 s^2 l$).

    Source: Jordan et al. 2024, Muon; Liu et al., arXiv 2502.16982, algorithm 1; `torch.optim.Muon`.

    >>> newton_schulz_flops(2, 3), newton_schulz_flops(3, 2)
    (320, 320)
    """
    short, long = minimum(rows, columns), maximum(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


def _blocks(side: Num) -> tuple[Num, Num]:
    """Number of blocks into which a side is cut, and their mean length."""
    count = ceil_div(side, BLOCK)
    return count, side / count


def shampoo_flops(rows: Num, columns: Num) -> Num:
    r"""Operations of Shampoo for one matrix in a step, in blocks.

    $$F = \sum_{\text{blocks}} 4\,(a^2 b + a b^2) + \frac{9}{T}\,(a^3 + b^3)$$

    where a block of $a$ x $b$, 1,024 at most, of a matrix of `rows` x `columns` updates $L$ and $R$ with $G G^\top$ and
    $G^\top G$ and multiplies $L^{-1/4} G R^{-1/4}$; the roots are computed every $T = 50$ steps by eigendecomposition.

    Source: Gupta et al., arXiv 1802.09568, algorithm 1; blocks and intervals: Shi et al., arXiv 2309.06497.

    >>> round(shampoo_flops(2, 3), 1)
    126.3
    """
    (m, a), (n, b) = _blocks(rows), _blocks(columns)
    return m * n * (4 * (a**2 * b + a * b**2) + EIGEN / ROOT_EVERY * (a**3 + b**3))


def shampoo_state_bytes(rows: Num, columns: Num) -> Num:
    r"""Preconditioners of Shampoo and their roots for one matrix: $S = 8 \sum_{\text{blocks}} (a^2 + b^2)$.

    Blocks of $a$ x $b$, 1,024 at most, of a matrix of `rows` x `columns` have $L$, $R$ and their roots in 4 bytes each.

    Source: Gupta et al., arXiv 1802.09568; blocks: Shi et al., arXiv 2309.06497.

    >>> shampoo_state_bytes(2, 3)
    104.0
    """
    (m, a), (n, b) = _blocks(rows), _blocks(columns)
    return 8 * m * n * (a**2 + b**2)


def _kept(side: Num) -> Num:
    """1 where SOAP has a basis of a side."""
    return where(side <= LARGEST_SIDE, 1.0, 0.0)


def soap_flops(rows: Num, columns: Num) -> Num:
    r"""Operations of SOAP for one matrix in a step.

    $$F = \sum_{\text{sides}} 8\,s^2 o + \frac{2 + 8/3}{T}\,s^3$$

    where a side of $s$ rows or columns, with $o$ of the other, updates its correlation ($2 s^2 o$), and rotates the
    gradient, the momentum and the update ($2 s^2 o$ each) of a matrix of `rows` x `columns`; every $T = 10$ steps a
    product and a QR decomposition make the next basis. Sides longer than 10,000 are left out.

    Source: Vyas et al., arXiv 2409.11321, algorithm 3.

    >>> round(soap_flops(2, 3), 1), round(soap_flops(2, 20000), 1)
    (256.3, 640003.7)
    """
    total: Num = 0.0
    for side, other in ((rows, columns), (columns, rows)):
        total = total + _kept(side) * (8 * side**2 * other + (2 + QR) / BASIS_EVERY * side**3)
    return total


def soap_state_bytes(rows: Num, columns: Num) -> Num:
    r"""Correlations and bases of SOAP for one matrix: $S = 8\,(m^2 + n^2)$ for sides of at most 10,000.

    $m$ = `rows` and $n$ = `columns`; both sides have a correlation and a basis in 4 bytes each.

    Source: Vyas et al., arXiv 2409.11321, algorithm 3.

    >>> soap_state_bytes(2, 3), soap_state_bytes(2, 20000)
    (104.0, 32.0)
    """
    return 8 * (_kept(rows) * rows**2 + _kept(columns) * columns**2)


def factored_state_bytes(rows: Num, columns: Num) -> Num:
    r"""Second moments of Adafactor for one matrix: $S = 4\,(m + n)$, of $m$ = `rows` and $n$ = `columns`.

    Source: Shazeer and Stern, arXiv 1804.04235, algorithm 4; `torch.optim.Adafactor`.

    >>> factored_state_bytes(2, 3)
    20
    """
    return 4 * (rows + columns)


def matrix_update_s(flops: Num, flops_per_s: Num) -> Num:
    r"""Time of products of matrices in an optimiser's step.

    $$t = F / R$$

    where $F$ = `flops` of a rank, at $R$ = `flops_per_s` of the products of the run. Decompositions run
    slower; they are a small part.

    Source: roofline of large products.

    >>> matrix_update_s(2e12, 1e12)
    2.0
    """
    return flops / flops_per_s
