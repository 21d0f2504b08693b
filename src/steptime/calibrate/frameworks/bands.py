"""Bands learnt from residuals: of runs whose source had no part in the fit that predicts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptime.calibrate.frameworks.fit import Fitted, FrameworkFit
from steptime.num import Array, weighted_quantiles

LEVEL = 0.9
"""Share of measured runs that a band is to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions of runs by fits that did not see their group."""

    residual: Array
    """ln(predicted / measured)."""
    deviation: Array
    """What all doubts together make of it."""

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


def left_out(
    fit: FrameworkFit,
    group: Array,
    *,
    used: Array,
    named: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Predicted:
    """Predictions of every run by a fit to the runs of all other groups.

    Args:
        fit: all runs.
        group: group of each run.
        used: runs that a fit may use.
        named: whether the framework of a run is told (its parameters then come from its other groups).
        progress: called with groups done and all groups.
    """
    residual, deviation = np.zeros(fit.count), np.zeros(fit.count)
    groups = sorted(set(group))
    for done, name in enumerate(groups, start=1):
        out = group == name
        fitted: Fitted = fit.fit(used & ~out)
        residual[out] = (fit.log_s(fitted, named=named) - fit.log_measured)[out]
        deviation[out] = fit.deviations(fitted, named=named)[out]
        if progress:
            progress(done, len(groups))
    return Predicted(residual=residual, deviation=deviation)


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
