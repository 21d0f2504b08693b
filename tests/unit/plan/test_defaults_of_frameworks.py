"""What a framework has: its ZeRO stages and axes, where an estimate takes them and where a search tries no others."""

from __future__ import annotations

from typing import Any

import pytest

from steptime import api
from steptime.api.frameworks import PLACED, renamed, scope_of
from steptime.api.models import load_model
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.measure.runs.read import table
from steptime.plan.framework import MODEL_AXES, Habits
from steptime.plan.framework_file import framework_names, habits_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RULES, launch_order
from steptime.plan.recompute import recompute_code
from steptime.plan.space import Constraint, CorrectedSpace
from steptime.plan.strategies import CORRECTED
from steptime.search.modes import MODES

JOB: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 64, "global_batch": 64}
SHARDED = ("torchtitan", "torchtune", "fms-fsdp", "composer-fsdp", "automodel", "maxtext")


def searched(framework: str, **options: Any) -> Any:
    """All plans that fit of a small job."""
    return api.plan("llama3.2-1b", "dgx-h100", gpus=8, global_batch=8, framework=framework, top=10**4, **options)


@pytest.mark.each("name", framework_names())
def test_the_stage_of_a_framework_is_one_that_it_has_and_that_its_runs_have(name: str) -> None:
    habits = habits_of(name)
    assert all(habits.zero_with(pp) in habits.stages_with(pp) for pp in (1, 4))
    assert habits.axes <= set(MODEL_AXES)
    weights = {int(stage): weight for stage, weight in table("defaults").get(name, {}).get("zero", {}).items()}
    assert set(weights) <= habits.zero_stages
    assert not weights or weights.get(habits.zero, 0) > 0


@pytest.mark.parametrize("name", ["generic", "ideal"])
def test_no_framework_in_particular_has_everything(name: str) -> None:
    assert habits_of(name) == Habits()
    mode = MODES["corrected"]
    scope = scope_of(name, mode.space, mode.auto, (), "auto")
    assert (scope.space.with_habits(Habits()).zero, scope.notes, scope.constraints) == ((1, 3), (), ())  # type: ignore[attr-defined]
    listed = [plan.plan for plan in searched(name, strategy="1d").plans]
    assert {plan["zero"] for plan in listed} == {1, 3}
    assert {plan["zero"] for plan in listed if plan["pp"] > 1} == {1}


@pytest.mark.slow
def test_a_search_with_a_framework_keeps_to_the_placement_of_launchers() -> None:
    for framework, gpus in (("megatron-core", 64), ("torchtitan", 48)):
        found = api.plan("llama3-8b", "dgx-h100", gpus=gpus, global_batch=96, framework=framework, top=200)
        assert len(found.plans) > 10
        for each in found.plans:
            given = {name: each.plan[name] for name in ("tp", "cp", "pp", "dp")}
            placed = launch_order(given, gpus, 8)
            assert each.plan["placement"].items() <= placed.items(), each.plan
    free = api.plan("llama3-8b", "dgx-h100", gpus=64, global_batch=96, top=200, fix={"tp": 8, "pp": 1, "cp": 1})
    assert {each.plan["placement"]["tp"] for each in free.plans} > {8}


@pytest.mark.parametrize("name", SHARDED)
def test_what_shards_all_shards_all_unless_told_otherwise(name: str) -> None:
    e = api.estimate(**JOB, framework=name, plan={"micro_batch": 1})
    assert e.plan["zero"] == 3 and e.feasible
    within = {"shard": 8} if name == "fms-fsdp" else {}
    assert len(e.notes) == 1 and f"was taken, as {name} does" in e.notes[0]
    told = api.estimate(**JOB, framework=name, plan={"micro_batch": 1, "zero": 3, **within})
    assert told.notes == () and told.step_time_s == e.step_time_s


def test_a_pipeline_keeps_weights_gathered_and_one_rank_shares_nothing() -> None:
    for plan in ({"pp": 4, "dp": 16}, {"tp": 8, "pp": 8, "dp": 1}):
        assert api.estimate(**JOB, framework="torchtitan", plan=plan).plan["zero"] == 1
    assert api.estimate(**JOB, framework="ddp", plan={}).plan["zero"] == 0
    alone = api.estimate("llama3-8b", "dgx-h100", gpus=1, global_batch=1, framework="torchtitan")
    assert alone.plan["zero"] == 1 and alone.notes == ()


