"""What a user may say about a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

from steptime import api
from steptime.api.jobs import check_model
from steptime.api.models import load_model
from steptime.api.request import checked_plan, completed_degrees, constraints_of, some_of, strategy_of, whole
from steptime.errors import FieldError, PlanError, UnknownNameError, UserError
from steptime.formats.run_spec import parse_run
from steptime.plan.framework_file import framework_names
from steptime.plan.space import Constraint
from steptime.search.modes import MODES
from steptime.store.files import parse_toml

CORRECTED, PUBLISHED = MODES["corrected"], MODES["published"]


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None, 10**30])
def test_whole_numbers(value):
    with pytest.raises(FieldError, match="whole number"):
        whole("tp", value, 1, 100)


@pytest.mark.each(
    ("given", "means"),
    [
        ("dp", {"dp"}), ("dp,pp", {"dp", "pp"}), (" dp , pp ", {"dp", "pp"}), ("none", set()), ("", set()), ([], set()),
        (["pp"], {"pp"}), (frozenset({"dp"}), {"dp"}),
    ],
)  # fmt: skip
def test_overlap(given, means):
    assert some_of("overlap", given, ("dp", "pp")) == means


@pytest.mark.parametrize("given", ["tp", 3, ["dp", 3], "dp;pp"])
def test_wrong_overlap(given):
    with pytest.raises(UserError):
        some_of("overlap", given, ("dp", "pp"))


@pytest.mark.parametrize(
    ("strategy", "plan", "name"),
    [
        ("auto", {}, "1d"), ("auto", {"tp": 8, "pp": 4}, "1d"), ("auto", {"cp": 2}, "context"),
        ("auto", {"tp2": 2}, "2d"), ("auto", {"panels": 8}, "2d"), ("context", {"cp": 1}, "context"),
        ("2d", {"tp": 2}, "2d"),
    ],
)  # fmt: skip
def test_the_strategy_that_degrees_mean(strategy, plan, name):
    assert strategy_of(strategy, plan, CORRECTED) == (name, plan)


def test_context_ranks_may_be_called_tp2():
    given = {"tp2": 4, "placement": {"tp2": 2}}
    assert strategy_of("context", given, CORRECTED) == ("context", {"cp": 4, "placement": {"cp": 2}})
    assert given == {"tp2": 4, "placement": {"tp2": 2}}


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [("auto", {"cp": 2, "tp2": 2}), ("1d", {"cp": 2}), ("1d", {"tp2": 2}), ("2d", {"cp": 2}), ("1d", {"panels": 2}),
     ("1d", {"placement": {"cp": 2}})],
)  # fmt: skip
def test_degrees_of_another_strategy(strategy, plan):
    with pytest.raises(PlanError):
        strategy_of(strategy, plan, CORRECTED)


def test_degrees_are_completed():
    assert completed_degrees({"tp": 4, "pp": 2}, 64) == {"tp": 4, "tp2": 1, "cp": 1, "pp": 2, "dp": 8}
    assert completed_degrees({"tp": 4, "dp": 3}, None)["dp"] == 3
    with pytest.raises(PlanError, match=r"tp 4 x dp 3 = 12, not 16 GPUs"):
        completed_degrees({"tp": 4, "dp": 3}, 16)
    with pytest.raises(PlanError, match=r"tp 3 does not divide 16 GPUs"):
        completed_degrees({"tp": 3}, 16)


def test_constraints():
    assert constraints_of({"tp": 8, "recompute": "full", "sp": "off"}, [" pp <= 16 "]) == [
        Constraint(column="tp", relation="=", value=8), Constraint(column="recompute", relation="=", value=2),
        Constraint(column="sp", relation="=", value=0), Constraint(column="pp", relation="<=", value=16),
    ]  # fmt: skip


@pytest.mark.each(
    "plan",
    [
        {"tp": 0}, {"tp": "2"}, {"nonsense": 1}, {"zero": 4}, {"recompute": "some"}, {"schedule": "pipe"}, {"ep": 0},
        {"schedule": "interleaved"}, {"schedule": "1f1b", "vpp": 2}, {"attention": "summa"}, {"placement": 3},
        {"placement": {"xp": 2}}, {"placement": {"tp": 0}}, {"recompute": "full+norm"}, {"recompute_every": 2},
        {"sp": 2}, {"sp": "perhaps"}, {"context": "rings"}, {"gradient_dtype": "fp8"}, {"expert_imbalance": 0.5},
        {"expert_capacity": "2"}, {"shard": -1}, {"placement": {"ep": 8}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_plans(plan):
    with pytest.raises(UserError):
        checked_plan(plan, CORRECTED)


@pytest.mark.each(
    "plan",
    [{"vpp": 2}, {"zero": 3}, {"recompute": "full"}, {"recompute": "attention"}, {"ep": 2}, {"sp": "off"}, {"shard": 8},
     {"context": "ring"}, {"gradient_dtype": "fp32"}, {"expert_capacity": 2}],
    ids=str,
)  # fmt: skip
def test_what_the_published_model_has_not(plan):
    checked_plan(plan, CORRECTED)
    with pytest.raises(PlanError, match="published model has no"):
        checked_plan(plan, PUBLISHED)


ESTIMATE = {"model": "llama2-7b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 64}


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"tp": 3}, "does not divide"),
        ({"tp": 4, "placement": {"tp": 3}}, "does not divide tp 4"),
        ({"tp": 4, "dp": 4, "placement": {"tp": 4, "dp": 4}}, "more than the 8 devices"),
    ],
)  # fmt: skip
def test_plans_that_contradict_the_job(plan, problem):
    with pytest.raises(PlanError, match=problem):
        api.estimate(**ESTIMATE, plan=plan)


def test_a_batch_smaller_than_the_replicas():
    """It is infeasible, not an error: the answer says why."""
    assert api.estimate(**(ESTIMATE | {"global_batch": 8}), plan={"dp": 16}).reasons == ("batch",)
    assert "micro_batch" in api.estimate(**ESTIMATE, plan={"dp": 16, "micro_batch": 5}).reasons
    with pytest.raises(PlanError, match="micro_batch 5 is more"):
        api.estimate(**ESTIMATE, plan={"dp": 16, "micro_batch": 5}, mode="published")


def test_an_estimate_is_placed_as_launchers_number_ranks():
    plan = api.estimate(**ESTIMATE, plan={"tp": 4, "pp": 2}).plan
    room = 8 // 4
    assert plan["placement"] == {"tp": 4, "dp": min(plan["dp"], room), "pp": room // min(plan["dp"], room)}


@pytest.mark.parametrize("mode", ["corrected", "published"])
def test_an_unknown_strategy_is_refused_in_every_mode(mode):
    with pytest.raises(UnknownNameError, match=r"there is no strategy '1D'\n.*1d"):
        api.estimate(**ESTIMATE, plan={"strategy": "1D"}, mode=mode)
    with pytest.raises(UnknownNameError, match=r"there is no strategy '1D'\n.*1d"):
        api.plan(**ESTIMATE, strategy="1D", mode=mode)


def test_the_published_mode_takes_the_fastest_placement():
    published = {**ESTIMATE, "mode": "published"}
    best = api.estimate(**published, plan={"tp": 4, "pp": 2})
    for placement in ({"tp": 4, "pp": 2}, {"tp": 4, "dp": 2}, {"tp": 2, "dp": 2, "pp": 2}, {}):
        other = api.estimate(**published, plan={"tp": 4, "pp": 2, "placement": placement})
        assert best.step_time_s <= other.step_time_s
    assert best.plan["placement"]["tp"] == 4


def test_an_illegal_plan_is_data():
    e = api.estimate(**(ESTIMATE | {"gpus": 64}), plan={"tp": 64})
    assert not e.feasible and "heads" in e.reasons


MIXTRAL = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 64, "global_batch": 256}


@pytest.mark.each(
    ("arguments", "problem"),
    [
        ({**ESTIMATE, "plan": {"ep": 2}}, "llama2-7b has no experts"),
        ({**ESTIMATE, "plan": {"expert_capacity": 2}}, "llama2-7b has no experts"),
        ({**MIXTRAL, "plan": {"tp2": 2}}, "SUMMA is not modelled for experts"),
        ({**MIXTRAL, "model": "deepseek-v3", "strategy": "2d"}, "SUMMA is not modelled for experts"),
        ({**MIXTRAL, "mode": "published"}, "published model has no experts"),
        ({**ESTIMATE, "mode": "published", "lora": {"rank": 4}}, "published model has no adapters"),
        ({**ESTIMATE, "mode": "published", "dtype": "mxfp8"}, "published model has no quantisation"),
        ({**ESTIMATE, "mode": "published", "framework": "generic"}, "knows the ideal framework only"),
        ({**ESTIMATE, "framework": "megatron-2020"}, "did you mean megatron-2021"),
        ({**ESTIMATE, "lora": {"targets": "linear"}}, "lora.rank: missing"),
        ({**ESTIMATE, "lora": {"rank": 0}}, "lora.rank: 0 must be a whole number from 1"),
        ({**ESTIMATE, "lora": {"rank": 4, "targets": "mlp"}}, "lora.targets"),
        ({**ESTIMATE, "lora": {"rank": 4, "alpha": 8}}, "key of lora"),
        ({**ESTIMATE, "plan": {"expert_imbalance": 0.5}}, "the nearest is 1"),
    ],
)  # fmt: skip
def test_what_a_model_or_a_mode_has_not(arguments, problem):
    with pytest.raises(UserError, match=problem):
        api.estimate(**arguments)


def test_what_is_no_estimate_has_no_difference():
    e = api.estimate(**ESTIMATE)
    for a, b, name in ((e, "run.toml", "b: 'run.toml'"), (None, e, "a: None")):
        with pytest.raises(FieldError, match=f"{name} is no estimate"):
            api.diff(a, b)


def test_numbers_of_every_kind_are_told():
    with pytest.raises(FieldError, match=r"utilization: 1\.5 must lie from"):
        api.limits(utilization=Fraction(3, 2))


def test_a_search_refuses_the_same():
    for changes in ({"fix": {"ep": 2}}, {"fix": {"expert_capacity": 2}}, {"framework": "x"}, {"lora": {"rank": 0}},
                    {"mode": "published", "fix": {"context": "ring"}}):  # fmt: skip
        with pytest.raises(UserError):
            api.plan(**ESTIMATE, **changes)
    with pytest.raises(PlanError, match="SUMMA"):
        api.plan(**MIXTRAL, strategy="2d")


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "ep": 8, "recompute": "norm+activation", "gradient_dtype": "fp32", "expert_imbalance": 1.2},
        {"tp": 2, "ep": 4, "etp": 2, "cp": 2, "context": "ulysses", "overlap": "dp,pp", "expert_capacity": 1.25},
        {"zero": 3, "shard": 8, "offload": "optimizer", "recompute": "full", "recompute_every": 2, "sp": "off"},
    ],
    ids=str,
)
def test_the_plan_of_an_estimate_may_be_given_as_it_is(plan):
    """Through JSON too: a written plan means the same estimate."""
    first = api.estimate(**MIXTRAL, plan=plan)
    again = api.estimate(**MIXTRAL, plan=json.loads(json.dumps(first.to_json()["plan"])))
    assert replace(again, notes=()) == replace(first, notes=())  # the micro-batch is given the second time


@pytest.mark.quick(every=3)
@pytest.mark.each("framework", framework_names())
@pytest.mark.each("overlap", [None, "none"])
def test_the_plan_of_an_estimate_means_the_same_under_every_framework(framework, overlap):
    """What a framework hides of its own accord, nothing included, is no other choice when the plan says so."""
    plan = {"tp": 2, "sp": "off"} if overlap is None else {"tp": 2, "sp": "off", "overlap": overlap}
    given = {**MIXTRAL, "model": "llama2-13b", "framework": framework}
    first = api.estimate(**given, plan=plan)
    again = api.estimate(**given, plan=json.loads(json.dumps(first.to_json()["plan"])))
    assert again.step_time_s == first.step_time_s and again.plan == first.plan


@pytest.mark.parametrize(
    ("written", "means"),
    [('["dp", "pp"]', {"dp", "pp"}), ("[]", set()), ('"dp, pp"', {"dp", "pp"}), ('["none"]', set())],
)
def test_a_list_in_a_file_is_a_list_in_python(written, means):
    document = parse_toml(f'model = "x"\n[plan]\noverlap = {written}', "run.toml")
    assert checked_plan(parse_run(document, "run.toml").plan, CORRECTED)["overlap"] == means


def test_a_list_of_no_words_is_refused_by_its_field():
    with pytest.raises(FieldError, match=r"^run\.toml: plan\.overlap: \[1\] is not a text"):
        parse_run(parse_toml('model = "x"\n[plan]\noverlap = [1]', "run.toml"), "run.toml")


@pytest.mark.parametrize(
    ("key", "value", "changes"),
    [
        ("ep", 8, "expert"), ("sp", "off", "tp_comm"), ("shard", 8, "dp_comm"), ("recompute", "experts", "compute"),
        ("gradient_dtype", "fp32", "dp_comm"), ("etp", 2, "etp_comm"),
    ],
)  # fmt: skip
def test_every_choice_moves_the_step(key, value, changes):
    _moves({"tp": 2, "zero": 1}, key, value, changes)


def test_imbalance_matters_where_ranks_share_the_experts():
    """Not where each has all of them; and no rank gets more than all tokens."""
    _moves({"tp": 2, "zero": 1, "ep": 4}, "expert_imbalance", 1.5, "compute")
    alone, most = ({"tp": 2, "zero": 1, "ep": ep, "expert_imbalance": worst} for ep, worst in ((1, 1.5), (4, 99)))
    assert api.estimate(**MIXTRAL, plan=alone).step_time_s == api.estimate(
        **MIXTRAL, plan={**alone, "expert_imbalance": 1.0}).step_time_s  # fmt: skip
    assert api.estimate(**MIXTRAL, plan=most).step_time_s == api.estimate(
        **MIXTRAL, plan={**most, "expert_imbalance": 4.0}).step_time_s  # fmt: skip


def _moves(plan, key, value, changes):
    plain = api.estimate(**MIXTRAL, plan=plan)
    other = api.estimate(**MIXTRAL, plan={**plan, key: value})
    assert other.step_time_s != plain.step_time_s
    one, two = (e.time.rollup(1) | e.memory.rollup(1) for e in (plain, other))
    assert any(changes in name and one.get(name) != two.get(name) for name in one | two)


def test_habits_of_a_framework_yield_to_what_the_user_says():
    given = {**ESTIMATE, "framework": "megatron-core"}
    habits = api.estimate(**given, plan={"cp": 2}).plan
    assert (habits["gradient_dtype"], habits["context"], habits["overlap"]) == ("fp32", "ring", ["dp", "tp"])
    own = api.estimate(**given, plan={"cp": 2, "gradient_dtype": "bf16", "context": "ulysses", "overlap": "none"}).plan
    assert (own["gradient_dtype"], own["context"], own["overlap"]) == ("bf16", "ulysses", [])


def test_the_band_is_that_of_the_framework():
    generic, named = (api.estimate(**ESTIMATE, framework=name) for name in (None, "megatron-core"))
    for e in (generic, named):
        low, high = e.step_time_band_s
        assert low < e.step_time_s < high
        assert sum(e.band_shares.values()) <= 1 and "noise" in e.band_shares
        assert list(e.band_shares.values()) == sorted(e.band_shares.values(), reverse=True)
        assert e.provenance.band.startswith("90 %")
    assert generic.provenance.framework == "generic"
    ideal = api.estimate(**ESTIMATE, framework="ideal")
    assert (ideal.step_time_band_s, ideal.band_shares, ideal.provenance.band) == (None, {}, "uncalibrated")
    published = api.estimate(**ESTIMATE, mode="published")
    assert (published.provenance.framework, published.step_time_band_s) == ("ideal", None)


def test_adapters_train_less_than_all_weights():
    whole, lora, qlora = (
        api.estimate(**ESTIMATE, lora=lora) for lora in (None, {"rank": 16}, {"rank": 16, "qlora": True})
    )
    assert lora.model_flops < whole.model_flops
    assert qlora.peak_memory_bytes < lora.peak_memory_bytes < whole.peak_memory_bytes
    assert qlora.workload["lora"] == {"rank": 16, "targets": "linear", "qlora": True}


def test_a_search_spreads_experts():
    result = api.plan(**MIXTRAL, seq=4096, limit=["ep<=4"], top=3)
    assert result.feasible and all(e.plan["ep"] <= 4 for e in result.plans)
    fixed = api.plan(**MIXTRAL, seq=4096, top=1, fix={"ep": 8, "etp": 1, "sp": "off", "recompute": "norm",
                                                      "context": "ring", "gradient_dtype": "fp32"})  # fmt: skip
    best = fixed.plans[0]
    keys = ("ep", "sp", "recompute", "context", "gradient_dtype")
    assert tuple(best.plan[key] for key in keys) == (8, 0, "norm", "ring", "fp32")
    again = api.estimate(**MIXTRAL, seq=4096, plan=best.plan)
    assert again.step_time_s == pytest.approx(best.step_time_s, rel=1e-12)


@pytest.mark.parametrize("key", ["ep", "expert_capacity"])
def test_experts_of_a_captured_module_are_not_denied(key):
    """A module may have experts; what is not modelled is to divide them."""
    job = SimpleNamespace(model=load_model("llama2-7b"), captured=object())
    with pytest.raises(PlanError, match="experts of a captured module are not divided") as error:
        check_model(job, "1d", {key: 4})
    assert "config.json" in str(error.value)
