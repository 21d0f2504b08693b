"""Accumulators over blocks of candidates: the K best, and the front of time and memory."""

from __future__ import annotations

import numpy as np

from steptime.num import Array


class Best:
    """The ``count`` smallest values seen, with their identities; earlier candidates win ties."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: Array = np.zeros(0)
        self.ids: Array = np.zeros((0, 2), dtype=np.int64)

    @property
    def threshold(self) -> float:
        """Values above it can't enter any more."""
        return float(self.values[-1]) if len(self.values) == self.count else np.inf

    def add(self, values: Array, configuration: Array, placement: Array) -> None:
        """Offers a block."""
        near = np.flatnonzero(values <= self.threshold)
        if len(near) > 4 * self.count:
            bound = np.partition(values[near], self.count - 1)[self.count - 1]
            near = near[values[near] <= bound]
        if not len(near):
            return
        merged = np.concatenate([self.values, values[near]])
        ids = np.concatenate([self.ids, np.stack([configuration[near], placement[near]], axis=1)])
        order = np.argsort(merged, kind="stable")[: self.count]
        self.values, self.ids = merged[order], ids[order]


def pareto_front(time_s: Array, memory_bytes: Array) -> Array:
    """Indices of the points that no other point beats in both; fastest first.

    >>> pareto_front(np.array([3.0, 1.0, 2.0]), np.array([1.0, 3.0, 3.0])).tolist()
    [1, 0]
    """
    order = np.lexsort((memory_bytes, time_s))
    memory = memory_bytes[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(memory)[:-1]])
    front: Array = order[memory < least_before]
    return front
