"""A factory's name that a file has not is answered with what the file defines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    pass

def build(batch_size=4):
    return nn.Linear(64, 8), torch.empty(batch_size, 64)

def bare():
    return nn.Linear(64, 8)
"""

Run = Callable[..., Any]


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def test_a_name_that_a_file_has_not_is_told_what_it_defines(run: Run, file: Path, tmp_path: Path) -> None:
    hint = run("profile", f"{file}:nope", "--device", "h100-sxm").stderr.splitlines()[-1]
    assert {"Block", "build", "bare"} == set(hint.strip().removeprefix("valid: ").split(", "))
    assert not {"nn", "torch"} & set(hint.replace(",", "").split())
    assert "did you mean build?" in run("profile", f"{file}:bild", "--device", "h100-sxm").stderr
    (tmp_path / "only.py").write_text("from torch.nn import Linear, Module\nLIMIT = 3\nhead = Linear(4, 4)\n")
    hint = run("profile", f"{tmp_path / 'only.py'}:nope", "--device", "h100-sxm").stderr.splitlines()[-1]
    assert hint.strip() == "valid: head"
