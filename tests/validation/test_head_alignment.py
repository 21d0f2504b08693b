"""Heads whose rows begin anywhere keep unfused attention off the matrix units: BigScience's measured prototypes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime.api.models import load_model
from steptime.estimate.machine import machine_of
from steptime.estimate.single import Setting, estimate_plan
from steptime.hardware.library import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.strategies import CORRECTED

CLUSTER = load_cluster("dgx-a100-80gb")
MEASURED = {(4, 2): (147.41, 107.12), (4, 4): (153.90, 110.31), (8, 4): (156.84, 118.12)}
"""Tensor ranks and micro-batch -> step times in seconds with 128 heads (108 wide) and with 96 (144 wide) of a model of
78 layers and width 13824 on 384 A100. Source: chronicles of the 176B training, bigscience-workshop/bigscience."""


def estimated(heads: int, tp: int, micro_batch: int, attention: str = "unfused", dtype: str = "fp16"):  # type: ignore[no-untyped-def]
    model = replace(load_model("bloom-176b"), layers=78, hidden=13824, heads=heads, kv_heads=heads,
                    head_dim=13824 // heads, ffn_hidden=4 * 13824)  # fmt: skip
    job = Job(model=model, gpus=384, global_batch=2048, seq_len=2048, precision=PRECISIONS[dtype],
              optimizer=OPTIMIZERS["adam"], attention=attention)  # fmt: skip
    pp = 48 // tp
    plans = Plans(tp=tp, pp=pp, dp=8, micro_batch=micro_batch, recompute=RECOMPUTE_CODES["full"]).in_order(8)
    return estimate_plan(Setting(method=CORRECTED, job=job, cluster=CLUSTER), CORRECTED.strategies["1d"], plans)


@pytest.mark.parametrize(("tp", "micro_batch"), MEASURED)
def test_misaligned_heads_take_as_much_longer_as_measured(tp: int, micro_batch: int) -> None:
    odd, even = (estimated(heads, tp, micro_batch) for heads in (128, 96))
    measured_odd_s, measured_even_s = MEASURED[tp, micro_batch]
    assert odd.step_time_s / even.step_time_s == pytest.approx(measured_odd_s / measured_even_s, rel=0.08)
    assert any("heads of 108 elements" in note for note in odd.notes)
    assert not any("16 bytes" in note for note in even.notes)


def test_kernels_of_their_own_pad_the_heads() -> None:
    odd, even = (estimated(heads, 4, 2, attention="fused") for heads in (128, 96))
    assert odd.step_time_s == pytest.approx(even.step_time_s, rel=0.02) and not any("16 bytes" in n for n in odd.notes)


def test_a_faster_matrix_unit_does_not_help_them() -> None:
    machine = machine_of(CLUSTER, 384, PRECISIONS["fp16"], lone_rank_has_all_links=True, calibrated=True)
    device = CLUSTER.device
    assert machine.unaligned_flops_per_s == device.vector_flops_per_s["fp32"] * device.vector_efficiency
    assert machine.bound is not None and machine.bound.unaligned_flops_per_s == device.vector_flops_per_s["fp32"]
