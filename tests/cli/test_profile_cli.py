"""``steptime profile`` as users run it: reports, JSON, files, one clear message for what cannot be captured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

print("noise of an import")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 64)
    def forward(self, x):
        return x + torch.relu(self.line(x))

def build(batch_size=4):
    return nn.Sequential(*(Block() for _ in range(8)), nn.Linear(64, 8)), torch.empty(batch_size, 64)

def with_loss():
    module, x = build()
    return module, (x,), lambda output: output.square().mean()

def bare():
    return nn.Linear(64, 8)

def nothing():
    return 7

def leaves():
    raise SystemExit(3)

def needs_file():
    return torch.load("/nowhere/weights.pt")

def fails():
    class Bad(nn.Module):
        def forward(self, x):
            raise RuntimeError("the user's own words")
    return Bad(), torch.empty(2, 2)

def on_gpu():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)
        def forward(self, x):
            return self.line(x.cuda())
    return Moves(), torch.empty(2, 2)

def branches():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)
        def forward(self, x):
            return self.line(x) if bool(x.sum() > 0) else x
    return Branch(), torch.empty(2, 2)
"""

Run = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_json_is_the_whole_of_stdout_and_adds_up(run: Run, file: Path) -> None:
    result = run("profile", f"{file}:build", "--device", "h100-sxm", "--batch", "16", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    weights = 8 * (64 * 64 + 64) + 64 * 8 + 8
    assert found["parameters"] == weights
    assert found["batch"] == 16
    assert found["folded"] == ["0-7"]
    assert found["model_flops"] == 3 * 2 * 16 * (8 * 64 * 64 + 64 * 8) - 2 * 16 * 64 * 64
    assert found["step_time_bracket_s"][0] <= found["step_time_s"] <= found["step_time_bracket_s"][1]
    assert found["memory"]["parameter"] == sum(4 * -(-n // 128) * 128 for n in [64 * 64, 64] * 8 + [64 * 8, 8])
    assert sum(group["seconds"] for group in found["by_phase"]) == pytest.approx(found["device_time_s"])
    assert found["coverage"]["known_share_of_bytes"] == 1.0


def test_the_report_names_what_makes_the_peak(run: Run, file: Path) -> None:
    result = run("profile", f"{file}:with_loss", "--device", "a100-sxm-80gb")
    assert result.exit_code == 0, result.output
    for words in ("MFU", "coverage", "in use at the peak of", "largest at the peak", "fits in"):
        assert words in result.stdout
    assert "noise of an import" not in result.stdout


def test_inputs_may_be_given(run: Run, file: Path) -> None:
    result = run("profile", f"{file}:bare", "--device", "h100-sxm", "--input", "32x64", "--inference", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model_flops"] == 2 * 32 * 64 * 8


def test_files_for_viewers_are_written(run: Run, file: Path, tmp_path: Path) -> None:
    names = {"--snapshot": "s.pickle", "--trace": "t.json", "--roofline": "r.svg"}
    options = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    result = run("profile", f"{file}:build", "--device", "h100-sxm", *options, "--json")
    assert result.exit_code == 0, result.output
    assert all((tmp_path / name).stat().st_size > 1000 for name in names.values())
    again = run("profile", f"{file}:build", "--device", "h100-sxm", "--compare", str(tmp_path / "s.pickle"), "--json")
    assert abs(json.loads(again.stdout)["measured"]["peak_bytes"]) > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}:nope", "has no 'nope'"),
        ("{file}:nothing", "no torch.nn.Module"),
        ("{file}:leaves", "sys.exit"),
        ("{file}:needs_file", "/nowhere/weights.pt"),
        ("{file}:bare", "--input"),
        ("{file}:fails", "the user's own words"),
        ("{file}:on_gpu", "x.cuda()"),
        ("{file}:branches", "if bool(x.sum() > 0)"),
        ("no_such_package.sub:thing", "there is no Python module"),
        ("{folder}/other.py:thing", "there is no such file"),
        ("{file}", "file.py:factory"),
        ("llama3-8b", "estimate"),
    ],
)
def test_one_clear_message(run: Run, file: Path, target: str, message: str) -> None:
    given = target.format(file=file, folder=file.parent)
    result = run("profile", given, "--device", "h100-sxm")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "h10"], "did you mean"),
        (["--device", "h100-sxm", "--input", "3x"], "is no shape"),
        (["--device", "h100-sxm", "--input", "3x3:int7"], "int7"),
        (["--device", "h100-sxm", "--optimizer", "adamv"], "adamw"),
        (["--device", "h100-sxm", "--autocast", "fp8"], "bf16 or fp16"),
        (["--device", "h100-sxm", "--dtype", "fp4"], "fp4"),
        (["--device", "h100-sxm", "--loss", "hinge"], "hinge"),
        (["--device", "h100-sxm", "--nonzero-share", "2"], "out of range"),
        (["--device", "h100-sxm", "--batch", "0"], "whole number"),
        (["--device", "h100-sxm", "--snapshot", "x.txt"], ".pickle"),
        (["--device", "h100-sxm", "--trace", "/nowhere/at/all/x.json"], "no folder"),
        (["--device", "h100-sxm", "--dim", "batch"], "NAME=N"),
    ],
)
def test_wrong_options_are_named(run: Run, file: Path, options: list[str], message: str) -> None:
    result = run("profile", f"{file}:build", *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_help_says_that_importing_runs_code(run: Run) -> None:
    assert "runs its code" in " ".join(run("profile", "--help").stdout.split())
