"""Activations on the host: what stays on the device, and what their copies cost, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from explained_terms import lines_of, tape_of
from steptime import api
from steptime.api.models import load_model
from steptime.estimate.band import bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.ledger import exposed_terms, hidden_terms
from steptime.estimate.memory import LAYERS_TERM, stage_terms
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans
from steptime.plan.strategies import CORRECTED

STRATEGY = CORRECTED.strategies["1d"]
TERM = "offload/activations/exposed_copies_s"
HIDDEN, SHOWN = frozenset({"dp", "offload"}), frozenset({"dp"})


def evaluated(plans: Plans, *, offload: bool = True, overlap: frozenset[str] = HIDDEN, **changes: Any) -> Evaluation:
    kept = frozenset({"activations"}) if offload else frozenset()
    job = Job(model=load_model("llama3-8b"), gpus=int(np.max(plans.ranks)), global_batch=64, seq_len=8192,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], offload=kept, overlap=overlap)  # fmt: skip
    job = replace(job, **changes)
    return evaluate(
        CORRECTED, STRATEGY, job, Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100")).machine, plans
    )


def test_two_layers_of_one_micro_batch_stay_on_the_device() -> None:
    for plans, in_flight in ((Plans(dp=8), 1), (Plans(pp=4, dp=2), 4)):
        away, here = evaluated(plans), evaluated(plans, offload=False)
        layers = 32 // int(plans.pp)
        terms = [stage_terms(e, "first")[LAYERS_TERM] for e in (away, here)]
        assert terms[1] == here.sizes.layer.kept_bytes * layers * in_flight
        assert terms[0] == away.sizes.layer.kept_bytes * 2


@pytest.mark.parametrize("recompute", [0, FULL_RECOMPUTE])
def test_copies_in_full_view(recompute: int) -> None:
    """Every layer's activations go down and up once per micro-batch, at the rate of the host link."""
    e = evaluated(Plans(dp=8, recompute=recompute), overlap=SHOWN)
    kept = e.sizes.boundary_bytes if recompute else e.sizes.layer.kept_bytes
    assert float(e.step.copies_s) == pytest.approx(2 * 8 * 32 * kept / e.machine.host_Bps)
    without = evaluated(Plans(dp=8, recompute=recompute), offload=False)
    shown = float(sum(without.step.data_s.values()) - sum(e.step.data_s.values()))
    assert float(e.step_time_s - without.step_time_s) == pytest.approx(float(e.step.copies_s) - shown)
    assert shown > 0


def test_traffic_hides_behind_copies_too() -> None:
    """A layer's pass lasts as long as its copy where that takes longer."""
    e = evaluated(Plans(dp=8, zero=3))
    forward_s = float(e.passes["layer"].forward_s)
    whole = evaluated(Plans(dp=8, zero=3), offload=False)
    behind, own = (tape_of(each).calls["dp_comm/forward"][0].arguments["behind_s"] for each in (e, whole))
    assert behind == pytest.approx(e.sizes.layer.kept_bytes / e.machine.host_Bps) and behind > forward_s
    assert own == forward_s


def test_copies_hide_behind_the_layer_as_far_as_they_fit() -> None:
    e = evaluated(Plans(dp=8))
    layer, copy_s = e.passes["layer"], e.sizes.layer.kept_bytes / e.machine.host_Bps
    assert copy_s > layer.backward_s > layer.forward_s
    assert float(e.step.copies_s) == pytest.approx(8 * 32 * (2 * copy_s - layer.forward_s - layer.backward_s))
    full = evaluated(Plans(dp=8, recompute=FULL_RECOMPUTE))
    assert full.sizes.boundary_bytes / full.machine.host_Bps < full.passes["layer"].forward_s
    assert full.step.copies_s == 0


def test_the_pipeline_waits_too_while_it_fills_and_drains() -> None:
    e = evaluated(Plans(pp=4, dp=2), overlap=SHOWN)
    one_layer_s = 2 * e.sizes.layer.kept_bytes / e.machine.host_Bps
    assert float(e.step.copies_s) == pytest.approx((32 * 8 + 3 * 8) * one_layer_s)


