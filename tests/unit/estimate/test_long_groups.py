"""Groups larger than those in which a fabric was measured: hops of their own, and the same for all of a kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from steptime.cost.collective_algorithms import Fabric, collective_s, mean_hop_s
from steptime.estimate.communication import collective_over
from steptime.estimate.fabrics import fabric_model
from steptime.estimate.machine import machine_of
from steptime.hardware import load_cluster
from steptime.plan.job import PRECISIONS

US = 1e-6
LONG = Fabric(
    domain=72, start_s=(1.0, 1.0, 5 * US), hop_s=(1.0, 1.0, 12 * US), Bps=(1.0, 1.0, 100e9), known_ranks=8,
    long_hop_s=2 * US, long_direct_hop_s=0.5 * US, direct_hop_s=(1.0, 1.0, 3 * US), outer_hop_s=(1.0, 1.0, 20 * US),
    outer_Bps=(1.0, 1.0, 100e9), outer_start_s=(1.0, 1.0, 7 * US), trees=False, nics=72,
)  # fmt: skip


def latency_us(kind: str, ranks: int, inside: int, fabric: Fabric = LONG) -> float:
    """Time of almost nothing under protocol Simple; the others take seconds."""
    return float(collective_s(kind, 1e-3, ranks, inside, fabric)[0]) / US


def test_a_ring_has_the_hops_of_small_groups_and_then_those_of_long_ones() -> None:
    assert latency_us("all_gather", 8, 8) == pytest.approx(5 + 7 * 12)
    assert latency_us("all_gather", 64, 64) == pytest.approx(5 + 7 * 12 + 56 * 2)
    assert latency_us("all_reduce", 64, 64) == pytest.approx(min(5 + 2 * (7 * 12 + 56 * 2), 2 * (5 + 7 * 12 + 56 * 2)))
    assert latency_us("broadcast", 64, 64) == pytest.approx(5 + 7 * 12 + 56 * 2)
    assert latency_us("all_gather", 64, 64, replace(LONG, known_ranks=0)) == pytest.approx(5 + 63 * 12)


def test_a_ring_over_domains_has_the_hops_of_long_ones_in_all_of_them() -> None:
    assert latency_us("all_gather", 16, 8) == pytest.approx(5 + 7 + 14 * 2 + 20)
    assert latency_us("all_gather", 4, 2) == pytest.approx(5 + 7 + 2 * 2 + 20)


def test_an_exchange_has_more_partners_at_the_price_of_many() -> None:
    assert latency_us("all_to_all", 8, 8) == pytest.approx(5 + 7 * 3)
    assert latency_us("all_to_all", 64, 64) == pytest.approx(5 + 7 * 3 + 56 * 0.5)
    assert latency_us("all_to_all", 64, 8) == pytest.approx(5 + 7 + 7 * 3 + 56 * 0.5)


def test_a_group_over_domains_hides_latency_as_the_network_does() -> None:
    fabric = replace(LONG, overlap=1.0, outer_overlap=2.0)
    size_bytes = 100e9 * 48 * US * 16 / 15  # 48 us at 100 GB/s
    assert float(collective_s("all_gather", size_bytes, 16, 16, fabric)[0]) / US == pytest.approx(5 + 84 + 16 + 48)
    assert float(collective_s("all_gather", size_bytes, 16, 8, fabric)[0]) / US == pytest.approx(5 + 7 + 48 * 2**0.5)


def test_arrays_are_as_numbers() -> None:
    fabric = replace(LONG, overlap=1.3, outer_overlap=1.7, trees=True, short_chains=True, tree_hop_s=(1.0, 1.0, 3e-5))
    ranks, inside = np.array([2, 8, 64, 16, 72, 144]), np.array([2, 8, 64, 8, 72, 72])
    for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
        found = collective_s(kind, np.full(6, 1e7), ranks, inside, fabric)[0]
        assert found == pytest.approx(
            [float(collective_s(kind, 1e7, int(n), int(t), fabric)[0]) for n, t in zip(ranks, inside, strict=True)],
            rel=1e-12,
        )


def test_the_hops_of_a_larger_group_never_take_less() -> None:
    ranks = np.arange(2, 200)
    for hop_s, long_s in ((12.0, 2.0), (1.0, 3.0)):
        assert (np.diff(mean_hop_s(hop_s, long_s, 8, ranks) * (ranks - 1)) >= min(hop_s, long_s) - 1e-9).all()


def test_all_generations_of_links_are_alike_in_what_no_group_of_a_node_tells() -> None:
    clusters = [load_cluster(name) for name in ("dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300", "gb300-nvl72")]
    models = [fabric_model(cluster, cluster.levels[-1], 256) for cluster in clusters]
    fabrics = [model.fabric for model in models if model is not None]
    assert len(fabrics) == len(clusters)
    assert {(f.long_hop_s, f.long_direct_hop_s, f.outer_overlap) for f in fabrics} == {(2.4e-6, 3e-7, 1.627)}
    assert max(f.hop_s[-1] for f in fabrics) > 10e-6 > 1e-6 > min(f.hop_s[-1] for f in fabrics)


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb300-nvl72", "dgx-v100"])
def test_no_ring_or_tree_is_slower_for_having_more_ranks_in_a_domain(name: str) -> None:
    machine = machine_of(
        load_cluster(name), 1024, PRECISIONS["fp16"], lone_rank_has_all_links=True, calibrated=True
    )  # fmt: skip
    sizes = 2.0 ** np.arange(8, 35)
    for kind in ("all_gather", "all_reduce", "broadcast"):
        for ranks in (8, 24, 64, 72, 144, 1024):
            parts = [t for t in range(1, machine.fast_domain + 1) if ranks % t == 0 and machine.fast_domain % t == 0]
            times = [collective_over(kind, machine, sizes, np.full(27, ranks), np.full(27, t)) for t in parts]
            for near, nearer in pairwise(times):
                assert (np.asarray(nearer) <= np.asarray(near) * (1 + 1e-9)).all(), (kind, ranks)


def test_a_stated_latency_and_another_rate_move_the_hops_of_long_rings_too() -> None:
    cluster = load_cluster("dgx-b200")
    inner = replace(cluster.levels[0], latency_s=cluster.levels[0].latency_s + 10 * US)
    late = fabric_model(replace(cluster, levels=(inner, *cluster.levels[1:])), cluster.levels[-1], 256)
    known = fabric_model(cluster, cluster.levels[-1], 256)
    assert late is not None and known is not None
    assert late.fabric.long_hop_s == pytest.approx(known.fabric.long_hop_s + 10 * US)
    twice = known.faster({"fast_latency_s": 2.0}).fabric
    assert (twice.long_hop_s, twice.long_direct_hop_s) == pytest.approx((4.8 * US, 0.6 * US))
