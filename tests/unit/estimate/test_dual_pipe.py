"""DualPipe: bubble, pairs and activations against the schedule played event by event; memory and traffic by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from event_player import Key, order_of_dual_pipe, played
from explained_terms import tape_of
from steptime import api
from steptime.api.models import load_model
from steptime.cost.experts import dual_paired_share
from steptime.cost.pipeline import dual_pipe_bubble_s, dual_pipe_in_flight, dual_pipe_in_flight_at_ends
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.memory import LAYERS_TERM
from steptime.estimate.single import Setting
from steptime.estimate.step import overlapped_exchanges
from steptime.estimate.traffic import shared_of
from steptime.hardware import load_cluster
from steptime.plan.captured import CAPTURED
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job, with_habits
from steptime.plan.plans import Plans, broken_rules, names_of
from steptime.plan.strategies import CORRECTED

Seconds = dict[str, list[float]]
"""Seconds of the passes of each stage by kind."""
SIZES = [(2, 4), (2, 16), (4, 8), (4, 16), (8, 16), (8, 20), (8, 64), (16, 32), (16, 120)]


def step_s(ranks: int, count: int, seconds: Seconds, saved_s: float, link_s: float = 0.0) -> float:
    """Time of a step whose paired passes take so much less than one after the other.

    ``link_s``: of a message between two passes neither of which has another beside it.
    """
    streams: dict[Key, list[Key]] = {
        r: [(each, r) for each in order_of_dual_pipe(r, ranks, count)] for r in range(ranks)
    }

    def stage(rank: int, way: int) -> int:
        return ranks - 1 - rank if way else rank

    place = {(one, r): key for r, keys in streams.items() for key in keys for one in key[0]}  # type: ignore[index]
    taken: dict[Key, float] = {}
    after: dict[Key, list[Key]] = {}
    for (one, r), key in place.items():
        kind, number, way = one
        s = stage(r, way)
        taken[key] = taken.get(key, 0.0) + seconds[kind][s]
        step, end = (-1, 0) if kind == "F" else (1, ranks - 1)
        if kind != "W" and s != end:
            before = place[one, stage(s + step, way)]
            alone = not any(len({each[0] for each in one_of[0]} & {"F", "B"}) > 1 for one_of in (key, before))  # type: ignore[index]
            taken[one, r], after[one, r] = link_s * alone, [before]
            after.setdefault(key, []).append((one, r))
        elif kind == "B":
            after.setdefault(key, []).append(place[("F", number, way), r])
    for key in {key for keys in streams.values() for key in keys}:
        taken[key] -= saved_s * (len({one[0] for one in key[0]} & {"F", "B"}) - 1) * (len(key[0]) > 1)  # type: ignore[index]
    return max(played(streams, taken, after).values())


def equal(ranks: int, forward: float, inputs: float, weights: float) -> Seconds:
    return {"F": [forward] * ranks, "B": [inputs] * ranks, "W": [weights] * ranks}


def closed_form_s(ranks: int, count: int, seconds: Seconds, saved_s: float) -> float:
    whole = [sum(each) for each in zip(*seconds.values(), strict=True)]
    slowest_s = max((each + mirror) / 2 for each, mirror in zip(whole, reversed(whole), strict=True))
    passes_s = (float(np.mean(seconds[kind])) for kind in ("F", "B", "W"))
    idle_s = dual_pipe_bubble_s(ranks, 1, *passes_s, saved_s, float(np.sum(whole)), slowest_s)
    return float(count * (slowest_s - dual_paired_share(count, ranks) * saved_s) + idle_s)


@pytest.mark.each(("ranks", "count"), SIZES)
@pytest.mark.each("saved_s", [0.0, 0.5, 1.0])
def test_equal_stages(ranks: int, count: int, saved_s: float) -> None:
    """Exact whatever the passes take, unless pairs of unequal passes save something."""
    seconds = equal(ranks, 1.0, 1.0, 1.0)
    assert closed_form_s(ranks, count, seconds, saved_s) == pytest.approx(step_s(ranks, count, seconds, saved_s))
    for uneven in (equal(ranks, 1.0, 1.3, 0.7), equal(ranks, 1.0, 0.7, 1.3), equal(ranks, 0.6, 1.0, 0.9)):
        saved = min(saved_s, 0.5)
        exact_s = step_s(ranks, count, uneven, saved)
        assert closed_form_s(ranks, count, uneven, saved) == pytest.approx(exact_s, rel=0.03 if saved else 1e-12)


@pytest.mark.each(("ranks", "count"), SIZES)
def test_messages_that_fill_and_drain(ranks: int, count: int) -> None:
    """What pairs send or receive hides; of the others 2 (p - 1) show one after the other."""
    plain_s, with_links_s = (step_s(ranks, count, equal(ranks, 1.0, 1.0, 1.0), 0.0, link_s) for link_s in (0.0, 1e-3))
    assert (with_links_s - plain_s) / 1e-3 == pytest.approx(2 * (ranks - 1))


@pytest.mark.each(("ranks", "count"), SIZES)
@pytest.mark.each("head", [-0.5, 0.1, 0.25, 0.5, 1.0])
def test_a_last_stage_that_takes_longer_or_shorter(ranks: int, count: int, head: float) -> None:
    seconds = equal(ranks, 1.0, 1.2, 0.9)
    for each in seconds.values():
        each[-1] *= 1.0 + head
    for saved_s in (0.0, 0.4):
        exact_s = step_s(ranks, count, seconds, saved_s)
        assert closed_form_s(ranks, count, seconds, saved_s) == pytest.approx(exact_s, rel=0.06)


def most_kept(rank: int, ranks: int, count: int, kept: tuple[float, float]) -> float:
    """Most that a rank holds at once where a pass of its own direction keeps so much, and one of the other so much."""
    grows, now, most = {"F": 1, "B": -1, "W": 0}, 0.0, 0.0
    for action in order_of_dual_pipe(rank, ranks, count):
        now += sum(grows[kind] * kept[way != (rank >= ranks // 2)] for kind, _, way in action)
        most = max(most, now)
    return most


@pytest.mark.each(("ranks", "count"), SIZES)
def test_activations_in_flight(ranks: int, count: int) -> None:
    """p + 1 micro-batches between the ends; there p of the first stage, or one less and one of the last."""
    for rank in range(1, ranks - 1):
        held = most_kept(rank, ranks, count, (1.0, 1.0))
        assert held <= float(dual_pipe_in_flight(ranks, count)) == ranks + 1
    assert most_kept(ranks // 2 - 1, ranks, count, (1.0, 1.0)) == ranks + 1
    for first, last in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.0, 0.0)):
        share = first / (first + last)
        held = (first + last) * float(dual_pipe_in_flight_at_ends(ranks, count, share))
        assert most_kept(0, ranks, count, (first, last)) == pytest.approx(held)


def evaluated(schedule: str, plans: Plans, *, batch: int = 64, model: str = "llama3-8b", **changes: Any) -> Evaluation:
    job = Job(model=load_model(model), gpus=int(np.max(plans.ranks)), global_batch=batch, seq_len=2048,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], schedule=schedule)  # fmt: skip
    job = replace(with_habits(job, "megatron-core"), **changes)
    machine = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100")).machine
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine, plans)


def test_the_step_is_the_closed_form() -> None:
    """The ends of the model share a pair of ranks: each has half of the head's work for every micro-batch."""
    e, whole = (evaluated(name, Plans(pp=8)) for name in ("dualpipe", "1f1b"))
    layer, ends_s = e.passes["layer"], float(e.passes["first"].both_s + e.passes["last"].both_s)
    assert float(e.step.steady_s) == pytest.approx(64 * (4 * float(layer.both_s) + ends_s / 2))
    assert float(whole.step.steady_s) > float(e.step.steady_s)
    assert (float(e.step.counts["first"]), float(e.step.counts["last"])) == (0.5, 0.5)
    weights_s = float(32 * layer.weights_s + e.passes["first"].weights_s + e.passes["last"].weights_s) / 8
    backward_s = float(32 * layer.backward_s + e.passes["first"].backward_s + e.passes["last"].backward_s) / 8
    forward_s = float(32 * layer.forward_s + e.passes["first"].forward_s + e.passes["last"].forward_s) / 8
    all_s, slowest_s = 32 * float(layer.both_s) + ends_s, float(e.step.steady_s) / 64
    expected = dual_pipe_bubble_s(8, 1, forward_s, backward_s - weights_s, weights_s, 0.0, all_s, slowest_s)
    assert float(e.step.idle_s) == pytest.approx(float(expected))
    assert float(e.step.filling_messages) == 14 and float(e.step.waited_messages) == 0


