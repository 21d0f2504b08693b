"""Work of recurrent layers and cells."""

from __future__ import annotations

from steptime.num import Num


def recurrent_flops(batch: Num, steps: Num, width: Num, hidden: Num, gates: Num) -> Num:
    r"""Matrix operations of one layer in one direction: $F = 2\,b\,T\,g\,h\,(d + h)$.

    where $b$ = `batch`, $T$ = `steps`, $d$ = `width` of the input, $h$ = `hidden`, $g$ = `gates` (1 plain, 3 GRU,
    4 LSTM): each gate takes a product with the input and one with the state.

    Source: Hochreiter and Schmidhuber 1997; Cho et al., arXiv 1406.1078.

    >>> recurrent_flops(2, 3, 4, 5, 4)
    2160
    """
    return 2 * batch * steps * gates * hidden * (width + hidden)


def recurrent_backward_flops(batch: Num, steps: Num, width: Num, hidden: Num, gates: Num) -> Num:
    r"""Matrix operations of both gradients of all products: twice `recurrent_flops`.

    Source: definition.

    >>> recurrent_backward_flops(2, 3, 4, 5, 4)
    4320
    """
    return 2 * recurrent_flops(batch, steps, width, hidden, gates)


def gate_flops(batch: Num, steps: Num, hidden: Num, gates: Num) -> Num:
    r"""Vector operations of the gates: $F = b\,T\,h\,(5 g + 4)$.

    where a sigmoid or hyperbolic tangent counts 4, its bias 1, and the state 4 more; symbols as in `recurrent_flops`.

    Source: count of operations.

    >>> gate_flops(1, 1, 2, 4)
    48
    """
    return batch * steps * hidden * (5 * gates + 4)
