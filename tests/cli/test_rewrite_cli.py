"""``steptime rewrite`` as a user runs it: reports, files, JSON, and what is refused."""

import json

import pytest

pytest.importorskip("torch")

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return (self.q(x) + self.k(x)).sigmoid() * 2

def net(batch: int = 4):
    return Net(), torch.zeros(batch, 32)

class Asks(nn.Module):
    def forward(self, x):
        return x.exp() if x.sum() > 0 else x

def asks():
    return Asks(), torch.zeros(4, 4)

def sized(seq: int = 8):
    return nn.Linear(16, 16), torch.zeros(seq, 16)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    return lambda name: f"{tmp_path / 'net.py'}:{name}"


def test_a_report_says_what_was_done_and_by_how_much(run, model, tmp_path):
    files = ["-o", str(tmp_path / "out.py"), "--svg", str(tmp_path / "out.svg")]
    result = run("rewrite", model("net"), "--device", "h100-sxm", *files)
    assert result.exit_code == 0, result.stderr
    for text in ("as captured", "chains fused", "one CUDA graph", "common factor", "checked on 2 random inputs"):
        assert text in result.stdout
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert "class Rewritten" in (tmp_path / "out.py").read_text()
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if not line.startswith("written"))


def test_json_has_what_the_api_returns(run, model):
    document = json.loads(run("rewrite", model("net"), "--device", "h100-sxm", "--json").stdout)
    assert document["mode"] == "inference" and document["opaque"] == []
    stages = document["stages"]
    assert stages["cuda graph"]["step_time_s"] < stages["fused"]["step_time_s"] < stages["captured"]["step_time_s"]
    assert any(row["applied"] and row["name"] == "common factor" for row in document["rewrites"])


@pytest.mark.slow
def test_an_onnx_file_that_was_written_is_read_again(run, model, tmp_path):
    path = str(tmp_path / "net.onnx")
    assert run("rewrite", model("net"), "--device", "h100-sxm", "-o", path).exit_code == 0
    again = run("rewrite", path, "--device", "h100-sxm", "--json")
    assert again.exit_code == 0, again.stderr
    refused = run("rewrite", path, "--device", "h100-sxm", "--batch", "3")
    assert refused.exit_code == 2 and "--batch" in refused.stderr


def test_passes_are_listed_with_condition_and_source(run):
    listed = run("rewrite", "--passes").stdout
    assert "conv + batch norm" in listed and "source: PyTorch" in listed
    rows = json.loads(run("rewrite", "--passes", "--json").stdout)["passes"]
    assert {"name", "matches", "condition", "makes", "source"} <= set(rows[0])


def test_branches_on_data_are_refused_or_weighed(run, model):
    refused = run("rewrite", model("asks"), "--device", "h100-sxm")
    assert refused.exit_code == 2 and "reads the value of a tensor" in refused.stderr
    weighed = run("rewrite", model("asks"), "--device", "h100-sxm", "--branch", "0.25")
    assert weighed.exit_code == 0 and "25.0 %" in weighed.stdout and "75.0 %" in weighed.stdout


def test_buckets_of_lengths(run, model):
    options = ["--device", "h100-sxm", "--lengths", "5=0.5,100=0.5", "--json"]
    found = json.loads(run("rewrite", model("sized"), *options).stdout)["buckets"]
    assert found["powers of two"]["tops"] == [16, 128]
    assert found["best 2"]["tops"] == [5, 100] and found["best 2"]["padding"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "out.bin"], "must end in .py or .onnx"),
        (["-o", "nowhere/out.py"], "no folder"),
        (["--svg", "out.png"], "must end in .svg"),
        (["--objective", "speed"], "objective 'speed' is unknown"),
        (["--only", "magic"], "no pass 'magic'"),
        (["--dim", "batch=3"], "--dim sets open sizes of ONNX files"),
        (["--lengths", "a=b"], "is no length and share"),
        (["--compile", "-o", "out.py"], "write no graph"),
    ],
)
def test_options_that_cannot_be_are_refused(run, model, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("rewrite", model("net"), "--device", "h100-sxm", *options)
    assert result.exit_code == 2 and message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["net.py"]


def test_a_model_and_a_device_are_needed(run):
    assert "needs a model and --device" in run("rewrite").stderr
    assert "no model that can be captured" in run("rewrite", "gpt3-175b", "--device", "h100-sxm").stderr


COPIES = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.a(x).view(8, 4, 8).transpose(0, 1).contiguous().transpose(0, 1).reshape(8, 32))

