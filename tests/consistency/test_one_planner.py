"""A module has one answer: `plan`, `shard`, `guide` and `estimate` of the plan that was written say the same."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from steptime import api  # noqa: E402
from steptime.search.planner import PlanResult  # noqa: E402
from steptime.sharding.shard import shard  # noqa: E402
from steptime.study.guide.decisions import guide  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
VGG, GPT, TINY = (str(EXAMPLES / name) for name in ("vgg.py:vgg16", "gpt.py:gpt2", "gpt.py:tiny"))
JOBS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "vgg on 16 V100": (VGG, "dgx-v100", 16, 256, {}),
    "vgg on 4 H100, bf16": (VGG, "dgx-h100", 4, 128, {"dtype": "bf16"}),
    "vgg, ideal software": (VGG, "dgx-a100-80gb", 8, 64, {"framework": "ideal"}),
    "vgg, momentum": (VGG, "dgx-v100", 2, 32, {"optimizer": "momentum"}),
    "small GPT": (TINY, "dgx-h100", 8, 32, {"shardings": "all"}),
    "small GPT of another framework": (TINY, "dgx-h100", 4, 16, {"shardings": "all", "framework": "torchtitan"}),
    "GPT-2 with a vocabulary of 50,257": (GPT, "dgx-h100", 4, 16, {"shardings": "all"}),
}


@cache
def planned(name: str) -> PlanResult:
    model, cluster, gpus, batch, more = JOBS[name]
    return api.plan(model, cluster, gpus=gpus, global_batch=batch, top=200, **more)


def sharded(name: str) -> Any:
    """The plan of a choice of shardings."""
    return next(each for each in planned(name).plans if "shardings" in each.plan)


@pytest.mark.quick("vgg, momentum")
@pytest.mark.parametrize("name", JOBS)
def test_shard_finds_the_plan_that_plan_ranks(name: str) -> None:
    model, cluster, gpus, batch, more = JOBS[name]
    given = {key: value for key, value in more.items() if key != "shardings"}
    found, ranked = shard(model, cluster, gpus=gpus, batch=batch, **given), sharded(name)
    assert found.estimate.step_time_band_s == ranked.step_time_band_s
    for figure in ("step_time_s", "peak_memory_bytes", "mfu", "oom_probability"):
        assert getattr(found.estimate, figure) == pytest.approx(getattr(ranked, figure), rel=1e-9), figure
    assert found.bound_s == pytest.approx(planned(name).shardings["bound_s"], rel=1e-9)
    assert 0 < found.bound_s <= ranked.step_time_s


@pytest.mark.quick("vgg, momentum")
@pytest.mark.parametrize("name", JOBS)
def test_a_written_plan_is_estimated_as_it_was_ranked(name: str) -> None:
    model, cluster, gpus, batch, more = JOBS[name]
    given = {key: value for key, value in more.items() if key != "shardings"}
    ranked = sharded(name)
    record = json.loads(json.dumps(ranked.to_json()))["plan"]
    again = api.estimate(model, cluster, gpus=gpus, global_batch=batch, plan=record, **given)
    assert again.step_time_s == pytest.approx(ranked.step_time_s, rel=5e-3)
    assert again.plan["shardings"] == ranked.plan["shardings"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in JOBS if "GPT" not in name])
def test_guide_ends_with_the_first_plan(name: str) -> None:
    model, cluster, gpus, batch, more = JOBS[name]
    walk = guide(model, cluster, gpus=gpus, global_batch=batch, **more)
    assert walk.best.step_time_s == pytest.approx(planned(name).plans[0].step_time_s, rel=1e-9)


def test_the_first_dense_layer_is_divided_without_being_asked() -> None:
    first, others = planned("vgg on 16 V100").plans[0], planned("vgg on 16 V100").plans[1:]
    assert "S(" in first.plan["shardings"]["classifier.1.weight"]
    assert {first.plan["shardings"][f"features.{n}.weight"] for n in (0, 2, 5, 7, 10)} == {"R R"}
    assert min(each.step_time_s for each in others) > 1.05 * first.step_time_s


def test_degrees_and_shardings_cost_equal_blocks_the_same() -> None:
    result = planned("GPT-2 with a vocabulary of 50,257")
    degrees = next(each for each in result.plans if "shardings" not in each.plan)
    shardings = sharded("GPT-2 with a vocabulary of 50,257")
    assert shardings.step_time_s == pytest.approx(degrees.step_time_s, rel=0.01)
    assert shardings.time.group("compute") == pytest.approx(degrees.time.group("compute"), rel=1e-6)
    assert "longer: dp_comm" in result.stop.proof or shardings.step_time_s <= degrees.step_time_s


def test_equal_blocks_are_not_sharded_one_by_one_unless_asked() -> None:
    plain = api.plan(TINY, "dgx-h100", gpus=8, global_batch=32)
    assert not plain.shardings and any("--shardings all" in note for note in plain.notes)


def test_what_cannot_be_sharded_one_by_one_is_refused() -> None:
    from steptime.errors import UserError

    with pytest.raises(UserError, match="shardings all: only the operators of a torch module"):
        api.plan("gpt2", "dgx-h100", gpus=8, global_batch=32, shardings="all")
    with pytest.raises(UserError, match="shardings"):
        api.plan(TINY, "dgx-h100", gpus=8, global_batch=32, shardings="some")
