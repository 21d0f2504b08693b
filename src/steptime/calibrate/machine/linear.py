r"""Linear regressions of time on work: few coefficients, each of them a latency or a rate.

The two regressions $t = \tau_c + F / R$ and $t = \tau_m + M / \beta$ and their maximum are the baseline; the models
below add what a processor shows beyond it. Every model is linear in its coefficients (the inverse rates), which are
found by non-negative least squares of relative errors, with the weight of outliers reduced (Huber's loss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.num import Array, Num, maximum

#: Relative error up to which the loss is quadratic.
HUBER: Final = 0.1
FOLDS: Final = 6


def linear_s(work: Num, latency_s: Num, rate_per_s: Num) -> Num:
    r"""One regression: $t = \tau + W / R$ with $W$ = `work` (FLOP or bytes) and $R$ = `rate_per_s`.

    >>> linear_s(1e9, 1e-3, 1e12)
    0.002
    """
    return latency_s + work / rate_per_s


def linear_roofline_s(
    flops: Num, moved_bytes: Num, compute_latency_s: Num, flops_per_s: Num, memory_latency_s: Num, memory_Bps: Num
) -> Num:
    r"""The larger of both regressions: $t = \max(\tau_c + F/R,\ \tau_m + M/\beta)$.

    >>> linear_roofline_s(1e9, 1e6, 1e-3, 1e12, 0.0, 1e9)
    0.002
    """
    return maximum(linear_s(flops, compute_latency_s, flops_per_s), linear_s(moved_bytes, memory_latency_s, memory_Bps))


def half_size_matmul_s(
    m: Num, n: Num, k: Num, latency_s: Num, flops_per_s: Num, m_half: Num, n_half: Num, k_half: Num
) -> Num:
    r"""A product whose rate falls off where a dim is small.

    $$t = \tau + \frac{2mnk}{R}\left(1 + \frac{m_{1/2}}{m} + \frac{n_{1/2}}{n} + \frac{k_{1/2}}{k}\right)$$

    where $R$ = `flops_per_s` is reached by large products and $m_{1/2}$ is the `m` at which, the other dims being
    large, half of it is left (Hockney's half-performance length, one per dim): packing of operands and edges of tiles.

    >>> half_size_matmul_s(100, 1000, 1000, 0.0, 2e8, 100, 0, 0)   # 1 s at the full rate, twice that
    2.0
    """
    factor = 1 + m_half / m + n_half / n + k_half / k
    return latency_s + 2 * m * n * k * factor / flops_per_s


def streaming_s(
    moved_bytes: Num,
    fresh_bytes: Num,
    latency_s: Num,
    near_Bps: Num,
    far_Bps: Num,
    cache_bytes: Num,
    fresh_Bps: Num,
) -> Num:
    r"""An operator that moves memory, with a cache in front of it.

    $$t = \tau + \frac{M}{\beta_n} + \max(M - C, 0)\left(\frac{1}{\beta_f} - \frac{1}{\beta_n}\right)
        + \frac{M_0}{\beta_0}$$

    where $M$ = `moved_bytes`, of which the first $C$ = `cache_bytes` go at $\beta_n$ = `near_Bps` and the rest at
    $\beta_f$ = `far_Bps`; $M_0$ = `fresh_bytes` of results that the system has to map afresh at
    $\beta_0$ = `fresh_Bps`.

    >>> streaming_s(3e9, 0.0, 0.0, 2e9, 1e9, 2e9, 1e9)   # 2 GB at 2 GB/s, 1 GB at 1 GB/s
    2.0
    """
    beyond = maximum(moved_bytes - cache_bytes, 0.0)
    return latency_s + moved_bytes / near_Bps + beyond * (1 / far_Bps - 1 / near_Bps) + fresh_bytes / fresh_Bps


def additive_s(
    matrix_flops: Num,
    vector_flops: Num,
    moved_bytes: Num,
    latency_s: Num,
    matrix_flops_per_s: Num,
    vector_flops_per_s: Num,
    memory_Bps: Num,
) -> Num:
    r"""Work that does not overlap: $t = \tau + F_m/R_m + F_v/R_v + M/\beta$.

    >>> additive_s(1e9, 1e9, 0.0, 0.0, 1e9, 1e9, 1e9)
    2.0
    """
    work = matrix_flops / matrix_flops_per_s + vector_flops / vector_flops_per_s
    return latency_s + work + moved_bytes / memory_Bps


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions are from measurements."""

    median_ape: float
    mean_ape: float
    bias: float
    band: tuple[float, float]
    """5th and 95th percentile of measured / predicted."""


def errors_of(predicted_s: Array, measured_s: Array) -> Errors:
    """Relative errors.

    >>> errors_of(np.array([1.1, 0.9]), np.array([1.0, 1.0])).bias
    0.0
    """
    relative = predicted_s / measured_s - 1
    low, high = np.quantile(measured_s / predicted_s, [0.05, 0.95])
    return Errors(
        median_ape=float(np.median(np.abs(relative))),
        mean_ape=float(np.mean(np.abs(relative))),
        bias=round(float(np.mean(relative)), 12),
        band=(float(low), float(high)),
    )


def nonnegative(features: Array, seconds: Array) -> Array:
    """Coefficients, none of them negative, with the least robust relative error.

    All subsets of the columns are tried, so there may be few columns.

    Args:
        features: one row per measurement, one column per coefficient.
        seconds: measured times, all positive.

    Raises:
        UserError: fewer than two measurements more than coefficients, or a time that is not positive.

    >>> nonnegative(np.array([[1.0, 1], [1, 2], [1, 3], [1, 4]]), np.array([3.0, 5, 7, 9])).round(6).tolist()
    [1.0, 2.0]
    """
    refuse_unfit(features, seconds)
    return _solved(features, seconds)


def _solved(features: Array, seconds: Array) -> Array:
    """All columns if none of them comes out negative; else the best subset of which that is true."""
    relative = features / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    count = features.shape[1]
    best, best_loss = np.zeros(count), np.inf
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            part = relative[:, chosen] / scale[chosen]
            found = _robust(part)
            if found is None or (found < 0).any():
                continue
            loss = _huber(np.log(np.maximum(part @ found, 1e-3)))
            if loss < best_loss:
                best, best_loss = np.zeros(count), loss
                best[chosen] = found / scale[chosen]
        if size == count and best_loss < np.inf:
            break
    return best


def refuse_unfit(features: Array, seconds: Array) -> None:
    """Check what goes into a regression.

    Raises:
        UserError: too few measurements for a regression, or times that are not positive.
    """
    needed = features.shape[1] + 2
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UserError("a measured time is zero, negative or not finite", hint="leave that measurement out")
    if len(np.unique(features, axis=0)) < needed:
        raise UserError(
            f"{len(seconds)} measurements are too few for a regression, which needs {needed} different ones"
        )


def _robust(relative: Array) -> Array | None:
    """Iteratively reweighted least squares of ``relative @ x = 1``."""
    weight = np.ones(len(relative))
    found = None
    for _ in range(12):
        root = np.sqrt(weight)
        found, _, rank, _ = np.linalg.lstsq(relative * root[:, None], root, rcond=None)
        if rank < relative.shape[1]:
            return None
        ratio = np.clip(relative @ found, 0.3, 3.0)
        weight = 1 / (np.maximum(np.abs(ratio - 1) / HUBER, 1.0) * ratio)  # over ratio: as in the logarithm, unbiased
    return found


def _huber(residual: Array) -> float:
    size = np.abs(residual)
    return float(np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum())


Shape = Mapping[str, Array]
Values = dict[str, float]
Fit = Callable[[Shape, Array], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A formula and how its coefficients are found."""

    name: str
    formula: Callable[..., Num]
    arguments: tuple[str, ...]
    fit: Fit

    def predict(self, shape: Mapping[str, Num], values: Mapping[str, float]) -> Num:
        """Seconds."""
        return self.formula(**{name: shape[name] for name in self.arguments}, **values)


def rate(inverse: float) -> float:
    """The rate of a fitted coefficient; none was needed: so fast that it costs nothing."""
    return 1 / inverse if inverse > 1e-30 else 1e30


def _fit_roofline(shape: Shape, seconds: Array) -> Values:
    """Alternate: each point belongs to the regression that predicts it larger; then both are fitted."""
    ones = np.ones_like(seconds)
    compute = np.stack([ones, shape["matrix_flops"]], axis=1)
    memory = np.stack([ones, shape["moved_bytes"]], axis=1)
    refuse_unfit(compute, seconds)
    intensity = shape["matrix_flops"] / shape["moved_bytes"]
    best: Values = {}
    best_loss = np.inf
    for cut in np.quantile(intensity, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]):
        side = intensity >= cut
        for _ in range(8):
            if side.sum() < 4 or (~side).sum() < 4:
                side = np.ones_like(side)
            c = _solved(compute[side], seconds[side])
            m = _solved(memory[~side], seconds[~side]) if not side.all() else np.zeros(2)
            moved, side = side, compute @ c >= memory @ m
            if (moved == side).all():
                break
        loss = _huber(np.log(np.maximum(np.maximum(compute @ c, memory @ m) / seconds, 1e-3)))
        if loss < best_loss:
            best_loss = loss
            best = {
                "compute_latency_s": float(c[0]), "flops_per_s": rate(c[1]),
                "memory_latency_s": float(m[0]), "memory_Bps": rate(m[1]),
            }  # fmt: skip
    return best


def _fit_half_size(shape: Shape, seconds: Array) -> Values:
    m, n, k = shape["m"], shape["n"], shape["k"]
    features = np.stack([np.ones_like(seconds), 2 * m * n * k, 2 * n * k, 2 * m * k, 2 * m * n], axis=1)
    x = nonnegative(features, seconds)
    inverse = max(float(x[1]), 1e-30)
    return {
        "latency_s": float(x[0]), "flops_per_s": 1 / inverse, "m_half": float(x[2]) / inverse,
        "n_half": float(x[3]) / inverse, "k_half": float(x[4]) / inverse,
    }  # fmt: skip


def _fit_streaming(shape: Shape, seconds: Array) -> Values:
    """The size of the cache is the one of a short list that leaves the least error."""
    moved, fresh = shape["moved_bytes"], shape["fresh_bytes"]
    best: Values = {}
    best_loss = np.inf
    for cache in (0.0, *(2.0**power for power in range(18, 27))):
        beyond = np.maximum(moved - cache, 0.0)
        columns = [np.ones_like(seconds), moved]
        columns += [beyond] if cache and np.count_nonzero(beyond) > 2 else []
        columns += [fresh] if np.count_nonzero(fresh) > 1 else []
        features = np.stack(columns, axis=1)
        x = nonnegative(features, seconds)
        extra = float(x[2]) if cache and np.count_nonzero(beyond) > 2 else 0.0
        loss = _huber(np.log(np.maximum(features @ x / seconds, 1e-3))) + 0.003 * len(seconds) * HUBER * (extra > 0)
        if loss < best_loss:
            best_loss = loss
            last = float(x[-1]) if np.count_nonzero(fresh) > 1 else 0.0
            best = {
                "latency_s": float(x[0]), "near_Bps": rate(x[1]), "far_Bps": rate(x[1] + extra),
                "cache_bytes": cache, "fresh_Bps": rate(last),
            }  # fmt: skip
    return best


def _fit_additive(shape: Shape, seconds: Array) -> Values:
    names = ("matrix_flops", "vector_flops", "moved_bytes")
    x = nonnegative(np.stack([np.ones_like(seconds), *(shape[name] for name in names)], axis=1), seconds)
    return {
        "latency_s": float(x[0]), "matrix_flops_per_s": rate(x[1]), "vector_flops_per_s": rate(x[2]),
        "memory_Bps": rate(x[3]),
    }  # fmt: skip


def _fit_linear(shape: Shape, seconds: Array) -> Values:
    x = nonnegative(np.stack([np.ones_like(seconds), shape["moved_bytes"]], axis=1), seconds)
    return {"latency_s": float(x[0]), "rate_per_s": rate(x[1])}


def _linear(moved_bytes: Num, **values: Num) -> Num:
    return linear_s(moved_bytes, **values)


def _roofline(matrix_flops: Num, moved_bytes: Num, **values: Num) -> Num:
    return linear_roofline_s(matrix_flops, moved_bytes, **values)


MODELS: Final[Mapping[str, Model]] = {
    model.name: model
    for model in (
        Model(
            name="linear_roofline", formula=_roofline, arguments=("matrix_flops", "moved_bytes"), fit=_fit_roofline
        ),
        Model(name="linear", formula=_linear, arguments=("moved_bytes",), fit=_fit_linear),
        Model(name="half_size_matmul", formula=half_size_matmul_s, arguments=("m", "n", "k"), fit=_fit_half_size),
        Model(name="streaming", formula=streaming_s, arguments=("moved_bytes", "fresh_bytes"), fit=_fit_streaming),
        Model(
            name="additive", formula=additive_s, arguments=("matrix_flops", "vector_flops", "moved_bytes"),
            fit=_fit_additive,
        ),
    )
}  # fmt: skip


def cross_validated_s(model: Model, shape: Shape, seconds: Array, groups: Sequence[str]) -> Array:
    """Prediction of every point by a fit that saw no point of its group (its shape)."""
    names = sorted(set(groups))
    fold = np.array([names.index(group) for group in groups]) % FOLDS
    out = np.full(len(seconds), np.nan)
    for f in np.unique(fold):
        train, test = fold != f, fold == f
        values = model.fit({name: column[train] for name, column in shape.items()}, seconds[train])
        out[test] = model.predict({name: column[test] for name, column in shape.items()}, values)
    return out