def test_messages_show_where_they_are_not_hidden() -> None:
    e = evaluated("dualpipe", Plans(pp=8), overlap=frozenset({"dp"}))
    assert float(e.step.waited_messages) == 128
    assert float(e.step.pipeline_comm_s) == pytest.approx(128 * float(e.step.stage_link_s))


def test_a_rank_holds_two_stages() -> None:
    """Weights and gradients of two stages; states are shared out over twice as many ranks; p + 1 micro-batches."""
    e, whole = (evaluated(name, Plans(pp=8, dp=2, zero=1), batch=128) for name in ("dualpipe", "1f1b"))
    (dual, single) = (
        {stage: {path: float(call.value) for path, call in each.memory[stage].calls().items()} for stage in each.memory}
        for each in (e, whole)
    )
    for term in ("weights/parameter_bytes", "gradients/parameter_bytes"):
        assert dual["first"][term] == pytest.approx(single["first"][term] + single["last"][term])
        assert dual["middle"][term] == pytest.approx(2 * single["middle"][term])
    states = "optimizer/parameter_bytes"
    assert dual["middle"][states] == pytest.approx(single["middle"][states])
    each = single["middle"][LAYERS_TERM] / 7
    assert (dual["first"][LAYERS_TERM], dual["middle"][LAYERS_TERM]) == pytest.approx((8 * each, 9 * each))
    assert not sum(dual["last"].values())


