"""``steptime shard``: parts that add up, what follows without a search, JSON, and options that are refused."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.units import parse

pytest.importorskip("torch")

MODEL = str(Path(__file__).parents[2] / "examples" / "gpt.py") + ":tiny"
MESH = ("--mesh", "data=2,model=4")
GIVEN = ("shard", MODEL, "--cluster", "dgx-h100", "--gpus", "8")


def rows(shown: str) -> dict[str, float]:
    """Seconds of the table of parts."""
    found = re.findall(r"^([a-z ]+?) +(-?[0-9.]+ (?:us|ms|s)) +-?[0-9.]+ %$", shown, re.M)
    return {name: parse(text, "s") for name, text in found}


@pytest.mark.quick("more1")
@pytest.mark.parametrize("more", [(), ("--no-overlap",), ("--layout", "batch:data, ffn:model")])
def test_the_parts_add_up_to_the_step(more: tuple[str, ...], run: Run) -> None:
    parts = rows(run(*GIVEN, *MESH, *more).stdout)
    step_s = parts.pop("step")
    assert sum(parts.values()) == pytest.approx(step_s, rel=1e-2)
    assert {"compute", "bound by memory", "optimizer", "ranks together"} <= set(parts)


@pytest.mark.quick(without=["80"])
@pytest.mark.parametrize("columns", [60, 80])
def test_what_was_not_searched_has_no_bound_and_says_what_was_replicated(columns: int) -> None:
    words = [*GIVEN, *MESH, "--layout", "batch:data, heads:model, ffn:model", "--complete", "propagate"]
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, words).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    text = " ".join(shown.split())
    assert "no bound: it follows from annotations or a layout" in text and "100.0 %;" not in text
    assert "replicated against the layout: " in text and "attention.qkv: mm along model: no dim of it is on" in text
    json_text = CliRunner().invoke(main, [*words, "--json"]).stdout
    assert json.loads(json_text)["unmatched"][0]["share_of_compute"] > 0.05


@pytest.mark.slow
def test_conflicts_are_shown_with_both_annotations(run: Run) -> None:
    given = ("--annotate", "input.0=S(0) R", "--annotate", "*.weight=S(0) R", "--complete", "propagate")
    text = " ".join(run(*GIVEN, *MESH, *given).stdout.split())
    assert "conflicts: " in text and "input.0=S(0) R; dropped: S(0) of *.weight=S(0) R" in text


REFUSED = {
    "no Python file": (("--export", "plan.txt"), "is no Python file"),
    "no folder": (("--export", "missing/folder/plan.py"), "missing/folder"),
    "a pipeline exported": (("--export", "plan.py", "--pipeline", "--batch", "4"), "--export with --pipeline"),
    "memory below zero": (("--memory", "-1 GiB"), "a device has more than 0"),
    "no memory": (("--memory", "0 GB"), "a device has more than 0"),
    "no time": (("--seconds", "0"), "--seconds 0: a search takes time"),
    "no number of seconds": (("--seconds", "nan"), "--seconds nan: a search takes time"),
    "endless": (("--seconds", "inf"), "--seconds inf: a search takes time"),
    "devices of another kind": (("--further", "dgx-a100=8"), "add --pipeline"),
    "mesh of a pipeline": (("--pipeline", "--batch", "8", *MESH), "--mesh is of one mesh"),
    "layout of a pipeline": (("--pipeline", "--batch", "8", "--layout", "batch:data"), "--layout is of one mesh"),
    "annotation of a pipeline": (("--pipeline", "--batch", "8", "--annotate", "x=R"), "--annotate is of one mesh"),
    "way to complete": (("--complete", "guess"), "valid: propagate, solve"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_effect_and_numbers_out_of_range_are_refused(name: str, run: Run) -> None:
    more, words = REFUSED[name]
    refused = run(*GIVEN, *more)
    assert refused.exit_code == 2 and words in " ".join(refused.stderr.split()) and not refused.stdout


def test_an_exported_plan_is_what_the_report_says(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    words = ("shard", MODEL, "--cluster", "dgx-h100", "--gpus", "2", "--mesh", "data=2")
    found = json.loads(run(*words, "--export", str(file), "--json").stdout)
    made = runpy.run_path(str(file))
    assert made["MESH"] == found["mesh"] == {"data": 2}
    assert set(made["PARAMETERS"]) == set(found["parameters"])
    assert callable(made["trainer"])


def test_hints_for_onnx_files_name_options_that_work(tmp_path: Path) -> None:
    """Sizes that the file leaves open are given by --dim; what the file itself says is no option of a pipeline."""
    onnx = pytest.importorskip("onnx")
    make, number = onnx.helper, onnx.TensorProto.FLOAT
    ends = [make.make_tensor_value_info(name, number, ["batch", 8]) for name in "xy"]
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32) * np.arange(8, dtype=np.float32), "w")
    graph = make.make_graph([make.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    path = tmp_path / "m.onnx"
    path.write_bytes(make.make_model(graph, opset_imports=[make.make_opsetid("", 18)]).SerializeToString())
    words = ["shard", str(path), "--cluster", "dgx-h100", "--gpus", "2", "--json"]
    asked = CliRunner().invoke(main, words)
    assert "give --dim batch=SIZE" in asked.output
    found = json.loads(CliRunner().invoke(main, [*words, "--dim", "batch=16"]).stdout)
    assert found["step_time_s"] > 0
    piped = CliRunner().invoke(main, [*words, "--pipeline", "--dim", "batch=16"])
    assert piped.exit_code == 2 and "give the factory of the module, or leave --pipeline out" in piped.output
