"""What there is one of is named in the singular."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import api
from steptime.errors import PlanError, counted
from steptime.report.estimate import print_headline
from steptime.report.plan import print_plan_result
from steptime.report.text import console

ONE = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 1, "global_batch": 1}


def test_a_number_and_what_it_counts() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_one_gpu_and_one_sequence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_plan_result(api.plan(**ONE), ONE)
    print_headline(console(), api.estimate(**ONE))
    said = " ".join(capsys.readouterr().out.split())
    assert "1 GPU, global batch 1 sequence of 1,024 tokens," in said
    assert "on dgx-h100, 1 GPU, " in said and "1 GPUs" not in said
    with pytest.raises(PlanError, match="tp 2 does not divide 1 GPU, so"):
        api.estimate(**ONE, plan={"tp": 2})
