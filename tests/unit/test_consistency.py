"""Parameter servers as played: against an event-by-event reference, and in the limits where the answer is known."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.cost.data_parallel import exposed_buckets_s, push_pull_s, push_s
from steptime.num import Array
from steptime_lab.replicas.consistency import (
    ASYNCHRONOUS,
    Cycle,
    Outage,
    Timeline,
    all_reduced,
    draw_factors,
    simulate,
)
from steptime_lab.replicas.descent import DIAMETER, descend
from suites import examples

PLAIN = Cycle(forward_s=1, between_s=0, backward_s=2, pull_s=0.1, push_s=0.1, serve_pull_s=0, serve_push_s=0)
BOUNDS = (0, 1, 3, 8, ASYNCHRONOUS)


class Queue:
    """One server that stands still while it is down."""

    def __init__(self, service_s: float, outage: Outage | None) -> None:
        self.service_s, self.free_s = service_s, 0.0
        self.outage = outage if outage is not None and outage.worker is None else None

    def finish(self, asked_s: float) -> float:
        begin = max(asked_s, self.free_s)
        if self.outage is not None:
            at, up = self.outage.at_s, self.outage.at_s + self.outage.down_s
            begin = up if at <= begin < up else begin
            end = begin + self.service_s
            self.free_s = end + self.outage.down_s if begin < at < end else end
        else:
            self.free_s = begin + self.service_s
        return self.free_s


def event_by_event(cycle: Cycle, factors: Array, bound: int, outage: Outage | None = None) -> tuple[Array, Array]:
    """When each clock pulled, and when its gradients arrived, one event at a time: plain and slow."""
    workers, clocks = factors.shape
    pulled, done = np.full(factors.shape, np.nan), np.full(factors.shape, np.nan)
    up, down = Queue(cycle.serve_push_s, outage), Queue(cycle.serve_pull_s, outage)
    lost = outage is None or outage.worker is None
    events: list[tuple[float, int, int, int]] = []
    free = [0.0] * workers
    waiting: dict[int, int] = {}

    def release() -> None:
        for p, c in list(waiting.items()):
            needed = c - bound - 1
            if needed < 0 or not np.isnan(done[:, needed]).any():
                gate = done[:, needed].max() + cycle.round_s if needed >= 0 else 0.0
                heapq.heappush(events, (max(free[p], gate), 1, p, c))
                del waiting[p]

    waiting.update(dict.fromkeys(range(workers), 0))
    release()
    ready: dict[tuple[int, int], float] = {}
    while events:
        now, kind, p, c = heapq.heappop(events)
        factor = factors[p, c]
        alone = cycle.pull_s + cycle.push_s + 2 * cycle.latency_s + cycle.compute_s * factor
        if kind == 1 and not lost and outage and p == outage.worker and now + alone > outage.at_s:
            lost, free[p], waiting[p] = True, max(now, outage.at_s + outage.down_s), c
            release()
        elif kind == 1:
            pulled[p, c] = now
            come = max(now + cycle.pull_s, down.finish(now)) + cycle.latency_s
            forward = cycle.forward_s * factor
            first = now + cycle.latency_s + cycle.pull_s / cycle.pieces + forward
            ready[p, c] = max(first, come + forward / cycle.pieces) + cycle.between_s * factor
            heapq.heappush(events, (ready[p, c] + cycle.backward_s * factor / cycle.pieces, 0, p, c))
        else:
            last = ready[p, c] + cycle.backward_s * factor + cycle.push_s / cycle.pieces
            done[p, c] = free[p] = max(last, now + cycle.push_s, up.finish(now)) + cycle.latency_s
            if c + 1 < clocks:
                waiting[p] = c + 1
            release()
    return pulled, done


times = st.floats(0.0, 2.0)


@st.composite
def cases(draw: Any) -> tuple[Cycle, Array, int, Outage | None]:
    cycle = Cycle(
        forward_s=draw(st.floats(0.1, 2)), between_s=draw(times), backward_s=draw(st.floats(0.1, 2)),
        pull_s=draw(times), push_s=draw(times), serve_pull_s=draw(times), serve_push_s=draw(times),
        latency_s=draw(st.floats(0, 0.1)),
        round_s=draw(st.sampled_from((0.0, 0.3))), pieces=draw(st.sampled_from((1, 4, 32))),
    )  # fmt: skip
    workers, clocks = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    slow, seed = draw(st.sampled_from((1.0, 1.7))), draw(st.integers(0, 999))
    factors = draw_factors(workers, clocks, jitter=0.3, slow=slow, slow_workers=1, seed=seed)
    worker = draw(st.sampled_from((None, 0, workers - 1)))
    outage = Outage(at_s=draw(st.floats(0, 30)), down_s=draw(st.floats(0.1, 20)), worker=worker)
    return cycle, factors, draw(st.sampled_from((0, 1, 2, ASYNCHRONOUS))), draw(st.sampled_from((None, outage)))


@given(cases())
@settings(max_examples=examples(200))
def test_windows_play_what_single_events_play(case: tuple[Cycle, Array, int, Outage | None]) -> None:
    cycle, factors, bound, outage = case
    found = simulate(cycle, factors, bound, outage)
    pulled, done = event_by_event(cycle, factors, bound, outage)
    assert np.allclose(found.pulled_s, pulled, rtol=1e-12, atol=1e-9)
    assert np.allclose(found.done_s, done, rtol=1e-12, atol=1e-9)


def played(bound: int, cycle: Cycle = PLAIN, jitter: float = 0.2, slow: float = 1.0, workers: int = 8) -> Timeline:
    return simulate(cycle, draw_factors(workers, 120, jitter=jitter, slow=slow, slow_workers=1, seed=3), bound)


def test_without_a_difference_nobody_waits_and_all_ways_are_alike() -> None:
    for bound in BOUNDS:
        run = played(bound, jitter=0.0)
        assert run.rate_per_s() == pytest.approx(8 / 3.2)
        assert run.shares() == pytest.approx((3 / 3.2, 0.2 / 3.2, 0.0), abs=1e-12)
        assert run.clocks_behind.max() == 0


def test_a_bound_of_zero_is_bulk_synchronous() -> None:
    run = played(0)
    steps = (run.compute_s + 0.2).max(axis=0)
    assert run.gate_s == pytest.approx(np.cumsum(steps))
    assert run.clocks_behind.max() == 0 and run.waited_s[:, 1:].min(axis=0) == pytest.approx(0.0)
    reduced = all_reduced(3.0, 0.2, draw_factors(8, 120, jitter=0.2, slow=1.0, slow_workers=1, seed=3))
    assert run.gate_s == pytest.approx(reduced.gate_s)
    assert run.rate_per_s() == pytest.approx(reduced.rate_per_s())
    assert run.shares() == pytest.approx(reduced.shares(), rel=5e-3)  # which clock a wait belongs to differs


def test_a_bound_beyond_the_run_is_asynchronous() -> None:
    far, none = played(120, slow=2.0), played(ASYNCHRONOUS, slow=2.0)
    assert (far.done_s == none.done_s).all() and (none.waited_s == 0).all()
    assert none.done_s == pytest.approx(np.cumsum(none.compute_s + 0.2, axis=1))


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_more_staleness_is_never_later_and_never_above_the_bound(slow: float) -> None:
    before: Timeline | None = None
    for bound in BOUNDS:
        run = played(bound, slow=slow)
        assert run.clocks_behind.max() <= bound
        if before is not None:
            assert (run.done_s <= before.done_s + 1e-9).all()
            assert run.rate_per_s() >= before.rate_per_s() * (1 - 5e-3)
            assert run.shares()[2] <= before.shares()[2] + 1e-2
        before = run


def test_bounded_workers_go_at_the_pace_of_the_slowest_and_others_do_not() -> None:
    slow = 1.5 * 3 + 0.2
    assert played(3, jitter=0.0, slow=1.5).rate_per_s() == pytest.approx(8 / slow, rel=0.02)
    assert played(ASYNCHRONOUS, jitter=0.0, slow=1.5).rate_per_s() == pytest.approx(7 / 3.2 + 1 / slow, rel=0.02)
    assert played(3, jitter=0.0, slow=1.5).clocks_behind[:, -1].max() == 3


def test_all_at_once_take_what_push_and_pull_take() -> None:
    args = {"size_bytes": 8e9, "servers": 2, "worker_Bps": 10e9, "server_Bps": 20e9}
    lone = push_s(**args, workers=1, latency_s=0.0)
    cycle = replace(PLAIN, pull_s=0.8, push_s=0.8, serve_pull_s=0.2, serve_push_s=0.2, latency_s=0.01)
    assert lone == 0.8
    for workers in (2, 8, 32):
        run = simulate(cycle, np.ones((workers, 4)), 0)
        expected = 3.0 + push_pull_s(**args, workers=workers, latency_s=0.01)
        # Pulls that queue spread the pushes that follow, so that later clocks are no longer all at once.
        assert run.gate_s[0] <= expected * (1 + 1e-12)
        assert run.gate_s[0] >= 3.0 + push_s(**args, workers=workers, latency_s=0.01) + lone - 1e-9


def test_the_link_of_the_servers_is_the_ceiling() -> None:
    cycle = replace(PLAIN, serve_push_s=1.0)
    run = simulate(cycle, draw_factors(16, 100, jitter=0.1, slow=1.0, slow_workers=0, seed=0), ASYNCHRONOUS)
    assert run.rate_per_s() == pytest.approx(1.0, rel=0.02)


def test_what_travels_in_pieces_shows_what_buckets_show() -> None:
    for push_time, backward in ((1.0, 2.0), (4.0, 2.0)):
        cycle = replace(PLAIN, backward_s=backward, pull_s=0.0, push_s=push_time, pieces=8)
        run = simulate(cycle, np.ones((1, 2)), 0)
        shown = exposed_buckets_s(push_time / 8, 8, backward / 8, 1, 1, 1, 0.0, 0.0)
        assert run.done_s[0, 0] == pytest.approx(1.0 + backward + shown)


def test_an_all_reduce_waits_for_a_failed_worker_and_does_the_step_again() -> None:
    run = all_reduced(1.0, 0.5, np.ones((2, 4)), Outage(at_s=2.0, down_s=10.0, worker=0))
    assert run.gate_s.tolist() == [1.5, 13.5, 15.0, 16.5]


def test_who_stands_still_when_a_worker_fails() -> None:
    factors = np.ones((4, 60))
    outage = Outage(at_s=33.0, down_s=40.0, worker=1)
    counts = {}
    for bound in (0, 3, ASYNCHRONOUS):
        run = simulate(PLAIN, factors, bound, outage)
        counts[bound] = int(((run.done_s > 33.0) & (run.done_s <= 73.0)).sum())
    assert counts == {0: 3, 3: 12, ASYNCHRONOUS: 3 * 12}


def test_a_failed_server_stops_all() -> None:
    for bound in BOUNDS:
        run = simulate(replace(PLAIN, serve_push_s=0.01), np.ones((4, 30)), bound, Outage(at_s=20.0, down_s=50.0))
        assert not ((run.done_s > 20.1) & (run.done_s < 70.0)).any()


def test_draws_have_the_mean_and_spread_that_are_asked_for() -> None:
    factors = draw_factors(100, 1000, jitter=0.3, slow=2.0, slow_workers=50, seed=1)
    assert factors[:50].mean() == pytest.approx(1.0, abs=0.01) and factors[:50].std() == pytest.approx(0.3, rel=0.02)
    assert factors[50:].mean() == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize("bound", BOUNDS)
def test_stale_descent_keeps_within_the_bounds_of_the_theory(bound: int) -> None:
    found = descend(played(bound, slow=1.5))
    assert found.largest_distance <= np.sqrt(2) * DIAMETER
    assert found.final_loss < 0.05
    if bound == ASYNCHRONOUS:
        assert found.difference_bound is None and found.regret_bound is None and found.mean_difference > 0
        return
    assert found.difference_bound is not None and found.regret_bound is not None
    assert found.mean_difference <= found.difference_bound + 1e-12 and found.regret <= found.regret_bound
    assert (found.mean_difference < 1e-12) == (bound == 0)


def test_synchronous_reads_are_the_same_for_all_workers() -> None:
    factors = draw_factors(4, 50, jitter=0.4, slow=1.0, slow_workers=0, seed=5)
    by_servers, reduced = descend(simulate(PLAIN, factors, 0)), descend(all_reduced(3.0, 0.2, factors))
    assert by_servers.regret == pytest.approx(reduced.regret) and reduced.mean_difference < 1e-12
