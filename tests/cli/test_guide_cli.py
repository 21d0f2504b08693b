"""``steptime guide``: its report at every width, its JSON, and its refusals."""

from __future__ import annotations

import json

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main

GIVEN = ("guide", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64")


@pytest.mark.quick("200")
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_report_fits_every_width(columns: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, list(GIVEN)).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    words = " ".join(shown.split())
    for part in ("1 Does the model fit one device? no.", "beaten: ", "turned round by: ", "exhaustive search find?"):
        assert part in words


def test_json_is_the_record(run: Run) -> None:
    found = json.loads(run(*GIVEN, "--json").stdout)
    assert found["schema_version"] == 1 and found["gpus"] == 16
    assert found["best"]["step_time_s"] <= found["shortcut"]["step_time_s"]
    assert {"question", "answer", "numbers", "because", "beaten", "turns", "plan"} <= set(found["decisions"][0])


def test_bad_input_is_refused(run: Run) -> None:
    for more, words in ((("--steps", "5"), "belong together"), (("--steps", "5", "--within", "3 GB"), "unit of bytes")):
        result = run(*GIVEN, *more)
        assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout


@pytest.mark.parametrize("within", ["0 s", "-3 days"])
def test_a_time_limit_is_above_zero(within: str, run: Run) -> None:
    refused = run(*GIVEN, "--steps", "5", "--within", within)
    assert refused.exit_code == 2 and "a training within" in refused.stderr and "--within '30 days'" in refused.stderr


def test_one_device_is_one(run: Run) -> None:
    shown = run("guide", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "1", "--global-batch", "64").stdout
    assert "not even 1 device holds it" in shown and "a device alone shares links with no other" in shown
    assert "instead: optimiser on the host (swapping): " in shown and "beaten: " not in shown, "nothing was beaten"
