"""Plain predictors of whole graphs, which the learned ones have to beat: regressions on sums, and boosted trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from steptime.estimate.learned import NUMBERS
from steptime.lab.learned.data import Rows
from steptime.num import Array
from steptime.registry import needed

Predict = Callable[[Rows], Array]
Fit = Callable[[Rows, int], Predict]
"""From graphs to train on and a seed to a function from graphs to seconds."""
ABSOLUTE: Final = ("matrix_flops", "vector_flops", "moved_bytes", "launches")
UNITS: Final = {"matrix_flops": 1e6, "vector_flops": 1e6, "moved_bytes": 1024.0, "launches": 1.0}


def sums(rows: Rows) -> Array:
    """Operations of both kinds, bytes, launches and calls of each graph, (graphs, 5)."""
    counted = [
        np.bincount(
            rows.graph, (10.0 ** rows.numbers[:, NUMBERS.index(name)]) * UNITS[name] * rows.count, len(rows.measured_s)
        )
        for name in ABSOLUTE
    ]
    calls = np.bincount(rows.graph, rows.count, len(rows.measured_s))
    return np.stack([*counted, calls], axis=1)


def _relative(columns: Array, measured_s: Array) -> Array:
    """Coefficients >= 0 of least squares of relative errors."""
    from scipy.optimize import nnls  # type: ignore[import-untyped,unused-ignore]

    scale = columns.max(0)
    scale = np.where(scale > 0, scale, 1.0)
    found, _ = nnls(columns / scale / measured_s[:, None], np.ones(len(measured_s)), maxiter=10_000)
    return found / scale  # type: ignore[no-any-return]


def linear(train: Rows, seed: int) -> Predict:
    """Seconds linear in operations, bytes, launches and calls."""
    weights = _relative(sums(train), train.measured_s)
    return lambda rows: np.maximum(sums(rows) @ weights, 1e-9)


def _per_operator(rows: Rows, names: tuple[str, ...]) -> Array:
    places = {name: number for number, name in enumerate(names)}
    where = np.array([places.get(name, len(names)) for name in rows.operators])
    size = (len(rows.measured_s), len(names) + 2)
    out = np.zeros(size)
    np.add.at(out, (rows.graph, where), rows.device_s * rows.count)
    out[:, -1] = np.bincount(rows.graph, rows.host_s * rows.count, size[0])
    return out


def factors(train: Rows, seed: int) -> Predict:
    """One factor on the analytic times of each operator, and one on those of the host."""
    names = tuple(sorted(set(train.operators)))
    weights = _relative(_per_operator(train, names), train.measured_s)
    weights[-2] = 1.0  # operators that were never seen
    return lambda rows: np.maximum(_per_operator(rows, names) @ weights, 1e-9)


def analytic(train: Rows, seed: int) -> Predict:
    """The analytic time as it is."""
    return lambda rows: rows.analytic_s


def _graph_features(rows: Rows, names: tuple[str, ...]) -> Array:
    per = _per_operator(rows, names)
    total = per.sum(1, keepdims=True)
    return np.concatenate([np.log(sums(rows) + 1.0), np.log(total), per / total], axis=1)


def _trees(seed: int) -> Any:
    trees = needed("sklearn.ensemble", "a model of boosted trees").HistGradientBoostingRegressor
    return trees(max_iter=300, learning_rate=0.06, min_samples_leaf=8, random_state=seed)


def trees(train: Rows, seed: int) -> Predict:
    """Boosted trees on features of the whole graph, to the logarithm of its time."""
    names = tuple(sorted(set(train.operators)))
    model = _trees(seed).fit(_graph_features(train, names), np.log(train.measured_s))
    return lambda rows: np.exp(model.predict(_graph_features(rows, names)))


def trees_on_analytic(train: Rows, seed: int) -> Predict:
    """Boosted trees to the logarithm of measured over analytic time."""
    names = tuple(sorted(set(train.operators)))
    model = _trees(seed).fit(_graph_features(train, names), np.log(train.measured_s / train.analytic_s))
    return lambda rows: rows.analytic_s * np.exp(model.predict(_graph_features(rows, names)))


PLAIN: Final[Mapping[str, Fit]] = {
    "linear in operations, bytes, launches": linear,
    "analytic": analytic,
    "analytic, a factor an operator": factors,
    "trees": trees,
    "trees on analytic": trees_on_analytic,
}
"""Name in tables -> predictor."""
