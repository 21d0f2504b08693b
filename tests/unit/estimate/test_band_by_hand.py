"""The band around a step time, from steps whose framework is moved by one doubt at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from steptime.api.models import load_model
from steptime.estimate.band import StepBand, band_of
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.plan.framework import BUSY, PARAMETERS, Framework, Spread
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

DOUBT = 0.3
CERTAIN = Spread(doubts=dict.fromkeys(PARAMETERS, 0.0), device_doubt=0.0, noise=0.0, experts=0.0, widening=1.0,
                 low=-1.0, high=1.0, source="test")  # fmt: skip
FRAMEWORK = Framework(
    name="harsh", matrix=1.3, narrow=0.7, attention=1.6, vector=1.9, host_s=3e-5, router_s=1e-3, tensor_links=1.3,
    context_links=1.1, expert_links=2.0, data_links=1.2, data_exposed=0.4, stage_links=1.4, stage_s=2e-4, optimizer=1.1,
    step_s=0.01, growth=0.01,
)  # fmt: skip
MOVED = {
    **{name: getattr(FRAMEWORK, name) * math.exp(DOUBT) for name in PARAMETERS},
    # A factor of at least 1 is known by what it has above 1, a share by its odds.
    "data_links": 1 + 0.2 * math.exp(DOUBT), "stage_links": 1 + 0.4 * math.exp(DOUBT),
    "data_exposed": 0.4 * math.exp(DOUBT) / (0.6 + 0.4 * math.exp(DOUBT)),
}  # fmt: skip


@cache
def evaluated(framework: Framework, schedule: str = "1f1b") -> Evaluation:
    plans = Plans(tp=2, cp=2, pp=2, dp=8, ep=4, in_tp=2, in_cp=2, in_pp=2)
    job = Job(model=load_model("mixtral-8x7b"), gpus=64, global_batch=64, seq_len=4096, precision=PRECISIONS["fp8"],
              optimizer=OPTIMIZERS["adam"], framework=framework, schedule=schedule,
              graphs="router+preprocess")  # fmt: skip
    machine = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100")).machine
    return evaluate(CORRECTED, CORRECTED.strategies["context"], job, machine, plans)


def band(schedule: str = "1f1b", **known: object) -> StepBand:
    spread = replace(CERTAIN, **known)  # type: ignore[arg-type]
    e = evaluated(FRAMEWORK, schedule)
    found = band_of(replace(e, job=replace(e.job, framework=replace(FRAMEWORK, spread=spread))))
    assert found is not None
    return found


def step_s(schedule: str = "1f1b", **changes: float) -> float:
    return float(evaluated(replace(FRAMEWORK, **changes), schedule).step_time_s)  # type: ignore[arg-type]


@pytest.mark.each("schedule", ["1f1b", "zb-h1"])
@pytest.mark.each("name", PARAMETERS)
def test_one_doubt_is_the_change_of_the_step_when_it_is_moved(name: str, schedule: str) -> None:
    found, usual = band(schedule, doubts=dict(CERTAIN.doubts) | {name: DOUBT}), step_s(schedule)
    assert found.high_s == pytest.approx(step_s(schedule, **{name: MOVED[name]}), rel=1e-9)
    assert found.high_s > usual and found.low_s == pytest.approx(usual**2 / found.high_s, rel=1e-9)
    assert found.shares[name] == pytest.approx(1.0)


def test_a_doubt_of_the_device_moves_its_products_together() -> None:
    moved = {name: MOVED[name] for name in BUSY}
    assert band(device_doubt=DOUBT).high_s == pytest.approx(step_s(**moved), rel=1e-9)


def test_doubts_add_as_squares() -> None:
    both = {name: DOUBT if name in ("matrix", "vector") else 0.0 for name in PARAMETERS}
    each = [math.log(step_s(**{name: MOVED[name]}) / step_s()) for name in ("matrix", "vector")]
    deviation = math.sqrt(each[0] ** 2 + each[1] ** 2 + 0.1**2 + 0.2**2)
    found = band(doubts=both, noise=0.1, experts=0.2, widening=1.5, low=-2.0, high=3.0)
    assert found.high_s == pytest.approx(step_s() * math.exp(3.0 * 1.5 * deviation), rel=1e-9)
    assert found.low_s == pytest.approx(step_s() * math.exp(-2.0 * 1.5 * deviation), rel=1e-9)
    shares = {"matrix": each[0] ** 2, "vector": each[1] ** 2, "noise": 0.05}
    assert {name: found.shares[name] for name in shares} == pytest.approx(
        {name: value / deviation**2 for name, value in shares.items()}, rel=1e-9
    )
    assert sum(found.shares.values()) == pytest.approx(1.0)
