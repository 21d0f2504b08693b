"""A step played with its layers split in other ways, and the options that ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runner import CliRunner
from steptime import UserError
from steptime.api.calls import asked_plan
from steptime.cli.main import main
from steptime.estimate.evaluate import evaluate
from steptime.simulation.layout import layout_text
from steptime.simulation.run import Observed, SimulatedStep
from steptime.simulation.stages import items_of, simulate_stages

JOB: dict[str, Any] = {"gpus": 64, "global_batch": 64}
PLAN = {"tp": 8, "pp": 4}
EXPERTS: dict[str, Any] = {"gpus": 128, "global_batch": 256}
EXPERTS_PLAN = {"tp": 1, "pp": 4, "ep": 8}


def stages(model: str = "gpt3-175b", plan: dict[str, Any] = PLAN, **further: Any) -> SimulatedStep:
    return simulate_stages(model, "dgx-h100", plan=plan, **{**JOB, **further})


def test_the_even_split_takes_what_the_estimate_takes() -> None:
    plain, even = stages(), stages(layout="Et*24|t*24|t*24|t*24L")
    assert plain.even_step_s is None and even.even_step_s == pytest.approx(even.step_s)
    assert even.step_s == pytest.approx(plain.step_s, rel=1e-6)
    assert even.memory.peak_bytes == pytest.approx(plain.memory.peak_bytes, rel=0.02)
    assert layout_text(plain.layout) == "Et*24|(t*24|)*2t*24L" and plain.stage_layers.tolist() == [24] * 4


def test_items_of_a_model_with_experts_add_up_to_the_estimate() -> None:
    asked = asked_plan("deepseek-v2", "dgx-h100", plan=EXPERTS_PLAN, **EXPERTS)
    setting = asked.setting
    e = evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)
    items = items_of(e).items
    assert "".join(items.letters) == "E" + "t" * 60 + "L"
    assert items.seconds[1] < items.seconds[2] and items.state_bytes[1] < items.state_bytes[2]
    assert np.ptp(items.seconds[2:-1]) == 0
    whole = sum(each.both_s for each in (e.passes["first"], e.passes["last"])) + 60 * e.passes["layer"].both_s
    assert items.seconds.sum() == pytest.approx(whole, rel=0.01)
    held = {
        name: sum(float(call.value) for path, call in of.held.items() if not path.startswith("buffers"))
        for name, of in e.memory.items()
    }
    assert e.split.first == e.split.middle == e.split.last == 15
    assert items.state_bytes[:-1].sum() == pytest.approx(
        held["first"] + 2 * held["middle"] + held["last"] - items.state_bytes[-1], rel=0.02
    )
    assert items.state_bytes[:16].sum() == pytest.approx(held["first"])


def test_the_best_split_is_never_slower_than_the_even_one_and_fits() -> None:
    for model, plan, job in (
        ("gpt3-175b", {**PLAN, "vpp": 2}, JOB),
        ("gemma2-27b", {"tp": 8, "pp": 4}, JOB),
        ("deepseek-v2", {**EXPERTS_PLAN, "ep": 32, "recompute": "full"}, {"gpus": 512, "global_batch": 1024}),
        ("llama2-70b", {"tp": 8, "pp": 4, "schedule": "zb-v", "vpp": 2}, JOB),
        ("llama2-70b", {"tp": 8, "pp": 4, "schedule": "zb-h1"}, JOB),
    ):
        found = stages(model, plan, balance=True, **job)
        assert found.even_step_s is not None
        assert found.step_s <= found.even_step_s * (1 + 1e-9) or not found.even_fits, model
        assert (found.memory.peak_bytes <= found.capacity_bytes * (1 + 1e-6)).all(), model
        assert found.stage_layers.sum() == "".join(found.layout).count("t")


def test_embedding_and_head_take_layers_away() -> None:
    found = stages("gemma2-27b", {"tp": 8, "pp": 4}, balance=True)
    assert found.stage_layers.tolist()[-1] < found.stage_layers.max() and found.even_step_s is not None
    assert found.step_s < 0.99 * found.even_step_s


def test_slow_ranks_have_fewer_layers() -> None:
    found = stages(balance=True, rank_speeds="1*2,0.5*2")
    assert found.stage_layers[:2].min() > 1.8 * found.stage_layers[2:].max()
    assert found.even_step_s is not None and found.step_s < 0.75 * found.even_step_s
    given = stages(rank_speeds=[1, 1, 0.5, 0.5])
    assert given.step_s == pytest.approx(found.even_step_s) and given.stage_layers.tolist() == [24] * 4
    assert given.spent.passes_s[1] * 2 == pytest.approx(given.spent.passes_s[2])


def test_small_ranks_have_fewer_layers() -> None:
    found = stages(balance=True, rank_memory="80GiB*3,40GiB")
    assert found.memory.peak_bytes[-1] <= 40 * 2**30 < stages().memory.peak_bytes[-1]
    assert found.stage_layers[-1] < 24


def test_virtual_stages_follow_from_the_layout() -> None:
    layout = "Et*12|(t*12|)*6t*12L"
    found = stages(layout=layout)
    assert (found.schedule, found.table.stages) == ("interleaved", 8)
    assert found.to_json()["layout"] == layout


def test_embedding_and_head_may_have_stages_of_their_own() -> None:
    plan = {"tp": 8, "pp": 14, "vpp": 7}
    found = stages(plan=plan, gpus=112, global_batch=28, balance=True)
    assert layout_text(found.layout) == layout_text(found.even_layout) == "E|(t|)*96L"
    assert found.spent.passes_s[0] < found.spent.passes_s[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layout": "Et*24|t*24|t*24|t*25L"}, "97 x t"),
        ({"layout": "Et*48|t*24|t*24L"}, "3 stages over 4 ranks"),
        ({"layout": "Et*12|(t*12|)*6t*12L", "plan": {**PLAN, "vpp": 4}}, "8 stages; the plan has 16"),
        ({"layout": "Et*24|t*24|t*24|t*24L", "balance": True}, "--balance finds"),
        ({"balance": True, "rank_speeds": "1,2"}, "--rank-speeds has 2 values; --pp is 4"),
        ({"balance": True, "rank_speeds": "1*3,0"}, "'0' is no positive number"),
        ({"rank_speeds": "1*3,x"}, "'x' is no positive number"),
        ({"rank_memory": "80GiB*3,40"}, "no unit"),
        ({"balance": True, "rank_memory": "20GiB*4"}, "no split fits into the memory"),
        ({"balance": True, "plan": {**PLAN, "schedule": "dualpipe"}}, "each stage on two ranks"),
        ({"balance": True, "plan": {"tp": 1, "pp": 64, "vpp": 2}}, "128 stages of 96 layers"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        stages(**given)


def test_the_command_prints_stages_layout_and_the_even_split() -> None:
    options = ["gemma2-27b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--tp", "8", "--pp", "4"]
    found = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["simulate", *options, "--balance"])
    assert found.exit_code == 0 and "even split" in found.output and "% less than that" in found.output
    document = json.loads(CliRunner().invoke(main, ["simulate", *options, "--balance", "--json"]).output)
    assert document["layout"] in found.output and sum(document["stage_layers"]) == 46
    assert document["step_time_s"] < document["even_step_time_s"] and document["even_fits"] is True
    given = CliRunner().invoke(main, ["simulate", *options, "--layout", document["layout"], "--json"])
    assert json.loads(given.output)["step_time_s"] == pytest.approx(document["step_time_s"])
    bad = CliRunner().invoke(main, ["simulate", *options, "--layout", "Et|q"])
    assert bad.exit_code == 2 and "Traceback" not in bad.output


def test_a_split_is_balanced_for_the_slow_rank_and_compared_with_an_even_one_that_has_it_too() -> None:
    slow = Observed(slow_ranks={2: 1.5})
    best, even = stages("gemma2-27b", balance=True, observed=slow), stages("gemma2-27b", observed=slow)
    assert best.even_step_s == pytest.approx(even.step_s)
    assert best.step_s < even.step_s, "the layers of the slow rank go to others"
    assert best.stage_layers[2] < min(best.stage_layers[:2])
    assert best.equal_ranks_s < best.pipeline_s


def test_measured_times_go_with_the_stages_that_were_measured(tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("stage,forward_s,backward_s\n0,1,2\n1,1,1\n2,1,2\n3,1,2\n")
    for given in ({"balance": True}, {"rank_speeds": "1,1,1,0.5"}, {"layout": "Et*24|t*24|t*24|t*24L"}):
        with pytest.raises(UserError, match="measured times are of the stages that ran"):
            stages(observed=Observed(stage_times=times), **given)


@pytest.mark.parametrize("given", [{"rank_speeds": "1,1,1,1e-300"}, {"rank_memory": "80GiB*3,1e30GiB"}])
def test_numbers_that_no_device_has_are_refused_with_one_that_is_written_well(given: dict[str, str]) -> None:
    with pytest.raises(UserError, match="is beyond all devices") as refused:
        stages(**given)
    example = str(refused.value.hint).removeprefix("for example ")
    assert stages(**dict.fromkeys(given, example)).even_step_s is not None


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_report_of_a_split_fits_narrow_terminals(columns: int) -> None:
    words = "simulate gemma2-27b --cluster dgx-h100 --gpus 64 --global-batch 64 --tp 8 --pp 4 --balance"
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, words.split()).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    assert ("not shown at" in shown) == (columns < 80) and "…" not in shown


def test_a_rank_has_one_factor() -> None:
    job = ("gemma2-27b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--tp", "8", "--pp", "4")
    done = CliRunner().invoke(main, ["simulate", *job, "--slow-rank", "2:1.5", "--slow-rank", "2:1.2"])
    assert done.exit_code == 2 and "--slow-rank 2: factors 1.5 and 1.2" in done.stderr
