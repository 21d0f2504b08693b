"""The decision procedure: each answer is the one that searches of its own give, and its numbers are theirs."""

from __future__ import annotations

import pytest

from steptime import api
from steptime.api import searches
from steptime.errors import UserError
from steptime.estimate.explain import step_time_on
from steptime.study.guide.decisions import RECIPES, Decision, Guide, _Walk, guide

CASES = {
    "small": ("gpt2", "dgx-h100", {"gpus": 8, "global_batch": 64, "steps": 100_000, "within_s": 86_400.0}),
    "hurry": ("gpt2", "dgx-h100", {"gpus": 8, "global_batch": 64, "steps": 100_000, "within_s": 2 * 3600.0}),
    "saving": ("llama3-8b", "dgx-b200", {"gpus": 8, "global_batch": 16}),
    "one domain": ("llama3-8b", "dgx-h100", {"gpus": 64, "global_batch": 256}),
    "large": ("llama3-70b", "dgx-h100", {"gpus": 64, "global_batch": 128}),
    "too large": ("gpt3-175b", "dgx-h100", {"gpus": 8, "global_batch": 16}),
}


@pytest.fixture(scope="module")
def walks() -> dict[str, Guide]:
    return {name: guide(model, cluster, **job) for name, (model, cluster, job) in CASES.items()}


def asked(found: Guide, words: str) -> Decision:
    return next(each for each in found.decisions if words in each.question)


@pytest.mark.slow
def test_one_device_is_enough_where_it_ends_in_time(walks: dict[str, Guide]) -> None:
    small = walks["small"]
    assert asked(small, "one device?").answer == "yes" and asked(small, "acceptable").answer == "yes"
    assert small.shortcut is not None and small.shortcut.plan["dp"] == 1
    single = api.plan("gpt2", "dgx-h100", gpus=1, global_batch=64, top=1).plans[0]
    assert small.shortcut.step_time_s == single.step_time_s
    assert small.cost_of_shortcut is not None and small.cost_of_shortcut > 1


@pytest.mark.slow
def test_replicas_are_added_until_it_ends_in_time(walks: dict[str, Guide]) -> None:
    hurry = asked(walks["hurry"], "replicas")
    count = int(hurry.numbers["gpus"])
    assert hurry.numbers["completion_s"] <= 2 * 3600.0 and 1 < count <= 8
    less = api.plan("gpt2", "dgx-h100", gpus=count // 2, global_batch=64, top=1, fix={"tp": 1, "pp": 1, "cp": 1})
    assert less.plans[0].step_time_s * 100_000 > 2 * 3600.0


def test_memory_decides_by_the_numbers_of_a_search(walks: dict[str, Guide]) -> None:
    fits = asked(walks["large"], "one device?")
    assert fits.answer == "no" and fits.numbers["peak_memory_bytes"] > fits.numbers["memory_capacity_bytes"]
    held = asked(walks["large"], "fast domain hold")
    least = int(held.numbers["gpus"])
    assert api.plan("llama3-70b", "dgx-h100", gpus=least, global_batch=128, top=1).plans
    assert not api.plan("llama3-70b", "dgx-h100", gpus=least // 2, global_batch=128, top=1).plans
    assert held.answer == ("yes" if least <= 8 else "no")


def test_the_fastest_recipe_is_the_answer_and_the_search_is_never_slower(walks: dict[str, Guide]) -> None:
    for name in ("one domain", "large"):
        found = walks[name]
        chosen = asked(found, "outside it")
        assert found.shortcut is not None and found.best is not None
        assert chosen.answer in [each.name for each in RECIPES]
        assert all(each.step_time_s is None or each.step_time_s >= found.shortcut.step_time_s for each in chosen.beaten)
        assert found.best.step_time_s <= found.shortcut.step_time_s * (1 + 1e-12)


def test_a_decision_turns_round_where_it_says(walks: dict[str, Guide]) -> None:
    walk = _Walk("llama3-70b", "dgx-h100", 64, 128, None, None, None, {})
    pair = [walk.of_recipe(recipe, 64).plans[0] for recipe in (RECIPES[1], RECIPES[2])]
    factor = walk.crossing(*pair)
    assert factor is not None
    evaluations = [walk.evaluation(each) for each in pair]
    times = [step_time_on(e, e.machine.faster(slow_Bps=factor, lone_slow_Bps=factor)) for e in evaluations]
    assert times[0] == pytest.approx(times[1], rel=1e-4)


def test_nothing_fits_is_an_answer(walks: dict[str, Guide]) -> None:
    found = walks["too large"]
    assert found.best is None and found.shortcut is None and found.cost_of_shortcut is None
    assert found.decisions[-1].answer == "nothing fits"


def test_half_a_time_limit_is_refused() -> None:
    with pytest.raises(UserError, match="belong together"):
        guide("gpt2", "dgx-h100", gpus=8, global_batch=64, steps=10)


def test_a_model_that_needs_several_devices_is_told_whether_its_training_ends_in_time() -> None:
    limits = {"no": 3 * 86_400.0, "yes": 9 * 86_400.0}
    for answer, within_s in limits.items():
        found = guide("llama3-8b", "dgx-h100", gpus=8, global_batch=64, steps=100_000, within_s=within_s)
        last = found.decisions[-1]
        assert "end in time" in last.question and last.answer == answer and found.best is not None
        assert last.numbers["completion_s"] == 100_000 * found.best.step_time_s
        assert (last.numbers["completion_s"] <= within_s) == (answer == "yes")


def test_advice_is_searched_for_the_whole_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of single questions do not look for what would make them fit: nobody reads it."""
    asked_for = []
    monkeypatch.setattr(searches, "_advice", lambda search, *_: asked_for.append(search.gpus) or ())
    model, cluster, job = CASES["large"]
    guide(model, cluster, **job)
    assert asked_for == [job["gpus"]]
