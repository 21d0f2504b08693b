"""Mesh discovery on synthetic fabrics: the shape comes back from noisy, shuffled links."""

import pytest

from steptime.calibrate.mesh import discover, synthetic

FABRICS = {
    "flat": (synthetic.flat_switch(6), (6,)),
    "islands": (synthetic.nvlink_islands(4, 8), (8, 4)),
    "not a power of two": (synthetic.nvlink_islands(3, 6), (6, 3)),
    "fat tree": (synthetic.fat_tree(4, 3, 3), (4, 3, 3)),
}


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("seed", range(3))
def test_shape_comes_back(name, seed):
    fabric, shape = FABRICS[name]
    links = synthetic.measured(fabric, seed, sigma=0.1)[0]
    mesh = discover(links)
    assert mesh.shape == shape
    assert 0 < mesh.confidence <= 1
    assert not mesh.broken_links


def test_a_mesh_without_noise_has_no_noise():
    fabric, shape = FABRICS["islands"]
    mesh = discover(synthetic.measured(fabric, 0, sigma=0.0)[0])
    assert mesh.shape == shape
    assert mesh.noise < 1e-6
