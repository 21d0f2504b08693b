"""Zero-bubble schedules beside what a backward pass hides: copies, panels, waits for the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from machine_without_latencies import machine_of
from steptime.api.models import load_model
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.plan.framework import IDEAL
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

ZERO_BUBBLE = ("zb-h1", "zb-h2")
COPIES: dict[str, Any] = {"offload": frozenset({"activations"}), "overlap": frozenset({"offload"})}
RATES = [1e14 * 1.25**i for i in range(20)]
"""From passes that hide all their copies, panels and operators to passes that hide none."""


def made(
    rate: float,
    *,
    strategy: str = "1d",
    host_s: float = 0.0,
    link_Bps: float = 2e11,
    pp: int = 4,
    batch: int = 16,
    **job: Any,
) -> Evaluation:
    """A step on devices of so many FLOP/s, of a host that issues an operator in ``host_s``."""
    machine = machine_of(link_Bps, memory_Bps=1e13, fast_domain=64, matrix_flops_per_s=rate, host_Bps=2e10)
    plans = Plans(tp=2, tp2=2, pp=pp, in_tp=2, in_tp2=2, panels=4) if strategy == "2d" else Plans(pp=pp)
    gpus, framework = int(plans.ranks), replace(IDEAL, host_s=host_s)
    plain = Job(model=load_model("llama3-8b"), gpus=gpus, global_batch=batch, seq_len=2048, framework=framework,
               precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    return evaluate(CORRECTED, CORRECTED.strategies[strategy], replace(plain, **job), machine, plans)


CASES: dict[str, dict[str, Any]] = {
    "copies": COPIES,
    "panels": {"strategy": "2d", "link_Bps": 1e12},
    "host": {"host_s": 2e-4},
}


@pytest.mark.each("schedule", ZERO_BUBBLE)
@pytest.mark.each(("pp", "batch"), [(2, 2), (4, 8), (8, 64)])
@pytest.mark.each("case", CASES)
def test_a_faster_device_makes_no_step_slower(case: str, pp: int, batch: int, schedule: str) -> None:
    seconds = [float(made(r, schedule=schedule, pp=pp, batch=batch, **CASES[case]).step_time_s) for r in RATES]
    for slower, faster in pairwise(seconds):
        assert faster <= slower * (1 + 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_what_is_put_off_is_what_the_pass_is_shorter_without_it(case: str) -> None:
    """A pass that waits is no shorter for products that it would have done meanwhile."""
    slow, fast = (made(rate, schedule="zb-h1", **CASES[case]).passes["layer"] for rate in (RATES[0], RATES[-1]))
    assert 0.3 < slow.weights_s / slow.backward_s < 0.5
    if case == "host":
        assert 0 < fast.weights_s < 0.4 * fast.backward_s
    if case == "panels":
        assert fast.weights_s < 0.02 * fast.backward_s


def waits(e: Evaluation) -> float:
    return float(e.step.idle_s + e.step.copies_s) - float(e.micro_batches * e.step.counts["layer"] * one_s(e))


def one_s(e: Evaluation) -> float:
    layer, copy_s = e.passes["layer"], float(e.inputs.copy_s)
    return max(copy_s - float(layer.forward_s), 0.0) + max(copy_s - float(layer.backward_s), 0.0)


def test_copies_longer_than_the_passes_leave_nothing_to_put_off() -> None:
    """Then a stage lasts as long as its copies, whatever the schedule."""
    zero_bubble, plain = (made(RATES[-1], schedule=schedule, **COPIES) for schedule in ("zb-h1", "1f1b"))
    assert waits(zero_bubble) == pytest.approx(waits(plain), rel=0.02)
