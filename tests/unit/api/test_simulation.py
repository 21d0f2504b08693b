"""A step of a pipeline played with the times of an estimate, and the commands that print it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from typer.testing import CliRunner

from steptime import UserError, api
from steptime.api.simulation import SimulatedStep, simulate
from steptime.cli.main import app
from steptime.schedule import SCHEDULES

JOB: dict[str, Any] = {"gpus": 64, "global_batch": 64}
PLAN = {"tp": 8, "pp": 4, "micro_batch": 1}
OPTIONS = [
    "gpt3-175b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--tp", "8", "--pp", "4",
    "--micro-batch", "1",
]  # fmt: skip


def played(schedule: str, **plan: Any) -> SimulatedStep:
    return simulate("gpt3-175b", "dgx-h100", schedule=schedule, plan={**PLAN, **plan}, **JOB)


@pytest.mark.parametrize(
    ("schedule", "plan"), [("gpipe", {}), ("1f1b", {}), ("zb-h1", {}), ("zb-h2", {}), ("interleaved", {"vpp": 2})]
)
def test_the_step_is_that_of_the_closed_form(schedule: str, plan: dict[str, int]) -> None:
    found = played(schedule, **plan)
    expected = api.estimate("gpt3-175b", "dgx-h100", plan={**PLAN, **plan, "schedule": schedule}, **JOB).step_time_s
    assert found.closed_form_s == expected
    assert found.step_s == pytest.approx(expected, rel=0.01)


def test_memory_is_that_of_the_estimate() -> None:
    for schedule in ("gpipe", "1f1b"):
        expected = api.estimate("gpt3-175b", "dgx-h100", plan={**PLAN, "schedule": schedule}, **JOB).peak_memory_bytes
        assert played(schedule).memory.peak_bytes.max() == pytest.approx(expected, rel=0.02)


def test_every_schedule_plays_or_says_what_it_requires() -> None:
    slowest = played("naive").step_s
    for name, schedule in SCHEDULES.items():
        found = played(name, **({"vpp": 2} if schedule.usual_chunks == 2 else {}))
        assert found.pipeline_s < slowest or name == "naive", name
        assert 0 <= found.bubble_fraction < 1 and found.stage_layers.sum() == 96, name
        assert np.isfinite(found.memory.peak_bytes).all(), name


def test_steps_that_run_into_each_other_have_no_bubble_but_that_of_the_slowest_stage() -> None:
    found = played("pipedream-2bw")
    assert found.pipeline_s == pytest.approx(float(found.spent.passes_s.max()), rel=0.01)
    assert played("pipedream").memory.peak_bytes[0] > found.memory.peak_bytes[0] > played("1f1b").memory.peak_bytes[0]


def test_samples_with_jitter_are_slower_on_average_and_repeat() -> None:
    calm = played("1f1b").pipeline_s
    first, again = (
        simulate("gpt3-175b", "dgx-h100", jitter=0.1, samples=20, seed=3, plan=PLAN, **JOB).samples_s for _ in range(2)
    )
    assert len(first) == 20 and (first == again).all() and first.mean() > calm


def test_a_schedule_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    csv, trace = tmp_path / "order.csv", tmp_path / "step.pftrace"
    runner = CliRunner()
    first = runner.invoke(
        app, ["simulate", *OPTIONS, "--schedule", "zb-v", "--csv", str(csv), "--trace", str(trace), "--json"]
    )
    assert first.exit_code == 0, first.output
    second = runner.invoke(app, ["simulate", *OPTIONS, "--schedule", str(csv), "--json"])
    assert second.exit_code == 0, second.output
    one, other = json.loads(first.output), json.loads(second.output)
    assert (
        other["pipeline_s"] == pytest.approx(one["pipeline_s"])
        and other["peak_memory_bytes"] == one["peak_memory_bytes"]
    )
    assert sum(packet.HasField("track_event") for packet in Trace.FromString(trace.read_bytes()).packet) > 1000


def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    cases = {
        "no pipeline": {"schedule": "1f1b", "plan": {"tp": 8}},
        "there is no schedule": {"schedule": "zb-x", "plan": PLAN},
        "requires an even number": {"schedule": "dualpipe", "plan": {**PLAN, "pp": 1, "tp": 1} | {"pp": 3}},
        "stages of 96 layers": {"schedule": "interleaved", "plan": {**PLAN, "vpp": 32}},
    }
    for text, case in cases.items():
        gpus = 24 if case["plan"].get("pp") == 3 else 64
        with pytest.raises(UserError, match=text):
            simulate("gpt3-175b", "dgx-h100", gpus=gpus, global_batch=64, **case)
    other = tmp_path / "other.csv"
    other.write_text("0F0,0B0\n")
    with pytest.raises(UserError, match="1 ranks and 1 micro-batches; the plan has 4 and 32"):
        played(str(other))


def test_the_table_of_schedules_and_one_of_them(tmp_path: Path) -> None:
    runner = CliRunner()
    table = runner.invoke(app, ["schedules", "--json", "--ranks", "4", "--micro-batches", "8"])
    rows = {row["name"]: row for row in json.loads(table.output)["schedules"]}
    assert rows.keys() == SCHEDULES.keys()
    assert rows["1f1b"]["bubble_fraction"] == pytest.approx(3 / 11) and rows["gpipe"]["in_flight"] == 8
    assert rows["pipedream"]["weight_versions"] == 4 and not rows["pipedream"]["synchronous"]
    shown = runner.invoke(app, ["schedules", "1f1b", "--ranks", "2", "--micro-batches", "2"])
    assert "rank 0: 0F0 0F1 0B0 0B1" in shown.output
    assert runner.invoke(app, ["schedules", "--csv", str(tmp_path / "a.csv")]).exit_code == 2
