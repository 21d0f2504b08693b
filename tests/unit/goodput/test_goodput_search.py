"""Plans by energy and cost, deadlines and budgets, fleets, and shadow prices."""

from __future__ import annotations

import numpy as np
import pytest

from steptime import api
from steptime.errors import UserError
from steptime.hardware.library import changed_cluster
from steptime.study.fleet import pareto
from steptime.study.shadow import TFLOPS, Case, resources_of

JOB = {"gpus": 64, "global_batch": 256, "oom_limit": 1.0}
ARGS = ("llama3-8b", "dgx-h100")
LENGTH = {"training": {"tokens": "100B"}}


def energy(e: object) -> float:
    return e.run["energy"]["step_kWh"]  # type: ignore[attr-defined,no-any-return]


@pytest.mark.slow
def test_the_first_plan_by_energy_draws_least_of_all() -> None:
    by_time = api.plan(*ARGS, **JOB, **LENGTH, prices="default", top=200)
    by_energy = api.plan(*ARGS, **JOB, **LENGTH, prices="default", objective="energy", top=200)
    least = [energy(e) for e in by_energy.plans]
    assert least == sorted(least) and least[0] <= min(energy(e) for e in by_time.plans)
    front = by_energy.energy_front
    assert front[-1]["step_energy_J"] / 3.6e6 == pytest.approx(least[0])
    assert front[0]["step_time_s"] == pytest.approx(by_time.plans[0].step_time_s)
    times, joules = ([point[name] for point in front] for name in ("step_time_s", "step_energy_J"))
    assert times == sorted(times) and joules == sorted(joules, reverse=True)


def test_a_block_and_a_bill_have_the_same_energy() -> None:
    found = api.plan(*ARGS, **JOB, **LENGTH, prices="default", objective="energy", top=1)
    assert energy(found.plans[0]) * 3.6e6 == pytest.approx(found.energy_front[-1]["step_energy_J"], rel=1e-9)


def test_bounds_keep_plans_and_say_the_least_that_would() -> None:
    free = api.plan(*ARGS, **JOB, **LENGTH, objective="cost", top=1).plans[0].run["money"]["cost"]
    day = api.plan(*ARGS, **JOB, **LENGTH).plans[0].training["training_days"]
    kept = api.plan(*ARGS, **JOB, **LENGTH, budget=f"{free * 1.05:.0f} USD", deadline=f"{day * 1.05} days", top=1000)
    assert 0 < kept.feasible < kept.candidates and "budget" in kept.reasons
    assert all(e.run["money"]["cost"] <= free * 1.0501 for e in kept.plans)
    poor = api.plan(*ARGS, **JOB, **LENGTH, budget="10 USD")
    assert not poor.feasible and poor.nearest is None
    (advice,) = poor.advice
    assert "buys nothing" in advice and float(advice.split()[-2]) == pytest.approx(free, rel=1e-4)
    late = api.plan(*ARGS, **JOB, **LENGTH, deadline="1 h").advice[0]
    assert float(late.split()[-2]) == pytest.approx(day, rel=1e-4)


def test_refused() -> None:
    for more, word in (
        ({"objective": "speed"}, "objective"),
        ({"budget": "10 USD"}, "tokens"),
        ({**LENGTH, "budget": "10"}, "currency"),
        ({**LENGTH, "deadline": "3"}, "no unit"),
        ({**LENGTH, "deadline": "-3 days"}, "above zero"),
    ):
        with pytest.raises(UserError, match=word):
            api.plan(*ARGS, **JOB, **more)
    with pytest.raises(UserError, match="power of tpu-v5p is unknown"):
        api.plan("llama3-8b", "tpu-v5p-pod", **JOB, objective="energy")


def test_fleets() -> None:
    found = api.fleet("llama3-8b", ["dgx-h100", "dgx-a100"], [32, 64], global_batch=256, **LENGTH, deadline="20 days")
    costs = [one.values["cost"] for one in found.fleets if not one.exceeds]
    assert costs == sorted(costs) and len(found.fleets) + len(found.left_out) == 4
    fastest = min(found.fleets, key=lambda one: one.values["time"])
    assert found.fleets.index(fastest) in found.front
    poor = api.fleet("llama3-8b", ["dgx-h100"], [32, 64], global_batch=256, **LENGTH, budget="5 USD")
    assert "the least budget" in poor.advice[0] and len(poor.to_json()["fleets"]) == 2
    with pytest.raises(UserError, match="cluster"):
        api.fleet("llama3-8b", [], [32], global_batch=256, **LENGTH)


def test_pareto_by_hand() -> None:
    points = np.array([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [3.0, 2.0, 2.0]])
    assert pareto(points) == [0, 1, 2]


