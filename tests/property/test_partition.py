"""Splits of layers over stages: as good as the best of all splits, and as a mixed-integer program proves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest

from steptime import UserError
from steptime.schedule import SCHEDULES, Pipeline
from steptime.simulation.graph import Transport, graph_of
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.partition import (
    Counts,
    Items,
    Ranks,
    SplitTask,
    best_split,
    candidates,
    even_counts,
    fastest,
    neighbours,
    task_of,
)
from steptime.simulation.simulate import Durations, simulate
from steptime_lab.planners.partition_milp import proved_slowest_s
from steptime_lab.planners.placement_learning import learnt


def cases(count: int, seed: int, most: int = 12) -> Iterator[SplitTask]:
    """Equal and unequal layers and devices, with and without memory, one to three stages a rank."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        p, v = int(random.integers(1, 5)), int(random.integers(1, 4))
        n = int(random.integers(max(p * v, 2), max(p * v, most - 3) + 3))
        seconds, kept = random.integers(1, 9, n).astype(float), random.integers(1, 5, n).astype(float)
        if random.random() < 0.5:
            seconds[1:-1], kept[1:-1] = 3.0, 2.0
        speed = random.choice([0.5, 1.0, 2.0], p) if random.random() < 0.5 else np.ones(p)
        flight = np.arange(p, 0, -1.0)
        room = random.uniform(0.6, 2.5) * kept.sum() * flight.mean() / p * random.uniform(0.7, 1.3, p)
        items = Items(
            letters=tuple("E" + "t" * (n - 2) + "L"), forward_s=seconds / 4, input_gradient_s=seconds / 4,
            weight_gradient_s=seconds / 2, state_bytes=0.3 * kept, activation_bytes=kept,
        )  # fmt: skip
        ranks = Ranks(
            speed=speed, memory_bytes=np.full(p, 1e9) if random.random() < 0.3 else room + 1.0,
            fixed_bytes=np.ones(p), in_flight=flight,
        )  # fmt: skip
        yield task_of(items, ranks, np.tile(np.arange(p), v))


def all_splits(task: SplitTask) -> Iterator[Counts]:
    for cuts in combinations(range(1, task.items), task.stages - 1):
        yield tuple(np.diff([0, *cuts, task.items]).tolist())


def found_s(task: SplitTask) -> float | None:
    try:
        found = best_split(task)
    except UserError:
        return None
    assert found.exact and task.fits(found.counts) and sum(found.counts) == task.items and min(found.counts) > 0
    return task.slowest_s(found.counts)


@pytest.mark.slow
def test_the_best_split_is_that_of_all_splits() -> None:
    unfit = 0
    for task in cases(1000, 0):
        best = min((task.slowest_s(each) for each in all_splits(task) if task.fits(each)), default=None)
        unfit += best is None
        assert found_s(task) == (None if best is None else pytest.approx(best))
    assert 100 < unfit < 500


@pytest.mark.slow
def test_the_best_split_is_that_of_the_mixed_integer_program() -> None:
    for task in cases(40, 1, 14):
        least = proved_slowest_s(task)
        assert found_s(task) == (None if least is None else pytest.approx(least))


def test_the_split_that_lacks_least_is_named() -> None:
    seen = 0
    for task in cases(200, 2):
        lacks = min(float((task.by_rank(each)[1] - task.room_bytes).max()) for each in all_splits(task))
        if lacks > 1e-9:
            with pytest.raises(UserError, match="no split fits") as error:
                best_split(task)
            counts = str(error.value).split("items by stage: ")[1].split("\n")[0].split()
            held = task.by_rank([int(each) for each in counts])[1]
            assert float((held - task.room_bytes).max()) == pytest.approx(lacks)
            seen += 1
    assert seen > 20


def test_of_equally_fast_splits_the_one_with_least_work() -> None:
    one = np.ones((2, 6))
    one[1] = 4.0
    task = SplitTask(seconds=one, held_bytes=0 * one, room_bytes=np.ones(2), rank=np.arange(2))
    assert best_split(task).counts == (5, 1)
    assert best_split(SplitTask(
        seconds=np.array([[1.0, 1, 1, 5], [1, 1, 1, 5], [1, 1, 1, 5]]), held_bytes=np.zeros((3, 4)),
        room_bytes=np.ones(3), rank=np.arange(3),
    )).counts in {(1, 2, 1), (2, 1, 1)}  # fmt: skip


