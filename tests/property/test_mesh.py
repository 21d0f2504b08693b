"""What holds for every mesh: order, names and units of the measurements change nothing but names and units."""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steptime.errors import UserError
from steptime.measure.mesh import Links, Quantity, discover, read_links, synthetic
from steptime.measure.mesh.groups import log_partitions, partition
from steptime.measure.mesh.layout import find_chain
from steptime.num import divisors
from suites import examples

SLOW = settings(max_examples=examples(25))
KINDS = st.sampled_from(sorted(synthetic.KINDS))
SEEDS = st.integers(0, 10**6)


def scaled(links: Links, factor: float, order: np.ndarray) -> Links:
    return Links(
        names=tuple(links.names[i] for i in order),
        quantities=tuple(
            Quantity(kind=q.kind, size_bytes=q.size_bytes, values=q.values[np.ix_(order, order)] * factor)
            for q in links.quantities
        ),
    )


@SLOW
@given(shape=st.lists(st.integers(2, 6), min_size=1, max_size=3), step=st.floats(3.0, 8.0), seed=SEEDS)
def test_clear_levels_are_always_found(shape: list[int], step: float, seed: int) -> None:
    """Steps of 3 and more against noise of 0.05: nothing is left to chance. A pair of pairs is a ring of four, too."""
    cost = step ** np.arange(len(shape))
    fabric = synthetic.nested("any", shape, list(2e-6 * cost), list(4e11 / cost))
    mesh = discover(synthetic.measured(fabric, seed, sigma=0.05)[0])
    assert mesh.shape == tuple(shape)


@pytest.mark.slow
@SLOW
@given(kind=KINDS, seed=SEEDS, factor=st.floats(0.01, 100.0))
def test_order_and_speed_of_the_whole_do_not_matter(kind: str, seed: int, factor: float) -> None:
    fabric = synthetic.random_fabric(kind, seed, largest=72)
    links = synthetic.measured(fabric, seed)[0]
    order = np.random.default_rng(seed).permutation(links.devices)
    one, other = discover(links), discover(scaled(links, factor, order))
    assert one.shape == other.shape
    assert other.noise == pytest.approx(one.noise, rel=0.2)
    for a, b in zip(one.axes, other.axes, strict=True):
        if a.Bps is not None and "torus" not in kind:
            assert b.Bps == pytest.approx(a.Bps / factor, rel=0.1)


def joined(links: Links) -> bool:
    """Whether measured links join all devices; what they do not join is refused."""
    measured = ~np.isnan(np.stack([quantity.values for quantity in links.quantities])).all(axis=0)
    near = measured | measured.T | np.eye(links.devices, dtype=bool)
    return bool((np.linalg.matrix_power(near.astype(float), links.devices) > 0).all())


@pytest.mark.slow
@SLOW
@given(kind=KINDS, seed=SEEDS)
def test_a_mesh_is_well_formed(kind: str, seed: int) -> None:
    fabric = synthetic.random_fabric(kind, seed, largest=72)
    links = synthetic.measured(fabric, seed, sigma=0.3, missing=0.1)[0]
    assume(joined(links))
    mesh = discover(links)
    assert math.prod(mesh.shape) == len(mesh.devices) == fabric.devices
    assert len(set(mesh.coordinates)) == fabric.devices
    assert all(0 <= place < size for row in mesh.coordinates for place, size in zip(row, mesh.shape, strict=True))
    assert 0 <= mesh.confidence < 1
    assert mesh.noise >= 0
    assert all(axis.links > 0 for axis in mesh.axes)
    assert all(link.factor >= 1.5 for link in mesh.broken_links + mesh.asymmetric_links)


@settings(max_examples=examples(60))
@given(blocks=st.integers(1, 4), length=st.integers(2, 20), seed=SEEDS, data=st.data())
def test_partitions_are_partitions(blocks: int, length: int, seed: int, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(divisors(length)[:-1] if length > 1 else [1]))
    random = np.random.default_rng(seed)
    distances = np.triu(random.random((blocks * length, blocks * length)), 1)
    distances += distances.T
    rows = random.permutation(blocks * length).reshape(blocks, length)
    found = partition(distances, rows, group)
    assert found.shape == (blocks, length // group, group)
    for block, groups in zip(rows, found, strict=True):
        assert sorted(groups.reshape(-1)) == sorted(block)
    assert log_partitions(length, group) >= -1e-9


@settings(max_examples=examples(40))
@given(length=st.integers(2, 30), seed=SEEDS)
def test_chains_are_nested(length: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    distances = np.triu(random.normal(size=(length, length)), 1)
    distances += distances.T
    chain = find_chain(distances, np.arange(length)[None])
    bounds = (1, *chain.sizes, length)
    assert all(outer % inner == 0 and outer > inner for inner, outer in pairwise(bounds))
    assert sorted(chain.order.reshape(-1)) == list(range(length))


CELLS = st.sampled_from(
    [
        "a",
        "b",
        "c",
        "0",
        "1",
        "-1",
        "1e-6",
        "2e-6",
        "8",
        "nan",
        "inf",
        "",
        "-",
        "us",
        "GB/s",
        "3 us",
        "1e999",
        '"',
        "#",
        "é",
    ]
)
HEADS = st.sampled_from(
    [
        "source,target,bytes,seconds",
        "src,dst,latency_us",
        "src,dst,latency,bandwidth",
        "us,a,b",
        "a,b",
        "",
        "source,target",
    ]
)


@settings(max_examples=examples(300))
@given(head=HEADS, rows=st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=5))
def test_any_file_is_links_or_a_user_error(tmp_path: Path, head: str, rows: list[list[str]]) -> None:
    path = tmp_path / "any.csv"
    path.write_text("\n".join([head, *(",".join(row) for row in rows)]), encoding="utf-8")
    with contextlib.suppress(UserError):
        mesh = discover(read_links(path, None))
        assert math.prod(mesh.shape) == len(mesh.devices)
