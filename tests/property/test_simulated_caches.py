"""The simulator and the distances of reuse against plain ones on random traces, and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from reference_caches import ReferenceCaches, distances
from steptime_lab.hierarchy.geometry import Cache, Hierarchy, fully_associative, hierarchy
from steptime_lab.hierarchy.reuse import _grown, causes, reuse
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import PATTERNS, Shape, Trace, trace

SMALL = Shape(n=600, table=700, passes=2, stride=9)


def random_trace(seed: int, count: int = 1500, lines: int = 60, blocks: int = 3) -> Trace:
    """Random loads and stores with favourites, in blocks."""
    random = np.random.default_rng(seed)
    at = (random.zipf(1.3, (blocks, count)) * 7919 % lines) * 64 + random.integers(0, 64, (blocks, count))
    kinds = random.integers(0, 2, (blocks, count), dtype=np.uint8)

    def made():
        for i in range(blocks):
            yield at[i].astype(np.int64), kinds[i]

    return Trace(name="random", accesses=count * blocks, footprint_bytes=lines * 64, sites=("a",), blocks=made)


def random_caches(random: np.random.Generator, inclusive: bool) -> Hierarchy:
    """One to three levels of any sets (powers of two or not) and ways; as small as the trace is."""
    caches = [
        Cache(size_bytes=64 * int(sets) * int(ways), ways=int(ways))
        for sets, ways in zip(random.integers(1, 9, 3), random.integers(1, 5, 3), strict=True)
    ]
    return Hierarchy(caches=tuple(caches[: random.integers(1, 4)]), inclusive=inclusive)


@pytest.mark.each("inclusive", [False, True])
def test_every_count_of_every_level_is_that_of_the_reference(inclusive: bool) -> None:
    for seed in range(25):
        caches, found = random_caches(np.random.default_rng(seed), inclusive), random_trace(seed)
        reference, served = ReferenceCaches(caches), np.zeros(len(caches.caches) + 1, dtype=int)
        for addresses, writes in found.blocks():
            for address, write in zip(addresses.tolist(), writes.tolist(), strict=True):
                served[reference.access(address, bool(write))] += 1
        done = simulate(found, caches)
        ours = [
            (c.hits, c.misses, c.write_back_hits, c.write_back_misses, c.write_backs, c.invalidated)
            for c in done.levels
        ]
        assert ours == [tuple(counts.values()) for counts in reference.counts], (seed, caches)
        assert done.served.sum(axis=0).tolist() == served.tolist()


def test_inclusive_levels_have_all_lines_above() -> None:
    found = random_trace(3)
    reference = ReferenceCaches(hierarchy("256B:2,512B:2", inclusive=True))
    for addresses, writes in found.blocks():
        for address, write in zip(addresses.tolist(), writes.tolist(), strict=True):
            reference.access(address, bool(write))
            upper, lower = ({line for ways in level for line in ways} for level in reference.sets)
            assert upper <= lower


def test_distances_are_those_of_a_list_of_recent_lines() -> None:
    for seed in range(8):
        made = random_trace(seed, lines=40 + 50 * seed)
        lines = [line for addresses, _ in made.blocks() for line in (addresses // 64).tolist()]
        cold, counts = distances(lines)
        found = reuse(made)
        assert found.cold == cold
        assert {d: int(n) for d, n in enumerate(found.histogram) if n} == counts


@pytest.mark.each("pattern", list(PATTERNS))
def test_caches_of_one_set_miss_what_the_distances_say(pattern: str) -> None:
    shape = Shape(n=20, tile=6) if pattern in ("stencil", "transpose", "matmul", "matmul-naive") else SMALL
    made = trace(pattern, shape)
    found = reuse(made)
    assert found.cold + found.histogram.sum() == made.accesses
    for lines in (1, 7, 32):
        done = simulate(made, hierarchy(f"{lines * 64}B:full"))
        assert done.levels[0].misses == found.misses(lines)
        assert found.miss_ratio(lines * 64) == found.misses(lines) / made.accesses


@pytest.mark.each("pattern", list(PATTERNS))
def test_traces_are_as_long_as_they_say_and_the_same_when_made_again(pattern: str) -> None:
    shape = Shape(n=30, tile=7, leading=33) if pattern.startswith("matmul") else Shape(n=50, table=99, passes=3)
    made = trace(pattern, shape)
    first, second = ([np.concatenate(column) for column in zip(*made.blocks(), strict=True)] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert len(first[0]) == made.accesses and first[0].min() >= 0 and first[0].max() < made.footprint_bytes
    assert set(np.unique(first[1] >> 1)) == set(range(len(made.sites)))


def test_causes_add_up_and_one_set_has_no_conflicts() -> None:
    for caches in (hierarchy("4KiB:2"), fully_associative(Cache(size_bytes=4096, ways=2))):
        made = trace("matmul", Shape(n=32, packed=False))
        done, found = simulate(made, caches), reuse(made)
        why = causes(done, found, caches)
        assert why.cold + why.capacity + why.conflict == done.levels[0].misses
        assert (why.conflict == 0) == (caches.sets == (1,))


def test_a_hash_table_that_grows_keeps_every_line() -> None:
    random = np.random.default_rng(0)
    keys, times = np.full(1 << 6, -1, dtype=np.int64), np.zeros(1 << 6, dtype=np.int64)
    lines = random.choice(10**6, 60, replace=False)
    keys[:60], times[:60] = lines, np.arange(60)
    grown, when = _grown(keys, times, 200)
    assert len(grown) == 256 and dict(zip(grown[grown >= 0], when[grown >= 0], strict=True)) == dict(
        zip(lines, range(60), strict=True)
    )
    for line in lines.tolist():  # found by probing from its place on, without a gap
        slot = ((line * 2654435761) >> 8) & 255
        while grown[slot] != line:
            assert grown[slot] >= 0
            slot = (slot + 1) & 255
