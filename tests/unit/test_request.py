"""What a user may say about a plan."""

from __future__ import annotations

import pytest

from steptime import api
from steptime.errors import FieldError, PlanError, UserError
from steptime.plan.constraints import Constraint
from steptime.study.modes import MODES
from steptime.surface.request import (
    checked_plan,
    completed_degrees,
    constraints_of,
    overlap_of,
    strategy_of,
    whole,
)

CORRECTED, PUBLISHED = MODES["corrected"], MODES["published"]


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None, 10**30])
def test_whole_numbers(value):
    with pytest.raises(FieldError, match="whole number"):
        whole("tp", value, 1, 100)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("dp", {"dp"}), ("dp,pp", {"dp", "pp"}), (" dp , pp ", {"dp", "pp"}), ("none", set()), ("", set()), ([], set()),
        (["pp"], {"pp"}), (frozenset({"dp"}), {"dp"}),
    ],
)  # fmt: skip
def test_overlap(given, means):
    assert overlap_of(given) == means


@pytest.mark.parametrize("given", ["tp", 3, ["dp", 3], "dp;pp"])
def test_wrong_overlap(given):
    with pytest.raises(UserError):
        overlap_of(given)


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
    assert constraints_of({"tp": 8, "recompute": "full"}, [" pp <= 16 "]) == [
        Constraint(column="tp", relation="=", value=8), Constraint(column="recompute", relation="=", value=2),
        Constraint(column="pp", relation="<=", value=16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 0}, {"tp": "2"}, {"nonsense": 1}, {"zero": 4}, {"recompute": "some"}, {"schedule": "gpipe"}, {"ep": 2},
        {"schedule": "interleaved"}, {"schedule": "1f1b", "vpp": 2}, {"attention": "summa"}, {"placement": 3},
        {"placement": {"xp": 2}}, {"placement": {"tp": 0}}, {"recompute": "attention"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_plans(plan):
    with pytest.raises(UserError):
        checked_plan(plan, CORRECTED)


@pytest.mark.parametrize("plan", [{"vpp": 2}, {"zero": 3}, {"recompute": "full"}], ids=str)
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
    assert api.estimate(**(ESTIMATE | {"global_batch": 8})).reasons == ("batch",)
    assert "micro_batch" in api.estimate(**ESTIMATE, plan={"dp": 16, "micro_batch": 5}).reasons
    with pytest.raises(PlanError, match="micro_batch 5 is more"):
        api.estimate(**ESTIMATE, plan={"dp": 16, "micro_batch": 5}, mode="published")


def test_an_estimate_takes_the_fastest_placement():
    best = api.estimate(**ESTIMATE, plan={"tp": 4, "pp": 2})
    for placement in ({"tp": 4, "pp": 2}, {"tp": 4, "dp": 2}, {"tp": 2, "dp": 2, "pp": 2}, {}):
        other = api.estimate(**ESTIMATE, plan={"tp": 4, "pp": 2, "placement": placement})
        assert best.step_time_s <= other.step_time_s
    assert best.plan["placement"]["tp"] == 4


def test_an_illegal_plan_is_data():
    e = api.estimate(**(ESTIMATE | {"gpus": 64}), plan={"tp": 64})
    assert not e.feasible and "heads" in e.reasons
