"""The time model of matrix products: hand numbers, monotony, arrays as numbers, and recovery by the fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.cost.gemm import gemm_backward_s, gemm_memory_s, gemm_s, knee_s, quantised_waves
from steptime.errors import UserError
from steptime.estimate.kernels import models_of
from steptime.hardware import load_device
from steptime.measure.residuals import errors_of
from steptime.measure.table import Table
from steptime.num import Array
from steptime.plan.job import PRECISIONS
from steptime_lab.calibrate.family import Coefficient
from steptime_lab.calibrate.fitting import About, cross_validated, fit, fitted_curve, hashed, pooled, take
from steptime_lab.calibrate.gemm import (
    BACKWARD,
    COEFFICIENTS,
    FAMILY,
    family_of,
    gemm_curve,
    gemm_device,
    preferred,
    truths,
)

IDEAL = {
    "compute_efficiency": 1.0, "memory_efficiency": 1.0, "latency_s": 0.0, "overlap": 100.0, "overlap_per_s": 0.0,
    "split_s": 1.0, "fill_k": 0.0, "step_s": 0.0, "operand_speed": 1e9, "output_cost": 1.0, "cached_cost": 1.0,
    "cache_copies": 1.0, "quantisation": 1.0, "throttle": 0.0, "odd_tile": 1.0,
    "large_tile": 1.0, "batched_tile": 1.0, "epilogue": 0.0,
    "split_traffic": 0.0, "quantise_s": 0.0, "quantise_row": 0.0, "stride": 0.0, "residual": 0.0,
}  # fmt: skip
REAL = {c.name: c.start for c in COEFFICIENTS} | {"stride": 0.0, "residual": 0.0}
DEVICE = {"peak_flops_per_s": 1e14, "memory_Bps": 1e12, "sm_count": 100.0, "l2_bytes": 4e7}
ELEMENTS = {"a_bytes": 2.0, "b_bytes": 2.0, "out_bytes": 2.0}


def time_s(m: float, n: float, k: float, batch: float = 1, given: dict[str, float] = REAL, **device: float) -> float:
    return float(gemm_s(m, n, k, batch, **ELEMENTS, **(DEVICE | device), **given))


def test_whole_waves_run_at_the_peak() -> None:
    seconds = time_s(1280, 1280, 4096, given=IDEAL, memory_Bps=1e15)
    assert seconds == pytest.approx(2 * 1280 * 1280 * 4096 / 1e14, rel=1e-9)


def test_one_tile_too_many_costs_a_wave() -> None:
    # A step of 1 us per element of k makes all tiles alike, so that each product is one tile.
    slow = IDEAL | {"step_s": 1e-6}
    one, two = (time_s(128, 128, 4096, batch=batch, given=slow) for batch in (100, 101))
    assert (one, two) == (pytest.approx(4096e-6), pytest.approx(2 * 4096e-6))


def test_a_thin_product_runs_at_the_bandwidth() -> None:
    seconds = time_s(1, 8192, 8192, given=IDEAL | {"split_s": 0.0})
    assert seconds == pytest.approx((8192 * 8192 + 2 * 8192) * 2 / 1e12, rel=1e-6)


def test_cold_caches_are_slower_and_large_products_do_not_notice() -> None:
    small = {"cached_cost": 0.2, "cache_copies": 6.0}
    given = REAL | small
    assert time_s(8, 1024, 1024, given=given) < time_s(8, 1024, 1024, given=given, l2_bytes=0.0)
    assert time_s(8192, 8192, 8192, given=given) == pytest.approx(time_s(8192, 8192, 8192, given=given, l2_bytes=0.0))


def test_memory_time_by_hand() -> None:
    assert gemm_memory_s(10, 20, 30, 2, 2, 1, 4, 1e3, 0, 0.5, 2.0, 0.5, 6.0) == pytest.approx(
        2 * (10 * 30 * 2 + 30 * 20 * 1 + 2.0 * 10 * 20 * 4) / 500
    )


def test_waves_and_knee_by_hand() -> None:
    assert quantised_waves(250, 100, 1.0) == 3.0
    assert quantised_waves(250, 100, 0.0) == 2.5
    assert knee_s(6.0, 8.0, 1.0, 0.125) == pytest.approx(10.0)


def test_narrow_operands_are_converted_first() -> None:
    given = REAL | {"quantise_s": 1e-9, "quantise_row": 1000.0}
    shape = {"m": 64.0, "n": 512.0, "k": 3000.0, "batch": 2.0, "b_bytes": 1.0, "out_bytes": 2.0}
    with_, without = (gemm_s(**shape, a_bytes=1.0, **DEVICE, **(given | more)) for more in ({}, {"quantise_s": 0.0}))
    assert with_ - without == pytest.approx(1e-9 * 2 * 64 * 4000 / 100)
    wide = [gemm_s(**shape, a_bytes=2.0, **DEVICE, **(given | more)) for more in ({}, {"quantise_s": 0.0})]
    assert wide[0] == wide[1]


def test_rows_that_lie_far_apart_cost() -> None:
    near, far = (time_s(1280, 1280, k, given=IDEAL | {"stride": 0.25}, memory_Bps=1e15) for k in (1024, 32768))
    assert near == pytest.approx((1 + 0.25 / 32) * 2 * 1280 * 1280 * 1024 / 1e14)
    assert far == pytest.approx(1.25 * 2 * 1280 * 1280 * 32768 / 1e14), "rows of 64 KiB"


def test_the_inner_loop_takes_fewer_wide_elements() -> None:
    slow, wide = IDEAL | {"step_s": 1e-6}, dict.fromkeys(ELEMENTS, 4.0)
    short, long = (float(gemm_s(128, 128, k, 1, **wide, **DEVICE, **slow)) for k in (3, 9))
    assert (short, long) == (pytest.approx(8e-6), pytest.approx(16e-6))
    assert time_s(128, 128, 3, given=slow) == pytest.approx(32e-6)


def test_only_single_precision_is_fitted_to_the_distance_of_rows() -> None:
    wide, narrow = (family_of(dtype) for dtype in ("fp32", "bf16"))
    assert {c.name for c in wide.coefficients} - {c.name for c in narrow.coefficients} == {"stride"}
    shape = {"m": 512.0, "n": 512.0, "k": 65536.0, "batch": 1.0, **ELEMENTS}
    bare = {name: value for name, value in REAL.items() if name not in ("stride", "residual")}
    assert narrow.predict(shape, DEVICE, bare) == pytest.approx(time_s(512, 512, 65536))
    assert wide.predict(shape, DEVICE, bare | {"stride": 0.5}) == pytest.approx(
        time_s(512, 512, 65536, given=REAL | {"stride": 0.5})
    )
    assert BACKWARD.predict(shape, DEVICE, bare) < BACKWARD.predict(shape, DEVICE, bare | {"stride": 0.5})


def test_batched_products_may_be_held_to_one_tile() -> None:
    slow = IDEAL | {"batched_tile": 3.0}
    alone, held = (time_s(128, 64, 4096, batch, given=slow, memory_Bps=1e15) for batch in (1, 400))
    assert held == pytest.approx(4 * 2 * 128 * 128 * 4096 * 100 / 1e14), "the smaller tile is no gain"
    assert time_s(128, 64, 4096, 400, given=IDEAL, memory_Bps=1e15) == pytest.approx(held / 2)
    assert alone < held


def test_a_split_pays_for_its_partial_sums() -> None:
    given = [IDEAL | {"split_s": 0.0, "split_traffic": cost} for cost in (0.0, 1.0)]
    free, dear = (time_s(64, 64, 65536, given=values, memory_Bps=1e13) for values in given)
    assert dear - free == pytest.approx(100 * 4 * 64 * 64 / 1e13, rel=0.05)


def test_the_end_of_a_tile_and_large_tiles_cost() -> None:
    given = {"memory_Bps": 1e15}
    plain = time_s(1280, 1280, 4096, given=IDEAL, **given)
    assert time_s(1280, 1280, 4096, given=IDEAL | {"epilogue": 2.0}, **given) - plain == pytest.approx(
        2.0 * 1280 * 1280 / 1e15
    )
    slow = IDEAL | {"step_s": 1e-6, "large_tile": 1.5}
    assert time_s(2560, 2560, 4096, given=slow) == pytest.approx(1.5 * 4096e-6), "one wave of the largest tile"


@pytest.mark.each("better", ["peak_flops_per_s", "memory_Bps"])
@pytest.mark.each("shape", [(1, 4096, 4096), (129, 768, 768), (4096, 4096, 4096), (33, 65536, 64)])
def test_a_better_device_is_not_slower(better: str, shape: tuple[int, int, int]) -> None:
    assert time_s(*shape, **{better: 2 * DEVICE[better]}) <= time_s(*shape)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_twice_the_work_is_not_faster(dim: int) -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        shape = 2.0 ** random.integers(3, 14, 3)
        larger = shape.copy()
        larger[dim] *= 2
        # A library may choose badly, the model not: it takes the best tile, and a tile of half the work exists.
        assert time_s(*larger) >= 0.97 * time_s(*shape)


def test_numbers_and_arrays_agree() -> None:
    random = np.random.default_rng(2)
    m, n, k = (random.integers(1, 9000, 200).astype(float) for _ in range(3))
    many = gemm_s(m, n, k, 1.0, **ELEMENTS, **DEVICE, **REAL)
    np.testing.assert_allclose(many, [time_s(*row) for row in zip(m, n, k, strict=True)], rtol=1e-12)
    assert isinstance(gemm_s(64, 64, 64, 1, **ELEMENTS, **DEVICE, **REAL), float)


def test_backward_is_both_gradients() -> None:
    rest = {name: value for name, value in REAL.items() if name != "residual"}
    both = gemm_backward_s(256, 512, 1024, 2, **ELEMENTS, **DEVICE, **rest, input_residual=0.0, weight_residual=0.0)
    assert both == pytest.approx(time_s(256, 1024, 512, 2) + time_s(1024, 512, 256, 2))
    shape = {"m": 256.0, "n": 512.0, "k": 1024.0, "batch": 2.0, **ELEMENTS}
    assert BACKWARD.predict(shape, DEVICE, REAL) == pytest.approx(both)


def synthetic(rows: int = 400, seed: int = 3) -> tuple[dict[str, Array], Array, dict[str, float]]:
    random = np.random.default_rng(seed)
    shape = {name: 2.0 ** random.integers(4, 14, rows) for name in ("m", "n", "k")}
    shape |= {"batch": np.ones(rows)} | {name: np.full(rows, 2.0) for name in ELEMENTS}
    truth = REAL | {"compute_efficiency": 0.6, "memory_efficiency": 0.9, "latency_s": 6e-6, "quantisation": 0.8}
    clean = np.asarray(FAMILY.predict(shape, DEVICE, truth))
    return shape, clean * np.exp(0.02 * random.standard_normal(rows)), truth


@pytest.mark.slow
def test_the_fit_recovers_what_made_the_data() -> None:
    pytest.importorskip("scipy")
    shape, seconds, truth = synthetic()
    seconds[::40] *= 5  # outliers
    found = fit(FAMILY, shape, DEVICE, seconds)
    for name in ("compute_efficiency", "memory_efficiency", "latency_s"):
        assert found[name] == pytest.approx(truth[name], rel=0.06), name
    held = fit(FAMILY, shape, DEVICE, seconds, fixed={"latency_s": 6e-6})
    assert held["latency_s"] == 6e-6


def test_cross_validation_never_sees_a_shape_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import steptime_lab.calibrate.fitting as fitting

    shape, seconds, _ = synthetic(60)
    twice = {name: np.concatenate([values, values]) for name, values in shape.items()}
    groups = hashed(twice[name] for name in ("m", "n", "k"))
    seen: list[set[Any]] = []

    def record(family: Any, train: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        seen.append(set(hashed(train[name] for name in ("m", "n", "k")).tolist()))
        return dict(REAL)

    monkeypatch.setattr(fitting, "fit", record)
    out = cross_validated(FAMILY, twice, DEVICE, np.concatenate([seconds, seconds]), groups)
    assert np.isfinite(out).all()
    for part, train in zip(np.unique(groups % np.uint64(5)), seen, strict=True):
        assert not train & set(groups[groups % np.uint64(5) == part].tolist())


@pytest.mark.slow
def test_a_curve_has_its_errors_and_ranges() -> None:
    pytest.importorskip("scipy")
    shape, seconds, _ = synthetic(300)
    groups = hashed(shape[name] for name in ("m", "n", "k"))
    curve = fitted_curve(FAMILY, shape, DEVICE, seconds, groups, about=About(dtype="bf16", source="made up"), folds=3)
    assert curve.median_ape < 0.04 and abs(curve.bias) < 0.02
    assert 0.9 < curve.band[0] < 1 < curve.band[1] < 1.1
    assert curve.ranges["m"] == (16.0, 8192.0)


def test_too_few_rows_are_refused() -> None:
    pytest.importorskip("scipy")
    shape, seconds, _ = synthetic(5)
    with pytest.raises(UserError, match="5 measurements cannot fix 21"):
        fit(FAMILY, shape, DEVICE, seconds)


def test_helpers_of_the_fit() -> None:
    result = errors_of(np.array([1.1, 0.9, 1.0]), np.ones(3))
    assert (result.points, result.bias) == (3, pytest.approx(0.0))
    assert take({"a": np.array([1, 2, 3]), "b": 4.0}, np.array([0, 2]))["b"] == 4.0
    np.testing.assert_array_equal(pooled([{"x": 1.0}, {"x": np.array([2.0, 3.0])}], [1, 2])["x"], [1, 2, 3])
    same = hashed([np.array([1.0, 1.0, 2.0])])
    assert same[0] == same[1] != same[2]
    assert all(isinstance(c, Coefficient) and c.low <= c.start <= c.high for c in COEFFICIENTS)


def rows_of(*rows: tuple[str, str, float, float, str]) -> Table:
    """Rows of (source, dtype, m, microseconds, notes)."""
    columns = list(zip(*rows, strict=True))
    count = len(rows)
    text = {"source": columns[0], "dtype": columns[1], "notes": columns[4]}
    text |= {"gpu": ["H100-SXM5-80GB"] * count, "op": ["gemm"] * count, "method": ["cuda_graph_mean"] * count}
    numbers = {"m": columns[2], "latency_us": columns[3], "n": [64.0] * count, "k": [64.0] * count}
    numbers["batch"] = [np.nan] * count
    return Table(
        {k: np.array(v, object) for k, v in text.items()} | {k: np.array(v, np.float64) for k, v in numbers.items()}
    )


def test_truth_is_the_median_per_shape() -> None:
    table = rows_of(
        ("s", "bfloat16", 8, 1.0, "fw=a"), ("s", "bfloat16", 8, 2.0, "fw=b"), ("s", "bfloat16", 8, 9.0, "fw=c"),
        ("s", "bfloat16", 16, 5.0, ""), ("s", "bfloat16", 0, 5.0, ""), ("s", "mystery", 16, 5.0, ""),
        ("s", "bfloat16", 32, 5.0, "SUSPECT"), ("s", "fp8", 8, 1.0, "fw=a;x"), ("s", "fp8", 8, 3.0, "fw=b;x"),
    )  # fmt: skip
    found = {(t.source, t.dtype): t for t in truths(table)}
    assert set(found) == {("s", "bf16"), ("s/a", "fp8"), ("s/b", "fp8")}
    plain = found["s", "bf16"]
    assert dict(zip(plain.shape["m"], plain.measured_s, strict=True)) == pytest.approx({8.0: 2e-6, 16.0: 5e-6})
    assert plain.timer == "kernel" and plain.device.name == "h100-sxm"


@pytest.mark.slow
def test_the_framework_in_the_middle_is_preferred() -> None:
    rows = []
    for framework, factor in (("slow", 9.0), ("fast", 1.0), ("middle", 2.0)):
        rows += [("aiconfigurator_gemm", "fp8", float(m), factor * 5, f"fw={framework}") for m in range(1, 80)]
    chosen = preferred(truths(rows_of(*rows)))
    assert [t.source for t in chosen] == ["aiconfigurator_gemm/middle"]
    curve = gemm_curve(chosen[0], folds=2)
    assert (curve.family, curve.dtype, curve.timer) == ("gemm", "fp8", "kernel")


def test_device_arguments() -> None:
    h100 = load_device("h100-sxm")
    assert gemm_device(h100, "fp8")["peak_flops_per_s"] == h100.matrix_flops_per_s["fp8"]
    assert gemm_device(load_device("v100"), "bf16")["peak_flops_per_s"] == 125e12
    assert gemm_device(load_device("tpu-v5e"), "bf16")["sm_count"] == 64
    with pytest.raises(UserError, match="fp4"):
        gemm_device(h100, "fp4")


@pytest.mark.parametrize("rate", ["10 TFLOP/s", "20 TFLOP/s", "100 TFLOP/s"])
def test_units_that_a_file_makes_slower_are_no_faster_than_it_says(rate: str, tmp_path: Path) -> None:
    """Fitted shares of the peak may exceed one, as long as other costs beside them keep a product below it."""
    file = tmp_path / "slow.toml"
    file.write_text(f'base = "a100-sxm-80gb"\n[matrix]\nbf16 = "{rate}"\n')
    device = load_device(file)
    peak = device.matrix_flops_per_s["bf16"]
    model = models_of(device, PRECISIONS["bf16"])["matmul"]
    shape = {"m": 65536.0, "n": 16384.0, "k": 16384.0, "residual": 0.0}
    assert 0.9 < 2 * 65536 * 16384**2 / peak / float(model.seconds(shape)) <= 1
    known = models_of(load_device("a100-sxm-80gb"), PRECISIONS["bf16"])["matmul"]
    assert known.fixed["compute_efficiency"] > 1, "the catalogue's is as it was fitted"
