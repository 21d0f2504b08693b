"""A word of ``overlap`` that hides nothing in a plan is named, where the user gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.estimate.result import Estimate

DENSE: dict[str, Any] = {"model": "llama3.1-8b", "cluster": "dgx-h100", "gpus": 64, "global_batch": 256}
EXPERTS = DENSE | {"model": "mixtral-8x7b"}
PUBLISHED = DENSE | {"model": "gpt3", "cluster": "published-b200-nvs8", "mode": "published"}
MODULE = """
from torch import nn
import torch

def small(batch):
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(25))), (torch.ones(batch, 64),)
"""


def idle(e: Estimate) -> list[str]:
    """Words that the notes of an estimate name."""
    return [note.split()[1] for note in e.notes if note.startswith("overlap ") and "changes nothing" in note]


@pytest.mark.each(
    ("job", "plan", "words"),
    [
        (DENSE, {"tp": 4, "overlap": "dp,tp"}, []),
        (DENSE, {"tp": 1, "overlap": "tp"}, ["tp"]),
        (DENSE, {"tp": 4, "sp": 0, "overlap": "dp,tp"}, ["tp"]),
        (DENSE, {"tp": 4, "tp2": 2, "strategy": "2d", "overlap": "pp,tp"}, ["pp", "tp"]),
        (DENSE, {"tp": 8, "pp": 8, "overlap": "dp,pp"}, ["dp"]),
        (DENSE, {"tp": 4, "overlap": "offload"}, ["offload"]),
        (DENSE, {"tp": 4, "overlap": "offload", "offload": "activations"}, []),
        (EXPERTS, {"ep": 8, "pp": 2, "overlap": "ep"}, ["ep"]),
        (EXPERTS, {"ep": 8, "pp": 2, "vpp": 2, "overlap": "ep"}, []),
        (PUBLISHED, {"tp": 8, "overlap": "tp"}, ["tp"]),
        (DENSE, {"overlap": "none"}, []),
    ],
)
def test_a_word_without_effect_is_named(job: dict[str, Any], plan: dict[str, Any], words: list[str]) -> None:
    assert idle(api.estimate(**job, plan=plan)) == words


def test_a_captured_module_hides_no_transfers_over_tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its gradients, which are all in one bucket."""
    pytest.importorskip("torch")
    (tmp_path / "small_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    job = {"model": "small_module:small", "cluster": "dgx-h100", "gpus": 8, "global_batch": 64}
    assert idle(api.estimate(**job, plan={"tp": 4, "overlap": "dp,tp"})) == ["dp", "tp"]


def test_what_the_framework_does_anyway_needs_no_note() -> None:
    assert idle(api.estimate(**DENSE, framework="megatron-core", plan={"tp": 1})) == []
    given_back = api.estimate(**DENSE, framework="megatron-core", plan={"tp": 1}).plan
    assert idle(api.estimate(**DENSE, framework="megatron-core", plan=given_back)) == []


def test_plans_of_a_search_carry_the_note() -> None:
    result = api.plan(**DENSE, fix={"tp": 1, "overlap": "tp"}, strategy="1d", top=2)
    assert [idle(e) for e in result.plans] == [["tp"], ["tp"]]


def test_a_step_that_is_mostly_fixed_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "small_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    job = {"model": "small_module:small", "cluster": "dgx-h100", "gpus": 8, "global_batch": 64}
    told = [
        [
            note
            for note in api.estimate(**job, framework=name, plan={"tp": 1, "micro_batch": 8}).notes
            if "fixed time" in note
        ]
        for name in ("generic", "ideal")
    ]
    assert [len(notes) for notes in told] == [1, 0] and "% of the step is the fixed time of generic" in told[0][0]
