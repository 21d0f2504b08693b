"""What schedules that update within a step, and schedules that cut sequences, cost in an estimate and when played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime import UserError, api
from steptime.estimate.result import Estimate
from steptime.schedule import Kind
from steptime.simulation.layout import parse_layout
from steptime.simulation.run import SimulatedStep, simulate
from steptime.simulation.search import search_schedule

JOB: dict[str, Any] = {"gpus": 512, "global_batch": 512}
PLAN = {"tp": 8, "pp": 8, "dp": 8, "micro_batch": 1}


def estimated(schedule: str, job: dict[str, Any] = JOB, **plan: Any) -> Estimate:
    return api.estimate("gpt3-175b", "dgx-h100", plan={**PLAN, **plan, "schedule": schedule}, **job)


def played(schedule: str, job: dict[str, Any] = JOB, **plan: Any) -> SimulatedStep:
    return simulate("gpt3-175b", "dgx-h100", schedule=schedule, plan={**PLAN, **plan}, **job)


def groups(found: Estimate) -> dict[str, float]:
    return dict(found.time.rollup(1))


@pytest.mark.parametrize(
    ("schedule", "updates"),
    [("pipedream", 64), ("pipemare", 64), ("ampnet", 64), ("pipedream-2bw", 8), ("pipedream:16", 4)],
)
def test_each_update_of_the_table_sums_gradients_and_runs_the_optimiser(schedule: str, updates: int) -> None:
    shown = {"overlap": "none"}
    once, found, step = groups(estimated("1f1b", **shown)), estimated(schedule, **shown), played(schedule, **shown)
    for group in ("dp_comm", "optimizer"):
        assert groups(found)[group] == pytest.approx(updates * once[group], rel=1e-9), group
    assert np.sum((step.table.kind == Kind.UPDATE) & (step.table.rank == 0)) == updates == step.updates
    assert step.step_s == pytest.approx(found.step_time_s, rel=0.01) and "optimizer" not in step.once_s
    assert step.to_json()["update_s"] * updates == pytest.approx(groups(found)["dp_comm"] + groups(found)["optimizer"])
    assert any(f"updates the weights {updates} times a step" in note for note in found.notes)


def test_traffic_of_an_update_overlaps_with_no_more_than_the_passes_before_it() -> None:
    alone, behind = estimated("pipedream", overlap="none"), estimated("pipedream")
    least_s = groups(alone)["dp_comm"] - groups(behind)["compute"] - groups(behind)["tp_comm"]
    assert least_s < groups(behind)["dp_comm"] < groups(alone)["dp_comm"]
    assert behind.step_time_s > 3 * estimated("1f1b").step_time_s


def test_a_step_with_a_broken_number_of_updates_is_the_mean_of_several() -> None:
    job = {"gpus": 256, "global_batch": 48}
    found, step = estimated("pipedream:8", job, dp=4), played("pipedream:8", job, dp=4)
    assert step.updates == 1.5 and step.step_s == pytest.approx(found.step_time_s, rel=0.01)


def test_slices_are_operators_of_their_own_length() -> None:
    """Products, traffic and launches of 4 x 512 tokens are those of micro-batches of 512; attention grows."""
    short = estimated("1f1b", {**JOB, "global_batch": 2048, "seq": 512})
    sliced, whole = estimated("terapipe"), estimated("1f1b")
    products = {path: s for path, s in short.time.items() if path.startswith("compute/") and "gemm_s" in path}
    assert len(products) > 8
    for path, seconds in products.items():
        assert sliced.time[path] == pytest.approx(seconds, rel=1e-9), path
    for group in ("tp_comm", "memory_bound"):
        assert groups(sliced)[group] == pytest.approx(groups(short)[group], rel=1e-3)
    grown = [sum(s for path, s in each.time.items() if "attention/tiled" in path) for each in (short, sliced, whole)]
    assert 0 < grown[1] - grown[0] < grown[2]
    assert sliced.step_time_s > 1.15 * whole.step_time_s
    assert played("terapipe").step_s == pytest.approx(sliced.step_time_s, rel=0.01)
    assert estimated("terapipe:1").step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)


def test_the_best_slices_of_long_sequences_are_shorter_behind_and_no_slower_than_equal_ones() -> None:
    job, plan = {"gpus": 64, "global_batch": 16, "seq": 65_536}, {"tp": 8, "pp": 4, "micro_batch": 1}

    def step(schedule: str) -> SimulatedStep:
        return simulate("llama3-8b", "dgx-h100", schedule=schedule, plan=plan, **job)

    best = step("terapipe:best")
    assert sum(best.slices) == 65_536 and best.slices[0] > best.slices[-1] and best.table.slices == len(best.slices)
    for count in (1, 2, 4, 8, 16):
        assert best.step_s <= step(f"terapipe:{count}").step_s * 1.001, count
    assert step("terapipe:32768+32768").step_s == pytest.approx(step("terapipe:2").step_s, rel=1e-3)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match="slices of 512\\+512 tokens"):
        played("terapipe:512+512")
    with pytest.raises(UserError, match="cannot be cut so"):
        api.estimate("vit-h14", "dgx-h100", gpus=8, global_batch=64, plan={"pp": 4, "schedule": "terapipe"})
    with pytest.raises(UserError, match="1f1b:3"):
        estimated("1f1b:3")


def test_work_without_bound_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="a step of 64,000,000 passes"):
        simulate("llama3-8b", "dgx-h100", gpus=32, global_batch=1_000_000, plan={"pp": 32})
    with pytest.raises(UserError, match="64 ranks x 1,000 micro-batches"):
        search_schedule(64, 1000)
    with pytest.raises(UserError, match="a time of a pass or a message is out of range"):
        search_schedule(4, 8, message_s=1e308)
    with pytest.raises(UserError, match="is no number of repetitions"):
        parse_layout("t*" + "9" * 5000)


def test_ends_of_the_model_are_whole_where_ranks_have_several_stages() -> None:
    """Weights, gradients and states of a large vocabulary, not a share of them by virtual stage."""
    job, plan = {"gpus": 8, "global_batch": 8, "seq": 8192}, {"pp": 4, "vpp": 8, "micro_batch": 1}
    found = api.estimate("llama3-8b", "dgx-h100", plan=plan, **job).peak_memory_bytes
    step = simulate("llama3-8b", "dgx-h100", schedule="interleaved", plan=plan, **job)
    assert step.memory.peak_bytes.max() == pytest.approx(found, rel=0.01)
