"""Failures, energy and money against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steptime.cost import energy, failures, money


def test_rates_add_up() -> None:
    # 16,384 devices at 80,000 h and 1,024 switches at 40,000 h: 0.2048 + 0.0256 failures per hour.
    assert failures.joined_mtbf_s([16384, 1024], [8e4, 4e4]) == pytest.approx(1 / 0.2304)


def test_a_checkpoint_is_bound_by_nodes_or_by_the_store() -> None:
    assert failures.checkpoint_write_s(1e12, 10, 1e9, 5e10) == 100.0
    assert failures.checkpoint_write_s(1e12, 100, 1e9, 5e10) == 20.0


def test_intervals_of_daly_1_paper() -> None:
    # Daly (2006), figures 3 and 5: M = 24 h, delta = 5 min: 117 min; M = 15 min, delta = 5 min: 9.1 min.
    assert failures.daly_interval_s(5.0, 24 * 60.0) == pytest.approx(117, abs=0.5)
    assert failures.daly_interval_s(5.0, 15.0) == pytest.approx(9.1, abs=0.05)
    assert failures.best_interval_s(5.0, 24 * 60.0) == pytest.approx(117, abs=0.5)
    assert failures.best_interval_s(5.0, 15.0) == pytest.approx(9.1, abs=0.1)


def test_the_exact_interval_is_where_the_cost_is_least() -> None:
    for stall, mtbf in ((1.0, 1e5), (60.0, 3600.0), (500.0, 600.0), (3e4, 600.0)):
        best = failures.best_interval_s(stall, mtbf)
        here = failures.stretch(best, stall, 0.0, 0.0, mtbf)
        for factor in (0.9, 1.1):
            assert failures.stretch(best * factor, stall, 0.0, 0.0, mtbf) > here
    many = failures.best_interval_s(np.array([1.0, 60.0]), np.array([1e5, 3600.0]))
    assert many == pytest.approx([failures.best_interval_s(1.0, 1e5), failures.best_interval_s(60.0, 3600.0)])


def test_one_segment_by_hand() -> None:
    # M = 100, P = 100, no restart: e - 1 means; a lag of 50 and a restart of 50 multiply by e.
    assert failures.segment_s(90.0, 10.0, 0.0, 0.0, 100.0) == pytest.approx(100 * (math.e - 1))
    assert failures.segment_s(90.0, 10.0, 50.0, 50.0, 100.0) == pytest.approx(100 * math.e * (math.e - 1))


def test_erlang_by_hand() -> None:
    # a = 2, S = 2: (4/2) / (1 + 2 + 4/2) = 0.4, then a third of a repair.
    assert failures.spare_wait_s(50.0, 100.0, 2) == pytest.approx(0.4 * 100 / 3)


def test_energy_and_money_by_hand() -> None:
    # 84 + 616 x (0.25 x 0.8 + 0.8 x 0.4 + 0.45 x 0.2 + 0.15 x 0.2) = 84 + 616 x 0.64
    assert energy.device_power_W(84.0, 700.0, 0.8, 0.4, 0.2, 0.2) == pytest.approx(84 + 616 * 0.64)
    joules = energy.site_energy_J(8, 500.0 * 3600, 0.0, 84.0, 200.0, 3600.0, 1.2)
    assert joules / energy.KWH_J == pytest.approx(1.2 * 8 * 0.7)
    assert energy.carbon_kg(joules, 0.5) == pytest.approx(1.2 * 8 * 0.35)
    assert money.run_cost(8, 2.0, 3600.0, joules, 0.1) == pytest.approx(16.672)
