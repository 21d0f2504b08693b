"""Exact simulation of caches of several levels, access by access."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime_lab.hierarchy import kernels
from steptime_lab.hierarchy.compiled import refuse_long, sequence
from steptime_lab.hierarchy.geometry import Hierarchy
from steptime_lab.hierarchy.traces import Block, Trace

MOST_COMPARED: Final = 1e11
"""Largest number of comparisons of a line with a way in a simulation: about a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCounts:
    """Hits, misses and write-backs of one level."""

    name: str
    hits: int
    """Loads and processor stores that found their line; below the first level loads alone."""
    misses: int
    write_back_hits: int
    """Lines written back from the level above that this level held."""
    write_back_misses: int
    """Lines written back from the level above that this level had evicted and fetched again."""
    write_backs: int
    """Dirty lines written to the level below."""
    invalidated: int
    """Lines invalidated by an inclusive level below."""

    @property
    def accesses(self) -> int:
        """Loads and stores that reached the level."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Share of accesses that hit; 1 without accesses."""
        return self.hits / self.accesses if self.accesses else 1.0

    @property
    def fetched(self) -> int:
        """Lines fetched from the level below."""
        return self.misses + self.write_back_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Result of simulating a trace."""

    accesses: int
    line_bytes: int
    levels: tuple[LevelCounts, ...]
    served: Array
    """Accesses of each instruction (row) that each level and memory (column) served."""

    @property
    def read_bytes(self) -> int:
        """Traffic from memory."""
        return self.levels[-1].fetched * self.line_bytes

    @property
    def written_bytes(self) -> int:
        """Traffic to memory; lines that are dirty at the end are not written back."""
        return self.levels[-1].write_backs * self.line_bytes

    def traffic_bytes(self, level: int) -> int:
        """Bytes between a level (0 is the first) and the one below, in both directions."""
        counts = self.levels[level]
        return (counts.fetched + counts.write_backs) * self.line_bytes


def simulate(trace: Trace, hierarchy: Hierarchy) -> Simulated:
    """Play a trace through empty caches.

    Raises:
        UserError: the trace is too long to be interpreted, and numba is not installed.

    >>> from steptime_lab.hierarchy.geometry import hierarchy
    >>> from steptime_lab.hierarchy.traces import Shape, trace
    >>> done = simulate(trace("stream", Shape(n=1024, passes=1)), hierarchy("4KiB:4"))
    >>> done.levels[0].misses, done.levels[0].write_backs
    (384, 96)
    """
    *_, counts = deque(played(trace, hierarchy), maxlen=1).pop()
    split = len(hierarchy.caches) * kernels.COUNTED
    return Simulated(
        accesses=trace.accesses,
        line_bytes=hierarchy.line_bytes,
        levels=level_counts(hierarchy, np.asarray(counts[:split])),
        served=np.asarray(counts[split:]).reshape(len(trace.sites), -1),
    )


def level_counts(hierarchy: Hierarchy, counts: Array) -> tuple[LevelCounts, ...]:
    """Counts of a kernel by level and name."""
    rows = counts.reshape(len(hierarchy.caches), kernels.COUNTED)
    names = ("hits", "misses", "write_back_hits", "write_back_misses", "write_backs", "invalidated")
    return tuple(
        LevelCounts(name=name, **{key: int(row[i]) for i, key in enumerate(names)})
        for name, row in zip(hierarchy.names, rows, strict=False)
    )


EVENTS_PER_ACCESS = 4 * 6
"""Largest number of fills and evictions of one access, for six levels with their write-backs."""
LOGGED = 1 << 15
"""Accesses of a block whose events are logged."""


def played(trace: Trace, hierarchy: Hierarchy, *, log: bool = False) -> Iterator[tuple[Block, Array, Array, Any]]:
    """Play a trace block by block: yields the block, the level that served each access, events, and counts up to here.

    Events, which are fills and evictions, are rows of ordinal of the access, twice the level plus one for a fill, line.
    Without `log` the levels and the events are empty.

    Raises:
        UserError: the trace is too long to be interpreted, or needs too many comparisons of lines with ways.
    """
    refuse_long(trace.accesses)
    ways = max(cache.ways for cache in hierarchy.caches)
    if trace.accesses * ways > MOST_COMPARED:
        raise UserError(
            f"{trace.accesses:,} accesses of {ways:,} ways each are up to {trace.accesses * ways:.1e} comparisons; at "
            f"most {MOST_COMPARED:.0e}",
            hint="fewer ways (16 behave nearly as a full cache), a smaller cache, or a smaller problem",
        )
    levels = len(hierarchy.caches)
    geometry, tags = sequence(hierarchy.geometry()), sequence(hierarchy.empty())
    counts = sequence(np.zeros(levels * kernels.COUNTED + len(trace.sites) * (levels + 1), dtype=np.int64))
    stack = sequence(np.zeros(kernels.DEEPEST, dtype=np.int64))
    room = 2 + kernels.EVENT * EVENTS_PER_ACCESS * LOGGED if log else 2
    events = sequence(np.zeros(room, dtype=np.int64))
    for whole in trace.blocks():
        for block in _parts(whole, LOGGED) if log else (whole,):
            addresses, kinds = block
            served = sequence(np.zeros(len(addresses) if log else 0, dtype=np.int64))
            events[0] = 2
            kernels.simulate_block(sequence(addresses), sequence(kinds), geometry, tags, counts, served, events, stack)
            logged = np.array(events[2 : events[0]], dtype=np.int64).reshape(-1, kernels.EVENT)
            yield block, np.asarray(served), logged, counts


def _parts(block: Block, size: int) -> Iterator[Block]:
    for start in range(0, len(block[0]), size):
        yield tuple(column[start : start + size] for column in block)  # type: ignore[misc]