PLANS = [
    (model, cluster, gpus, batch, plan)
    for model, plan in (
        ("llama3-8b", {"dp": 16, "zero": 3, "recompute": "full"}),
        ("llama3-8b", {"tp": 4}),
        ("llama3-8b", {"tp": 2, "pp": 4}),
        ("llama3-70b", {"tp": 8, "pp": 2}),
        ("gpt3-175b", {"tp": 8, "pp": 2, "recompute": "full"}),
    )
    for cluster in ("dgx-h100", "dgx-a100-80gb", "dgx-b200", "dgx-h200")
    for gpus, batch in ((16, 64),)
]


@pytest.mark.quick(
    "llama3-70b-dgx-h100-16-64-plan12",
    "gpt3-175b-dgx-h200-16-64-plan19",
    "llama3-8b-dgx-h100-16-64-plan0",
    "llama3-8b-dgx-b200-16-64-plan6",
    "llama3-70b-dgx-b200-16-64-plan14",
)
@pytest.mark.parametrize(("model", "cluster", "gpus", "batch", "plan"), PLANS)
def test_a_shadow_price_is_the_difference_of_estimates(
    model: str, cluster: str, gpus: int, batch: int, plan: dict[str, object]
) -> None:
    job = {"gpus": gpus, "global_batch": batch, "plan": plan}
    if not api.estimate(model, cluster, **job).feasible:
        with pytest.raises(UserError, match="the plan does not fit"):
            api.shadow(model, cluster, **job, training={"tokens": "1B"}, plans=False)
        return
    found = api.shadow(model, cluster, **job, training={"tokens": "1B"}, plans=False)
    case = Case(asked=api.calls.asked_plan(model, cluster, **job), base=cluster)
    step = api.estimate(model, cluster, **job).step_time_s
    assert found.step_s == pytest.approx(step)
    prices = {one.name: one for one in found.prices}
    for resource in resources_of(case.asked.setting.cluster, "bf16"):
        price = prices[resource.name]
        assert price.worth_s >= -1e-9, "more of something never makes the step slower"
        near = resource.now * 1e-4
        close = changed_cluster(cluster, resource.tables(resource.now + near), "test")
        little = step - api.estimate(model, close, **job).step_time_s
        wanted = price.worth_s * near / resource.size
        assert little == pytest.approx(wanted, rel=0.02, abs=1e-8 * step), resource.name
        more = min(1.0, price.holds_to - price.now)
        changed = changed_cluster(cluster, resource.tables(resource.now + more * resource.size), "test")
        saved = step - api.estimate(model, changed, **job).step_time_s
        assert saved == pytest.approx(price.worth_s * more, rel=0.11, abs=1e-9 * step), resource.name


def test_matrix_units_are_worth_something() -> None:
    case = {"gpus": 16, "global_batch": 64, "plan": {"tp": 4}}
    found = api.shadow("llama3-8b", "dgx-h100", **case, training={"tokens": "1B"}, plans=False)
    price = next(one for one in found.prices if one.name == "matrix units")
    assert price.worth_s > 0 and price.now * TFLOPS == pytest.approx(989.4e12)
    assert price.worth_run_s == pytest.approx(price.worth_s * 1e9 / 8192 / 64)


@pytest.mark.slow
def test_more_memory_and_more_devices_follow_the_search() -> None:
    case = {"gpus": 16, "global_batch": 64}
    found = api.shadow("llama3-70b", "dgx-h100", **case, training={"tokens": "1B"})
    devices = next(one for one in found.prices if one.name == "devices")
    best = [api.plan("llama3-70b", "dgx-h100", gpus=n, global_batch=64, top=1).plans[0].step_time_s
            for n in (16, int(devices.holds_to))]  # fmt: skip
    assert devices.worth_s == pytest.approx((best[0] - best[1]) / (devices.holds_to - 16))
    memory = next(one for one in found.prices if one.name == "device memory")
    if memory.next_at is not None:
        larger = changed_cluster("dgx-h100", {"device": {"memory": f"{memory.next_at * 1e9 * (1 + 1e-9)} B"}}, "test")
        times = [api.plan("llama3-70b", cluster, **case, top=1, oom_limit=1.0).plans[0].step_time_s
                 for cluster in ("dgx-h100", larger)]  # fmt: skip
        assert times[1] < times[0]


def test_what_fits_is_told_cheapest_first() -> None:
    advice = api.plan("llama3.1-405b", "dgx-h100", gpus=64, global_batch=64, seq=32768).advice
    assert any("adam8bit" in line for line in advice) and any("devices work" in line for line in advice)
    times = [(float(line.split("best step ")[1].split()[0]), line) for line in advice if "devices" not in line]
    assert [t for t, _ in times] == sorted(t for t, _ in times)
