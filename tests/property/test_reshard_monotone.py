"""No resharding takes less time for more bytes, nor more time on faster links or memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.captured.ops.placement import P, R, shard
from steptime.hardware import load_cluster
from steptime.sharding.mesh import Mesh, mesh_on
from steptime.sharding.reshard import costs
from suites import examples

EVERY = list(product((R, shard(0), shard(1), P), repeat=2))
CLUSTERS = ("dgx-h100", "dgx-a100", "frontier", "h200-nvl-4", "perlmutter")
MESHES = {(name, sizes): mesh_on(load_cluster(name), dict(zip(("data", "model"), sizes, strict=True)))
          for name in CLUSTERS for sizes in ((2, 4), (8, 8), (4, 16))}  # fmt: skip
ROUNDING = 1 + 1e-9


def table(mesh: Mesh, element_bytes: float, rows: int = 256, columns: int = 512) -> np.ndarray:
    out: np.ndarray = costs((rows, columns), element_bytes, EVERY, EVERY, mesh)
    return out


@settings(max_examples=examples(40))
@given(st.sampled_from(sorted(MESHES)), st.floats(1.0, 1e5), st.floats(1.0, 100.0))
def test_more_bytes_take_no_less_time(key: tuple[str, tuple[int, int]], element_bytes: float, more: float) -> None:
    mesh = MESHES[key]
    assert (table(mesh, element_bytes) <= table(mesh, element_bytes * more) * ROUNDING).all()


@settings(max_examples=examples(20))
@given(st.sampled_from(sorted(MESHES)), st.floats(1.0, 1e5), st.integers(1, 8), st.integers(1, 8))
def test_a_longer_tensor_takes_no_less_time(
    key: tuple[str, tuple[int, int]], element_bytes: float, rows: int, columns: int
) -> None:
    mesh = MESHES[key]
    longer = table(mesh, element_bytes, 256 * rows, 512 * columns)
    assert (table(mesh, element_bytes) <= longer * ROUNDING).all()


@settings(max_examples=examples(40))
@given(
    st.sampled_from(sorted(MESHES)), st.floats(1.0, 1e5), st.sampled_from(["fast_Bps", "slow_Bps", "memory_Bps"]),
    st.floats(1.0, 10.0),
)  # fmt: skip
def test_faster_links_and_memory_take_no_more_time(
    key: tuple[str, tuple[int, int]], element_bytes: float, rate: str, factor: float
) -> None:
    mesh = MESHES[key]
    rates = {rate: factor} | ({"lone_slow_Bps": factor} if rate == "slow_Bps" else {})
    faster = replace(mesh, machine=mesh.machine.faster(**rates))
    assert (table(faster, element_bytes) <= table(mesh, element_bytes) * ROUNDING).all()


@pytest.mark.parametrize("rate", ["fast_Bps", "slow_Bps", "memory_Bps"])
def test_each_rate_matters_somewhere(rate: str) -> None:
    mesh = MESHES["dgx-h100", (8, 8)]
    rates = {rate: 2.0} | ({"lone_slow_Bps": 2.0} if rate == "slow_Bps" else {})
    faster = replace(mesh, machine=mesh.machine.faster(**rates))
    assert (table(faster, 1e3) < table(mesh, 1e3)).any()
