r"""Stochastic gradient descent with the stale parameters of a simulated run, and the bounds of theory.

The problem is small and convex: absolute deviations $f_t(x) = |a_t^\top (x - x^*)|$ with unit vectors $a_t$, so that
gradients are no longer than $L = 1$ and the least loss is 0. Step sizes follow theorem 1 of Ho
et al. (NIPS 2013; :func:`steptime.cost.data_parallel.stale_step`). The constant of its bound is derived at
:func:`steptime.cost.data_parallel.stale_regret`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.cost.data_parallel import stale_difference, stale_regret, stale_step
from steptime.num import Array
from steptime_lab.replicas.consistency import ASYNCHRONOUS, Timeline

DIMENSIONS: Final = 16
LIPSCHITZ: Final = 1.0
DIAMETER: Final = 1.0
"""$F$ of the theorem: parameters are at most sqrt(2) F from each other. The start is 1 from the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleDescent:
    """Result of descent with stale parameters, and the bounds of theory; distances are in the unit of parameters."""

    updates: int
    mean_difference: float
    """Mean distance of the parameters that workers read from those of the same updates in bulk-synchronous order."""
    largest_difference: float
    difference_bound: float | None
    """Mean bound of this distance; None without a bound on staleness."""
    regret: float
    """Mean loss above the least loss."""
    regret_bound: float | None
    final_loss: float
    """Loss of the last parameters over all data of the run."""
    largest_distance: float
    """Largest distance of parameters that workers read from the optimum; the theorem needs at most sqrt(2) F."""


def descend(run: Timeline, seed: int = 0) -> StaleDescent:
    """Descend on the small problem; each worker reads the servers' parameters at the time of its pull.

    Args:
        run: times of the pulls and of the arrival of gradients.
        seed: seed of the data.
    """
    workers, clocks = run.pulled_s.shape
    theory = min(run.bound, clocks) if run.bound < ASYNCHRONOUS else 0
    best, rows = _problem(workers * clocks, seed)
    steps = stale_step(DIAMETER, LIPSCHITZ, workers, theory, 1 + np.arange(workers * clocks).reshape(clocks, workers).T)
    reads, updates, final = _played(run, best, rows.reshape(workers, clocks, -1), np.asarray(steps))
    moved = np.cumsum(updates.sum(axis=0), axis=0)
    true = np.concatenate([np.zeros((1, DIMENSIONS)), moved[:-1]])
    apart = np.linalg.norm(reads - true, axis=-1)
    losses = np.abs(((reads - best) * rows.reshape(reads.shape)).sum(axis=-1))
    bounded = run.bound < ASYNCHRONOUS
    oldest = np.maximum(np.arange(clocks) - theory, 0)
    limit = stale_difference(np.asarray(steps)[0, oldest], LIPSCHITZ, workers, theory)
    return StaleDescent(
        updates=workers * clocks,
        mean_difference=float(apart.mean()),
        largest_difference=float(apart.max()),
        difference_bound=float(np.mean(limit)) if bounded else None,
        regret=float(losses.mean()),
        regret_bound=float(stale_regret(DIAMETER, LIPSCHITZ, workers, theory, workers * clocks)) if bounded else None,
        final_loss=float(np.abs(rows @ (final - best)).mean()),
        largest_distance=float(np.linalg.norm(reads - best, axis=-1).max()),
    )


def _problem(count: int, seed: int) -> tuple[Array, Array]:
    """The optimal parameters, of length 1, and the unit vectors of the losses."""
    draw = np.random.default_rng(seed).standard_normal((count + 1, DIMENSIONS))
    units = draw / np.linalg.norm(draw, axis=1, keepdims=True)
    return units[0], units[1:]


def _played(run: Timeline, best: Array, rows: Array, steps: Array) -> tuple[Array, Array, Array]:
    """Parameters read in each clock, the update sent, and the last parameters.

    Reads and arrivals are played in order of their times; at equal times arrivals come first.
    """
    workers, clocks = run.pulled_s.shape
    reads, updates = np.zeros((workers, clocks, DIMENSIONS)), np.zeros((workers, clocks, DIMENSIONS))
    times = np.concatenate([run.done_s.ravel(), run.pulled_s.ravel()])
    order = np.argsort(times, kind="stable")
    servers = np.zeros(DIMENSIONS)
    cells = workers * clocks
    for place in order.tolist():
        p, c = divmod(place % cells, clocks)
        if place < cells:
            servers = servers + updates[p, c]
        else:
            row = rows[p, c]
            reads[p, c] = servers
            updates[p, c] = -steps[p, c] * np.sign(row @ (servers - best)) * row
    return reads, updates, servers
