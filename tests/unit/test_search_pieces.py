"""Transfers of many placements are computed piece by piece, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime import api
from steptime.search import layers
from steptime.search.result import PlanResult


def found(model: str, framework: str) -> PlanResult:
    return api.plan(model, "dgx-h100", gpus=64, global_batch=128, framework=framework)


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


def test_no_array_of_transfers_is_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def links_of(strategy: Any, job: Any, machine: Any, plans: Any) -> Any:
        rows.append(max(np.size(column) for column in plans.columns().values()))
        return original(strategy, job, machine, plans)

    original = layers._links_of
    monkeypatch.setattr(layers, "_links_of", links_of)
    monkeypatch.setattr(layers, "PIECE", 500)
    found("mixtral-8x7b", "megatron-core")
    assert len(rows) > 10
    assert max(rows) == 500
