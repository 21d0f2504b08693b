"""Time of one operator on one device by the roofline; what a given efficiency or latency does to fitted coefficients.

Fitted coefficients know more of a machine than the one efficiency and the one latency that the catalogue has.
Where a user gives another efficiency or latency, the fitted coefficients move as far as the given number does.
"""

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
    r"""Memory time that the arithmetic does not overlap.

    $$t = \max\left(\frac{M}{\beta} - t_\mathrm{compute},\ 0\right)$$

    so that $t_\mathrm{compute} + t = \max(t_\mathrm{compute}, t_\mathrm{memory})$, where $M$ = `moved_bytes`,
    $\beta$ = `memory_Bps` and $t_\mathrm{compute}$ = `compute_s`.

    Source: roofline model, Williams et al. 2009.

    >>> roofline_exposed_memory_s(2e9, 2e9, 0.5)   # 1 s of traffic behind 0.5 s of arithmetic
    0.5
    """
    return maximum(memory_s(moved_bytes, memory_Bps) - compute_s, 0.0)


def held_to_peak_s(timed_s: Num, peak_s: Num) -> Num:
    r"""Time to add to products whose modelled time would beat the peak.

    $$t = \max(T_0 - T,\ 0)$$

    where $T$ = `timed_s` is their time by a fitted curve and the factor of a framework, and $T_0$ = `peak_s` that of
    their operations at the datasheet's peak: no unit is faster.

    Source: definition of a peak.

    >>> held_to_peak_s(0.75, 1.0), held_to_peak_s(2.0, 1.0)
    (0.25, 0.0)
    """
    return maximum(peak_s - timed_s, 0.0)


def stated_share_factor(stated: float, known: float, reached: float) -> float:
    r"""Factor on a fitted rate where an efficiency is given: in proportion below the known one, above it to the peak.

    $$f = \begin{cases} s / k & s \le k \\ \big(r + (1 - r) \frac{s - k}{1 - k}\big) / r & s > k \end{cases}, \quad
      r = \min(1, \rho)$$

    where $s$ = `stated` and $k$ = `known` are efficiencies (shares of the datasheet rate, $0 < k \le 1$) and $\rho$ =
    `reached` is the share that the fitted coefficients reach. So $f = 1$ where $s = k$, $f$ never falls with $s$, and
    an efficiency of 1 is the datasheet rate, which no fit is brought to exceed.

    Source: choice of this program.

    >>> stated_share_factor(0.35, 0.7, 0.9), stated_share_factor(0.7, 0.7, 0.9), stated_share_factor(1.0, 0.7, 0.8)
    (0.5, 1.0, 1.25)
    >>> stated_share_factor(0.75, 0.5, 0.8), stated_share_factor(1.0, 0.5, 1.2)   # half way; a fit above the datasheet
    (1.125, 1.0)
    """
    if stated <= known:
        return stated / known
    fitted = min(1.0, reached)
    return (fitted + (1.0 - fitted) * (stated - known) / (1.0 - known)) / fitted


def stated_latency_s(fitted_s: float, stated_s: float, known_s: float) -> float:
    r"""A fitted latency where another is given: in proportion below the known one, later by the difference above it.

    $$t = \begin{cases} \tau\, s / k & s < k \\ \tau + (s - k) & s \ge k \end{cases}$$

    where $\tau$ = `fitted_s`, $s$ = `stated_s` and $k$ = `known_s` (s). So $t = \tau$ where $s = k$, $t$ grows with
    $s$, and is 0 where $s$ is.

    Source: choice of this program.

    >>> stated_latency_s(4.0, 1.0, 2.0), stated_latency_s(4.0, 2.0, 2.0), stated_latency_s(4.0, 5.0, 2.0)
    (2.0, 4.0, 7.0)
    """
    return fitted_s * stated_s / known_s if stated_s < known_s else fitted_s + (stated_s - known_s)


def counted_matrix_flops(matrix_flops: Num) -> Num:
    r"""Matrix operations $F$ = `matrix_flops` as they were counted.

    Source: definition.

    >>> counted_matrix_flops(12.0)
    12.0
    """
    return matrix_flops


def counted_vector_flops(vector_flops: Num) -> Num:
    r"""Vector operations $F$ = `vector_flops` as they were counted.

    Source: definition.

    >>> counted_vector_flops(12.0)
    12.0
    """
    return vector_flops


def counted_bytes(moved_bytes: Num) -> Num:
    r"""Memory traffic $M$ = `moved_bytes` as it was counted.

    Source: definition.

    >>> counted_bytes(12.0)
    12.0
    """
    return moved_bytes
