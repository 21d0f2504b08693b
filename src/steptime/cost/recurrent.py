"""Work and time of recurrent layers and cells: many small products, one after the other."""

from __future__ import annotations

from steptime.num import Num, soft_maximum


def recurrent_s(
    batch: Num,
    hidden: Num,
    gates: Num,
    steps: Num,
    element_bytes: Num,
    matrix_flops_per_s: Num,
    memory_Bps: Num,
    launch_s: Num,
    step_s: Num,
    efficiency: Num,
    batch_half: Num,
    weight_reuse: Num,
    products: Num,
) -> Num:
    r"""Time of a recurrent layer of width $h$ over $T$ steps.

    $$t = \tau + T \left(\sigma + \left[ \Big(\frac{2\,x\,b\,g\,h^2}{\varepsilon R}\cdot\frac{b + b_0}{b}\Big)^3
      + \Big(\frac{g\,h^2 E}{\rho\beta}\Big)^3 \right]^{1/3}\right)$$

    where $b$ = `batch`, $g$ = `gates` (1 plain, 3 GRU, 4 LSTM), $x$ = `products` of the weights with the state per
    step (2 with those with the input), $\sigma$ = `step_s` is the latency of one step, small batches fill half of the
    units at $b_0$ = `batch_half`, and $\rho$ = `weight_reuse` is the bandwidth of the weights, which may stay in
    caches or registers, in units of the memory's, $\beta$ = `memory_Bps`; $h$ = `hidden`, $T$ = `steps`, $E$ =
    `element_bytes`, $R$ = `matrix_flops_per_s`, $\varepsilon$ = `efficiency` and $\tau$ = `launch_s`.

    Source: definition of the work; persistent kernels, Diamos et al. 2016.

    >>> round(1e6 * recurrent_s(64, 1024, 4, 25, 4, 1e13, 1e12, 0, 1e-5, 0.5, 0, 1, 1))
    2938
    >>> round(1e6 * recurrent_s(64, 1024, 4, 25, 4, 1e13, 1e12, 0, 1e-5, 0.5, 0, 1, 2))   # and with the input
    5620
    """
    work = 2 * products * gates * hidden * hidden * (batch + batch_half) / (efficiency * matrix_flops_per_s)
    weights = gates * hidden * hidden * element_bytes / (weight_reuse * memory_Bps)
    return launch_s + steps * (step_s + soft_maximum(work, weights, 3))


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
