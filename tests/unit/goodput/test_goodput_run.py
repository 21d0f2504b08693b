"""A whole run: losses add up, better operations are never slower, the bill by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime import api
from steptime.errors import UserError
from steptime.goodput.operations import SPREAD, Operations, names, operations_of, published
from steptime.goodput.run import Load, costs_of, goodput_of

LOAD = Load(
    step_s=5.0, steps=1e6, devices=16384, node=8, saved_bytes=5.7e12, host_Bps=4e10, network_Bps=4e11, step_band=(4, 6)
)
OPS = published("llama3-h100")
JOB = {"gpus": 512, "global_batch": 1024, "plan": {"tp": 8, "pp": 4}, "training": {"tokens": "1T"}}


@pytest.mark.parametrize("kind", ["sync", "async", "memory"])
def test_losses_and_ideal_time_add_up(kind: str) -> None:
    ops = replace(OPS, kind=kind, evaluation_s=60.0, data=0.01, jitter=0.01)
    run = goodput_of(LOAD, ops)
    assert run.ideal_s + sum(run.losses_s.values()) == pytest.approx(run.wall_s, rel=1e-6)
    assert list(run.losses_s.values()) == sorted(run.losses_s.values(), reverse=True)
    assert run.wall_band_s[0] < run.wall_s < run.wall_band_s[1]
    assert run.effective_band[0] < run.effective_ratio < run.effective_band[1] < 1
    assert run.interval_s % LOAD.step_s == pytest.approx(0)


def test_better_operations_are_never_slower() -> None:
    slow = goodput_of(LOAD, replace(OPS, spares=0)).wall_s
    for change in ({"spares": 5}, {"restart_s": 60.0, "spares": 0}, {"store_Bps": 1e13, "node_Bps": 1e11, "spares": 0}):
        assert goodput_of(LOAD, replace(OPS, **change)).wall_s < slow
    assert goodput_of(LOAD, replace(OPS, kind="memory")).wall_s < goodput_of(LOAD, replace(OPS, kind="sync")).wall_s


def test_spread_is_that_of_the_published_runs() -> None:
    import math
    import statistics

    logs = [math.log(published(name).job_mtbf_s(1024, 8)) for name in names()]
    assert statistics.stdev(logs) == pytest.approx(SPREAD, abs=0.1)


def test_each_published_rate_is_within_the_band_of_the_others() -> None:
    import math
    import statistics

    logs = {name: math.log(published(name).job_mtbf_s(1024, 8)) for name in names()}
    for name, value in logs.items():
        others = [other for key, other in logs.items() if key != name]
        assert abs(value - statistics.mean(others)) < 1.645 * SPREAD * (1 + 1 / len(others)) ** 0.5 + 0.1, name


def test_llama_3_has_its_419_interruptions() -> None:
    assert 54 * 86400 / OPS.job_mtbf_s(16384, 8) == pytest.approx(419)


def test_a_run_that_does_not_end_is_refused() -> None:
    ops = Operations(name="x", source="x", date="2026-01-01", mtbf_s={"any": 1000.0 * 3600}, restart_s=86400.0)
    with pytest.raises(UserError, match="does not end"):
        goodput_of(replace(LOAD, devices=1_000_000), ops)


def test_a_checkpoint_is_not_begun_before_the_last_is_written() -> None:
    ops = replace(OPS, node_Bps=1e8, store_Bps=1e10)
    costs, run = costs_of(LOAD, ops), goodput_of(LOAD, ops)
    assert run.interval_s + costs.stall_s >= costs.lag_s > costs.stall_s


def test_the_bill_of_an_estimate() -> None:
    e = api.estimate("llama3-70b", "dgx-h100", **JOB, failures="default", prices="default")
    goodput, money, energy = (e.run[name] for name in ("goodput", "money", "energy"))
    paid = 512 + 8 * goodput["spares"]
    assert money["cost"] == pytest.approx(paid * goodput["wall_s"] / 3600 * 4.916)
    assert money["cost_per_million_tokens"] == pytest.approx(money["cost"] / 1e6)
    assert goodput["saved_bytes"] == pytest.approx(14 * 70.55e9, rel=0.01)
    assert energy["idle_W"] < energy["device_W"] < energy["tdp_W"]
    assert energy["kWh"] * 3.6e6 / goodput["wall_s"] == pytest.approx(energy["site_W"])
    assert money["band"][0] < money["cost"] < money["band"][1]
    plain = api.estimate("llama3-70b", "dgx-h100", **JOB)
    assert "run" not in plain.to_json() and plain.step_time_s == e.step_time_s


def test_bloom_saves_what_its_page_says() -> None:
    # BigScience's page of the 176B model: 329 GB of weights and 2.3 TB with the optimiser, in binary units.
    from steptime.goodput.bill import saved_bytes

    setting = api.calls.asked_plan("bloom-176b", "dgx-a100-80gb", gpus=384, global_batch=2048, plan={"tp": 4, "pp": 12})
    assert saved_bytes(setting.setting.job) / 2**40 == pytest.approx(2.3, rel=0.03)


def test_length_is_needed() -> None:
    job = {**JOB, "training": None}
    with pytest.raises(UserError, match="tokens"):
        api.estimate("llama3-70b", "dgx-h100", **job, failures="default")


def test_operations_are_kept() -> None:
    assert operations_of(OPS) is OPS