@pytest.mark.parametrize(("inside", "near"), [(8, 2), (4, 1)])
def test_copies_are_near_where_the_pipeline_is(inside: int, near: int) -> None:
    plans = Plans(pp=8, dp=2, in_pp=inside, in_dp=8 // inside)
    (sent,) = shared_of(evaluated("dualpipe", plans, batch=128))["gradients/one_layer"]
    assert sent.group[:2] == (4, 8 // inside * near)


@pytest.mark.parametrize("zero", [0, 3])
def test_both_copies_sum_their_gradients(zero: int) -> None:
    """Of the layers of two stages, over twice the ranks."""
    plans = Plans(pp=4, dp=8, ep=8, zero=zero)
    e, whole = (evaluated(name, plans, model="mixtral-8x7b", batch=512) for name in ("dualpipe", "1f1b"))
    for dual, single in zip(shared_of(e)["gradients/one_layer"], shared_of(whole)["gradients/one_layer"], strict=True):
        assert dual.group[:2] == (2 * single.group[0], single.group[1])
    assert float(tape_of(e).calls["dp_comm/backward"][0].arguments["layers"]) == 16
    assert float(tape_of(whole).calls["dp_comm/backward"][0].arguments["layers"]) == 8


def test_the_exchange_of_experts_hides_without_virtual_stages() -> None:
    plans = Plans(pp=4, dp=8, ep=8)
    e, whole = (evaluated(name, plans, model="mixtral-8x7b", batch=512) for name in ("dualpipe", "1f1b"))
    assert float(e.inputs.paired) == pytest.approx(float(dual_paired_share(64, 4)))
    assert not float(whole.inputs.paired)
    assert float(e.step.stage_s["slowest_stage_s"]) < float(whole.step.stage_s["slowest_stage_s"])
    shown = evaluated("dualpipe", plans, model="mixtral-8x7b", batch=512, overlap=frozenset({"dp"}))
    assert not float(shown.inputs.paired) and float(shown.step.total_s) > float(e.step.total_s)
    states = "expert_optimizer/parameter_bytes"
    dual, single = (float(each.memory["middle"].calls()[states].value) for each in (e, whole))
    assert dual == pytest.approx(single) and dual > 0


def test_the_bubble_has_pairs_that_hide_all_they_can() -> None:
    """Of the pairs that fill and drain the pipeline each hides what one in its middle does."""
    e = evaluated("dualpipe", Plans(pp=4, dp=8, ep=8), model="mixtral-8x7b", batch=512)
    layer, ends = e.passes["layer"], (e.passes["first"], e.passes["last"])
    hidden_s = sum(float(seconds) for seconds in overlapped_exchanges(1.0, layer).values())
    mean_s, forward_s, backward_s, weights_s = (
        (32 * float(of_layer) + sum(map(float, of_ends))) / 4
        for of_layer, of_ends in (
            (layer.both_s, [end.both_s for end in ends]),
            (layer.forward_s, [end.forward_s for end in ends]),
            (layer.backward_s, [end.backward_s for end in ends]),
            (layer.weights_s, [end.weights_s for end in ends]),
        )
    )
    shown_s = mean_s - 8 * float(e.inputs.paired) * hidden_s
    expected = dual_pipe_bubble_s(
        4,
        1,
        forward_s,
        backward_s - weights_s,
        weights_s,
        8 * hidden_s,
        4 * shown_s,
        float(e.step.stage_s["slowest_stage_s"]),
    )
    assert hidden_s > 0 and float(e.step.idle_s) == pytest.approx(float(expected))


def run(plan: Mapping[str, Any], batch: int = 64) -> Any:
    return api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=batch, seq=4096,
                        plan={"schedule": "dualpipe", **plan})  # fmt: skip


@pytest.mark.parametrize(("plan", "batch", "text"), [
    ({"pp": 1}, 64, "requires 2 ranks or more; got 1 rank"),
    ({"pp": 8}, 8, "at least twice as many micro-batches as ranks; got 8 ranks, 1 chunk, 8 micro-batches"),
    ({"pp": 8}, 17, "an even number of micro-batches; got 8 ranks, 1 chunk, 17 micro-batches"),
])  # fmt: skip
def test_what_the_schedule_cannot_serve(plan: dict[str, Any], batch: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        run(plan, batch)


def test_activations_on_the_host_are_not_feasible() -> None:
    found = run({"pp": 4, "offload": ["activations"]})
    assert not found.feasible and found.reasons == ("schedule_offload",)


def test_an_odd_number_of_stages_is_not_feasible() -> None:
    job = evaluated("dualpipe", Plans(pp=4)).job
    for pp, broken in ((2, False), (4, False), (3, True)):
        assert ("even_ranks" in names_of(int(broken_rules(replace(job, gpus=pp), Plans(pp=pp))))) == broken
    assert not broken_rules(replace(job, gpus=3, schedule="1f1b"), Plans(pp=3))


def test_virtual_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="schedule dualpipe contradicts vpp 2"):
        run({"pp": 4, "vpp": 2})


def test_a_report_names_it() -> None:
    report = run({"pp": 8})
    assert report.feasible and report.plan["schedule"] == "dualpipe" and "pp" in report.plan["overlap"]
    assert any(path.endswith("dual_pipe_bubble_s") for path in report.time)
    low, high = report.step_time_bracket_s
    assert 0 < low <= report.step_time_s <= high


def test_a_search_finds_what_the_estimate_says() -> None:
    found = api.plan("llama3-8b", "dgx-h100", gpus=8, global_batch=64, seq=4096, fix={"schedule": "dualpipe"}, top=3)
    assert found.plans and found.reasons["even_ranks"] > 0
    for each in found.plans:
        assert each.plan["pp"] % 2 == 0 and run(each.plan).step_time_s == pytest.approx(each.step_time_s, rel=1e-9)


def test_no_overlap_leaves_factors_of_frameworks_that_hide_nothing() -> None:
    """What the schedule hides is no habit of the framework."""
    plan = {"pp": 4, "tp": 2, "zero": 0, "schedule": "dualpipe"}
    none, usual = (
        api.estimate("llama3-8b", "dgx-a100-80gb", gpus=32, global_batch=256, seq=2048, framework="megatron-2021",
                     plan=plan | changed)
        for changed in ({"overlap": []}, {})
    )  # fmt: skip
    traffic = [
        {path: each for path, each in found.time.items() if path.startswith("tp_comm")} for found in (none, usual)
    ]
    assert traffic[0] and traffic[0] == traffic[1]


def test_explained_copies_add_up() -> None:
    """Of a plan that is not feasible too."""
    found = run({"pp": 4, "offload": ["activations"]})
    (copies,) = (each for each in found.details if each.path == "offload/activations/exposed_copies_s")
    assert "dual_pipe" not in str(copies) and copies.value == found.time[copies.path]


def test_leading_dense_layers_are_of_the_first_stage() -> None:
    """Of three, where the first stage has one layer, the last has none."""
    e = evaluated("dualpipe", Plans(pp=32, dp=8, ep=8), model="deepseek-v3", batch=1024)
    whole = evaluated("1f1b", Plans(pp=32, dp=8, ep=8), model="deepseek-v3", batch=1024)
    weights = "expert_weights/parameter_bytes"
    first, last = (float(whole.memory[each].calls()[weights].value) for each in ("first", "last"))
    assert not first and last > 0 and float(e.memory["first"].calls()[weights].value) == pytest.approx(last)


def test_copies_far_apart_share_far_links() -> None:
    """Tensor traffic inside nodes leaves the links between them to the gradients of both copies."""
    e, near = (evaluated("dualpipe", Plans(tp=tp, in_tp=tp, pp=pp, in_pp=8 // tp)) for tp, pp in ((8, 8), (1, 8)))
    assert (float(e.inputs.shares_near), float(e.inputs.shares_far)) == (0, 1)
    assert (float(near.inputs.shares_near), float(near.inputs.shares_far)) == (1, 0)


def test_captured_modules_have_the_rules_of_schedules() -> None:
    assert {"one_chunk", "two_chunks", "even_ranks", "ranks", "schedule_offload"} <= {
        rule.name for rule in CAPTURED.rules
    }
