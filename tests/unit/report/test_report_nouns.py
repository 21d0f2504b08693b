"""Reports call devices what they are."""

from __future__ import annotations

import pytest

from steptime import api
from steptime.errors import PlanError
from steptime.report.estimate import print_estimate, print_ledger
from steptime.report.plan import print_plan_result

JOB = {"gpus": 8, "global_batch": 8}


@pytest.mark.parametrize(("cluster", "noun"), [("tpu-v5p-pod", "device"), ("gaudi2-8", "device"), ("dgx-h100", "GPU")])
def test_reports_name_gpus_only_where_there_are_some(
    cluster: str, noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_estimate(api.estimate("gpt2", cluster, **JOB))  # type: ignore[arg-type]
    result = api.plan("gpt2", cluster, top=1, **JOB)  # type: ignore[arg-type]
    print_plan_result(result, {"model": "gpt2", "cluster": cluster, **JOB})
    text = capsys.readouterr().out
    assert text.count(f"8 {noun}s") == 2 and f"tokens/s/{noun}" in text
    assert noun == "GPU" or "GPU" not in text.partition("constant ")[0]


@pytest.mark.parametrize(("cluster", "noun"), [("tpu-v5p-pod", "device"), ("dgx-h100", "GPU")])
def test_errors_and_empty_searches_name_gpus_only_where_there_are_some(
    cluster: str, noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both spoke of 64 GPUs on a pod of TPUs."""
    job = {"gpus": 64, "global_batch": 64}
    with pytest.raises(PlanError) as indivisible:
        api.estimate("gpt2", cluster, plan={"tp": 3}, **job)  # type: ignore[arg-type]
    problem = f"tp 3 does not divide 64 {noun}s, so no dp is left\n  with these degrees 63 or 66 {noun}s would work"
    assert str(indivisible.value) == problem
    with pytest.raises(PlanError, match=f"tp 4 x dp 4 = 16, not 64 {noun}s"):
        api.estimate("gpt2", cluster, plan={"tp": 4, "dp": 4}, **job)  # type: ignore[arg-type]
    result = api.plan("gpt2", cluster, fix={"dp": 7}, **job)  # type: ignore[arg-type]
    assert result.nearest is None
    print_plan_result(result, {"model": "gpt2", "cluster": cluster, **job})
    assert f"64 {noun}s" in capsys.readouterr().out


def test_a_batch_of_a_vision_model_counts_images(capsys: pytest.CaptureFixture[str]) -> None:
    """They were called sequences."""
    uneven = {"gpus": 8, "global_batch": 65}
    notes = " ".join(api.estimate("vit-l16", "dgx-h100", **uneven).notes)  # type: ignore[arg-type]
    assert "a replica has 9 images" in notes and "65 images are no multiple of dp 8" in notes
    result = api.plan("vit-l16", "dgx-h100", top=1, **uneven)  # type: ignore[arg-type]
    print_plan_result(result, {"model": "vit-l16", "cluster": "dgx-h100", **uneven})
    ledger = api.ledger("vit-l16")
    print_ledger(ledger)
    text = " ".join(capsys.readouterr().out.split())
    assert "global batch 65 images of 197 tokens" in text and "FLOPs, forward, one image" in text
    assert ledger.notes[0] == "image of 197 tokens, bf16" and "sequence" not in f"{text} {notes}"
