"""Without degrees a plan that fits is taken, and a plan that does not fit has no training time and no bill."""

from __future__ import annotations

from typing import Any

import pytest

from steptime import api
from steptime.api.calls import ALONE, BEST_TAKEN, NO_RUN
from steptime.errors import UserError
from steptime.jobs.batches.run import batches

LARGE: dict[str, Any] = {"gpus": 64, "global_batch": 512}
RUN: dict[str, Any] = {"training": {"tokens": "1T"}, "prices": "default", "failures": "default"}


def test_without_degrees_replicas_that_do_not_fit_give_way_to_the_plan_of_a_search() -> None:
    found, best = api.estimate("llama3-70b", "dgx-h100", **LARGE, **RUN), api.plan("llama3-70b", "dgx-h100", **LARGE)
    assert found.feasible
    assert found.step_time_s == pytest.approx(best.plans[0].step_time_s, rel=1e-12)
    assert f"{ALONE}: {BEST_TAKEN}" in found.notes
    assert {"goodput", "money"} <= set(found.run)


def test_without_degrees_replicas_that_fit_stay() -> None:
    found = api.estimate("gpt2", "dgx-h100", gpus=8, global_batch=64)
    assert found.plan["dp"] == 8
    assert not any(BEST_TAKEN in note for note in found.notes)


def test_choices_of_the_job_hold_for_the_plan_that_is_taken() -> None:
    found = api.estimate("llama3-70b", "dgx-h100", **LARGE, plan={"context": "ring"})
    assert found.feasible
    assert found.plan["context"] == "ring"


def test_a_given_plan_that_does_not_fit_has_an_estimate_and_no_run() -> None:
    found = api.estimate("llama3-70b", "dgx-h100", **LARGE, **RUN, plan={"dp": 64})
    assert not found.feasible
    assert found.step_time_s > 0
    assert (dict(found.training), dict(found.run)) == ({}, {})
    assert NO_RUN in found.notes


def test_a_job_that_nothing_fits_has_no_run() -> None:
    found = api.estimate("gpt3-1t", "dgx-h100", gpus=8, global_batch=8, **RUN)
    assert not found.feasible
    assert (dict(found.training), dict(found.run)) == ({}, {})
    nearest = api.plan("gpt3-1t", "dgx-h100", gpus=8, global_batch=8, training={"tokens": "1T"}).nearest
    assert nearest is not None
    assert not nearest.training


def test_shadow_prices_are_of_the_plan_of_a_search_or_of_a_given_one_that_fits() -> None:
    best = api.plan("llama3-8b", "dgx-h100", gpus=16, global_batch=64).plans[0]
    run = {"training": {"tokens": "1T"}, "plans": False, "gpus": 16, "global_batch": 64}
    found = api.shadow("llama3-8b", "dgx-h100", **run)
    assert found.step_s == pytest.approx(best.step_time_s, rel=1e-12)
    assert found.plan["tp"] == best.plan["tp"]
    assert BEST_TAKEN in found.notes
    with pytest.raises(UserError, match="does not fit"):
        api.shadow("llama3-70b", "dgx-h100", **{**run, "plan": {"dp": 16}})


def test_lengths_are_all_under_one_plan() -> None:
    found = batches("llama3-70b", "dgx-h100", lengths="2048=0.5,8192=0.5", **LARGE)
    assert found.plan["pp"] > 1
    assert all(not way.reasons for way in found.ways)
