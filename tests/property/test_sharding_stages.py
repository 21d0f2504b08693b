"""Dynamic programming over stages against every division of small chains."""

from __future__ import annotations

import itertools
from math import inf

import numpy as np
import pytest

from steptime.sharding.stages import SpanCosts, split


def every_division(costs, kind, devices, available):
    """The least total of all stages and choices."""
    count, best = costs[0].each_s.shape[1], inf
    for stages in range(1, len(costs) + 1):
        for cuts in itertools.combinations(range(1, count), stages - 1):
            bounds = (0, *cuts, count)
            for chosen in itertools.product(range(len(kind)), repeat=stages):
                used = np.bincount([kind[c] for c in chosen], [devices[c] for c in chosen], len(available))
                if (used <= available).all():
                    at = [(costs[stages - 1 - n], (chosen[n], bounds[n], bounds[n + 1])) for n in range(stages)]
                    total = sum(c.each_s[place] for c, place in at) + max(c.busy_s[place] for c, place in at)
                    best = min(best, total)
    return best


def random_case(seed):
    """Units, kinds and choices with seconds that depend on the place from the end; a fifth of them impossible."""
    random = np.random.default_rng(seed)
    units, kinds, choices = (int(random.integers(*each)) for each in ((1, 6), (1, 3), (1, 5)))
    kind = [0, *random.integers(0, kinds, choices - 1).tolist()]
    devices, available = random.choice([1, 2, 4], choices).tolist(), random.integers(1, 7, kinds).tolist()
    runs = np.arange(units + 1)[None, :] > np.arange(units)[:, None]
    costs = []
    for _ in range(min(units, 4)):
        legal = runs & (random.random((choices, units, units + 1)) > 0.2)
        each, busy = (np.where(legal, random.integers(1, most, legal.shape), inf) for most in (20, 40))
        costs.append(SpanCosts(each, busy))
    return costs, kind, devices, available


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_best_of_every_division_is_found_and_proved(first):
    for seed in range(first, first + 50):
        costs, kind, devices, available = random_case(seed)
        found = split(costs, kind=kind, devices=devices, available=available, gap=0.0)
        least = every_division(costs, kind, devices, available)
        assert (inf if found is None else found.total_s) == least, seed
        if found is not None:
            assert found.bound_s == pytest.approx(least)
            assert [s.first for s in found.stages[1:]] == [s.end for s in found.stages[:-1]]


def test_a_loose_gap_keeps_its_bound():
    for seed in range(100):
        costs, kind, devices, available = random_case(seed)
        found = split(costs, kind=kind, devices=devices, available=available, gap=0.3)
        if found is not None:
            least = every_division(costs, kind, devices, available)
            assert found.bound_s <= least + 1e-9
            assert found.total_s * (1 - 0.3) <= found.bound_s + 1e-9


def test_only_allowed_numbers_of_stages_are_made():
    each = np.array([[[inf, 1.0, 2.0, 3.0], [inf, inf, 1.0, 2.0], [inf, inf, inf, 1.0]]])
    costs = [SpanCosts(each, 4 * each)] * 3
    for count in (1, 2, 3):
        found = split(costs, kind=[0], devices=[2], available=[6], counts=[count])
        assert len(found.stages) == count
    assert split(costs, kind=[0], devices=[2], available=[5], counts=[3]) is None
