"""Every command takes a module as it is made unless told otherwise, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import api

torch = pytest.importorskip("torch")

NET = """
import torch

def net(batch):
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), torch.empty(batch, 64)
"""
JOB = {"gpus": 8, "global_batch": 64}


@pytest.fixture(name="net")
def _net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:net"


def told(notes: tuple[str, ...]) -> bool:
    return any("dtype was not given: the module is taken as it is made, in fp32" in note for note in notes)


def test_a_dtype_that_nobody_gave_for_a_module_is_named(net: str) -> None:
    assert told(api.estimate(net, "dgx-h100", **JOB, plan={"dp": 8}).notes) and told(
        api.plan(net, "dgx-h100", **JOB).notes
    )
    given = api.estimate(net, "dgx-h100", **JOB, dtype="bf16", plan={"dp": 8})
    assert not told(given.notes)
    assert not told(api.estimate("gpt2", "dgx-h100", **JOB, plan={"dp": 8}).notes)


def test_a_module_that_was_captured_keeps_its_dtype() -> None:
    from steptime import captured_model

    module = captured_model(torch.nn.Linear(64, 64), lambda batch: torch.empty(batch, 64))
    e = api.estimate(module, "dgx-h100", **JOB, plan={"dp": 8})
    assert e.workload["dtype"] == "fp32" and not told(e.notes)