@pytest.mark.each("overlap", [HIDDEN, SHOWN])
@pytest.mark.each("plans", [Plans(dp=8), Plans(pp=4, dp=2), Plans(tp=8, recompute=2), Plans(dp=8, recompute=4)])
def test_terms_add_up_and_the_bracket_holds(plans: Plans, overlap: frozenset[str]) -> None:
    e = evaluated(plans, overlap=overlap)
    lines = lines_of(e)
    assert exposed_terms(lines).total == pytest.approx(float(e.step_time_s), rel=1e-12)
    both = exposed_terms(lines).get(TERM, 0.0) + hidden_terms(lines).get(TERM, 0.0)
    assert both >= float(e.step.copies_busy_s) * (1 - 1e-12) > 0
    if plans.pp == 1:
        assert both == pytest.approx(float(e.step.copies_busy_s)), "what is seen and what hides is what is copied"
    low, high = bracket_s(e)
    assert e.machine.bound is not None
    fastest_s = float(e.step.copies_busy_s) * e.machine.host_Bps / e.machine.bound.host_Bps
    assert fastest_s / 2 <= low <= e.step_time_s <= high


def test_a_block_of_plans_is_each_of_them() -> None:
    columns = {"dp": np.array([8.0, 2.0]), "pp": np.array([1.0, 4.0]), "recompute": np.array([2.0, 0.0])}
    both = evaluated(Plans(**columns))
    for i, plans in enumerate((Plans(dp=8, recompute=2), Plans(dp=2, pp=4))):
        one = evaluated(plans)
        assert np.broadcast_to(both.step.copies_s, 2)[i] == pytest.approx(float(one.step.copies_s), rel=1e-12)
        assert both.peak_bytes[i] == pytest.approx(float(one.peak_bytes), rel=1e-12)


def test_copies_overlap_unless_the_user_says_otherwise() -> None:
    def run(**plan: Any) -> Any:
        return api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=64, plan={"recompute": "full", **plan})

    assert run(offload="activations").plan["overlap"] == ["dp", "offload"]
    assert run().plan["overlap"] == ["dp"] == run(offload="optimizer").plan["overlap"]
    shown, none = run(offload="activations", overlap="dp"), run(offload="activations", overlap="none")
    assert shown.plan["overlap"] == ["dp"] and none.plan["overlap"] == []
    assert shown.time[TERM] > run(offload="activations").time.get(TERM, 0.0)
    assert TERM not in run().time


def on_link(tmp_path: Path, link: str, **plan: Any) -> Any:
    path = tmp_path / "rig.toml"
    path.write_text(f'base = "dgx-h100"\n[device]\n{link}\n', encoding="utf-8")
    return api.estimate("llama3-8b", str(path), gpus=1, global_batch=8, plan=plan)


def test_the_link_to_the_host_is_the_users(tmp_path: Path) -> None:
    """Twice the rate, whether by the link or by the share of it that is sustained, halves what the copies take."""
    slow, fast, better = (
        on_link(tmp_path, text, offload="activations", overlap="none").time[TERM]
        for text in (
            'host_bandwidth = "50 GB/s"\nhost_efficiency = 0.4',
            'host_bandwidth = "100 GB/s"\nhost_efficiency = 0.4',
            'host_bandwidth = "50 GB/s"\nhost_efficiency = 0.8',
        )
    )
    assert slow == pytest.approx(2 * fast) == pytest.approx(2 * better)


def test_the_optimiser_on_the_host_moves_over_the_same_link(tmp_path: Path) -> None:
    """Gradients of 2 bytes go down, weights of 2 come back: 4 bytes of each of 8.03 billion parameters."""
    half, one = (
        on_link(tmp_path, f'host_bandwidth = "{rate} GB/s"\nhost_efficiency = 1.0', offload="optimizer", zero=0)
        for rate in (1, 2)
    )
    moved_s = (half.time["optimizer/host_adam_s"] - one.time["optimizer/host_adam_s"]) * 2
    assert moved_s == pytest.approx(4 * 8030261248 / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("cluster", "gpus", "ranks"),
    [("dgx-h100", 8, 8), ("dgx-h100", 4, 4), ("gb200-nvl72", 8, 4), ("gb200-nvl72", 1, 2), ("gh200-96gb", 4, 2)],
)
def test_processors_are_shared_by_the_devices_that_have_them(cluster: str, gpus: int, ranks: int) -> None:
    """3.9 billion parameters per second on two sockets; a GB200 has a Grace for two GPUs, a GH200 for one."""
    plan = {"offload": "optimizer", "zero": 1, "micro_batch": 1}
    e = api.estimate("llama3-8b", cluster, gpus=gpus, global_batch=8, plan=plan)
    moved_s = 4 * 8030261248 / gpus / load_cluster(cluster).device.host_Bps
    updated_s = ranks * 8030261248 / gpus / 3.9e9
    assert e.time["optimizer/host_adam_s"] == pytest.approx(moved_s + updated_s, rel=1e-6)
    assert ("devices_per_cpu" in e.provenance.constants) == (not cluster.startswith("dgx"))


