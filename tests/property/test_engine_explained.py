"""Every term is what its record says: the formulas on the arguments they had, times the factors, added up."""

from __future__ import annotations

import json

import pytest
from engine_cases import ENGINE, HARSH, cases, legal_plans
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_engine_fitted import fitted_cases

from explained_terms import differing, explained
from steptime.api.models import load_model
from steptime.estimate import ledger
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting, estimate_plan
from steptime.formats.estimate_file import parse_estimate
from steptime.hardware import load_cluster
from steptime.plan.framework import IDEAL
from steptime.plan.job import OPTIMIZERS, PRECISIONS, QLORA_BYTES, Adapter, Job
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.strategies import CORRECTED
from suites import examples

STRATEGY = CORRECTED.strategies["1d"]
SOME = settings(ENGINE, max_examples=examples(80))
MODELS = ("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b")
CLUSTERS = ("dgx-h100", "dgx-a100", "gb200-nvl72", "l40s-8", "mi300x-8")


@ENGINE
@given(st.data())
def test_on_textbook_machines(data):
    case = data.draw(cases())
    assert differing(explained(case.evaluate(data.draw(legal_plans(case))))) == []


@ENGINE
@given(st.data())
def test_a_tape_changes_no_number(data):
    case = data.draw(cases())
    plain = case.evaluate(data.draw(legal_plans(case)))
    e, terms = ledger.explained(plain.method, plain.strategy, plain.job, plain.machine, plain.plans)
    assert (e.step_time_s, e.step, e.peak_bytes) == (plain.step_time_s, plain.step, plain.peak_bytes)
    assert terms and all(one.calls for one in terms)


@SOME
@given(st.data())
def test_on_fitted_machines(data):
    case = data.draw(fitted_cases())
    assert differing(explained(case.evaluate(data.draw(legal_plans(case))))) == []


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, str, Plans]:
    """Jobs with everything that a layer can have beside plain transformers, on machines of the catalogue."""
    some = lambda *names: frozenset(draw(st.sets(st.sampled_from(names))))  # noqa: E731
    model = load_model(draw(st.sampled_from(MODELS)))
    lora = draw(st.sampled_from([None, Adapter(rank=16), Adapter(rank=16, weight_bytes=QLORA_BYTES)]))
    job = Job(
        model=model, gpus=64, global_batch=2 ** draw(st.integers(5, 8)), seq_len=4096,
        precision=PRECISIONS[draw(st.sampled_from(["bf16", "fp8", "fp8-te"]))],
        optimizer=OPTIMIZERS["adam"], overlap=some("dp", "pp", "ep", "offload"),
        offload=some("optimizer", "activations"), schedule=draw(st.sampled_from(["1f1b", "zb-h1"])),
        exchange_once=draw(st.booleans()), adapter=lora, single_ring=draw(st.booleans()),
        framework=draw(st.sampled_from([IDEAL, HARSH])), expert_imbalance=draw(st.sampled_from([1.0, 1.3])),
    )  # fmt: skip
    pp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    experts = 1 if model.experts is None else draw(st.sampled_from([1, 4, 8]))
    names = ["full", "norm", "activation", "norm+activation"] + ["experts"] * (experts > 1)
    plans = Plans(
        pp=pp, tp=tp, dp=64 // (pp * tp), in_tp=tp, in_dp=draw(st.sampled_from([1, 8 // tp, 8 // tp])), ep=experts,
        vpp=draw(st.sampled_from([1, 2])) if pp > 1 else 1, zero=draw(st.sampled_from([0, 1, 2, 3, 3])),
        micro_batch=draw(st.sampled_from([1, 2])), recompute=recompute_code(draw(st.sampled_from(["none", *names]))),
        shard=draw(st.sampled_from([0, 0, 8])),
    )  # fmt: skip
    return job, draw(st.sampled_from(CLUSTERS)), plans


@SOME
@given(jobs())
def test_of_whole_jobs(drawn):
    """Experts whose exchange hides, sharded and offloaded states, adapters, recomputed parts, other schedules."""
    job, cluster, plans = drawn
    assume(job.precision.matrix_dtype in load_cluster(cluster).device.matrix_flops_per_s)
    setting = Setting(method=CORRECTED, job=job, cluster=load_cluster(cluster))
    assert differing(explained(evaluate(CORRECTED, STRATEGY, job, setting.machine, plans))) == []


@pytest.mark.parametrize("cluster", ["dgx-h100", "l40s-8"])
def test_written_as_json_and_read_again_it_is_the_same(cluster: str) -> None:
    """The fabric of a fitted collective too, so that what was read says as much as what was written."""
    job = Job(model=load_model("mixtral-8x7b"), gpus=64, global_batch=256, seq_len=4096, framework=HARSH,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip
    setting = Setting(method=CORRECTED, job=job, cluster=load_cluster(cluster))
    plans = Plans(tp=2, dp=8, pp=4, ep=8, in_tp=2, in_dp=4, zero=1)
    whole = estimate_plan(setting, STRATEGY, plans, explain=True)
    read = parse_estimate(json.dumps(whole.to_json(explain=True)), "written.json")
    assert read.details == whole.details and differing(read.details) == []
    assert any(detail.further for detail in read.details)
