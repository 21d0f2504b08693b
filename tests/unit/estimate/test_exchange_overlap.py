"""Exchanges of tokens cross slow links once per place, and hide behind another micro-batch where stages interleave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from explained_terms import lines_of
from steptime.api.jobs import with_choices
from steptime.api.models import load_model
from steptime.cost.experts import once_share, paired_share
from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.explain import step_time_on
from steptime.estimate.ledger import exposed_terms
from steptime.estimate.machine import machine_of
from steptime.estimate.single import Setting
from steptime.estimate.step import overlapped_exchanges
from steptime.hardware.library import load_cluster
from steptime.plan.framework import IDEAL
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.space import Constraint, CorrectedSpace
from steptime.plan.strategies import CORRECTED
from steptime.search.planner import find

PLANS = Plans(pp=4, vpp=2, dp=64, ep=32, in_dp=8)
MODEL = load_model("deepseek-v3")
assert MODEL.experts


def made(plans: Plans = PLANS, **changes: Any) -> Evaluation:
    """DeepSeek-V3 on 256 devices in nodes of 8."""
    job = Job(model=MODEL, gpus=256, global_batch=1024, seq_len=4096,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip
    job = replace(job, **changes)
    machine = machine_of(load_cluster("dgx-h100"), 256, job.precision, lone_rank_has_all_links=True, calibrated=True)
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine, plans)


def links_s(e: Evaluation, phase: str) -> float:
    return float(e.works["layer"][phase].links_s["ep"])


def test_one_copy_per_domain_takes_its_share_of_the_time_of_all_copies() -> None:
    """32 ranks are 4 nodes: 8 of 256 experts lie in 3.6 of them, and the 8 copies of a token become 3.6.

    The 4 of 8 groups of experts that DeepSeek-V3 chooses from lie in 3.1 nodes, so that there are fewer still.
    """
    free = replace(MODEL, experts=replace(MODEL.experts, groups=1, groups_per_token=1))
    every, once, grouped = (
        [t.transfer.size_bytes for time in made(exchange_once=once, model=model).times["layer"] for t in time.transfers
         if t.transfer.axis == "ep"]
        for once, model in ((False, MODEL), (True, free), (True, MODEL))
    )  # fmt: skip
    reached = 4 * (1 - math.comb(192, 8) / math.comb(256, 8))
    assert every and once == pytest.approx([size * reached / 8 for size in every])
    nodes = 4 * (1 - math.comb(6, 4) / math.comb(8, 4))
    elsewhere = 128 - 128 / nodes
    missed = math.prod((elsewhere - drawn) / (128 - drawn) for drawn in range(8))
    assert grouped == pytest.approx([size * nodes * (1 - missed) / 8 for size in every])


def test_the_share_of_places_in_one_domain_and_in_several() -> None:
    one, several = once_share(8, 8, 8, 64), once_share(8, 64, 8, 64)
    assert one == several == pytest.approx(1 - math.comb(56, 8) / math.comb(64, 8))
    both = once_share(8, np.array([8.0, 32.0]), np.array([8.0, 8.0]), 64)
    assert both == pytest.approx([one, once_share(8, 32, 8, 64)])
    assert once_share(4, 4, 1, 16) == pytest.approx(once_share(4, 4, 4, 16))


@pytest.mark.parametrize("experts", [4, 8, 64])
def test_different_experts_of_one_place_each_are_as_many_places(experts: int) -> None:
    """With one expert on each rank every copy goes to another rank, and none is saved."""
    assert once_share(4, experts, experts, experts) == pytest.approx(1.0)


BOTH = frozenset({"dp", "ep"})
SLOW = replace(IDEAL, name="slow", matrix=1.5, narrow=0.8, expert_links=2.0)


def test_what_hides_is_no_longer_than_the_opposite_pass() -> None:
    """With a framework's factors on both; what stays is what an estimate without overlap has, less that."""
    plain, hidden = made(framework=SLOW), made(framework=SLOW, overlap=BOTH)
    layer, share = plain.passes["layer"], paired_share(16, 2, 4)
    assert hidden.passes["layer"] == layer and hidden.inputs.paired == share
    forward, backward = overlapped_exchanges(hidden.inputs.paired, layer).values()
    sent = [SLOW.expert_links * links_s(plain, phase) for phase in ("forward", "backward")]
    assert forward == pytest.approx(share * min(sent[0], layer.backward_s - sent[1]))
    assert backward == pytest.approx(share * min(sent[1], layer.forward_s - sent[0]))
    assert hidden.step.stage_s["slowest_stage_s"] == pytest.approx(
        plain.step.stage_s["slowest_stage_s"] - plain.step.counts["layer"] * (forward + backward)
    )


