"""Zero-bubble schedules: bubble and memory by hand, what a search makes of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from explained_terms import lines_of
from steptime import api
from steptime.api.models import load_model
from steptime.errors import PlanError
from steptime.estimate.band import bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import BACKWARD
from steptime.estimate.ledger import exposed_terms
from steptime.estimate.memory import LAYERS_TERM, stage_terms
from steptime.estimate.single import Setting
from steptime.estimate.work import INPUTS, weights_s
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans, broken_rules, names_of
from steptime.plan.strategies import CORRECTED
from steptime.schedule import SCHEDULES
from steptime.search.exhaustive import Task, search
from steptime.search.modes import MODES

ZERO_BUBBLE = [name for name, row in SCHEDULES.items() if row.fills]
STRATEGY = CORRECTED.strategies["1d"]


def evaluated(schedule: str, plans: Plans, *, batch: int = 64, fitted: bool = True) -> Evaluation:
    job = Job(model=load_model("llama3-8b"), gpus=int(np.max(plans.ranks)), global_batch=batch, seq_len=2048,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], schedule=schedule)  # fmt: skip
    machine = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100")).machine
    return evaluate(CORRECTED, STRATEGY, job, machine if fitted else replace(machine, models={}), plans)


def expected_bubble_s(e: Evaluation, filling: int) -> float:
    """Passes of the seven stages before the last, which has the head, but for the weights that its own passes fill."""
    layer, first, last = e.passes["layer"], e.passes["first"], e.passes["last"]
    others_s = 28 * (layer.both_s - layer.weights_s) + first.both_s - first.weights_s
    of_first_s, of_last_s = (4 * layer.weights_s + end.weights_s for end in (first, last))
    return float(np.maximum(others_s + of_first_s - (filling + 1) * of_last_s, 0.0))


@pytest.mark.parametrize(("schedule", "batch", "filling"), [
    ("zb-h1", 64, 7), ("zb-h1", 5, 4), ("zb-h2", 64, 14), ("zb-h2", 8, 7), ("zb-h2", 2, 1), ("zb-h2", 1, 0),
])  # fmt: skip
def test_the_bubble_by_hand(schedule: str, batch: int, filling: int) -> None:
    """Stages put off one or two passes for gradients of weights per stage before, but no more than there are."""
    e, whole = (evaluated(name, Plans(pp=8), batch=batch) for name in (schedule, "1f1b"))
    layer, first = e.passes["layer"], e.passes["first"]
    assert float(e.step.counts["last"]) == 1 and layer.weights_s > 0
    assert float(e.step.idle_s) == pytest.approx(expected_bubble_s(e, filling))
    assert float(whole.step.idle_s) == pytest.approx(float(28 * layer.both_s + first.both_s))
    assert layer.both_s == whole.passes["layer"].both_s and not whole.passes["layer"].weights_s


def _weights_products_s(e: Evaluation) -> Any:
    works = e.works["layer"]
    return works[BACKWARD].matrix_s - works[INPUTS].matrix_s


def test_gradients_of_weights_are_the_second_product() -> None:
    for fitted in (True, False):
        e = evaluated("zb-h1", Plans(pp=4), fitted=fitted)
        rows = [time for time in e.times["layer"] if time.phase == BACKWARD and time.row.operator == "matmul"]
        assert _weights_products_s(e) == pytest.approx(sum(map(weights_s, rows)))
        for time in rows:
            assert 0.4 < weights_s(time) / time.total_s < 0.6
            if time.timed is not None:
                (of_weights,) = (shape for shape in time.timed.shapes if shape["k"] == time.row.shape["m"])
                assert weights_s(time) == time.timed.model.seconds(of_weights)
            assert fitted or weights_s(time) == pytest.approx((time.compute_s + time.exposed_memory_s) / 2)
        others = [time for time in e.times["layer"] if time not in rows]
        assert not any(map(weights_s, others))


@pytest.mark.parametrize(("schedule", "first", "last"), [("1f1b", 8, 1), ("zb-h1", 8, 8), ("zb-h2", 15, 15)])
def test_activations_held(schedule: str, first: int, last: int) -> None:
    plans = Plans(pp=8)
    e = evaluated(schedule, plans)
    for stage, count in (("first", first), ("last", last)):
        terms = stage_terms(e, stage)
        assert terms[LAYERS_TERM] == pytest.approx(4 * count * e.sizes.layer.kept_bytes)
    few = evaluated(schedule, plans, batch=2)
    assert stage_terms(few, "first")[LAYERS_TERM] == pytest.approx(4 * 2 * few.sizes.layer.kept_bytes)


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize("batch", [2, 64])
def test_terms_add_up_and_the_bracket_holds(schedule: str, batch: int) -> None:
    e = evaluated(schedule, Plans(pp=8), batch=batch)
    terms, whole = (exposed_terms(lines_of(each)) for each in (e, evaluated("1f1b", Plans(pp=8), batch=batch)))
    assert terms.total == pytest.approx(float(e.step_time_s), rel=1e-12)
    filled = terms.get("bubble/zero_bubble_s", 0.0)
    assert filled < whole["bubble/pipeline_bubble_s"] and (filled > 0) == (batch == 2 or SCHEDULES[schedule].fills == 1)
    low, high = bracket_s(e)
    assert 0 < low <= e.step_time_s <= high
    assert low < bracket_s(evaluated("1f1b", Plans(pp=8), batch=batch))[0]


def test_only_where_there_are_stages_and_virtual_ones_that_it_serves() -> None:
    for schedule, plans, reasons in (
        ("zb-h1", Plans(pp=4), ()), ("zb-h1", Plans(dp=4), ("ranks",)), ("zb-h1", Plans(pp=4, vpp=2), ()),
        ("zb-h2", Plans(pp=4, vpp=2), ("one_chunk",)), ("1f1b", Plans(dp=4), ()), ("1f1b", Plans(pp=4, vpp=2), ()),
    ):  # fmt: skip
        job = replace(evaluated(schedule, Plans(pp=4)).job, gpus=4)
        assert names_of(int(broken_rules(job, plans))) == reasons, (schedule, plans)


def run(**plan: Any) -> Any:
    return api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=64, seq=4096, plan=plan)


def test_a_search_with_a_schedule_finds_what_the_estimate_says() -> None:
    found = api.plan("llama3-8b", "dgx-h100", gpus=8, global_batch=64, seq=4096, fix={"schedule": "zb-h1"}, top=3)
    assert found.plans and found.reasons["ranks"] > 0
    for each in found.plans:
        assert each.plan["schedule"] == "zb-h1" and each.plan["pp"] > 1
        assert run(**each.plan).step_time_s == pytest.approx(each.step_time_s, rel=1e-9)


def test_the_times_that_a_search_ranks_by_are_those_of_the_schedule() -> None:
    mode, job = MODES["corrected"], replace(evaluated("zb-h2", Plans(pp=8)).job, gpus=8)
    setting = Setting(method=mode.method, job=job, cluster=load_cluster("dgx-h100"))
    (found,) = search([Task(setting=setting, strategy=STRATEGY, space=mode.space)], 5)
    assert len(found.best_s) == 5
    for i, ranked_s in enumerate(found.best_s):
        plans = found.best.row(i)
        assert float(evaluate(CORRECTED, STRATEGY, job, setting.machine, plans).step_time_s) == pytest.approx(ranked_s)


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="schedule zb-h2 contradicts vpp 2"):
        run(pp=4, vpp=2, schedule="zb-h2")
    with pytest.raises(PlanError, match="follows from vpp"):
        api.plan("llama3-8b", "dgx-h100", gpus=8, global_batch=64, fix={"schedule": "interleaved"})
    with pytest.raises(PlanError, match="no schedule zb-h1"):
        api.estimate("gpt3_1T", "published-b200-nvs8", gpus=64, global_batch=64, mode="published",
                     plan={"pp": 8, "tp": 8, "schedule": "zb-h1"})  # fmt: skip
