"""The 90 % band of a step time, and what makes it wide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from steptime.estimate.evaluate import PARTS, Evaluation, Works
from steptime.estimate.stack import stacked
from steptime.estimate.stages import Passes
from steptime.estimate.step import compose
from steptime.estimate.work import NUMBERS, Pass, PhaseWork, pass_of, phase_work
from steptime.num import Num, taken
from steptime.plan.framework import BUSY, PARAMETERS, Framework, Spread, from_fitted_scale, to_fitted_scale

K = TypeVar("K")
DEVICE = "device"
"""Name of the doubt about a device's own factor."""
WIDEST = 100.0
"""Logarithm of the widest band over the step time; a file may hold doubts whose band is no number."""
NOISE = "noise"
"""Name of what remains of runs that are known exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBand:
    """Where nine of ten measured steps lie."""

    low_s: float
    high_s: float
    shares: Mapping[str, float]
    """Share of the variance by what is in doubt, largest first."""


def band_of(e: Evaluation) -> StepBand | None:
    r"""Band around the step time of one plan; None for a framework without residuals.

    $$\sigma^2 = \sum_k \left(\ln \frac{T(\theta_k + \sigma_k)}{T}\right)^2 + \sigma_n^2, \qquad
      \left[T e^{q_{5} w \sigma},\ T e^{q_{95} w \sigma}\right]$$

    where $\theta_k$ are the parameters of the framework and the factor of the device, with standard deviations
    $\sigma_k$ on the scale of the fit (the logarithm; of shares the logit), $\sigma_n$ the noise of runs that are known
    exactly (with experts $\sigma_n^2$ has a further term), $q$ the quantiles of residuals of runs whose source had no
    part in the fit, and $w$ the widening for a device that few sources have measured
    (:func:`steptime.plan.framework.widening`).

    Args:
        e: evaluation of one plan.
    """
    spread, framework = e.job.framework.spread, e.job.framework
    if spread is None:
        return None
    changes = _changes(e, framework, spread)
    noise_variance = spread.noise**2 + (0.0 if e.job.model.experts is None else spread.experts**2)
    variances = {name: change**2 for name, change in changes.items()} | {NOISE: noise_variance}
    total = sum(variances.values())
    deviation, step_s = spread.widening * math.sqrt(total), float(e.step_time_s)
    largest = sorted(variances.items(), key=lambda pair: -pair[1])
    low, high = (math.exp(min(end * deviation, WIDEST)) for end in (spread.low, spread.high))
    return StepBand(
        low_s=step_s * low, high_s=step_s * high,
        shares={name: value / total for name, value in largest},
    )  # fmt: skip


def _changes(e: Evaluation, framework: Framework, spread: Spread) -> dict[str, float]:
    """Change of the logarithm of time when each doubt moves by one standard deviation."""
    many = _doubted(framework, tuple(spread.doubts.items()), spread.device_doubt)
    logs = np.log(compose(e.inputs, _passes(e.works, many), many).total_s)
    return dict(zip((*PARAMETERS, DEVICE), (logs[:-1] - logs[-1]).tolist(), strict=True))


def _passes(works: Works, many: Framework) -> Passes:
    """Time of each part of the model under frameworks in columns, all parts at once as rows of arrays."""
    parts = [works[part] for part in PARTS]
    rows = {phase: _in_rows([phase_work(part, phase) for part in parts]) for phase in parts[0]}
    each: Any = pass_of(rows, many)
    layer, first, last = (
        Pass(**{field.name: taken(getattr(each, field.name), i) for field in fields(Pass)}) for i in range(len(PARTS))
    )
    return Passes(layer=layer, first=first, last=last)


def _in_rows(works: list[PhaseWork]) -> PhaseWork:
    """Several works as one, whose numbers are arrays of one column."""
    numbers = np.array([_NUMBERS_OF(work) for work in works]).T[:, :, None]
    links, busy = _columns([work.links_s for work in works]), _columns([work.busy_s for work in works])
    beside = stacked([work.beside for work in works], shape=(-1, 1))
    return PhaseWork(**dict(zip(NUMBERS, numbers, strict=True)), links_s=links, busy_s=busy, beside=beside)


def _columns(each: list[Mapping[K, Num]]) -> dict[K, Num]:
    """Numbers of several mappings as arrays of one column; what a mapping lacks is zero."""
    keys = dict.fromkeys(key for one in each for key in one)
    return {key: np.array([[one.get(key, 0.0)] for one in each]) for key in keys}


_NUMBERS_OF = attrgetter(*NUMBERS)


@lru_cache(maxsize=256)
def _doubted(framework: Framework, doubts: tuple[tuple[str, float], ...], device_doubt: float) -> Framework:
    """Frameworks in columns: each parameter moved by its doubt, then the device, then nothing."""
    count, by_name = len(PARAMETERS) + 2, dict(doubts)
    columns: dict[str, Any] = {}
    for i, name in enumerate(PARAMETERS):
        value = float(getattr(framework, name))
        columns[name] = np.full(count, value)
        columns[name][i] = from_fitted_scale(name, to_fitted_scale(name, value) + by_name[name])
        if name in BUSY:
            columns[name][-2] = value * math.exp(device_doubt)
    return replace(framework, **columns)