@pytest.mark.each(
    ("framework", "plan", "shard"),
    [
        ("fms-fsdp", {}, 8), ("fms-fsdp", {"zero": 3}, 0), ("fms-fsdp", {"shard": 16}, 16),
        ("fms-fsdp", {"shard": 0}, 0), ("fms-fsdp", {"tp": 8}, 0), ("fsdp", {}, 0), ("torchtitan", {}, 0),
        ("composer-fsdp", {}, 0), ("deepspeed", {"zero": 3}, 0), (None, {}, 0),
    ],
)  # fmt: skip
def test_a_framework_with_hybrid_shards_shares_out_within_a_node(
    framework: str | None, plan: dict[str, int], shard: int
) -> None:
    e = api.estimate(**JOB, framework=framework, plan={"micro_batch": 1, **plan})
    assert e.plan["shard"] == shard
    assert any("within nodes of 8 (HSDP)" in note for note in e.notes) == (shard == 8)


def test_a_node_of_a_larger_domain_is_that_of_its_processors() -> None:
    job = {**JOB, "cluster": "gb200-nvl72"}
    assert api.estimate(**job, framework="fms-fsdp", plan={}).plan["shard"] == 4
    assert api.estimate(**JOB | {"gpus": 8}, framework="fms-fsdp", plan={}).plan["shard"] == 0


def test_a_search_tries_shards_within_a_node_where_the_framework_has_them() -> None:
    shards = {p.plan["shard"] for p in api.plan(**JOB, framework="fms-fsdp", top=10**3).plans}
    assert shards == {0, 8}
    assert {p.plan["shard"] for p in api.plan(**JOB, framework="fms-fsdp", fix={"shard": 16}).plans} == {16}
    assert {p.plan["shard"] for p in api.plan(**JOB, framework="composer-fsdp", top=10**3).plans} == {0}


@pytest.mark.parametrize(
    ("framework", "dense", "experts"),
    [
        ("generic", "none full", "none full"), ("fms-fsdp", "none full", "none full"),
        ("megatron-core", "none mlp full", "none norm+activation+up_projection full"),
        ("torchtitan", "none norm+activation+outputs full", "none norm+activation+outputs full"),
    ],
)  # fmt: skip
def test_a_search_tries_the_parts_that_a_framework_recomputes(framework: str, dense: str, experts: str) -> None:
    mode, asked = MODES["corrected"], Constraint(column="recompute", relation="=", value=2)
    for words, has_experts in ((dense, False), (experts, True)):
        codes = tuple(recompute_code(word) for word in words.split())
        scope = scope_of(framework, mode.space, mode.auto, (), "auto", experts=has_experts)
        assert scope.space.recompute == codes  # type: ignore[attr-defined]
    told = scope_of(framework, mode.space.fixed({"recompute": 2}), mode.auto, (asked,), "auto")
    assert told.space.recompute == (2,)  # type: ignore[attr-defined]


def test_parts_find_a_faster_plan_where_memory_is_tight() -> None:
    job: dict[str, Any] = {"gpus": 256, "global_batch": 1024, "framework": "megatron-core"}
    mesh = {"tp": 2, "cp": 2, "pp": 4, "ep": 64, "micro_batch": 1}
    job |= {"strategy": "context", "top": 1, "oom_limit": 1.0}
    found = api.plan("deepseek-v3", "dgx-h100", **job, fix=mesh)
    whole = api.plan("deepseek-v3", "dgx-h100", **job, fix=mesh | {"recompute": "full"})
    assert set(found.plans[0].plan["recompute"].split("+")) == {"norm", "activation", "up_projection"}
    assert found.plans[0].step_time_s < 0.9 * whole.plans[0].step_time_s and found.plans[0].oom_probability < 1.0


