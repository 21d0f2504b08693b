"""Reports call devices what they are."""

from __future__ import annotations

import pytest

from steptime.surface import api
from steptime.surface.report.estimate import print_estimate
from steptime.surface.report.plan import print_plan_result

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
