"""``steptime profile`` as users run it: reports, JSON, files, one clear message for what cannot be captured."""

from __future__ import annotations

import json
import sys
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


def test_a_cluster_stands_for_its_device(run: Run, file: Path) -> None:
    """``steptime calibrate machine`` writes a cluster file."""
    own = file.with_name("own.toml")
    own.write_text('device = "h100-sxm"\n[levels.local]\nlink = "nvlink4"\n')
    made = [run("profile", f"{file}:bare", "--device", name, "--input", "32x64", "--inference", "--json")
            for name in ("h100-sxm", "dgx-h100", str(own))]  # fmt: skip
    assert [done.exit_code for done in made] == [0, 0, 0], made[-1].output
    assert made[0].stdout == made[1].stdout == made[2].stdout


def test_the_workspace_of_products_follows_the_design_of_the_chip(run: Run, file: Path) -> None:
    own = file.with_name("card.toml")
    own.write_text('base = "h100-sxm"\nmemory = "60 GiB"\n')
    made = [run("profile", f"{file}:bare", "--device", name, "--input", "32x64", "--inference", "--json")
            for name in (str(own), "a100-sxm-80gb")]  # fmt: skip
    assert [done.exit_code for done in made] == [0, 0], made[-1].output
    sizes = [json.loads(done.stdout)["memory_by_definition_bytes"]["workspace"] for done in made]
    assert sizes == [2 * 32 * 2**20, 2 * (4096 * 1024 * 2 + 16 * 1024 * 8)]


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


@pytest.mark.slow
def test_files_for_viewers_are_written(run: Run, file: Path, tmp_path: Path) -> None:
    names = {"--snapshot": "s.pickle", "--trace": "t.json", "--roofline": "r.svg"}
    options = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    result = run("profile", f"{file}:build", "--device", "h100-sxm", *options, "--json")
    assert result.exit_code == 0, result.output
    assert all((tmp_path / name).stat().st_size > 1000 for name in names.values())
    again = run("profile", f"{file}:build", "--device", "h100-sxm", "--compare", str(tmp_path / "s.pickle"), "--json")
    found = json.loads(again.stdout)
    assert found["memory_by_definition_bytes"]["workspace"] == 64 * 2**20
    assert found["measured"]["peak_bytes"] == found["measured"]["predicted_bytes"] == found["peak_memory_bytes"]
    totals = {row["name"]: row for row in found["measured"]["totals"]}
    assert totals["peak reserved"]["predicted_bytes"] == found["memory_by_definition_bytes"]["reserved"]
    assert {row["relative"] for row in totals.values()} == {0.0}
    held = {row["name"]: row for row in found["measured"]["by_category"]}
    assert held["parameter"]["measured_bytes"] == held["parameter"]["predicted_bytes"] > 0
    shown = run("profile", f"{file}:build", "--device", "h100-sxm", "--compare", str(tmp_path / "s.pickle")).stdout
    assert "peak reserved" in shown and "requested at the peak by" in shown


