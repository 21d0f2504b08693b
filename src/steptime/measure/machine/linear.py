"""Fits the regressions of :mod:`steptime.cost.regression`: few coefficients, each of them a latency or a rate.

Every model is linear in its coefficients (the inverse rates), which are found by non-negative least squares of relative
errors, with the weight of outliers reduced (Huber's loss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from steptime.errors import UserError, counted
from steptime.estimate.measured import FORMULAS, LAYOUT_FREE, OWN, PRODUCT
from steptime.num import Array, Num

#: Relative error up to which the loss is quadratic.
HUBER: Final = 0.1
FOLDS: Final = 6
#: Least share of the loss that two more coefficients of a product explain, and fewest points that determine one.
LEAST_EXPLAINED: Final = 0.1
LEAST_POINTS: Final = 8
#: From this size on the C library of Linux maps every block of memory afresh (mallopt(3), M_MMAP_THRESHOLD_MAX).
FRESH_BYTES: Final = 2**25


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
    """Coefficients of all columns if none is negative; else of the best subset for which that is true."""
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
            loss = _loss(part @ found, np.ones(len(part)))
            if loss < best_loss:
                best, best_loss = np.zeros(count), loss
                best[chosen] = found / scale[chosen]
        if size == count and best_loss < np.inf:
            break
    return best


def refuse_unfit(features: Array, seconds: Array) -> None:
    """Checks the input of a regression.

    Raises:
        UserError: too few measurements for a regression, or times that are not positive.
    """
    needed = features.shape[1] + 2
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UserError("a measured time is zero, negative or not finite", hint="leave that measurement out")
    if len(np.unique(features, axis=0)) < needed:
        raise UserError(
            f"{counted(len(seconds), 'measurement')} are too few for a regression, which needs {needed} different ones"
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


def _loss(predicted: Array, seconds: Array) -> float:
    """Huber's loss of the logarithms of predicted over measured times."""
    size = np.abs(np.log(np.maximum(predicted / seconds, 1e-3)))
    return float(np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum())


