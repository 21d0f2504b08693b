"""Properties of the evaluation of a plan, whatever the model, the machine and the degrees."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from engine_cases import ENGINE, cases, close, legal_plans, stacked
from hypothesis import given
from hypothesis import strategies as st

from explained_terms import lines_of
from steptime.estimate.band import bracket_s
from steptime.estimate.ledger import exposed_terms, fullest_stage, hidden_terms, memory_terms
from steptime.estimate.single import Setting, estimate_plan
from steptime.estimate.step import Step
from steptime.hardware import load_cluster
from steptime.plan.framework import IDEAL
from steptime.plan.plans import RECOMPUTE_CODES, broken_rules
from steptime.plan.strategies import CORRECTED

RATES = ("matrix_flops_per_s", "attention_flops_per_s", "vector_flops_per_s", "memory_Bps", "fast_Bps")
LATENCIES = ("kernel_latency_s", "fast_latency_s", "slow_latency_s")
PARTS = ("counts", "stage_s", "data_s", "data_busy_s", "exchanges")
STEP = [field.name for field in fields(Step) if field.name not in PARTS]


@ENGINE
@given(st.data())
def test_a_block_of_plans_is_its_plans_one_by_one(data):
    case = data.draw(cases())
    plans = data.draw(st.lists(legal_plans(case), min_size=2, max_size=5))
    block = case.evaluate(stacked(plans))
    low, high = (np.broadcast_to(bound, len(plans)) for bound in bracket_s(block))
    for i, one in enumerate(plans):
        alone = case.evaluate(one)
        for name in (*STEP, "total_s"):
            value = np.broadcast_to(getattr(block.step, name), len(plans))[i]
            assert close(float(value), float(getattr(alone.step, name))), name
        for part in PARTS:
            many, single = getattr(block.step, part), getattr(alone.step, part)
            for name in single.keys() & many.keys():
                assert close(float(np.broadcast_to(many[name], len(plans))[i]), float(single[name])), name
        assert close(float(np.broadcast_to(block.peak_bytes, len(plans))[i]), float(alone.peak_bytes))
        own = bracket_s(alone)
        assert close(float(low[i]), float(own[0])) and close(float(high[i]), float(own[1]))


@ENGINE
@given(st.data())
def test_terms_add_up_and_none_is_negative(data):
    case = data.draw(cases())
    e = case.evaluate(data.draw(legal_plans(case)))
    time, hidden = (of(lines_of(e)) for of in (exposed_terms, hidden_terms))
    assert close(time.total, float(e.step_time_s))
    memory = memory_terms(e, fullest_stage(e))
    assert close(memory.total, float(e.peak_bytes))
    for path, value in (*time.items(), *memory.items(), *hidden.items()):
        assert value > 0, path


@ENGINE
@given(st.data())
def test_the_bracket_holds_the_step_time(data):
    case = data.draw(cases())
    e = case.evaluate(data.draw(legal_plans(case)))
    low, high = bracket_s(e)
    assert 0 < low <= e.step_time_s * (1 + 1e-12)
    assert e.step_time_s <= high * (1 + 1e-12)


@ENGINE
@given(st.data())
def test_a_slower_machine_is_never_faster(data):
    case = data.draw(cases())
    plans = data.draw(legal_plans(case))
    name = data.draw(st.sampled_from([*RATES, *LATENCIES, "slow_Bps"]))
    factor = data.draw(st.floats(0.05, 0.99))
    worse = {name: 1 / factor if name in LATENCIES else factor}
    if name == "slow_Bps":
        worse["lone_slow_Bps"] = factor
    before, after = case.evaluate(plans), case.evaluate(plans, machine=case.machine.faster(**worse))
    assert after.step_time_s >= before.step_time_s * (1 - 1e-12)
    assert after.peak_bytes == before.peak_bytes
    for now, then in zip(bracket_s(after), bracket_s(before), strict=True):
        assert now >= then * (1 - 1e-12)


OFFLOADED = [(), ("optimizer",), ("activations",), ("activations", "optimizer")]


@pytest.mark.quick("offload2")
@pytest.mark.parametrize("offload", OFFLOADED)
@ENGINE
@given(st.data())
def test_a_faster_matrix_unit_slows_no_step(offload, data):
    """Traffic that hid behind computation may show, but by no more than the computation got shorter."""
    case = data.draw(cases(methods=(CORRECTED,)))
    case = replace(
        case, job=replace(case.job, overlap=case.job.overlap | {"dp", "offload"}, offload=frozenset(offload))
    )
    plans = data.draw(legal_plans(case)).with_columns({"dp": 8, "in_dp": 1})
    faster = [case.machine.faster(matrix_flops_per_s=x, attention_flops_per_s=x) for x in (1.0, 2.0, 8.0)]
    steps = [case.evaluate(plans, machine=machine).step for machine in faster]
    for slow, fast in itertools.pairwise(steps):
        assert fast.total_s <= slow.total_s * (1 + 1e-12)


@ENGINE
@given(st.data())
def test_memory_capacity_changes_no_time(data):
    case = data.draw(cases())
    plans = data.draw(legal_plans(case))
    other = replace(case.machine, memory_bytes=case.machine.memory_bytes * data.draw(st.floats(0.01, 100)))
    assert case.evaluate(plans, machine=other).step_time_s == case.evaluate(plans).step_time_s


@ENGINE
@given(st.data())
def test_time_scales_with_the_clock(data):
    """Halving every rate and doubling every latency doubles the time exactly; the host has a clock of its own."""
    case = data.draw(cases())
    case = replace(case, job=replace(case.job, framework=IDEAL, offload=frozenset()))
    plans = data.draw(legal_plans(case))
    half = case.machine.faster(
        **dict.fromkeys([*RATES, "slow_Bps", "lone_slow_Bps"], 0.5), **dict.fromkeys(LATENCIES, 2.0)
    )
    assert close(float(case.evaluate(plans, machine=half).step_time_s), 2 * float(case.evaluate(plans).step_time_s))


@ENGINE
@given(st.data())
def test_estimates_are_consistent(data):
    case = data.draw(cases())
    plans = data.draw(legal_plans(case))
    job = replace(case.job, gpus=int(plans.ranks))
    cluster = load_cluster("published-b200-nvs8" if case.job.precision.name == "bf16" else "dgx-h100")
    e = estimate_plan(Setting(method=case.method, job=job, cluster=cluster), case.strategy, plans)
    low, high = e.step_time_bracket_s
    assert low <= e.step_time_s <= high
    assert close(e.samples_per_s * e.step_time_s, job.global_batch)
    assert close(e.tokens_per_s_per_gpu * job.gpus, e.samples_per_s * job.seq_len)
    assert close(e.time.total, e.step_time_s) and close(e.memory.total, e.peak_memory_bytes)
    fits = e.peak_memory_bytes <= e.memory_capacity_bytes
    assert e.feasible == (fits and not broken_rules(job, plans, case.method.rules)) == (not e.reasons)
    assert 0 < e.mfu <= e.hfu < 1
    assert all(t <= e.step_time_s * (1 + 1e-12) for t in e.what_if.values())


@ENGINE
@given(st.data())
def test_a_recomputed_plan_takes_longer(data):
    """Where activations stay on the device: what is made again need not be copied to the host."""
    case = data.draw(cases())
    case = replace(case, job=replace(case.job, offload=case.job.offload - {"activations"}))
    plans = data.draw(legal_plans(case))
    code = data.draw(st.sampled_from([2, RECOMPUTE_CODES["outputs"]]))
    without, again = (case.evaluate(plans.with_columns({"recompute": each})) for each in (0, code))
    assert again.step_time_s >= without.step_time_s * (1 - 1e-12)
    assert again.peak_bytes <= without.peak_bytes * (1 + 1e-12) or code == 2


@pytest.mark.each("name", [*RATES, *LATENCIES, "slow_Bps"])
def test_every_rate_matters_to_some_plan(name):
    """The property above is not empty: a plan that uses everything gets slower with each."""
    from steptime.api.models import load_model
    from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
    from steptime.plan.plans import Plans

    model = load_model("llama2-7b")
    job = Job(model=model, gpus=128, global_batch=64, seq_len=4096, precision=PRECISIONS["fp8"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    setting = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100"))
    plans = Plans(tp=16, pp=4, dp=2, in_tp=8)
    strategy = CORRECTED.strategies["1d"]
    worse = setting.machine.faster(**{name: 2.0 if name in LATENCIES else 0.5})
    from steptime.estimate.evaluate import evaluate

    before, after = (evaluate(CORRECTED, strategy, job, m, plans).step_time_s for m in (setting.machine, worse))
    assert after > before * 1.0001


@ENGINE
@given(
    st.integers(0, 5), st.integers(0, 5), st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.floats(0.01, 0.99),
    st.sampled_from(["fast_Bps", "slow_Bps"]),
)  # fmt: skip
def test_a_ring_on_slower_links_is_never_faster(domains, inside, fast_Bps, slow_Bps, factor, which):
    from steptime.cost.collective import ring_all_gather_s

    rates = {"fast_Bps": fast_Bps, "slow_Bps": slow_Bps}
    common = {"size_bytes": 1e9, "ranks": 2 ** (domains + inside), "inside": 2**inside, "fast_latency_s": 1e-6,
              "slow_latency_s": 1e-6}  # fmt: skip
    worse = rates | {which: rates[which] * factor}
    assert ring_all_gather_s(**common, **worse) >= ring_all_gather_s(**common, **rates)
