"""Small random problems of shardings, and their optimum by trying every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np

from steptime.num import Array
from steptime.sharding.problem import ROUNDING, Edge, Moment, Node, Problem, memories_bytes, totals_s


def random_problem(seed: int, *, memory: bool | None = None) -> Problem:
    """Three to six nodes of one to four options; some entries are infinite, one edge is doubled."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, rng.integers(3, 7))
    whole = rng.random() < 0.5

    def numbers(*shape: int) -> Array:
        values = rng.integers(0, 6, shape).astype(float) if whole else rng.random(shape)
        return np.where(rng.random(shape) < 0.12, np.inf, values)

    nodes = []
    for at, size in enumerate(sizes):
        cost = numbers(size)
        cost[rng.integers(size)] = 1.0
        nodes.append(Node(name=f"n{at}", cost_s=cost, tags=rng.integers(0, 3, (size, 2))))
    pairs = [pair for pair in itertools.combinations(range(len(sizes)), 2) if rng.random() < 0.6]
    pairs += pairs[:1]
    edges = tuple(Edge(u=u, v=v, cost_s=numbers(sizes[u], sizes[v])) for u, v in pairs)
    limited = rng.random() < 0.6 if memory is None else memory
    if not limited:
        return Problem(nodes=tuple(nodes), edges=edges)
    moments = tuple(
        Moment(
            name=f"t{t}",
            entries=tuple((v, rng.integers(0, 9, size) * 1e9) for v, size in enumerate(sizes) if rng.random() < 0.7),
            fixed_bytes=float(rng.integers(0, 3)) * 1e9,
        )
        for t in range(rng.integers(1, 4))
    )
    limit = float(rng.integers(4, 26)) * 1e9
    return Problem(nodes=tuple(nodes), edges=edges, moments=moments, limit_bytes=limit)


def every_choice(problem: Problem) -> Array:
    return np.array(list(itertools.product(*(range(size) for size in problem.sizes))), int)


def least_total_s(problem: Problem) -> float:
    """Over all choices that fit; infinite if there is none."""
    choices = every_choice(problem)
    fits = (memories_bytes(problem, choices) <= problem.limit_bytes * (1 + ROUNDING)).all(axis=1)
    return float(totals_s(problem, choices)[fits].min(initial=math.inf))


def least_peak_bytes(problem: Problem) -> float:
    """Over all legal choices."""
    choices = every_choice(problem)
    legal = np.isfinite(totals_s(problem, choices))
    return float(memories_bytes(problem, choices)[legal].max(axis=1).min(initial=math.inf))
