"""Python files of users: their code runs once, and what one variant of a module changes does not reach the others."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from steptime.captured.fit.bench import Bench
from steptime.captured.record.factory import load_target
from steptime.captured.record.problems import CaptureError
from steptime.captured.workload import captured_target
from steptime.hardware import load_device

CODE = """
from pathlib import Path
import torch
from torch import nn

with Path(__file__).with_suffix(".log").open("a") as log:
    log.write("x")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 64)
    def forward(self, x):
        return x + torch.relu(self.line(x))

def build(batch=4):
    return nn.Sequential(*(Block() for _ in range(4))), torch.empty(batch, 16, 64)

shared = build()

def same(batch=4):
    return shared[0], torch.empty(batch, 16, 64)

class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
    def forward(self, x):
        self.beside = x.mean()
        return self.blocks(x)

def labelled(batch=4):
    labels, module = torch.zeros(batch, 16, 64), Aside()
    return module, torch.empty(batch, 16, 64), lambda out: nn.functional.mse_loss(out, labels) + module.beside

def of_four():
    labels = torch.zeros(4, 16, 64)
    return nn.Sequential(*(Block() for _ in range(4))), torch.empty(4, 16, 64), lambda out: out.sub(labels).mean()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "users_own.py"
    path.write_text(CODE)
    return path


def runs(file: Path) -> int:
    """How often the code of the file ran."""
    return len(file.with_suffix(".log").read_text())


def test_a_module_as_a_workload_runs_its_file_once(file: Path) -> None:
    assert captured_target(f"{file}:build", "bf16", None).layers == 4
    assert runs(file) == 1


def test_a_loss_may_hold_labels_of_its_batch_and_its_module(file: Path) -> None:
    assert captured_target(f"{file}:labelled", "fp32", None).layers == 4


def test_a_loss_that_holds_labels_needs_a_factory_that_takes_the_batch(file: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"recorded with 2, 3, 5 samples; it makes 4\n  let the factory take `batch`"
    ):
        captured_target(f"{file}:of_four", "fp32", None)


def test_variants_of_a_module_run_its_file_once(file: Path) -> None:
    bench = Bench(text=f"{file}:build", device=load_device("rtx-3090"))
    found = [bench.target(*variant) for variant in ((None, 4), ("bf16", 4), (None, 8), ("bf16", 4, 16))]
    assert len({id(one.module) for one in found}) == len(found)
    assert runs(file) == 1


def test_a_file_that_changed_runs_again(file: Path) -> None:
    text = f"{file}:build"
    before = load_target(text, sizes={}, dtype=None, inputs=())
    file.write_text(CODE.replace("range(4)", "range(12)"))
    after = load_target(text, sizes={}, dtype=None, inputs=())
    assert (len(before.module), len(after.module), runs(file)) == (4, 12, 2)


@pytest.mark.parametrize("name", ["build", "same"])
def test_adapters_leave_the_other_variants_alone(file: Path, name: str) -> None:
    bench = Bench(text=f"{file}:{name}", device=load_device("rtx-3090"))
    adapted, plain = bench.target("bf16", 4, 16).module, bench.target("bf16", 4).module
    assert {hasattr(block.line, "adapter_up") for block in adapted} == {True}
    assert {hasattr(block.line, "adapter_up") for block in plain} == {False}
    assert all(parameter.requires_grad for parameter in plain.parameters())
