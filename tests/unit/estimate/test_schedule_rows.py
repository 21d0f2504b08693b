"""Every row of the registry of schedules: its estimate against the same step played action by action."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cli_runner import CliRunner
from machine_without_latencies import machine_of
from steptime import UserError, api
from steptime.api.models import load_model
from steptime.cli.main import main
from steptime.estimate.evaluate import Evaluation, evaluate, passes_of
from steptime.estimate.memory import stage_of, stage_terms
from steptime.estimate.step import Step, compose
from steptime.estimate.work import Pass, stacked
from steptime.plan.framework import IDEAL
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans, broken_rules, concatenate, names_of
from steptime.plan.strategies import CORRECTED
from steptime.schedule import SCHEDULES, Pipeline, Schedule, Times
from steptime.simulation.run import simulate
from steptime.simulation.simulate import Durations
from steptime.simulation.simulate import simulate as play

SIZES = [(2, 4), (2, 16), (4, 8), (4, 24), (6, 12), (8, 16), (8, 64)]
"""Ranks and micro-batches."""
LAYERS = 48
TIMES = (
    Times(),
    Times(forward_s=1.0, input_gradient_s=1.5, weight_gradient_s=0.75),
    Times(forward_s=1.0, input_gradient_s=0.5, weight_gradient_s=1.5),
    Times(forward_s=0.7, input_gradient_s=1.0, weight_gradient_s=0.9),
)
APPROXIMATE = 0.12
"""Relative difference where a row has no exact form: searched orders, and ZB-V with passes that are not alike."""


def chunks_of(row: Schedule) -> tuple[int, ...]:
    return (1, 2, 4) if row.only_chunks is None and not row.follows else (row.only_chunks or 2,)


def evaluated(row: Schedule, plans: Plans, micro_batches: int) -> Evaluation:
    model = replace(load_model("llama2-7b"), layers=LAYERS, vocab=1)
    job = Job(model=model, gpus=int(np.max(plans.ranks)), global_batch=micro_batches, seq_len=1024,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], schedule=row.name)  # fmt: skip
    machine = machine_of(1e13, memory_Bps=1e13, fast_domain=64)
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine, plans)


def step_of(e: Evaluation, times: Times, last_s: float = 0.0) -> Step:
    """The step where a rank has those passes, and the head takes so much longer forward and twice that backward."""
    each = e.plans.pp / LAYERS
    layer = Pass(forward_s=times.forward_s * each, backward_s=times.backward_s * each,
                 weights_s=times.weight_gradient_s * each * e.job.splits_backward)  # fmt: skip
    nothing = Pass(forward_s=0.0, backward_s=0.0)
    last = Pass(forward_s=last_s, backward_s=2 * last_s, weights_s=last_s * e.job.splits_backward)
    return compose(e.inputs, {"layer": layer, "first": nothing, "last": last}, IDEAL)


def played_s(row: Schedule, pipeline: Pipeline, last_s: float = 0.0) -> float:
    """Longest time of a rank from its first pass to its last; of an asynchronous schedule, that of a further step."""
    spans_s, times = [], pipeline.times
    for steps in (1, 2):
        table = row.order(replace(pipeline, micro_batches=steps * pipeline.micro_batches))
        share, ends = pipeline.ranks / (table.stages * table.slices), np.zeros(table.stages)
        ends[-1] = last_s / table.slices
        durations = Durations(
            forward_s=share * times.forward_s + ends, input_gradient_s=share * times.input_gradient_s + ends,
            weight_gradient_s=share * times.weight_gradient_s + ends,
        )  # fmt: skip
        spans_s.append(float(play(table, durations).rank_span_s.max()))
    return spans_s[0] if row.synchronous else spans_s[1] - spans_s[0]


@pytest.mark.quick(without=["searched"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_step_of_equal_stages(name: str) -> None:
    """Exact where the row says so, whatever the passes take."""
    row, told = SCHEDULES[name], 0
    for ranks, micro_batches in SIZES:
        for chunks in chunks_of(row):
            e = evaluated(row, Plans(pp=ranks, vpp=chunks), micro_batches)
            for times in TIMES if not broken_rules(e.job, e.plans) else ():
                pipeline = Pipeline(ranks=ranks, chunks=chunks, micro_batches=micro_batches, times=times,
                                    slices=row.usual_slices)  # fmt: skip
                step = step_of(e, times)
                exact = row.exact(pipeline) and name != "ampnet"
                assert float(step.steady_s + step.idle_s) == pytest.approx(
                    played_s(row, pipeline), rel=1e-9 if exact else APPROXIMATE
                ), pipeline  # fmt: skip
                told += 1
    assert told >= 4 * len(SIZES) - 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_step_of_a_last_stage_that_takes_longer(name: str) -> None:
    row = SCHEDULES[name]
    for ranks, micro_batches in ((4, 8), (4, 24), (8, 16), (8, 64)):
        chunks = chunks_of(row)[-1] if row.follows else row.usual_chunks
        e = evaluated(row, Plans(pp=ranks, vpp=chunks), micro_batches)
        pipeline = Pipeline(ranks=ranks, chunks=chunks, micro_batches=micro_batches, slices=row.usual_slices)
        step = step_of(e, pipeline.times, 0.4)
        assert float(step.steady_s + step.idle_s) == pytest.approx(played_s(row, pipeline, 0.4), rel=0.08), pipeline


def full(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job whose activations take most of the memory, and its plan."""
    chunks = {"vpp": 2} if SCHEDULES[name].follows else {}
    job = {"gpus": 64, "global_batch": 32, "optimizer": "sgd"}
    return job, {"tp": 8, "pp": 8, "micro_batch": 1, **chunks}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_rank_holds_what_the_replay_holds(name: str) -> None:
    job, plan = full(name)
    found = api.estimate("gpt3-175b", "dgx-h100", plan={**plan, "schedule": name}, **job)
    played = simulate("gpt3-175b", "dgx-h100", schedule=name, plan=plan, **job)
    near = 0.05 if SCHEDULES[name].held_is_exact else 0.07
    assert found.peak_memory_bytes == pytest.approx(float(played.memory.peak_bytes.max()), rel=near)
    assert found.step_time_s == pytest.approx(played.step_s, rel=0.05) and played.closed_form_s == found.step_time_s
    assert found.plan["schedule"] == name and sum(found.time.values()) == pytest.approx(found.step_time_s)


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "1f1b"])
def test_a_head_keeps_every_micro_batch_that_waits_behind_it(name: str) -> None:
    """With a vocabulary of 128,000 the last stage is the fullest where all forward passes come first."""
    job = {"gpus": 8, "global_batch": 32, "dtype": "bf16", "framework": "ideal"}
    plan = {"pp": 8, "micro_batch": 1, "vpp": 2 if name == "looped-bfs" else 1}
    found = api.estimate("llama3-8b", "dgx-h100", plan={**plan, "schedule": name}, **job)
    played = simulate("llama3-8b", "dgx-h100", schedule=name, plan=plan, **job)
    assert found.peak_memory_bytes == pytest.approx(float(played.memory.peak_bytes.max()), rel=0.02)


