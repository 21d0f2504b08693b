"""Allocated, reserved and used memory, the chance of running out of it, and the fit of what lies between."""

from __future__ import annotations

import math
import tomllib

import numpy as np
import pytest

from memory_fit import (
    MemoryPoint,
    as_toml,
    deviation_of,
    device_line,
    errors_of,
    fitted_constants,
    reliability,
    reserved_slack,
    slack_of,
)
from steptime.api.models import load_model
from steptime.estimate.memory_definitions import (
    DEFINITIONS,
    MemoryConstants,
    communicators,
    constants_of,
    exceeding,
    memory_by_definition,
    memory_constants,
    oom_probability,
)
from steptime.estimate.single import Setting, estimate_plan
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED
from steptime_lab.published.rows import PUBLISHED

KNOWN = MemoryConstants(
    slack=0.1, own={"old": {"slack": 0.2}}, context_bytes=1e9, communicator_bytes=5e8,
    deviation={"allocated": 0.02, "reserved": 0.05, "device": 0.1}, source="made up",
)  # fmt: skip


def points(count: int = 400, framework: str = "old", definition: str = "device") -> list[MemoryPoint]:
    """Points that the known constants explain but for noise of their own spread."""
    noise = np.random.default_rng(0)
    out = []
    for i in range(count):
        allocated, groups = float(noise.uniform(1e10, 7e10)), float(i % 5)
        exact = KNOWN.defined(allocated, groups, framework)[definition]
        measured = exact * math.exp(noise.normal(0, KNOWN.deviation[definition]))
        out.append(MemoryPoint(source=f"s{i % 3}", framework=framework, definition=definition,
                               allocated_bytes=allocated, communicators=groups, measured_bytes=measured))  # fmt: skip
    return out


def test_definitions_build_on_each_other():
    assert KNOWN.defined(1e10, 3, "any") == pytest.approx({"allocated": 1e10, "reserved": 1.1e10, "device": 1.35e10})
    assert KNOWN.defined(1e10, 0, "old")["device"] == pytest.approx(1.3e10)


def test_groups_with_buffers():
    """World, data and stages with two neighbours; tensor ranks inside a node and two nodes need none."""
    assert communicators(Plans(tp=8, pp=12, dp=4, in_tp=8)) == 1 + 2 + 2
    assert communicators(Plans(tp=8, in_tp=8)) == 0 == communicators(Plans(dp=16, in_dp=8))
    assert communicators(Plans(dp=64, in_dp=8)) == 2
    assert np.array_equal(communicators(Plans(dp=np.array([8, 64]), in_dp=8)), [0, 2])


def test_chance_of_running_out():
    assert exceeding(80e9, 80e9, 0.05) == 0.5
    assert exceeding(math.exp(-0.1), 1.0, 0.1) == pytest.approx(0.158655, abs=1e-6)
    assert exceeding(math.exp(0.1), 1.0, 0.1) == pytest.approx(0.841345, abs=1e-6)
    assert exceeding(0.0, 1.0, 0.1) == 0.0


def job(name: str = "llama3-8b") -> Job:
    return Job(model=load_model(name), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
               optimizer=OPTIMIZERS["adam"])  # fmt: skip


def test_an_estimate_tells_all_definitions_and_the_chance():
    setting = Setting(method=CORRECTED, job=job(), cluster=load_cluster("dgx-h100"))
    found = [estimate_plan(setting, CORRECTED.strategies["1d"], Plans(dp=8, in_dp=8, zero=z, recompute=r))
             for z, r in ((0, 0), (1, 0), (3, 2))]  # fmt: skip
    for e in found:
        assert tuple(e.memory_by_definition) == DEFINITIONS
        assert e.memory_by_definition["allocated"] == e.peak_memory_bytes == pytest.approx(e.memory.total)
        assert list(e.memory_by_definition.values()) == sorted(e.memory_by_definition.values())
        assert e.plan["fullest_phase"] in ("backward", "loss")
    assert [e.feasible for e in found] == [False, True, True]
    chances = [e.oom_probability for e in found]
    assert chances[0] > 0.99 and chances[2] < 1e-6 and chances == sorted(chances, reverse=True)


