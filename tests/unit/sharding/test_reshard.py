"""Routes between shardings: executed on arrays, next to those of DTensor, and the table of their costs."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from dtensor_paths import dtensor_path
from layout_machine import Devices
from steptime.captured.ops.placement import P, R, Sharding, partial, placement_of, shard
from steptime.errors import UserError
from steptime.hardware import load_cluster
from steptime.sharding.mesh import Mesh, mesh_on
from steptime.sharding.moves import graph_of, layout_of
from steptime.sharding.reshard import along, costs, route

DGX = load_cluster("dgx-h100")
SHAPES = ((16, 24), (8, 16, 8))


def shardings(rank: int, axes: int = 2, *more: Any) -> list[Sharding]:
    return list(product((R, *map(shard, range(rank)), P, *more), repeat=axes))


def small(**axes: int) -> Mesh:
    """A mesh whose inner axes share fast domains and whose outer ones do not."""
    return mesh_on(DGX, axes)


def read(text: str) -> Sharding:
    return tuple(map(placement_of, text.split()))


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2), (2, 2, 2), (4, 1, 2)])
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_every_single_step_does_what_it_says(sizes: tuple[int, ...], reduction: Any) -> None:
    graph = graph_of(sizes, 2, (reduction,))
    devices, rng = Devices(sizes, (16, 24)), np.random.default_rng(1)
    tensor = rng.integers(-99, 99, (16, 24)).astype(float)
    done = set()
    for move in graph.moves:
        source, target = graph.layouts[move.source], graph.layouts[move.target]
        arrays = devices.run(move.kind, move.axes, source, target, devices.scatter(tensor, source, rng))
        devices.check(arrays, tensor, target)
        done.add(move.kind)
    assert done >= {"all_gather", "slice", "all_reduce", "reduce_scatter", "all_to_all", "fill"}
    assert ("permute" in done) == (len(sizes) > 1)


@pytest.mark.quick(without=["1-shape1", "1048576-shape1"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1, 1 << 20])
def test_all_routes_on_a_2x4_mesh_end_in_the_target(shape: tuple[int, ...], scale: int) -> None:
    mesh, devices, rng = small(data=2, model=4), Devices((2, 4), shape), np.random.default_rng(2)
    tensor = rng.integers(-99, 99, shape).astype(float)
    names = mesh.names
    for source, target in product(shardings(len(shape)), repeat=2):
        arrays = devices.scatter(tensor, layout_of(source, len(shape)), rng)
        for step in route(shape, scale, source, target, mesh).steps:
            axes = tuple(map(names.index, step.axes))
            arrays = devices.run(step.kind, axes, step.source, step.target, arrays)
        devices.check(arrays, tensor, layout_of(target, len(shape)))


def test_routes_on_three_axes_end_in_the_target() -> None:
    mesh, devices, rng = small(pod=2, data=2, model=2), Devices((2, 2, 2), (8, 16)), np.random.default_rng(3)
    tensor = rng.integers(-99, 99, (8, 16)).astype(float)
    pairs = list(product(shardings(2, 3), repeat=2))
    for source, target in random.Random(4).sample(pairs, 400):
        arrays = devices.scatter(tensor, layout_of(source, 2), rng)
        for step in route((8, 16), 1 << 16, source, target, mesh).steps:
            axes = tuple(map(mesh.names.index, step.axes))
            arrays = devices.run(step.kind, axes, step.source, step.target, arrays)
        devices.check(arrays, tensor, layout_of(target, 2))


def test_a_route_is_what_the_table_says() -> None:
    mesh, every = small(data=8, model=8), shardings(2)
    table = costs((8192, 8192), 2, every, every, mesh)
    for i, source in enumerate(every):
        for j, target in enumerate(every):
            assert route((8192, 8192), 2, source, target, mesh).seconds == pytest.approx(table[i, j], rel=1e-12)
    assert (np.diag(table) == 0).all() and (table + np.eye(len(every)) > 0).all()


def test_the_triangle_inequality() -> None:
    for shape, mesh in (((8192, 8192), small(data=2, model=4)), ((64, 512, 256), small(data=8, model=8))):
        every = shardings(len(shape), 2, partial("max"))
        table = costs(shape, 2, every, every, mesh)
        detour = (table[:, :, None] + table[None, :, :]).min(axis=1)
        known = np.isfinite(table)
        assert (table[known] <= detour[known] * (1 + 1e-12)).all() and known.sum() > 500


# -- DTensor ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("shape", [(8192, 8192), (64, 64), (16, 2048, 1024)])
@pytest.mark.parametrize("cluster", ["dgx-h100", "frontier", "h200-nvl-4"])
def test_never_dearer_than_the_path_of_dtensor(shape: tuple[int, ...], cluster: str) -> None:
    pytest.importorskip("torch")
    mesh = mesh_on(load_cluster(cluster), {"data": 2, "model": 4})
    every = shardings(len(shape))
    ours = costs(shape, 2, every, every, mesh)
    cheaper = 0
    for i, source in enumerate(every):
        for j, target in enumerate(every):
            theirs = along(shape, 2, dtensor_path(shape, source, target, mesh.sizes), mesh).seconds
            assert ours[i, j] <= theirs * (1 + 1e-12)
            cheaper += ours[i, j] < theirs * (1 - 1e-9)
    assert cheaper > 40


# -- what is chosen ---------------------------------------------------------------------------------------------------


def kinds(shape: tuple[int, ...], source: str, target: str, mesh: Mesh, element_bytes: float = 2) -> list[str]:
    steps = route(shape, element_bytes, read(source), read(target), mesh).steps
    return [f"{step.kind} {'+'.join(step.axes)}".strip() for step in steps]


@pytest.mark.each(
    ("source", "target", "wanted"),
    [
        ("S(0) R", "R R", ["all_gather data"]),
        ("S(1) R", "R R", ["all_gather data", "copy"]),
        ("R R", "S(0) S(1)", ["slice data+model"]),
        ("P P", "R R", ["all_reduce data+model"]),
        ("S(0) P", "S(0) S(0)", ["reduce_scatter model"]),
        ("S(0) P", "S(0) S(1)", ["copy", "reduce_scatter model"]),
        ("R S(0)", "R S(1)", ["copy", "all_to_all model"]),
        ("R S(0)", "S(0) S(0)", ["slice data", "permute data+model"]),
        ("S(0) R", "R S(1)", ["slice model", "all_gather data"]),
        ("S(0) S(1)", "P P", ["fill data+model"]),
        ("R R", "R R", []),
    ],
)
def test_the_steps_that_are_chosen_in_one_node(source: str, target: str, wanted: list[str]) -> None:
    assert kinds((8192, 8192), source, target, small(data=2, model=4)) == wanted


def test_equal_axes_swap_by_one_permutation() -> None:
    assert kinds((8192, 8192), "S(0) S(1)", "S(1) S(0)", small(data=8, model=8)) == ["permute data+model"]


@pytest.mark.each(
    ("size", "source", "target", "wanted"),
    [
        (64, "P P", "R R", ["all_reduce data", "all_reduce model"]),
        (64, "S(0) S(0)", "R R", ["all_gather model", "all_gather data"]),
        (1024, "P P", "R R", ["reduce_scatter model", "all_reduce data", "all_gather model"]),
        (8192, "S(0) S(0)", "R R", ["all_gather data+model"]),
    ],
)
def test_over_four_nodes_one_collective_or_a_hierarchy(size: int, source: str, target: str, wanted: list[str]) -> None:
    mesh = small(data=4, model=8)
    assert kinds((size, size), source, target, mesh) == wanted
    together = along((size, size), 2, (read(source), read(target)), mesh)
    assert len(together.steps) == 1 and costs((size, size), 2, [read(source)], [read(target)], mesh) <= together.seconds


def test_replicas_share_a_reduction() -> None:
    """Each of the two replicas reduces one half, and they exchange the halves: 64 + 32 MiB in place of 128."""
    mesh = small(data=2, model=4)
    wanted = ["slice data", "reduce_scatter model", "all_gather data", "copy"]
    assert kinds((8192, 8192), "R P", "R S(0)", mesh) == wanted


def test_uneven_layouts_are_not_gone_through() -> None:
    """3 columns cannot be sharded: rows that are sharded by the wrong axis are not exchanged for them."""
    mesh = small(data=2, model=4)
    for source, target in product([each for each in shardings(2) if shard(1) not in each], repeat=2):
        for step in route((16, 3), 1 << 20, source, target, mesh).steps:
            assert shard(1) not in step.source.sharding + step.target.sharding


def test_sizes_worked_out_by_hand() -> None:
    """8192 x 8192 of bf16 are 128 MiB: each of 4 has 32 MiB, of 8 16 MiB."""
    mesh, mib = small(data=2, model=4), 2.0**20
    assert route((8192, 8192), 2, read("R S(0)"), read("R R"), mesh).communication() == [
        ("all_gather_into_tensor", 128 * mib)
    ]
    assert route((8192, 8192), 2, read("S(0) P"), read("S(0) R"), mesh).communication() == [("all_reduce", 64 * mib)]
    steps = route((8192, 8192), 2, read("S(0) S(0)"), read("S(0) S(1)"), mesh).steps
    assert [(step.collective, step.size_bytes / mib) for step in steps] == [
        (None, 32.0), ("all_to_all_single", 16.0)
    ]  # fmt: skip
    assert route((8192, 8192), 2, read("S(0) R"), read("R R"), mesh).seconds == pytest.approx(
        float(mesh.collective_s("all_gather", (0,), 128 * mib))
    )


def test_an_axis_of_one_device_costs_nothing() -> None:
    mesh = small(data=1, model=8)
    every = [(placement, R) for placement in (R, shard(0), shard(1), P)]
    assert (costs((64, 64), 2, every, every, mesh) == 0).all()


def test_scalars_and_empty_tensors() -> None:
    mesh = small(data=2, model=4)
    assert kinds((), "P P", "R R", mesh) == ["all_reduce data+model"]
    assert costs((0, 8), 2, [read("S(0) R")], [read("R R")], mesh).item() == 0.0


@pytest.mark.each(
    ("shape", "source", "target", "words"),
    [
        ((8, 8), "S(2) R", "R R", "does not divide a tensor of 8x8"),
        ((6, 8), "R S(0)", "R R", "does not divide a tensor of 6x8"),
        ((8, 8), "R", "R R", "has 1 placement, mesh data=2 x model=4 has 2 axes"),
        ((8, 8), "P P(max)", "R R", "terms of two reductions"),
    ],
)
def test_what_no_route_can_lead_from_is_refused(shape: Any, source: str, target: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        route(shape, 2, read(source), read(target), small(data=2, model=4))


def test_a_given_route_needs_single_steps() -> None:
    with pytest.raises(UserError, match=r"no single step leads from S\(0\) P to P R"):
        along((8, 8), 2, (read("S(0) P"), read("P R")), small(data=2, model=4))


def test_axes_that_divide_a_dim_in_another_order_make_other_pieces_where_they_are_not_equal():
    """50,256 rows: a slice and a permutation; of 50,257 a permutation would bring rows to the wrong devices."""
    mesh = mesh_on(load_cluster("dgx-h100"), {"data": 2, "model": 4})

    def kinds(rows):
        return [step.kind for step in route((rows, 1024), 2, (R, shard(0)), (shard(0), shard(0)), mesh).steps]

    assert kinds(50256) == ["slice", "permute"]
    assert "permute" not in kinds(50257) and kinds(50257)


def test_pieces_of_two_orders_differ():
    """As PyTorch's chunk has them: the first piece of the second device of the outer axis begins elsewhere."""

    def begins(rows, *counts):
        if not counts:
            return [0]
        size = -(-rows // counts[0])
        return [at + inner for at in range(0, rows, size) for inner in begins(min(size, rows - at), *counts[1:])]

    assert begins(50256, 2, 4) == begins(50256, 4, 2)
    assert begins(50257, 2, 4) != begins(50257, 4, 2)