def test_a_faster_device_is_never_slower() -> None:
    """Each hidden second leaves with the second that hides it, whatever the factors."""
    times = []
    for factor in (1.0, 1.3, 2.0, 8.0):
        e = made(framework=SLOW, overlap=BOTH)
        times.append(step_time_on(e, e.machine.faster(matrix_flops_per_s=factor, memory_Bps=factor)))
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_few_micro_batches_pair_few_passes() -> None:
    assert paired_share(4, 4, 4) < 0.07 < 0.9 < paired_share(64, 4, 4)
    assert np.array_equal(paired_share(8, np.array([1.0, 4.0]), 4), [0.0, paired_share(8, 4, 4)])


def test_recomputed_layers_are_not_paired() -> None:
    full = replace(PLANS, recompute=RECOMPUTE_CODES["full"])
    assert made(full, overlap=BOTH).step_time_s == made(full).step_time_s
    part = replace(PLANS, recompute=RECOMPUTE_CODES["experts"])
    assert made(part, overlap=BOTH).step_time_s < made(part).step_time_s


def test_nothing_hides_without_virtual_stages() -> None:
    flat = replace(PLANS, vpp=1)
    assert made(flat, overlap=BOTH).step_time_s == made(flat).step_time_s


def test_a_block_of_plans_is_each_plan_and_the_ledger_adds_up() -> None:
    overlap = frozenset({"dp", "ep"})
    block = made(replace(PLANS, vpp=np.array([1.0, 2.0])), overlap=overlap, exchange_once=True)
    for row, vpp in enumerate((1, 2)):
        one = made(replace(PLANS, vpp=vpp), overlap=overlap, exchange_once=True)
        assert block.step_time_s[row] == pytest.approx(float(one.step_time_s), rel=1e-12)
        assert sum(exposed_terms(lines_of(one)).values()) == pytest.approx(float(one.step_time_s), rel=1e-9)


def test_only_models_with_experts_have_an_exchange_to_hide() -> None:
    dense = made(overlap=BOTH).job
    dense = replace(dense, model=load_model("llama3-8b"))
    with pytest.raises(UserError, match="overlap ep: llama3-8b has no experts"):
        with_choices(dense, {"overlap": BOTH})


def test_what_hides_is_named() -> None:
    """The hidden part is a line of its own formula, and no part of the sum."""
    e = made(overlap=BOTH)
    lines = [line for line in lines_of(e) if line.path.endswith("hidden_exchange_s")]
    assert [line.path.split("/")[1] for line in lines] == ["forward", "backward"]
    shown = sum(line.hidden_s for line in lines_of(e) if line.path.startswith("ep_comm"))
    assert sum(line.part_s for line in lines) == pytest.approx(shown) and shown > 0


def test_a_report_of_narrow_products_adds_up() -> None:
    e = made(framework=SLOW, precision=PRECISIONS["mxfp8"])
    assert sum(exposed_terms(lines_of(e)).values()) == pytest.approx(float(e.step_time_s), rel=1e-9)
    assert e.works["layer"]["forward"].narrow_s > 0


def test_the_search_hides_what_an_estimate_hides() -> None:
    model = replace(load_model("deepseek-v3"), layers=64)
    job = made(model=model, overlap=BOTH, exchange_once=True).job
    cluster = load_cluster("dgx-h100")
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=1e13))
    setting = Setting(method=CORRECTED, job=job, cluster=roomy)
    fixed = {"pp": 16, "tp": 1, "cp": 1, "micro_batch": 1, "recompute": 0}
    rules = tuple(Constraint(column=column, relation="=", value=value) for column, value in fixed.items())
    (found,) = find(setting, CorrectedSpace(), {"1d": rules}, top=10**4)
    seen = set()
    for row in range(0, found.feasible, max(1, found.feasible // 40)):
        plans = found.best.row(row)
        e = evaluate(CORRECTED, CORRECTED.strategies["1d"], job, setting.machine, plans)
        assert float(e.step_time_s) == pytest.approx(float(found.best_s[row]), rel=1e-9)
        seen.add((plans.vpp > 1, plans.ep > plans.inside("ep")))
    assert (True, True) in seen and (False, True) in seen
