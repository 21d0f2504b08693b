"""The best K, the front, and what the planner returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime import api
from steptime.errors import UserError
from steptime.search.accumulators import Best, pareto_front

VALUES = st.lists(st.integers(0, 20).map(float), max_size=60)


@given(VALUES, st.integers(1, 12), st.integers(1, 7))
def test_the_best_are_the_smallest_and_ties_go_to_the_first(values, count, width):
    best = Best(count)
    for start in range(0, len(values), width):
        block = np.array(values[start : start + width])
        ids = np.arange(start, start + len(block))
        best.add(block, ids, -ids)
    order = np.argsort(values, kind="stable")[:count]
    assert best.values.tolist() == [values[i] for i in order]
    assert best.ids.tolist() == [[i, -i] for i in order]
    assert best.threshold == (best.values[-1] if len(values) >= count else np.inf)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_the_front_is_what_nothing_beats(points):
    time_s, memory = (np.array([p[i] for p in points], dtype=float) for i in (0, 1))
    front = [points[i] for i in pareto_front(time_s, memory)]
    assert front == sorted(
        {p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)}
    )  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return api.plan("llama2-13b", "dgx-a100", gpus=32, global_batch=64, top=6)


def test_plans_are_ranked_and_feasible(result):
    times = [e.step_time_s for e in result.plans]
    assert times == sorted(times) and len(times) == 6
    assert all(e.feasible and not e.reasons for e in result.plans)
    assert result.candidates >= result.feasible >= 6
    assert result.stop.reason == "pruned" and f"{result.candidates:,}" in result.stop.proof
    assert result.nearest is None and result.advice == ()


def test_the_front_starts_with_the_best(result):
    times = [p["step_time_s"] for p in result.pareto]
    memory = [p["peak_memory_bytes"] for p in result.pareto]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)
    first = [each.estimate for each in result.risky] or result.plans
    assert times[0] == pytest.approx(first[0].step_time_s, rel=1e-12)


def test_a_winner_is_its_own_estimate(result):
    for best in result.plans:
        names = ("dp", "tp", "tp2", "cp", "pp", "vpp", "micro_batch", "panels", "recompute", "zero", "placement")
        again = api.estimate("llama2-13b", "dgx-a100", gpus=32, global_batch=64, strategy=best.plan["strategy"],
                             plan={name: best.plan[name] for name in names})  # fmt: skip
        assert (again.step_time_s, again.peak_memory_bytes) == (best.step_time_s, best.peak_memory_bytes)
        assert again.plan == best.plan


def test_strategies_together_are_as_good_as_the_best_of_them(result):
    alone = [
        api.plan("llama2-13b", "dgx-a100", gpus=32, global_batch=64, strategy=name, top=1)
        for name in ("1d", "context", "2d")
    ]
    assert result.plans[0].step_time_s == min(found.plans[0].step_time_s for found in alone)


def test_reasons_of_strategies_add_up(result):
    """Both are searched unless one is named; of context parallelism what is not tensor parallelism alone."""
    parts = [
        api.plan("llama2-13b", "dgx-a100", gpus=32, global_batch=64, strategy=name, limit=limit, top=1)
        for name, limit in (("1d", []), ("context", ["cp>=2"]))
    ]
    assert result.candidates == sum(part.candidates for part in parts)
    assert result.feasible == sum(part.feasible for part in parts)
    assert all("memory" in part.reasons for part in parts)
    counted = {name: sum(part.reasons.get(name, 0) for part in parts) for name in result.reasons}
    assert result.reasons == counted and min(counted.values()) > 0
    assert list(result.reasons.values()) == sorted(counted.values(), reverse=True)


def test_fix_and_limit():
    result = api.plan("llama2-13b", "dgx-a100", gpus=32, global_batch=64, fix={"tp": 4, "recompute": "full"},
                      limit=["pp<=2"], top=50)  # fmt: skip
    assert {(e.plan["tp"], e.plan["recompute"]) for e in result.plans} == {(4, "full")}
    assert {e.plan["pp"] for e in result.plans} <= {1, 2}


def test_nothing_fits():
    result = api.plan("gpt3-175b", "dgx-a100", gpus=8, global_batch=64)
    assert (result.feasible, result.plans, result.stop.reason) == (0, (), "infeasible")
    assert result.nearest is not None and "memory" in result.nearest.reasons
    assert result.reasons["memory"] > 0
    assert any("devices work" in sentence for sentence in result.advice)


def advice_on(model: str, cluster: str, gpus: int, global_batch: int, **more: Any) -> dict[str, float | None]:
    """Sentences of advice without their figure -> the figure."""
    found = api.plan(model, cluster, gpus=gpus, global_batch=global_batch, **more)
    assert found.feasible == 0
    parts = [sentence.partition(": best step ") for sentence in found.advice]
    return {words: float(rest.split()[0]) if rest else None for words, _, rest in parts}


HOST = "--fix offload=optimizer fits, with the optimiser in the host's memory"


def test_where_memory_is_short_the_host_is_tried():
    advice = advice_on("llama3-70b", "dgx-h100", 8, 32)
    offloaded = api.plan("llama3-70b", "dgx-h100", gpus=8, global_batch=32, fix={"offload": "optimizer"}, top=1)
    assert advice[HOST] == pytest.approx(offloaded.plans[0].step_time_s, rel=1e-3)
    assert list(advice) == ["16 devices work", HOST]  # a second node, not 15 devices of it; fewest device seconds first


def test_what_the_host_holds_already_is_not_advised():
    advice = advice_on("llama3-8b", "rtx4090-8", 1, 4, fix={"offload": "optimizer,activations"})
    assert not any(words.startswith("--fix offload") for words in advice)
    assert any(words.startswith("steptime fit llama3-8b --device rtx-4090 --batch 4 weighs") for words in advice)


def test_constraints_without_which_plans_fit_are_named():
    advice = advice_on("llama3-8b", "dgx-h100", 32, 64, fix={"schedule": "zb-h2", "vpp": 2}, limit=["dp>=1"])
    assert set(advice) == {"without --fix vpp=2 plans fit", "without --fix schedule plans fit"}
    advice = advice_on("llama3-8b", "dgx-h100", 32, 64, fix={"tp": 8}, limit=["dp>=8"])
    bound, freed = (
        "without --limit 'dp>=8' plans fit",
        api.plan("llama3-8b", "dgx-h100", gpus=32, global_batch=64, fix={"tp": 8}, top=1),
    )
    assert advice[bound] == pytest.approx(freed.plans[0].step_time_s, rel=1e-3)


def test_a_batch_smaller_than_the_replicas_is_named():
    advice = advice_on("qwen3-30b-a3b", "aws-p4d", 32, 1, framework="composer-fsdp")
    assert "--global-batch 32 fits, a sequence per device" in advice


def test_software_that_has_few_plans_is_named():
    advice = advice_on("command-r", "gcp-a3-mega", 32, 64, framework="ddp")
    best = api.plan("command-r", "gcp-a3-mega", gpus=32, global_batch=64, top=1).plans[0].step_time_s
    assert advice["--framework generic, which has every kind of plan, fits"] == pytest.approx(best, rel=1e-3)
    assert HOST not in advice


def test_progress_ends_at_all_candidates():
    seen = []
    result = api.plan(
        "llama2-7b", "dgx-a100", gpus=16, global_batch=16, progress=lambda done, all_: seen.append((done, all_))
    )
    assert seen[-1] == (result.candidates, result.candidates)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.each(
    "wrong",
    [
        {"gpus": 0}, {"gpus": -4}, {"gpus": True}, {"gpus": 2.0}, {"global_batch": 0}, {"top": 0}, {"dtype": "fp7"},
        {"strategy": "3d"}, {"mode": "fast"}, {"optimizer": "lamb"}, {"fix": {"tq": 1}}, {"fix": {"tp": "x"}},
        {"limit": ["pp~3"]}, {"limit": ["xx<=3"]}, {"seq": 0},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_input_is_refused(wrong):
    with pytest.raises(UserError):
        api.plan(**({"model": "llama2-7b", "cluster": "dgx-a100", "gpus": 8, "global_batch": 8} | wrong))


def test_a_summa_grid_that_does_not_divide_the_hidden_dimension():
    e = api.estimate("llama2-7b", "dgx-h100", gpus=3, global_batch=6, plan={"tp2": 3})
    assert e.plan["tp2"] == 3


def test_plans_are_shown_at_a_prompt_without_being_explained():
    result = api.plan("gpt3_1T", "dgx-b200", gpus=256, global_batch=512, strategy="1d", top=3)
    assert repr(result.plans) == "<Ranked: 3, fastest first>"
    assert len(result.plans._known) == 1
