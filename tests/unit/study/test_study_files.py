"""Study files: what is crossed and zipped, ranges, hardware; what is wrong is named with its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steptime import study
from steptime.errors import UserError
from steptime.hardware import load_cluster
from steptime.study.hardware import PARAMETERS, cluster_with
from steptime.study.ranges import values_of

JOB = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 8, "global_batch": 64}
HUGE = {"from": 1, "to": 2000, "step": 1}


def with_job(**job: Any) -> dict[str, Any]:
    return {"job": {**JOB, **job}}


def test_crossed_and_zipped() -> None:
    found = study.study_of(
        {
            "job": {**JOB, "gpus": [8, 16, 32], "model": ["gpt2", "gpt2-medium"], "fix": {"tp": [1, 2]}},
            "training": [{"tokens": "1B"}, {"tokens": "2B"}],
            "zip": [["model", "training"]],
        }
    )
    assert len(found.cases) == 3 * 2 * 2
    assert {(case.point.options["model"], case.training["tokens"]) for case in found.cases} == {
        ("gpt2", 1e9),
        ("gpt2-medium", 2e9),
    }
    assert [case.point.options["gpus"] for case in found.cases[:3]] == [8, 16, 32]  # neighbours differ in devices
    assert found.cases[0].point.options["fix"] == {"tp": 1}


def test_grids_have_tables_of_their_own() -> None:
    found = study.study_of(
        {"job": JOB, "grid": [{"name": "a", "job": {"gpus": [1, 2]}}, {"hardware": {"memory": "141 GB"}}]}
    )
    assert [case.grid for case in found.cases] == ["a", "a", "grid 2"]
    assert found.cases[2].point.options["gpus"] == 8 and found.cases[2].point.hardware


@pytest.mark.each(
    "given, values",
    [
        (3, [3]),
        ([3, 1], [3, 1]),
        ({"from": 2, "to": 9, "step": 3}, [2, 5, 8]),
        ({"from": 4, "to": 40, "times": 2}, [4, 8, 16, 32]),
        ({"from": 0.5, "to": 2.0, "count": 4}, [0.5, 1.0, 1.5, 2.0]),
        ({"from": 1, "to": 10_000, "count": 3, "spacing": "log"}, [1, 100, 10_000]),
        ({"from": 7, "to": 7, "count": 1}, [7]),
        ([{"from": 0.0, "to": 1.0, "count": 3}, {"from": 1.0, "to": 3.0, "count": 2}, 9.0], [0.0, 0.5, 1.0, 3.0, 9.0]),
    ],
)
def test_values(given: Any, values: list[float]) -> None:
    assert values_of(given, "a.toml", "x") == pytest.approx(values)


@pytest.mark.each("name", list(PARAMETERS))
def test_each_number_of_a_cluster_is_changed_by_a_factor_and_to_a_value(name: str) -> None:
    base = load_cluster("published-b200-nvs8")
    parameter, now = PARAMETERS[name], PARAMETERS[name].now(base)
    assert now
    doubled = cluster_with("published-b200-nvs8", {name: {"factor": 2.0}})
    assert parameter.now(doubled) == pytest.approx(2 * now)
    same = cluster_with("published-b200-nvs8", {name: {"value": float(now)}})
    assert parameter.now(same) == now
    others = [one for one in PARAMETERS if one != name]
    assert [PARAMETERS[one].now(doubled) for one in others] == [PARAMETERS[one].now(base) for one in others]


def test_hardware_reaches_the_step() -> None:
    sweep = {"matrix_flops": {"factor": [0.5, 1.0, 2.0]}}
    found = study.study_of({**with_job(mode="published", strategy="1d"), "hardware": sweep})
    from steptime.study.evaluate import solve

    times = [row["step_time_s"] for row in solve(found.points) if row["kind"] == "plan"]
    assert times[0] > times[1] > times[2]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('base = "dgx-h100"\n[levels.nvlink]\ndevices = 4\n')
    (tmp_path / "a.toml").write_text('[job]\nmodel = "gpt2"\ncluster = "ours.toml"\ngpus = 8\nglobal_batch = 8\n')
    assert study.read_study(tmp_path / "a.toml").points[0].labels()["nvlink_devices"] == 4


@pytest.mark.each(
    "table, words",
    [
        ({}, ("job.model", "missing")),
        ({"jobs": {}}, ("jobs", "unknown key")),
        (with_job(gpu=8), ("job.gpu", "unknown key", "gpus")),
        (with_job(gpus=[]), ("job.gpus", "empty")),
        (with_job(gpus={"from": 16, "to": 8, "step": 2}), ("job.gpus", "empty", "16", "8")),
        (with_job(gpus={"from": 8, "to": 16}), ("job.gpus", "step, times or count")),
        (with_job(gpus={"from": 8, "to": 16, "step": 2, "count": 3}), ("job.gpus", "contradict")),
        (with_job(gpus={"from": 8, "to": 16, "step": 0}), ("job.gpus", "step")),
        (with_job(gpus={"from": 8, "to": 16, "times": 1}), ("job.gpus", "times")),
        (with_job(gpus={"from": 8, "to": 16, "steps": 1}), ("job.gpus", "steps", "unknown key")),
        (with_job(gpus={"from": 8, "to": 9, "step": 0.5}), ("job.gpus.step", "whole")),
        (with_job(gpus={"from": 1, "to": 10**7, "step": 1}), ("job.gpus", "1,000,000")),
        (with_job(gpus={"from": "a", "to": 3, "step": 1}), ("job.gpus.from", "whole number")),
        (with_job(gpus=[8, 0]), ("job.gpus[1]", "whole number")),
        (with_job(gpus=[8, 8]), ("job.gpus[1]", "twice")),
        (with_job(gpus=8.5), ("job.gpus", "whole number")),
        (with_job(model=["gpt2", "gpt22"]), ("job.model[1]", "gpt2")),
        (with_job(model="torchvision.models:resnet18"), ("job.model", "module")),
        (with_job(cluster="dgx-h10"), ("job.cluster", "dgx-h100")),
        (with_job(cluster="nowhere/x.toml"), ("job.cluster", "nowhere")),
        (with_job(strategy="3d"), ("job.strategy", "3d")),
        (with_job(mode="fast"), ("job.mode", "fast")),
        (with_job(dtype="bf17"), ("job.dtype", "bf16")),
        (with_job(optimizer="adamm"), ("job.optimizer", "adam")),
        (with_job(framework="megatronn"), ("job.framework", "megatron")),
        (with_job(limit=["pq<=3"]), ("job.limit", "pq")),
        (with_job(fix={"tpp": 1}), ("job.fix", "tpp")),
        (with_job(fix={"tp": 0}), ("job.fix.tp", "whole number")),
        (with_job(fix={"tp": [1, 0]}), ("job.fix.tp[1]", "whole number")),
        (with_job(plan={"tp": 1}), ("job.plan", "job.fix")),
        ({**with_job(), "what": "guess"}, ("what", "guess")),
        ({**with_job(), "keep": {"top": 0}}, ("keep.top", "0")),
        ({**with_job(), "hardware": {"memory": 80}}, ("hardware.memory", "unit")),
        ({**with_job(), "hardware": {"memory": "80 GB/s"}}, ("hardware.memory", "GB/s")),
        ({**with_job(), "hardware": {"memory": {"factor": 0}}}, ("hardware.memory.factor", "above zero")),
        ({**with_job(), "hardware": {"memory": {"factor": 1e9 - 1}}}, ("memory", "between")),
        ({**with_job(), "hardware": {"memory": {"factor": 2, "from": 1}}}, ("hardware.memory", "")),
        ({**with_job(), "hardware": {"ram": "1 GB"}}, ("hardware.ram", "unknown key")),
        ({**with_job(), "training": {"token": 1}}, ("training", "token")),
        ({**with_job(), "training": {"epochs": 1}}, ("training", "data set")),
        ({**with_job(gpus=[1, 2], seq=[8, 16, 32]), "zip": [["gpus", "seq"]]}, ("zip[0]", "gpus has 2", "seq has 3")),
        ({**with_job(), "zip": [["gpus", "tp"]]}, ("zip[0]", "tp")),
        ({**with_job(), "zip": [["gpus", "model"], ["model", "cluster"]]}, ("zip[1]", "twice")),
        ({**with_job(), "grid": [{"job": {"gpus": []}}]}, ("grid[0].job.gpus", "empty")),
        (with_job(gpus=HUGE, global_batch=HUGE), ("4,000,000",)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(table: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        study.study_of(table, where="a.toml")
    text = str(caught.value)
    assert text.startswith("a.toml") and all(word in text for word in words), text
