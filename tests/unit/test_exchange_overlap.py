"""Exchanges of tokens cross slow links once per place, and hide behind another micro-batch where stages interleave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime.cost.experts import once_share
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.exchange_overlap import hides_exchange
from steptime.estimate.machine import machine_of
from steptime.estimate.single import Setting
from steptime.estimate.terms_of import exposed_terms, lines_of
from steptime.hardware.library import load_cluster
from steptime.plan.constraints import Constraint
from steptime.plan.corrected import CORRECTED
from steptime.plan.corrected_space import CorrectedSpace
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.search.planner import find
from steptime.surface.models import load_model

PLANS = Plans(pp=4, vpp=2, dp=64, ep=32, in_dp=8)


def made(plans: Plans = PLANS, **changes: Any) -> Evaluation:
    """DeepSeek-V3 on 256 devices in nodes of 8."""
    job = Job(model=load_model("deepseek-v3"), gpus=256, global_batch=1024, seq_len=4096,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip
    job = replace(job, **changes)
    machine = machine_of(load_cluster("dgx-h100"), 256, job.precision, lone_rank_has_all_links=True, calibrated=True)
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine, plans)


def links_s(e: Evaluation, phase: str) -> float:
    return float(e.works["layer"][phase].links_s["ep"])


def test_one_copy_per_domain_takes_its_share_of_the_time_of_all_copies() -> None:
    """32 ranks are 4 nodes: 8 experts of a token lie in 3.6 of them, and its 8 copies become 3.6."""
    sizes = [
        [t.transfer.size_bytes for time in made(exchange_once=once).times["layer"] for t in time.transfers
         if t.transfer.axis == "ep"]
        for once in (False, True)
    ]  # fmt: skip
    assert sizes[0] and sizes[1] == pytest.approx([size * 4 * (1 - 0.75**8) / 8 for size in sizes[0]])


def test_the_share_of_places_in_one_domain_and_in_several() -> None:
    one, several = once_share(8, 8, 8), once_share(8, 64, 8)
    assert one == several == pytest.approx(1 - (7 / 8) ** 8)
    both = once_share(8, np.array([8.0, 32.0]), np.array([8.0, 8.0]))
    assert both == pytest.approx([one, once_share(8, 32, 8)])
    assert once_share(4, 4, 1) == pytest.approx(once_share(4, 4, 4))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_shows_is_longer_than_the_opposite_pass(phase: str) -> None:
    plain, hidden = made(), made(overlap=frozenset({"dp", "ep"}))
    other = plain.works["layer"]["backward" if phase == "forward" else "forward"]
    behind = float(other.matrix_s + other.attention_s + other.vector_s)
    assert links_s(hidden, phase) == pytest.approx(max(0.0, links_s(plain, phase) - behind))
    assert links_s(plain, phase) > 0


def test_nothing_hides_without_virtual_stages() -> None:
    flat = replace(PLANS, vpp=1)
    assert made(flat, overlap=frozenset({"dp", "ep"})).step_time_s == made(flat).step_time_s


def test_a_block_of_plans_is_each_plan_and_the_ledger_adds_up() -> None:
    overlap = frozenset({"dp", "ep"})
    block = made(replace(PLANS, vpp=np.array([1.0, 2.0])), overlap=overlap, exchange_once=True)
    for row, vpp in enumerate((1, 2)):
        one = made(replace(PLANS, vpp=vpp), overlap=overlap, exchange_once=True)
        assert block.step_time_s[row] == pytest.approx(float(one.step_time_s), rel=1e-12)
        assert sum(exposed_terms(lines_of(one)).values()) == pytest.approx(float(one.step_time_s), rel=1e-9)


def test_only_models_with_experts_have_an_exchange_to_hide() -> None:
    e = made(overlap=frozenset({"dp", "ep"}))
    assert hides_exchange(e.job) and not hides_exchange(replace(e.job, model=load_model("llama3-8b")))


def test_the_search_hides_what_an_estimate_hides() -> None:
    """Shapes are told apart by virtual stages, and their placements share no work where exchanges hide behind it."""
    model = replace(load_model("deepseek-v3"), layers=64)
    job = made(model=model, overlap=frozenset({"dp", "ep"}), exchange_once=True).job
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
