"""The part of the time of matrix products that the model leaves over, fitted as a small table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from steptime.cost.gemm import LIMIT, NAMES, gemm_residual, residual_table
from steptime.num import Array

#: Shapes that a table needs.
LEAST_SHAPES: Final = 500
#: How many measurements of log 0 at its knot a value of the table has to outweigh.
PULL: Final = 2.0
#: Log error beyond which a measurement counts less.
OUTLIER: Final = 0.05
#: Rounds of reweighting.
ROUNDS: Final = 5
#: Values of the table that are smaller than this are left out.
LEAST: Final = 0.002


def fitted_residual(shape: Mapping[str, Array], device: Mapping[str, Any], log_error: Array) -> dict[str, float]:
    r"""Values of the table, by name.

    $$\min_c \sum_i w_i (B c - r)_i^2 + \lambda \lVert c \rVert^2, \quad
        w_i = \big(1 + (B c - r)_i^2 / 0.05^2\big)^{-1/2}$$

    where $r$ = `log_error` (log of measured over modelled time), $B$ the hat functions of
    :func:`steptime.cost.gemm.gemm_residual` and $\lambda = 2$. Nothing for fewer than 500 shapes.

    Source: ridge regression with iterative reweighting.
    """
    if len(log_error) < LEAST_SHAPES:
        return {}
    basis = hats(shape, device)
    weights: Array = np.ones(len(log_error))
    values: Array = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        weighted = basis * weights[:, None]
        values = np.linalg.solve(weighted.T @ basis + PULL * np.eye(len(NAMES)), weighted.T @ log_error)
        weights = 1 / np.sqrt(1 + ((basis @ values - log_error) / OUTLIER) ** 2)
    kept = zip(NAMES, np.clip(values, -LIMIT, LIMIT), strict=True)
    return {name: round(float(value), 4) for name, value in kept if abs(value) >= LEAST}


def hats(shape: Mapping[str, Array], device: Mapping[str, Any]) -> Array:
    """Value of each hat function (columns) for each row."""
    columns = [_of(shape, "m", "n", "k", device, residual_table({name: LIMIT})) for name in NAMES]
    return np.stack([np.asarray(column) for column in columns], axis=1) / LIMIT


def residual_of(shape: Mapping[str, Any], device: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The residual of products, an argument of the model."""
    table = residual_table(values)
    return {"residual": _of(shape, "m", "n", "k", device, table)}


def residuals_of_gradients(
    shape: Mapping[str, Any], device: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The residuals of both gradients of products, arguments of the model."""
    table = residual_table(values)
    return {
        "input_residual": _of(shape, "m", "k", "n", device, table),
        "weight_residual": _of(shape, "k", "n", "m", device, table),
    }


def _of(shape: Mapping[str, Any], m: str, n: str, k: str, device: Mapping[str, Any], table: Array | None) -> Any:
    return gemm_residual(shape[m], shape[n], shape[k], shape["batch"], device["sm_count"], table)
