"""A row of measured runs and the same job given to ``estimate`` are one job: the same step time and memory."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from steptime.api.calls import estimate
from steptime.measure.runs.aggregate import ScoredRun
from steptime.measure.runs.scoring import score_runs
from steptime.plan.framework import IDEAL
from steptime.plan.framework_file import framework_names, habits_of

FRAMEWORKS = sorted(set(framework_names()) - {IDEAL.name})
JOBS: dict[str, dict[str, Any]] = {
    "llama3-8b, 1 node": {"model": "llama3-8b", "n_gpus": 8, "global_batch_sequences": 32, "seq_len": 4096},
    "llama3-8b, 4 nodes, full recomputation": {
        "model": "llama3-8b", "n_gpus": 32, "global_batch_sequences": 64, "seq_len": 8192, "recompute": "full",
    },
    "llama3.2-1b, 1 device": {"model": "llama3.2-1b", "n_gpus": 1, "global_batch_sequences": 4, "seq_len": 1024},
    "llama3-8b, tp 2, pp 2": {
        "model": "llama3-8b", "n_gpus": 16, "global_batch_sequences": 64, "seq_len": 4096, "tp": 2, "pp": 2,
    },
}  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    """Every job under every framework that has its axes; the overlap of gradients is said, as rows marginalise it."""
    out = []
    for name, job in JOBS.items():
        for framework in FRAMEWORKS:
            habits = habits_of(framework)
            tp, pp = job.get("tp", 1), job.get("pp", 1)
            if (tp > 1 and "tp" not in habits.axes) or (pp > 1 and "pp" not in habits.axes):
                continue
            per_node = min(job["n_gpus"], 8)
            out.append({
                "row_id": f"{name}, {framework}", "source_key": "own", "gpu": "H100 SXM", "gpus_per_node": per_node,
                "dtype": "bf16", "micro_batch": 1, "attention_impl": "flash", "tp": tp, "pp": pp, "cp": 1, "vpp": 1,
                "dp": job["n_gpus"] // tp // pp, "zero_stage_or_fsdp": habits.zero_with(pp), "recompute": "none",
                "framework": framework, "optimizer": "adamw", "metric_step_time_s": 5.0, "sequence_parallel": "on",
                "notes": "overlap-grad-reduce" if "dp" in habits.overlap else "no dp overlap",
            } | job)  # fmt: skip
    return out


ROWS = {row["row_id"]: row for row in _rows()}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScoredRun]:
    """All rows, scored at once."""
    file: Path = tmp_path_factory.mktemp("rows") / "rows.csv"
    columns = list(dict.fromkeys(name for row in ROWS.values() for name in row))
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(ROWS.values())
    return {each.run.row_id: each for each in score_runs(file).scored}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_job_of_an_estimate(scored: dict[str, ScoredRun], name: str) -> None:
    """Score and estimate say the same of one job."""
    row, found = ROWS[name], scored[name]
    assert found.run.framework == row["framework"]
    degrees = {axis: row[axis] for axis in ("tp", "pp", "dp", "micro_batch", "recompute")}
    one = estimate(
        row["model"], "dgx-h100", gpus=row["n_gpus"], global_batch=row["global_batch_sequences"], seq=row["seq_len"],
        dtype="bf16", optimizer="adamw", framework=row["framework"],
        plan=degrees | {"zero": row["zero_stage_or_fsdp"]},
    )  # fmt: skip
    assert found.step_time_s == pytest.approx(one.step_time_s, rel=1e-6)
