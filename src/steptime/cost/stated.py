"""What a stated number makes of a fitted one: nothing where it is the number that was known, and never the wrong way.

Fitted coefficients know more of a machine than one efficiency and one latency, which the catalogue has beside them.
Where somebody states another efficiency or latency, the fitted ones move as far as the stated one does.
"""

from __future__ import annotations


def stated_share_factor(stated: float, known: float, reached: float) -> float:
    r"""Factor on a fitted rate where an efficiency is stated: in proportion below the known one, above it to the peak.

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
    r"""A fitted latency where one is stated: in proportion below the known one, later by the difference above it.

    $$t = \begin{cases} \tau\, s / k & s < k \\ \tau + (s - k) & s \ge k \end{cases}$$

    where $\tau$ = `fitted_s`, $s$ = `stated_s` and $k$ = `known_s` (s). So $t = \tau$ where $s = k$, $t$ grows with
    $s$, and is 0 where $s$ is.

    Source: choice of this program.

    >>> stated_latency_s(4.0, 1.0, 2.0), stated_latency_s(4.0, 2.0, 2.0), stated_latency_s(4.0, 5.0, 2.0)
    (2.0, 4.0, 7.0)
    """
    return fitted_s * stated_s / known_s if stated_s < known_s else fitted_s + (stated_s - known_s)
