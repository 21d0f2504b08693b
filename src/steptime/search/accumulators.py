"""Accumulators over many candidates: the best ones, and the Pareto front of two numbers to minimise."""

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
        """Largest value that can still enter."""
        return float(self.values[-1]) if len(self.values) == self.count else np.inf

    def add(self, values: Array, configuration: Array, placement: Array) -> None:
        """Offers a block of candidates, in any order."""
        near = np.flatnonzero(values <= self.threshold)
        if len(near) > 4 * self.count:
            bound = np.partition(values[near], self.count - 1)[self.count - 1]
            near = near[values[near] <= bound]
        if not len(near):
            return
        merged = np.concatenate([self.values, values[near]])
        ids = np.concatenate([self.ids, np.stack([configuration[near], placement[near]], axis=1)])
        order = np.lexsort((ids[:, 1], ids[:, 0], merged))[: self.count]
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


def telling_points(time_s: Array, memory_bytes: Array, most: int) -> list[int]:
    r"""Indices of at most ``most`` points of a front (at least two) that represent it best; both ends are kept.

    Each omitted point is represented by the fastest chosen point that needs no more memory. The choice minimises

    $$\sum_i (\log m_{c(i)} - \log m_i)(\log t_{i+1} - \log t_i)$$

    with $t$ = `time_s` (s) ascending, $m$ = `memory_bytes` (B) descending, and $c(i)$ the last point chosen up to $i$:
    the area between the staircase of the chosen points and that of all.

    >>> telling_points(np.array([4.50, 4.51, 4.8, 5.4, 8.9]), np.array([176.0, 52.0, 50.0, 46.0, 28.0]), 3)
    [0, 1, 4]
    """
    count = len(time_s)
    if count <= most:
        return list(range(count))
    width, height = np.diff(np.log(time_s)), np.log(memory_bytes)
    untold = np.full((count, count), np.inf)  # between one chosen point and the next
    for i in range(count - 1):
        untold[i, i + 1 :] = np.cumsum((height[i] - height[i:-1]) * width[i:])
    area, before = untold[0], []
    for _ in range(most - 2):
        through = area[:, None] + untold
        before.append(np.argmin(through, axis=0))
        area = np.min(through, axis=0)
    chosen = [count - 1]
    for step in reversed(before):
        chosen.append(int(step[chosen[-1]]))
    return [0, *reversed(chosen)]
