"""Whether the order of plans is predicted: runs of one model on one machine that differ in their plan alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.lab.measured.run import MeasuredRun
from steptime.num import Array

LEAST_PLANS: Final = 3
"""Plans of a group from which a best one is chosen."""
LEAST_RANKED: Final = 5
"""Plans of a group whose order says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The order of the plans of one group."""

    source_key: str
    model: str
    device: str
    gpus: int
    plans: int
    """Different plans; runs of the same plan are averaged."""
    spearman: float | None
    """Rank correlation of predicted and measured time; None where either is the same for all plans."""
    regret: float
    """Measured time of the plan predicted fastest over that of the fastest, less 1; 0: the best was picked."""
    chance: float
    """Mean regret of a plan that is drawn blindly."""
    spread: float
    """Slowest measured time over the fastest: what choosing well is worth."""


def job_key(run: MeasuredRun) -> Hashable:
    """What has to be equal for two runs to differ in their plan and their batch alone."""
    return (
        run.source_key, run.model_name, run.device, run.gpus, run.seq_len, run.precisions, run.workload,
        run.framework, run.attention, run.model.layers, _table_of(run.source),
    )  # fmt: skip


def workload_key(run: MeasuredRun) -> Hashable:
    """What has to be equal for two runs to differ in their plan alone."""
    return job_key(run), run.global_batch


def _table_of(source: str) -> str:
    """What a source names in brackets: the table, section or release."""
    found = re.search(r"\[([^\[\]]*)\]", source)
    return found.group(1) if found else ""


def plan_key(run: MeasuredRun) -> Hashable:
    """The plan of a run as far as the row states it."""
    return (
        run.degrees, run.micro_batch, run.recompute, run.sharding, run.sequence_parallel, run.schedule, run.offload,
        run.accumulation,
    )  # fmt: skip


def ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of their ranks.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: Array = ((ends - counts + 1 + ends) / 2)[inverse]
    return mean


def spearman(one: Array, other: Array) -> float | None:
    """Rank correlation; None where one side is constant.

    >>> spearman(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 30.0]))
    1.0
    """
    a, b = ranks(one), ranks(other)
    spread = float(np.std(a) * np.std(b))
    if spread == 0:
        return None
    return float(np.clip(np.mean((a - a.mean()) * (b - b.mean())) / spread, -1, 1))


def ranked_groups(runs: Sequence[MeasuredRun], measured_s: Array, predicted_s: Array) -> list[Ranked]:
    """Every group of runs that differ in their plan alone and have :data:`LEAST_PLANS` plans or more.

    Args:
        runs: the runs.
        measured_s: their step times.
        predicted_s: predicted step times; a run without one (NaN) is left out.
    """
    groups: dict[Hashable, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, run in enumerate(runs):
        if np.isfinite(measured_s[index]) and np.isfinite(predicted_s[index]):
            groups[workload_key(run)][plan_key(run)].append(index)
    out = []
    for plans in groups.values():
        if len(plans) >= LEAST_PLANS:
            first = runs[next(iter(plans.values()))[0]]
            measured, predicted = (
                np.array([float(np.mean(times[index])) for index in plans.values()])
                for times in (measured_s, predicted_s)
            )
            out.append(_ranked(first, measured, predicted))
    return out


def _ranked(run: MeasuredRun, measured: Array, predicted: Array) -> Ranked:
    best = float(measured.min())
    return Ranked(
        source_key=run.source_key, model=run.model_name, device=run.device, gpus=run.gpus, plans=len(measured),
        spearman=spearman(measured, predicted), regret=float(measured[int(predicted.argmin())]) / best - 1,
        chance=float(measured.mean()) / best - 1, spread=float(measured.max()) / best,
    )  # fmt: skip
