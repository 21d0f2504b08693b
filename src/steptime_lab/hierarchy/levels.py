"""Predictors of the level that serves a load after a miss of the first level, and their scores on traces.

A prediction is made when the first level misses, from the accesses up to then: a level to look up at once, or a few in
parallel. The true level comes from the simulated caches.

Source: M. Jalili and M. Erez, "Reducing load latency with cache level prediction", HPCA 2022 (arXiv 2103.14808):
location map, metadata cache, popular-levels detector. Storage and thresholds are choices of this program: the paper's
could not be read. Miss maps: G. Loh and M. Hill, MICRO 2011; two-bit counters with history: S. McFarling, 1993.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from steptime.num import Array
from steptime_lab.hierarchy.geometry import Hierarchy, hierarchy
from steptime_lab.hierarchy.simulate import played
from steptime_lab.hierarchy.traces import Shape, Trace, trace

LINES_PER_BLOCK: Final = 256
"""Lines in one block of the location map: 2 bits a line in 64 bytes."""
BLOCK_BYTES: Final = 64
METADATA_BYTES: Final = 2048
"""Size of the metadata cache."""
POPULAR_MOST: Final = 31
"""Largest value of a counter of the popular-levels detector."""
POPULAR_SURE: Final = 24
"""The most popular level is looked up alone where its counter has at least this value."""
HISTORY: Final = 6
"""Past hits and misses of a level that select a two-bit counter."""
BLOOM_COUNTERS: Final = 8
"""Counters of a Bloom filter per line of its cache."""
BLOOM_HASHES: Final = (0x9E3779B1, 0x85EBCA77)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Accesses that the first level missed, and all fills and evictions of the levels."""

    accesses: int
    line: Array
    site: Array
    level: Array
    """Level that served each miss: 1 is the second cache, the number of caches is memory."""
    seen: Array
    """Number of events before each miss."""
    events: Array
    """Rows of ordinal, twice the level plus one for a fill, line."""
    hierarchy: Hierarchy

    @property
    def memory(self) -> int:
        """The level that stands for memory."""
        return len(self.hierarchy.caches)


Predictions: TypeAlias = list[tuple[int, ...]]
"""Levels to look up for each miss, the likeliest first."""


def misses_of(trace: Trace, hierarchy: Hierarchy) -> Misses:
    """Misses of the first level when a trace is played, with all fills and evictions."""
    parts, logs, ordinal, shift = [], [], 0, hierarchy.line_bytes.bit_length() - 1
    for (addresses, kinds), served, events, _ in played(trace, hierarchy, log=True):
        missed = np.flatnonzero(served)
        parts.append(np.stack([missed + ordinal, addresses[missed] >> shift, kinds[missed] >> 1, served[missed]]))
        logs.append(events)
        ordinal += len(addresses)
    when, line, site, level = np.concatenate(parts, axis=1)
    events = np.concatenate(logs)
    seen = np.searchsorted(events[:, 0], when)
    return Misses(accesses=ordinal, line=line, site=site, level=level, seen=seen, events=events, hierarchy=hierarchy)


def _located(m: Misses) -> list[int]:
    """Level below the first that holds the line at each miss, by a location map of all lines."""
    memory, out, at = m.memory, [], 0
    places: dict[int, int] = {}
    events, seen = m.events[:, 1:].tolist(), m.seen.tolist()
    for line, upto in zip(m.line.tolist(), seen, strict=True):
        while at < upto:
            kind, moved = events[at]
            at += 1
            level = kind >> 1
            if level == 0:
                continue
            if kind & 1:
                places[moved] = min(places.get(moved, memory), level)
            elif places.get(moved) == level:
                places[moved] = level + 1
        out.append(places.get(line, memory))
    return out


def location_map(m: Misses) -> Predictions:
    """Two bits for every line of memory, kept up to date by fills and evictions below the first level."""
    return [(level,) for level in _located(m)]


def next_level(m: Misses) -> Predictions:
    """Always the second level: a hierarchy without prediction looks it up first."""
    return [(1,)] * len(m.line)


def popular_levels(m: Misses) -> Predictions:
    """One counter a level: the serving level's goes up, the others down; below a threshold two levels are looked up."""
    counters, out = _Popular(m.memory), []
    for level in m.level.tolist():
        out.append(counters.levels())
        counters.learn(level)
    return out


