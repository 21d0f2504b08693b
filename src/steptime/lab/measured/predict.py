"""Predictions of measured runs: by the frameworks of the package, or by fits that did not see what they predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steptime.lab.calibrate.frameworks.bands import TOLD, Predicted, left_out_both, other_bands, with_middle
from steptime.lab.calibrate.frameworks.fit import Fitted
from steptime.lab.calibrate.frameworks.save import packaged
from steptime.lab.measured.aggregate import ScoredRun
from steptime.lab.measured.folds import folds
from steptime.lab.measured.run import MeasuredRun
from steptime.lab.measured.samples import Modelled, Progress, modelled
from steptime.num import Array
from steptime.plan.framework import NORMAL_95

FOLDS = 10
"""Parts that runs are dealt out to where each part has many groups."""
EACH = "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Predictions of runs, how they were made, and which runs were refused."""

    scored: tuple[ScoredRun, ...]
    refused: tuple[tuple[MeasuredRun, str], ...]
    how: str


def fit_to(runs: Modelled) -> Fitted:
    """Frameworks fitted to all runs that support claims."""
    return runs.fit.fit(usable(runs))


def usable(runs: Modelled) -> Array:
    """Runs that a fit may use: with a time, and nothing that speaks against a claim."""
    return np.array([run.time is not None and run.supports_claim for run in runs.runs])


def score_packaged(runs: Sequence[MeasuredRun], progress: Progress | None = None, *, named: bool = True) -> Scores:
    """Predictions with the frameworks that the package brings; rows of its own fit are seen rows.

    Args:
        runs: measured runs.
        progress: called with runs done and all runs.
        named: whether the framework of a run is told to the model; else the common values predict it.
    """
    found = modelled(runs, progress)
    fitted, bands = packaged()
    own = np.array([named and run.framework in fitted.frameworks for run in found.runs])
    residual = found.fit.log_s(fitted, named=named) - found.fit.log_measured
    predicted = Predicted(residual, found.fit.deviations(fitted, named=named), np.zeros(len(found.runs)))
    return _scores(found, predicted, np.where(own, bands[0].low, bands[1].low),
                   np.where(own, bands[0].high, bands[1].high),
                   f"frameworks of the package, framework {_told(named)}")  # fmt: skip


def score_left_out(found: Modelled, leave_out: str, *, named: bool = True, progress: Progress | None = None) -> Scores:
    """Predictions of every run by frameworks fitted without its group; bands from the other sources' residuals.

    Args:
        found: the runs, evaluated.
        leave_out: ``each`` source in turn, ``source_and_model`` or ``model`` (dealt out to ten parts), or the key of
            one source, which alone is then predicted.
        named: whether the framework of a run is told to the model.
        progress: called with fits done and all fits.
    """
    group = _groups(found, leave_out)
    used = usable(found)
    told, untold = left_out_both(found.fit, group, progress=progress, used=used)
    source = found.fit.runs.source
    generic = with_middle(untold, untold, source, used)
    predicted = with_middle(told, untold, source, used) if named else generic
    low, high = other_bands(predicted.scaled, source, used)
    unknown = predicted.slowing > TOLD
    low, high = (np.where(unknown, wide, own) for wide, own in zip(
        other_bands(generic.scaled, source, used), (low, high), strict=True))  # fmt: skip
    scores = _scores(found, predicted, low, high, f"fitted without its {leave_out}, framework {_told(named)}")
    if leave_out in (EACH, "source_and_model", "model"):
        return scores
    own = tuple(s for s in scores.scored if s.run.source_key == leave_out)
    return Scores(scored=own, refused=scores.refused, how=scores.how)


def _deviations(found: Modelled, predicted: Array) -> Array:
    """Deviations with the errors that rows state of their own figures, taken as what nine of ten lie within."""
    stated = np.array([math.log1p(run.stated_error) for run in found.runs]) / NORMAL_95
    out: Array = np.hypot(predicted, stated)
    return out


def _told(named: bool) -> str:
    return "named" if named else "not named"


def _groups(found: Modelled, leave_out: str) -> Array:
    if leave_out in ("source_and_model", "model"):
        group = np.empty(len(found.runs), dtype=object)
        for fold in folds(found.runs, leave_out, FOLDS):
            group[fold.kept_aside] = fold.name
        return group
    return np.array([run.source_key for run in found.runs], dtype=object)


def _scores(found: Modelled, predicted: Predicted, low: Array, high: Array, how: str) -> Scores:
    step_s = np.exp(predicted.residual + found.fit.log_measured)
    deviation = _deviations(found, predicted.deviation)
    scored = tuple(
        ScoredRun(
            run=run, step_time_s=float(step_s[i]) if run.time or not run.memory else math.nan,
            low_s=float(step_s[i] * math.exp(low[i] * deviation[i])) if run.time else math.nan,
            high_s=float(step_s[i] * math.exp(high[i] * deviation[i])) if run.time else math.nan,
            memory_bytes=float(found.memory_bytes[i]), memory_low_bytes=float(found.memory_bands[i, 0]),
            memory_high_bytes=float(found.memory_bands[i, 1]), oom_probability=float(found.oom[i]),
        )
        for i, run in enumerate(found.runs)
    )  # fmt: skip
    return Scores(scored=scored, refused=found.refused, how=how)
