"""FLOP/s that a log prints, beside the prediction counted the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.api.calls import estimate as estimate_job
from steptime.doctor.diagnose import rate_row
from steptime.doctor.log import read_log
from steptime.doctor.records import Log, Stated, StepLine
from steptime.estimate.result import Estimate
from steptime.model.known import load_catalogue_model

#: Llama 3 8B over 8,192 tokens, GFLOP per token: weights of products, and scores of all pairs.
LAYERS, SCORES = 6 * (8.03 - 0.525), 12 * 32 * 4096 * 8192 / 1e9


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return estimate_job("llama3-8b", "dgx-h100", gpus=8, global_batch=8, plan={"zero": 3, "recompute": "full"})


def log(framework: str, gflop_per_token: float, step_s: float) -> Log:
    tflops = gflop_per_token * 8192 / step_s / 1e3
    return Log(path="x", framework=framework, steps=(StepLine(number=1),), stated=Stated(), timers={}, rank_steps={},
               tflops_per_gpu=tflops)  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "gflop", "words"),
    [
        ("torchtitan", LAYERS + SCORES, "with the full attention mask"),
        ("megatron", LAYERS + SCORES, "with the full attention mask"),
        ("megatron", LAYERS + SCORES / 2, "with half of the attention mask"),
        ("megatron-deepspeed", (LAYERS - 3.15) * 4 / 3 + 3.15 + SCORES * 4 / 3, "what is recomputed"),
        ("deepspeed", 6 * 8.03, "as 6 per weight"),
    ],
)
def test_the_ratio_of_rates_is_that_of_times(estimate, framework, gflop, words):
    step_s = 1.25 * estimate.step_time_s
    row = rate_row(log(framework, gflop, step_s), step_s, estimate, load_catalogue_model("llama3-8b"))
    assert row is not None and row.ratio == pytest.approx(1 / 1.25, rel=0.04)
    assert words in row.note


def test_a_rate_that_fits_no_count_is_not_compared(estimate):
    model = load_catalogue_model("llama3-8b")
    row = rate_row(log("torchtitan", LAYERS + SCORES / 2, 1.0), 1.0, estimate, model)
    assert row is not None and row.predicted is None
    assert "51.5 GFLOP per token; the predicted job has 57.9" in row.note
    bare = rate_row(log("torchtitan", 50.0, 1.0), 1.0, None, None)
    assert bare is not None and bare.predicted is None and bare.measured == pytest.approx(50 * 8.192e12)


@pytest.mark.slow
def test_a_line_of_digits_is_read_in_one_pass(tmp_path: Path) -> None:
    """It took minutes: the time grew with the cube of the length of the line."""
    steps = [f" iteration {i}/ 1000 | elapsed time per iteration (ms): 1500 |\n" for i in range(1, 21)]
    path = tmp_path / "train.log"
    path.write_text("".join([*steps[:10], "1" * 20_000, "\ntime (ms) | ", "a" * 20_000, "\n", *steps[10:]]))
    assert len(read_log(str(path)).steps) == 20