@pytest.mark.each(
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
        ("{folder}/other.py:thing", "the file does not exist"),
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


@pytest.mark.each(
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--snapshot", "{folder}/a.pickle", "--compare", "none.pickle"], "none.pickle: the file does not exist"),
        (["--trace", "{folder}/t.json"], "t.json: is a folder"),
        (["--snapshot", "{folder}/a.pickle", "--roofline", "{folder}/r.svg"], "r.svg: is a folder"),
    ],
)
def test_files_are_refused_before_the_work(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr("steptime.captured.profiling.profile", lambda *_, **__: pytest.fail("it captures"))
    for name in ("t.json", "r.svg"):
        (tmp_path / name).mkdir()
    given = [option.format(folder=tmp_path) for option in options]
    result = run("profile", f"{file}:build", "--device", "h100-sxm", *given)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_help_says_that_importing_runs_code(run: Run) -> None:
    assert "runs its code" in " ".join(run("profile", "--help").stdout.split())


WORDY = """
import torch
from torch import nn

class Wordy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, 16)
        self.line.bias.requires_grad_(False)
    def forward(self, x, scale=None):
        print("noise of a forward")
        return self.line(x)

class Own(Wordy):
    def forward(self, x):
        return {"loss": self.line(x).mean(), "logits": x}

def plain():
    return Wordy(), {"x": torch.empty(4, 16), "scale": torch.empty(2, dtype=torch.int64)}

def own():
    return Own(), torch.empty(4, 16)

def given():
    return Wordy(), torch.empty(4, 16), lambda output: output.mean()

def empty(width=16):
    return nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.Softmax(-1)), torch.empty(0, width)

def no_width():
    return empty(0)[0], torch.empty(4, 0)

def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.empty(0, 3, 16, 16)

def attends():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.empty(0, 8, 32)

def huge():
    return nn.Linear(2**30, 2**30, bias=False), torch.empty(2, 2**30)
"""


@pytest.fixture
def wordy(tmp_path: Path) -> Path:
    path = tmp_path / "wordy.py"
    path.write_text(WORDY)
    return path


def test_the_report_says_what_was_profiled(run: Run, wordy: Path) -> None:
    result = run("profile", f"{wordy}:plain", "--device", "h100-sxm", "--autocast", "bf16", "--optimizer", "sgd")
    text = " ".join(result.stdout.split())
    assert "272 parameters in fp32 (256 trained); inputs x=4x16:fp32, scale=2:int64; batch 4 (" in text, text
    words = "training; optimizer: sgd; loss: sum of the output (give --loss); autocast: bf16; cuda kernels"
    assert words in text


@pytest.mark.parametrize(
    ("options", "loss", "optimizer"),
    [
        (["plain"], "sum of the output (give --loss)", "adamw"),
        (["own"], "the module's own", "adamw"),
        (["given"], "the factory's", "adamw"),
        (["given", "--loss", "mse"], "mse", "adamw"),
        (["plain", "--inference"], "none", "none"),
    ],
)
def test_json_says_what_was_profiled_and_prints_of_a_forward_stay_out(
    run: Run, wordy: Path, options: list[str], loss: str, optimizer: str
) -> None:
    result = run("profile", f"{wordy}:{options[0]}", "--device", "h100-sxm", *options[1:], "--json")
    found = json.loads(result.stdout)
    assert (found["loss"], found["optimizer"], found["autocast"]) == (loss, optimizer, "none")
    assert found["inputs"][0].endswith("4x16:fp32")
    assert (found["trained_parameters"], found["parameters"]) == (256, 272)
    assert found["samples_per_s"] == pytest.approx(4 / found["step_time_s"])
    assert found["kernels"] == "cuda"
    assert ("noise of a forward" in result.stderr) == (options[0] != "own")


def test_a_program_that_was_captured_before_says_its_inputs() -> None:
    import torch
    from torch import nn

    import steptime

    class Swapped(nn.Bilinear):
        def forward(self, first: Any, second: Any) -> Any:
            return super().forward(second, first)

    program = steptime.capture(Swapped(4, 5, 6), [torch.empty(8, 5), torch.empty(8, 4)])
    settings = steptime.profile(program, "h100-sxm").settings
    assert settings.inputs == ("8x5:fp32", "8x4:fp32")
    assert (settings.training, settings.loss, settings.optimizer) == (True, None, None)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kind, ["rows", 8])
    y = helper.make_tensor_value_info("y", kind, ["rows", 4])
    w = helper.make_tensor("w", kind, [8, 4], [0.0] * 32)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    path = tmp_path / "line.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), str(path))
    return path


@pytest.mark.each(
    "option",
    ["--dtype=bf16", "--autocast=bf16", "--optimizer=adamw", "--loss=mse", "--batch=2", "--seq=2", "--input=2x8",
     "--no-fold"],
)  # fmt: skip
def test_options_that_an_onnx_file_would_ignore_are_refused(run: Run, onnx_file: Path, option: str) -> None:
    result = run("profile", str(onnx_file), "--device", "h100-sxm", "--dim", "rows=2", option)
    assert result.exit_code == 2, result.output
    assert f"an ONNX file cannot be captured with {option.partition('=')[0]}" in result.stderr


def test_training_of_an_onnx_file_says_what_it_is(run: Run, onnx_file: Path) -> None:
    result = run("profile", str(onnx_file), "--device", "h100-sxm", "--dim", "rows=2")
    text = " ".join(result.stdout.split())
    assert "forward and derived backward, no optimiser" in text, result.output
    assert "inputs x=2x8:fp32; batch 2" in text


def test_open_sizes_are_asked_for_as_the_command_takes_them(run: Run, onnx_file: Path) -> None:
    result = run("profile", str(onnx_file), "--device", "h100-sxm")
    assert "--dim rows=SIZE" in " ".join(result.stderr.split())


def test_dims_of_a_factory_are_refused(run: Run, file: Path) -> None:
    result = run("profile", f"{file}:build", "--device", "h100-sxm", "--dim", "rows=2")
    assert result.exit_code == 2
    assert "--dim sets open sizes of ONNX files" in result.stderr


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("factory", ["empty", "no_width", "images", "attends"])
def test_operators_without_elements_are_no_defect(run: Run, wordy: Path, factory: str) -> None:
    result = run("profile", f"{wordy}:{factory}", "--device", "h100-sxm", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model_flops"] == 0
    launched = {group["name"] for group in found["by_operator"]}
    assert launched.isdisjoint({"addmm", "convolution", "relu"} if factory != "no_width" else set()), launched


def test_sums_beyond_64_bits_are_named(run: Run, wordy: Path) -> None:
    for device in ("h100-sxm", "mi250x"):
        written = wordy.parent / "huge.pickle"
        result = run("profile", f"{wordy}:huge", "--device", device, "--snapshot", str(written))
        assert result.exit_code == 2, result.output
        assert "more than 2^63 bytes" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "{file}:build", "--device", "h100-sxm"],
        ["plan", "{file}:build", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "64"],
        ["fit", "{file}:build", "--device", "h100-sxm"],
    ],
)
def test_without_pytorch_it_is_said_how_to_install_it(
    run: Run, file: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(*(word.format(file=file) for word in command))
    assert result.exit_code == 2, result.output
    assert "steptime[torch]" in result.stderr
