"""`steptime fit` as a user runs it: a file.py factory, a catalogue model, JSON, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from steptime.captured.fitting import fit

pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/gpt.py"

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def net(batch=4):
    return Net(), torch.zeros(batch, 32, 64)

def broken(batch=4):
    raise RuntimeError("no such corpus")
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.slow
def test_a_factory_of_a_file_in_json(run: Run, factory: Path) -> None:
    done = run("fit", f"{factory}:net", "--device", "rtx-4090", "--batch", "4", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert next(iter(document)) == "schema_version"
    assert document["fits"] is True and document["captures"] > 5
    assert document["front"] and document["guide"][0]["step"] == "mixed precision"
    point = document["front"][0]
    assert {"step_time_s", "peak_memory_bytes", "device_memory_bytes", "fits", "basis", "settings"} <= set(point)


def test_json_is_what_the_api_returns(run: Run) -> None:
    done = run("fit", "gpt2", "--device", "rtx-4090", "--batch", "32", "--json")
    from steptime.cli.output import plain

    assert json.loads(done.stdout) == json.loads(json.dumps(plain(fit("gpt2", "rtx-4090", batch=32).to_json())))


def test_a_cluster_stands_for_its_device(run: Run) -> None:
    made = [run("fit", "gpt2", "--device", name, "--batch", "8", "--json") for name in ("h100-sxm", "dgx-h100")]
    assert made[1].exit_code == 0, made[1].stderr
    assert json.loads(made[1].stdout)["device"] == json.loads(made[0].stdout)["device"]


def test_the_report_walks_the_guide(run: Run) -> None:
    done = run("fit", "llama3-8b", "--device", "h100-sxm", "--batch", "8")
    assert done.exit_code == 0, done.stderr
    order = [
        "as it is",
        "1 mixed precision",
        "2 gradient checkpointing",
        "3 gradient accumulation",
        "cheapest that fits",
    ]
    places = [done.stdout.index(word) for word in order]
    assert places == sorted(places)
    assert "offload_optimizer" in done.stdout


def test_nothing_fits_is_data(run: Run) -> None:
    done = run("fit", "llama3-70b", "--device", "rtx-4090", "--batch", "1")
    assert done.exit_code == 0
    assert "nothing fits" in done.stdout and "missing" in done.stdout
    assert json.loads(run("fit", "llama3-70b", "--device", "rtx-4090", "--json").stdout)["fits"] is False


def test_help_says_that_code_is_run(run: Run) -> None:
    text = " ".join(run("fit", "--help").stdout.split())
    assert "imported, which runs its code" in text
    assert "there is no --dtype and no --autocast" in text


def test_a_loss_by_name(run: Run, factory: Path) -> None:
    done = run("fit", f"{factory}:net", "--device", "rtx-4090", "--batch", "2", "--allow", "none", "--loss", "mse")
    assert done.exit_code == 0, done.stderr


@pytest.mark.each(
    ("arguments", "message"),
    [
        (("gpt2", "--device", "rtx-409"), "rtx-4090"),
        (("gpt2", "--device", "rtx-4090", "--batch", "none"), "whole number"),
        (("gpt2", "--device", "rtx-4090", "--host-bandwidth", "25"), "--host-bandwidth"),
        (("gpt22", "--device", "rtx-4090"), "gpt2"),
        (("NET:net", "--device", "rtx-4090"), "NET"),
        (("{factory}:nets", "--device", "rtx-4090"), "net"),
        (("{factory}:broken", "--device", "rtx-4090"), "no such corpus"),
        (("gpt2", "--device", "rtx-4090", "--input", "8x4"), "inputs"),
        (("gpt2", "--device", "rtx-4090", "--loss", "sum"), "loss"),
        (("{factory}:net", "--device", "rtx-4090", "--loss", "mses"), "mse"),
    ],
)
def test_wrong_input_exits_2(run: Run, factory: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("fit", *(word.replace("{factory}", str(factory)) for word in arguments))
    assert done.exit_code == 2, done.stdout
    assert message in done.stderr and "Traceback" not in done.stderr


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import steptime.captured.fitting as fitting

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "fit", stop)
    done = run("fit", "gpt2", "--device", "rtx-4090")
    assert done.exit_code == 130
