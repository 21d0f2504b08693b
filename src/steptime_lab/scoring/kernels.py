"""Predictions for every row of a table of measurements with the profiles of the catalogue, and their errors."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.hardware.library import NO_DEVICE, device_named
from steptime.hardware.profiles import TIMERS, load_profile, profile_names
from steptime.hardware.records import ALIKE, Curve, Device, Profile
from steptime.measure.residuals import Predicted, Score
from steptime.measure.table import Table
from steptime.num import Array
from steptime.store.files import write_whole
from steptime_lab.calibrate.family import (
    NOT_LAUNCHED,
    KernelFamily,
    dtype_of,
    launched,
    readable,
    shapes_of,
    timed,
    timer_of,
)
from steptime_lab.calibrate.gemm import BACKWARD, FAMILY, gemm_dtype
from steptime_lab.calibrate.kernel_curves import ANY_DTYPE
from steptime_lab.calibrate.kernel_families import BYTES_ONLY, FAMILIES
from steptime_lab.calibrate.transfer import of_others, predict, transferred_curve, widened
from steptime_lab.scoring.plain_kernels import PLAIN, PlainTimer, dtype_named, operator_named
from steptime_lab.scoring.tables import (
    KERNEL_COLUMNS,
    read_collectives,
    read_measurements,
    unknown_collectives,
    unknown_devices,
    unknown_operators,
    unread_shapes,
)

#: Log error (standard deviation) that each step away from the right curve adds; choice of this program.
SIBLING_ERROR, TIMER_ERROR, DTYPE_ERROR = 0.1, 0.5, 0.5


@dataclass(slots=True)
class Known:
    """The profiles of the catalogue, and curves transferred from them."""

    profiles: dict[str, Profile]
    devices: dict[str, Device]
    transferred: dict[tuple[str, str, str, str], Curve | None] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Known:
        """All profiles of devices that the catalogue has."""
        profiles = {p.device: p for name in profile_names() if (p := load_profile(name)) is not None}
        devices = {name: device for name in profiles if (device := device_of(name)) is not None}
        return cls({name: profiles[name] for name in devices}, devices)

    def curve(self, device: Device, family: str, dtype: str, timer: str) -> tuple[Curve, str] | None:
        """The nearest curve, adapted to the dtype, and its origin; None if no device has one."""
        for place, like, clock, error in self._choices(family, dtype, timer):
            found = (self._own if place == "own" else self._transferred)(device, family, like, clock)
            if found is not None:
                origin = (
                    place + ("" if clock == timer else ", other timer") + ("" if like == dtype else ", other dtype")
                )
                return replace(found, dtype=dtype, band=widened(found.band, error)) if error else found, origin
        return None

    def _choices(self, family: str, dtype: str, timer: str) -> Iterator[tuple[str, str, str, float]]:
        """Place, dtype and timer of curves, the best first, and the log error that each adds."""
        siblings = [ALIKE[dtype]] if dtype in ALIKE else []
        for clock in (timer, *(t for t in TIMERS if t != timer)):
            late = 0.0 if clock == timer else TIMER_ERROR
            for place in ("own", "transferred"):
                yield place, dtype, clock, late
                yield from ((place, like, clock, late + SIBLING_ERROR) for like in siblings)
        dtypes = {c.dtype for p in self.profiles.values() for c in p.curves if c.family == family}
        for like in sorted(dtypes - {dtype, *siblings}):
            yield from ((place, like, timer, DTYPE_ERROR) for place in ("own", "transferred"))

    def _own(self, device: Device, family: str, dtype: str, timer: str) -> Curve | None:
        own = self.profiles.get(device.name)
        curve = own.curve(family, dtype, timer) if own else None
        return curve if curve is not None and curve.kind != "assumed" else None

    def _transferred(self, device: Device, family: str, dtype: str, timer: str) -> Curve | None:
        key = (device.name, family, dtype, timer)
        if key not in self.transferred:
            others = {n: p.curve(family, dtype, timer) for n, p in self.profiles.items() if n != device.name}
            fitted = {n: c for n, c in others.items() if c is not None and c.kind == "fitted"}
            self.transferred[key] = transferred_curve(device, fitted, self.devices) if fitted else None
        return self.transferred[key]


def device_of(gpu: str) -> Device | None:
    """The device with that spelling in the catalogue; None if there is none or its file cannot be read."""
    try:
        return device_named(gpu) if gpu else None
    except UserError:
        return None


NO_TIME: Final = "no positive measured time"
NO_SHAPE: Final = "shape or dtype unknown"
NO_CURVE: Final = "no curve for this kernel and dtype"
NO_VALUE: Final = "the time model gives no positive time for this shape"
SUSPECT: Final = "marked as suspect in its notes"
NAMELESS: Final = "unnamed"
"""Group of rows whose cell is empty."""

ORDER: Final = (FAMILY, BACKWARD, *FAMILIES)
"""Families in the order in which a row is matched to its model."""
OPS: Final = frozenset[str]().union(*(family.ops for family in ORDER))
SCORED: Final = (*PLAIN, *sorted(OPS - PLAIN.keys()))
"""Operators of training: those that an estimate times from their sizes alone, then those that need a curve."""
#: Log error (standard deviation) that an unnamed implementation of a row adds; choice of this program.
STAND_IN_ERROR: Final = 0.3
STAND_IN: Final = ", stand-in"
"""End of the origin of a row whose implementation is not known."""
#: Sources whose implementations the families and :data:`steptime_lab.calibrate.family.RULES` distinguish.
KNOWN_SOURCE: Final = re.compile("aiconfigurator|cudnn|flagperf|liger|llmservingsim|neusight|vidur")
#: Sources that stand in for an unknown source, the best first.
STAND_INS: Final = ("vidur", "neusight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A table of measurements, its predictions and their errors."""

    table: Table
    score: Score
    op: Array
    """Operator or collective of each row."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Reason of rows without a prediction -> what to write instead."""

    def to_json(self) -> dict[str, Any]:
        """Counts, errors, groups, and hints on rows that were skipped."""
        return self.score.to_json() | {"hints": dict(self.hints)}

    def write(self, path: Path) -> None:
        """Writes one line per row: source, operator, measured and predicted time, error, curve, or why it was skipped.

        Raises:
            InputFileError: it cannot be written.
        """
        p, measured, good = self.score.predicted, self.score.measured_s, self.score.scored
        texts = [self.table.text(name) for name in ("source", "gpu")]
        origin = self.score.groups.get("by_curve", np.full(len(good), "", dtype=object))
        with np.errstate(all="ignore"):
            predicted = [_cells_of(v, good) for v in (p.seconds, p.low_s, p.high_s, p.seconds / measured - 1)]
        numbers = [_cells_of(measured, np.isfinite(measured)), *predicted]
        out = io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        names = ("source", "gpu", "op", "dtype", "measured_s", "predicted_s", "low_s", "high_s", "error")
        lines.writerow(("row", *names, "curve", "skipped"))
        columns: list[Any] = [*texts, self.op, self.table.text("dtype"), *numbers, origin, p.reason]
        lines.writerows(zip(range(1, len(good) + 1), *columns, strict=True))
        write_whole(path, out.getvalue())


