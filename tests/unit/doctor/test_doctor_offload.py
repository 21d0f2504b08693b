"""What logs say of an optimiser in the memory of the host."""

# ruff: noqa: E501 the lines of logs are long

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_logs import arguments, iteration
from steptime.doctor import read_log
from steptime.doctor.records import Log
from steptime.doctor.stated import merged


def log_of(tmp_path: Path, text: str) -> Log:
    path = tmp_path / "x.log"
    path.write_text(text)
    return read_log(str(path))


PRINTED = "[2026-03-01 12:00:00,001] [INFO] [config.py:1003:print]   "
ZERO = (
    PRINTED
    + "zero_config .................. stage=3 overlap_comm=True offload_param={param} offload_optimizer={optimizer} sub_group_size=1000000000\n"
)
DUMPED = (
    PRINTED.replace("1003", "989")
    + """json = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "pin_memory": true,
            "device": "%s"
        },
        "overlap_comm": true
    },
    "comms_logger": {
        "device": "cpu"
    }
}
"""
)


@pytest.mark.each(
    ("text", "where"),
    [
        (ZERO.format(param=None, optimizer="DeepSpeedZeroOffloadOptimizerConfig(device='cpu', nvme_path=None)"), "optimizer"),
        (ZERO.format(param=None, optimizer="DeepSpeedZeroOffloadOptimizerConfig(device=<OffloadDeviceEnum.nvme: 'nvme'>, nvme_path='/x')"), "optimizer"),
        (ZERO.format(param=None, optimizer="{'device': 'cpu', 'pin_memory': True}"), "optimizer"),
        (ZERO.format(param=None, optimizer="DeepSpeedZeroOffloadOptimizerConfig(device='none')"), None),
        (ZERO.format(param="DeepSpeedZeroOffloadParamConfig(device='cpu')", optimizer=None), None),
        (DUMPED % "cpu", "optimizer"),
        (DUMPED % "none", None),
        ("[2026-03-01 12:00:01,000] [INFO] [stage_1_and_2.py:151:__init__] CPU Offload: True\n", "optimizer"),
        ("[2026-03-01 12:00:01,000] [INFO] [stage_1_and_2.py:151:__init__] CPU Offload: False\n", None),
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_the_optimiser_of_deepspeed_on_the_host(tmp_path, text, where):
    speed = "[2026-03-01 12:00:{0:02},446] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, RunningAvgSamplesPerSec=6.0, CurrSamplesPerSec=6.1, MemAllocated=20.1GB, MaxMemAllocated=71.9GB\n"
    log = log_of(tmp_path, text + "".join(speed.format(i) for i in range(1, 6)))
    assert log.stated.plan.get("offload") == where
    told = [line for line in log.warnings if line.startswith("offload_param")]
    assert len(told) == ("OffloadParam" in text)


def test_the_optimiser_of_megatron_on_the_host(tmp_path):
    steps = "".join(iteration(i, 900.0) for i in range(1, 6))

    def stated(**flags: object) -> Log:
        return log_of(tmp_path, arguments(**flags) + steps)

    whole = stated(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert whole.stated.plan["offload"] == "optimizer" and whole.warnings == ()
    most = stated(optimizer_cpu_offload=True, optimizer_offload_fraction=0.75, cpu_offloading=True)
    assert most.stated.plan["offload"] == "optimizer"
    assert [line.split(":")[0] for line in most.warnings] == ["optimizer_offload_fraction 0.75", "cpu_offloading"]
    little = stated(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25)
    assert "offload" not in little.stated.plan and "nothing of the optimiser" in little.warnings[0]
    assert "offload" not in stated(optimizer_cpu_offload=False, optimizer_offload_fraction=1.0).stated.plan


@pytest.mark.parametrize(("given", "contradicted"), [("optimizer,activations", False), ("activations", True)])
def test_what_is_offloaded_beside_the_optimiser_is_no_contradiction(tmp_path, given, contradicted):
    log = log_of(tmp_path, DUMPED % "cpu" + "".join(iteration(i, 900.0) for i in range(1, 6)))
    assert bool(merged({}, {"offload": given}, log.stated).contradictions) == contradicted
