"""``steptime shard``: its report, its JSON, the file that it writes, and its refusals."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from fake_api import Run

pytest.importorskip("torch")
pytest.importorskip("highspy")

MODEL = str(Path(__file__).parents[2] / "examples" / "gpt.py") + ":tiny"
GIVEN = ("shard", MODEL, "--cluster", "dgx-h100", "--gpus", "2", "--mesh", "data=2")


def test_json_is_what_the_report_says(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    found = json.loads(run(*GIVEN, "--export", str(file), "--json").stdout)
    computing, hidden = found["time"]["compute"], found["time"]["weights_and_gradients"]
    others = found["time"]["activations"] + found["time"]["optimizer"]
    assert found["step_time_s"] == pytest.approx(others + max(computing, hidden))
    assert found["bound_s"] <= found["step_time_s"] * (1 + 1e-9) and 0 <= found["gap"] <= 0.01
    made = runpy.run_path(str(file))
    assert made["MESH"] == found["mesh"] == {"data": 2}
    assert set(made["PARAMETERS"]) == set(found["parameters"])
    assert callable(made["trainer"])


def test_what_follows_from_a_layout_has_no_bound(run: Run) -> None:
    how = ("--layout", "batch:data", "--complete", "propagate")
    assert json.loads(run(*GIVEN, *how, "--json").stdout)["bound_s"] is None
    assert "no bound: it follows from annotations or a layout" in run(*GIVEN, *how).stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--export", "plan.txt"), "is no Python file"),
        (("--export", "missing/folder/plan.py"), "missing/folder"),
        (("--export", "plan.py", "--pipeline", "--batch", "4"), "--export with --pipeline"),
        (("--mesh", "data=3"), "3 devices"),
        (("--complete", "guess"), "way to complete"),
    ],
)
def test_what_cannot_be_is_refused_before_the_search(run: Run, more: tuple[str, ...], message: str) -> None:
    found = run(*GIVEN, *more)
    assert found.exit_code == 2
    assert message in found.stderr and "Traceback" not in found.stderr
