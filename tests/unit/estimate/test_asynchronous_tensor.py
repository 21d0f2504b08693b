"""Backward transfers over ``tp`` of products that gather their input: each beside one product of gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_tensor_overlap import HIDES, made, sending

from steptime.estimate.band import bracket_s
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import BACKWARD, PhaseTime, exposed_transfers_s
from steptime.plan.job import Adapter, with_habits
from steptime.plan.plans import Plans

WHOLE = Plans(tp=8, dp=2, in_tp=8, sp=0)
GATHERING = {"qkv", "mlp_in"}
SLOW = "a100-pcie-8"


def _backward(e: Evaluation) -> dict[str, PhaseTime]:
    return {name: time for (name, phase), time in sending(e).items() if phase == BACKWARD}


def _own_s(time: PhaseTime) -> float:
    return float(time.compute_s + time.exposed_memory_s)


@pytest.mark.parametrize("cluster", ["dgx-h100", SLOW])
def test_with_sequence_shards_both_transfers_have_a_product_each(cluster: str) -> None:
    for name, time in _backward(made(cluster=cluster, asynchronous_tp=True)).items():
        gathered = {t.transfer.collective: float(t.busy_s) for t in time.transfers}
        if name not in GATHERING:
            assert list(exposed_transfers_s(time)) == list(gathered.values()), (
                "of its output's gradient, which it waits for"
            )
            continue
        half_s = _own_s(time) / 2
        assert gathered["all_gather"] == pytest.approx(gathered["reduce_scatter"], rel=0.02), "so that one pool will do"
        assert sum(exposed_transfers_s(time)) == pytest.approx(
            sum(max(s - half_s, 0.0) for s in gathered.values()), rel=0.02
        )


@pytest.mark.parametrize("cluster", ["dgx-h100", SLOW])
def test_without_them_the_sum_runs_beside_the_gradient_of_the_weights(cluster: str) -> None:
    found = _backward(made(cluster=cluster, plans=WHOLE, asynchronous_tp=True))
    assert found.keys() == GATHERING
    for time in found.values():
        (summed,) = time.transfers
        assert sum(exposed_transfers_s(time)) == pytest.approx(max(float(summed.busy_s) - _own_s(time) / 2, 0.0))
    assert (sum(exposed_transfers_s(found["mlp_in"])) > 0) == (cluster == SLOW)


def test_forward_everything_waits() -> None:
    for (_, phase), time in sending(made(asynchronous_tp=True)).items():
        if phase != BACKWARD:
            assert list(exposed_transfers_s(time)) == [t.busy_s for t in time.transfers]


def test_what_is_computed_again_waits_as_before() -> None:
    saved = []
    for plans in (WHOLE, replace(WHOLE, recompute=2)):
        shown, hidden = (made(plans=plans, asynchronous_tp=on).step.total_s for on in (False, True))
        saved.append(shown - hidden)
    assert saved[0] == pytest.approx(saved[1], rel=1e-9) and saved[0] > 0


def test_frozen_weights_have_one_product_and_a_split_pass_has_none_at_hand() -> None:
    frozen = {"adapter": Adapter(rank=16, targets="linear")}
    for changes in (frozen, {"schedule": "zb-h1"}):
        shown, hidden = (made(plans=WHOLE, asynchronous_tp=on, **changes) for on in (False, True))
        assert hidden.step.total_s == shown.step.total_s


@pytest.mark.parametrize(
    "plans", [Plans(tp=8, dp=2, in_tp=8), WHOLE, Plans(tp=16, in_tp=8), Plans(tp=16, in_tp=8, sp=0)]
)
def test_the_ring_of_overlap_tp_adds_to_it_where_it_can(plans: Plans) -> None:
    ring, alone = made(plans=plans, overlap=HIDES), made(plans=plans, asynchronous_tp=True)
    both = made(plans=plans, overlap=HIDES, asynchronous_tp=True)
    assert both.step.total_s <= min(ring.step.total_s, alone.step.total_s)
    rings = plans.sp and plans.tp == 8
    assert (both.step.total_s < alone.step.total_s) == bool(rings), "elsewhere there is no ring"


def test_ranks_may_reach_over_several_domains() -> None:
    far = Plans(tp=16, in_tp=8)
    shown, hidden = (made(plans=far, asynchronous_tp=on) for on in (False, True))
    assert hidden.step.total_s < shown.step.total_s


def test_plans_of_one_table_hide_as_each_alone() -> None:
    many = Plans(tp=8, dp=2, in_tp=8, sp=np.array([0, 1]))
    both = made(plans=many, asynchronous_tp=True).step.total_s
    alone = [made(plans=many.row(i), asynchronous_tp=True).step.total_s for i in (0, 1)]
    assert both == pytest.approx(alone, rel=1e-12)


def test_the_bracket_does_not_depend_on_it() -> None:
    shown, hidden = (made(asynchronous_tp=on) for on in (False, True))
    assert bracket_s(shown) == pytest.approx(bracket_s(hidden), rel=1e-12)
    assert bracket_s(hidden)[0] < hidden.step.total_s < shown.step.total_s


def test_megatron_has_it_since_the_end_of_2021() -> None:
    job = made().job
    has = {name: with_habits(job, name).asynchronous_tp for name in ("megatron", "megatron-2021", "megatron-core")}
    assert has == {"megatron": True, "megatron-2021": False, "megatron-core": False}
