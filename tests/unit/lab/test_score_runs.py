"""Scoring a table of measured training runs: no row is lost, groups add up, the written rows say the same."""

from __future__ import annotations

import csv
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from published_sample import COLUMNS, citation, published_rows
from steptime.errors import FieldError, InputFileError, UserError
from steptime.measure.report.score import print_run_score
from steptime.measure.runs import samples
from steptime.measure.runs import scoring as measured_scoring
from steptime.measure.runs.aggregate import ScoredRun
from steptime.measure.runs.bands import packaged
from steptime.measure.runs.predict import Scores, score_packaged
from steptime.measure.runs.read import TableRow, read_rows
from steptime.measure.runs.reading import runs_of
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import modelled
from steptime.measure.runs.scoring import (
    NOT_ASKED,
    REFUSED,
    TOO_LARGE,
    RunScore,
    read_any,
    score_reading,
    score_runs,
    write_rows,
)
from steptime.num import evenly_spread
from steptime.store.tables import write_table
from steptime_lab.calibrate.framework_fitting import fit_reading

DATA = Path(__file__).parents[2] / "data"
SMALL, PUBLISHED = DATA / "measured_runs.csv", DATA / "published_runs.csv"
LOOSE = 0.25
"""Bound of the median error of the step time on the table of published runs; fits of the day do far better."""


@pytest.fixture(scope="module")
def published() -> RunScore:
    return score_runs(PUBLISHED)


def of_sources(*keys: str) -> list[TableRow]:
    return [row for row in read_rows(PUBLISHED) if row.text("source_key") in keys]


@pytest.mark.slow
def test_every_row_is_scored_or_has_a_reason():
    score = score_runs(SMALL)
    found = score.to_json()
    assert (found["rows"], found["scored"]) == (9, 8) and sum(found["skipped"].values()) == 1
    assert sorted([s.run.line for s in score.scored] + [m.line for m in score.missing]) == list(range(2, 11))
    assert score.missing[0].reason == "the accelerator is not named" and score.missing[0].row_id == "nogpu"
    assert (found["time"]["rows"], found["memory"]["rows"]) == (7, 3)
    assert sum(part["rows"] for part in found["memory"]["by_definition"].values()) == 3


@pytest.mark.slow
def test_groups_add_up(published: RunScore):
    found = published.to_json()
    for name in ("by_source", "by_gpu", "by_scale", "by_dtype", "by_kind"):
        groups = found[name].values()
        assert sum(group["rows"] for group in groups) == found["time"]["rows"]
        mean = sum(group["rows"] * group["mape"] for group in groups) / found["time"]["rows"]
        assert mean == pytest.approx(found["time"]["mape"], rel=1e-9)


@pytest.mark.slow
def test_published_runs_are_predicted(published: RunScore):
    """Every row of the table of published runs has a prediction, near enough, with a band around it."""
    found = published.to_json()
    assert found["rows"] == found["scored"] >= 200 and not found["skipped"]
    assert found["time"]["median_ape"] < LOOSE and abs(found["time"]["median_bias"]) < LOOSE
    assert found["memory"]["by_definition"]["allocated"]["median_ape"] < LOOSE
    assert found["time"]["coverage90"] > 0.7
    for s in published.scored:
        if s.run.time:
            assert 0 < s.low_s < s.step_time_s < s.high_s < math.inf
        assert 0 < s.memory_bytes < math.inf


def test_the_band_holds_the_error_that_a_row_states():
    """Nine of ten within +/-40 %: a normal error of ln 1.4 / 1.645 beside that of the prediction."""
    run = next(run for run in read_any(SMALL).timed if run.stated_error == 0)
    plain, stated = score_packaged([run, replace(run, notes="+/-40%")]).scored
    widths = [np.log(s.high_s / s.low_s) for s in (plain, stated)]
    (deviation,) = modelled([run]).fit.deviations(packaged()[0])
    assert stated.step_time_s == plain.step_time_s
    assert widths[1] / widths[0] == pytest.approx(np.hypot(deviation, np.log(1.4) / 1.6449) / deviation, rel=1e-6)


@pytest.mark.slow
def test_a_run_whose_framework_is_not_told_is_predicted_by_the_common_values(published: RunScore):
    untold = score_runs(PUBLISHED, named=False)
    assert untold.how["framework"] == "not named" and len(untold.scored) == len(published.scored)
    changed = [a.step_time_s != b.step_time_s for a, b in zip(published.scored, untold.scored, strict=True)
               if a.run.time]  # fmt: skip
    assert sum(changed) > 0.9 * len(changed)
    assert [s.run for s in untold.scored] == [s.run for s in published.scored], "the runs are told as they are"
    wider = [math.log(b.high_s / b.low_s) - math.log(a.high_s / a.low_s)
             for a, b in zip(published.scored, untold.scored, strict=True) if a.run.time]  # fmt: skip
    assert sum(wider) > 0
    assert [s.memory_bytes for s in untold.scored] == [s.memory_bytes for s in published.scored], (
        "as are their settings"
    )