def test_a_wish_beyond_the_framework_is_kept_and_told() -> None:
    e = api.estimate(**JOB, framework="torchtitan", plan={"zero": 1, "micro_batch": 1})
    assert e.plan["zero"] == 1
    assert e.notes == ("torchtitan has no ZeRO-1 without a pipeline: it has ZeRO-0, 2, 3",)
    ranks = {"zero": 1, "cp": 8, "dp": 1, "micro_batch": 1}
    (note,) = api.estimate(**{**JOB, "gpus": 8}, framework="torchtitan", plan=ranks).notes
    assert note.startswith("torchtitan has no ZeRO-1")
    (note,) = api.estimate(**JOB, framework="ddp", plan={"zero": 0, "tp": 2, "pp": 2, "micro_batch": 1}).notes
    assert note == "ddp has no tp, pp, so no run of it stands behind a plan with tp 2 pp 2"


@pytest.mark.slow
def test_a_search_tries_what_the_framework_has() -> None:
    result = searched("torchtitan")
    assert {plan.plan["zero"] for plan in result.plans if plan.plan["pp"] == 1 < plan.plan["dp"]} == {3}
    assert {plan.plan["zero"] for plan in result.plans if plan.plan["pp"] > 1} == {1}
    assert not any(plan.notes for plan in result.plans)
    assert result.notes == (
        "torchtitan: only ZeRO-3 (1 with a pipeline); other plans are tried only if --fix asks for one",
        f"torchtitan: {PLACED}",
    )
    two = api.plan(**JOB, framework="fms-fsdp")
    assert {(p.plan["dp"], p.plan["zero"], p.plan["strategy"]) for p in two.plans} == {(64, 3, "1d")}
    assert "(1d)" in two.stop.proof and two.notes[0].startswith("fms-fsdp: no tp, cp, pp, ep, only ZeRO-3;")
    experts = api.plan("mixtral-8x7b", "dgx-h100", gpus=64, global_batch=64, framework="composer-fsdp")
    assert {(p.plan["dp"], p.plan["ep"]) for p in experts.plans} == {(64, 1)}


@pytest.mark.parametrize(
    ("options", "axis"),
    [
        ({"fix": {"tp": 2}}, "tp"),
        ({"limit": ["pp>=2"]}, "pp"),
        ({"strategy": "context"}, "cp"),
        ({"limit": ["tp>1"]}, "tp"),
    ],
)
def test_a_search_tries_what_is_asked_for_all_the_same(options: dict[str, Any], axis: str) -> None:
    result = searched("composer-fsdp", **options)
    assert any(plan.plan[axis] > 1 for plan in result.plans)
    assert all(plan.plan[other] == 1 for plan in result.plans for other in {"tp", "cp", "pp"} - {axis})
    assert any(note.startswith(f"composer-fsdp has no {axis}") for plan in result.plans for note in plan.notes)


@pytest.mark.parametrize("limit", ["tp>=1", "tp<=4", "tp>0"])
def test_a_bound_that_admits_one_rank_asks_for_no_more(limit: str) -> None:
    assert {plan.plan["tp"] for plan in searched("composer-fsdp", limit=[limit]).plans} == {1}


def test_a_stage_that_is_asked_for_is_tried() -> None:
    result = searched("torchtitan", fix={"zero": 1}, strategy="1d")
    assert {plan.plan["zero"] for plan in result.plans} == {1} and result.notes == (f"torchtitan: {PLACED}",)
    assert any("torchtitan has no ZeRO-1 without a pipeline" in note for plan in result.plans for note in plan.notes)


def test_a_name_that_means_another_is_told() -> None:
    (note,) = renamed("fsdp")
    assert note.startswith("framework fsdp was taken as fms-fsdp, fitted to 1 run: fms-fsdp trains with PyTorch")
    assert note in api.estimate(**JOB, framework="fsdp").notes and note in api.plan(**JOB, framework="fsdp").notes
    assert "megatron-core" in renamed("NeMo")[0]
    assert renamed("Megatron_Core") == renamed("megatron-core") == renamed(None) == ()