Shape = Mapping[str, Array]
Values = dict[str, float]
Fit = Callable[[Shape, Array], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A formula of :data:`~steptime.estimate.measured.FORMULAS`, and the fit of its coefficients."""

    name: str
    arguments: tuple[str, ...]
    fit: Fit

    def predict(self, shape: Mapping[str, Num], values: Mapping[str, float]) -> Num:
        """Seconds."""
        return FORMULAS[self.name]({**{name: shape[name] for name in self.arguments}, **values})


def rate(inverse: float) -> float:
    """The rate of a fitted coefficient; a coefficient of zero gives a rate so high that it costs nothing."""
    return 1 / inverse if inverse > 1e-30 else 1e30


def _fit_roofline(shape: Shape, seconds: Array) -> Values:
    """Alternates: each point goes to the regression that predicts it larger, then both are fitted."""
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
        loss = _loss(np.maximum(compute @ c, memory @ m), seconds)
        if loss < best_loss:
            best_loss = loss
            best = {
                "compute_latency_s": float(c[0]),
                "flops_per_s": rate(c[1]),
                "memory_latency_s": float(m[0]),
                "memory_Bps": rate(m[1]),
            }
    return best


def _fit_half_size(shape: Shape, seconds: Array) -> Values:
    """Fits the cost of rows off a boundary and of a transposed operand where it explains :data:`LEAST_EXPLAINED`."""
    m, n, k, turned, loose, odd = (shape[name] for name in PRODUCT)
    flops = 2 * m * n * k
    features = np.stack([np.ones_like(seconds), flops, 2 * n * k, 2 * m * k, 2 * m * n], axis=1)
    x = nonnegative(features, seconds)
    known: list[str] = []
    for columns in (
        {"loose_flops_per_s": loose * flops, "odd_flops_per_s": odd * flops},
        {"turned_flops_per_s": turned * flops, "turned_per_s": turned * m * k},
    ):
        usable = {name: column for name, column in columns.items() if np.count_nonzero(column) >= LEAST_POINTS}
        more = np.column_stack([features, *usable.values()])
        other = nonnegative(more, seconds) if usable else x
        if _loss(more @ other, seconds) < (1 - LEAST_EXPLAINED) * _loss(features @ x, seconds):
            features, x, known = more, other, [*known, *usable]
    inverse = max(float(x[1]), 1e-30)
    return {
        "latency_s": float(x[0]),
        "flops_per_s": 1 / inverse,
        "m_half": float(x[2]) / inverse,
        "n_half": float(x[3]) / inverse,
        "k_half": float(x[4]) / inverse,
        **LAYOUT_FREE,
        **{name: rate(float(value)) for name, value in zip(known, x[5:], strict=True)},
    }


def _fresh_columns(shape: Shape) -> list[Array]:
    """A column with the bytes of results that are mapped afresh, if at least two points have any."""
    fresh = np.where(shape["result_bytes"] >= FRESH_BYTES, shape["result_bytes"], 0.0)
    return [fresh] if np.count_nonzero(fresh) > 1 else []


def _fit_streaming(shape: Shape, seconds: Array) -> Values:
    """The size of the cache is the one of a short list that leaves the least error."""
    moved, fresh = shape["moved_bytes"], _fresh_columns(shape)
    best: Values = {}
    best_loss = np.inf
    for cache in (0.0, *(2.0**power for power in range(18, 31))):
        beyond = np.maximum(moved - cache, 0.0)
        columns = [np.ones_like(seconds), moved]
        columns += [beyond] if cache and np.count_nonzero(beyond) > 2 else []
        columns += fresh
        features = np.stack(columns, axis=1)
        x = nonnegative(features, seconds)
        extra = float(x[2]) if cache and np.count_nonzero(beyond) > 2 else 0.0
        loss = _loss(features @ x, seconds) + 0.003 * len(seconds) * HUBER * (extra > 0)
        if loss < best_loss:
            best_loss = loss
            last = float(x[-1]) if fresh else 0.0
            best = {
                "latency_s": float(x[0]),
                "near_Bps": rate(x[1]),
                "far_Bps": rate(x[1] + extra),
                "cache_bytes": cache,
                "fresh_Bps": rate(last),
                "fresh_from_bytes": float(FRESH_BYTES),
            }
    return best


def _fit_additive(shape: Shape, seconds: Array) -> Values:
    names = ("matrix_flops", "vector_flops", "moved_bytes")
    x = nonnegative(np.stack([np.ones_like(seconds), *(shape[name] for name in names)], axis=1), seconds)
    return {
        "latency_s": float(x[0]),
        "matrix_flops_per_s": rate(x[1]),
        "vector_flops_per_s": rate(x[2]),
        "memory_Bps": rate(x[3]),
    }


_CONVOLUTION: Final = OWN["conv_fwd"]


def _fit_blocked(shape: Shape, seconds: Array) -> Values:
    """Each column is the time with one rate of 1 and all other rates infinite."""
    given = {name: shape[name] for name in _CONVOLUTION}
    names = ("flops_per_s", "vector_flops_per_s", "memory_Bps")
    one = [{n: 1.0 if n == name else np.inf for n in names} for name in names]
    formula = FORMULAS["blocked_convolution"]
    columns = [np.asarray(formula({**given, "latency_s": 0.0, **rates})) for rates in one]
    x = nonnegative(np.stack([np.ones_like(seconds), *columns], axis=1), seconds)
    return {"latency_s": float(x[0]), **{name: rate(float(x[i + 1])) for i, name in enumerate(names)}}


def _fit_loops(shape: Shape, seconds: Array) -> Values:
    columns = [np.ones_like(seconds), *(shape[name] for name in ("loops", "steps", "moved_bytes"))]
    x = nonnegative(np.stack(columns + _fresh_columns(shape), axis=1), seconds)
    return {
        "latency_s": float(x[0]),
        "loops_per_s": rate(float(x[1])),
        "steps_per_s": rate(float(x[2])),
        "memory_Bps": rate(float(x[3])),
        "fresh_Bps": rate(float(x[4]) if len(x) > 4 else 0.0),
        "fresh_from_bytes": float(FRESH_BYTES),
    }


#: Caches that are tried for products, in bytes.
_CACHES: Final = (2.0**18, 2.0**20, 2.0**21, 2.0**22, 2.0**23, 2.0**24)


def _fit_resident(shape: Shape, seconds: Array) -> Values:
    """The cache is the one of a short list that leaves the least error."""
    m, n, k, groups, biased = (shape[name] for name in ("m", "n", "k", "groups", "biased"))
    flops = 2 * groups * m * n * k
    columns = [np.ones_like(seconds), flops, flops / m, flops / n, flops / k]
    columns += [groups] if np.ptp(groups) else []
    columns += [4 * biased * groups * m * n] if np.ptp(biased) else []
    best: Values = {}
    best_loss = np.inf
    for cache in _CACHES:
        share = np.maximum(1 - cache / shape["working_bytes"], 0.0)
        far = [shape["moved_bytes"] * share] if np.count_nonzero(share) > 2 else []
        features = np.stack(columns + far, axis=1)
        x = nonnegative(features, seconds)
        loss = _loss(features @ x, seconds)
        if loss < best_loss:
            best_loss, rest = loss, list(x[5:])
            inverse = max(float(x[1]), 1e-30)
            best = {
                "latency_s": float(x[0]),
                "flops_per_s": 1 / inverse,
                **{f"{name}_half": float(x[2 + i]) / inverse for i, name in enumerate("mnk")},
                "group_s": float(rest.pop(0)) if np.ptp(groups) else 0.0,
                "biased_Bps": rate(float(rest.pop(0))) if np.ptp(biased) else rate(0.0),
                "far_Bps": rate(float(rest.pop(0))) if far else rate(0.0),
                "cache_bytes": cache,
            }
    return best


def _fit_constant(shape: Shape, seconds: Array) -> Values:
    return {"latency_s": float(np.median(seconds)), "rate_per_s": rate(0.0)}


def _fit_linear(shape: Shape, seconds: Array) -> Values:
    x = nonnegative(np.stack([np.ones_like(seconds), shape["moved_bytes"]], axis=1), seconds)
    return {"latency_s": float(x[0]), "rate_per_s": rate(x[1])}


MODELS: Final[Mapping[str, Model]] = {
    model.name: model
    for model in (
        Model(name="linear_roofline", arguments=("matrix_flops", "moved_bytes"), fit=_fit_roofline),
        Model(name="linear", arguments=("moved_bytes",), fit=_fit_linear),
        Model(name="half_size_matmul", arguments=PRODUCT, fit=_fit_half_size),
        Model(name="streaming", arguments=("moved_bytes", "result_bytes"), fit=_fit_streaming),
        Model(name="constant", arguments=("moved_bytes",), fit=_fit_constant),
        Model(
            name="resident_matmul",
            fit=_fit_resident,
            arguments=("m", "n", "k", "groups", "biased", "moved_bytes", "working_bytes"),
        ),
        Model(name="additive", arguments=("matrix_flops", "vector_flops", "moved_bytes"), fit=_fit_additive),
        Model(name="short_loops", arguments=("loops", "steps", "moved_bytes", "result_bytes"), fit=_fit_loops),
        Model(name="blocked_convolution", arguments=_CONVOLUTION, fit=_fit_blocked),
    )
}


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
