"""Packed documents, attention in a format of its own, and steps that are one graph."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fits import fit_text
from steptime.api.calls import estimate
from steptime.api.models import load_model
from steptime.api.searches import plan
from steptime.cost.host import IN_TURN, router_wait_s
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.machine import machine_of
from steptime.estimate.result import Estimate
from steptime.estimate.work import graph_of
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.rows import Row
from steptime.plan.strategies import CORRECTED

H100 = load_cluster("dgx-h100")
SETTING: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 16, "optimizer": "adam"}


def _rows(model: str = "llama-3.1-8b", dtype: str = "bf16", seq: int = 4096, attention: str | None = None,
          degrees: dict[str, Any] | None = None, **job: Any) -> dict[str, Row]:  # fmt: skip
    precision = PRECISIONS[dtype].attending_in(attention) if attention else PRECISIONS[dtype]
    made = Job(model=load_model(model), gpus=8, global_batch=16, seq_len=seq, precision=precision,
               optimizer=OPTIMIZERS["adam"], **job)  # fmt: skip
    plans = Plans(**{"dp": 8, **(degrees or {})})
    return {row.name: row for row in CORRECTED.strategies["context"].block(made, plans).layer}


def _step(dtype: str = "bf16", framework: str | None = None, **choices: Any) -> Estimate:
    plan = {"micro_batch": 1, "recompute": "full", **choices}
    return estimate("llama-3.1-8b", plan=plan, dtype=dtype, framework=framework, **SETTING)


def _pairs(row: Row) -> float:
    """(query, key) pairs of a kernel."""
    return float(row.shape["pairs"])


def _moved(row: Row) -> tuple[float, float]:
    return float(row.shape["read_bytes"]), float(row.shape["written_bytes"])


def test_a_token_attends_to_those_of_its_document_alone():
    whole, packed = _rows()["fused_attention"], _rows(document_length=256.0)["fused_attention"]
    pairs, of_documents = 4096 * 4097 / 2, 16 * 256 * 257 / 2
    assert _pairs(packed) / _pairs(whole) == pytest.approx(of_documents / pairs)
    kernel = {name: float(packed.shape[name]) for name in ("batch", "queries", "seen_keys", "causal")}
    assert kernel == {"batch": 16.0, "queries": 256.0, "seen_keys": 256.0, "causal": 1.0}


@pytest.mark.parametrize("length", [4096.0, 1e6])
def test_a_document_as_long_as_the_sequence_is_the_sequence(length):
    assert _rows(document_length=length) == _rows()


def test_a_window_longer_than_a_document_hides_nothing():
    without = _rows("mistral-7b", seq=32768, document_length=1024.0)
    assert set(without) & {"fused_attention", "windowed_attention"} == {"fused_attention"}
    assert "windowed_attention" in _rows("mistral-7b", seq=32768)


def test_a_plan_records_documents_only_where_they_are_shorter_than_the_sequence():
    assert [_step(document_length=n).plan.get("document_length") for n in (200.0, 8192.0, 9000.0)] == [
        200.0,
        None,
        None,
    ]


def test_shorter_documents_never_take_longer():
    times = [_step(document_length=length).step_time_s for length in (64.0, 200.0, 1000.0, 4000.0, 8192.0)]
    assert times == sorted(times) and times[0] < times[-1] == _step().step_time_s


def test_unfused_attention_computes_what_its_mask_hides():
    assert _step(attention="unfused", document_length=200.0).step_time_s == _step(attention="unfused").step_time_s


def test_documents_are_split_like_sequences_over_context_ranks():
    degrees = {"dp": 4, "cp": 2}
    one, two = _rows(document_length=256.0), _rows(document_length=256.0, degrees=degrees)
    assert _pairs(two["fused_attention"]) == pytest.approx(_pairs(one["fused_attention"]) / 2)


def test_attention_in_fp8_leaves_products_that_stay_wide_alone():
    own, wide = PRECISIONS["fp8-te"].attending_in("fp8"), PRECISIONS["fp8-te"]
    machines = [machine_of(H100, 8, p, lone_rank_has_all_links=True, calibrated=False) for p in (own, wide)]
    assert own.wide_dtype == wide.wide_dtype == "bf16"
    assert machines[0].attention_flops_per_s == pytest.approx(2 * machines[1].attention_flops_per_s, rel=1e-3)
    rates = [m.attention_flops_per_s * m.wide_share for m in machines]
    assert rates[0] == pytest.approx(rates[1])


def test_attention_in_fp8_reads_its_inputs_once_more():
    found = _rows(dtype="fp8-te", attention="fp8")
    assert "attention_quantise" not in _rows(dtype="fp8-te")
    inputs, gradient = found["attention_quantise"], found["attention_quantise_gradient"]
    elements = 4096 * 128 * (32 + 8 + 8)
    assert (inputs.operator, *_moved(inputs)) == ("move_forward", 2.0 * elements, 1.0 * elements)
    assert (gradient.operator, *_moved(gradient)) == ("move_backward", 2.0 * 4096 * 4096, 1.0 * 4096 * 4096)


def test_long_sequences_are_faster_with_attention_in_fp8():
    longer = {"dtype": "fp8-te", "seq": 65536, "plan": {"micro_batch": 1, "recompute": "full", "cp": 2}}
    plain = estimate("llama-3.1-8b", **{**SETTING, **longer})
    eighth = estimate("llama-3.1-8b", **{**SETTING, **longer, "plan": {**longer["plan"], "attention_dtype": "fp8"}})
    assert eighth.step_time_s < plain.step_time_s
    assert eighth.plan["attention_dtype"] == "fp8" and "attention_dtype" not in plain.plan


def test_inputs_that_are_made_again_are_quantised_again():
    code = recompute_code("up_projection")
    rows = _rows("deepseek-v3", dtype="fp8-te", attention="fp8", degrees={"recompute": code})
    assert float(rows["attention_quantise"].recomputed) == 1.0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_that_is_one_graph_waits_for_no_host(stages):
    plain, graph = (_step(framework="megatron-core", graphs=words, pp=stages) for words in ("none", "step"))
    assert any(name.startswith("host/") for name in plain.time) and plain.step_time_s > graph.step_time_s
    assert not any(name.startswith("host/") and value for name, value in graph.time.items())
    assert graph.peak_memory_bytes == plain.peak_memory_bytes
    rest = [{name: v for name, v in e.time.items() if name.startswith("compute/")} for e in (plain, graph)]
    assert rest[0] == rest[1]


def test_graphs_of_parts_of_a_layer_leave_less_to_wait_for(tmp_path, monkeypatch):
    """Router and preprocessing as one graph leave a share of the wait; attention as one is issued at once."""
    text = re.sub(r"^captured_wait = .*\n", "", fit_text(), flags=re.MULTILINE)
    text = re.sub(r"^router_s = ", "captured_wait = 0.25\nrouter_s = ", text, flags=re.MULTILINE)
    (tmp_path / "frameworks.toml").write_text(text)
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    found = {}
    for words in ("none", "router+preprocess", "attention+router+preprocess", "step"):
        plan = {"micro_batch": 1, "ep": 8, "graphs": words}
        job = {"gpus": 8, "global_batch": 8, "framework": "megatron-core", "plan": plan}
        found[words] = estimate("mixtral-8x7b", "dgx-h100", **job)
    steps = [each.step_time_s for each in found.values()]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[1] > steps[-1]
    waits = [sum(v for name, v in each.time.items() if name.endswith("router_wait_s")) for each in found.values()]
    assert waits[0] > 0 and [wait / waits[0] for wait in waits] == pytest.approx([1, 0.25, 0.25, 0])
    assert [each.plan.get("graphs", "none") for each in found.values()] == list(found)
    assert found["none"].plan["dispatcher"] == "deepep"


def test_a_router_waits_only_where_the_host_reads_what_the_device_chose():
    """A capacity states the sizes beforehand, and a processor that is its own host has them."""

    def waits_s(cluster, **plan):
        job = {"gpus": 8, "global_batch": 8, "framework": "megatron-core", "plan": {"micro_batch": 1, "ep": 8, **plan}}
        found = estimate("mixtral-8x7b", cluster, **job)
        return sum(v for name, v in found.time.items() if name.endswith("router_wait_s"))

    assert waits_s("dgx-h100") == waits_s("dgx-h100", dispatcher="all_to_all") > 0
    assert waits_s("dgx-h100", expert_capacity=1.0) == waits_s("dgx-h100", graphs="step") == 0
    job = Job(model=load_model("mixtral-8x7b"), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    assert job.reads_sizes
    assert not replace(job, framework=replace(job.framework, issue_sharpness=IN_TURN)).reads_sizes


def test_a_graph_is_issued_as_one_operator():
    rows = [SimpleNamespace(block=block, name=name) for block, name in (
        ("attention", "qkv"), ("experts", "router"), ("experts", "expert_in"), ("mlp", "mlp_in"))]  # fmt: skip
    assert [graph_of(row) for row in rows] == ["attention", "router", "", ""]
    issued = []
    for graphs in ("none", "attention", "router", "step"):
        job = Job(model=load_model("mixtral-8x7b"), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
                  optimizer=OPTIMIZERS["adam"], graphs=graphs)  # fmt: skip
        machine = machine_of(H100, 8, job.precision, lone_rank_has_all_links=True, calibrated=False)
        works = evaluate(CORRECTED, CORRECTED.strategies["context"], job, machine, Plans(dp=8)).works["layer"]
        issued.append(works["forward"].operators)
    none, attention, router, step = issued
    assert none > attention > none / 2 and none - router == 1.0 and step == 0.0
    plain = router_wait_s(10, 1e-3, 0.0, 0.25)
    assert (plain, router_wait_s(10, 1e-3, 1.0, 0.25)) == pytest.approx((0.01, 0.0025))


def test_the_all_to_all_sends_every_copy():
    """Four of eight experts on eight ranks: kernels of DeepEP send a token once over a link, all-to-alls each copy."""
    plan = {"micro_batch": 1, "ep": 16}
    once, copies = (
        estimate("qwen3-30b-a3b", "dgx-h100", gpus=16, global_batch=16, framework="megatron-core",
                 plan={**plan, "dispatcher": name})
        for name in ("hybridep", "all_to_all")
    )  # fmt: skip
    assert once.step_time_s < copies.step_time_s and copies.plan["dispatcher"] == "all_to_all"
    with pytest.raises(UserError, match="dispatcher"):
        _step(dispatcher="deepep")


@pytest.mark.each(
    ("choices", "dtype", "words"),
    [
        ({"attention_dtype": "fp8", "attention": "unfused"}, "bf16", "attention unfused has no kernel for it"),
        ({"attention_dtype": "fp8"}, "fp32", "inputs of more than 16 bits"),
        ({"attention_dtype": "fp4"}, "bf16", "there is no attention_dtype 'fp4'"),
        ({"graphs": "layer"}, "bf16", "there is no graphs 'layer'"),
        ({"graphs": "step+router"}, "bf16", "'step' cannot be combined"),
        ({"dispatcher": "nvshmem"}, "bf16", "there is no dispatcher 'nvshmem'"),
        ({"document_length": 0.5}, "bf16", "document_length"),
        ({"document_length": 10**400}, "bf16", "is not a number"),
    ],
)
def test_choices_without_a_meaning_are_refused(choices, dtype, words):
    with pytest.raises(UserError, match=words):
        _step(dtype, **choices)


def test_a_device_without_the_format_says_so():
    with pytest.raises(UserError, match="no matrix rate for fp8"):
        estimate("llama-3.1-8b", plan={"attention_dtype": "fp8"}, **{**SETTING, "cluster": "dgx-a100"}, dtype="bf16")


def test_a_search_takes_them_for_all_candidates():
    fixed = {"graphs": "step", "document_length": 200.0, "attention_dtype": "fp8"}
    found = plan("llama-3.1-8b", **SETTING, dtype="fp8-te", fix=fixed, framework="megatron-core", top=3)
    free = plan("llama-3.1-8b", **SETTING, dtype="fp8-te", framework="megatron-core", top=3)
    assert all({name: e.plan[name] for name in fixed} == fixed for e in found.plans)
    assert found.plans[0].step_time_s < free.plans[0].step_time_s
    again = estimate("llama-3.1-8b", plan=found.plans[0].plan, **SETTING, dtype="fp8-te", framework="megatron-core")
    assert again.step_time_s == pytest.approx(found.plans[0].step_time_s)


def test_a_precision_attends_in_another_format_without_changing_what_is_kept():
    own = PRECISIONS["bf16"].attending_in("fp8")
    assert replace(own, attention_dtype="bf16") == PRECISIONS["bf16"]
    with pytest.raises(PlanError):
        _step("fp32", attention_dtype="fp8")
