"""``steptime consistency``: its report at every width, its JSON, a run from a file, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main

JOB = ("--cluster", "dgx-h100", "--gpus", "16", "--tp", "2", "--global-batch", "64", "--clocks", "40")
GIVEN = ("consistency", "llama3-8b", *JOB)
FAILURES = ("--fail", "worker@20s", "--fail", "server@20s", "--down", "30s")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_report_fits_every_width(columns: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, [*GIVEN, *FAILURES, "--slow", "1.2"]).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    words = " ".join(shown.split())
    for part in (
        "mode samples/s updates/s compute exchange wait",
        "A worker fails at 20 s",
        "has no server",
        "ssp s=3",
    ):
        assert part in words


def test_json_is_the_record(run: Run) -> None:
    found = json.loads(run(*GIVEN, *FAILURES, "--servers", "3", "--staleness", "5", "--json").stdout)
    assert found["schema_version"] == 1 and found["servers"]["count"] == 3 and found["workers"] == 8
    assert [one["mode"] for one in found["modes"]] == ["all-reduce", "bsp", "ssp", "asp"]
    assert [one["bound"] for one in found["modes"]] == [0, 0, 5, None]
    assert [len(one["failures"]) for one in found["modes"]] == [1, 2, 2, 2]
    assert found["modes"][1]["failures"][1]["stands_still_s"] == pytest.approx(30.0, rel=0.05)
    wide = json.loads(run(*GIVEN, "--server-bandwidth", "70 GB/s", "--seed", "4", "--json").stdout)
    assert wide["servers"]["server_Bps"] == 70e9 and wide["seed"] == 4 and wide["servers"]["count"] == 8


def test_a_run_may_be_a_file_and_options_win(run: Run, tmp_path: Path) -> None:
    text = 'model = "llama3-8b"\ncluster = "dgx-h100"\ngpus = 16\nglobal_batch = 64\n[plan]\ntp = 2\n'
    (tmp_path / "run.toml").write_text(text)
    found = json.loads(run("consistency", str(tmp_path / "run.toml"), "--clocks", "40", "--json").stdout)
    assert found == json.loads(run(*GIVEN, "--json").stdout)
    assert json.loads(run("consistency", str(tmp_path / "run.toml"), "--tp", "4", "--json").stdout)["workers"] == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--fail", "worker"), "has no time"),
        (("--fail", "worker@20"), "has no unit"),
        (("--fail", "rack@20s"), "there is no fail 'rack'"),
        (("--server-bandwidth", "5 GB"), "is a unit of bytes"),
        (("--jitter", "much"), "is not a number"),
        (("--zero", "2"), "drop zero"),
        (("--servers", "0"), "not a whole number"),
    ],
)
def test_bad_input_is_refused(run: Run, more: tuple[str, ...], words: str) -> None:
    result = run(*GIVEN, *more)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout


def test_what_is_missing_is_named(run: Run) -> None:
    result = run("consistency", "llama3-8b", "--gpus", "16")
    assert result.exit_code == 2 and "--cluster" in result.stderr and "--global-batch" in result.stderr
