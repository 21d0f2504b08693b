"""Exact reuse distances of a trace, and the misses of every fully associative cache that follow from them.

The distance of an access is the number of other lines that were touched since the last access to its line. A cache of
c lines with one set and least-recently-used replacement misses the accesses at a distance of c or more, and the first
to each line.

Source: R. Mattson, J. Gecsei, D. Slutz and I. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems
Journal 9 (1970). Counting by a tree over time: B. Bennett and V. Kruskal, IBM Journal of Research and Development 19
(1975): O(N log N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Array
from steptime_lab.hierarchy.compiled import refuse_long, sequence
from steptime_lab.hierarchy.geometry import Hierarchy
from steptime_lab.hierarchy.kernels import reuse_block
from steptime_lab.hierarchy.simulate import Simulated, simulate
from steptime_lab.hierarchy.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Histogram of the reuse distances of a trace."""

    accesses: int
    line_bytes: int
    cold: int
    """First accesses of lines: the number of lines."""
    histogram: Array
    """Number of accesses at each distance (lines), from 0 on."""

    def misses(self, lines: int) -> int:
        """Misses of a fully associative cache with this number of lines."""
        return self.cold + int(self.histogram[lines:].sum())

    def miss_ratio(self, capacity_bytes: float) -> float:
        """Share of accesses that miss in a fully associative cache of this size."""
        return self.misses(int(capacity_bytes // self.line_bytes)) / max(self.accesses, 1)

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Cache sizes (bytes, powers of two lines) and miss ratios, up to the size where only first accesses miss."""
        last = int(np.flatnonzero(self.histogram)[-1]) + 1 if self.histogram.any() else 0
        sizes = [1 << p for p in range(max(last - 1, 0).bit_length() + 1)]
        return tuple((size * self.line_bytes, self.miss_ratio(size * self.line_bytes)) for size in sizes)

    def working_sets(self, drop: float = 0.02) -> tuple[tuple[int, float], ...]:
        """Sizes (bytes) at which the miss ratio drops by at least `drop`, with the miss ratio there."""
        curve, out, before = self.curve(), [], 1.0
        for size, ratio in curve:
            if before - ratio >= drop:
                out.append((size, ratio))
            before = ratio
        return tuple(out)


def reuse(trace: Trace, line_bytes: int = 64) -> Reuse:
    """Reuse distances of a trace in lines of `line_bytes`; O(N log M) time for N accesses to M lines, O(M) memory.

    Raises:
        UserError: the trace is too long to be interpreted, and numba is not installed.

    >>> from steptime_lab.hierarchy.traces import Shape, trace
    >>> found = reuse(trace("strided", Shape(n=4, stride=8, passes=3)))
    >>> found.cold, found.histogram.nonzero()[0].tolist(), found.misses(3), found.misses(4)
    (4, [3], 12, 4)
    """
    refuse_long(trace.accesses)
    shift, size = line_bytes.bit_length() - 1, 1 << 16
    keys, times = _table(size)
    head = np.zeros(3, dtype=np.int64)
    histogram, tree = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for addresses, _ in trace.blocks():
        lines, known = addresses >> shift, int(head[0])
        if 2 * (known + len(lines)) > len(keys):
            keys, times = _grown(keys, times, 4 * (known + len(lines)))
        if int(head[1]) + len(lines) + 1 > len(tree):
            times, tree = _renumbered(keys, times, known, 4 * (known + len(lines)))
            head[1] = known
        histogram = np.concatenate([histogram, np.zeros(max(0, known + len(lines) - len(histogram)), dtype=np.int64)])
        changed = [sequence(part) for part in (keys, times, tree, histogram, head)]
        reuse_block(sequence(lines), *changed)
        keys, times, tree, histogram, head = (np.asarray(part, dtype=np.int64) for part in changed)
    return Reuse(accesses=trace.accesses, line_bytes=line_bytes, cold=int(head[2]), histogram=histogram)


def _table(size: int) -> tuple[Array, Array]:
    return np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)


def _grown(keys: Array, times: Array, least: int) -> tuple[Array, Array]:
    """The hash table rebuilt with at least `least` slots."""
    size = 1 << least.bit_length()
    held = keys >= 0
    lines, when = keys[held], times[held]
    out, out_times = _table(size)
    at, left = ((lines * 2654435761) >> 8) & (size - 1), np.arange(len(lines))
    while len(left):
        place = at[left]
        free = out[place] < 0
        out[place[free]] = lines[left[free]]  # of several lines for one slot the last one gets it
        stays = out[place] == lines[left]
        out_times[place[stays]] = when[left[stays]]
        left = left[~stays]
        at[left] = (at[left] + 1) & (size - 1)
    return out, out_times


def _renumbered(keys: Array, times: Array, known: int, least: int) -> tuple[Array, Array]:
    """Last accesses renumbered from 0 on in the same order, and the Fenwick tree that counts one for each line."""
    order = np.argsort(np.where(keys >= 0, times, np.iinfo(np.int64).max), kind="stable")[:known]
    out = np.zeros_like(times)
    out[order] = np.arange(known)
    place = np.arange(max(least, 1 << 16), dtype=np.int64)
    return out, np.maximum(np.minimum(place, known) - (place - (place & -place)), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """Misses of the first level by cause; the causes add up to all misses."""

    cold: int
    """First accesses of lines."""
    capacity: int
    """Further misses of a fully associative cache of the same size."""
    conflict: int
    """Misses that the sets add; below 0 where the sets keep lines that a fully associative cache evicts."""


def causes(simulated: Simulated, distances: Reuse, hierarchy: Hierarchy) -> Causes:
    """Cold, capacity and conflict misses of the first level.

    Source: M. Hill, "Aspects of cache memory and instruction buffer performance", thesis, Berkeley 1987.
    """
    whole = distances.misses(hierarchy.caches[0].lines)
    misses = simulated.levels[0].misses
    return Causes(cold=distances.cold, capacity=whole - distances.cold, conflict=misses - whole)


def analysed(trace: Trace, hierarchy: Hierarchy) -> tuple[Simulated, Reuse, Causes]:
    """Simulation of a trace, its reuse distances, and the causes of its misses."""
    simulated, distances = simulate(trace, hierarchy), reuse(trace, hierarchy.line_bytes)
    return simulated, distances, causes(simulated, distances, hierarchy)


def rows_of(found: Reuse) -> list[dict[str, Any]]:
    """The curve as rows of size (bytes) and miss ratio."""
    return [{"capacity_bytes": size, "miss_ratio": ratio} for size, ratio in found.curve()]
