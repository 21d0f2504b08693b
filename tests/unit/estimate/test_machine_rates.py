"""Rates of a machine: what its datasheet prints bounds it, and links count by what they carry together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime.estimate.communication import collective_of
from steptime.estimate.machine import Machine, machine_of
from steptime.hardware import load_cluster
from steptime.hardware.records import Cluster, Level
from steptime.plan.job import PRECISIONS
from steptime.plan.plans import Plans

SIZES = np.logspace(2, 10, 9)
GROUPS = (Plans(dp=8, in_dp=8), Plans(dp=8), Plans(dp=64, in_dp=8))
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def machine(cluster: Cluster, precision: str = "bf16", *, calibrated: bool = True) -> Machine:
    return machine_of(cluster, 64, PRECISIONS[precision], lone_rank_has_all_links=True, calibrated=calibrated)


@pytest.mark.parametrize(("precision", "products", "attention"), [("bf16", 989.4e12, 989.4e12),
                                                                 ("fp8", 1978.9e12, 989.4e12)])  # fmt: skip
def test_no_step_is_faster_than_the_datasheet(precision: str, products: float, attention: float) -> None:
    """H100 SXM: 989.4 TFLOP/s dense in 16 bits and twice that in 8, attention in 16; 133.8 TFLOP/s beside the matrix
    units; 3.35 TB/s; NVLink of 450 GB/s, a NIC of 400 Gb/s and PCIe 5 x16 of 64 GB/s each way."""
    bound = machine(load_cluster("dgx-h100"), precision).bound
    assert bound is not None
    rates = bound.matrix_flops_per_s, bound.attention_flops_per_s, bound.vector_flops_per_s, bound.memory_Bps
    assert rates == pytest.approx((products, attention, 133.8e12, 3.35e12), rel=1e-3)
    links = bound.fast_Bps, bound.slow_Bps, bound.lone_slow_Bps, bound.host_Bps
    assert links == pytest.approx((450e9, 50e9, 50e9, 64e9), rel=1e-12)
    assert {bound.kernel_latency_s, bound.fast_latency_s, bound.slow_latency_s} == {0.0}


def seconds(cluster: Cluster, *, calibrated: bool) -> list[list[float]]:
    one = machine(cluster, calibrated=calibrated)
    return [list(collective_of(kind, plans, one, ("dp",), SIZES)) for kind in KINDS for plans in GROUPS]


def changed(cluster: Cluster, index: int, **fields: float) -> Cluster:
    levels: list[Level] = list(cluster.levels)
    levels[index] = replace(levels[index], **fields)  # type: ignore[arg-type]
    return replace(cluster, levels=tuple(levels))


@pytest.mark.each("calibrated", [True, False])
@pytest.mark.each("index", [0, 1])
@pytest.mark.each("name", ["dgx-h100", "gb200-nvl72"])
def test_four_links_carry_what_one_of_four_times_the_rate_does(name: str, index: int, calibrated: bool) -> None:
    cluster = load_cluster(name)
    level = cluster.levels[index]
    cut = changed(cluster, index, link_Bps=level.link_Bps / 4, links_per_device=level.links_per_device * 4)
    whole, parts = seconds(cluster, calibrated=calibrated), seconds(cut, calibrated=calibrated)
    assert parts == [pytest.approx(times, rel=1e-12) for times in whole]


@pytest.mark.parametrize("calibrated", [True, False])
def test_links_oversubscribed_twice_carry_half(calibrated: bool) -> None:
    """Long messages only: what a message waits for does not change."""
    cluster = load_cluster("dgx-h100")
    halved = machine(changed(cluster, 0, oversubscription=2.0), calibrated=calibrated)
    whole = machine(cluster, calibrated=calibrated)
    times = [collective_of("all_gather", GROUPS[0], one, ("dp",), 1e12) for one in (whole, halved)]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-3)


@pytest.mark.parametrize(("rented", "own", "slower"), [("aws-p5", "dgx-h100", 1), ("aws-p5en", "dgx-h200", 1),
                                                       ("aws-p4d", "dgx-a100", 4)])  # fmt: skip
def test_nics_of_rented_machines_count_together(rented: str, own: str, slower: float) -> None:
    """Eight GPUs have 3200 Gb/s of EFA on P5 and P5en as 8 x 400 Gb/s of a DGX, and on P4d 400 against 8 x 200."""
    times = [seconds_of_a_long_gather(name) for name in (rented, own)]
    assert times[0] == pytest.approx(slower * times[1], rel=1e-3)


def seconds_of_a_long_gather(name: str) -> float:
    return float(collective_of("all_gather", GROUPS[1], machine(load_cluster(name)), ("dp",), 1e12))
