"""``steptime study``: run, show, query, export, and what they refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.study import file

STUDY = """
title = "Small"
[job]
model = "gpt2"
cluster = "dgx-h100"
gpus = [2, 4, 6]
global_batch = 12
mode = "published"
strategy = "1d"
[training]
tokens = "1B"
[keep]
top = 2
front = true
terms = true
"""


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*map(str, args)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(STUDY)
    code, text = run("study", "run", folder / "small.toml", "--store", folder / "s", "--workers", 1)
    assert code == 0 and "3 points: 3 computed" in text
    return folder / "small.toml", folder / "s"


def test_run_again_and_json(paths: tuple[Path, Path]) -> None:
    code, text = run("study", "run", paths[0], "--store", paths[1], "--workers", 1, "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["points"], found["computed"], found["found"], found["damaged"]) == (3, 0, 3, [])


def test_show(paths: tuple[Path, Path]) -> None:
    code, text = run("study", "show", paths[0], "--store", paths[1])
    assert code == 0 and "Small" in text and "days" in text and max(map(len, text.splitlines())) <= 80
    for table in ("points", "front", "terms"):
        assert run("study", "show", paths[0], "--store", paths[1], "--table", table)[0] == 0
    code, text = run("study", "show", paths[0], "--store", paths[1], "--json")
    rows = json.loads(text)["rows"]
    assert {row["rank"] for row in rows} == {1, 2} and all(row["training_days"] > 0 for row in rows)


def test_query_reads_and_changes_nothing(paths: tuple[Path, Path], tmp_path: Path) -> None:
    sql = "select gpus, min(step_time_s) as step_s from plans group by gpus order by gpus"
    code, text = run("study", "query", paths[0], sql, "--store", paths[1], "--json")
    assert code == 0 and [row["gpus"] for row in json.loads(text)["rows"]] == [2, 4, 6]
    evil = tmp_path / "evil.csv"
    for bad in ("selec", f"copy plans to '{evil}'", "select * from read_csv('/etc/passwd')", f"attach '{evil}' as a",
                "select * from nowhere", "set enable_external_access = true", "install httpfs"):  # fmt: skip
        code, text = run("study", "query", paths[0], bad, "--store", paths[1])
        assert code == 2 and "refused" in text and "Traceback" not in text, bad
    assert not evil.exists()
    for empty in ("", " ; ", "/* nothing */"):
        code, text = run("study", "query", paths[0], empty, "--store", paths[1])
        assert code == 2 and "the query is empty" in text


def test_export(paths: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("study", "export", paths[0], "--store", paths[1], "-o", tmp_path / "a.csv")[0] == 0
    with (tmp_path / "a.csv").open() as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == 6 and rows[0]["cluster"] == "dgx-h100"
    code, text = run("study", "export", paths[0], "--store", paths[1], "-o", tmp_path / "a.parquet", "--table", "terms")
    assert code == 0 and (tmp_path / "a.parquet").stat().st_size > 0
    for out, table, word in (("a.xls", "plans", "table"), ("no/a.csv", "plans", "written"), ("a.csv", "x", "points")):
        code, text = run("study", "export", paths[0], "--store", paths[1], "-o", tmp_path / out, "--table", table)
        assert code == 2 and word in text, text


def test_points_that_contradict_themselves_have_a_message(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'what = "estimate"\n[job]\nmodel = "gpt2"\ncluster = "dgx-h100"\ngpus = [8, 9]\n[job.plan]\ntp = 8\n'
    )
    code, text = run("study", "run", tmp_path / "a.toml", "--store", tmp_path / "s", "--workers", 1)
    assert code == 0 and "1 point refused" in text
    code, text = run("study", "show", tmp_path / "a.toml", "--store", tmp_path / "s", "--table", "points", "--json")
    assert [row["status"] for row in json.loads(text)["rows"]] == ["infeasible", "refused"]
    code, text = run("study", "show", tmp_path / "a.toml", "--store", tmp_path / "s", "--table", "points")
    assert "tp 8 does not divide 9 GPUs" in text and "…" not in text and max(map(len, text.splitlines())) <= 80


def test_many_points_are_asked_for(paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "ASK_ABOVE", 2)
    code, text = run("study", "run", paths[0], "--store", tmp_path / "s")
    assert code == 2 and "--yes" in text and not (tmp_path / "s").exists()
    assert run("study", "run", paths[0], "--store", paths[1], "--yes", "--workers", 1)[0] == 0


def test_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(STUDY + "more = 1\n")
    for args, word in (
        (["run", tmp_path / "none.toml"], "does not exist"),
        (["run", tmp_path / "bad.toml"], "unknown key"),
        (["run", paths[0], "--executor", "slurm"], "slurm"),
        (["run", paths[0], "--workers", "0"], "workers"),
        (["show", paths[0], "--store", tmp_path / "none"], "there is no store"),
        (["query", paths[0], "select 1", "--store", tmp_path / "none"], "there is no store"),
    ):
        code, text = run("study", *args)
        assert code == 2 and word in text and "Traceback" not in text, (args, text)
