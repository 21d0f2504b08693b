"""Closed forms of failures against runs that are played event by event, with fixed seeds."""

from __future__ import annotations

import math

import pytest

from failure_player import mean_wall_s, play, play_spares
from steptime.cost import failures as f
from steptime.goodput.run import Costs, stretched

GRID = [
    (mtbf, stall, lag, restart)
    for mtbf in (900.0, 3600.0, 36000.0)
    for stall in (2.0, 30.0)
    for lag in (0.0, 60.0)
    for restart in (30.0, 600.0)
]


def costs(mtbf: float, stall: float, lag: float, restart: float, lost: float = 0.0, store: float = math.inf) -> Costs:
    return Costs(
        mtbf_s=mtbf, write_s=lag, stall_s=stall, lag_s=lag, restart_s=restart, waiting_s=0.0,
        store_mtbf_s=mtbf / lost if lost else math.inf, store_interval_s=store,
    )  # fmt: skip


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(("mtbf", "stall", "lag", "restart"), GRID)
def test_expected_time(mtbf: float, stall: float, lag: float, restart: float) -> None:
    made = costs(mtbf, stall, lag, restart)
    tau = max(f.best_interval_s(stall, mtbf), lag)
    work = tau * max(round(8000 * mtbf / tau / 4), 1000)
    assert mean_wall_s(made, work, tau, 4) / work == pytest.approx(float(stretched(made, tau, mtbf)), rel=0.02)


@pytest.mark.quick("30.0-900.0")
@pytest.mark.parametrize("mtbf", [900.0, 3600.0, 36000.0])
@pytest.mark.parametrize("stall", [2.0, 30.0])
def test_young_daly_and_exact_cost_what_the_simulated_optimum_does(mtbf: float, stall: float) -> None:
    made, exact = costs(mtbf, stall, 0.0, 120.0), f.best_interval_s(stall, mtbf)
    work = 2000 * mtbf
    simulated = min(mean_wall_s(made, work, exact * factor, 2) for factor in (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0))
    for interval in (f.young_interval_s(stall, mtbf), f.daly_interval_s(stall, mtbf), exact):
        assert mean_wall_s(made, work, interval, 2) <= 1.02 * simulated
    assert mean_wall_s(made, work, 8 * exact, 2) > 1.02 * simulated, "the interval matters"


@pytest.mark.slow
def test_copies_in_memory_and_in_the_store() -> None:
    for lost in (0.02, 0.2):
        made = costs(3600.0, 2.0, 20.0, 100.0, lost, 2000.0)
        assert mean_wall_s(made, 2e7, 120.0, 4) / 2e7 == pytest.approx(float(stretched(made, 120.0, 3600.0)), rel=0.02)


def test_waits_for_spares() -> None:
    for outage, repair, spares in ((100.0, 300.0, 2), (1000.0, 300.0, 0), (100.0, 300.0, 5)):
        expected = f.spare_wait_s(outage, repair, spares)
        assert play_spares(outage, repair, spares, 100_000, 1) == pytest.approx(expected, rel=0.04)


def test_a_played_run_without_failures_is_its_work_and_stalls() -> None:
    played = play(costs(1e15, 2.0, 5.0, 60.0), 1000.0, 100.0, 0)
    assert (played.wall_s, played.failures, played.stalls_s) == (1025.0, 0, 20.0)


def test_restarts_take_their_share() -> None:
    made = costs(3600.0, 2.0, 0.0, 600.0)
    played = play(made, 2e7, 120.0, 3)
    assert played.restarting_s / played.wall_s == pytest.approx(f.restarting_share(600.0, 3600.0), rel=0.03)
    assert played.failures == pytest.approx(played.wall_s / 3600.0, rel=0.03)
