"""Meshes: their groups on fast domains, their prices, and what is no mesh."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from steptime.errors import UserError
from steptime.estimate.communication import collective_over
from steptime.hardware import load_cluster
from steptime.sharding.mesh import Group, logical_meshes, mesh_of, mesh_on, parse_axes
from steptime.simulation.collectives.times import machine_for_links

DGX = load_cluster("dgx-h100")


@pytest.mark.each(
    ("sizes", "axes", "wanted"),
    [
        ((2, 4), (0,), Group(2, 2)),
        ((2, 4), (0, 1), Group(8, 8)),
        ((4, 8), (0,), Group(4, 1)),
        ((4, 8), (1,), Group(8, 8)),
        ((8, 4), (0,), Group(8, 2)),  # two of the eight in each node: 4 apart
        ((2, 16), (1,), Group(16, 8)),
        ((2, 16), (0,), Group(2, 1)),
        ((3, 4), (0,), Group(3, 1)),  # devices 0, 4 and 8: two nodes, which three ranks do not divide evenly
        ((2, 2, 8), (0, 2), Group(16, 8)),
        ((2, 2, 8), (0, 1), Group(4, 1)),
    ],
)
def test_ranks_of_a_group_in_fast_domains_of_eight(
    sizes: tuple[int, ...], axes: tuple[int, ...], wanted: Group
) -> None:
    named = dict(zip("abc", sizes, strict=False))
    assert mesh_on(DGX, named).group(axes) == wanted


def test_a_collective_is_timed_as_in_an_estimate() -> None:
    mesh = mesh_on(DGX, {"data": 4, "model": 8})
    for axes, group in (((0,), (4, 1)), ((1,), (8, 8)), ((0, 1), (32, 8))):
        wanted = collective_over("all_gather", mesh.machine, 1e8, *group)
        assert mesh.collective_s("all_gather", axes, 1e8) == wanted > 0
    assert mesh.message_s((0,), 1e8) > mesh.message_s((1,), 1e8) > 0


def test_the_size_has_to_be_the_number_of_devices() -> None:
    machine = machine_for_links(DGX, 12)
    assert mesh_of(machine, {"data": 3, "model": 4}, devices=12).devices == 12
    with pytest.raises(UserError, match="mesh data=2 x model=4 has 8 devices, the job has 12") as raised:
        mesh_of(machine, {"data": 2, "model": 4}, devices=12)
    assert "2x6, 3x4, 4x3, 6x2" in str(raised.value)
    with pytest.raises(UserError, match="7 devices are no product of 2 sizes above 1"):
        mesh_of(machine, {"data": 2, "model": 4}, devices=7)


@pytest.mark.each("text", ["", "data", "data=2 model=4", "data=0x2", "a=2,a=4", "2x", "a=2,b=2,c=2,d=2,e=2", "-2x4"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no mesh"):
        parse_axes(text)


@pytest.mark.each("axes", [{}, {"a": 0}, {"a": 1 << 40}, {"a": 1 << 19, "b": 1 << 19}])
def test_sizes_out_of_range_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(UserError, match="mesh"):
        mesh_on(DGX, axes)


def test_a_cluster_that_ends_is_not_exceeded() -> None:
    with pytest.raises(UserError, match=r"outermost level .* joins 8 devices, not 16"):
        mesh_on(replace(DGX, levels=DGX.levels[:1]), {"data": 4, "model": 4})


def test_all_factorisations() -> None:
    for devices in (1, 6, 16, 64):
        found = logical_meshes(devices, axes=3)
        assert len(set(found)) == len(found) and all(prod(sizes) == devices for sizes in found)
    assert len(logical_meshes(64)) == 1 + 5 and len(logical_meshes(64, axes=3)) == 1 + 5 + 10
