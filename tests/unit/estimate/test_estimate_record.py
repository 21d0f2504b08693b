"""The full record of one estimate does its work once, and what it leaves for later is what it would have made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from explained_terms import lines_of
from steptime import api
from steptime.api.models import load_model
from steptime.estimate import communication, explain, kernels
from steptime.estimate.band import _bound_resources, _directions, _doubted, _passes, _resources, bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate, passes_of
from steptime.estimate.kernels import Residual
from steptime.estimate.layer import FORWARD, RECOMPUTE, part_times
from steptime.estimate.ledger import details_of, fullest_stage
from steptime.estimate.memory import fullest_bytes, memory_of, stage_terms
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting, estimate_plan
from steptime.estimate.sizes import sizes_of
from steptime.hardware import load_cluster
from steptime.plan.framework import IDEAL, LINKS
from steptime.plan.framework_file import load_framework
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.rows import move
from steptime.plan.strategies import CORRECTED

CASES = (
    ("llama3.1-70b", "dgx-h100", "1d", Plans(tp=8, pp=4, dp=16, in_tp=8)),
    ("llama3.1-70b", "dgx-h100", "2d", Plans(tp=4, tp2=4, panels=8, dp=32, in_tp=4, in_tp2=2)),
    ("deepseek-v3", "hgx-h800", "1d", Plans(pp=16, dp=128, ep=64, in_dp=8, recompute=RECOMPUTE_CODES["norm"])),
)


def made(model: str, cluster: str, strategy: str, plans: Plans) -> tuple[Setting, Any, Evaluation]:
    machines = load_cluster(cluster)
    job = Job(model=load_model(model), gpus=int(plans.ranks), global_batch=1024, seq_len=4096,
              precision=PRECISIONS["fp8"], optimizer=OPTIMIZERS["adam"],
              framework=load_framework("generic", machines.device.name))  # fmt: skip
    setting, how = Setting(method=CORRECTED, job=job, cluster=machines), CORRECTED.strategies[strategy]
    return setting, how, evaluate(CORRECTED, how, job, setting.machine, plans)


@pytest.mark.parametrize("case", CASES)
def test_the_bound_of_sums_is_the_sum_of_bounds(case: Any) -> None:
    """Times of all rows at once on a machine without latencies are those of the rows, one by one."""
    _, _, e = made(*case)
    bound = e.machine.bound
    assert bound is not None
    rows = part_times(e.block, e.plans, bound)
    for part, times in e.times.items():
        for of_sums, one_by_one in zip(_directions(times), _directions(rows[part]), strict=True):
            at_once = _bound_resources(of_sums, e.plans, bound)
            assert at_once == pytest.approx(_resources(one_by_one, IDEAL), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_timed_in_the_phases_in_which_they_do_something(case: Any) -> None:
    """Groups of one rank send nothing, and a forward pass that runs again takes as long as the first."""
    _, _, e = made(*case)
    times = [time for part in e.times.values() for time in part]
    assert all(time.issued or time.transfers for time in times)
    assert all(getattr(e.plans, each.transfer.axis) > 1 for time in times for each in time.transfers)
    forward = {time.row.name: time for time in times if time.phase == FORWARD}
    again = [time for time in times if time.phase == RECOMPUTE]
    assert bool(again) == bool(e.plans.recompute)
    assert all(time == forward[time.row.name]._replace(phase=RECOMPUTE) for time in again)
    one_way = replace(e.block, layer=(move("convert", "mlp", 8.0, 4.0, operator="move_forward"),))
    assert [time.phase for time in part_times(one_way, e.plans, e.machine)["layer"]] == [FORWARD]


@pytest.mark.parametrize("case", CASES)
def test_all_parts_at_once_take_as_long_as_one_by_one(case: Any) -> None:
    _, _, e = made(*case)
    framework, spread = e.job.framework, e.job.framework.spread
    assert spread is not None
    many = _doubted(framework, tuple(spread.doubts.items()), spread.device_doubt)
    at_once, one_by_one = _passes(e.works, many), passes_of(e.works, many)
    for part in e.times:
        for name in ("forward_s", "backward_s", "weights_s"):
            whole, alone = (getattr(passes[part], name) for passes in (at_once, one_by_one))
            assert np.allclose(whole, alone, rtol=1e-15, atol=0.0)


def test_equal_fabrics_share_what_is_kept_of_them() -> None:
    fabric = made(*CASES[0])[0].machine.fabric
    assert fabric is not None
    one = fabric.fabric
    assert {one: 1.0}[replace(one)] == 1.0 and hash(replace(one, nics=3.0)) != hash(one)


@pytest.mark.parametrize("case", CASES)
def test_what_if_is_the_step_on_the_better_machine(case: Any) -> None:
    setting, how, e = made(*case)
    for name, factors in explain.WHAT_IF.items():
        better = evaluate(CORRECTED, how, setting.job, setting.machine.faster(**factors), e.plans)
        assert explain.what_if(e)[name] == pytest.approx(float(better.step_time_s), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_memory_is_listed_once(case: Any) -> None:
    _, how, e = made(*case)
    peaks = {name: sum(stage_terms(e, name).values()) for name in e.memory}
    assert max(peaks.values()) == e.peak_bytes == peaks[fullest_stage(e)]
    block = replace(e.plans, micro_batch=np.array([1.0, 2.0]), pp=np.array([float(e.plans.pp), 1.0]))
    many = memory_of(planned_job(CORRECTED, how, e.job, block, sizes_of(how.block(e.job, block))))
    assert set(many) == {"first", "middle", "last"} and np.asarray(fullest_bytes(many))[0] == e.peak_bytes


def test_how_a_term_came_about_is_made_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, how, e = made(*CASES[0])
    asked: list[str] = []
    chosen = communication._chosen
    monkeypatch.setattr(communication, "_chosen", lambda kind, *rest: asked.append(kind) or chosen(kind, *rest))
    short = estimate_plan(setting, how, e.plans, what_ifs=False)
    assert not asked and not short.details
    whole = estimate_plan(setting, how, e.plans, what_ifs=False, explain=True)
    assert asked and replace(whole, details=()) == short
    details = details_of(lines_of(e))
    assert details == whole.details[: len(details)]
    calls = [call for detail in details for call in detail.calls]
    given = {name: value for call in calls for name, value in (*call.arguments.items(), *call.factors.items())}
    assert {name for name, value in given.items() if not isinstance(value, float)} == {"kind", "fabric"}


def test_constants_of_a_job_are_collected_once() -> None:
    setting, how, e = made(*CASES[0])
    first, second = (estimate_plan(setting, how, e.plans, what_ifs=False).provenance for _ in range(2))
    assert first.constants is second.constants and first == second
    assert setting.machine is setting.machine


def test_values_that_are_kept_are_those_of_their_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    made_once = kernels.gemm_residual

    def counted(m: Any, n: Any, k: Any, batch: Any, sm_count: Any, table: Any) -> Any:
        calls.append(m)
        return made_once(m, n, k, batch, sm_count, table)

    monkeypatch.setattr(kernels, "gemm_residual", counted)
    one, other = (Residual(np.full(10_000, value)) for value in (0.25, 0.5))
    product = {"m": 512.0, "n": 512.0, "k": 512.0, "batch": 1.0, "sm_count": 132.0}
    assert [table.at(**product) for table in (one, other, one)] == [0.25, 0.5, 0.25]
    assert calls == [512.0, 512.0]
    assert one.at(**product | {"m": np.array([512.0])}) == np.array([0.25])


@pytest.mark.parametrize("case", CASES)
def test_with_nothing_hidden_no_transfer_beats_its_links(case: Any) -> None:
    """Factors on links below 1 stand for what hides; above 1 they count."""
    setting, how, e = made(*case)

    def highest_s(factor: float) -> float:
        framework = replace(e.job.framework, **dict.fromkeys(LINKS, factor))
        job = replace(e.job, framework=framework)
        return float(bracket_s(evaluate(CORRECTED, how, job, setting.machine, e.plans))[1])

    assert highest_s(0.5) == pytest.approx(highest_s(1.0), rel=1e-12)
    assert highest_s(2.0) > highest_s(1.0)


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "options", "plan"),
    [
        ("llama3-70b", "tpu-v5p", 64, {}, {"tp": 2}),
        ("llama3-8b", "rtx3090-8", 1, {"lora": {"rank": 16, "qlora": True}}, {}),
        ("llama3-8b", "rtx3090-8", 1, {"lora": {"rank": 16}}, {"recompute": "full"}),
    ],
)
def test_no_band_reaches_below_the_time_at_the_peak(
    model: str, cluster: str, gpus: int, options: dict[str, Any], plan: dict[str, Any]
) -> None:
    e = api.estimate(model, cluster, gpus=gpus, global_batch=64, plan=plan, **options)
    low, high = e.step_time_band_s or (0.0, 0.0)
    assert e.hfu * e.step_time_s / low == pytest.approx(1.0, rel=1e-9)
    assert low < e.step_time_s < high


def test_where_a_curve_beats_the_peak_the_step_is_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime.estimate.single.least_step_s", lambda *_: 1e9)
    e = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8)
    assert e.step_time_band_s is not None and e.step_time_band_s[0] == e.step_time_s


@pytest.mark.parametrize("framework", ["generic", "maxtext"])
def test_where_a_framework_beats_assumed_rates_exposed_traffic_can_still_hide(framework: str) -> None:
    e = api.estimate("llama3-70b", "tpu-v5p", gpus=64, global_batch=64, plan={"tp": 4}, framework=framework)
    exposed = sum(value for path, value in e.time.items() if path.startswith(("tp_comm", "dp_comm")))
    assert exposed > 0.05 * e.step_time_s
    assert e.step_time_bracket_s[0] < e.step_time_s - exposed
