"""A step of a pipeline played with the times of an estimate, and the commands that print it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from cli_runner import CliRunner
from steptime import UserError, api
from steptime.cli.main import main
from steptime.schedule import SCHEDULES
from steptime.simulation.run import Observed, SimulatedStep, simulate

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


def test_communication_with_tensor_ranks_is_that_of_the_estimate_and_takes_no_further_time() -> None:
    found, e = played("1f1b"), api.estimate("gpt3-175b", "dgx-h100", plan=PLAN, **JOB)
    sent_s = sum(value for path, value in e.to_json()["time"].items() if path.startswith("tp_comm/"))
    assert found.spent.tensor_s.max() == pytest.approx(sent_s, rel=1e-6)
    assert found.step_s == pytest.approx(e.step_time_s, rel=0.002)
    alone = simulate("gpt3-175b", "dgx-h100", plan={"tp": 1, "pp": 8, "micro_batch": 1}, **JOB)
    assert not alone.spent.tensor_s.any() and alone.spent.passes_s.all()
    # Without overlapped exchanges of experts pairs take as long as both of their passes.
    pairs = played("dualpipe")
    assert pairs.spent.tensor_s.max() == pytest.approx(found.spent.tensor_s.max(), rel=0.05)


@pytest.mark.parametrize(
    ("overlap", "schedule", "batch", "within"),
    [("dp,pp,offload", "1f1b", 64, 0.03), ("dp,pp,offload", "gpipe", 64, 0.03), ("dp,pp,offload", "1f1b", 512, 0.02),
     ("dp,tp,pp,offload", "1f1b", 64, 0.06), ("dp,pp", "1f1b", 64, 0.07), ("dp,pp", "1f1b", 512, 0.02),
     ("dp,pp,offload", "zb-h1", 64, 0.04)],
)  # fmt: skip
def test_offloaded_activations_take_the_time_of_the_estimate(
    overlap: str, schedule: str, batch: int, within: float
) -> None:
    """Played steps are no longer: the last rank, which has the head, has no copies, and copies overlap with waits."""
    plan = {**PLAN, "offload": "activations", "overlap": overlap}
    found = simulate("gpt3-175b", "dgx-h100", schedule=schedule, plan=plan, gpus=64, global_batch=batch)
    assert found.closed_form_s is not None and "copies" not in found.once_s
    assert found.spent.copy_s[0] > 0 and found.spent.copy_s[0] > 5 * found.spent.message_s[0]
    assert found.closed_form_s * (1 - within) < found.step_s < found.closed_form_s * 1.002
    assert found.memory.peak_bytes[0] < played(schedule).memory.peak_bytes[0]
    assert "whole passes" in " ".join(found.notes)


def test_a_slow_rank_and_what_it_costs() -> None:
    found = simulate("gpt3-175b", "dgx-h100", observed=Observed(slow_ranks={2: 1.2}), plan=PLAN, **JOB)
    calm = played("1f1b")
    assert found.equal_ranks_s == calm.pipeline_s and found.closed_form_s is None
    busy_s, before_s = ((each.spent.passes_s + each.spent.tensor_s) for each in (found, calm))
    assert (busy_s / before_s).tolist() == pytest.approx([1, 1, 1.2, 1])
    more_s = found.to_json()["stragglers_s"]
    assert 0.19 * 32 / 35 * calm.pipeline_s * 0.9 < more_s < 0.2 * calm.pipeline_s
    shown = CliRunner().invoke(main, ["simulate", *OPTIONS, "--slow-rank", "2:1.2"])
    assert "stragglers" in shown.output and "rank 2 x 1.2" in shown.output
    for ranks, words in (({4: 1.2}, "the pipeline has ranks 0 to 3"), ({0: 0.0}, "a factor of 0")):
        with pytest.raises(UserError, match=words):
            simulate("gpt3-175b", "dgx-h100", observed=Observed(slow_ranks=ranks), plan=PLAN, **JOB)
    for given in ("x", "1", "1:y", "1.5:2"):
        assert "a rank and a factor" in CliRunner().invoke(main, ["simulate", *OPTIONS, "--slow-rank", given]).output


MEASURED = Path(__file__).parents[2] / "data" / "stage_times"


def test_measured_times_stand_in_for_those_of_the_estimate() -> None:
    found = simulate(
        "gpt3-175b", "dgx-h100", observed=Observed(stage_times=MEASURED / "four_stages.csv"), plan=PLAN, **JOB
    )
    assert found.spent.passes_s.tolist() == pytest.approx([32 * each for each in (47.5e-3, 45.9e-3, 45.9e-3, 53.1e-3)])
    assert not found.spent.tensor_s.any() and found.once_s["optimizer"] == played("1f1b").once_s["optimizer"]
    last = found.simulation.seconds[found.simulation.graph.messages.item]
    assert (last == 0.6e-3).all() and found.pipeline_s > 32 * 53.1e-3
    equal = {
        (name, overhead): simulate(
            "gpt3-175b", "dgx-h100", schedule=name,
            observed=Observed(stage_times=str(MEASURED / "equal_stages.csv"), overhead_s=overhead),
            plan={**PLAN, **({"vpp": 2} if name == "interleaved" else {})}, **JOB,
        )
        for name, overhead in (("1f1b", 0.0), ("1f1b", 0.002), ("interleaved", 0.002), ("dualpipe", 0.002))
    }  # fmt: skip
    assert equal["1f1b", 0.0].spent.passes_s.tolist() == pytest.approx([32 * 47e-3] * 4)
    for (_, overhead), each in equal.items():
        assert each.spent.passes_s.tolist() == pytest.approx([32 * (47e-3 + overhead)] * 4)


def test_measured_times_by_micro_batch_also_of_steps_that_run_into_each_other(tmp_path: Path) -> None:
    """Every other micro-batch takes 3 s forward, all others 1 s, and 2 s backward: 4 s in the mean."""
    rows = [f"{stage},{number},{1 + 2 * (number % 2)},2" for stage in range(4) for number in range(32)]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(["stage,micro_batch,forward_s,backward_s", *rows]))
    for name, pipeline_s in (("1f1b", None), ("pipedream", 128.0)):
        found = simulate("gpt3-175b", "dgx-h100", schedule=name, observed=Observed(stage_times=path), plan=PLAN, **JOB)
        assert found.spent.passes_s.tolist() == pytest.approx([128.0] * 4)
        assert pipeline_s is None or pipeline_s <= found.pipeline_s < 1.3 * pipeline_s


def test_measured_times_that_do_not_serve(tmp_path: Path) -> None:
    whole = tmp_path / "whole.csv"
    whole.write_text("stage,forward_s,backward_s\n" + "".join(f"{stage},1,2\n" for stage in range(4)))
    assert simulate(
        "gpt3-175b", "dgx-h100", observed=Observed(stage_times=whole), plan=PLAN, **JOB
    ).pipeline_s == pytest.approx(105, 0.01)
    with pytest.raises(UserError, match="gradients of weights in passes of their own"):
        simulate("gpt3-175b", "dgx-h100", schedule="zb-h1", observed=Observed(stage_times=whole), plan=PLAN, **JOB)
    with pytest.raises(UserError, match="stage 4 is missing: the schedule has stages 0 to 7"):
        simulate(
            "gpt3-175b",
            "dgx-h100",
            schedule="interleaved",
            observed=Observed(stage_times=whole),
            plan={**PLAN, "vpp": 2},
            **JOB,
        )
    with pytest.raises(UserError, match="an overhead per micro-batch is for measured times"):
        simulate("gpt3-175b", "dgx-h100", observed=Observed(overhead_s=0.1), plan=PLAN, **JOB)


def test_every_schedule_plays_or_says_what_it_requires() -> None:
    slowest = played("naive").step_s
    for name, schedule in SCHEDULES.items():
        found = played(name, **({"vpp": 2} if schedule.usual_chunks == 2 else {}))
        assert found.pipeline_s < slowest or name == "naive", name
        assert 0 <= found.bubble_fraction < 1 and found.stage_layers.sum() == 96, name
        assert np.isfinite(found.memory.peak_bytes).all(), name


def test_steps_that_run_into_each_other_have_no_bubble_but_that_of_the_slowest_stage() -> None:
    found = played("pipedream-2bw")
    assert found.pipeline_s == pytest.approx(
        float((found.spent.passes_s + found.spent.tensor_s + found.spent.update_s).max()), rel=0.01
    )
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
        main, ["simulate", *OPTIONS, "--schedule", "zb-v", "--csv", str(csv), "--trace", str(trace), "--json"]
    )
    assert first.exit_code == 0, first.output
    second = runner.invoke(main, ["simulate", *OPTIONS, "--schedule", str(csv), "--json"])
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
    table = runner.invoke(main, ["schedules", "--json", "--ranks", "4", "--micro-batches", "8"])
    rows = {row["name"]: row for row in json.loads(table.output)["schedules"]}
    assert rows.keys() == SCHEDULES.keys()
    assert rows["1f1b"]["bubble_fraction"] == pytest.approx(3 / 11) and rows["gpipe"]["in_flight"] == 8
    assert rows["pipedream"]["weight_versions"] == 4 and not rows["pipedream"]["synchronous"]
    shown = runner.invoke(main, ["schedules", "1f1b", "--ranks", "2", "--micro-batches", "2"])
    assert "rank 0: 0F0 0F1 0B0 0B1" in shown.output
    assert runner.invoke(main, ["schedules", "--csv", str(tmp_path / "a.csv")]).exit_code == 2
