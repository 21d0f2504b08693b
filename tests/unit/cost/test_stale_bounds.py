"""The bound of stale-synchronous descent against the sum of its proof, with the worst updates missing everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.cost.data_parallel import stale_regret, stale_step, stale_updates


def proved_sum(diameter: float, lipschitz: float, workers: int, bound: int, updates: int) -> float:
    """Lengths of gradients, distance of the start, and inner products with the longest updates that may be missing.

    Of update t, those may be missing or early that are no older than (s + 1) P before it: at most 2 s (P - 1).
    """
    steps = np.asarray(stale_step(diameter, lipschitz, workers, bound, np.arange(1, updates + 1)))
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([steps, steps[-1] * np.ones(2 * bound * workers)]))])
    first = np.maximum(np.arange(updates) - (bound + 1) * workers, 0)
    apart = sums[first + int(stale_updates(workers, bound))] - sums[first]
    return float(lipschitz**2 * (steps.sum() / 2 + apart.sum()) + diameter**2 / steps[-1])


@pytest.mark.parametrize(("workers", "bound"), [(1, 0), (8, 0), (2, 1), (8, 3), (32, 3), (16, 10), (64, 40)])
def test_the_constant_covers_the_proof_from_the_number_of_updates_that_is_given(workers: int, bound: int) -> None:
    kappa = (bound + 1) * workers
    least = int(np.ceil(2 * bound * workers / (1 - 1 / (2 * kappa)) ** 2)) + 1
    for updates in (least, 2 * least, 10 * least, 100_000):
        allowed = updates * stale_regret(0.7, 3.0, workers, bound, updates)
        assert proved_sum(0.7, 3.0, workers, bound, updates) <= allowed
    if bound and workers >= 8:  # half of the bound would be too small
        assert proved_sum(1, 1, workers, bound, 100_000) > 50_000 * stale_regret(1, 1, workers, bound, 100_000)