def score_kernels(path: str | Path) -> Scored:
    """Predicts every row of a table of measured kernels with the profiles of the catalogue.

    Raises:
        InputFileError: the file is no table, lacks a column, or has no rows.
    """
    table = read_measurements(path, KERNEL_COLUMNS)
    found = _scored(table, table["latency_us"] * 1e-6, predict_kernels(table), table["op"])
    return replace(
        found, hints=_hints(found, {NOT_LAUNCHED: lambda ops: unknown_operators(ops, SCORED), NO_SHAPE: unread_shapes})
    )


def score_collectives(path: str | Path, given: Mapping[str, str | float] | None = None) -> Scored:
    """Predicts every row of a table of measured collectives with the fabric profiles of the catalogue.

    Args:
        path: a table, or what nccl-tests printed.
        given: columns ``gpu``, ``collective``, ``n_gpus``, ``gpus_per_node`` that the file does not have.

    Raises:
        InputFileError: the file is no table, lacks a column, or has no rows.
    """
    from steptime_lab.calibrate.collectives import NO_FORMULA

    table = read_collectives(path, given or {})
    made = _scored(table, table["time_us"] * 1e-6, predict_collectives(table), table["collective"])
    return replace(made, hints=_hints(made, {NO_FORMULA: unknown_collectives}))


def predict_collectives(table: Table) -> Predicted:
    """Predictions for the rows of a table of collectives, with the fabric profiles of the catalogue."""
    from steptime.hardware.profiles import load_fabric_profiles
    from steptime_lab.calibrate.collectives import predict_rows

    with np.errstate(all="ignore"):
        found = predict_rows(table, load_fabric_profiles())
    reason = found.reason.copy()
    reason[(reason == "") & ~timed(found.seconds)] = NO_VALUE
    reason[~timed(table["time_us"])] = NO_TIME
    return replace(found, reason=reason)