def test_a_link_between_chips_hides_what_pci_express_cannot() -> None:
    """225 GB/s of GB200 at 0.625, against 20 GB/s where nothing is known."""
    grace, h100 = (
        api.estimate("llama3-8b", name, gpus=1, global_batch=8, plan={"offload": "activations"})
        for name in ("gb200", "h100-sxm")
    )
    assert grace.provenance.constants["host_link_Bps"]["value"] == 225e9
    assert grace.bottleneck.startswith("compute") and h100.bottleneck.startswith("offload")
    assert grace.what_if["host_link_x2"] < grace.step_time_s


def test_the_link_is_a_constant_of_those_who_use_it() -> None:
    names = {"host_link_Bps", "host_efficiency"}
    for plan, shown in (({"offload": "activations"}, names), ({"offload": "optimizer"}, names), ({}, set())):
        found = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=64, plan={"recompute": "full", **plan})
        assert names & set(found.provenance.constants) == shown
        assert ("host_link_x2" in found.what_if) == bool(shown)


@pytest.mark.parametrize(
    ("path", "offload"),
    [
        (TERM, "activations"), ("offload/activations/one_layer/host_copy_s", "activations"),
        ("optimizer/host_adam_s", "optimizer"),
    ],
)  # fmt: skip
def test_explained_copies_name_the_link_and_its_source(path: str, offload: str) -> None:
    found = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=64, plan={"offload": offload, "zero": 1})
    (detail,) = [one for one in found.details if one.path == path]
    assert "64 GB/s each way (datasheet: NVIDIA H100" in detail.basis and "0.625 of it sustained" in detail.basis
    if detail.function.endswith("host_copy_s"):
        assert detail.value == pytest.approx(detail.arguments["kept_bytes"] / 40e9)


def test_no_step_is_faster_than_its_copies_at_the_rate_of_the_datasheet() -> None:
    e = evaluated(Plans(dp=8))
    one_way_s = 8 * 32 * float(e.sizes.layer.kept_bytes) / 64e9
    assert bracket_s(e)[0] == pytest.approx(one_way_s)


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ({"model": "gemma2-2b", "gpus": 8, "global_batch": 128},
         {"tp": 2, "pp": 4, "vpp": 2, "micro_batch": 2, "recompute": "full", "overlap": "offload"}),
        ({"model": "gpt2", "gpus": 32, "global_batch": 32, "framework": "megatron-core"},
         {"tp": 4, "pp": 8, "offload": "activations,optimizer", "overlap": "dp,offload"}),
    ],
)  # fmt: skip
def test_a_faster_link_to_the_host_lowers_the_lower_end_of_the_bracket(
    tmp_path: Path, job: dict[str, Any], plan: dict[str, Any]
) -> None:
    """Slow copies made a stage with little computation the critical one, so that the bound rose by up to three times
    when the link became fast."""
    lows = []
    for rate in (2, 4, 16, 32, 64, 128):
        file = tmp_path / f"{rate}.toml"
        file.write_text(f'base = "dgx-a100"\n[device]\nhost_bandwidth = "{rate} GB/s"\n')
        found = api.estimate(cluster=file, plan={"offload": "activations", **plan}, **job)
        low, high = found.step_time_bracket_s
        assert low <= found.step_time_s <= high
        lows.append(low)
    assert lows == sorted(lows, reverse=True)


def test_a_faster_link_to_the_host_speeds_a_step_whose_slowest_stage_it_changes(tmp_path: Path) -> None:
    """The optimiser of the stage with most parameters ends the step, whichever stage has the longest pass."""
    times = []
    for rate in (32, 64, 128, 256):
        file = tmp_path / f"{rate}.toml"
        file.write_text(f'base = "dgx-h100"\n[device]\nhost_bandwidth = "{rate} GB/s"\n')
        plan = {"pp": 8, "micro_batch": 2, "offload": "activations,optimizer", "overlap": "offload"}
        found = api.estimate("gpt2", file, gpus=8, global_batch=64, framework="ideal", plan=plan)
        times.append((found.step_time_s, found.step_time_bracket_s[1]))
    assert times == sorted(times, reverse=True)
    assert [high for _, high in times] == sorted((high for _, high in times), reverse=True)