class _Popular:
    """Counters of the popular-levels detector."""

    def __init__(self, memory: int) -> None:
        self.counters = [POPULAR_MOST // 2] * memory

    def levels(self) -> tuple[int, ...]:
        order = sorted(range(len(self.counters)), key=lambda place: (-self.counters[place], place))
        return tuple(place + 1 for place in order[: 1 if self.counters[order[0]] >= POPULAR_SURE else 2])

    def learn(self, level: int) -> None:
        self.counters = [
            min(count + 1, POPULAR_MOST) if place + 1 == level else max(count - 1, 0)
            for place, count in enumerate(self.counters)
        ]


def last_level(m: Misses) -> Predictions:
    """The level that served the last miss of the same instruction."""
    last: dict[int, int] = {}
    out: Predictions = []
    for site, level in zip(m.site.tolist(), m.level.tolist(), strict=True):
        out.append((last.get(site, m.memory),))
        last[site] = level
    return out


def metadata_cache(m: Misses, size_bytes: int = METADATA_BYTES) -> Predictions:
    """The location map behind a small cache of its blocks; the popular-levels detector where that cache misses."""
    blocks: OrderedDict[int, None] = OrderedDict()
    counters, out = _Popular(m.memory), []
    for line, level, place in zip(m.line.tolist(), m.level.tolist(), _located(m), strict=True):
        block = line // LINES_PER_BLOCK
        out.append((place,) if block in blocks else counters.levels())
        blocks[block] = None
        blocks.move_to_end(block)
        if len(blocks) > size_bytes // BLOCK_BYTES:
            blocks.popitem(last=False)
        counters.learn(level)
    return out


def history(m: Misses) -> Predictions:
    """Two-bit hit counters of each level, selected by the instruction and its last hits and misses in the level."""
    counters: dict[tuple[int, int, int], int] = {}
    past: dict[tuple[int, int], int] = {}
    out: Predictions = []
    for site, level in zip(m.site.tolist(), m.level.tolist(), strict=True):
        keys = {place: (place, site, past.get((place, site), 0)) for place in range(1, m.memory)}
        out.append((next((place for place, key in keys.items() if counters.get(key, 2) >= 2), m.memory),))
        for place in range(1, min(level + 1, m.memory)):
            hit, key = int(place == level), keys[place]
            counters[key] = min(max(counters.get(key, 2) + 2 * hit - 1, 0), 3)
            past[place, site] = (key[2] << 1 | hit) & ((1 << HISTORY) - 1)
    return out


def bloom_filter(m: Misses) -> Predictions:
    """A counting Bloom filter of the lines of each level: the first level whose filter may hold the line."""
    sizes = [BLOOM_COUNTERS * cache.lines for cache in m.hierarchy.caches]
    filters = [[0] * size for size in sizes]
    out: Predictions = []
    events, at = m.events[:, 1:].tolist(), 0
    for line, upto in zip(m.line.tolist(), m.seen.tolist(), strict=True):
        while at < upto:
            kind, moved = events[at]
            at += 1
            level = kind >> 1
            for factor in BLOOM_HASHES if level else ():
                filters[level][(moved * factor >> 7) % sizes[level]] += 1 if kind & 1 else -1
        possible = (
            level
            for level in range(1, m.memory)
            if all(filters[level][(line * factor >> 7) % sizes[level]] > 0 for factor in BLOOM_HASHES)
        )
        out.append((next(possible, m.memory),))
    return out


PREDICTORS: Final[Mapping[str, Callable[[Misses], Predictions]]] = {
    "next level": next_level,
    "hit/miss history": history,
    "Bloom miss map": bloom_filter,
    "popular levels": popular_levels,
    "last of instruction": last_level,
    "metadata cache": metadata_cache,
    "location map": location_map,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Accuracy of one predictor on the misses of a trace."""

    predictor: str
    accuracy: float
    """Share of misses served by the first level that was looked up."""
    covered: float
    """Share of misses served by one of the levels that were looked up."""
    lookups: float
    """Levels looked up per miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Scores of all predictors on one trace."""

    pattern: str
    accesses: int
    misses: int
    """Misses of the first level."""
    served: Mapping[str, float]
    """Share of the misses that each further level and memory served."""
    scores: tuple[Score, ...]


def scored(pattern: str, m: Misses) -> Predicted:
    """Scores of every predictor on the same misses."""
    level = m.level.tolist()
    count = max(len(level), 1)
    scores = []
    for name, predictor in PREDICTORS.items():
        made = predictor(m)
        scores.append(
            Score(
                predictor=name,
                accuracy=sum(levels[0] == true for levels, true in zip(made, level, strict=True)) / count,
                covered=sum(true in levels for levels, true in zip(made, level, strict=True)) / count,
                lookups=sum(map(len, made)) / count,
            )
        )
    names = m.hierarchy.names[1:]
    served = {name: level.count(place) / count for place, name in enumerate(names, 1)}
    return Predicted(pattern=pattern, accesses=m.accesses, misses=len(level), served=served, scores=tuple(scores))


PROTOTYPE: Final = "8KiB:8,64KiB:8,512KiB:16"
"""Caches of the table: smaller than real ones, so that short traces fill them."""
CASES: Final[Mapping[str, Shape]] = {
    "stream": Shape(n=12_000, passes=3),
    "strided": Shape(n=6_000, stride=24, passes=8),
    "stencil": Shape(n=160),
    "transpose": Shape(n=200),
    "matmul": Shape(n=56, tile=14),
    "matmul-naive": Shape(n=64),
    "gather": Shape(n=60_000, table=1 << 17),
    "zipf": Shape(n=60_000, table=1 << 17),
    "histogram": Shape(n=40_000, table=1 << 17),
    "chase": Shape(n=60_000, table=1 << 13),
    "spmv": Shape(n=1_500, table=1 << 14, passes=4),
    "spmv-skewed": Shape(n=1_500, table=1 << 15, passes=4),
}
"""Patterns of the accuracy table and their sizes."""


def level_table(caches: Hierarchy | None = None, patterns: tuple[str, ...] = ()) -> list[Predicted]:
    """Accuracy of every predictor on every pattern.

    >>> row = level_table(patterns=("chase",))[0]
    >>> {score.predictor: round(score.accuracy, 2) for score in row.scores}["location map"]
    1.0
    """
    caches = caches or hierarchy(PROTOTYPE)
    names = patterns or tuple(CASES)
    return [scored(name, misses_of(trace(name, CASES.get(name, Shape())), caches)) for name in names]
