"""Properties of the evaluation on machines whose kernels and collectives are fitted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine_cases import ENGINE, Case, cases, close, legal_plans, stacked
from hypothesis import given
from hypothesis import strategies as st

from explained_terms import lines_of
from steptime.estimate.band import bracket_s
from steptime.estimate.communication import collective_of
from steptime.estimate.kernels import streamed
from steptime.estimate.ledger import details_of, exposed_terms
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.result import Detail
from steptime.estimate.traffic import optimizer_bytes
from steptime.hardware import load_cluster
from steptime.plan.framework import IDEAL
from steptime.plan.job import PRECISIONS
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

CLUSTERS = ("dgx-h100", "dgx-a100-80gb", "perlmutter", "dgx-b200", "gb300-nvl72")
RATES = ("matrix_flops_per_s", "attention_flops_per_s", "vector_flops_per_s", "memory_Bps", "fast_Bps", "slow_Bps")
LATENCIES = ("kernel_latency_s", "fast_latency_s", "slow_latency_s")


def fitted(name: str, gpus: int = 1024, dtype: str = "bf16") -> Machine:
    """A machine of the catalogue with its fitted models."""
    machine = machine_of(
        load_cluster(name), gpus, PRECISIONS[dtype], lone_rank_has_all_links=True, calibrated=True
    )  # fmt: skip
    assert machine.fabric is not None and machine.bound is not None
    return machine


@st.composite
def fitted_cases(draw: st.DrawFn) -> Case:
    """A job of corrected mode in 16 bits on a fitted machine with domains of eight."""
    case = draw(cases(methods=(CORRECTED,)))
    machine = replace(fitted(draw(st.sampled_from(CLUSTERS))), fast_domain=8)
    return replace(case, job=replace(case.job, precision=PRECISIONS["bf16"]), machine=machine)


@pytest.mark.slow
@ENGINE
@given(st.data())
def test_a_block_of_plans_is_its_plans_one_by_one(data):
    case = data.draw(fitted_cases())
    plans = data.draw(st.lists(legal_plans(case), min_size=2, max_size=4))
    block = case.evaluate(stacked(plans))
    times = np.broadcast_to(block.step_time_s, len(plans))
    low, high = (np.broadcast_to(bound, len(plans)) for bound in bracket_s(block))
    for i, one in enumerate(plans):
        alone = case.evaluate(one)
        assert close(float(times[i]), float(alone.step_time_s))
        own = bracket_s(alone)
        assert close(float(low[i]), float(own[0])) and close(float(high[i]), float(own[1]))


@ENGINE
@given(st.data())
def test_the_bracket_holds_and_terms_add_up(data):
    case = data.draw(fitted_cases())
    e = case.evaluate(data.draw(legal_plans(case)))
    low, high = bracket_s(e)
    assert 0 < low <= e.step_time_s <= high
    optimizer = streamed(e.machine.models, optimizer_bytes(e, e.step.owned))
    assert optimizer is not None
    own_s = float(optimizer.seconds) * case.job.framework.optimizer
    assert "optimizer" in case.job.offload or close(float(e.step.optimizer_s), own_s)
    lines = lines_of(e)
    assert close(exposed_terms(lines).total, float(e.step_time_s))
    assert all(_rests(one) for one in details_of(lines) if "_comm/" in one.path)


def _rests(one: Detail) -> bool:
    """A collective of more than one rank names the fabric, its error and the algorithm."""
    if all(call.function != "collective_algorithms.collective_s" or call.arguments["ranks"] == 1 for call in one.calls):
        return True
    return "the fastest; " in one.basis and "fabric " in one.basis and "median error " in one.basis


@ENGINE
@given(st.data())
def test_a_slower_machine_is_never_faster(data):
    case = data.draw(fitted_cases())
    plans = data.draw(legal_plans(case))
    name, factor = data.draw(st.sampled_from([*RATES, *LATENCIES])), data.draw(st.floats(0.05, 0.99))
    worse = {name: 1 / factor if name in LATENCIES else factor}
    if name == "slow_Bps":
        worse["lone_slow_Bps"] = factor
    before, after = case.evaluate(plans), case.evaluate(plans, machine=case.machine.faster(**worse))
    assert after.step_time_s >= before.step_time_s * (1 - 1e-12)
    for now, then in zip(bracket_s(after), bracket_s(before), strict=True):
        assert now >= then * (1 - 1e-12)


@ENGINE
@given(st.data())
def test_time_scales_with_the_clock(data):
    """Products apart: their overlap saturates with time."""
    case = data.draw(fitted_cases())
    models = {name: model for name, model in case.machine.models.items() if name != "matmul"}
    own = replace(case.job, framework=IDEAL, offload=frozenset())
    case = replace(case, machine=replace(case.machine, models=models), job=own)
    plans = data.draw(legal_plans(case))
    half = case.machine.faster(**dict.fromkeys([*RATES, "lone_slow_Bps"], 0.5), **dict.fromkeys(LATENCIES, 2.0))
    assert close(float(case.evaluate(plans, machine=half).step_time_s), 2 * float(case.evaluate(plans).step_time_s))


def test_a_machine_measured_as_it_is_may_have_slower_links_nearby():
    """Perlmutter keeps the network that was fitted on it; what is carried over is made to fit together."""
    assert not fitted("perlmutter").nearer_is_faster and fitted("perlmutter-80gb").nearer_is_faster


@pytest.mark.each("name", ["dgx-a100-80gb", "dgx-b200", "dgx-h100", "gb300-nvl72"])
@pytest.mark.each("kind", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_nearer_is_faster_where_the_machine_says_so(name, kind):
    """Claimed for the search, which then lists only placements with the most ranks inside."""
    machine = fitted(name)
    assert machine.nearer_is_faster
    size = np.logspace(2, 10, 60)
    for ranks in (2, 4, 6, 8, 24, 72, 512, 576):
        times = [
            collective_of(kind, Plans(tp=ranks, in_tp=inside), machine, ("tp",), size)
            for inside in (1, 2, 4, 8, 24, 72) if ranks % inside == 0 and inside <= machine.fast_domain
        ]  # fmt: skip
        for far, near in pairwise(times):
            assert (near <= far * (1 + 1e-9)).all(), ranks
