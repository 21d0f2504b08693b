"""Scores predictions against measurements: error, bias, coverage; overall and by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of predictions against measurements, for predictions without bands."""

    points: int
    median_ape: float
    mean_ape: float
    bias: float
    """Mean of predicted / measured - 1."""
    band: tuple[float, float]
    """5th and 95th percentile of measured / predicted."""


def errors_of(predicted: Array, measured: Array) -> Errors:
    """Relative errors of the rows that have a prediction (NaN: none).

    >>> errors_of(np.array([1.25, np.nan, 0.75]), np.array([1.0, 1.0, 1.0]))
    Errors(points=2, median_ape=0.25, mean_ape=0.25, bias=0.0, band=(0.8266666666666667, 1.3066666666666666))
    """
    known = ~np.isnan(predicted)
    predicted, measured = predicted[known], measured[known]
    low, high = np.quantile(measured / predicted, [0.05, 0.95])
    median, mean, bias = _middles(predicted / measured - 1)
    return Errors(points=len(measured), median_ape=median, mean_ape=mean, bias=bias, band=(float(low), float(high)))


def scatter_of(predicted: Array, measured: Array) -> float:
    r"""Scatter of single measurements around the error that all of them share, as a relative standard deviation.

    $$\epsilon = 1.4826\ \operatorname{median}_k |r_k - \operatorname{median}_j r_j|, \qquad
      r_k = \ln (t_k / \hat t_k)$$

    with $t_k$ = ``measured`` (s) and $\hat t_k$ = ``predicted`` (s) by a fit that did not see it. Source: the median
    absolute deviation times the factor that makes it the standard deviation of a normal distribution.

    >>> round(scatter_of(np.array([1.0, 1.0, 1.0]), np.exp([0.2, 0.3, 0.5])), 5)   # off by 0.1 around the middle
    0.14826
    """
    residual = np.log(measured / predicted)
    return float(1.4826 * np.median(np.abs(residual - np.median(residual))))


def _middles(relative: Array) -> tuple[float, float, float]:
    """Median and mean of the magnitude, and the mean."""
    return float(np.median(np.abs(relative))), float(np.mean(np.abs(relative))), float(np.mean(relative))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions for the rows of a table; NaN where there is none."""

    seconds: Array
    low_s: Array
    """5th percentile."""
    high_s: Array
    """95th percentile."""
    reason: Array
    """Why a row has no prediction; "" where it has one."""
    origin: Array | None = None
    """Origin of the curve of each row; None if it is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Residuals of a table."""

    measured_s: Array
    predicted: Predicted
    groups: Mapping[str, Array]
    """Name of a grouping (``by_source``) to the group of each row."""

    @property
    def scored(self) -> Array:
        """Rows that count; a time below a femtosecond is no measurement, and errors relative to it overflow."""
        usable: Array = (self.predicted.reason == "") & np.isfinite(self.measured_s) & (self.measured_s > 1e-15)
        return usable

    def to_json(self) -> dict[str, Any]:
        """Counts, errors and groups; fractions, not percent."""
        scored, reason = self.scored, self.predicted.reason
        skipped = {str(r): int((reason == r).sum()) for r in sorted(set(reason[reason != ""]))}
        bad_time = int(((reason == "") & ~scored).sum())
        if bad_time:
            skipped["no positive measured time"] = bad_time
        out: dict[str, Any] = {
            "rows": len(self.measured_s),
            "scored": int(scored.sum()),
            "skipped": skipped,
            "time": self._errors(scored),
            "memory": None,
        }
        for name, group in self.groups.items():
            out[name] = {
                str(g): self._errors(scored & (group == g)) | {"rows": int((scored & (group == g)).sum())}
                for g in sorted(set(group[scored]))
            }
        return out

    def _errors(self, rows: Array) -> dict[str, float | None]:
        p = self.predicted
        return errors(self.measured_s[rows], p.seconds[rows], p.low_s[rows], p.high_s[rows])


def errors(measured: Array, predicted: Array, low: Array, high: Array) -> dict[str, float | None]:
    r"""Error statistics of predictions $p$ of measurements $t$.

    ``mape`` is the mean, ``median_ape`` the median and ``p90_ape`` the 90th percentile of $|p/t-1|$; ``bias`` the
    mean of $p/t-1$; ``coverage90`` the share of $t$ between ``low`` and ``high``.

    >>> e = errors(np.array([1.0, 2.0]), np.array([1.1, 1.8]), np.array([0.9, 1.9]), np.array([1.2, 2.2]))
    >>> round(e["mape"], 3), round(abs(e["bias"]), 3), e["coverage90"]
    (0.1, 0.0, 1.0)
    """
    if not len(measured):
        return dict.fromkeys(("mape", "median_ape", "bias", "p90_ape", "coverage90"))
    relative = predicted / measured - 1
    median, mean, bias = _middles(relative)
    banded = np.isfinite(low) & np.isfinite(high)
    inside = (low <= measured) & (measured <= high)
    return {
        "mape": mean,
        "median_ape": median,
        "bias": bias,
        "p90_ape": float(np.quantile(np.abs(relative), 0.9)),
        "coverage90": float(inside[banded].mean()) if banded.any() else None,
    }
