"""Equal blocks that are folded have the optimum of all blocks in which equal ones choose the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sharding_problems import every_choice, least_total_s

from steptime.num import Array
from steptime.sharding.ilp import solve
from steptime.sharding.problem import ROUNDING, Edge, Moment, Node, Problem, memories_bytes, totals_s

BLOCKS = 5
"""The first and the last have shardings of their own, those between are equal."""


class Stack:
    """Costs of a stack of blocks: two nodes each, the second of one block feeds both of the next, or itself."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = rng.integers(2, 4, 2)
        self.cost = [self.some(rng, size) for size in self.sizes]
        self.inside, self.onward, self.again = (
            self.some(rng, *self.sizes),
            self.some(rng, self.sizes[1], self.sizes[0]),
            self.some(rng, self.sizes[1], self.sizes[1]),
        )
        self.taken = [rng.integers(0, 9, (2, size)) * 1e9 for size in self.sizes]
        low, high = (sum(BLOCKS * bound(each.sum(axis=0)) for each in self.taken) for bound in (np.min, np.max))
        self.limit = math.inf if seed % 3 == 0 else low / 2 + rng.random() * (high - low / 2)

    @staticmethod
    def some(rng: np.random.Generator, *shape: int) -> Array:
        values = rng.random(shape)
        cost = np.where(rng.random(shape) < 0.1, np.inf, values)
        cost[(0,) * len(shape)] = 1.0
        return cost

    def problem(self, weights: tuple[int, ...]) -> Problem:
        """One block for each weight; a block of weight n stands for n of them, joined to each other."""
        nodes, edges, entries = [], [], [[], []]
        for at, weight in enumerate(weights):
            cost = [weight * each for each in self.cost]
            cost[1] = cost[1] + (weight - 1) * np.diagonal(self.again) if weight > 1 else cost[1]
            nodes += [Node(name=f"{at}.{n}", cost_s=each) for n, each in enumerate(cost)]
            edges.append(Edge(u=2 * at, v=2 * at + 1, cost_s=weight * self.inside))
            if weight > 1:
                edges.append(Edge(u=2 * at + 1, v=2 * at, cost_s=(weight - 1) * self.onward))
            if at:
                edges.append(Edge(u=2 * at - 1, v=2 * at, cost_s=self.onward))
                edges.append(Edge(u=2 * at - 1, v=2 * at + 1, cost_s=self.again))
            for t in range(2):
                entries[t] += [(2 * at + n, weight * self.taken[n][t]) for n in range(2)]
        moments = tuple(Moment(name=f"t{t}", entries=tuple(each)) for t, each in enumerate(entries))
        return Problem(nodes=tuple(nodes), edges=tuple(edges), moments=moments, limit_bytes=self.limit)


def unfolded(choices: Array) -> Array:
    """Choices of all blocks from those of the folded ones."""
    middle = np.tile(choices[:, 2:4], (1, BLOCKS - 2))
    return np.concatenate([choices[:, :2], middle, choices[:, 4:]], axis=1)


def test_folded_blocks_have_the_optimum_of_equal_ones() -> None:
    outcomes, dearer = set(), 0
    for seed in range(150):
        stack = Stack(seed)
        folded, whole = stack.problem((1, BLOCKS - 2, 1)), stack.problem((1,) * BLOCKS)
        small = every_choice(folded)
        large = unfolded(small)
        both = (totals_s(folded, small), totals_s(whole, large))
        assert np.allclose(*both), seed
        assert np.allclose(memories_bytes(folded, small), memories_bytes(whole, large)), seed
        fits = (memories_bytes(whole, large) <= whole.limit_bytes * (1 + ROUNDING)).all(axis=1)
        best, found = both[1][fits].min(initial=math.inf), solve(folded, gap=0.0)
        outcomes.add((folded.limited, math.isfinite(best)))
        assert found.total_s == pytest.approx(best, rel=1e-9), seed
        if seed < 12 and math.isfinite(best):
            free = least_total_s(whole)
            assert free <= found.total_s * (1 + 1e-9), seed
            dearer += free < found.total_s * (1 - 1e-9)
    assert outcomes >= {(True, True), (True, False), (False, True)} and dearer > 0
