"""Images have no sequences: what is said of a batch of a captured module without tokens counts samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import api

pytest.importorskip("torch")

NET = """
import torch

def images(batch):
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 10)), torch.empty(batch, 3, 32, 32)
"""


@pytest.fixture(name="images")
def _images(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:images"


def test_notes_of_an_estimate_count_samples(images: str) -> None:
    notes = " ".join(api.estimate(images, "dgx-h100", gpus=8, global_batch=100, plan={"dp": 8}).notes)
    assert "a replica has 13 samples" in notes and "= 104 samples; rates" in notes
    assert "sequence" not in notes


def test_a_search_that_finds_nothing_counts_samples(images: str, capsys: pytest.CaptureFixture[str]) -> None:
    from steptime.report.plan import print_plan_result

    result = api.plan(images, "dgx-h100", gpus=8, global_batch=4, shardings="none")
    assert "--global-batch 8 fits, a sample per device" in " ".join(result.advice)
    assert result.to_json()["workload"]["seq_len"] == 1
    print_plan_result(result, {"model": "net", "cluster": "dgx-h100", "gpus": 8, "global_batch": 4})
    header = " ".join(capsys.readouterr().out.split())
    assert "global batch 4 samples, mode corrected, framework generic" in header
