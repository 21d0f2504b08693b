"""Robust fits of a time model to measured times, with errors on shapes that the fit did not see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np

from steptime.errors import UserError
from steptime.hardware.records import Curve
from steptime.measure.residuals import errors_of
from steptime.num import Array, taken
from steptime_lab.calibrate.family import NO_SIZES, Coefficient, KernelFamily, in_six_digits

ONE_SIDED = 2.0
"""Largest factor by which nearly all measurements may lie on one side of a fit, whose coefficients have bounds."""
LOSS_SCALE = 0.05
"""Log error (about the noise of a measurement) up to which the loss is quadratic; beyond, it grows linearly."""


class Unexplained(UserError):
    """Measured times that no fit comes near, mostly because their unit is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior of a coefficient: a value, and the standard deviation of its logarithm."""

    value: float
    spread: float


class Given(TypedDict, total=False):
    """Start values, fixed values and priors of the coefficients of a fit."""

    start: Mapping[str, float] | None
    """Start values; by default those of the family."""
    fixed: Mapping[str, float] | None
    """Coefficients that are not fitted."""
    priors: Mapping[str, Prior] | None
    """Priors of coefficients that are fitted as logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Dtype, source and timer of a curve."""

    dtype: str
    source: str
    timer: str = "kernel"


def hashed(columns: Iterable[Array]) -> Array:
    """A hash per row that depends on the values of these columns alone and is the same in every process.

    Rows with equal values get equal numbers: they are one group of a cross-validation.

    >>> a = hashed([np.array([1.0, 2.0, 1.0]), np.array([3.0, 4.0, 3.0])])
    >>> bool(a[0] == a[2]), bool(a[0] == a[1])
    (True, False)
    """
    state = np.uint64(0x9E3779B97F4A7C15)
    out: Array = np.zeros(1, np.uint64)
    for column in columns:
        bits = np.ascontiguousarray(column, np.float64).view(np.uint64)
        out = out ^ bits
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            out = (out ^ (out >> np.uint64(shift))) * np.uint64(factor) + state
    mixed: Array = out >> np.uint64(11)
    return mixed


def fit(
    family: KernelFamily,
    shape: Mapping[str, Array],
    device: Mapping[str, Any],
    measured_s: Array,
    **given: Unpack[Given],
) -> dict[str, float]:
    r"""Coefficients that minimise the robust log error.

    $$\min_c \sum_i \rho\big(\ln t_i(c) - \ln y_i\big) + \sum_j \Big(\lambda\,\frac{\ln c_j - \ln p_j}{s_j}\Big)^2$$

    with $\rho(x) = 2 \lambda^2 (\sqrt{1 + x^2 / \lambda^2} - 1)$ the soft absolute value (quadratic below $\lambda$ =
    :data:`LOSS_SCALE`, then linear), within the bounds of the family. The family then fits its own model of the
    residual, if it has one (``left_over``).

    Args:
        family: the model.
        shape: its shape arguments, one value per row.
        device: its device arguments, numbers or one value per row (a fit over several devices).
        measured_s: $y$, measured times (s).
        given: start values, fixed values and priors of the coefficients; priors are $p$ and $s$.

    Raises:
        UserError: fewer rows than coefficients.

    Source: Huber-like loss of scipy, ``soft_l1``.
    """
    held, priors = dict(given.get("fixed") or {}), given.get("priors") or {}
    free = [c for c in family.coefficients if c.name not in held and c.low < c.high]
    held |= {c.name: c.start for c in family.coefficients if c.name not in held and c.low >= c.high}
    if len(measured_s) + len(priors) < len(free):
        raise UserError(f"{family.name}: {len(measured_s)} measurements cannot fix {len(free)} coefficients")
    if not free:
        return held
    target = np.log(measured_s)
    believed = [(c.name, priors[c.name]) for c in free if c.name in priors]

    def values_at(x: Array) -> dict[str, float]:
        return held | {c.name: _value(c, v) for c, v in zip(free, x, strict=True)}

    def log_error(values: Mapping[str, float]) -> Array:
        time = np.broadcast_to(np.asarray(family.predict(shape, device, values)), target.shape)
        error: Array = np.log(time) - target
        return error

    def residuals(x: Array) -> Array:
        values = values_at(x)
        data = _soft(log_error(values))
        prior = [(np.log(values[name]) - np.log(p.value)) / p.spread * LOSS_SCALE for name, p in believed]
        return np.concatenate([data, prior]) if prior else data

    values = values_at(_least(residuals, free, given.get("start") or {}))
    if family.left_over is not None:
        values |= family.left_over(shape, device, -log_error(values))
    return values


def _least(residuals: Callable[[Array], Array], free: Sequence[Coefficient], start: Mapping[str, float]) -> Array:
    """Coefficients within their bounds, each on its own scale, at which the sum of squares is least."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    low = np.array([_scale(c, c.low) for c in free])
    high = np.array([_scale(c, c.high) for c in free])
    begin = np.array([_scale(c, start.get(c.name, c.start)) for c in free])
    margin = 1e-6 * (high - low)
    found = least_squares(
        residuals,
        np.clip(begin, low + margin, high - margin),
        jac=lambda x: _slopes(residuals, x, high),
        bounds=(low, high),
        max_nfev=80,
        xtol=1e-5,
        ftol=1e-5,
    )
    best: Array = found.x
    return best