@pytest.mark.slow
def test_a_row_is_not_predicted_by_a_fit_to_itself():
    """Ten times slower, a source moves predictions of its own rows if it is in the fit, and not if it is left out."""
    rows = of_sources("sc21", "zero-bubble")
    factors = {"metric_tflops_per_gpu": 0.2, "metric_step_time_s": 5.0}
    slow = [
        TableRow(r.line, dict(r.cells) | {k: f"{f * float(r.text(k)):.9g}" for k, f in factors.items() if r.text(k)}
                 if r.text("source_key") == "sc21" else r.cells) for r in rows
    ]  # fmt: skip
    for split, moves in (("sc21", False), ("zero-bubble", True)):
        before, after = (score_reading(runs_of(given), leave_out=split) for given in (rows, slow))
        assert {s.run.source_key for s in before.scored} == {split}
        ratio = [b.step_time_s / a.step_time_s for a, b in zip(before.scored, after.scored, strict=True)]
        assert (max(abs(r - 1) for r in ratio) > 1e-3) == moves
        assert before.to_json()["skipped"] == {NOT_ASKED: len(rows) - len(before.scored)}
        assert before.to_json()["seen_by_the_fit"] == 0


@pytest.mark.quick("each")
@pytest.mark.parametrize("split", ["each", "model", "source_and_model"])
def test_every_run_is_left_out_once(split: str):
    rows = of_sources("sc21", "korthikanti", "mt-nlg")
    found = score_reading(runs_of(rows), leave_out=split).to_json()
    assert found["scored"] == found["time"]["rows"] == len(rows) and not found["skipped"]
    assert found["predicted_by"].startswith("fits without")


def test_an_unknown_source_is_refused():
    with pytest.raises(FieldError, match=r"--leave-out: there is no source 'sc2'(?s:.*)sc21"):
        score_reading(runs_of(of_sources("sc21")), leave_out="sc2")


def test_a_refused_run_keeps_its_reason(monkeypatch: pytest.MonkeyPatch):
    reading = runs_of(of_sources("sc21"))

    def packaged(runs: list[MeasuredRun], progress: object, *, named: bool) -> Scores:
        assert named
        scored = tuple(ScoredRun(run=run, step_time_s=1.0, memory_bytes=1e9) for run in runs[1:])
        return Scores(scored=scored, refused=((runs[0], "too odd"),), how="")

    monkeypatch.setattr(measured_scoring, "score_packaged", packaged)
    score = score_reading(reading)
    assert [(m.reason, m.detail, m.row_id) for m in score.missing] == [(REFUSED, "too odd", reading.runs[0].row_id)]


@pytest.mark.slow
def test_runs_of_unknown_frameworks_are_no_framework_of_their_own():
    rows = [
        TableRow(r.line, dict(r.cells) | {"source_key": "mine", "framework": "home-grown"}) for r in of_sources("sc21")
    ]
    result = fit_reading(runs_of(rows), "a test")
    assert {run.framework for run in result.found.runs} == {"generic"} == set(result.to_json()["frameworks"])
    assert "framework" not in tomllib.loads(result.toml), "who names no framework gets the common values"


def test_no_usable_row_is_no_error():
    found = score_reading(runs_of([TableRow(1, {"model": "x"})])).to_json()
    assert (found["rows"], found["scored"], found["time"]["rows"], found["time"]["mape"]) == (1, 0, 0, None)
    assert sum(found["skipped"].values()) == 1


@pytest.mark.slow
def test_rows_that_the_fit_has_seen_are_counted(monkeypatch: pytest.MonkeyPatch):
    reading = runs_of(of_sources("sc21", "mt-nlg"))
    for provenance, expected in (({"keys": "a b, sc21"}, "sc21"), ({"keys": "other"}, ""), ({}, None)):
        monkeypatch.setattr(measured_scoring, "framework_table", lambda p=provenance: {"provenance": p})
        seen = sum(run.source_key == expected for run in reading.runs)
        assert score_reading(reading).how["seen_by_the_fit"] == (None if expected is None else seen)


