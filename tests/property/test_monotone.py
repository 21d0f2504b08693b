"""No better machine makes a step longer, and no number of an estimate contradicts another.

``python tests/monotone.py --points 10000`` hunts among as many random points as are asked for; here are some of them,
and what was found in the wild.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import monotone
from steptime import api
from steptime.api.jobs import Request
from steptime.estimate.evaluate import Evaluation, evaluate, utilisation
from steptime.estimate.single import Setting
from steptime.estimate.step import critical_stage
from steptime.estimate.work import Pass
from steptime.plan.plans import Plans
from steptime.search.modes import MODES

POINTS = 400


@pytest.mark.slow
def test_no_random_point_contradicts_itself() -> None:
    broken = [each for point in monotone.hunt(POINTS, seed=0) for each in point]
    assert not broken, "\n".join(f"{each.what}: {each.excess:.2g}, {each.where}, {each.plans}" for each in broken[:5])


def setting(model: str, cluster: str, gpus: int, batch: int, **given: object) -> Setting:
    asked = {name: given.pop(name, None) for name in ("seq", "framework", "lora")}
    request = Request(model=model, cluster=cluster, dtype="bf16", optimizer="adam", mode=MODES["corrected"], **asked)
    return request.setting(gpus, batch, given)


def evaluated(job: Setting, plans: Plans) -> Evaluation:
    placed = plans.in_order(job.machine.fast_domain)
    return evaluate(job.method, job.method.strategy("context"), job.job, job.machine, placed)


@pytest.mark.parametrize(
    ("job", "plans", "number", "factors"),
    [
        (("kimi-k2", "h200-nvl-4", 128, 1024), Plans(dp=128, zero=0), "level 2 link_Bps", (1.0, 1.2, 1.26, 1.5, 10.0)),
        (("kimi-k2", "h200-nvl-4", 32, 256), Plans(dp=32, ep=8), "level 2 link_Bps", (1.0, 1.2, 1.26, 1.5, 10.0)),
        (("dinov2-base", "h200-nvl-4", 16, 64), Plans(dp=8, pp=2), "level 1 link_Bps", (0.5, 0.66, 0.7, 0.9, 1.1)),
    ],
)  # fmt: skip
def test_a_level_that_becomes_faster_than_another_slows_no_step(job, plans, number, factors) -> None:
    usual = setting(*job)
    times = [evaluated(monotone.PARAMETERS[number](usual, x), plans).step_time_s for x in factors]
    assert all(fast <= slow * (1 + 1e-12) for slow, fast in pairwise(times))


def test_groups_inside_a_domain_do_not_depend_on_what_lies_outside() -> None:
    """Twice the replicas with twice the batch are no faster: the bridge of a pair is that of two pairs."""
    steps = [evaluated(setting("llama3-8b", "h100-nvl-2", n, 4 * n), Plans(tp=2, dp=n // 2)) for n in (2, 4, 8, 16)]
    assert all(more.step_time_s > less.step_time_s for less, more in pairwise(steps))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_stage_of_dualpipe_is_gathered_for_half_of_the_micro_batches(zero: int) -> None:
    usual = setting("deepseek-v2", "aws-p5", 256, 1024, schedule="dualpipe")
    plans = Plans(dp=64, pp=4, zero=zero)
    times = [evaluated(monotone.PARAMETERS["matrix_flops_per_s"](usual, x), plans) for x in (1.0, 2.0, 4.0)]
    assert all(fast.step_time_s < slow.step_time_s for slow, fast in pairwise(times))
    count, traffic = times[0].step.micro_batches, times[0].inputs
    assert (traffic.gathers, traffic.reductions) == (count / 2 if zero == 3 else 1.0, count / 2)


@pytest.mark.parametrize(
    ("job", "given", "plans"),
    [
        (("megatron-gpt-175b", "rtx3090-8", 34, 544), {"lora": {"rank": 8}, "framework": "ddp"}, {"dp": 34, "zero": 0}),
        (("megatron-gpt-175b", "rtx3090-8", 34, 544), {"lora": {"rank": 8}, "framework": "torchtune"}, {"dp": 34}),
        (("glm4-9b", "aws-g5", 8, 64), {"seq": 16384, "framework": "deepspeed-2021"}, {"dp": 8}),
    ],
)  # fmt: skip
def test_no_step_beats_the_peak(job, given, plans) -> None:
    usual = setting(*job, **given)
    usual = monotone.PARAMETERS["memory_Bps"](usual, 2.0)
    e = evaluated(usual, Plans(micro_batch=4 if "lora" in given else 1, **plans))
    assert 0.8 < utilisation(usual.model_flops, e.step_time_s, usual.job.gpus, usual.machine.peak_flops_per_s) <= 1


def test_attention_in_fewer_bits_counts_against_its_own_peak() -> None:
    usual = setting("llama3-8b", "dgx-h100", 8, 8, attention_dtype="fp8")
    assert usual.machine.peak_flops_per_s == usual.cluster.device.matrix_flops_per_s["fp8"]


def test_twice_the_devices_with_twice_the_batch_need_no_more_memory() -> None:
    """States of experts that tensor ranks replicate: DDP shares them out neither on one replica nor on two."""
    plan = {"tp": 8, "micro_batch": 8}
    one, two = (
        api.estimate("qwen3-30b-a3b", "gh200-nvl2", gpus=n, global_batch=8 * n, framework="ddp", plan=plan)
        for n in (8, 16)
    )
    assert (one.plan["zero"], two.plan["zero"]) == (0, 0) and one.peak_memory_bytes == two.peak_memory_bytes


def test_a_report_says_where_recomputation_saves_copies() -> None:
    plan = {"micro_batch": 64, "offload": ["activations"]}
    none, full = (
        api.estimate("dinov2-giant", "h100", gpus=1, global_batch=64, plan={**plan, "recompute": each})
        for each in ("none", "full")
    )
    assert full.step_time_s < none.step_time_s
    for found in (none, full):
        assert any("it saves copies to the host" in note for note in found.notes)
    slow = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8, plan={"recompute": "full"})
    assert not any("saves copies" in note for note in slow.notes)


def test_one_stage_has_no_bubble_and_one_device_no_exchange() -> None:
    for gpus in (1, 16):
        job = setting("command-r", "l40s-8", gpus, 64, schedule="zb-h2")
        assert evaluated(job, Plans(dp=gpus)).step.bubble_s == 0.0
    alone = api.estimate("mixtral-8x7b", "dgx-h100", gpus=1, global_batch=4, plan={"ep": 2})
    assert not alone.feasible and not alone.time.group("ep_comm")


def test_the_stage_that_makes_the_step_longest_sets_the_pace() -> None:
    """ZB-H2 with nothing left to fill: the last stage's gradients of weights make it slower after all."""
    e = evaluated(setting("command-r", "l40s-8", 16, 64, schedule="zb-h2"), Plans(pp=8, dp=2))
    inputs = replace(e.inputs, first_layers=1, middle_layers=1, last_layers=1, layers=8, filling=14.0, micro_batches=20)
    passes = {
        "layer": Pass(forward_s=2.0, backward_s=4.0, weights_s=2.0),
        "first": Pass(forward_s=1.0, backward_s=2.0, weights_s=1.5),
        "last": Pass(forward_s=1.0, backward_s=3.0, weights_s=3.0),
    }
    counts, stage_s = critical_stage(inputs, passes, 0.0, 0.0)
    assert (stage_s["slowest_stage_s"], counts["last"]) == (10.0, 1.0), (
        "20 x 10 s, longer than 20 x 9 s through the first"
    )