def test_large_irregular_interleaved_splits_are_no_worse_than_even_ones_and_say_so() -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        each = random.uniform(0.5, 1.5, 40)
        task = SplitTask(
            seconds=np.tile(each, (4, 1)), held_bytes=np.ones((4, 40)), room_bytes=np.full(4, 14.0),
            rank=np.tile(np.arange(4), 2),
        )  # fmt: skip
        found = best_split(task)
        assert not found.exact and task.fits(found.counts)
        assert each.sum() / 4 <= task.slowest_s(found.counts) <= task.slowest_s(even_counts(40, 8))


def test_more_stages_than_items_are_refused() -> None:
    one = np.ones(3)
    items = Items(
        letters=("E", "t", "L"), forward_s=one, input_gradient_s=one, weight_gradient_s=one, state_bytes=one,
        activation_bytes=one,
    )  # fmt: skip
    four = np.ones(4)
    ranks = Ranks(speed=four, memory_bytes=9 * four, fixed_bytes=four, in_flight=four)
    with pytest.raises(UserError, match="4 stages of 1 layers, embedding and head"):
        task_of(items, ranks, np.arange(4))


def played(task: SplitTask, micro_batches: int) -> tuple[list[Counts], dict[Counts, float]]:
    """Step times as they are asked for."""
    p = len(task.room_bytes)
    v = task.stages // p
    graph = graph_of(SCHEDULES["interleaved" if v > 1 else "1f1b"].actions(p, v, micro_batches), Transport())

    class Times(dict[Counts, float]):
        def __missing__(self, counts: Counts) -> float:
            ends = np.cumsum(counts)
            each = task.sums[0][task.rank, ends] - task.sums[0][task.rank, ends - np.asarray(counts)]
            self[counts] = simulate(graph, Durations(forward_s=each / 3, input_gradient_s=each * 2 / 3)).step_s
            return self[counts]

    return list(all_splits(task)), Times()


def lacking(task: SplitTask) -> Callable[[Counts], float]:
    return lambda each: 0.0 if task.fits(each) else 1.0


@pytest.mark.parametrize(("items", "p", "v"), [(10, 3, 1), (11, 4, 1), (10, 2, 2), (12, 3, 2)])
def test_the_fastest_split_is_near_the_fastest_of_all_when_played(items: int, p: int, v: int) -> None:
    random = np.random.default_rng(items)
    for _ in range(3):
        task = SplitTask(
            seconds=np.tile(random.uniform(0.5, 2.0, items), (p, 1)), held_bytes=np.ones((p, items)),
            room_bytes=np.full(p, items / p + 2.0), rank=np.tile(np.arange(p), v),
        )  # fmt: skip
        every, times = played(task, 2 * p)
        fitting = [each for each in every if task.fits(each)]
        starts = [best_split(task).counts, *candidates(task)]
        found = fastest(task, starts, times.__getitem__, lacking(task), 160)
        assert task.fits(found) and times[found] <= min(times[each] for each in starts)
        assert times[found] <= 1.01 * min(times[each] for each in fitting)


def test_neighbours_have_the_same_items() -> None:
    near = list(neighbours((2, 1, 3)))
    assert (1, 2, 3) in near and (1, 1, 4) in near and (3, 0, 3) not in near
    assert all(sum(each) == 6 and min(each) > 0 for each in near)


def test_a_policy_learns_to_place_layers() -> None:
    random = np.random.default_rng(3)
    task = SplitTask(
        seconds=np.tile(random.uniform(0.5, 1.5, 20), (4, 1)), held_bytes=np.ones((4, 20)),
        room_bytes=np.full(4, 7.0), rank=np.arange(4),
    )  # fmt: skip
    _, times = played(task, 8)
    first, again = (learnt(task, times.__getitem__, 40, seed=5) for _ in range(2))
    assert first.counts == again.counts and task.fits(first.counts) and sum(first.counts) == 20
    assert first.history_s[-5:].mean() < 0.9 * first.history_s[:2].mean()
    best = fastest(task, candidates(task), times.__getitem__, lacking(task), 160)
    assert times[best] <= first.seconds <= times[even_counts(20, 4)]


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("gpipe", 1), ("zb-h1", 1)):
        schedule, pipeline = SCHEDULES[name], Pipeline(ranks=4, chunks=chunks, micro_batches=8)
        run = simulate(schedule.order(pipeline), Durations(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0))
        held = memory_replay(run, Footprint(activation_bytes=1 / chunks, deferred_bytes=1 / chunks)).peak_bytes
        assert held.tolist() == [schedule.in_flight(pipeline, rank) for rank in range(4)], name
