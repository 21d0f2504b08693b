"""From a table of measured kernels to curves: cells (rows of one fit), their fits, and generic coefficients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from steptime.hardware.library import device_named, load_device
from steptime.hardware.profiles import nearest
from steptime.hardware.records import Curve, Device
from steptime.measure.table import Table
from steptime.num import Array
from steptime_lab.calibrate.family import (
    UNREADABLE,
    Coefficient,
    KernelFamily,
    dtype_of,
    launched,
    readable,
    shapes_of,
    timed,
    timer_of,
)
from steptime_lab.calibrate.fitting import About, Prior, cross_validated, fit, fitted_curve, hashed

ANY_DTYPE: Final = "any"
"""Dtype of the curves of families whose model takes only bytes."""
GENERIC: Final = "generic"
"""Device name of the coefficients for devices without measurements."""


TILES: Final = (64.0, 128.0, 256.0)
"""Queries per block that attention kernels use."""
NEAR: Final = 0.3
"""Standard deviation (in log) of a coefficient between devices."""
SOME: Final = 4
"""Fewest shapes of a fit near the coefficients of other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Rows of one family on one device, in one dtype and by one kind of timer."""

    family: KernelFamily
    device: Device
    dtype: str
    timer: str
    rows: Array
    """Positions of the rows in the table."""
    shape: Mapping[str, Array]
    measured_s: Array
    source: str
    priors: Mapping[str, Prior]
    """Priors of coefficients that the rows do not fix."""
    fixed: Mapping[str, float]
    """Coefficients chosen from a table (the tile)."""

    @property
    def groups(self) -> Array:
        """Equal for rows of equal shape."""
        return hashed(self.shape.values())

    @property
    def enough(self) -> bool:
        """True if the rows alone fix the coefficients."""
        fitted = sum(c.low < c.high for c in self.family.coefficients)
        return len(np.unique(self.groups)) >= max(4, 2 * fitted)

    @property
    def some(self) -> bool:
        """True if the rows can correct the coefficients of other devices."""
        return len(np.unique(self.groups)) >= SOME

    def arguments(self) -> Mapping[str, float]:
        """Device arguments."""
        return self.family.device(self.device, self.dtype)

    def predict(self, values: Mapping[str, float]) -> Array:
        """Seconds of each row with given coefficients."""
        return np.broadcast_to(
            np.asarray(self.family.predict(self.shape, self.arguments(), values)), self.measured_s.shape
        )

    def held_out(self, folds: int = 5) -> Array:
        """Predictions of every row by fits that did not see its shape."""
        return cross_validated(
            self.family,
            self.shape,
            self.arguments(),
            self.measured_s,
            self.groups,
            folds=folds,
            priors=self.priors,
            fixed=self.fixed,
        )

    def curve(self, folds: int = 5) -> Curve:
        """The fit to all rows, with cross-validated errors."""
        return fitted_curve(
            self.family,
            self.shape,
            self.arguments(),
            self.measured_s,
            self.groups,
            folds=folds,
            about=About(dtype=self.dtype, source=self.source, timer=self.timer),
            priors=self.priors,
            fixed=self.fixed,
        )

    def with_best_tile(self) -> Cell:
        """The cell with the tile of the table that fits best, if its family has tiles."""
        if not any(c.name == "tile_rows" for c in self.family.coefficients):
            return self
        tried = [replace(self, fixed={"tile_rows": tile}) for tile in TILES]
        return min(tried, key=Cell._loss)

    def _loss(self) -> float:
        values = fit(self.family, self.shape, self.arguments(), self.measured_s, priors=self.priors, fixed=self.fixed)
        return float(np.mean(np.abs(np.log(self.predict(values) / self.measured_s))))

    def near(self, curve: Curve) -> Cell:
        """The cell with the coefficients of other devices as priors."""
        priors = {c.name: Prior(value=curve.coefficients[c.name], spread=NEAR) for c in _fitted(self.family)}
        held = {n: v for n, v in curve.coefficients.items() if n not in priors}
        return replace(self, priors=priors, fixed=held)


def _fitted(family: KernelFamily) -> list[Coefficient]:
    return [c for c in family.coefficients if c.low < c.high]


def weak_priors(family: KernelFamily) -> dict[str, Prior]:
    """Priors at the start values with a spread of about a factor of e: they weigh as much as one measurement."""
    return {c.name: Prior(value=c.start, spread=1.0) for c in _fitted(family) if c.log}


def devices_of(table: Table) -> dict[str, Device]:
    """Measured names of GPUs to devices, without those that the catalogue lacks; a table cannot name files."""
    found = {name: device_named(name) for name in sorted(set(table.text("gpu")))}
    return {name: device for name, device in found.items() if device is not None}


def cells(table: Table, families: Iterable[KernelFamily], *, by_dtype: bool) -> Iterator[Cell]:
    """Cells of the families, from rows of kernels that a training step launches.

    Args:
        table: measured kernels.
        families: families of kernels to look for.
        by_dtype: one cell per dtype; otherwise all in one, as dtype ``any``.
    """
    devices = devices_of(table)
    ops, times = table.text("op"), table.number("latency_us") * 1e-6
    usable = timed(times) & launched(table)
    dtypes = {name: (dtype_of(name) or name) if by_dtype else ANY_DTYPE for name in set(table.text("dtype"))}
    timers = {name: timer_of(name) for name in set(table.text("method"))}
    names = {name: device.name for name, device in devices.items()}
    label = [
        (names.get(gpu, ""), dtypes[dtype], timers[method])
        for gpu, dtype, method in zip(table.text("gpu"), table.text("dtype"), table.text("method"), strict=True)
    ]
    for family in families:
        place = np.flatnonzero(np.isin(ops, list(family.ops)) & usable)
        if not len(place):
            continue
        shape = shapes_of(family, table.take(place))
        where: dict[tuple[str, str, str], list[int]] = {}
        for i in np.flatnonzero(readable(shape)):
            where.setdefault(label[place[i]], []).append(int(i))
        for (device, dtype, timer), index in sorted(where.items()):
            if device:
                rows = place[index]
                yield Cell(
                    family=family,
                    device=load_device(device),
                    dtype=dtype,
                    timer=timer,
                    rows=rows,
                    shape={name: values[index] for name, values in shape.items() if name != UNREADABLE},
                    measured_s=times[rows],
                    source=", ".join(sorted(set(table.text("source")[rows]))),
                    priors=weak_priors(family),
                    fixed={},
                )


def curves_of(found: Iterable[Cell]) -> dict[str, list[Curve]]:
    """Curves by device; the fit of a cell with few rows stays near the coefficients of another device.

    The list under :data:`GENERIC` holds the coefficients for devices without measurements.
    """
    out: dict[str, list[Curve]] = {}
    all_cells = list(found)
    for cell in all_cells:
        if cell.enough:
            out.setdefault(cell.device.name, []).append(cell.with_best_tile().curve())
    sound = {device: list(curves) for device, curves in out.items()}
    for cell in all_cells:
        known = borrowed(sound, cell)
        if not cell.enough and cell.some and known is not None:
            out.setdefault(cell.device.name, []).append(cell.near(known).curve(folds=3))
    return out | {GENERIC: generic_curves(sound)}


def borrowed(by_device: Mapping[str, Sequence[Curve]], cell: Cell) -> Curve | None:
    """The curve of the most similar other device for a cell, of its timer and dtype if there is one.

    :func:`steptime.hardware.profiles.nearest` defines similarity. On devices that were left out this curve is mostly
    closer than medians over all devices (benchmarks/kernels.md).
    """
    others = {d: [c for c in curves if c.family == cell.family.name] for d, curves in by_device.items() if d != GENERIC}
    order = nearest(cell.device, [load_device(d) for d, curves in others.items() if curves])
    place = {device.name: i for i, device in enumerate(order)}
    found = [(place[d], c) for d, curves in others.items() if d in place for c in curves]
    found.sort(key=lambda x: (x[1].timer != cell.timer, x[1].dtype != cell.dtype, x[0]))
    return found[0][1] if found else None


def generic_curves(by_device: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """Coefficients for devices without measurements: medians over devices, kind ``assumed``.

    All coefficients are in seconds or relative to the datasheet, so that medians over devices are meaningful.
    """
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for curves in by_device.values():
        for curve in curves:
            groups.setdefault((curve.family, curve.dtype, curve.timer), []).append(curve)
    return [_median(group) for _, group in sorted(groups.items())]


def _median(group: Sequence[Curve]) -> Curve:
    first = group[0]
    middle = {name: float(np.median([c.coefficients[name] for c in group])) for name in first.coefficients}
    names = {name for c in group for name in c.ranges}
    ranges = {n: (min(c.ranges[n][0] for c in group), max(c.ranges[n][1] for c in group)) for n in sorted(names)}
    return replace(
        first,
        coefficients={name: float(f"{value:.4g}") for name, value in middle.items()},
        points=sum(c.points for c in group),
        ranges=ranges,
        median_ape=float(np.median([c.median_ape for c in group])),
        mean_ape=float(np.median([c.mean_ape for c in group])),
        bias=float(np.median([c.bias for c in group])),
        band=(min(c.band[0] for c in group), max(c.band[1] for c in group)),
        source=f"median of the coefficients of {len(group)} devices",
        kind="assumed",
    )
