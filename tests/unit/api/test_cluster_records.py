"""Clusters given as records, and clusters with other numbers: the same as their names and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import api, load_cluster
from steptime.errors import FieldError, UserError
from steptime.hardware.library import changed_cluster

JOB = {"gpus": 16, "global_batch": 64}


def test_a_record_is_as_good_as_its_name() -> None:
    by_name, by_record = (api.plan("gpt2", c, **JOB, top=2) for c in ("dgx-h100", load_cluster("dgx-h100")))
    assert [p.to_json() for p in by_name.plans] == [p.to_json() for p in by_record.plans]
    e = api.estimate("gpt2", load_cluster("dgx-h100"), **JOB, plan={"tp": 2})
    assert e.to_json() == api.estimate("gpt2", "dgx-h100", **JOB, plan={"tp": 2}).to_json()
    with pytest.raises(UserError, match="cluster"):
        api.plan("gpt2", 3, **JOB)  # type: ignore[arg-type]


def test_changes_are_those_of_a_file_with_a_base(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        'base = "dgx-h100"\n[device]\nmemory = "100 GB"\nmemory_bandwidth = "4 TB/s"\n'
        '[levels.network]\nbandwidth = "100 GB/s"\n'
    )
    changes = {
        "device": {"memory": "100 GB", "memory_bandwidth": "4 TB/s"},
        "levels": {"network": {"bandwidth": "100 GB/s"}},
    }
    by_file = api.estimate("gpt2", file, **JOB)
    by_record = api.estimate("gpt2", changed_cluster("dgx-h100", changes, "here"), **JOB)
    assert by_record.step_time_s == by_file.step_time_s != api.estimate("gpt2", "dgx-h100", **JOB).step_time_s
    assert by_record.memory_capacity_bytes == 100e9 and by_record.notes == by_file.notes


@pytest.mark.each(
    "changes, field",
    [
        ({"device": {"memory": 80}}, "device.memory"),
        ({"levels": {"network": {"bandwith": "1 GB/s"}}}, "levels.network.bandwith"),
        ({"levels": {"nvlink": {"devices": 0}}}, "levels.nvlink.devices"),
        ({"levels": {"rail": {"bandwidth": "1 GB/s"}}}, "rail"),
    ],
)
def test_wrong_changes_are_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        changed_cluster("dgx-h100", changes, "a study")
    assert "a study" in str(caught.value) and field in str(caught.value)