def _hints(found: Scored, known: Mapping[str, Callable[[Iterable[str]], str]]) -> dict[str, str]:
    """Hints by reason, for the reasons for which rows were skipped."""
    reason = found.score.predicted.reason
    made = {why: hint(found.op[reason == why].tolist()) for why, hint in known.items() if (reason == why).any()}
    made[NO_DEVICE] = unknown_devices(found.table.text("gpu").tolist(), (reason == NO_DEVICE).tolist())
    return {why: text for why, text in made.items() if text}


def _scored(table: Table, measured: Array, predicted: Predicted, op: Array) -> Scored:
    more = {} if predicted.origin is None else {"by_curve": predicted.origin}
    groups = {"by_source": table.text("source"), "by_gpu": table.text("gpu"), "by_op": op}
    named = {name: np.where(group == "", NAMELESS, group) for name, group in groups.items()}
    return Scored(table=table, score=Score(measured_s=measured, predicted=predicted, groups={**named, **more}), op=op)


def predict_kernels(table: Table) -> Predicted:
    """Predictions for the rows of a table of kernels, and the origin of each curve.

    Args:
        table: with the columns of ``kernels.parquet``; text and numbers as :class:`Table` promises.
    """
    known, table = Known.load(), usual_names(table)
    devices = {name: device_of(name) for name in set(table.text("gpu"))}
    reason = _first_reasons(table, devices)
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    origin = np.full(table.rows, "", dtype=object)
    state = _State(table=table, devices=devices, reason=reason, origin=origin, times=(seconds, low, high))
    foreign, silent = _foreign(table), _silent(table, "kernel", "notes")
    state.plain(foreign & silent & _silent(table, "method"))
    state.run(known, table, "", 0.0)
    state.plain(foreign | silent)
    for source in STAND_INS:
        state.run(known, standing_in(table, source), STAND_IN, STAND_IN_ERROR)
    state.without_curve()
    return Predicted(seconds=seconds, low_s=low, high_s=high, reason=reason, origin=origin)


def usual_names(table: Table) -> Table:
    """The table with operators and dtypes under the names that the families know."""
    ops = {name: name if name in OPS else operator_named(name) for name in set(table.text("op"))}
    known = {name: bool(gemm_dtype(name)) for name in set(table.text("dtype"))}
    dtypes = {name: name if known[name] else dtype_named(name) for name in known}
    named = {
        "op": np.array([ops[name] for name in table.text("op")], dtype=object),
        "dtype": np.array([dtypes[name] for name in table.text("dtype")], dtype=object),
    }
    return Table({**table.columns, **named})


def _foreign(table: Table) -> Array:
    """Rows of sources whose implementations have no curves of their own."""
    known = {name: bool(KNOWN_SOURCE.match(name)) for name in set(table.text("source"))}
    return np.array([not known[name] for name in table.text("source")], bool)


def _silent(table: Table, *names: str) -> Array:
    """Rows whose cells in these columns are empty."""
    mask: Array = np.logical_and.reduce([table.text(name) == "" for name in names])
    return mask


