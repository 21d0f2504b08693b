"""The option ``compile``: what a framework does by several kernels is one, and what is fused already stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main
from steptime.errors import FieldError, PlanError, UserError
from steptime.estimate.result import Estimate
from steptime.launch import read_launch

NANOCHAT = Path(__file__).parents[2] / "data" / "cases" / "nanochat.toml"


def estimate(framework: str, **plan: Any) -> Estimate:
    given = {"zero": 3, "recompute": "full", **plan} if framework == "transformers" else {"tp": 8, **plan}
    return api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=16, framework=framework, plan=given)


def test_norms_of_several_kernels_become_one() -> None:
    plain, compiled = estimate("transformers"), estimate("transformers", compile=True)
    assert 0.75 < compiled.step_time_s / plain.step_time_s < 0.97
    kept = ("compute", "dp_comm", "optimizer")
    before, after = plain.time.rollup(1), compiled.time.rollup(1)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["memory_bound"] < before["memory_bound"]
    assert compiled.plan["compile"] is True and "compile" not in plain.plan


def test_what_is_fused_already_stays_as_it_is() -> None:
    plain, compiled = estimate("megatron-core"), estimate("megatron-core", compile=True)
    differ = {path for path in plain.time if compiled.time[path] != plain.time[path]}
    assert {path.split("/")[2] for path in differ} == {"cross_entropy", "last"}  # the last stage has the loss


def test_a_compiled_loss_makes_no_copies() -> None:
    """A log of a public speed run of this model, compiled, on 8 A100: 0.99 s a step, and it ran within 80 GB."""
    job = {"gpus": 8, "global_batch": 256, "framework": "ddp", "seq": 2048}
    plain = api.estimate(str(NANOCHAT), "dgx-a100-80gb", **job, plan={"micro_batch": 32})
    compiled = api.estimate(str(NANOCHAT), "dgx-a100-80gb", **job, plan={"micro_batch": 32, "compile": True})
    assert not plain.feasible and compiled.feasible
    assert compiled.step_time_s < 0.92 * plain.step_time_s
    logits = 32 * 2048 * 65536
    assert plain.peak_memory_bytes - compiled.peak_memory_bytes == pytest.approx(2 * logits, rel=1e-6)


@pytest.mark.parametrize(("given", "on"), [("on", True), (1, True), (False, False)])
def test_words_for_it(given: object, on: bool) -> None:
    assert estimate("transformers", compile=given).plan.get("compile", False) is on


def test_what_is_no_switch_is_refused() -> None:
    with pytest.raises(FieldError, match="neither on nor off"):
        estimate("transformers", compile="yes")
    with pytest.raises(PlanError, match="published model has no compile"):
        api.estimate("llama3-8b", "dgx-h100", gpus=8, mode="published", plan={"compile": True})


def test_it_goes_into_a_launch_file_and_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        'model = "llama3-8b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 16\nframework = "transformers"\n'
        "[plan]\nzero = 3\ncompile = true\n"
    )
    done = CliRunner().invoke(main, ["export", str(run), "--for", "hf-trainer", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    written = tmp_path / "out" / "training_args.yaml"
    assert "torch_compile: true" in written.read_text()
    assert read_launch(str(written)).launch.values["compile"] is True
    done = CliRunner().invoke(main, ["export", str(run), "--for", "megatron-lm"])
    assert "no option for: compile" in done.stdout


def test_torchtitan_files_say_it_too(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        'model = "llama3-8b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 16\nframework = "torchtitan"\n'
        "[plan]\nzero = 3\ncompile = true\n"
    )
    done = CliRunner().invoke(main, ["export", str(run), "--for", "torchtitan", "-o", str(tmp_path / "train.toml")])
    assert done.exit_code == 0, done.stderr
    written = (tmp_path / "train.toml").read_text()
    assert "[compile]\nenable = true" in written
    assert read_launch(str(tmp_path / "train.toml")).launch.values["compile"] is True


@pytest.mark.slow
def test_a_captured_module_is_timed_as_it_was_recorded() -> None:
    pytest.importorskip("torch")
    target = str(Path(__file__).parents[3] / "examples" / "gpt.py") + ":gpt2"
    with pytest.raises(UserError, match="is captured"):
        api.estimate(target, "dgx-h100", gpus=8, global_batch=16, plan={"compile": True})