def test_a_run_that_would_not_fit_by_its_prediction_is_doubted_but_scored(tmp_path: Path):
    """Llama 3 70B with data parallelism alone: its weights are twice the device; in a row that is said to have run."""
    row = {
        "model": "llama3-70b", "gpu": "h100", "n_gpus": "8", "seq_len": "8192", "global_batch_sequences": "8",
        "tp": "1", "pp": "1", "cp": "1", "zero_stage_or_fsdp": "0", "recompute": "full", "metric_step_time_s": "10",
    }  # fmt: skip
    sound = row | {"model": "llama3-8b", "zero_stage_or_fsdp": "FSDP"}
    score = score_reading(runs_of([TableRow(2, row), TableRow(3, sound)]))
    assert score.how["doubts"] == {TOO_LARGE: 1}
    assert len(score.scored) == 2 and not score.missing and all(s.run.supports_claim for s in score.scored)
    path = tmp_path / "rows.csv"
    write_rows(score, path)
    with path.open() as file:
        flags = [line["flags"] for line in csv.DictReader(file)]
    assert [TOO_LARGE in text for text in flags] == [True, False]


@pytest.mark.slow
def test_written_rows_hold_every_row(tmp_path: Path):
    score = score_runs(SMALL)
    write_rows(score, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["line"]) for line in lines] == list(range(2, 11))
    for line in lines:
        if line["ratio"]:
            assert float(line["predicted_s"]) / float(line["measured_s"]) == pytest.approx(float(line["ratio"]), 1e-3)
            assert float(line["low_s"]) < float(line["predicted_s"]) < float(line["high_s"])
        assert bool(line["skipped"]) == (line["row_id"] == "nogpu")
    assert {line["row_id"]: line["memory_definition"] for line in lines}["moe"] == "reserved"


def test_parquet_is_read_as_csv(tmp_path: Path):
    rows = [dict(row.cells) for row in of_sources("sc21", "korthikanti", "torchtune")]
    typed = [r | {"micro_batch": float(r["micro_batch"]) if r["micro_batch"] else math.nan} for r in rows]
    assert any(math.isnan(r["micro_batch"]) for r in typed) and any(r["micro_batch"] > 0 for r in typed)
    write_table(tmp_path / "runs.parquet", typed)
    one, other = read_any(tmp_path / "runs.parquet"), runs_of([TableRow(i, r) for i, r in enumerate(rows, 1)])
    assert one.runs == other.runs and not one.skipped
    with pytest.raises(InputFileError, match="the file does not exist"):
        read_any(tmp_path / "none.parquet")


@pytest.mark.slow
def test_the_table_of_published_runs_follows_its_rule():
    """Made again from itself it is itself: every row is readable, supports claims, is cited, and needs its remarks."""
    rows = read_rows(PUBLISHED)
    again = published_rows(rows)
    assert [r["row_id"] for r in again] == [row.text("row_id") for row in rows]
    assert all(made[name] == row.text(name) for made, row in zip(again, rows, strict=True) for name in COLUMNS)
    counts = [sum(row.text("source_key") == key for row in rows) for key in {row.text("source_key") for row in rows}]
    assert max(counts) <= 25 and all(row.text("source") for row in rows)


def test_rows_are_spread_evenly():
    rows = [TableRow(line, {}) for line in range(101)]
    assert [row.line for row in evenly_spread(rows, 5)] == [0, 25, 50, 75, 100]
    assert evenly_spread(rows[:4], 5) == rows[:4]
    assert citation("A (full text, stored ids 1 + 2)") == citation("A") == "A"


def test_modelled_runs_keep_their_order():
    runs = runs_of(of_sources("sc21")).runs
    assert modelled(runs).runs == runs


def test_runs_that_cannot_be_modelled_count_as_done(monkeypatch: pytest.MonkeyPatch):
    runs, evaluated = runs_of(of_sources("sc21")).runs[:2], samples._evaluated

    def refused(run: MeasuredRun) -> object:
        if run is runs[1]:
            raise UserError("it cannot be modelled")
        return evaluated(run)

    monkeypatch.setattr(samples, "_evaluated", refused)
    done: list[tuple[int, int]] = []
    found = modelled(runs, lambda *counts: done.append(counts))
    assert done == [(1, 2), (2, 2)]
    assert found.refused == ((runs[1], "it cannot be modelled"),)


def test_a_reason_names_the_first_row_that_it_holds_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,gpu,n_gpus,global_batch_sequences,seq_len,tp,pp,metric_step_time_s\n"
        + "".join(f"llama3-8b,H100-SXM-80GB,{gpus},32,4096,1,1,3.0\n" for gpus in ("8", "eight", "nine"))
    )
    print_run_score(score_runs(path).to_json())
    assert "2 skipped: a number that is needed cannot be read (first: line 3: n_gpus: 'eight')" in " ".join(
        capsys.readouterr().out.split()
    )
