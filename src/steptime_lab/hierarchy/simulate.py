"""Caches of several levels over a trace, and its distances of reuse: exact, access by access."""

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
"""Comparisons of a line with a way that a simulation may need: about a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCounts:
    """What one level saw."""

    name: str
    hits: int
    """Loads, and stores of the processor, that found their line; below the first level loads alone."""
    misses: int
    write_back_hits: int
    """Lines written back from the level above that it had."""
    write_back_misses: int
    """Lines written back that it had lost and fetched again."""
    write_backs: int
    """Dirty lines that it wrote to the level below."""
    invalidated: int
    """Lines that an inclusive level below took away."""

    @property
    def accesses(self) -> int:
        """Loads and stores that reached the level."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Share of them that hit; 1 where there were none."""
        return self.hits / self.accesses if self.accesses else 1.0

    @property
    def fetched(self) -> int:
        """Lines that came from the level below."""
        return self.misses + self.write_back_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A trace that went through caches."""

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
        """Traffic to memory; lines that are dirty at the end stay where they are."""
        return self.levels[-1].write_backs * self.line_bytes

    def traffic_bytes(self, level: int) -> int:
        """Bytes between a level, the first of which is 0, and the one below, both ways."""
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
"""Fills and evictions of an access at most, for six levels with what they write back."""
LOGGED = 1 << 15


def played(trace: Trace, hierarchy: Hierarchy, *, log: bool = False) -> Iterator[tuple[Block, Array, Array, Any]]:
    """A trace block by block: the block, the level that served each access, fills and evictions, counts up to here.

    Events are rows of ordinal of the access, twice the level plus one for a fill, line. Without `log` both are empty.

    Raises:
        UserError: the trace is too long to be interpreted, or an access compares with too many ways.
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
