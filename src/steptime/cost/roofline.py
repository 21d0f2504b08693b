"""Time of one operator on one device: the roofline."""

from __future__ import annotations

from steptime.num import Num, maximum


def roofline_compute_s(
    matrix_flops: Num, vector_flops: Num, matrix_flops_per_s: Num, vector_flops_per_s: Num, kernel_latency_s: Num
) -> Num:
    r"""Time that an operator keeps the arithmetic units busy, its launch included.

    $$t_\mathrm{compute} = \tau + \frac{F_m}{R_m} + \frac{F_v}{R_v}$$

    where $F_m$ = `matrix_flops` runs on the matrix units at the sustained rate $R_m$ = `matrix_flops_per_s`,
    $F_v$ = `vector_flops` on the vector units at $R_v$ = `vector_flops_per_s`, and $\tau$ = `kernel_latency_s`
    (s) is paid even by an empty operator.

    Source: roofline model, Williams et al. 2009; latency and sustained rates as in arXiv 2410.00273.

    >>> roofline_compute_s(8e12, 0.0, 800e12, 100e12, 2e-5)   # 10 ms + 20 us
    0.01002
    """
    return kernel_latency_s + matrix_flops / matrix_flops_per_s + vector_flops / vector_flops_per_s


def memory_s(moved_bytes: Num, memory_Bps: Num) -> Num:
    r"""Time that an operator keeps the device memory busy.

    $$t_\mathrm{memory} = M / \beta$$

    where $M$ = `moved_bytes` (bytes read and written) and $\beta$ = `memory_Bps` (sustained, bytes/s).

    Source: roofline model, Williams et al. 2009.

    >>> memory_s(2e9, 2e12)
    0.001
    """
    return moved_bytes / memory_Bps


def roofline_exposed_memory_s(moved_bytes: Num, memory_Bps: Num, compute_s: Num) -> Num:
    r"""Memory time that the arithmetic does not hide.

    $$t = \max\left(\frac{M}{\beta} - t_\mathrm{compute},\ 0\right)$$

    so that $t_\mathrm{compute} + t = \max(t_\mathrm{compute}, t_\mathrm{memory})$, where $M$ = `moved_bytes`,
    $\beta$ = `memory_Bps` and $t_\mathrm{compute}$ = `compute_s`.

    Source: roofline model, Williams et al. 2009.

    >>> roofline_exposed_memory_s(2e9, 2e9, 0.5)   # 1 s of traffic behind 0.5 s of arithmetic
    0.5
    """
    return maximum(memory_s(moved_bytes, memory_Bps) - compute_s, 0.0)


def held_to_peak_s(timed_s: Num, peak_s: Num) -> Num:
    r"""What some products take longer than a model says that would have them beat the peak.

    $$t = \max(T_0 - T,\ 0)$$

    where $T$ = `timed_s` is their time by a fitted curve and the factor of a framework, and $T_0$ = `peak_s` that of
    their operations at the datasheet's peak: no unit is faster.

    Source: definition of a peak.

    >>> held_to_peak_s(0.75, 1.0), held_to_peak_s(2.0, 1.0)
    (0.25, 0.0)
    """
    return maximum(peak_s - timed_s, 0.0)