def test_versions_of_weights_by_hand() -> None:
    """PipeDream holds as many versions as stages are behind, 2BW two, PipeMare one."""
    for name, further in (("pipedream", 7), ("pipedream-2bw", 1), ("pipemare", 0), ("1f1b", 0)):
        e = evaluated(SCHEDULES[name], Plans(pp=8), 64)
        terms = stage_terms(e, "first")
        kept = sum(size for path, size in terms.items() if path.endswith("stashed_weights_bytes"))
        assert kept == pytest.approx(further * terms["weights/parameter_bytes"]), name
    terms = stage_terms(evaluated(SCHEDULES["pipedream"], Plans(pp=8), 64), "last")
    assert not any(path.startswith("weight_versions") for path in terms)


def test_a_folded_pipeline_has_both_ends_on_its_first_rank() -> None:
    e = evaluated(SCHEDULES["zb-v"], Plans(pp=4, vpp=2), 16)
    step = step_of(e, Times(), 0.4)
    assert (float(step.counts["first"]), float(step.counts["last"])) == (1.0, 1.0)
    assert float(step.stage_s["slowest_stage_s"]) == pytest.approx(3.0 + 3 * 0.4)
    first, last = (stage_of(e, name) for name in ("first", "last"))
    assert (first.first, first.last, first.ahead) == (1.0, 1.0, 6.0) and (last.first, last.last) == (0.0, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_block_of_plans_costs_what_each_of_them_does(name: str) -> None:
    row = SCHEDULES[name]
    chunks = 2 if row.follows else row.usual_chunks
    plans = [Plans(pp=pp, vpp=chunks, dp=8 // pp) for pp in (2, 4, 8)]
    block = evaluated(row, concatenate(plans, [1] * len(plans)), 64)
    for i, each in enumerate(plans):
        e = evaluated(row, each, 64)
        assert float(np.broadcast_to(block.step_time_s, 3)[i]) == pytest.approx(float(e.step_time_s), rel=1e-12)
        assert float(np.broadcast_to(block.peak_bytes, 3)[i]) == pytest.approx(float(e.peak_bytes), rel=1e-12)


def test_plans_with_several_schedules_side_by_side_cost_what_each_of_them_does() -> None:
    """As the fit of frameworks stacks its runs, slow heads and whole backward passes among them."""
    names = [name for name, row in SCHEDULES.items() if row.only_chunks == 1]
    each = [evaluated(SCHEDULES[name], Plans(pp=4), 16) for name in names]
    works, inputs = stacked([e.works for e in each]), stacked([e.inputs for e in each])
    head = Pass(forward_s=0.01, backward_s=0.02, weights_s=0.01)
    passes = passes_of(works, IDEAL) | {"last": head}
    together = compose(inputs, passes, IDEAL).total_s
    for e, seconds in zip(each, together, strict=True):
        last = replace(head, weights_s=head.weights_s * e.job.splits_backward)
        alone = compose(e.inputs, passes_of(e.works, IDEAL) | {"last": last}, IDEAL)
        assert float(alone.total_s) == pytest.approx(float(seconds), rel=1e-12), e.job.schedule


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"pp": 4, "schedule": "chimera"}, 30, "schedule chimera requires a number of micro-batches that the number of "
                                           "ranks divides; got 4 ranks, 1 chunk, 15 micro-batches"),
    ({"pp": 8, "schedule": "zb-v", "vpp": 4}, 32, "schedule zb-v contradicts vpp 4\n  zb-v needs vpp 2"),
    ({"pp": 8, "schedule": "zb-2p", "vpp": 2}, 32, "schedule zb-2p contradicts vpp 2\n  zb-2p needs vpp 1"),
    ({"pp": 8, "schedule": "interleaved"}, 32, "schedule interleaved contradicts vpp 1"),
    ({"pp": 8, "schedule": "interleaved", "vpp": 2}, 28, "requires a number of micro-batches that the number of ranks"),
    ({"pp": 8, "schedule": "dualpipev"}, 8, "requires at least twice as many micro-batches as ranks; got 8 ranks, 2 "
                                            "chunks, 8 micro-batches"),
    ({"pp": 1, "dp": 8, "schedule": "pipedream"}, 32, "schedule pipedream requires 2 ranks or more; got 1 rank"),
    ({"pp": 8, "schedule": "looped-bfs", "vpp": 8}, 32, "schedule looped-bfs: 64 stages of 32 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "batch", "message"), REFUSED)
def test_an_estimate_says_which_rule_a_plan_breaks(plan: dict[str, Any], batch: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=batch, plan={**plan, "micro_batch": 1})
    assert message in str(caught.value)
    options = [text for key, value in plan.items() for text in (f"--{key}", str(value))]
    shown = CliRunner().invoke(main, ["estimate", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch",
                                     str(batch), "--micro-batch", "1", *options])  # fmt: skip
    assert shown.exit_code == 2 and "Traceback" not in shown.output


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if not row.follows])
def test_a_search_has_plans_of_every_schedule_and_reasons(name: str) -> None:
    row = SCHEDULES[name]
    job = "llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 64 --seq 2048"
    shown = CliRunner().invoke(main, ["plan", *job.split(), "--fix", f"schedule={name}", "--top", "3", "--json"])
    found = json.loads(shown.output)
    assert shown.exit_code == 0 and found["plans"], shown.output
    for each in found["plans"]:
        plan = each["plan"]
        assert row.interleaved_as or plan["schedule"] == name
        assert row.one_rank or plan["pp"] > 1
        assert row.only_chunks in (None, plan["vpp"]) or row.interleaved_as
        again = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=64, seq=2048, plan=plan)
        assert again.step_time_s == pytest.approx(each["step_time_s"], rel=1e-9)
    expected = {rule.name for rule in row.rules if rule.chunks is not None and not row.interleaved_as}
    assert expected | (set() if row.one_rank else {"ranks"}) <= set(found["reasons"])


