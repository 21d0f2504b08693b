"""Bands learnt from residuals: of runs whose source had no part in the fit that predicts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime.lab.calibrate.frameworks.fit import Fitted, FrameworkFit
from steptime.num import Array, weighted_quantiles

TOLD = 1e-6
"""Slope below which a time does not depend on the factor of an unknown framework."""
LEVEL = 0.9
"""Share of measured runs that a band is to hold."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of runs by fits that did not see their group."""

    residual: Array
    """ln(predicted / measured)."""
    deviation: Array
    """What all doubts together make of it."""
    slowing: Array
    """Change of the logarithm of each time by that of the factor of an unknown framework; 0 where it is known."""

    @property
    def scaled(self) -> Array:
        """ln(measured / predicted) in units of the deviation."""
        out: Array = -self.residual / self.deviation
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Quantiles of scaled residuals."""

    low: float
    high: float


MIDDLE = 0.1
"""Logarithm of the factor from which the slope of :attr:`Predicted.slowing` is taken: about as large as it is found."""


def left_out_both(
    fit: FrameworkFit,
    group: Array,
    *,
    used: Array,
    ways: Sequence[bool] = (True, False),
    progress: Callable[[int, int], None] | None = None,
) -> list[Predicted]:
    """Predictions of every run by fits to the runs of all other groups, in one or both ways from the same fits.

    Args:
        fit: all runs.
        group: group of each run.
        used: runs that a fit may use.
        ways: whether the framework of a run is told (its parameters then come from its other groups), for each result.
        progress: called with groups done and all groups.
    """
    made = [Predicted(*(np.zeros(fit.count) for _ in range(3))) for _ in ways]
    groups = sorted(set(group))
    for done, name in enumerate(groups, start=1):
        out = group == name
        fitted: Fitted = fit.fit(used & ~out)
        for each, named in zip(made, ways, strict=True):
            _predict(each, fit, fitted, out, named)
        if progress:
            progress(done, len(groups))
    return made


def _predict(into: Predicted, fit: FrameworkFit, fitted: Fitted, out: Array, named: bool) -> None:
    """Fills in what a fit predicts of the runs ``out``."""
    log_s, slower = fit.log_s(fitted, named=named), fit.log_s(replace(fitted, slower=MIDDLE), named=named)
    into.residual[out] = (log_s - fit.log_measured)[out]
    into.deviation[out] = fit.deviations(fitted, named=named)[out]
    into.slowing[out] = ((slower - log_s) / MIDDLE)[out]


def slower_of(predicted: Predicted, source: Array, chosen: Array) -> float:
    r"""Logarithm of the factor by which frameworks were slower that their fit did not know, over the common values.

    $$\operatorname{median}_w\left(-\frac{e_r}{g_r}\right)$$

    over the runs $r$ of ``chosen`` whose time depends on it, all sources counting alike ($w$), where $e_r$ is the
    logarithm of predicted over measured time and $g_r$ its slope by that of the factor.

    Source: definition; 0 where no run is of a framework that its fit did not know.
    """
    use = chosen & (predicted.slowing > TOLD)
    if not use.any():
        return 0.0
    wanted = -predicted.residual[use] / predicted.slowing[use]
    return float(weighted_quantiles(wanted, source_weights(source[use]), [0.5])[0])


def with_middle(predicted: Predicted, unnamed: Predicted, source: Array, used: Array) -> Predicted:
    """The predictions with unknown frameworks as much slower as those of all other sources were.

    Args:
        predicted: predictions by fits without the group of a run.
        unnamed: by the same fits, no framework being told, from which the factor is taken (:func:`slower_of`).
        source: source of each run.
        used: runs that a fit may use.
    """
    moved = predicted.residual.copy()
    for name in np.unique(source):
        own = source == name
        moved[own] += slower_of(unnamed, source, ~own & used) * predicted.slowing[own]
    return replace(predicted, residual=moved)


def source_weights(source: Array) -> Array:
    """Weights of runs in a quantile: all sources count alike, as a band is of a run of one more source."""
    _, of, counts = np.unique(source, return_inverse=True, return_counts=True)
    weights: Array = (1.0 / counts)[of]
    return weights


def band_of(scaled: Array, weights: Array) -> Band:
    """The central :data:`LEVEL` of weighted residuals."""
    low, high = weighted_quantiles(scaled, weights, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Band(low=float(low), high=float(high))


def other_bands(scaled: Array, source: Array, used: Array) -> tuple[Array, Array]:
    """Ends of the band that all other sources give each run; NaN where no other source has a used run."""
    low, high = np.full(len(source), np.nan), np.full(len(source), np.nan)
    for name in np.unique(source):
        own = source == name
        rest = ~own & used
        if rest.any():
            band = band_of(scaled[rest], source_weights(source[rest]))
            low[own], high[own] = band.low, band.high
    return low, high


def honest_coverage(scaled: Array, source: Array) -> Array:
    """Whether each run lies in the band that all other sources give."""
    low, high = other_bands(scaled, source, np.ones(len(source), dtype=bool))
    inside: Array = (scaled >= low) & (scaled <= high)
    return inside
