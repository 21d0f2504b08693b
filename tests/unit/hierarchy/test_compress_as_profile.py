"""The dense row of compressed products is the product that a profile times, on any device."""

import pytest

from steptime.captured.cost import Timer
from steptime.captured.graph import Nodes, TensorType
from steptime.hardware import load_device
from steptime_lab.compress import compressed


@pytest.mark.each("device", ["h100-sxm", "rtx-4090", "mi300x", "v100-sxm2-16gb", "titan-xp"])
@pytest.mark.each("tokens", [16, 1024, 8192])
def test_the_dense_product_takes_as_long_as_in_a_profile(device: str, tokens: int) -> None:
    known, nodes = load_device(device), Nodes()
    dtype = next((each for each in ("bf16", "fp16") if each in known.matrix_flops_per_s), "fp32")
    x = nodes.source("input", "x", TensorType((tokens, 4096), dtype))
    w = nodes.source("parameter", "w", TensorType((4096, 16384), dtype))
    node = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((tokens, 16384), dtype)])
    dense, *others = compressed(tokens, 16384, 4096, known)
    assert dense.time_s == pytest.approx(Timer(device=known).cost(node).seconds, rel=1e-6)
    assert dense.speedup == 1.0
    stored = next(row for row in others if row.scheme == "4-bit weights, groups of 128")
    assert stored.speedup is not None and (1.1 < stored.speedup < 4.0 if tokens == 16 else stored.speedup > 0.999)
