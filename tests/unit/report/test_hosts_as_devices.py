"""A processor of a host as the device: no driver keeps memory, no report calls it a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.captured.report.fit import print_fit
from steptime.errors import PlanError
from steptime.estimate.memory_definitions import memory_constants
from steptime.report.estimate import print_estimate
from steptime.report.plan import print_plan_result

TEXT = """
[device]
name = "{name}"
{what}
memory = "{memory}"
memory_bandwidth = "40 GB/s"
matrix = {{bf16 = "400 GFLOP/s", fp32 = "100 GFLOP/s"}}
vector = {{fp32 = "50 GFLOP/s"}}
[levels.local]
bandwidth = "10 GB/s"
latency = "20 us"
"""
EXAMPLE = Path(__file__).resolve().parents[3] / "examples/gpt.py"
JOB: dict[str, Any] = {"gpus": 4, "global_batch": 4}


def cluster(folder: Path, what: str, memory: str = "16 GB") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "m.toml"
    path.write_text(TEXT.format(name="my own", what=what, memory=memory))
    return path


@pytest.mark.parametrize(("what", "driver"), [('architecture = "cpu"', False), ("", True)])
def test_only_a_device_with_a_driver_gives_memory_to_one(tmp_path: Path, what: str, driver: bool) -> None:
    given, constants = cluster(tmp_path, what), memory_constants()
    context = constants.context_bytes if driver else 0.0
    assert context < 2e9
    by = api.estimate("gpt2", given, **JOB).memory_by_definition
    assert by["device"] - by["reserved"] == pytest.approx(context)
    fitted = api.fit("gpt2", device=given, batch=1)
    assert fitted.context_bytes == context
    assert fitted.baseline.device_bytes - fitted.baseline.reserved_bytes == pytest.approx(context)


@pytest.mark.parametrize(("what", "least"), [('architecture = "cpu"', 1), ("", 0)])
def test_the_limit_of_a_search_counts_the_same_memory(tmp_path: Path, what: str, least: int) -> None:
    """Beside what gpt2 takes, 2 GB have no room for a driver's context."""
    found = api.plan("gpt2", cluster(tmp_path, what, "2 GB"), **JOB, limit=["oom_probability<=0.1"], fix={"zero": 1})
    assert len(found.plans[:1]) == least


@pytest.mark.parametrize(
    ("what", "noun"),
    [
        ('architecture = "cpu"', "device"),
        ("", "device"),
        ('vendor = "Nvidia"', "GPU"),
        ('vendor = "AMD"\narchitecture = "cpu"', "device"),
    ],
)
def test_reports_call_devices_of_own_files_what_these_say(
    tmp_path: Path, what: str, noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = cluster(tmp_path, what, "3 GB")
    print_estimate(api.estimate("gpt2", given, **JOB))
    result = api.plan("gpt2", given, top=1, **JOB)
    print_plan_result(result, {"model": "gpt2", "cluster": "m.toml", **JOB})
    text = capsys.readouterr().out
    assert text.count(f"4 {noun}s") == 2 and f"tokens/s/{noun}" in text
    assert noun == "GPU" or "GPU" not in text.partition("constant ")[0]
    assert ("allocator and driver" in text) == ("cpu" not in what)


def test_fit_speaks_of_no_driver_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_fit(api.fit("gpt2", device=cluster(tmp_path, 'architecture = "cpu"'), batch=1))
    assert "driver" not in capsys.readouterr().out


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("what", "kind"), [('architecture = "cpu"', "cpu"), ("", "cuda")])
@pytest.mark.parametrize("model", ["gpt2", f"{EXAMPLE}:tiny"])
def test_fit_words_mixed_precision_for_the_device(tmp_path: Path, model: str, what: str, kind: str) -> None:
    result = api.fit(model, device=cluster(tmp_path, what), batch=1)
    words = [p.choice.settings(result.device_type)["bf16"]["PyTorch"] for p in result.front if "bf16" in p.choice.keys]
    assert set(words) == {f'torch.autocast("{kind}", dtype=torch.bfloat16)'}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("what", "moves"), [('architecture = "cpu"', False), ("", True)])
@pytest.mark.parametrize("model", ["gpt2", f"{EXAMPLE}:tiny"])
def test_nothing_moves_to_the_host_from_the_host(tmp_path: Path, model: str, what: str, moves: bool) -> None:
    found = api.fit(model, device=cluster(tmp_path, what, "1 GB"), batch=1)
    assert found.candidates > 1
    assert any({"swap", "offload-optimizer", "paged-optimizer"} & {*p.choice.keys} for p in found.front) == moves


@pytest.mark.parametrize(("what", "moves"), [('architecture = "cpu"', False), ("", True)])
def test_what_to_try_moves_nothing_to_the_host_from_the_host(
    tmp_path: Path, what: str, moves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = cluster(tmp_path, what, "24 GB")
    print_estimate(api.estimate("gpt2-xl", given, gpus=1, global_batch=1, dtype="fp32"))
    text = capsys.readouterr().out
    assert "more than a device has; try" in text and ("--offload" in text) == moves


@pytest.mark.parametrize("offload", ["optimizer", "activations"])
def test_who_asks_to_move_from_the_host_to_the_host_is_told(tmp_path: Path, offload: str) -> None:
    """It would free no memory; on a device of its own the same frees some."""
    host, device = (cluster(tmp_path / kind, f'architecture = "{kind}"') for kind in ("cpu", "hopper"))
    with pytest.raises(PlanError, match=f"offload {offload}: my own is a CPU, whose memory is the host's"):
        api.estimate("gpt2", host, **JOB, plan={"offload": offload})
    with pytest.raises(PlanError, match="drop offload"):
        api.plan("gpt2", host, **JOB, fix={"offload": offload})
    without, moved = (api.estimate("gpt2", device, **JOB, plan=plan) for plan in ({}, {"offload": offload}))
    assert moved.peak_memory_bytes < without.peak_memory_bytes
    assert api.estimate("gpt2", host, **JOB, plan={"offload": "none"}).feasible
