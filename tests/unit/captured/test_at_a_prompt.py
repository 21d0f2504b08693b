"""What somebody meets who works at a Python prompt or in a notebook: results on one line, paths, modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import steptime
from steptime import api
from steptime.captured.fit.driver import FitResult
from steptime.errors import FieldError

JOB: dict[str, Any] = {"gpus": 8, "global_batch": 8}
MODEL = "layers = 2\nhidden = 256\nheads = 4\nvocab = 1024\nseq_len = 128\n"
CLUSTER = 'base = "dgx-h100"\n[levels.network]\nlinks_per_device = 0.5\n'


def test_an_estimate_is_one_line_at_a_prompt() -> None:
    found = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8)
    shown = repr(found)
    assert len(shown) < 200 and "\n" not in shown
    assert "llama3-8b on 8 devices of dgx-h100" in shown
    assert f"MFU {100 * found.mfu:.1f} %" in shown
    missing = api.estimate("llama3-70b", "dgx-h100", gpus=8, global_batch=8)
    assert repr(missing).endswith("not feasible: memory>")


def test_a_search_is_one_line_at_a_prompt() -> None:
    found = api.plan("llama3-8b", "dgx-h100", top=3, strategy="1d", **JOB)
    assert repr(found.plans[0]) in repr(found) and len(repr(found)) < 300
    nothing = api.plan("llama3-70b", "dgx-h100", gpus=1, global_batch=1, strategy="1d")
    assert repr(nothing).endswith("none fits>")


def test_the_cheapest_way_to_fit_is_one_line_at_a_prompt() -> None:
    found = api.fit("gpt2", "rtx-4090", batch=32)
    assert isinstance(found, FitResult)
    assert len(repr(found)) < 200 and "gpt2 on rtx-4090, batch 32: the cheapest: bf16" in repr(found)
    assert "nothing fits; the least memory" in repr(api.fit("llama3-70b", "rtx-4090", batch=1))


def test_a_difference_is_one_line_at_a_prompt() -> None:
    one, two = (api.estimate("llama3-8b", "dgx-h100", plan={"tp": tp}, **JOB) for tp in (4, 8))
    shown = repr(api.diff(one, two))
    assert shown.startswith("<Difference: ") and "plan: dp, tp, micro_batches, placement>" in shown and len(shown) < 150
    assert repr(api.diff(one, one)).endswith("of the plan: nothing>")


def test_a_profile_and_its_program_are_one_line_at_a_prompt() -> None:
    torch = pytest.importorskip("torch")
    program = steptime.capture(torch.nn.Linear(8, 4), [torch.zeros(2, 8)], target="cuda")
    assert repr(program) == "<Program Linear: " + repr(program).split(": ")[1]
    assert repr(program).endswith("36 parameters>") and len(repr(program)) < 100
    shown = repr(steptime.profile(program, "h100-sxm"))
    assert shown.startswith("<Profile of Linear on h100-sxm: ") and len(shown) < 100


def test_a_model_and_a_cluster_may_be_paths(tmp_path: Path) -> None:
    model, cluster = tmp_path / "mine.toml", tmp_path / "cluster.toml"
    model.write_text(MODEL)
    cluster.write_text(CLUSTER)
    as_text = api.estimate(str(model), str(cluster), **JOB)
    assert api.estimate(model, cluster, **JOB).to_json() == as_text.to_json()
    assert api.plan(model, cluster, top=1, **JOB).plans[0].step_time_s > 0
    assert api.ledger(model).to_json() == api.ledger(str(model)).to_json()
    assert api.fit(model, "h100-sxm", batch=1).fits


@pytest.mark.parametrize("given", [{"hidden_size": 3}, 7, None])
def test_an_object_that_is_no_model_is_told_what_is_one(given: Any) -> None:
    with pytest.raises(FieldError, match="neither a name nor a path") as error:
        api.estimate(given, "dgx-h100", **JOB)
    assert "captured_model" in str(error.value)
    with pytest.raises(FieldError, match="neither a name nor a path") as error:
        api.fit(given, "h100-sxm")
    assert "file.py:factory" in str(error.value)


def test_a_module_that_was_not_captured_is_told_how() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(FieldError, match="neither a name nor a path") as error:
        steptime.profile(torch.nn.Linear(8, 4), "h100-sxm")
    assert "steptime.capture(module, inputs" in str(error.value)
