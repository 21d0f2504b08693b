"""``steptime score FILE`` and ``steptime calibrate frameworks`` as a user runs them."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_api import Run

from fits import STACKS, fit_text
from published_sample import published_csv
from steptime.cli.main import EXIT_INTERRUPTED, EXIT_USER
from steptime.measure.runs import scoring as measured_scoring
from steptime.measure.runs.read import read_rows
from steptime.plan.framework_file import framework_names, load_framework

DATA = Path(__file__).parents[1] / "data"
SMALL = str(DATA / "measured_runs.csv")


@pytest.fixture
def few(tmp_path: Path) -> str:
    """The rows of two sources."""
    kept = [row.cells for row in read_rows(DATA / "published_runs.csv")
            if row.text("source_key") in ("sc21", "mt-nlg")]  # fmt: skip
    (tmp_path / "few.csv").write_text(published_csv([{k: v for k, v in row.items() if k} for row in kept]))
    return str(tmp_path / "few.csv")


@pytest.mark.slow
def test_report_and_rows(run: Run, tmp_path: Path) -> None:
    done = run("score", SMALL, "--out", str(tmp_path / "rows.csv"))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "8 of 9 rows scored: 7 step times, 3 peak memories" in done.stdout
    for text in ("1 skipped: the accelerator is not named", "By source", "By GPU", "By number of GPUs", "By dtype",
                 "By kind of model", "peak memory", "supporting claims", "reserved"):  # fmt: skip
        assert text in done.stdout
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 9


@pytest.mark.slow
def test_json_keeps_its_contract(run: Run) -> None:
    done = run("score", SMALL, "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["rows"] == 9
    assert set(document["time"]) >= {"mape", "median_ape", "bias", "p90_ape", "coverage90"}
    assert set(document["memory"]) >= {"mape", "median_ape", "bias", "p90_ape", "by_definition"}
    assert set(document) >= {"scored", "skipped", "by_source", "by_gpu", "by_scale", "by_dtype", "by_kind", "macro",
                             "rank", "predicted_by", "seen_by_the_fit"}  # fmt: skip


@pytest.mark.slow
def test_a_source_left_out(run: Run, few: str) -> None:
    document = json.loads(run("score", few, "--leave-out", "mt-nlg", "--json").stdout)
    assert set(document["by_source"]) == {"mt-nlg"} and document["seen_by_the_fit"] == 0
    text = run("score", few, "--leave-out", "mt-nlg", "--framework-unknown").stdout
    assert "Predicted by fits without the source mt-nlg, framework not named" in text


@pytest.mark.each(
    ("arguments", "message"),
    [
        (("none.csv",), "the file does not exist"),
        ((SMALL, "--kernels", "k.csv"), "score needs one table"),
        ((SMALL, "--leave-out", "nobody"), "there is no source 'nobody'"),
        ((SMALL, "--out", "rows.txt"), "does not end in .csv"),
        ((SMALL, "--out", "no/folder/rows.csv"), "cannot be written"),
        (("--kernels", "k.csv", "--leave-out", "each"), "--leave-out is for training runs alone"),
        (("--kernels", "k.csv", "--framework-unknown"), "--framework-unknown is for training runs alone"),
        ((str(DATA / "published_best.csv"),), "lacks the column"),
        ((str(DATA),), "is a folder"),
    ],
)
def test_score_refuses(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("score", *arguments)
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_an_interrupted_score_leaves_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_scoring, "score_packaged", interrupted)
    done = run("score", SMALL, "--out", str(tmp_path / "rows.csv"))
    assert (done.exit_code, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "Interrupted.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fit_is_written_and_used(run: Run, few: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged frameworks until a folder of STEPTIME_PATH has a file of its own."""
    packaged = json.loads(run("score", few, "--json").stdout)
    done = run("calibrate", "frameworks", few, "--out", str(tmp_path / "frameworks.toml"))
    assert done.exit_code == 0 and "too few sources or runs for a band of their own" in done.stdout
    assert "matrix" in done.stdout and "Factors of devices" in done.stdout
    tables = tomllib.loads((tmp_path / "frameworks.toml").read_text())
    assert tables["provenance"]["keys"] == "mt-nlg, sc21"
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    own = json.loads(run("score", few, "--json").stdout)
    assert own["fit"]["rows"] == own["seen_by_the_fit"] == own["time"]["rows"] != packaged["fit"]["rows"]
    assert own["time"]["mape"] != packaged["time"]["mape"]
    assert framework_names() == ["ideal", "generic", *sorted({*tables["framework"], *STACKS})]
    name = next(iter(tables["framework"]))
    assert load_framework(name, "unheard-of").matrix == tables["framework"][name]["matrix"]


def test_a_fit_to_few_runs_warns(run: Run, few: str, tmp_path: Path) -> None:
    """Two runs, and twenty rows that cannot be used."""
    head, *rows = Path(few).read_text().splitlines()
    table = tmp_path / "two.csv"
    table.write_text("\n".join([head, *rows[:2], *["x" + "," * head.count(",")] * 20]) + "\n")
    done = run("calibrate", "frameworks", str(table), "--out", str(tmp_path / "f.toml"), "--json")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert (done.exit_code, done.stderr) == (0, f"Warning: {warning}\n")
    assert warning.startswith("2 of 22 rows could be used; a fit to fewer than 10 says little")


def test_fit_as_json(run: Run, few: str, tmp_path: Path) -> None:
    done = run("calibrate", "frameworks", few, "--out", str(tmp_path / "f.toml"), "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["file"] == str(tmp_path / "f.toml")
    assert (document["warnings"], done.stderr) == ([], "")
    assert document["used"] == sum(f["runs"] for f in document["frameworks"].values())
    assert all(v["doubt"] > 0 for f in document["frameworks"].values() for v in f["parameters"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.csv",), "the file does not exist"),
        ((SMALL, "--out", "f.json"), "does not end in .toml"),
        ((SMALL, "--out", "no/f.toml"), "cannot be written"),
        ((SMALL, "--out", "f.toml", "--save"), "exclude each other"),
    ],
)
def test_fit_refuses(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("calibrate", "frameworks", *arguments)
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[common]\nmatrix = ", "[common]\nmatrix = -", r"common.matrix: -\d"),
        ("[band.named]", "[band.called]", "band.called: unknown key"),
        ('source = "', 'origin = "', "provenance.source: is missing"),
        ("host_s = ", "hosts = ", r"common.hosts: unknown key\n  did you mean host_s\?"),
        (
            "[common]\nmatrix = ",
            f"[common]\nmatrix = {'9' * 400}",
            r"common.matrix: inf is not a number from 1e-12 to 1e\+09",
        ),
        ("[doubts]\nmatrix = ", "[doubts]\nmatrix = 1", r"doubts.matrix: 10\.\d+ is not a number from 1e-12 to 10\n"),
        ("[common]", "[common", "is not valid TOML"),
    ],
)
def test_a_broken_file_of_frameworks_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, message: str
) -> None:
    text = fit_text()
    assert before in text
    (tmp_path / "frameworks.toml").write_text(text.replace(before, after, 1))
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    done = run("score", SMALL)
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert re.search(message, done.stderr) and str(tmp_path / "frameworks.toml") in done.stderr
