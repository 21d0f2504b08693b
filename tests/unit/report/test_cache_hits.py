"""Hit rates of caches in the products of a module, on a processor of a host."""

from __future__ import annotations

import pytest

from steptime.captured.report.profile import settings_lines
from steptime_lab.hierarchy.tiles import product_hit_rates

torch = pytest.importorskip("torch")

from steptime import capture, profile  # noqa: E402


@pytest.fixture
def host(tmp_path):
    path = tmp_path / "host.toml"
    text = 'name = "h"\narchitecture = "cpu"\nmemory = "16 GB"\nmemory_bandwidth = "40 GB/s"\n'
    path.write_text(text + 'matrix = {fp32 = "100 GFLOP/s"}\nvector = {fp32 = "50 GFLOP/s"}\n')
    return str(path)


def recorded(module, x, device):
    return profile(capture(module, (x,), optimizer="none", training=False), device)


def test_a_product_has_the_rates_of_its_shape(host):
    found = recorded(torch.nn.Linear(256, 512, bias=False), torch.zeros(128, 256), host)
    assert found.cache_hit_rates == pytest.approx(product_hit_rates((128, 512, 256), "machine"))
    assert any("caches in products" in line for line in settings_lines(found))
    assert found.to_json()["cache_hit_rates"] == found.cache_hit_rates


def test_a_gpu_has_none():
    found = recorded(torch.nn.Linear(8, 8), torch.zeros(4, 8), "h100-sxm")
    assert found.cache_hit_rates == {}
