"""Traffic of operators that move tensors: look-ups, scatters, fills, sorts.

Symbols: $M_r$ = `read_bytes`, $M_w$ = `written_bytes`, $M_i$ = `index_bytes`.
"""

from __future__ import annotations

from steptime.num import Num


def streamed_bytes(read_bytes: Num, written_bytes: Num) -> Num:
    r"""One pass: $M = M_r + M_w$, every input read once and every output written once.

    Source: definition.

    >>> streamed_bytes(12, 4)
    16
    """
    return read_bytes + written_bytes


def gather_bytes(written_bytes: Num, index_bytes: Num) -> Num:
    r"""Chosen elements: $M = 2 M_w + M_i$ (what is chosen is read, and written; the index is read).

    Source: definition.

    >>> gather_bytes(16, 8)
    40
    """
    return 2 * written_bytes + index_bytes


def scatter_bytes(
    value_bytes: Num, index_bytes: Num, whole_bytes: Num, accumulate: Num, inplace: Num
) -> Num:  # fmt: skip
    r"""Elements put into chosen places: $M = (2 + a) M_v + M_i + 2 (1 - p) M_t$.

    where $M_v$ = `value_bytes` are read and written, read again at their place if they are added ($a$ = `accumulate`
    is 1), $M_i$ = `index_bytes`, and the target of $M_t$ = `whole_bytes` is copied first unless $p$ = `inplace` is 1.

    Source: definition.

    >>> scatter_bytes(16, 8, 64, 1, 1), scatter_bytes(16, 8, 64, 0, 0)
    (56, 168)
    """
    return (2 + accumulate) * value_bytes + index_bytes + 2 * (1 - inplace) * whole_bytes


def zero_and_add_bytes(value_bytes: Num, index_bytes: Num, whole_bytes: Num, accumulate: Num) -> Num:
    r"""A target made of zeros, then values put into it: $M = M_t + (2 + a) M_v + M_i$.

    Symbols as in `scatter_bytes`: the gradient of a look-up ($a = 1$) or of a slice ($a = 0$).

    Source: definition.

    >>> zero_and_add_bytes(16, 8, 64, 1)
    120
    """
    return whole_bytes + (2 + accumulate) * value_bytes + index_bytes


def passes_bytes(read_bytes: Num, written_bytes: Num, steps: Num) -> Num:
    r"""Several passes over the data: $M = s (M_r + M_w)$, $s$ = `steps`, such as the digits of a radix sort.

    Source: Merrill and Grimshaw 2011.

    >>> passes_bytes(8, 16, 4)
    96
    """
    return steps * (read_bytes + written_bytes)


def labelled_bytes(rows: Num, element_bytes: Num, index_bytes: Num) -> Num:
    r"""One element of each row, chosen by its label: $M = r E + M_i$.

    where $r$ = `rows`, $E$ = `element_bytes` and $M_i$ = `index_bytes`: the negative log-likelihood.

    Source: definition.

    >>> labelled_bytes(4, 2, 32)
    40
    """
    return rows * element_bytes + index_bytes


def plain_rms_norm_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of an RMSNorm of PyTorch's operators, forward: $M = (4E + 28) x$.

    To fp32 (read $E$, write 4), the square (4, 4), its mean (4), the product with its root (4, 4), back (4, $E$), the
    product with the weights ($E$, $E$) for $x$ = `elements` of $E$ = `element_bytes`.

    Source: count of operations, `x.float().pow(2).mean(-1)`, as Llama's own code writes it.

    >>> plain_rms_norm_bytes(4, 2)
    144
    """
    return (4 * element_bytes + 28) * elements


def plain_rms_norm_backward_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of its backward pass: $M = (8E + 60) x$.

    The weights and their gradient ($6E$), to fp32 ($E$, 4), both factors of the product (28), mean and square (16),
    their sum (12), back (4, $E$) for $x$ = `elements` of $E$ = `element_bytes`.

    Source: count of operations of automatic differentiation.

    >>> plain_rms_norm_backward_bytes(4, 2)
    304
    """
    return (8 * element_bytes + 60) * elements
