"""Step times that nobody measured: those of equal runs lie on one exact line in the number of micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from steptime.lab.measured.metrics import TimeOrigin
from steptime.lab.measured.ranking import job_key, plan_key
from steptime.lab.measured.run import MeasuredRun

LEAST_POINTS: Final = 3
"""Numbers of micro-batches that a line needs; fewer always lie on one."""
EXACT: Final = 1e-5
"""Largest relative distance from the line; repeated measurements differ by 1e-3 and more."""
DIGITS: Final = 5
"""Significant digits that the times need: rounding to fewer can put measured times on a line."""


def computed_rows(runs: Sequence[MeasuredRun]) -> frozenset[int]:
    r"""Places in ``runs`` of those whose step time was computed from parts, not measured.

    $$\max_i \left|\frac{a + b\,m_i}{t_i} - 1\right| < \epsilon$$

    where $t_i$ are the step times (s) of at least :data:`LEAST_POINTS` runs that are equal but for their number of
    micro-batches $m_i$, $a + b\,m$ is the line of least squares through them, and $\epsilon$ = :data:`EXACT`.

    Source: repeated measurements of one step differ by about 1 %; of the published runs with such groups, those of
    all sources but one miss their lines by 0.1 to 3 %.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        if run.time and run.time.origin is TimeOrigin.PRINTED and run.degrees and run.micro_batch:
            groups[_all_but_batch(run)].append(place)
    found: set[int] = set()
    for places in groups.values():
        if on_one_line(_step(runs[i]) for i in places):
            found.update(places)
    return frozenset(found)


def on_one_line(steps: Iterable[tuple[float, float]]) -> bool:
    """Whether step times (s) over numbers of micro-batches are too regular to have been measured.

    >>> on_one_line([(2, 0.089176), (4, 0.176234), (8, 0.350348), (16, 0.698578)])   # 2.1 ms + 43.5 ms each
    True
    >>> on_one_line([(2, 0.089176), (4, 0.176834), (8, 0.350348)])   # one of them 0.3 % off
    False
    >>> on_one_line([(2, 0.2), (4, 0.4), (8, 0.8)])   # so few digits may come from rounding
    False
    """
    counts, times = (np.array(column, float) for column in zip(*sorted(set(steps)), strict=True))
    if len(set(counts)) < LEAST_POINTS or not any(_many_digits(float(t)) for t in times):
        return False
    line = np.stack([counts, np.ones_like(counts)], axis=1) / times[:, None]
    solution = np.linalg.lstsq(line, np.ones_like(times), rcond=None)[0]
    return bool(np.abs(line @ solution - 1).max() < EXACT)


def _all_but_batch(run: MeasuredRun) -> Hashable:
    return job_key(run), plan_key(replace(run, accumulation=None)), run.notes


def _step(run: MeasuredRun) -> tuple[float, float]:
    """Number of sequences, which is that of micro-batches but for a factor, and step time (s)."""
    return run.global_batch, run.step_time_s or 0.0


def _many_digits(value: float) -> bool:
    return float(f"{value:.{DIGITS - 1}g}") != value