def test_a_reproduced_paper_knows_no_chance():
    cluster = load_cluster("published-b200-nvs8")
    e = estimate_plan(Setting(method=PUBLISHED, job=job("gpt3-175b"), cluster=cluster), PUBLISHED.strategies["1d"],
                      Plans(dp=8, in_dp=8))  # fmt: skip
    assert (e.oom_probability, e.feasible, e.memory_by_definition) == (1.0, False, {})
    half = Setting(method=PUBLISHED, job=job(), cluster=cluster)
    fits = estimate_plan(half, PUBLISHED.strategies["1d"], Plans(dp=8, in_dp=8, zero=0))
    assert fits.peak_memory_bytes > 0.5 * fits.memory_capacity_bytes
    assert (fits.oom_probability, fits.feasible) == (0.0, True)


def test_slack_of_pairs():
    assert slack_of([(50.0, 55.0), (80.0, 88.0)]) == pytest.approx(0.1)
    assert slack_of([(1.0, 1.0), (1.0, 1.21)]) == pytest.approx(0.1)


def test_frameworks_with_enough_runs_have_their_own_reserved_slack():
    runs = points(100, framework="new", definition="reserved")
    assert reserved_slack(runs) == pytest.approx(0.1, abs=0.02)
    few, enough = fitted_constants(runs[:9], [(1.0, 1.3)], 1e9, ""), fitted_constants(runs[:10], [(1.0, 1.3)], 1e9, "")
    assert few.own == {} and set(enough.own) == {"new"}


def test_reserved_slack_is_that_of_most_runs_and_never_negative():
    def ran(ratio: float) -> MemoryPoint:
        return MemoryPoint(source="s", framework="f", definition="reserved", allocated_bytes=1e10, communicators=0.0,
                           measured_bytes=ratio * 1e10)  # fmt: skip

    assert reserved_slack([ran(1.4), ran(1.02), ran(1.02)]) == pytest.approx(0.02)
    assert reserved_slack([ran(0.9)]) == 0.0


def test_the_line_of_used_memory_is_found():
    slack, each = device_line(points(), 1e9)
    assert slack == pytest.approx(0.2, abs=0.03) and each == pytest.approx(5e8, abs=3e8)


def test_spread_and_reliability():
    own = points()
    assert np.mean(errors_of(own, KNOWN)) == pytest.approx(0.0, abs=0.02)
    assert deviation_of(own, KNOWN) == pytest.approx(0.1, rel=0.1)
    observed = reliability(own, KNOWN)
    assert all(share == pytest.approx(nominal, abs=0.06) for nominal, share in observed.items())


def test_an_outlier_does_not_carry_the_spread():
    own = points()
    wild = MemoryPoint(source="s0", framework="old", definition="device", allocated_bytes=1e10, communicators=0.0,
                       measured_bytes=1e12)  # fmt: skip
    assert deviation_of([*own, wild], KNOWN) < 1.1 * deviation_of(own, KNOWN)


def test_constants_survive_their_file():
    own = [*points(), *points(definition="reserved", framework="new")]
    fitted = fitted_constants(own, [(1.0, 1.1)], 1e9, "made up")
    assert fitted.slack == pytest.approx(0.1) and set(fitted.own) == {"old", "new"}
    assert fitted.deviation["reserved"] == pytest.approx(0.05, rel=0.15)
    again = constants_of(tomllib.loads(as_toml(fitted, "2026-01-01", len(own))), fitted.own)
    assert again.slack == pytest.approx(fitted.slack, rel=1e-4) and again.source == "made up"
    assert again.own == fitted.own and again.deviation == pytest.approx(dict(fitted.deviation), rel=1e-4)


def test_committed_constants():
    c = memory_constants()
    assert 0.01 < c.slack < 0.2 and c.context_bytes < 4e9 and c.communicator_bytes < 3e9
    assert 0 < c.deviation["allocated"] < c.deviation["reserved"] < c.deviation["device"] < 0.2
    assert oom_probability.__doc__ and memory_by_definition.__doc__
