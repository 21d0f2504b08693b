"""Layouts that ran and that ran out of memory: reading, shares, reliability, regret, rows and diagram."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.errors import FieldError, UserError
from steptime.measure.runs.aggregate import ScoredRun
from steptime.measure.runs.outcomes import (
    Tried,
    given_cells,
    outcome_of,
    outcome_statistics,
    score_outcomes,
    write_outcomes,
)
from steptime.measure.runs.read import Reason, RowProblem, TableRow
from steptime.measure.runs.run import run_of

HEAD = "model,seq_len,n_gpus,micro_batch,tp,pp,dp,recompute,attention_impl,outcome,step_time_s\n"
GIVEN = {"gpu": "A100-80GB", "global_batch_sequences": "512", "dtype": "bf16", "zero_stage_or_fsdp": "ZeRO-1"}
TABLE = HEAD + (
    "llama2-13b,2048,64,32,2,2,16,none,flash,OOM Error,\n"
    "llama2-13b,2048,64,1,2,2,16,none,flash,ok,12\n"
    "llama2-13b,2048,64,1,2,2,16,full,flash,Kernel not available,\n"
    "llama2-13b,2048,64,2,2,2,16,full,flash,ok,15\n"
    "llama2-13b,2048,64,2,2,3,16,full,flash,ok,15\n"
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "layouts.csv"
    path.write_text(TABLE)
    return path


def tried(chance: float, ran: bool, step_s: float = 1.0, predicted_s: float = 1.0, **cells: str) -> Tried:
    row = {"model": "llama2-7b", "seq_len": "2048", "n_gpus": "8", "gpu": "A100-80GB", "global_batch_sequences": "64",
           "metric_step_time_s": str(step_s) if ran else "", "outcome": "ok" if ran else "oom", **cells}  # fmt: skip
    scored = ScoredRun(run=run_of(TableRow(2, row)), step_time_s=predicted_s, oom_probability=chance)
    return Tried(scored=scored, ran=ran)


def test_an_outcome_that_says_nothing_of_memory_is_skipped_with_its_reason(table: Path):
    score = score_outcomes(table, GIVEN)
    found = score.to_json()
    assert (found["rows"], found["scored"]) == (5, 3)
    assert found["skipped"][str(Reason.NO_OUTCOME)] == 1 and sum(found["skipped"].values()) == 2
    assert "Kernel not available" in found["skipped_first"][str(Reason.NO_OUTCOME)]
    assert found["ran_out"] == {"rows": 1, "above_half": 1.0} and found["ran"] == {"rows": 2, "above_half": 0.0}


def test_words_of_outcomes():
    for text, ran in (("OK", True), ("OOM Error", False), ("torch.cuda.OutOfMemoryError: CUDA out of memory", False)):
        assert outcome_of(TableRow(2, {"outcome": text})) is ran
    assert outcome_of(TableRow(2, {"outcome": "", "metric_step_time_s": "3"})) is True
    for text in ("NaN loss", ""):
        with pytest.raises(RowProblem):
            outcome_of(TableRow(2, {"outcome": text}))


def test_statistics_by_hand():
    found = outcome_statistics([tried(0.9, False), tried(0.2, False), tried(0.6, True), tried(0.1, True)])
    assert found["ran_out"]["above_half"] == found["ran"]["above_half"] == 0.5
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.36 + 0.01) / 4)
    bins = {each["low"]: each for each in found["reliability"] if each["rows"]}
    assert {low: (each["rows"], each["ran_out"]) for low, each in bins.items()} == {
        0.1: (2, 0.5), 0.5: (1, 0.0), 0.9: (1, 1.0)
    }  # fmt: skip


def test_what_choosing_by_the_prediction_costs():
    """Of four plans the fastest that likely fits is predicted second, and is half as slow again as the best."""
    plans = [
        tried(0.9, False, predicted_s=0.5, micro_batch="8"), tried(0.04, True, 3.0, 1.0, micro_batch="1"),
        tried(0.04, True, 2.0, 2.0, micro_batch="2"), tried(0.6, True, 9.0, 0.1, micro_batch="4"),
    ]  # fmt: skip
    picked = outcome_statistics(plans)["picked"]
    assert (picked["groups"], picked["ran"]) == (1, 1.0)
    assert picked["mean_regret"] == pytest.approx(0.5) and picked["regret_of_ran"] == pytest.approx(3.5)
    failing = [replace(plans[0], scored=replace(plans[0].scored, oom_probability=0.02)), *plans[1:]]
    assert outcome_statistics(failing)["picked"]["ran"] == 0.0


def test_every_layout_is_written_with_its_chance(table: Path, tmp_path: Path):
    score = score_outcomes(table, GIVEN)
    write_outcomes(score, tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [row["line"] for row in rows] == ["2", "3", "4", "5", "6"]
    assert rows[0]["outcome"] == "ran out of memory" and float(rows[0]["oom_probability"]) > 0.5
    assert float(rows[0]["predicted_s"]) > 0 and rows[0]["measured_s"] == "" and rows[2]["skipped"]


def test_cells_that_are_given():
    assert given_cells(["gpus=8", "gpu = h100"]) == {"n_gpus": "8", "gpu": "h100"}
    with pytest.raises(FieldError, match="gives the column n_gpus twice"):
        given_cells(["gpus=8", "n_gpus=16"])
    for text in ("gpu", "gpu=", "gppu=3"):
        with pytest.raises(FieldError):
            given_cells([text])


def test_the_command_prints_what_python_returns_and_draws(table: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    sets = [word for name, text in GIVEN.items() for word in ("--set", f"{name}={text}")]
    figure = tmp_path / "reliability.svg"
    result = CliRunner().invoke(main, ["score", "--outcomes", str(table), *sets, "--figure", str(figure), "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    expected = json.loads(json.dumps(score_outcomes(table, GIVEN).to_json()))
    assert {name: printed[name] for name in expected} == expected
    assert figure.read_text().startswith("<?xml")


def test_a_table_without_outcomes_is_refused_with_the_column(tmp_path: Path):
    file = tmp_path / "layouts.csv"
    file.write_text("model,seq_len,gpu,n_gpus,global_batch_sequences,metric_mfu\nllama2-7b,4096,h100-sxm,8,8,0.4\n")
    with pytest.raises(UserError, match="lacks the column outcome"):
        score_outcomes(file)
