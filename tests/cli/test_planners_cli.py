"""``steptime planners``: its report at narrow widths, its JSON, its picture and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("highspy")

MODEL = str(Path(__file__).parents[2] / "examples" / "gpt.py") + ":tiny"
GIVEN = ("planners", MODEL, "--cluster", "dgx-h100", "--gpus", "2", "--cpu", "0.2",
         "--methods", "greedy,data parallel")  # fmt: skip


@pytest.mark.quick(without=["80"])
@pytest.mark.parametrize("columns", [60, 80])
def test_the_report_fits_every_width(columns: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    more = ["--plot", str(tmp_path / "a.svg")] if columns == 80 else []
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, [*GIVEN, *more]).stdout
    report = shown.partition("\nDrawn in")[0]
    assert max(len(line.rstrip()) for line in report.splitlines()) <= columns
    assert "planner" in report and "data parallel" in report and "bound" in report
    assert not more or (tmp_path / "a.svg").stat().st_size > 1000


def test_json_has_every_method_and_the_bound(run: Run) -> None:
    found = json.loads(run(*GIVEN, "--json").stdout)
    assert found["schema_version"] == 1 and [each["name"] for each in found["methods"]] == [
        "planner", "greedy", "data parallel"]  # fmt: skip
    assert all(each["step_time_s"] >= found["bound_s"] * (1 - 1e-9) for each in found["methods"])


def test_an_unknown_method_is_refused(run: Run) -> None:
    refused = run(*GIVEN[:-1], "gredy")
    assert refused.exit_code == 2 and "did you mean greedy" in refused.stderr


def test_the_planner_may_be_named_and_a_name_given_again_runs_once(run: Run) -> None:
    found = json.loads(run(*GIVEN[:-1], "planner,greedy,greedy", "--json").stdout)
    assert [each["name"] for each in found["methods"]] == ["planner", "greedy"]
    assert run(*GIVEN[:-1], "planner").exit_code == 2


@pytest.mark.parametrize(("more", "words"), [(("--cpu", "nan"), "--cpu nan"), (("--memory", "-1 GiB"), "more than 0")])
def test_budgets_are_above_zero(more: tuple[str, str], words: str, run: Run) -> None:
    refused = run(*GIVEN, *more)
    assert refused.exit_code == 2 and words in refused.stderr
