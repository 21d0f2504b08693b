"""A search may bound the chance of running out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime import api
from steptime.cli.job import parse_limits
from steptime.errors import FieldError, PlanError, UnknownNameError
from steptime.estimate.memory_definitions import LIKELY_FITS, exceeding, likely_fits, memory_constants
from steptime.plan.plans import Plans
from steptime.search.ranking import RISKY_SHOWN

JOB: dict[str, Any] = {"model": "llama2-13b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 32, "strategy": "1d"}
SMALL: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}


@pytest.mark.quick("0.1")
@pytest.mark.parametrize("limit", [0.5, 0.1, 1e-3])
def test_plans_are_those_of_the_whole_search_below_the_limit(limit: float) -> None:
    every = api.plan(**JOB, top=10**5, oom_limit=1.0)
    safe = api.plan(**JOB, top=10**5, limit=[f"oom_probability<={limit}"])
    kept = [e for e in every.plans if e.oom_probability <= limit]
    assert 0 < len(kept) < len(every.plans)
    assert [(e.step_time_s, e.plan) for e in safe.plans] == [(e.step_time_s, e.plan) for e in kept]
    assert safe.candidates == every.candidates and safe.feasible == len(kept)
    assert safe.reasons == {**every.reasons, "oom_probability": every.feasible - len(kept)}
    least = [(e.peak_memory_bytes, e.step_time_s) for e in kept]
    assert min(least)[0] == pytest.approx(safe.pareto[-1]["peak_memory_bytes"], rel=1e-12)
    assert safe.pareto[0]["step_time_s"] == pytest.approx(kept[0].step_time_s, rel=1e-12)


@pytest.mark.parametrize("chance", [1e-4, 0.1, 0.5, 0.9])
def test_the_bound_is_the_inverse_of_the_chance(chance: float) -> None:
    needed = float(memory_constants().needed(60e9, 0, "generic"))
    deviation = memory_constants().spread("device", "generic")
    for share in np.linspace(0.5, 1.5, 101):
        fits = exceeding(needed, share * needed, deviation) <= chance
        assert likely_fits(60e9, Plans(), "generic", share * needed, chance) == fits


def test_where_no_plan_keeps_the_limit_the_nearest_and_what_to_drop_are_named() -> None:
    risky = next(e for e in api.plan(**JOB, top=10**5, oom_limit=1.0).plans if e.oom_probability > 0.2).plan
    fix = {key: risky[key] for key in ("tp", "cp", "pp", "vpp", "micro_batch", "recompute", "zero")}
    assert api.plan(**JOB, fix=fix).feasible
    found = api.plan(**JOB, fix=fix, limit=["oom_probability<=0.1"])
    assert not found.feasible and not found.plans and not found.pareto
    assert found.stop.reason == "infeasible" and found.nearest is not None and found.nearest.feasible
    assert any(line.startswith("without --limit 'oom_probability<=0.1' plans fit") for line in found.advice)


@pytest.mark.parametrize(
    "bound",
    ["oom_probability>=0.1", "oom_probability=0.1", "oom_probability<=0", "oom_probability<=1", "oom_probability<x"],
)
def test_bounds_that_are_none_are_refused(bound: str) -> None:
    with pytest.raises(FieldError, match="no upper bound between 0 and 1"):
        api.plan(**SMALL, limit=[bound])


def test_the_tighter_of_two_counts_and_published_mode_has_none() -> None:
    one, two = (api.plan(**JOB, limit=[*more, "oom_probability < 0.01"]) for more in ((), ("oom_probability<=0.3",)))
    assert one.feasible == two.feasible
    with pytest.raises(PlanError, match="does not model the probability of running out"):
        api.plan("gpt3_1T", "published-b200-nvs8", gpus=1024, global_batch=4096, mode="published",
                 limit=["oom_probability<=0.1"])  # fmt: skip


def test_the_command_takes_it_as_reports_write_it() -> None:
    assert parse_limits(["P(oom) <= 10 %", "oom_probability<.05"]) == ["oom_probability<=0.1", "oom_probability<0.05"]
    with pytest.raises(UnknownNameError, match="did you mean oom_probability"):
        parse_limits(["oom_prob<=0.1"])


@pytest.mark.slow
def test_a_plan_above_the_limit_is_not_first_and_is_shown_with_what_makes_it_fit() -> None:
    every, found = api.plan(**JOB, top=10**5, oom_limit=1.0), api.plan(**JOB, top=10**5)
    safe = [e for e in every.plans if e.oom_probability <= LIKELY_FITS]
    assert 0 < len(safe) < len(every.plans) and every.risky == () and every.oom_limit is None
    assert [e.plan for e in found.plans] == [e.plan for e in safe] and found.oom_limit == LIKELY_FITS
    assert found.feasible == every.feasible and found.reasons == every.reasons and found.pareto == every.pareto
    before = [e for e in every.plans if e.oom_probability > LIKELY_FITS and e.step_time_s < safe[0].step_time_s]
    assert before and [each.estimate.plan for each in found.risky] == [e.plan for e in before[:RISKY_SHOWN]]
    assert any(each.remedies for each in found.risky)
    for each in found.risky:
        for remedy in each.remedies:
            key, _, value = remedy.change.partition("=")
            plan = {k: v for k, v in each.estimate.plan.items() if k in ("tp", "cp", "pp", "vpp", "zero")}
            plan |= {"micro_batch": each.estimate.plan["micro_batch"], "recompute": each.estimate.plan["recompute"]}
            told = api.estimate(**JOB, plan=plan | {key: int(value) if value.isdigit() else value})
            assert told.oom_probability == pytest.approx(remedy.oom_probability, abs=1e-12)
            assert remedy.oom_probability <= LIKELY_FITS < each.estimate.oom_probability
            assert told.step_time_s == pytest.approx(remedy.step_time_s, rel=1e-9)
    assert found.to_json()["risky"][0]["would_fit"][0].keys() == {"change", "step_time_s", "oom_probability"}


def test_where_none_keeps_the_limit_the_first_needs_least_memory() -> None:
    job = JOB | {"model": "llama3.1-70b", "gpus": 16, "framework": "megatron-core"}
    found, every = api.plan(**job), api.plan(**job, top=10**5, oom_limit=1.0)
    assert min(e.oom_probability for e in every.plans) > LIKELY_FITS
    assert [e.peak_memory_bytes for e in found.plans] == [min(e.peak_memory_bytes for e in every.plans)]
    assert all(each.estimate.step_time_s < found.plans[0].step_time_s for each in found.risky)


@pytest.mark.parametrize("limit", [0, 1.5, True, "x"])
def test_limits_that_are_no_shares_are_refused(limit: Any) -> None:
    with pytest.raises(FieldError, match="no share above 0 and at most 1"):
        api.plan(**SMALL, oom_limit=limit)