def heads():
    return Heads(), torch.zeros(8, 32)
"""


def test_layouts_are_reported_and_written(run, tmp_path):
    (tmp_path / "heads.py").write_text(COPIES)
    given = [
        "rewrite",
        f"{tmp_path / 'heads.py'}:heads",
        "--device",
        "v100-sxm2-16gb",
        "--only",
        "identity",
        "--layouts",
    ]
    result = run(*given, "-o", str(tmp_path / "out.py"))
    assert result.exit_code == 0, result.stderr
    assert "copies left out: 2 in (model)" in result.stdout and "checked on 2 random inputs" in result.stdout
    assert "clone" not in (tmp_path / "out.py").read_text()
    found = json.loads(run(*given, "--json").stdout)["layouts"]
    assert found["cost"] < found["recorded_cost"] and found["copies"] == [] and found["copies_left_out"] == {"": 2}


@pytest.mark.quick(without=["recommended"])
@pytest.mark.parametrize("name", ["recommended", "exhaustive"])
def test_a_search_says_how_far_from_the_best_it_stopped(run, model, name, tmp_path):
    files = ["-o", str(tmp_path / "out.onnx")]
    result = run("rewrite", model("net"), "--device", "h100-sxm", "--search", name, *files)
    assert result.exit_code == 0, result.stderr
    assert f"search {name}:" in result.stdout and "graphs priced" in result.stdout
    assert "proved the least that the moves reach" in result.stdout.replace("\n", " ")
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if not line.startswith("written"))


def test_a_search_as_json_has_its_bound_weights_and_limits(run, model):
    options = ["--search", "taso", "--weights", "launches=2,device_s=1", "--limit", "peak_bytes=2e9", "--alpha", "1.1"]
    found = json.loads(run("rewrite", model("net"), "--device", "h100-sxm", *options, "--json").stdout)["search"]
    assert found["weights"] == {"launches": 2.0, "device_s": 1.0}
    assert found["limits"] == {"peak_bytes": 2e9} and not found["breaks_a_limit"]
    assert found["bound"] in (None, found["cost"]) and found["cost"] <= found["start"]
    assert (found["search"], found["alpha"], found["budget"]) == ("taso", 1.1, 1000)
    assert found["cost"] == pytest.approx(4, abs=0.1)  # a product and a fused chain, two each


def test_a_training_step_is_searched(run, model):
    options = ["--training", "--optimizer", "sgd", "--loss", "sum", "--search", "greedy", "--budget", "20"]
    result = run("rewrite", model("net"), "--device", "h100-sxm", *options)
    if "loss" in result.stderr:
        result = run("rewrite", model("net"), "--device", "h100-sxm", "--training", "--search", "greedy")
    assert result.exit_code == 0, result.stderr
    assert "search greedy" in result.stdout


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--search", "metaflwo"], "metaflow"),
        (["--weights", "launches=1"], "--search"),
        (["--search", "taso", "--weights", "launches"], "NAME=NUMBER"),
        (["--search", "taso", "--limit", "bytes=3"], "peak_bytes"),
        (["--search", "taso", "--alpha", "0.5"], "alpha"),
    ],
)
def test_options_of_searches_that_do_not_apply_are_refused(run, model, options, word):
    result = run("rewrite", model("net"), "--device", "h100-sxm", *options)
    assert result.exit_code == 2 and word in result.stderr
