"""Transfers over ``tp`` that run beside their products, shard by shard of the sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from steptime.api.models import load_model
from steptime.cost.collective import ring_behind_share
from steptime.doctor.records import Stated
from steptime.doctor.stated import merged
from steptime.estimate.band import bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate, passes_of
from steptime.estimate.layer import PhaseTime, exposed_transfers_s
from steptime.estimate.machine import machine_of
from steptime.estimate.work import stacked
from steptime.hardware.library import load_cluster
from steptime.plan.framework import IDEAL, Framework
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

HIDES = frozenset({"tp"})


def made(model: str = "llama3-70b", plans: Plans | None = None, **changes: Any) -> Evaluation:
    """A model on 16 GPUs, tp 8 unless told otherwise; ``cluster``: where; ``rate``: of products by a roofline."""
    machine_name, strategy = changes.pop("cluster", "dgx-h100"), changes.pop("strategy", "1d")
    rate = changes.pop("rate", None)
    job = Job(model=load_model(model), gpus=16, global_batch=16, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    job = replace(job, **changes)
    machine = machine_of(load_cluster(machine_name), 16, job.precision, lone_rank_has_all_links=True, calibrated=True)
    if rate is not None:
        machine = replace(machine, models={}, matrix_flops_per_s=machine.matrix_flops_per_s * rate)
    return evaluate(CORRECTED, CORRECTED.strategies[strategy], job, machine, plans or Plans(tp=8, dp=2, in_tp=8))


SENDING = {"qkv", "attention_out", "mlp_in", "mlp_out"}
"""Products whose input or output travels over tp."""


def sending(e: Evaluation, part: str = "layer") -> dict[tuple[str, str], PhaseTime]:
    """Rows with transfers over tp, by name and phase."""
    return {
        (time.row.name, time.phase): time
        for time in e.times[part] if any(t.transfer.axis == "tp" for t in time.transfers)
    }  # fmt: skip


@pytest.mark.parametrize("cluster", ["dgx-h100", "a100-pcie-8"])
def test_a_product_hides_what_seven_of_its_eight_shards_cover(cluster: str) -> None:
    shown, hidden = (sending(made(cluster=cluster, overlap=o)) for o in (frozenset[str](), HIDES))
    assert {name for name, _ in hidden} == SENDING
    for key, time in hidden.items():
        sent_s = sum(t.busy_s for t in time.transfers)
        covered_s = (time.compute_s + time.exposed_memory_s) * 7 / 8
        assert sum(exposed_transfers_s(time)) == pytest.approx(max(sent_s - covered_s, 0.0), abs=1e-12), key
        assert sum(exposed_transfers_s(shown[key])) == sent_s > 0
        assert time.compute_s == shown[key].compute_s
    left = {name for (name, _), time in hidden.items() if sum(exposed_transfers_s(time)) > 1e-12}
    narrow = {"qkv", "attention_out"}
    assert left == (narrow if cluster == "dgx-h100" else narrow | {"mlp_in", "mlp_out"}), "what the links keep up with"


def test_what_a_ring_of_one_covers() -> None:
    """A ring of one rank sends nothing; of two, half of the operator runs beside the other's shard."""
    assert ring_behind_share(np.array([1, 2, 8])).tolist() == [0.0, 0.5, 0.875]


def test_without_sequence_shards_sums_of_whole_outputs_wait() -> None:
    plans = Plans(tp=8, dp=2, in_tp=8, sp=0)
    for time in sending(made(plans=plans, overlap=HIDES)).values():
        assert list(exposed_transfers_s(time)) == [t.busy_s for t in time.transfers] != []


def test_nothing_hides_where_the_ranks_reach_over_several_domains() -> None:
    for plans in (Plans(tp=16, in_tp=8), Plans(tp=8, dp=2, in_tp=4, in_dp=2)):
        for time in sending(made(plans=plans, overlap=HIDES)).values():
            assert list(exposed_transfers_s(time)) == [t.busy_s for t in time.transfers]
    both = Plans(tp=8, dp=2, in_tp=np.array([4, 8]), in_dp=np.array([2, 1]))
    shown = sum(sum(exposed_transfers_s(time)) for time in sending(made(plans=both, overlap=HIDES)).values())
    far, near = made(plans=both.row(0), overlap=HIDES), made(plans=both.row(1), overlap=HIDES)
    for i, e in enumerate((far, near)):
        own = sum(sum(exposed_transfers_s(time)) for time in sending(e).values())
        assert shown[i] == pytest.approx(own, rel=1e-12)  # type: ignore[index]


def test_experts_and_the_head_wait_for_their_transfers() -> None:
    e = made("llama4-scout", overlap=HIDES)
    for part in ("layer", "first", "last"):
        for (name, _), time in sending(e, part).items():
            waits = time.row.block not in ("attention", "mlp")
            sent_s = sum(t.busy_s for t in time.transfers)
            assert (sum(exposed_transfers_s(time)) == sent_s) == waits and sent_s > 0, name
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


@pytest.mark.parametrize(
    ("strategy", "plans"),
    [("1d", Plans(tp=8, dp=2, in_tp=8)), ("2d", Plans(tp=4, tp2=2, dp=2, in_tp=4, in_tp2=2, panels=4))],
)
@pytest.mark.parametrize("framework", [IDEAL, Framework(tensor_links=5.0, matrix=1.3), Framework(tensor_links=0.4)])
def test_a_faster_product_never_makes_a_step_slower(strategy: str, plans: Plans, framework: Framework) -> None:
    """A framework's factor is on the whole transfer, and what hides it is the product as the framework has it."""
    times = [
        float(made(plans=plans, overlap=HIDES, framework=framework, strategy=strategy, rate=rate).step.total_s)
        for rate in (0.25, 0.5, 1.0, 2.0)
    ]
    assert all(slower >= faster * (1 - 1e-12) for slower, faster in pairwise(times)), times


@pytest.mark.parametrize(("links", "matrix"), [(1.0, 1.0), (5.0, 1.0), (5.0, 4.0), (0.5, 1.0)])
def test_a_framework_slows_transfers_and_what_hides_them(links: float, matrix: float) -> None:
    e = made(overlap=HIDES, framework=Framework(tensor_links=links, matrix=matrix))
    own_s = shown_all_s = 0.0
    for time in e.times["layer"]:
        own_s += float(time.own_s) * (matrix if time.row.operator == "matmul" else 1.0)
        sent_s = links * sum(float(t.busy_s) for t in time.transfers)
        hides_s = float(time.own_s) * matrix * 7 / 8 if time.row.name in SENDING else 0.0
        shown_all_s += max(sent_s - hides_s, 0.0)
    assert float(e.passes["layer"].both_s) == pytest.approx(own_s + shown_all_s, rel=1e-9)


def test_jobs_in_several_formats_are_costed_as_one_as_they_are_alone() -> None:
    """The same row is narrow in one of them, and overlaps its transfers once."""
    each = [made(overlap=HIDES, precision=PRECISIONS[name]) for name in ("bf16", "fp8")]
    framework = Framework(matrix=1.1, narrow=1.2, tensor_links=1.3)
    both = passes_of(stacked([e.works for e in each]), framework)["layer"]
    for i, e in enumerate(each):
        alone = passes_of(e.works, framework)["layer"]
        assert both.forward_s[i] == pytest.approx(float(alone.forward_s), rel=1e-12)
        assert both.backward_s[i] == pytest.approx(float(alone.backward_s), rel=1e-12)
