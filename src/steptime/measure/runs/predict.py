"""Predictions of measured runs: by the frameworks of the package, or by fits that did not see what they predict."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.measure.runs.aggregate import ScoredRun
from steptime.measure.runs.architecture import known_model
from steptime.measure.runs.bands import LEAST_SLOPE, Predicted, left_out_both, other_bands, packaged, with_slowdown
from steptime.measure.runs.fitting import Fitted
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import Modelled, Progress, modelled
from steptime.num import Array
from steptime.plan.framework import NORMAL_95


def model_key(run: MeasuredRun) -> Hashable:
    """Key that is equal for runs of the same model in any spelling: catalogue name, and shape."""
    known = known_model(run.model_name)
    m = run.model
    return (known["catalogue"] if known else "", m.layers, m.hidden, m.heads, m.ffn_hidden, m.causal)


#: Name of a folding -> key that is equal for runs of one group.
FOLDINGS: Final[dict[str, Callable[[MeasuredRun], Hashable]]] = {
    "source": lambda run: run.source_key,
    "source_and_model": lambda run: (run.source_key, run.model_name),
    "model": model_key,
    "device": lambda run: run.device,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the runs that are held out, and of the rest."""

    name: str
    held_out: Array
    rest: Array


def folds(runs: Sequence[MeasuredRun], by: str = "source", parts: int | None = None) -> list[Fold]:
    """Folds that hold out every group in turn; runs of one group are never on both sides.

    Args:
        runs: the runs.
        by: ``source``, ``source_and_model``, ``model`` or ``device``.
        parts: most folds; each takes several groups, the largest group first into the emptiest. None: one group each.

    Raises:
        KeyError: the folding is unknown.
    """
    key = FOLDINGS[by]
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[key(run)].append(index)
    bins: list[tuple[list[str], list[int]]] = [([], []) for _ in range(min(parts or len(groups), len(groups)))]
    for name, members in sorted(groups.items(), key=lambda item: (-len(item[1]), str(item[0]))):
        names, indices = min(bins, key=lambda b: len(b[1]))
        names.append(" / ".join(map(str, name)) if isinstance(name, tuple) else str(name))
        indices += members
    every = np.arange(len(runs))
    made = [(" + ".join(names), np.array(sorted(indices), np.int64)) for names, indices in bins]
    return [Fold(name=name[:200], held_out=index, rest=np.setdiff1d(every, index)) for name, index in made]


FOLDS = 10
"""Number of folds where each holds out several groups."""
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
    """Predictions with the frameworks of the package; rows of its own fit are seen rows.

    Args:
        runs: measured runs.
        progress: called with runs done and all runs.
        named: predict by the framework of each run; else by the common values.
    """
    found = modelled(runs, progress)
    fitted, bands = packaged()
    own = np.array([named and run.framework in fitted.frameworks for run in found.runs])
    residual = found.fit.log_s(fitted, named=named) - found.fit.log_measured
    predicted = Predicted(residual, found.fit.deviations(fitted, named=named), np.zeros(len(found.runs)))
    return _scores(
        found,
        predicted,
        np.where(own, bands[0].low, bands[1].low),
        np.where(own, bands[0].high, bands[1].high),
        f"frameworks of the package, framework {_label(named)}",
    )


def score_left_out(found: Modelled, leave_out: str, *, named: bool = True, progress: Progress | None = None) -> Scores:
    """Predictions of every run by frameworks fitted without its group; bands from the other sources' residuals.

    Args:
        found: the runs, evaluated.
        leave_out: ``each`` source in turn, ``source_and_model`` or ``model`` (in ten folds), or the key of one
            source, which alone is then predicted.
        named: predict by the framework of each run; else by the common values.
        progress: called with fits done and all fits.
    """
    group = _groups(found, leave_out)
    used = usable(found)
    by_name, unnamed = left_out_both(found.fit, group, progress=progress, used=used)
    source = found.fit.runs.source
    generic = with_slowdown(unnamed, unnamed, source, used)
    predicted = with_slowdown(by_name, unnamed, source, used) if named else generic
    low, high = other_bands(predicted.scaled, source, used)
    unknown = predicted.slowing > LEAST_SLOPE
    low, high = (
        np.where(unknown, wide, own)
        for wide, own in zip(other_bands(generic.scaled, source, used), (low, high), strict=True)
    )
    scores = _scores(found, predicted, low, high, f"fitted without its {leave_out}, framework {_label(named)}")
    if leave_out in (EACH, "source_and_model", "model"):
        return scores
    own = tuple(s for s in scores.scored if s.run.source_key == leave_out)
    return Scores(scored=own, refused=scores.refused, how=scores.how)


def _label(named: bool) -> str:
    return "named" if named else "not named"


def _groups(found: Modelled, leave_out: str) -> Array:
    if leave_out in ("source_and_model", "model"):
        group = np.empty(len(found.runs), dtype=object)
        for fold in folds(found.runs, leave_out, FOLDS):
            group[fold.held_out] = fold.name
        return group
    return np.array([run.source_key for run in found.runs], dtype=object)


def _scores(found: Modelled, predicted: Predicted, low: Array, high: Array, how: str) -> Scores:
    step_s = np.exp(predicted.residual + found.fit.log_measured)
    # a row's error of its own figures is taken as the 90 % interval of a normal distribution
    stated = np.array([math.log1p(run.stated_error) for run in found.runs]) / NORMAL_95
    deviation = np.hypot(predicted.deviation, stated)
    scored = tuple(
        ScoredRun(
            run=run,
            step_time_s=float(step_s[i]) if run.time or not run.memory else math.nan,
            low_s=float(step_s[i] * math.exp(low[i] * deviation[i])) if run.time else math.nan,
            high_s=float(step_s[i] * math.exp(high[i] * deviation[i])) if run.time else math.nan,
            memory_bytes=float(found.memory_bytes[i]),
            memory_low_bytes=float(found.memory_bands[i, 0]),
            memory_high_bytes=float(found.memory_bands[i, 1]),
            oom_probability=float(found.oom[i]),
        )
        for i, run in enumerate(found.runs)
    )
    return Scores(scored=scored, refused=found.refused, how=how)