def cross_validated(
    family: KernelFamily,
    shape: Mapping[str, Array],
    device: Mapping[str, Any],
    measured_s: Array,
    groups: Array,
    *,
    folds: int = 5,
    **given: Unpack[Given],
) -> Array:
    """Predictions for every row by a fit that saw no row of its group; see :func:`fit` for the arguments.

    Args:
        groups: :func:`hashed` of the shape of each row.
        folds: number of parts, by ``groups % folds``.
    """
    out = np.full(len(measured_s), np.nan)
    fold = groups % np.uint64(folds)
    for part in np.unique(fold):
        test = fold == part
        train = ~test
        values = fit(family, take(shape, train), take(device, train), measured_s[train], **given)
        out[test] = family.predict(take(shape, test), take(device, test), values)
    return out


def fitted_curve(
    family: KernelFamily,
    shape: Mapping[str, Array],
    device: Mapping[str, Any],
    measured_s: Array,
    groups: Array,
    *,
    about: About,
    folds: int = 5,
    **given: Unpack[Given],
) -> Curve:
    """Fit on all rows, errors from :func:`cross_validated`, ranges of the shape arguments, ready for a profile.

    Raises:
        UserError: fewer rows than coefficients.
        Unexplained: times far from those of such a device.
    """
    values = fit(family, shape, device, measured_s, **given)
    given["start"] = values
    predicted = cross_validated(family, shape, device, measured_s, groups, folds=folds, **given)
    result = errors_of(predicted, measured_s)
    if result.band[0] > ONE_SIDED or result.band[1] < 1 / ONE_SIDED:
        off = float(np.median(measured_s / predicted))
        text = f"{family.name} {about.dtype}: measured times are {off:.3g} times what the device explains"
        raise Unexplained(text, hint="are the units right? latency_us is in microseconds")
    sizes = {name: column for name, column in shape.items() if name not in NO_SIZES}
    ranges = {name: (float(np.min(column)), float(np.max(column))) for name, column in sizes.items()}
    return Curve(
        family=family.name,
        dtype=about.dtype,
        timer=about.timer,
        coefficients=in_six_digits(values),
        points=result.points,
        ranges=ranges,
        median_ape=round(result.median_ape, 5),
        mean_ape=round(result.mean_ape, 5),
        bias=round(result.bias, 5),
        band=(round(result.band[0], 5), round(result.band[1], 5)),
        source=about.source,
    )


def take(columns: Mapping[str, Any], index: Array) -> dict[str, Any]:
    """Rows of the columns; plain numbers stay."""
    return {name: taken(value, index) for name, value in columns.items()}


def pooled(parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> dict[str, Any]:
    """Columns of several devices concatenated, with numbers repeated for their rows."""
    names = parts[0].keys() if parts else ()
    return {
        name: np.concatenate([np.broadcast_to(part[name], (n,)) for part, n in zip(parts, rows, strict=True)])
        for name in names
    }


def _slopes(residuals: Callable[[Array], Array], x: Array, high: Array, step: float = 0.01) -> Array:
    """Jacobian by differences of 1 %: wide enough to see past the steps that whole tiles make."""
    here = residuals(x)
    columns = []
    for i in range(len(x)):
        width = step if x[i] + step < high[i] else -step
        moved = x.copy()
        moved[i] += width
        columns.append((residuals(moved) - here) / width)
    return np.stack(columns, axis=1)


def _soft(log_error: Array) -> Array:
    """Signed root of the soft absolute value of the error, so that its square is the loss."""
    scaled = log_error / LOSS_SCALE
    out: Array = np.sign(scaled) * LOSS_SCALE * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
    return out


def _scale(coefficient: Coefficient, value: float) -> float:
    return float(np.log(value)) if coefficient.log else value


def _value(coefficient: Coefficient, scaled: float) -> float:
    return float(np.exp(scaled)) if coefficient.log else float(scaled)
