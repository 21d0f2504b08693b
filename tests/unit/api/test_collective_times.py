"""One collective as the command shows it: the textbook's algorithms by hand, the library's choice, bandwidths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import steptime
from steptime.cost import collective as rings
from steptime.errors import UserError
from steptime.estimate.communication import collective_over
from steptime.estimate.machine import Machine, machine_of
from steptime.hardware import load_cluster
from steptime.num import Num
from steptime.plan.job import PRECISIONS
from steptime.simulation.collectives.report import write_plot
from steptime.simulation.collectives.times import OPERATIONS, Collective, collective

SIZE = 2.0**24


def machine(cluster: str = "dgx-h100", ranks: int = 8) -> Machine:
    return machine_of(load_cluster(cluster), ranks, PRECISIONS["bf16"], lone_rank_has_all_links=True, calibrated=True)


def times(operation: str, ranks: int = 8, cluster: str = "dgx-h100", size: float = SIZE) -> Collective:
    return collective(operation, cluster, ranks=ranks, size_bytes=size)


ROUNDS = 3
SHARE = 7 / 8
#: Operation -> messages, bytes over a link and bytes added by a minimum spanning tree of 8, then by a ring; the bytes
#: as shares of the tensor. After Chan et al. 2007, tables 1 to 3.
BY_HAND = {
    "broadcast": ((3, 3, 0), (14, 2 * SHARE, 0)),
    "reduce": ((3, 3, 3), (14, 2 * SHARE, SHARE)),
    "scatter": ((3, SHARE, 0), (7, SHARE, 0)),
    "gather": ((3, SHARE, 0), (7, SHARE, 0)),
    "all_gather": ((6, 3 + SHARE, 0), (7, SHARE, 0)),
    "reduce_scatter": ((6, 3 + SHARE, 3), (7, SHARE, SHARE)),
    "all_reduce": ((6, 6, 3), (14, 2 * SHARE, SHARE)),
}


@pytest.mark.parametrize("operation", BY_HAND)
def test_the_seven_operations_by_hand(operation: str) -> None:
    found, m = times(operation), machine()
    for name, (hops, sent, added) in zip(("mst", "ring"), BY_HAND[operation], strict=True):
        (one,) = (one for one in found.times if one.algorithm == name)
        assert one.latency_s == pytest.approx(hops * m.fast_latency_s)
        assert one.transfer_s == pytest.approx(sent * SIZE / m.fast_Bps)
        assert one.reduction_s == pytest.approx(3 * added * SIZE / m.memory_Bps)
        parts = [part for part in (one.latency_s, one.transfer_s, one.reduction_s) if part is not None]
        assert one.time_s == pytest.approx(sum(parts))


RINGS: dict[str, Callable[..., Num]] = {
    "all_gather": rings.ring_all_gather_s, "reduce_scatter": rings.ring_reduce_scatter_s,
    "all_reduce": rings.ring_all_reduce_s,
}  # fmt: skip


@pytest.mark.parametrize("operation", RINGS)
@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_the_ring_is_that_of_textbook_estimates_and_the_additions(operation: str, ranks: int) -> None:
    m, found = machine(ranks=ranks), times(operation, ranks)
    (ring,) = (one for one in found.times if one.algorithm == "ring")
    slow_Bps = float(m.slow_link_Bps(8))
    seconds = RINGS[operation](SIZE, ranks, 8, m.fast_Bps, slow_Bps, m.fast_latency_s, m.slow_latency_s)
    assert ring.reduction_s is not None
    assert ring.time_s - ring.reduction_s == pytest.approx(seconds)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("cluster", "library"), [("dgx-h100", "nccl"), ("mi300x-8", "estimate")])
def test_the_library_is_what_an_estimate_takes(operation: str, cluster: str, library: str) -> None:
    found, m = times(operation, 16, cluster), machine(cluster, 16)
    assert found.library == library and found.times[0].algorithm == library
    kind = operation if library == "nccl" else {"gather": "all_gather", "scatter": "all_gather"}.get(operation)
    assert found.times[0].time_s == pytest.approx(float(collective_over(kind or operation, m, SIZE, 16, 8)))
    assert found.times[0].chosen and found.basis


def test_trees_win_short_messages_and_rings_long_ones() -> None:
    found = times("broadcast", 64, size=2.0**30)
    tree, ring = found.seconds["mst"], found.seconds["ring"]
    assert tree[0] < ring[0] and ring[-1] < tree[-1]
    assert sorted(ring) == list(ring) and found.sizes_bytes[-1] == 2.0**30


def test_bandwidths_are_those_of_nccl_tests() -> None:
    for operation, factor in {
        "all_reduce": 30 / 16,
        "all_gather": 15 / 16,
        "gather": 15 / 16,
        "broadcast": 1.0,
    }.items():
        for one in times(operation, 16).times:
            assert one.algorithm_Bps == pytest.approx(SIZE / one.time_s)
            assert one.bus_Bps == pytest.approx(factor * SIZE / one.time_s)


def test_a_dash_is_an_underscore_and_named_algorithms_are_the_only_ones() -> None:
    found = collective("all-reduce", "dgx-h100", ranks=8, algorithms=["doubling", "mst"])
    assert [one.algorithm for one in found.times] == ["doubling", "mst"] and found.chosen == ()
    assert found.fastest.algorithm == "doubling" and found.to_json()["fastest"] == "doubling"
    assert steptime.api.collective("all-reduce", "dgx-h100", ranks=8).operation == "all_reduce"


def test_ranks_of_a_domain_divide_the_group() -> None:
    assert times("reduce", 12).inside == 6
    assert times("reduce", 144, "gb200-nvl72").inside == 72
    spread = collective("reduce", "dgx-h100", ranks=8, inside=1)
    assert spread.inside == 1 and spread.times[0].time_s > times("reduce", size=2.0**30).times[0].time_s


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"operation": "all_redcue"}, "did you mean all_reduce"),
        ({"cluster": "dgx-h10"}, "did you mean dgx-h100"),
        ({"ranks": 1}, "from 2 to"),
        ({"ranks": 16, "cluster": "tpu-v5e-pod", "inside": 3}, "one of 1, 2, 4, 8, 16"),
        ({"size_bytes": math.inf}, "is not a number"),
        ({"size_bytes": 0.0}, "the nearest is 1"),
        ({"size_bytes": 10.0}, "smallest size"),
        ({"algorithms": ["bruck"]}, "no algorithm of all_reduce"),
        ({"algorithms": ["nccl"], "cluster": "mi300x-8"}, "estimate"),
        ({"operation": 3}, "not a text"),
    ],
)
def test_bad_input_says_what_to_do(changed: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"operation": "all_reduce", "cluster": "dgx-h100", "ranks": 8, **changed}
    with pytest.raises(UserError) as raised:
        collective(**given)  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_a_group_beyond_the_outermost_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_cluster("dgx-h100")
    small = replace(known, levels=(*known.levels[:-1], replace(known.levels[-1], devices=16)))
    monkeypatch.setattr("steptime.simulation.collectives.times.load_cluster", lambda name: small)
    assert times("reduce", 16).ranks == 16
    with pytest.raises(UserError, match="joins 16 devices, not 32"):
        times("reduce", 32)


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(times("all_reduce"), tmp_path / "time.svg")
    assert "<svg" in (tmp_path / "time.svg").read_text()
