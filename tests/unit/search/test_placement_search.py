"""The order of the axes over a network as a decision: never worse than that of launchers, and better somewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptime import api
from steptime.api.frameworks import Scope
from steptime.api.jobs import Request
from steptime.api.searches import Search
from steptime.errors import UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting
from steptime.plan.placements import numbered, order_of, ordered, outer, strides_of
from steptime.plan.plans import AXES, Plans, as_float, rows_of
from steptime.search.modes import MODES
from steptime.search.ranking import placed

JOBS = [
    ("llama3-8b", "meta-roce-24k", 256, 256, {"cp": 1}),
    ("llama3-8b", "dgx-h100-rail", 512, 256, {"pp": 4}),
    ("mixtral-8x7b", "frontier-dragonfly", 1024, 256, {"tp": 8, "pp": 4}),
    ("llama3-8b", "tpu-v4-torus", 64, 64, {"tp": 4}),
    ("llama3-8b", "aws-p4d-scattered", 256, 256, {"tp": 8}),
]
NARROW = """
base = "dgx-h100"
[levels.leaf]
devices = 64
link = "infiniband-ndr"
[levels.network]
oversubscription = 8
[topology]
kind = "fat-tree"
"""


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    (tmp_path / "narrow.toml").write_text(NARROW, encoding="utf-8")
    return str(tmp_path / "narrow.toml")


@pytest.mark.quick(every=3)
@pytest.mark.each(("model", "cluster", "gpus", "batch", "fix"), JOBS)
def test_search_never_loses_against_launchers(
    model: str, cluster: str, gpus: int, batch: int, fix: dict[str, int]
) -> None:
    best, usual = (
        api.plan(model, cluster, gpus=gpus, global_batch=batch, fix=fix, top=1, placement=how).plans[0]
        for how in ("search", "default")
    )
    assert best.step_time_s <= usual.step_time_s


def test_placement_wins_on_an_oversubscribed_spine(narrow: str) -> None:
    """With pp 8 and tp 8 a leaf holds one pipeline or eight replicas; messages of stages are cheaper to keep there."""
    times = {
        order: api.estimate(
            "llama3-8b", narrow, gpus=512, global_batch=512, plan={"tp": 8, "pp": 8, "order": order}
        ).step_time_s
        for order in ("default", "search", "tp-pp-dp")
    }
    assert times["search"] == times["tp-pp-dp"] < 0.95 * times["default"]


def test_found_plan_is_estimated_the_same(narrow: str) -> None:
    found = api.plan("llama3-8b", narrow, gpus=512, global_batch=512, fix={"tp": 8, "pp": 8}, top=1).plans[0]
    assert found.plan["order"] == "tp-pp-dp"
    again = api.estimate("llama3-8b", narrow, gpus=512, global_batch=512, plan=found.plan)
    assert again.step_time_s == found.step_time_s


def _prepared(model: str, where: str) -> tuple[Setting, Scope]:
    request = Request(
        model=model, cluster=where, seq=2048, dtype="bf16", optimizer="adam", mode=MODES["corrected"], framework=None,
        lora=None,
    )  # fmt: skip
    columns = {"micro_batch": 1, "recompute": "full"}
    search = Search(request=request, gpus=128, global_batch=128, choices={}, columns=columns, limit=(), strategy="1d")
    return search.prepared()


@pytest.mark.quick(every=3)
@pytest.mark.each(("model", "cluster"), [("llama3-8b", None), ("mixtral-8x7b", None), ("llama3-8b", "tpu-v4-torus")])
def test_pruned_search_finds_the_best_of_all(
    model: str, cluster: str | None, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every candidate of the space costed by itself, in one block; the search compares bounds after every few."""
    monkeypatch.setattr("steptime.search.ranking.ROUND", 4)
    monkeypatch.setattr("steptime.search.ranking.BLOCK", 16)
    where = narrow if cluster is None else cluster
    setting, scope = _prepared(model, where)
    machine, strategy = setting.machine, setting.method.strategy("1d")
    assert machine.network is not None

    def times(*, nearer_is_faster: bool) -> list[float]:
        listing = scope.space.list(
            setting.job, strategy, machine.fast_domain, setting.rules, scope.constraints,
            nearer_is_faster=nearer_is_faster, farthest=machine.network.farthest if machine.network else 1,
        )  # fmt: skip
        count = listing.multiplicity
        first = listing.placement_start[listing.mesh_of]
        place = np.concatenate([np.arange(a, a + n) for a, n in zip(first, count, strict=True)])
        plans = placed(
            listing.configurations.take(np.repeat(np.arange(len(count)), count)), listing.placements.take(place)
        )
        e = evaluate(setting.method, strategy, setting.job, machine, as_float(plans))
        fits = np.broadcast_to(np.asarray(e.peak_bytes), (len(place),)) <= machine.memory_bytes
        return sorted(np.broadcast_to(np.asarray(e.step_time_s), (len(place),))[fits].tolist())

    found = api.plan(
        model, where, gpus=128, global_batch=128, seq=2048, strategy="1d", fix={"micro_batch": 1, "recompute": "full"},
        top=40,
    )  # fmt: skip
    own, every = times(nearer_is_faster=machine.nearer_is_faster), times(nearer_is_faster=False)
    assert [plan.step_time_s for plan in found.plans] == pytest.approx(own[:40], rel=1e-12)
    assert own[0] == pytest.approx(every[0], rel=1e-12)
    assert len(every) > 300


def test_orders_that_mean_the_same_are_one_candidate() -> None:
    """Two axes beyond the domain have two orders, one axis has one; beyond the largest block none differs."""
    meshes = Plans(tp=np.array([8, 8, 8]), dp=np.array([64, 8, 4]), pp=np.array([1, 8, 16]))
    inside = Plans(in_tp=np.array([8, 8, 8]), in_dp=np.array([1, 1, 1]), in_pp=np.array([1, 1, 1]))
    index, each = ordered(np.arange(3), inside, meshes, ("tp", "dp", "pp"), 8, None)
    assert np.bincount(index).tolist() == [1, 2, 2]
    assert rows_of(each) == 5
    index, each = ordered(np.arange(3), inside, meshes, ("tp", "dp", "pp"), 8, order_of("tp-pp-dp"))
    assert np.asarray(each.at_dp).tolist() == [1, 8, 8]


def test_strides_multiply_along_the_order() -> None:
    plans = Plans(tp=8, cp=2, dp=16, pp=4, in_tp=8)
    outside = {axis: int(outer(plans, axis)) for axis in AXES}
    assert strides_of(outside, order_of("tp-pp-dp-cp"), 10**6) == {
        "at_tp": 1, "at_tp2": 1, "at_pp": 1, "at_dp": 4, "at_cp": 64,
    }  # fmt: skip
    assert numbered(plans).at_pp == 32


@pytest.mark.each(
    ("text", "words"), [("tp-xx", "axis of an order"), ("tp-tp-dp", "twice"), ("fastest", "axis of an order")]
)
def test_orders_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        api.plan("llama3-8b", "dgx-h100", gpus=64, global_batch=64, placement=text)
    with pytest.raises(UserError, match=words):
        api.estimate("llama3-8b", "dgx-h100", gpus=64, global_batch=64, plan={"order": text})


def test_published_mode_has_placements_of_its_own() -> None:
    with pytest.raises(UserError, match="published mode"):
        api.plan("gpt3-1t", "published-b200-nvs8", gpus=512, global_batch=512, mode="published", placement="default")
