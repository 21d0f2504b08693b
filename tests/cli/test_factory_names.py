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


def test_a_failed_import_names_its_first_cause(run: Run, tmp_path: Path) -> None:
    """Packages that import lazily raise an error of their own for the one that says what is missing."""
    (tmp_path / "lazy.py").write_text(
        "try:\n    import no_such_package_at_all\nexcept ImportError as error:\n"
        "    raise RuntimeError('failed to import lazy, see above') from error\n"
    )
    said = run("profile", f"{tmp_path / 'lazy.py'}:net", "--device", "h100-sxm").stderr
    assert "RuntimeError: failed to import lazy" in said
    assert "caused by ModuleNotFoundError: No module named 'no_such_package_at_all'" in " ".join(said.split())
