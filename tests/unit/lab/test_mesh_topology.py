"""A measured mesh is a cluster like any other: its file has a topology, and every command reads it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from steptime import api
from steptime.hardware import load_cluster
from steptime.hardware.records import AxisKind, Mesh, MeshAxis
from steptime.measure.mesh import cluster_file

RING, SWITCH, RAIL = AxisKind.RING, AxisKind.SWITCH, AxisKind.RAIL


def mesh(*axes: tuple[int, AxisKind, float]) -> Mesh:
    sizes = [size for size, _, _ in axes]
    places = tuple(product(*map(range, sizes)))
    return Mesh(
        axes=tuple(
            MeshAxis(size=size, kind=kind, links=size, latency_s=2e-6, Bps=rate, growth=2.0 if kind == RING else None)
            for size, kind, rate in axes
        ),
        devices=tuple(f"gpu{n}" for n in range(len(places))),
        coordinates=places,
        confidence=0.99,
        noise=0.02,
    )


CASES = [
    (((4, RING, 50e9), (4, RING, 48e9)), "torus", 1),
    (((4, RING, 50e9), (4, RING, 10e9)), "fat-tree", 4),
    (((8, SWITCH, 400e9), (4, RAIL, 50e9)), "rail", 8),
    (((8, SWITCH, 400e9), (4, SWITCH, 50e9), (2, SWITCH, 20e9)), "fat-tree", 8),
    (((8, SWITCH, 400e9),), None, 8),
]


@pytest.mark.quick(every=3)
@pytest.mark.each(("axes", "kind", "domain"), CASES)
def test_files_have_the_topology_that_was_found(
    axes: tuple[tuple[int, AxisKind, float], ...], kind: str | None, domain: int, tmp_path: Path
) -> None:
    file = tmp_path / "mesh.toml"
    cluster_file.write(file, mesh(*axes), "mi300x", "links.csv")
    cluster = load_cluster(file)
    assert (cluster.topology and cluster.topology.kind) == kind
    assert cluster.fast_domain == domain
    gpus = cluster.levels[-1].group
    found = api.plan("llama3.2-1b", str(file), gpus=gpus, global_batch=gpus, top=1)
    assert found.feasible
    assert ("order" in found.plans[0].plan) == (kind is not None)


def test_a_torus_has_all_links_of_a_device(tmp_path: Path) -> None:
    """Four links of the slower axis: 4 x 48 GB/s."""
    file = tmp_path / "mesh.toml"
    cluster_file.write(file, mesh((4, RING, 50e9), (4, RING, 48e9)), "mi300x", "links.csv")
    cluster = load_cluster(file)
    assert cluster.levels[0].link_Bps == pytest.approx(4 * 48e9)
    assert cluster.topology is not None
    assert cluster.topology.shape == (4, 4)
