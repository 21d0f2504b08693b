"""``steptime reshard``: its report at every width, its JSON and its refusals."""

from __future__ import annotations

import json

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main

GIVEN = ("reshard", "--shape", "8192x8192", "--mesh", "data=2,model=4", "--cluster", "dgx-h100")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_report_fits_every_width(columns: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, [*GIVEN, "R S(0)", "S(0) S(0)"]).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    words = " ".join(shown.split())
    assert "slice data" in words and "permute" in words and "In PyTorch: all_to_all_single of 16 MiB" in words


def test_json_has_the_steps(run: Run) -> None:
    found = json.loads(run(*GIVEN, "R S(0)", "R R", "--json").stdout)
    assert found["schema_version"] == 1 and found["mesh"] == {"data": 2, "model": 4} and found["source"] == "R S(0)"
    (step,) = found["steps"]
    assert step["collective"] == "all_gather_into_tensor" and step["axes"] == ["model"]
    assert step["size_bytes"] == 2**27 and step["seconds"] == found["seconds"] > 0


def test_nothing_to_do_is_said(run: Run) -> None:
    assert "Nothing to do" in run(*GIVEN, "R S(0)", "R S(0)").stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("R", "R R"), "has 1 placement, mesh"),
        (("X R", "R R"), "'X' is not a placement"),
        (("S(2) R", "R R"), "does not divide"),
        (("R R", "R R", "--gpus", "16"), "has 8 devices, the job has 16"),
        (("R R", "R R", "--dtype", "bf17"), "did you mean bf16"),
        (("R R", "R R", "--shape", "8192*8192"), "is no shape"),
        (("R R", "R R", "--shape", "9x9x9x9x9x9x9"), "at most 6 dims"),
        (("R R", "R R", "--mesh", "two"), "is no mesh"),
        (("R R", "R R", "--cluster", "dgx-h10"), "dgx-h100"),
    ],
)
def test_bad_input_is_refused(run: Run, more: tuple[str, ...], words: str) -> None:
    result = run(*GIVEN, *more)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout
