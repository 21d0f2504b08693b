"""Finding a mesh: synthetic fabrics come back with their speeds, faults are named, doubts are told."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from steptime.errors import UserError
from steptime.hardware.records import AxisKind
from steptime.measure.mesh import Links, Quantity, discover, synthetic
from steptime.measure.mesh.discover import speed
from steptime.measure.mesh.groups import Tree, log_partitions, partition
from steptime.measure.mesh.layout import find_chain
from steptime.measure.mesh.torus import shapes
from steptime.num import Array

SIZES = (8, 2**16, 2**24)
FABRICS = {
    "flat": synthetic.flat_switch(12),
    "flat, prime": synthetic.flat_switch(13),
    "islands": synthetic.nvlink_islands(4, 8),
    "not a power of two": synthetic.nvlink_islands(3, 6),
    "pairs, sockets, nodes": synthetic.pcie_numa(3),
    "fat tree": synthetic.fat_tree(4, 5, 3),
    "racks": synthetic.nvl72(2),
    "rails": synthetic.rails(5, 6),
    "2D torus": synthetic.torus((5, 6)),
    "2D torus, square": synthetic.torus((5, 5)),
    "2D torus of fours": synthetic.torus((4, 4)),
    "3D torus": synthetic.torus((3, 4, 5)),
    "torus, long": synthetic.torus((4, 16)),
    "torus with a pair": synthetic.torus((2, 4, 6)),
    "ring": synthetic.torus((11,)),
}


def links_of(fabric: synthetic.Fabric, seed: int = 0, **how: object) -> Links:
    return synthetic.measured(fabric, seed, **how)[0]  # type: ignore[arg-type]


def matrix(values: object, kind: str = "latency") -> Links:
    array = np.array(values, dtype=float)
    names = tuple(str(i) for i in range(len(array)))
    return Links(names=names, quantities=(Quantity(kind=kind, values=array),))


@pytest.mark.quick("flat-0", "fat tree-0", "3D torus-1")
@pytest.mark.each("seed", range(2))
@pytest.mark.each("name", FABRICS)
def test_the_shape_comes_back(name: str, seed: int) -> None:
    fabric = FABRICS[name]
    mesh = discover(links_of(fabric, seed))
    assert mesh.shape == fabric.shape
    outer = {"rails": AxisKind.RAIL}.get(fabric.kind, AxisKind.RING if "torus" in fabric.kind else AxisKind.SWITCH)
    assert mesh.axes[-1].kind == outer
    assert all((axis.kind == AxisKind.RING) == ("torus" in fabric.kind) for axis in mesh.axes if axis.size > 3)
    assert mesh.broken_links == mesh.asymmetric_links == mesh.slow_devices == ()
    assert mesh.confidence > 0.75
    assert (mesh.notes == ()) == (mesh.confidence > 0.953)


@pytest.mark.parametrize("name", ["islands", "pairs, sockets, nodes", "fat tree", "rails"])
def test_coordinates_group_the_devices_that_belong_together(name: str) -> None:
    fabric = FABRICS[name]
    links, rank = synthetic.measured(fabric, 3, sigma=0.05)
    found, true = np.array(discover(links).coordinates), synthetic.coordinates(fabric.shape)[rank]
    assert len({tuple(row) for row in found.tolist()}) == fabric.devices
    for axis in range(len(fabric.shape)):
        same = (found[:, None, axis:] == found[None, :, axis:]).all(axis=2)
        assert (same == (true[:, None, axis:] == true[None, :, axis:]).all(axis=2)).all()
    if name == "rails":
        assert ((found[:, None, 0] == found[None, :, 0]) == (true[:, None, 0] == true[None, :, 0])).all()


def test_neighbours_on_a_torus_are_neighbours() -> None:
    fabric = synthetic.torus((4, 7))
    links, rank = synthetic.measured(fabric, 5)
    found, true = np.array(discover(links).coordinates), synthetic.coordinates(fabric.shape)[rank]

    def hops(places: np.ndarray) -> np.ndarray:
        apart = np.abs(places[:, None] - places[None])
        return np.minimum(apart, np.array(fabric.shape) - apart).sum(axis=2)

    assert (hops(found) == hops(true)).all()


def test_latency_and_bandwidth_of_every_axis() -> None:
    fabric = synthetic.fat_tree(8, 4, 2, oversubscription=2.0)
    mesh = discover(links_of(fabric, 1, sizes_bytes=SIZES, sigma=0.1))
    assert [axis.latency_s for axis in mesh.axes] == pytest.approx([3e-6, 10e-6, 17e-6], rel=0.05)
    assert [axis.Bps for axis in mesh.axes] == pytest.approx([400e9, 48e9, 24e9], rel=0.05)
    for axis, latency_s, Bps in zip(mesh.axes, (3e-6, 10e-6, 17e-6), (400e9, 48e9, 24e9), strict=True):
        assert axis.latency_error_s is not None and abs((axis.latency_s or 0) - latency_s) < 4 * axis.latency_error_s
        assert axis.Bps_error is not None and abs((axis.Bps or 0) - Bps) < 4 * axis.Bps_error
    levels = mesh.levels()
    assert [level.devices for level in levels] == [8, 32, 64]
    assert levels[1].link_Bps == mesh.axes[1].Bps
    assert [axis.links for axis in mesh.axes] == [8 * 28, 2 * 6 * 64, 32 * 32]


def test_rails_have_two_speeds() -> None:
    axis = discover(links_of(synthetic.rails(6, 4, cross=2.0), 0, sizes_bytes=SIZES)).axes[1]
    assert axis.Bps == pytest.approx(48e9, rel=0.1)
    assert axis.cross_Bps == pytest.approx(24e9, rel=0.1)
    assert axis.cross_latency_s == pytest.approx(18e-6, rel=0.1)
    assert axis.cross_step == pytest.approx(2.0, rel=0.1)


def test_ring_links_are_those_between_neighbours() -> None:
    mesh = discover(links_of(synthetic.torus((4, 6)), 0, sizes_bytes=SIZES))
    for axis in mesh.axes:
        assert axis.links == 24
        assert axis.Bps == pytest.approx(90e9, rel=0.15)
        assert axis.growth == pytest.approx(2.0, rel=0.15)


def test_one_size_tells_latency_or_bandwidth_only() -> None:
    fabric = synthetic.nvlink_islands(3, 4)
    large = discover(links_of(fabric, sizes_bytes=(2**26,)))
    assert all(axis.latency_s is None and axis.Bps is not None for axis in large.axes)
    assert large.levels() == ()
    small = discover(links_of(fabric, sizes_bytes=(16,)))
    assert all(axis.latency_s is not None and axis.Bps is None for axis in small.axes)


def test_one_slow_measurement_does_not_move_a_speed() -> None:
    random = np.random.default_rng(0)
    samples = []
    for size in (8.0, 2.0**16, 2.0**20, 2.0**26):
        logs = np.log(5e-6 + size / 100e9) + random.normal(size=50) * 0.02
        logs[:8] += 3.0
        samples.append(("seconds", size, logs))
    found = speed(samples)
    assert found.latency_s == pytest.approx(5e-6, rel=0.03)
    assert found.Bps == pytest.approx(100e9, rel=0.03)


def test_broken_links_are_named_and_break_nothing() -> None:
    fabric = synthetic.nvlink_islands(4, 8)
    broken = [(0, 1, 8.0), (2, 30, 5.0), (17, 9, 20.0)]
    links, rank = synthetic.measured(fabric, 2, broken=broken)
    mesh = discover(links)
    assert mesh.shape == (8, 4)
    device = {int(r): links.names[i] for i, r in enumerate(rank)}
    wanted = {frozenset((device[a], device[b])): factor for a, b, factor in broken}
    assert {frozenset((link.source, link.target)) for link in mesh.broken_links} == set(wanted)
    for link in mesh.broken_links:
        assert link.factor == pytest.approx(wanted[frozenset((link.source, link.target))], rel=0.6)
    assert mesh.asymmetric_links == ()


def test_a_link_slow_one_way_is_asymmetric_and_not_broken() -> None:
    links = links_of(synthetic.nvlink_islands(4, 4), 3, both_ways=True, shuffled=False)
    links.quantities[0].values[1, 9] *= 6
    mesh = discover(links)
    assert mesh.shape == (4, 4)
    assert [(link.source, link.target) for link in mesh.asymmetric_links] == [("gpu1", "gpu9")]
    assert mesh.asymmetric_links[0].factor == pytest.approx(6, rel=0.6)
    assert mesh.broken_links == ()


def test_a_slow_device_keeps_its_place() -> None:
    links = links_of(synthetic.nvlink_islands(4, 8), 4, shuffled=False)
    links.quantities[0].values[5] *= 12
    links.quantities[0].values[:, 5] *= 12
    mesh = discover(links)
    assert mesh.shape == (8, 4)
    assert mesh.slow_devices == ("gpu5",)
    assert mesh.coordinates[5][1] == mesh.coordinates[4][1]


@pytest.mark.quick(without=["0.25"])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_missing_pairs_are_tolerated_and_said(share: float) -> None:
    mesh = discover(links_of(synthetic.fat_tree(4, 4, 4), 6, missing=share))
    assert mesh.shape == (4, 4, 4)
    assert 0.5 * share < mesh.missing_pairs / 2016 < 1.5 * share
    assert "not measured" in mesh.notes[0]


def test_too_many_missing_pairs_lower_the_confidence() -> None:
    assert discover(links_of(synthetic.nvlink_islands(4, 4), 6, missing=0.6)).confidence <= 0.5


def test_one_direction_is_enough() -> None:
    links = links_of(synthetic.nvlink_islands(4, 4), 7)
    values = np.triu(links.quantities[0].values)
    values[values == 0] = np.nan
    upper = Links(names=links.names, quantities=(Quantity(kind="seconds", size_bytes=2.0**24, values=values),))
    mesh = discover(upper)
    assert mesh.shape == (4, 4)
    assert mesh.missing_pairs == 0


def test_a_quantity_that_tells_nothing_does_not_hide_one_that_does() -> None:
    fabric = synthetic.nested("bandwidth only", (4, 4), [5e-6, 5e-6], [400e9, 50e9])
    mesh = discover(links_of(fabric, 1, sizes_bytes=(8, 64, 512, 4096, 2**26)))
    assert mesh.shape == (4, 4)
    assert mesh.axes[0].latency_s == pytest.approx(mesh.axes[1].latency_s, rel=0.2)


def test_without_noise_nothing_is_left() -> None:
    mesh = discover(links_of(synthetic.fat_tree(4, 3, 2), 0, sigma=0.0))
    assert mesh.shape == (4, 3, 2)
    assert mesh.noise < 1e-6


def test_uneven_groups_are_said_to_fit_no_mesh() -> None:
    group = np.array([0] * 20 + [1] * 10 + [2] * 7)
    cost = np.where(group[:, None] == group[None], 1e-6, 8e-6)
    mesh = discover(matrix(cost * np.exp(np.random.default_rng(0).normal(size=cost.shape) * 0.05)))
    assert mesh.shape == (37,)
    assert mesh.confidence <= 0.5
    assert "no mesh of equal groups" in " ".join(mesh.notes)


def test_close_levels_are_doubtful() -> None:
    fabric = synthetic.nested("close", (2, 2), [1e-6, 1.5e-6], [100e9, 66e9])
    sure = discover(links_of(synthetic.nested("far", (2, 2), [1e-6, 9e-6], [100e9, 11e9])))
    doubts = [discover(links_of(fabric, seed)).confidence for seed in range(20)]
    assert np.mean(doubts) < 0.95 < sure.confidence


def test_two_devices_are_one_axis() -> None:
    mesh = discover(matrix([[0, 3e-6], [3e-6, 0]]))
    assert mesh.shape == (2,)
    assert mesh.axes[0].latency_s == pytest.approx(3e-6)


@pytest.mark.parametrize("bad", [0.0, -1e-6, math.inf])
def test_values_that_no_link_has(bad: float) -> None:
    with pytest.raises(UserError, match="latency is not positive and finite"):
        discover(matrix([[0, 1e-6, 1e-6], [1e-6, 0, bad], [1e-6, 1e-6, 0]]))


def test_devices_that_nothing_joins() -> None:
    nan = np.nan
    with pytest.raises(UserError, match="joins '2' and 1 more to '0'"):
        discover(matrix([[nan, 1, nan, nan], [1, nan, nan, nan], [nan, nan, nan, 1], [nan, nan, 1, nan]]))


def test_one_device() -> None:
    with pytest.raises(UserError, match="at least two"):
        discover(matrix([[0.0]]))


def test_scipy_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"] or ["scipy"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"steptime\[calibrate\]"):
        discover(matrix([[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, 1], [2, 2, 1, 0]]))


def test_partitions_are_counted_and_the_best_is_found() -> None:
    assert math.exp(log_partitions(8, 4)) == pytest.approx(35)
    group = np.arange(24) % 4
    random = np.random.default_rng(1)
    distances = np.where(group[:, None] == group[None], 0.0, 1.0) + np.triu(random.normal(size=(24, 24)) * 0.1, 1)
    distances = np.triu(distances, 1) + np.triu(distances, 1).T
    found = partition(distances, np.arange(24)[None], 6, Tree(distances))[0]
    assert sorted(sorted(row) for row in found.tolist()) == [[i + 4 * j for j in range(6)] for i in range(4)]
    few = partition(distances[:8, :8], np.arange(8)[None], 2)[0]
    assert sorted(sorted(row) for row in few.tolist()) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.slow
def test_a_large_mesh_takes_the_other_way_through() -> None:
    """Above LARGE devices only misplaced ones are exchanged, in single precision."""
    fabric = synthetic.nested("large", (2, 8, 12, 6), [1e-6, 2e-6, 4e-6, 8e-6], [8e9, 4e9, 2e9, 1e9])
    assert discover(links_of(fabric, 1)).shape == (2, 8, 12, 6)


def test_chain_of_nothing() -> None:
    assert find_chain(np.zeros((6, 6)), np.arange(6)[None]).sizes == ()


def test_shapes_of_tori() -> None:
    assert (3, 3) not in shapes(9)
    assert set(shapes(64)) >= {(8, 8), (4, 16), (4, 4, 4), (2, 4, 8), (64,)}


def _latencies(*groups: int) -> Array:
    """3 us inside groups of these sizes, 10 us between, 3 % noise."""
    of = np.repeat(np.arange(len(groups)), groups)
    times = np.where(of[:, None] == of[None], 3e-6, 10e-6)
    return times * np.exp(0.03 * np.random.default_rng(0).normal(size=times.shape))


@pytest.mark.parametrize("groups", [(4, 3), (3, 2), (8, 3), (4, 4, 3), (4, 2), (5, 3)])
def test_groups_of_unequal_size_are_a_pattern_that_a_note_tells(groups: tuple[int, ...]) -> None:
    found = discover(matrix(_latencies(*groups)))
    assert found.confidence <= 0.5
    assert any("no mesh of equal groups" in note for note in found.notes)


@pytest.mark.parametrize("groups", [(5,), (7,), (4, 4), (3, 3), (2, 2, 2)])
def test_equal_groups_are_none(groups: tuple[int, ...]) -> None:
    found = discover(matrix(_latencies(*groups)))
    assert found.confidence > 0.9 and not found.notes and not found.broken_links


@pytest.mark.parametrize("factor", [3.0, 20.0])
@pytest.mark.parametrize("groups", [(8,), (8, 8)])
def test_a_slow_device_is_named_however_slow_it_is(groups: tuple[int, ...], factor: float) -> None:
    times = _latencies(*groups)
    times[3] *= factor
    times[:, 3] *= factor
    found = discover(matrix(times))
    assert found.slow_devices == ("3",)
    assert found.confidence > 0.9 and not found.notes


def test_where_most_links_are_slower_one_way_all_are_listed() -> None:
    """Twice as slow from lower to higher numbers: the mesh is found all the same."""
    times = _latencies(4, 4)
    times[np.triu_indices(8, 1)] *= 2
    found = discover(matrix(times))
    assert found.shape == (4, 2) and len(found.asymmetric_links) == 28 and not found.broken_links
    assert any("slower one way than the other, by a factor of 2.0" in note for note in found.notes)
