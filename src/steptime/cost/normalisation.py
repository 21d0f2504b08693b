"""Work and traffic of norms over a batch.

Symbols: $x$ = `elements` of the activation, $c$ = `channels`, $E$ = `element_bytes`.
"""

from __future__ import annotations

from steptime.num import Num


def batch_norm_flops(elements: Num) -> Num:
    r"""Batch norm forward: $F = 7x$ (mean 1, variance 3, scale and shift 3).

    Source: count of operations, Ioffe and Szegedy, arXiv 1502.03167, algorithm 1.

    >>> batch_norm_flops(2)
    14
    """
    return 7 * elements


def batch_norm_backward_flops(elements: Num) -> Num:
    r"""Batch norm backward: $F = 11x$ (two sums 5, gradient of the input 6).

    Source: count of operations, Ioffe and Szegedy, arXiv 1502.03167, section 3.

    >>> batch_norm_backward_flops(2)
    22
    """
    return 11 * elements


def batch_norm_bytes(elements: Num, channels: Num, element_bytes: Num, training: Num) -> Num:
    r"""Traffic forward: $M = ((2 + t)\,x + 4c)\,E$.

    where the statistics of $x$ = `elements` are read in a pass of their own if $t$ = `training` is 1, and $c$ =
    `channels` have a weight, a bias, a mean and a variance.

    Source: definition.

    >>> batch_norm_bytes(8, 2, 2, 1), batch_norm_bytes(8, 2, 2, 0)
    (64, 48)
    """
    return ((2 + training) * elements + 4 * channels) * element_bytes


def batch_norm_backward_bytes(elements: Num, channels: Num, element_bytes: Num) -> Num:
    r"""Traffic backward: $M = (5x + 5c) E$ (input and gradient read twice, gradient written).

    Source: definition.

    >>> batch_norm_backward_bytes(8, 2, 2)
    100
    """
    return (5 * elements + 5 * channels) * element_bytes
