"""The table of what the model of matrix products leaves over: knots, limits, and its fit."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.cost.gemm import LIMIT, NAMES, gemm_residual, residual_table
from steptime.num import Array
from steptime_lab.calibrate.gemm import BACKWARD, COEFFICIENTS, FAMILY, fitted_residual, hats

SM = 100.0
TABLE = {"residual_2_1_0": 0.2, "residual_2_1_1": 0.2}
"""0.2 at k = 2^9 and 2^-4 tiles per multiprocessor, whatever the aspect."""
COLUMNS = 128.0 * SM / 16
"""Columns of a result of 128 rows that make 2^-4 tiles per multiprocessor."""
START = {c.name: c.start for c in COEFFICIENTS}
DEVICE = {"peak_flops_per_s": 1e14, "memory_Bps": 1e12, "sm_count": SM, "l2_bytes": 4e7}
ELEMENTS = {"a_bytes": 2.0, "b_bytes": 2.0, "out_bytes": 2.0}


def at(k: float, n: float = COLUMNS, values: dict[str, float] = TABLE) -> float:
    return float(gemm_residual(128.0, n, k, 1.0, SM, residual_table(values)))


def test_knots_and_the_lines_between_them() -> None:
    assert at(512) == pytest.approx(0.2)
    assert at(1024) == pytest.approx(0.1), "half a step in log k"
    assert at(512, 2 * COLUMNS) == pytest.approx(0.2 * 2 / 3), "a third of a step in tiles"
    assert at(2048) == pytest.approx(0.0)


def test_the_edge_falls_to_zero_within_a_step() -> None:
    edge = {f"residual_5_1_{aspect}": 0.2 for aspect in (0, 1)}
    assert at(2.0**15, values=edge) == pytest.approx(0.2)
    assert at(2.0**16, values=edge) == pytest.approx(0.1)
    assert at(2.0**17, values=edge) == at(2.0**40, values=edge) == at(1.0, values=edge) == 0.0


def test_a_table_is_bounded_and_may_be_missing() -> None:
    wild = {name: 5.0 * value for name, value in TABLE.items()}
    assert at(512, values=wild) == pytest.approx(LIMIT)
    assert residual_table({"latency_s": 1e-6}) is None
    assert gemm_residual(8, 8, 8, 1, SM, None) == 0.0


def test_numbers_and_arrays_agree() -> None:
    random = np.random.default_rng(4)
    table = residual_table({name: random.uniform(-LIMIT, LIMIT) for name in NAMES})
    m, n, k = (2.0 ** random.uniform(-2, 22, 300) for _ in range(3))
    many = gemm_residual(m, n, k, 2.0, SM, table)
    each = [gemm_residual(*row, 2.0, SM, table) for row in zip(m.tolist(), n.tolist(), k.tolist(), strict=True)]
    np.testing.assert_allclose(many, each, rtol=0, atol=1e-12)
    assert np.ptp(np.asarray(many)) > 0.1 and isinstance(each[0], float)


def shapes(rows: int) -> dict[str, Array]:
    random = np.random.default_rng(5)
    return {name: 2.0 ** random.uniform(4, 15, rows) for name in ("m", "n", "k")} | {"batch": np.ones(rows)}


def test_the_fit_finds_the_table_and_shrugs_off_outliers() -> None:
    shape = shapes(4000)
    truth = dict(zip(NAMES, np.random.default_rng(6).uniform(-0.1, 0.1, len(NAMES)), strict=True))
    basis = hats(shape, {"sm_count": SM})
    error = basis @ np.array(list(truth.values()))
    error[::50] += 1.0
    found = fitted_residual(shape, {"sm_count": SM}, error)
    again = basis @ np.array([found.get(name, 0.0) for name in NAMES])
    clean = np.arange(len(error)) % 50 > 0
    assert np.abs(again - error)[clean].mean() < 0.01 < np.abs(error)[clean].mean() / 2


def test_few_shapes_get_no_table_and_far_knots_stay_out() -> None:
    assert fitted_residual(shapes(499), {"sm_count": SM}, np.ones(499)) == {}
    shape = shapes(600) | {"k": np.full(600, 512.0)}
    found = fitted_residual(shape, {"sm_count": SM}, np.ones(600))
    assert {name.split("_")[1] for name in found} == {"2"}, "only the measured k"
    assert max(found.values()) == LIMIT


def test_both_families_use_the_table() -> None:
    shape = {"m": 128.0, "n": COLUMNS, "k": 512.0, "batch": 1.0, **ELEMENTS}
    plain, corrected = (FAMILY.predict(shape, DEVICE, START | more) for more in ({}, TABLE))
    assert corrected / plain == pytest.approx(np.exp(0.2))
    square = shape | {"m": 512.0, "n": 512.0}
    plain, corrected = (BACKWARD.predict(square, DEVICE, START | more) for more in ({}, TABLE))
    one = gemm_residual(512.0, 512.0, 512.0, 1.0, SM, residual_table(TABLE))
    assert corrected / plain == pytest.approx(np.exp(one)) and one > 0.01


def test_values_are_bounded_both_ways_rounded_and_left_out_where_they_are_small() -> None:
    basis = hats(shapes(4000), {"sm_count": SM})
    well_known = (basis**2).sum(axis=0) > 25
    assert well_known.sum() > 5

    def found(values: Array) -> Array:
        out = fitted_residual(shapes(4000), {"sm_count": SM}, basis @ values)
        return np.array([out.get(name, 0.0) for name in NAMES])[well_known]

    assert (found(np.full(len(NAMES), -1.0)) == -LIMIT).all()
    assert (found(np.full(len(NAMES), 0.0015)) == 0).all()
    kept = found(np.full(len(NAMES), 0.0031))
    assert ((kept > 0.0029) & (kept < 0.0032)).all()
    assert (kept == np.round(kept, 4)).all() and (kept != np.round(kept, 3)).any()
