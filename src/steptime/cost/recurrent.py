"""Time of recurrent layers: many small products, one after the other."""

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
