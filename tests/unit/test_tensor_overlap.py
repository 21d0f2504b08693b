"""Transfers over ``tp`` that run beside their products, shard by shard of the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime.cost.collective import ring_behind_share
from steptime.estimate.bracket import bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import PhaseTime
from steptime.estimate.machine import machine_of
from steptime.hardware.library import load_cluster
from steptime.plan.corrected import CORRECTED
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.study.doctor.records import Stated
from steptime.study.doctor.stated import merged
from steptime.surface.models import load_model

HIDES = frozenset({"tp"})


def made(model: str = "llama3-70b", plans: Plans | None = None, **changes: Any) -> Evaluation:
    """A model on 16 GPUs, tp 8 unless told otherwise; ``cluster``: where."""
    machine_name = changes.pop("cluster", "dgx-h100")
    job = Job(model=load_model(model), gpus=16, global_batch=16, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    job = replace(job, **changes)
    machine = machine_of(load_cluster(machine_name), 16, job.precision, lone_rank_has_all_links=True, calibrated=True)
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine, plans or Plans(tp=8, dp=2, in_tp=8))


def sending(e: Evaluation, part: str = "layer") -> dict[tuple[str, str], PhaseTime]:
    """Rows with transfers over tp, by name and phase."""
    return {
        (time.row.name, time.phase): time
        for time in e.times[part] if any(t.transfer.axis == "tp" for t in time.transfers)
    }  # fmt: skip


@pytest.mark.parametrize("cluster", ["dgx-h100", "a100-pcie-8"])
def test_a_product_hides_what_seven_of_its_eight_shards_cover(cluster: str) -> None:
    shown, hidden = (sending(made(cluster=cluster, overlap=o)) for o in (frozenset[str](), HIDES))
    assert {name for name, _ in hidden} == {"qkv", "attention_out", "mlp_in", "mlp_out"}
    for key, time in hidden.items():
        sent_s = sum(t.busy_s for t in time.transfers)
        covered_s = (time.compute_s + time.exposed_memory_s) * 7 / 8
        assert sum(t.exposed_s for t in time.transfers) == pytest.approx(max(sent_s - covered_s, 0.0), abs=1e-12), key
        assert sum(t.exposed_s for t in shown[key].transfers) == sent_s > 0
        assert time.compute_s == shown[key].compute_s
    left = {name for (name, _), time in hidden.items() if sum(t.exposed_s for t in time.transfers) > 1e-12}
    narrow = {"qkv", "attention_out"}
    assert left == (narrow if cluster == "dgx-h100" else narrow | {"mlp_in", "mlp_out"}), "what the links keep up with"


def test_what_a_ring_of_one_covers() -> None:
    """A ring of one rank sends nothing; of two, half of the operator runs beside the other's shard."""
    assert ring_behind_share(np.array([1, 2, 8])).tolist() == [0.0, 0.5, 0.875]


def test_without_sequence_shards_sums_of_whole_outputs_wait() -> None:
    plans = Plans(tp=8, dp=2, in_tp=8, sp=0)
    for time in sending(made(plans=plans, overlap=HIDES)).values():
        assert all(t.exposed_s == t.busy_s > 0 for t in time.transfers)


def test_nothing_hides_where_the_ranks_reach_over_several_domains() -> None:
    for plans in (Plans(tp=16, in_tp=8), Plans(tp=8, dp=2, in_tp=4, in_dp=2)):
        assert all(t.exposed_s == t.busy_s for time in sending(made(plans=plans, overlap=HIDES)).values()
                   for t in time.transfers if t.transfer.axis == "tp")  # fmt: skip
    both = Plans(tp=8, dp=2, in_tp=np.array([4, 8]), in_dp=np.array([2, 1]))
    shown = sum(t.exposed_s for time in sending(made(plans=both, overlap=HIDES)).values() for t in time.transfers)
    far, near = made(plans=both.row(0), overlap=HIDES), made(plans=both.row(1), overlap=HIDES)
    for i, e in enumerate((far, near)):
        own = sum(t.exposed_s for time in sending(e).values() for t in time.transfers)
        assert shown[i] == pytest.approx(own, rel=1e-12)  # type: ignore[index]


def test_experts_and_the_head_wait_for_their_transfers() -> None:
    e = made("llama4-scout", overlap=HIDES)
    for part in ("layer", "first", "last"):
        for (name, _), time in sending(e, part).items():
            waits = time.row.block not in ("attention", "mlp")
            sent_s, shown_s = (sum(getattr(t, each) for t in time.transfers) for each in ("busy_s", "exposed_s"))
            assert (shown_s == sent_s) == waits and sent_s > 0, name
    assert {"shared_in", "shared_out"} <= {name for name, _ in sending(e)} and sending(e, "last")


def test_the_bracket_does_not_depend_on_the_choice() -> None:
    """Its ends are those of any overlap; the estimate moves between them."""
    shown, hidden = (made(overlap=o) for o in (frozenset[str](), HIDES))
    assert bracket_s(shown) == pytest.approx(bracket_s(hidden), rel=1e-12)
    assert bracket_s(hidden)[0] < hidden.step.total_s < shown.step.total_s <= bracket_s(shown)[1]


@pytest.mark.parametrize(("flag", "overlap"), [("True", "dp,ep,tp"), ("False", "dp,ep"), (None, None)])
def test_a_log_says_whether_products_hide_their_transfers(flag: str | None, overlap: str | None) -> None:
    flags = {} if flag is None else {"tp_comm_overlap": flag}
    job = merged({}, {}, Stated(framework="megatron-core", flags=flags), experts=True)
    assert job.plan.get("overlap") == overlap
    older = merged({}, {}, Stated(framework="megatron-core", flags=flags, plan={"overlap": "dp"}), experts=True)
    assert older.plan["overlap"] == ("dp,ep,tp" if flag == "True" else "dp,ep"), "arguments without it cannot hide tp"
