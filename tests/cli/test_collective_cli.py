"""``steptime collective``: its report at every width, its JSON, its pictures and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main

GIVEN = ("collective", "all_reduce", "--cluster", "dgx-h100", "--ranks", "16")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_report_fits_every_width(columns: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, list(GIVEN)).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    words = " ".join(shown.split())
    assert "algorithm time algbw busbw" in words and "nccl chooses" in words and "1/gamma" in words


def test_json_is_the_record(run: Run) -> None:
    found = json.loads(run(*GIVEN, "--size", "64MiB", "--from", "1MiB", "--json").stdout)
    assert found["schema_version"] == 1 and found["size_bytes"] == 2.0**26 and found["sizes_bytes"][0] == 2.0**20
    assert {one["algorithm"] for one in found["times"]} == {"nccl", "ring", "mst"} == set(found["seconds"])
    assert len(found["chosen"]) == len(found["sizes_bytes"]) == len(found["seconds"]["ring"])


def test_a_picture_is_written_and_named(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*GIVEN, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 0 and "Drawn in" in result.stdout and (tmp_path / "a.png").stat().st_size > 1000
    refused = run(*GIVEN, "--plot", str(tmp_path / "a.xyz"))
    assert refused.exit_code == 2 and "cannot write such a file" in refused.stderr and not refused.stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--size", "1"), "has no unit"),
        (("--size", "1 GB/s"), "unit of Bps"),
        (("--algorithm", "tre"), "did you mean tree"),
        (("--inside", "5"), "one of 1, 2, 4, 8"),
        (("--ranks", "many"), "not a whole number"),
    ],
)
def test_bad_input_is_refused(run: Run, more: tuple[str, ...], words: str) -> None:
    result = run(*GIVEN, *more)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout
