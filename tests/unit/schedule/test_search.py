"""What is searched: zero-bubble orders for times and memory, slices of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from seconds_of import longest_wait_s, most_held

from steptime.schedule import SCHEDULES, Kind, Times
from steptime.schedule.sequence import best_slicing
from steptime.simulation.legality import check

TIMES = [
    Times(forward_s=f, input_gradient_s=i, weight_gradient_s=w, message_s=c)
    for f, i, w, c in (
        (1, 1, 1, 0), (1, 1, 1, 0.1), (18, 18, 10, 1), (14, 15, 7, 0.5), (1, 0.5, 1.5, 0), (2, 1, 1, 0.2),
    )
]  # fmt: skip
SIZES = [(2, 1), (2, 8), (3, 4), (4, 3), (4, 12), (8, 24)]


@pytest.mark.parametrize(("searched", "handmade", "limit"), [("zb-1p", "zb-h1", 1), ("zb-2p", "zb-h2", 2)])
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_never_longer_than_the_handmade_order_of_the_same_memory(
    searched: str, handmade: str, limit: int, ranks: int, count: int
) -> None:
    for times in TIMES:
        table = SCHEDULES[searched].actions(ranks, 1, count, times=times)
        other_s = longest_wait_s(SCHEDULES[handmade].actions(ranks, 1, count), times, 1.0)
        assert longest_wait_s(table, times, 1.0) <= other_s + 1e-9
        assert max(most_held(table, rank, 1.0) for rank in range(ranks)) <= limit * ranks


def test_more_memory_and_given_times_pay() -> None:
    """With messages, twice the memory waits less than its handmade order, which waits less than half the memory."""
    times = Times(forward_s=18.0, input_gradient_s=18.0, weight_gradient_s=10.0, message_s=1.0)
    waits_s = [
        longest_wait_s(SCHEDULES[name].actions(8, 1, 24, times=times), times, 1.0)
        for name in ("zb-2p", "zb-h2", "zb-1p")
    ]
    assert waits_s[0] < waits_s[1] < waits_s[2]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_memory_is_kept(limit: int) -> None:
    for ranks, count in ((4, 12), (3, 5), (6, 2)):
        table = SCHEDULES["zb-1p"].actions(ranks, 1, count, memory_limit=limit)
        check(table)
        assert max(most_held(table, rank, 1.0) for rank in range(ranks)) <= limit


def test_more_memory_never_waits_longer() -> None:
    waits_s = [longest_wait_s(SCHEDULES["zb-2p"].actions(4, 1, 16, memory_limit=n), Times(), 1.0) for n in range(1, 9)]
    assert waits_s == sorted(waits_s, reverse=True) and waits_s[-1] == 0


def test_ampnet_lets_in_no_more_than_fit() -> None:
    for limit in (1, 2, 5):
        table = SCHEDULES["ampnet"].actions(4, 1, 12, memory_limit=limit)
        check(table)
        assert most_held(table, 0, 1.0) == limit
    assert (SCHEDULES["ampnet"].actions(2, 1, 6, per_update=4).kind == Kind.UPDATE).sum() == 2


def pieces(units: int) -> list[tuple[int, ...]]:
    return [()] if not units else [(n, *rest) for n in range(1, units + 1) for rest in pieces(units - n)]


@pytest.mark.parametrize("seed", range(8))
def test_slices_against_all_slicings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units, stages = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    length, before = np.indices((units, units))
    seconds = rng.uniform(0.1, 2) + (length + 1) * (rng.uniform(0.1, 1) + rng.uniform(0, 0.3) * (before + length / 2))

    def taken_s(lengths: tuple[int, ...]) -> float:
        starts = np.cumsum((0, *lengths[:-1]))
        each = [seconds[n - 1, c] for n, c in zip(lengths, starts, strict=True)]
        return sum(each) + (stages - 1) * max(each)

    best = best_slicing(seconds, stages)
    assert best.seconds == pytest.approx(min(map(taken_s, pieces(units))))
    assert sum(best.lengths) == units and taken_s(best.lengths) == pytest.approx(best.seconds)


def test_later_slices_are_shorter_where_they_attend_to_more() -> None:
    length, before = np.indices((32, 32))
    seconds = 0.5 + (length + 1) * (1 + 0.2 * (before + length / 2))
    lengths = best_slicing(seconds, 8).lengths
    assert len(lengths) > 4 and list(lengths) == sorted(lengths, reverse=True)
    assert len(best_slicing(seconds, 1).lengths) == 1


def test_the_times_of_the_search_matter() -> None:
    ways = {tuple(SCHEDULES["zb-1p"].actions(4, 1, 8, times=each).of_rank(1)) for each in TIMES}
    assert len(ways) > 1
