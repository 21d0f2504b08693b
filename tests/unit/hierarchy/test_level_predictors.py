"""Predictors of the level that serves a miss, on misses that are written down."""

from __future__ import annotations

import numpy as np
import pytest

from steptime_lab.hierarchy import levels, reuse, simulate
from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.hierarchy.levels import PREDICTORS, Misses, level_table, misses_of, scored
from steptime_lab.hierarchy.traces import Shape, trace

CACHES = hierarchy("128B:full,256B:full,512B:full")


def misses(level: list[int], site: list[int] | None = None, line: list[int] | None = None, events=()) -> Misses:
    rows = np.array(list(events), dtype=np.int64).reshape(-1, 3)
    return Misses(
        accesses=len(level), line=np.array(line or range(len(level))), site=np.array(site or [0] * len(level)),
        level=np.array(level), seen=np.searchsorted(rows[:, 0], np.arange(len(level))), events=rows, hierarchy=CACHES,
    )  # fmt: skip


def test_the_last_level_of_the_instruction_is_predicted_for_each_apart() -> None:
    found = levels.last_level(misses([1, 3, 1, 3, 2, 3], site=[0, 1, 0, 1, 0, 1]))
    assert [made[0] for made in found] == [3, 3, 1, 3, 1, 3], "memory before the first; then what it had last"


def test_popular_levels_count_up_and_down_and_try_a_second_while_not_sure() -> None:
    found = levels.popular_levels(misses([3] * 12 + [1]))
    assert found[0] == (1, 2) and found[1][0] == 3 and len(found[5]) == 2
    assert found[10] == (3,), "15 + 9 is the threshold of 24: looked up alone"
    assert levels.next_level(misses([2, 2])) == [(1,), (1,)]


def test_the_location_map_follows_fills_and_evictions() -> None:
    fills = [(0, 2 * level + 1, 7) for level in (2, 1, 0)]
    leaves = [(1, 2 * 1, 7)]  # out of the second level: it lies in the third
    gone = [(2, 2 * 2, 7)]  # out of the third: in memory
    found = levels.location_map(misses([3, 1, 2, 3], line=[7] * 4, events=[*fills, *leaves, *gone]))
    assert [made[0] for made in found] == [3, 1, 2, 3]


def test_a_line_that_the_third_level_loses_stays_in_the_second() -> None:
    events = [(0, 2 * 2 + 1, 7), (0, 2 * 1 + 1, 7), (1, 2 * 2, 7)]
    assert levels.location_map(misses([3, 1, 1], line=[7] * 3, events=events))[2] == (1,)


def test_the_metadata_cache_falls_back_on_the_detector_where_its_block_is_missing() -> None:
    found = levels.metadata_cache(misses([3, 3, 3], line=[0, 1, 256 * 99]), size_bytes=64)
    assert found[0] == (1, 2) and found[1] == (3,) and len(found[2]) == 2


def test_the_bloom_filter_names_the_first_level_that_may_have_the_line() -> None:
    events = [(0, 2 * 2 + 1, 5), (1, 2 * 1 + 1, 5), (2, 2 * 1, 5), (2, 2 * 2, 5)]
    found = levels.bloom_filter(misses([3, 2, 1, 3], line=[5] * 4, events=events))
    assert [made[0] for made in found] == [3, 2, 1, 3]


def test_history_learns_a_repeating_order_that_counters_alone_do_not() -> None:
    true = [1, 2, 3] * 40
    made = [each[0] for each in levels.history(misses(true))]
    assert made[60:] == true[60:]
    assert sum(a[0] == b for a, b in zip(levels.last_level(misses(true)), true, strict=True)) < 10


@pytest.mark.quick("gather")
@pytest.mark.each("pattern", ["stream", "gather", "spmv", "transpose"])
def test_maps_know_the_levels_of_simulated_misses(pattern: str) -> None:
    shape = Shape(n=60, table=4096) if pattern == "transpose" else Shape(n=1200, table=4096)
    found = misses_of(trace(pattern, shape), hierarchy("1KiB:2,4KiB:4,16KiB:8"))
    got = {score.predictor: score for score in scored(pattern, found).scores}
    assert got["location map"].accuracy > 0.99 and got["location map"].lookups == 1
    assert got["metadata cache"].covered >= got["metadata cache"].accuracy
    assert set(got) == set(PREDICTORS)


@pytest.mark.slow
def test_the_table_has_eight_patterns_or_more_and_shares_that_add_up() -> None:
    assert len(levels.CASES) >= 8
    (row,) = level_table(hierarchy("1KiB:2,4KiB:4"), ("chase",))
    assert sum(row.served.values()) == pytest.approx(1.0) and row.misses <= row.accesses


@pytest.mark.slow
def test_arrays_as_compiled_kernels_take_them_give_what_lists_give(monkeypatch: pytest.MonkeyPatch) -> None:
    made, caches = trace("histogram", Shape(n=30_000, table=900)), hierarchy("1KiB:2,4KiB:4,16KiB:8")
    pairs = []
    for arrays in (False, True):
        for module in (simulate, reuse) if arrays else ():
            monkeypatch.setattr(module, "sequence", lambda values: values)
        found = misses_of(made, caches)
        pairs.append((found.level.tolist(), found.events.tolist(), simulate.simulate(made, caches).levels,
                      reuse.reuse(made).histogram.nonzero()[0].tolist()))  # fmt: skip
    assert pairs[0] == pairs[1]
    assert made.accesses > 2 * simulate.LOGGED, "events of several blocks"
