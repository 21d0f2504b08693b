"""Products in formats below 16 bits: what their rows measure, whose curve predicts them, how wide the band is."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.hardware.profiles import load_profile
from steptime.measure.table import Table
from steptime_lab.calibrate.gemm import FAMILY, gemm_curve, gemm_shape, implementation, truths
from steptime_lab.calibrate.transfer import OTHER_IMPLEMENTATION, of_others
from steptime_lab.scoring.kernels import predict_kernels

TEXTS = {"source": "aiconfigurator_gemm", "gpu": "B200-SXM", "op": "gemm", "dtype": "fp8", "method": "cuda_graph_mean",
         "kernel": "", "notes": ""}  # fmt: skip


def table(*rows: dict[str, str | float]) -> Table:
    numbers = {"m": 256.0, "n": 4096.0, "k": 4096.0, "batch": 1.0, "latency_us": 20.0}
    columns = {name: np.array([row.get(name, value) for row in rows], dtype=object) for name, value in TEXTS.items()}
    return Table(columns | {name: np.array([float(row.get(name, v)) for row in rows]) for name, v in numbers.items()})


def test_only_layers_of_frameworks_convert_their_operands() -> None:
    rows = table({"notes": "fw=vllm;v=1"}, {}, {"dtype": "f8e4m3fnxf8e4m3fn->bf16"}, {"dtype": "bfloat16"})
    assert gemm_shape(rows)["converted"].tolist() == [1.0, 0.0, 0.0, 1.0]
    seconds = predict_kernels(rows).seconds
    assert seconds[1] == seconds[2] < 0.95 * seconds[0]


def test_kernels_alone_take_longer_in_16_bits() -> None:
    alone = "derived_from_flops(median kernel time)"
    same = {"dtype": "bfloat16"}
    rows = table(same, {**same, "method": alone}, {"dtype": "f32xf32->f32", "method": alone})
    assert gemm_shape(rows)["alone_s"].tolist() == [0.0, 2.3e-6, 0.0]
    seconds = predict_kernels(rows).seconds
    assert seconds[1] - seconds[0] == pytest.approx(2.3e-6, rel=0.35)  # times what a residual leaves over


@pytest.mark.quick(without=["fp8"])
@pytest.mark.parametrize("dtype", ["fp8", "nvfp4"])
def test_layers_of_all_frameworks_take_the_curve_that_an_estimate_takes(dtype: str) -> None:
    found = predict_kernels(table(*({"dtype": dtype, "notes": f"fw={name};v=1"} for name in ("vllm", "other"))))
    assert found.seconds[0] == found.seconds[1] and found.origin.tolist() == ["own"] * 2
    assert implementation("s", dtype, "fw=vllm;v=1") == "s/vllm" and implementation("s", dtype, "") == "s"
    low, high = OTHER_IMPLEMENTATION[{"nvfp4": "fp4"}.get(dtype, dtype)]
    assert (np.log(found.high_s / found.low_s) >= high - low - 1e-9).all(), "it was fitted to one of them"


def test_bands_of_implementations_that_a_curve_does_not_know() -> None:
    profile = load_profile("b200-sxm")
    assert profile is not None
    narrow, wide = profile.curve("gemm", "fp8"), profile.curve("gemm", "bf16")
    assert narrow is not None and wide is not None
    assert of_others(wide) == wide.band
    assert of_others(narrow)[0] < narrow.band[0] and of_others(narrow)[1] > narrow.band[1]


def test_a_fit_knows_what_its_rows_convert() -> None:
    """Layers and products alone of one source are two truths; both are modelled by one formula."""
    found = list(truths(table({"notes": "fw=vllm;v=1"}, {})))
    assert [t.source for t in found] == ["aiconfigurator_gemm", "aiconfigurator_gemm/vllm"]
    assert [t.shape["converted"].tolist() for t in found] == [[0.0], [1.0]]
    curve = load_profile("b200-sxm").curve("gemm", "fp8")  # type: ignore[union-attr]
    product, layer = (float(FAMILY.predict(t.shape, t.arguments, curve.coefficients)[0]) for t in found)  # type: ignore[index,union-attr]
    assert product < layer


@pytest.mark.slow
def test_a_curve_has_ranges_of_sizes_alone() -> None:
    rng = np.random.default_rng(0)
    rows = [{"m": float(m), "n": float(n), "k": 2048.0, "latency_us": 10 + m * n * 1e-6, "notes": "fw=vllm;v=1"}
            for m, n in rng.integers(64, 4096, (24, 2))]  # fmt: skip
    curve = gemm_curve(next(truths(table(*rows))), folds=2)
    assert {"m", "n", "k", "batch"} <= set(curve.ranges) and not {"converted", "alone_s"} & set(curve.ranges)
