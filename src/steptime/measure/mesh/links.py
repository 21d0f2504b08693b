"""Measured links: quantities for every ordered pair of devices, and the matrix of log costs that the search uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steptime.errors import UserError, shorten
from steptime.num import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number per ordered pair of devices."""

    kind: str
    """``seconds``: time of a message of ``size_bytes``; ``latency``: seconds of an empty one; ``bandwidth``."""
    size_bytes: float | None = None
    values: Array
    """Matrix in SI units, from row to column; NaN where nothing was measured and on the diagonal."""

    def log_cost(self) -> Array:
        """Logarithm of the cost of a link; larger is slower. NaN where nothing was measured and on the diagonal.

        Raises:
            UserError: a value that is not positive and finite.
        """
        values = self.values.astype(np.float64)
        np.fill_diagonal(values, np.nan)
        if bool((values <= 0).any()) or bool(np.isinf(values).any()):
            raise UserError(f"a measured {self.kind} is not positive and finite", hint="put NaN where there is none")
        logs: Array = np.log(values, out=values)
        return -logs if self.kind == "bandwidth" else logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measurements between pairs of devices."""

    names: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    origin: str = ""
    """File that they come from, for messages."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.names)


#: Larger meshes are searched in single precision.
DOUBLE_PRECISION = 1024
#: Most devices; the matrix of more does not fit in the memory of a small machine.
MAX_DEVICES = 8192
#: Largest spread of the noise that is put on pairs without a measurement.
MOST_FILLED_SIGMA = 0.15
#: Pairs that the weights of the quantities are taken from.
SAMPLED_PAIRS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Log costs of all pairs, in units in which the quantities tell levels apart best."""

    one_way: Array
    """From row to column; NaN where nothing was measured, zero on the diagonal."""
    both_ways: Array
    """Mean of the two directions; NaN where neither was measured, zero on the diagonal."""
    clipped: Array
    """``both_ways`` without NaN, cut off where only faults are: the input of the search."""
    missing: Array
    """True for pairs of which neither direction was measured."""

    @property
    def observed(self) -> float:
        """Share of the pairs that was measured."""
        count = len(self.missing)
        return 1.0 - float(self.missing.sum()) / (count * (count - 1))


def prepare(links: Links) -> Prepared:
    """Checks and combines the measurements.

    Raises:
        UserError: fewer than two devices, too many, or devices that no measured link joins.
    """
    where = f"{links.origin}: " if links.origin else ""
    if links.devices < 2:
        raise UserError(f"{where}a mesh needs at least two devices; given {links.devices}")
    if links.devices > MAX_DEVICES:
        raise UserError(f"{where}{links.devices} devices are more than {MAX_DEVICES}")
    kind = np.float64 if links.devices <= DOUBLE_PRECISION else np.float32
    one_way = np.zeros((links.devices, links.devices), dtype=kind)
    for weight, quantity in zip(_weights(links), links.quantities, strict=True):
        if weight > 0:
            one_way += (float(weight) * quantity.log_cost()).astype(kind)
    np.fill_diagonal(one_way, 0.0)
    both = _both_ways(one_way)
    missing = np.isnan(both)
    _require_connected(missing, links.names, where)
    return Prepared(one_way=one_way, both_ways=both, clipped=_clipped(both, missing), missing=missing)


def _both_ways(one_way: Array) -> Array:
    back = one_way.T
    out = (one_way + back) / 2
    gap = np.isnan(out)
    if gap.any():
        out[gap] = np.where(np.isnan(one_way[gap]), back[gap], one_way[gap])
    return out


def _pairs(devices: int) -> tuple[Array, Array]:
    """Rows and columns of the pairs of devices, each once; of many a sample."""
    rows, columns = np.triu_indices(devices, 1)
    if len(rows) <= SAMPLED_PAIRS:
        return rows, columns
    chosen = np.random.default_rng(0).choice(len(rows), SAMPLED_PAIRS, replace=False)
    return rows[chosen], columns[chosen]


def _weights(links: Links) -> Array:
    """Weights of the quantities: the direction in which pairs differ most, all of one sign, adding up to one."""
    if len(links.quantities) == 1:
        return np.ones(1)
    rows, columns = _pairs(links.devices)
    columns_of = []
    for quantity in links.quantities:
        costs = quantity.log_cost()
        columns_of.append(np.where(np.isnan(costs[rows, columns]), costs[columns, rows], costs[rows, columns]))
    table = np.stack(columns_of, axis=1)
    table = table[~np.isnan(table).any(axis=1)]
    if len(table) < 2:
        return np.full(len(columns_of), 1 / len(columns_of))
    low, high = np.percentile(table, [1, 99], axis=0)
    covariance = np.atleast_2d(np.cov(np.clip(table, low, high), rowvar=False)) + 1e-12 * np.eye(len(columns_of))
    _, vectors = np.linalg.eigh(covariance)
    leading = np.maximum(vectors[:, -1] * np.sign(vectors[:, -1].sum() or 1.0), 0.0)
    out: Array = leading / leading.sum() if leading.sum() > 0 else np.full(len(leading), 1 / len(leading))
    return out


def _clipped(both: Array, missing: Array) -> Array:
    """Cuts off the slow end, well above the slowest level, and fills gaps with the median and noise."""
    rows, columns = _pairs(len(both))
    known = both[rows, columns]
    known = known[~np.isnan(known)]
    quarter, middle, most, nearly_all = (float(q) for q in np.percentile(known, [25, 50, 75, 90]))
    sigma = min((most - quarter) / 1.35, MOST_FILLED_SIGMA)
    out = _filled(both, missing, np.full(both.shape, middle, dtype=both.dtype), sigma) if missing.any() else both.copy()
    np.minimum(out, nearly_all + 3 * (nearly_all - most) + 1e-3, out=out, where=~np.eye(len(both), dtype=bool))
    clipped: Array = out.astype(both.dtype, copy=False)
    return clipped


def _require_connected(missing: Array, names: tuple[str, ...], where: str) -> None:
    """Every device has to be reached from the first along measured links."""
    reached = np.zeros(len(missing), dtype=bool)
    frontier = np.array([0])
    reached[0] = True
    while len(frontier):
        found = (~missing[frontier]).any(axis=0) & ~reached
        reached |= found
        frontier = np.flatnonzero(found)
    if reached.all():
        return
    apart = np.flatnonzero(~reached)
    first = shorten(names[apart[0]], 40)
    raise UserError(
        f"{where}no measured link joins {first!r}{f' and {len(apart) - 1} more' if len(apart) > 1 else ''} to "
        f"{shorten(names[0], 40)!r}",
        hint="measure at least one pair between the parts, or give them as two files",
    )


def _filled(distances: Array, missing: Array, expected: Array, sigma: float) -> Array:
    """Fills missing pairs with expected values and noise, so that they look no more certain than the rest."""
    noise = np.triu(np.random.default_rng(0).normal(size=distances.shape) * sigma, 1)
    out: Array = np.where(missing, expected + noise + noise.T, distances).astype(distances.dtype)
    return out


def refilled(prepared: Prepared, expected: Array, sigma: float) -> Prepared:
    """The prepared links with missing pairs filled by the expectation and noise of a layout."""
    clipped = _filled(prepared.clipped, prepared.missing, expected, sigma)
    return Prepared(one_way=prepared.one_way, both_ways=prepared.both_ways, clipped=clipped, missing=prepared.missing)


def noise_threshold(count: int) -> float:
    r"""Standard deviations beyond which one of $n$ normal numbers is no accident: $\max(5, \sqrt{2 \ln n} + 1)$.

    >>> round(noise_threshold(32640), 2)
    5.56
    """
    return max(5.0, math.sqrt(2 * math.log(max(count, 2))) + 1)