def standing_in(table: Table, source: str) -> Table:
    """The table with unknown sources replaced."""
    return Table({**table.columns, "source": np.where(_foreign(table), source, table.text("source"))})


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Predictions of a table under construction: its methods fill the arrays."""

    table: Table
    devices: Mapping[str, Device | None]
    reason: Array
    origin: Array
    times: tuple[Array, Array, Array]
    """Seconds and the ends of the band."""

    def run(self, known: Known, table: Table, label: str, error: float) -> None:
        """Predicts the rows without a prediction from their values in `table`."""
        open_rows = np.isin(self.reason.astype(str), (NO_SHAPE, NO_CURVE))
        names, code = np.unique(table.text("op").astype(str), return_inverse=True)
        for family in ORDER:
            place = np.flatnonzero(open_rows & np.isin(names, list(family.ops))[code])
            if len(place):
                self._family(known, family, table.take(place), place, label, error)
                open_rows &= self.origin == ""

    def plain(self, wanted: Array) -> None:
        """Predicts open rows as an estimate does, with a wider band where implementations differ."""
        open_rows = np.isin(self.reason.astype(str), (NO_SHAPE, NO_CURVE)) & wanted
        timer = PlainTimer.fresh()
        for row, gpu, op, dtype, cells in self._cells_of(open_rows):
            device = self.devices[gpu]
            cost = timer.cost(device, op, dtype_of(dtype) or dtype, cells) if device else None
            if cost is None or not cost.seconds > 0:
                continue
            product = PLAIN[op].product
            low, high = cost.band if product else widened(cost.band, STAND_IN_ERROR)
            for column, value in zip(self.times, (1.0, low, high), strict=True):
                column[row] = value * cost.seconds
            self.origin[row] = _origin(cost.basis) + ("" if product else STAND_IN)
            self.reason[row] = ""

    def without_curve(self) -> None:
        """Marks rows that are still open, and whose operator, sizes and dtype are known, as lacking a curve."""
        for row, _, op, dtype, cells in self._cells_of(self.reason == NO_SHAPE):
            if op in PLAIN and PLAIN[op].sizes(cells) is not None and gemm_dtype(dtype):
                self.reason[row] = NO_CURVE

    def _cells_of(self, rows: Array) -> Iterator[tuple[int, str, str, str, dict[str, float]]]:
        """Place, GPU, operator, dtype and sizes of rows."""
        names = {column.partition("=")[0] for plain in PLAIN.values() for column in plain.columns}
        columns = {name: self.table.number(name) for name in sorted(names)}
        texts = [self.table.text(name) for name in ("gpu", "op", "dtype")]
        for row in np.flatnonzero(rows).tolist():
            gpu, op, dtype = (column[row] for column in texts)
            yield row, gpu, op, dtype, {name: float(column[row]) for name, column in columns.items()}

    def _family(self, known: Known, family: KernelFamily, table: Table, place: Array, label: str, error: float) -> None:
        shape = shapes_of(family, table)
        good = readable(shape)
        place, shape = place[good], {name: column[good] for name, column in shape.items()}
        self.reason[place] = NO_CURVE
        sources = table.take(good).text("source")
        for (gpu, dtype, timer), index in _cells(family, table.take(good)):
            device = self.devices[gpu]
            found = known.curve(device, _curves_of(family), dtype, timer) if device else None
            if device is None or found is None:
                continue
            curve = replace(found[0], band=widened(found[0].band, error)) if error else found[0]
            if set(sources[index]) != {curve.source}:
                curve = replace(curve, band=of_others(curve))
            made = _times(family, curve, device, {name: column[index] for name, column in shape.items()})
            if made is None:
                continue
            rows = place[index]
            for column, values in zip(self.times, made, strict=True):
                column[rows] = values
            self.origin[rows] = found[1] + label
            self.reason[rows] = np.where(timed(made[0]), "", NO_VALUE)


def _first_reasons(table: Table, devices: Mapping[str, Device | None]) -> Array:
    """Initial reason of each row for having no prediction."""
    known = np.array([devices[gpu] is not None for gpu in table.text("gpu")], bool)
    trained = np.isin(table.text("op").astype(str), SCORED) & launched(table)
    reason = np.where(trained, NO_SHAPE, NOT_LAUNCHED).astype(object)
    reason[~known] = NO_DEVICE
    reason[table.suspect] = SUSPECT
    reason[~timed(table.number("latency_us"))] = NO_TIME
    return reason


def _origin(basis: str) -> str:
    """Origin of the curve of an estimate, in the words of the other origins."""
    return "own" if basis.startswith("fitted") else "roofline" if basis == "roofline" else "transferred"


def _curves_of(family: KernelFamily) -> str:
    """Name of the family whose curves ``family`` takes."""
    return FAMILY.name if family is BACKWARD else family.name


def _cells(family: KernelFamily, table: Table) -> Iterator[tuple[tuple[str, str, str], Array]]:
    """GPU, dtype and timer -> places of the rows."""
    found: dict[tuple[str, str, str], list[int]] = {}
    columns = (table.text(name) for name in ("gpu", "dtype", "method"))
    for i, key in enumerate(zip(*columns, strict=True)):
        found.setdefault(key, []).append(i)
    merged: dict[tuple[str, str, str], list[int]] = {}
    for (gpu, dtype, method), index in found.items():
        merged.setdefault((gpu, _dtype(family, dtype), timer_of(method)), []).extend(index)
    yield from ((key, np.array(index)) for key, index in merged.items())


def _dtype(family: KernelFamily, name: str) -> str:
    if _curves_of(family) == FAMILY.name:
        return gemm_dtype(name)
    return ANY_DTYPE if family in BYTES_ONLY else dtype_of(name) or name


def _times(
    family: KernelFamily, curve: Curve, device: Device, shape: Mapping[str, Array]
) -> tuple[Array, Array, Array] | None:
    """Seconds and the band; None if the datasheet of the device has no rate for the dtype."""
    try:
        with np.errstate(all="ignore"):
            made = predict(family, curve, device, shape)
    except UserError:
        return None
    rows = (len(next(iter(shape.values()))),)
    time, low, high = (np.broadcast_to(np.asarray(v), rows) for v in (made.seconds, made.low_s, made.high_s))
    return time, low, high


def _cells_of(values: Array, there: Array) -> list[str]:
    return [f"{v:.6g}" if good else "" for v, good in zip(values.tolist(), there.tolist(), strict=True)]