def equal_but_for_zero(result: Any) -> list[tuple[Any, ...]]:
    return [
        (e.step_time_s, e.peak_memory_bytes, *(str(value) for key, value in e.plan.items() if key != "zero"))
        for e in result.plans
    ]


@pytest.mark.parametrize(("model", "gpus"), [("llama3.2-1b", 1), ("llama3.2-1b", 8)])
def test_plans_that_share_nothing_out_count_once(model: str, gpus: int) -> None:
    result = api.plan(model, "dgx-h100", gpus=gpus, global_batch=8, seq=1024, top=10**5)
    keys = equal_but_for_zero(result)
    assert len(set(keys)) == len(keys) == result.feasible


def test_replicas_of_experts_share_out_where_nothing_else_does() -> None:
    job = Job(model=load_model("mixtral-8x7b"), gpus=8, global_batch=8, seq_len=1024, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    listed = CorrectedSpace().list(job, CORRECTED.strategies["1d"], 8, RULES).configurations
    rows = {tuple(map(int, row)) for row in zip(listed.tp, listed.dp, listed.ep, listed.zero, strict=True)}  # type: ignore[arg-type]
    assert {zero for *mesh, zero in rows if mesh == [8, 1, 1]} == {1, 3}
    assert {zero for *mesh, zero in rows if mesh == [8, 1, 8]} == {1}
    assert {zero for *mesh, zero in rows if mesh == [1, 8, 8]} == {1, 3}


def test_the_fastest_plan_that_likely_fits_is_named() -> None:
    job: dict[str, Any] = {"model": "llama3-70b", "cluster": "gb200-nvl72", "gpus": 256, "global_batch": 512,
                           "oom_limit": 1.0}  # fmt: skip
    few, many = api.plan(**job, top=2), api.plan(**job, top=60)
    first = next(e for e in many.plans if e.oom_probability <= LIKELY_FITS)
    assert all(e.oom_probability > LIKELY_FITS for e in few.plans)
    assert few.likely_to_fit is not None and few.likely_to_fit.plan == first.plan
    assert few.likely_to_fit.step_time_s == pytest.approx(first.step_time_s, rel=1e-12)
    assert few.to_json()["likely_to_fit"]["plan"] == first.plan
    assert api.plan(**JOB, top=1, limit=["oom_probability<=0.1"]).likely_to_fit is None


@pytest.mark.parametrize(
    ("framework", "read", "words"),
    [
        (None, "attention", "was read as attention, as in Megatron-LM"),
        ("megatron-core", "attention", "was read as attention, as megatron-core means it"),
        ("torchtitan", "norm+activation+outputs", "was read as norm+activation+outputs, as torchtitan means it"),
        ("torchtune", "norm+activation+outputs", "as torchtune means it"),
    ],
)
def test_selective_recomputation_is_what_the_framework_calls_so(framework: str | None, read: str, words: str) -> None:
    given = {"micro_batch": 1, "zero": 3}
    e = api.estimate(**JOB, framework=framework, plan={**given, "recompute": "selective"})
    spelled = api.estimate(**JOB, framework=framework, plan={**given, "recompute": read})
    assert set(e.plan["recompute"].split("+")) == set(read.split("+"))
    assert (e.step_time_s, e.peak_memory_bytes) == (spelled.step_time_s, spelled.peak_memory_bytes)
    assert [note for note in e.notes if "selective" in note and words in note]
    assert not [note for note in spelled.notes if "selective" in note]


def test_attention_alone_is_attention_whatever_the_framework() -> None:
    e = api.estimate(**JOB, framework="torchtitan", plan={"recompute": "attention"})
    assert e.plan["recompute"] == "attention"
    both = api.estimate(**JOB, framework="torchtitan", plan={"recompute": "selective+attention"})
    assert set(both.plan["recompute"].split("+")) == {"attention", "norm", "activation", "outputs"}


def test_a_search_reads_selective_as_the_framework_does() -> None:
    found = searched("torchtitan", strategy="1d", fix={"recompute": "selective", "tp": 1, "pp": 1})
    assert {plan.plan["recompute"] for plan in found.plans} == {"norm+activation+outputs"}
    assert any("selective was read as norm+activation+outputs" in note for note in found.notes)
