"""Transfers of many placements are computed piece by piece, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime import api
from steptime.estimate import layer
from steptime.search import layers
from steptime.search.planner import PlanResult


def found(model: str, framework: str) -> PlanResult:
    return api.plan(model, "dgx-h100", gpus=64, global_batch=128, framework=framework)


@pytest.mark.quick(without=["deepseek-v2-lite-torchtitan"])
@pytest.mark.parametrize(
    ("model", "framework"), [("mixtral-8x7b", "megatron-core"), ("deepseek-v2-lite", "torchtitan"), ("gpt2-xl", "ddp")]
)
def test_a_search_in_pieces_finds_the_same_plans(model: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PIECE", 10**9)
    whole = found(model, framework)
    monkeypatch.setattr(layers, "PIECE", 97)
    pieces = found(model, framework)
    assert [(e.plan, e.step_time_s) for e in pieces.plans] == [(e.plan, e.step_time_s) for e in whole.plans]
    assert (pieces.candidates, pieces.feasible, pieces.reasons) == (whole.candidates, whole.feasible, whole.reasons)


@pytest.mark.parametrize(
    ("model", "framework"), [("glm4-9b", "maxtext"), ("gemma2-27b", "torchtitan"), ("glm4-9b", "torchtune")]
)
def test_rows_that_end_a_recomputed_pass_early_need_not_send_anything(model: str, framework: str) -> None:
    """What runs again leaves out a norm behind the last product, which sends nothing: shared or not, the same times."""
    result = api.plan(model, "dgx-h100", gpus=16, global_batch=16, framework=framework, oom_limit=1.0)
    ranked = min(point["step_time_s"] for point in result.pareto)
    assert ranked == pytest.approx(result.plans[0].step_time_s, rel=1e-12)


def test_no_array_of_transfers_is_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def links_of(strategy: Any, job: Any, machine: Any, plans: Any, *priced: Any) -> Any:
        rows.append(max(np.size(column) for column in plans.columns().values()))
        return original(strategy, job, machine, plans, *priced)

    original = layers._links_of
    monkeypatch.setattr(layers, "_links_of", links_of)
    monkeypatch.setattr(layers, "PIECE", 200)
    found("mixtral-8x7b", "megatron-core")
    assert len(rows) > 10
    assert max(rows) == 200


def test_products_that_hide_transfers_are_priced_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every placement of a shape takes the price of its products, also where transfers over ``tp`` hide behind them."""
    shapes: list[tuple[int, int, int]] = []
    priced: list[int] = []

    def linked(strategy: Any, job: Any, machine: Any, of: Any, shape_at: Any, plans: Any) -> Any:
        works = link(strategy, job, machine, of, shape_at, plans)
        shapes.append((len(shape_at), int(shape_at.max()) + 1, max(priced)))
        return works

    def timed(models: Any, operator: str, shape: Any, work: Any, *, backward: bool) -> Any:
        priced.append(max(map(np.size, shape.values())) if operator == "matmul" else 0)
        return price(models, operator, shape, work, backward=backward)

    link, price = layers._with_links, layer.timed
    monkeypatch.setattr(layers, "_with_links", linked)
    monkeypatch.setattr(layer, "timed", timed)
    job = {"gpus": 256, "global_batch": 256, "strategy": "1d", "fix": {"overlap": "dp,tp"}}
    result = api.plan("llama3.1-70b", "dgx-h100", **job)
    assert "tp" in result.plans[0].plan["overlap"]
    (placements, count, longest), *_ = shapes
    assert placements > 2 * count == 2 * longest
