"""Operators of captured modules that run as several kernels: the host issues one, zero-bubble schedules part them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import steptime  # noqa: E402
from steptime.api.calls import estimate  # noqa: E402
from steptime.api.models import summary_of  # noqa: E402
from steptime.captured.workload import captured_model  # noqa: E402
from steptime.estimate.evaluate import Evaluation, evaluate  # noqa: E402
from steptime.estimate.layer import BACKWARD, FORWARD  # noqa: E402
from steptime.estimate.single import Setting  # noqa: E402
from steptime.estimate.work import weights_s  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.model.captured import CapturedModel  # noqa: E402
from steptime.plan.captured import CAPTURED  # noqa: E402
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job  # noqa: E402
from steptime.plan.plans import Plans  # noqa: E402

OPERATORS = {FORWARD: ("convolution", "relu"), BACKWARD: ("convolution_backward", "threshold_backward")}


@cache
def convolutions() -> CapturedModel:
    """Four equal blocks of a convolution without bias."""
    make = torch.nn.Conv2d
    blocks = [torch.nn.Sequential(make(64, 64, 3, padding=1, bias=False), torch.nn.ReLU()) for _ in range(4)]
    module = torch.nn.Sequential(make(3, 64, 1), torch.nn.Sequential(*blocks))
    return captured_model(module, lambda batch: (torch.empty(batch, 3, 32, 32),), dtype="bf16")


def evaluated(schedule: str) -> Evaluation:
    model = convolutions()
    job = Job(model=summary_of(model), gpus=2, global_batch=16, seq_len=1, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], captured=model, schedule=schedule)  # fmt: skip
    machine = Setting(method=CAPTURED, job=job, cluster=load_cluster("dgx-h100")).machine
    return evaluate(CAPTURED, CAPTURED.strategies["1d"], job, machine, Plans(pp=2, micro_batch=2))


@pytest.mark.parametrize("phase", OPERATORS)
def test_the_host_issues_an_operator_once_however_many_kernels_it_has(phase: str) -> None:
    assert evaluated("1f1b").works["layer"][phase].operators == pytest.approx(len(OPERATORS[phase]))


def test_only_the_gradient_of_weights_is_put_off() -> None:
    times = [t for t in evaluated("zb-h1").times["layer"] if "convolution_backward" in t.row.name]
    put_off = {t.row.timing.operator: weights_s(t) / t.own_s for t in times if t.row.timing is not None}
    assert put_off == {"conv_bwd_data": 0.0, "conv_bwd_weight": 1.0}


NETS = """
import torch

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.LSTM(64, 64, 2)

    def forward(self, x):
        return self.cells(x.transpose(0, 1))[0]

def lstm(batch=4):
    return Recurrent(), (torch.empty(batch, 40, 64),)

def dense(batch=32):
    return torch.nn.Conv2d(256, 256, 3), (torch.empty(batch, 256, 40, 40),)

def depthwise(batch=32):
    return torch.nn.Conv2d(256, 256, 3, groups=256), (torch.empty(batch, 256, 40, 40),)
"""


@pytest.mark.parametrize(
    ("net", "batch", "device"),
    [("lstm", 4, "mi300x"), ("dense", 32, "h100-sxm"), ("dense", 32, "rtx-4090"), ("depthwise", 32, "a100-sxm-80gb")],
)  # fmt: skip
def test_a_plan_takes_as_long_as_the_profile(tmp_path: Path, net: str, batch: int, device: str) -> None:
    """On one device, but for the update: launches of a recurrent layer, TF32, single channels."""
    (tmp_path / "nets.py").write_text(NETS)
    given = f"{tmp_path}/nets.py:{net}"
    profiled = steptime.profile(given, device, batch=batch, dtype="fp32", optimizer="none").table
    plan = {"micro_batch": batch, "zero": 0}
    found = estimate(given, device, gpus=1, global_batch=batch, plan=plan, dtype="fp32", optimizer="sgd",
                              framework="ideal")  # fmt: skip
    assert found.step_time_s - found.time.group("optimizer") == pytest.approx(profiled.totals.device_s, rel=0.05)


HOST = """
[device]
name = "mine"
architecture = "cpu"
memory = "16 GB"
memory_bandwidth = "10 GB/s"
kernel_latency = "5 us"
issue = "20 us"
matrix = {fp32 = "100 GFLOP/s"}
vector = {fp32 = "10 GFLOP/s"}
[levels.local]
bandwidth = "10 GB/s"
"""


def test_a_recurrent_layer_is_one_call_on_the_host_itself(tmp_path: Path) -> None:
    """Each step of each layer was launched: nets of few units took three to twelve times as long as measured."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "m.toml").write_text(HOST)
    given, device = f"{tmp_path}/nets.py:lstm", f"{tmp_path}/m.toml"
    profiled = steptime.profile(given, device, batch=4, dtype="fp32", optimizer="none").table
    layers = [cost for cost in profiled.kinds if "rnn" in cost.op]
    assert [cost.work.launches for cost in layers] == [float(len(cost.work.kernels)) for cost in layers] != []
    found = estimate(given, device, gpus=1, global_batch=4, plan={"micro_batch": 4, "zero": 0}, dtype="fp32",
                     optimizer="sgd", framework="ideal")  # fmt: skip
    assert found.step_time_s - found.time.group("optimizer") == pytest.approx(profiled.totals.device_s, rel=0.05)
    assert profiled.totals.launches < 40
