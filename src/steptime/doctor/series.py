"""Statistics of a series of step times: warm-up, level, drift, spikes, time between the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steptime.doctor.records import Log, Outside, Series, Spikes, StepLine
from steptime.errors import InputFileError

Floats = NDArray[np.float64]

#: A leading step belongs to the warm-up while it takes this much more than the median of the second half.
WARMUP_EXCESS: Final = 1.2
#: A step is a spike if it sticks out by this share of the median, and by this many standard deviations of the rest.
SPIKE_SHARE: Final = 0.1
SPIKE_DEVIATIONS: Final = 6.0
#: Drift that is reported: share of the median, and standard errors.
DRIFT_SHARE: Final = 0.03
DRIFT_ERRORS: Final = 4.0
#: Median absolute deviation -> standard deviation of a normal distribution.
_MAD: Final = 1.4826
#: Points that a slope is computed from; more are thinned evenly.
_SLOPE_POINTS: Final = 400
#: Shortest log (s) whose times of day say something about the time between steps.
_SHORTEST_WALL_S: Final = 20.0


def series_of(log: Log, settings: Mapping[str, Any]) -> Series:
    """Statistics of the steps of a log.

    Args:
        log: the log.
        settings: ``global_batch``, ``seq`` and ``gpus`` of the job as far as known; they turn throughput into time.

    Raises:
        InputFileError: throughput cannot be turned into time, and the log has no times of day either.
    """
    times, basis = times_of(log.steps, settings)
    if not len(times):
        missing = " and ".join(f"--{name.replace('_', '-')}" for name in _needed(log) if name not in settings)
        raise InputFileError(
            log.path, "states only throughput, which is no time without the batch", hint=f"give {missing or 'more'}"
        )
    covers = _covers(log.steps)
    start = _warmup(times)
    kept, weights = times[start:], covers[start:]
    level = float(np.median(kept))
    slope_span = _drift(kept, weights)
    at = np.linspace(-0.5, 0.5, len(kept)) if len(kept) > 1 else np.zeros(1)
    spikes = _spikes(kept - slope_span * at, weights, [step.number for step in log.steps[start:]])
    return Series(
        lines=len(times), steps=int(covers.sum()), warmup_lines=start, median_s=level,
        p5_s=float(np.quantile(kept, 0.05)), p95_s=float(np.quantile(kept, 0.95)),
        mean_s=float(np.average(kept, weights=weights)), drift=slope_span / level, spikes=spikes,
        outside=None if basis == CLOCK else _outside(log.steps[start:], kept, weights), basis=basis,
    )  # fmt: skip


CLOCK: Final = "from times of day"


def times_of(steps: Sequence[StepLine], settings: Mapping[str, Any]) -> tuple[Floats, str]:
    """Time of each step, and where it comes from; empty if it cannot be known."""
    batch, seq, gpus = (settings.get(name) for name in ("global_batch", "seq", "gpus"))
    if all(step.time_s for step in steps):
        return np.array([step.time_s for step in steps], dtype=float), "stated"
    if batch and all(step.samples_per_s for step in steps):
        return batch / np.array([step.samples_per_s for step in steps], dtype=float), "from throughput"
    if batch and seq and gpus and all(step.tokens_per_s_per_gpu for step in steps):
        rates = np.array([step.tokens_per_s_per_gpu for step in steps], dtype=float)
        return batch * seq / gpus / rates, "from throughput"
    return _from_clock(steps), CLOCK


def _from_clock(steps: Sequence[StepLine]) -> Floats:
    """Times between the lines; the first line, before which nothing is known, takes that of the second."""
    stamps = [step.at_s for step in steps if step.at_s is not None]
    if len(stamps) != len(steps) or len(steps) < 3 or stamps[-1] <= stamps[0]:
        return np.zeros(0)
    times = np.diff(np.array(stamps)) / _covers(steps)[1:]
    return np.concatenate([times[:1], times]) if bool(np.all(times > 0)) else np.zeros(0)


def _needed(log: Log) -> tuple[str, ...]:
    return ("global_batch",) if log.steps[0].samples_per_s else ("global_batch", "seq", "gpus")


def _covers(steps: Sequence[StepLine]) -> Floats:
    """How many steps each line stands for: those since the line before, the usual number where it starts anew."""
    gaps = np.diff(np.array([step.number for step in steps], dtype=float))
    usual = float(np.median(gaps[gaps > 0])) if bool(np.any(gaps > 0)) else 1.0
    first = min(max(float(steps[0].number), 1.0), usual)
    return np.concatenate([[first], np.where(gaps > 0, gaps, usual)])


def _warmup(times: Floats) -> int:
    """Lines to leave out at the start: the first, and those after it that are clearly slower than the second half."""
    if len(times) < 4:
        return 0
    level = float(np.median(times[len(times) // 2 :]))
    start = 1
    while start < len(times) // 2 and times[start] > WARMUP_EXCESS * level:
        start += 1
    return start


def _drift(times: Floats, covers: Floats) -> float:
    """Change of the step time from the first step to the last (s): the median slope between all pairs; 0 if noise.

    Source: Theil and Sen, the median of the slopes of all pairs of points.
    """
    if len(times) < 8:
        return 0.0
    keep = np.unique(np.linspace(0, len(times) - 1, min(len(times), _SLOPE_POINTS)).astype(int))
    x, y = np.cumsum(covers)[keep], times[keep]
    i, j = np.triu_indices(len(keep), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    span = slope * float(x[-1] - x[0])
    rest = y - slope * x
    sigma = _MAD * float(np.median(np.abs(rest - np.median(rest))))
    error = sigma * (12.0 / len(times)) ** 0.5
    real = abs(span) > max(DRIFT_SHARE * float(np.median(y)), DRIFT_ERRORS * error)
    return span if real else 0.0


def _spikes(times: Floats, covers: Floats, numbers: Sequence[int]) -> Spikes:
    level = float(np.median(times))
    sigma = _MAD * float(np.median(np.abs(times - level)))
    out = times - level > max(SPIKE_SHARE * level, SPIKE_DEVIATIONS * sigma)
    if len(times) < 5 or not bool(np.any(out)) or float(np.mean(out)) > 0.4:
        return Spikes(numbers=(), lost_s=0.0, median_excess_s=0.0, period=None)
    excess = (times - level)[out]
    found = [number for number, spike in zip(numbers, out, strict=True) if spike]
    return Spikes(
        numbers=tuple(found), lost_s=float((excess * covers[out]).sum() / covers.sum()),
        median_excess_s=float(np.median(excess)), period=_period(found, float(np.median(covers))),
    )  # fmt: skip


def _period(numbers: Sequence[int], grain: float) -> int | None:
    """Steps between spikes where at least three in four gaps are whole multiples of the usual one."""
    gaps = np.diff(np.array(numbers, dtype=float))
    gaps = gaps[gaps > 0]
    if len(gaps) < 2:
        return None
    usual = float(np.median(gaps))
    off = np.abs(gaps / usual - np.round(gaps / usual)) * usual
    regular = float(np.mean(off <= max(0.5 * (grain - 1), 0.02 * usual)))
    return round(usual) if regular >= 0.75 and usual > grain else None


def _outside(steps: Sequence[StepLine], times: Floats, covers: Floats) -> Outside | None:
    stamps = [step.at_s for step in steps]
    if len(steps) < 3 or any(stamp is None for stamp in stamps):
        return None
    numbers = [step.number for step in steps]
    if any(b <= a for a, b in pairwise(numbers)):
        return None
    wall = float((stamps[-1] or 0.0) - (stamps[0] or 0.0))
    inside = times[1:] * covers[1:]
    if wall < _SHORTEST_WALL_S:
        return None
    each = np.diff(np.array(stamps, dtype=float)) - inside
    at = int(np.argmax(each))
    total, longest = max(wall - float(inside.sum()), 0.0), float(each[at])
    return Outside(
        mean_s=total / float(covers[1:].sum()), longest_s=longest, longest_before=numbers[at + 1],
        rest_s=max(total - longest, 0.0) / float(covers[1:].sum()),
    )  # fmt: skip


def rank_spread(log: Log, settings: Mapping[str, Any]) -> dict[int, float]:
    """Median step time by rank, where several ranks wrote."""
    out = {}
    for rank, steps in log.rank_steps.items():
        times, _ = times_of(steps, settings)
        if len(times):
            out[rank] = median(times[_warmup(times) :].tolist())
    return out