def test_searched_orders_say_what_stands_for_them() -> None:
    job, plan = full("zb-1p")
    for name, like in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        one, other = (
            api.estimate("gpt3-175b", "dgx-h100", plan={**plan, "schedule": each}, **job) for each in (name, like)
        )
        assert (one.step_time_s, one.peak_memory_bytes) == (other.step_time_s, other.peak_memory_bytes)
        assert any(f"schedule {name}: an approximation" in note and like in note for note in one.notes)
        assert not any("approximation" in note for note in other.notes)


def test_a_schedule_without_closed_forms_is_refused() -> None:
    with pytest.raises(UserError, match="schedule own has no closed form\n  steptime simulate plays it"):
        replace(SCHEDULES["1f1b"], name="own", bubble=None).closed_forms()


def test_reasons_are_the_rules_of_the_row() -> None:
    job = evaluated(SCHEDULES["dualpipe"], Plans(pp=4), 16).job
    for plans, reasons in ((Plans(pp=4), ()), (Plans(pp=3), ("even_ranks",)), (Plans(pp=4, vpp=2), ("one_chunk",)),
                           (Plans(pp=16), ("few_micro_batches",))):  # fmt: skip
        assert names_of(int(broken_rules(replace(job, gpus=int(plans.pp)), plans))) == reasons
