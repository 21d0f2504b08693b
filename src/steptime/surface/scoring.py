"""Predictions for every row of a table of measurements with the profiles of the catalogue, and their errors.

A row takes the curve of its device, family, dtype and timer. Where there is none, the next best is taken, in this
order: a sibling dtype of the device, the same curve transferred from other devices, the other timer, another dtype.
Each step away makes the band wider.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.calibrate.family import KernelFamily, dtype_of, readable, timer_of
from steptime.calibrate.gemm import BACKWARD, FAMILY, gemm_dtype
from steptime.calibrate.kernel_curves import ANY_DTYPE
from steptime.calibrate.kernel_families import BYTES_ONLY, FAMILIES
from steptime.calibrate.score import Predicted, Score
from steptime.calibrate.table import Table, read_table
from steptime.calibrate.transfer import predict, transferred_curve, widened
from steptime.errors import FieldError, InputFileError, UserError
from steptime.hardware.library import is_path, load_device
from steptime.hardware.profile import Curve, Profile
from steptime.hardware.profiles import TIMERS, load_profile, profile_names
from steptime.hardware.records import Device
from steptime.num import Array
from steptime.store import refuse_unwritable, write_whole

NO_TIME: Final = "no positive measured time"
NO_DEVICE: Final = "device not in the catalogue"
NO_MODEL: Final = "no time model for this operator"
NO_SHAPE: Final = "shape or dtype unknown"
NO_CURVE: Final = "no curve for this kernel and dtype"
NO_VALUE: Final = "the time model gives no positive time for this shape"
SUSPECT: Final = "marked as suspect in its notes"
NAMELESS: Final = "unnamed"
"""Group of rows whose cell is empty."""

TEXTS: Final = (
    "source", "gpu", "op", "collective", "interconnect", "dtype", "method", "kernel", "grid", "notes",
)  # fmt: skip
"""Columns that are text; all others are numbers."""
KERNEL_COLUMNS: Final = ("gpu", "op", "dtype", "latency_us")
COLLECTIVE_COLUMNS: Final = ("gpu", "collective", "n_gpus", "bytes", "time_us")

#: Plain products first; grouped products have a model of their own, and that of plain ones as the last resort.
ORDER: Final = (replace(FAMILY, ops=FAMILY.ops - {"grouped_gemm"}), BACKWARD, *FAMILIES, FAMILY)
#: Dtypes whose curves stand for each other: same width of operands, same units.
SIBLINGS: Final = {"bf16": ("fp16",), "fp16": ("bf16",), "fp8": ("fp8_block",), "fp8_block": ("fp8",)}
#: Log error (standard deviation) that each step away from the right curve adds; choice of this program.
SIBLING_ERROR, TIMER_ERROR, DTYPE_ERROR, STAND_IN_ERROR = 0.1, 0.5, 0.5, 0.3
#: Sources whose implementations have curves of their own.
KNOWN_SOURCE: Final = re.compile("aiconfigurator|cudnn|flagperf|liger|llmservingsim|neusight|vidur")
#: Source and kernel that a row is taken for where its own source is unknown or its kernel is not given.
STAND_INS: Final = (
    ("vidur", ""), ("neusight", ""), ("", "fused_moe_triton"), ("", "cutlass"), ("", "flashinfer"), ("", "marlin"),
    ("cudnn", "pytorch"), ("aiconfigurator", ""), ("aiconfigurator", "fused_moe_triton"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A table of measurements, its predictions and their errors."""

    table: Table
    score: Score
    op: Array
    """Operator or collective of each row."""


def score_kernels(path: str | Path) -> Scored:
    """Predicts every row of a table of measured kernels with the profiles of the catalogue.

    Raises:
        InputFileError: the file is no table, lacks a column, or has no rows.
    """
    table = read_measurements(path, KERNEL_COLUMNS)
    predicted, origin = predict_kernels(table)
    return _scored(table, table["latency_us"] * 1e-6, predicted, table["op"], {"by_curve": origin})


def score_collectives(path: str | Path) -> Scored:
    """Predicts every row of a table of measured collectives with the fabric profiles of the catalogue.

    Raises:
        InputFileError: the file is no table, lacks a column, or has no rows.
    """
    from steptime.calibrate.collectives import predict_rows
    from steptime.hardware.fabric_profile import load_fabric_profiles

    table = read_measurements(path, COLLECTIVE_COLUMNS)
    measured = table["time_us"] * 1e-6
    with np.errstate(all="ignore"):
        found = predict_rows(table, load_fabric_profiles())
    reason = found.reason.copy()
    reason[(reason == "") & ~_positive(found.seconds)] = NO_VALUE
    reason[~_positive(measured)] = NO_TIME
    return _scored(table, measured, replace(found, reason=reason), table["collective"], {})


def _scored(table: Table, measured: Array, predicted: Predicted, op: Array, more: Mapping[str, Array]) -> Scored:
    groups = {"by_source": table.text("source"), "by_gpu": table.text("gpu"), "by_op": op}
    named = {name: np.where(group == "", NAMELESS, group) for name, group in groups.items()}
    return Scored(table=table, score=Score(measured_s=measured, predicted=predicted, groups={**named, **more}), op=op)


def read_measurements(path: str | Path, required: tuple[str, ...]) -> Table:
    """A table with text where text belongs and numbers (or NaN) everywhere else.

    Raises:
        InputFileError: the file is no table, lacks a required column, or has no rows.
    """
    table = read_table(path, required)
    if not table.rows:
        raise InputFileError(str(path), "has no rows")
    clean = {name: _texts(table.text(name)) for name in TEXTS}
    return Table(clean | {name: _numbers(table[name]) for name in table if name not in TEXTS})


def _texts(column: Array) -> Array:
    if column.dtype == object:
        return column
    return np.array(["" if np.isnan(value) else f"{value:g}" for value in column], dtype=object)


def _numbers(column: Array) -> Array:
    return np.array([_number(v) for v in column], np.float64) if column.dtype == object else column


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return np.nan


def _positive(values: Array) -> Array:
    mask: Array = np.isfinite(values) & (values > 0)
    return mask


@dataclass(slots=True)
class Known:
    """The profiles of the catalogue, and what was derived from them."""

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
        """The nearest curve, ready for the dtype, and how it was come by; None if no device has one."""
        for place, like, clock, error in self._choices(family, dtype, timer):
            found = self._own(device, family, like, clock) if place == "own" else None
            found = self._transferred(device, family, like, clock) if place == "transferred" else found
            if found is not None:
                origin = (
                    place + ("" if clock == timer else ", other timer") + ("" if like == dtype else ", other dtype")
                )
                return replace(found, dtype=dtype, band=widened(found.band, error)) if error else found, origin
        return None

    def _choices(self, family: str, dtype: str, timer: str) -> Iterator[tuple[str, str, str, float]]:
        """Place, dtype and timer of curves, the best first, and the log error that each adds."""
        siblings = SIBLINGS.get(dtype, ())
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
    """The device with that spelling in the catalogue; a table cannot name files."""
    if not gpu or is_path(gpu):
        return None
    try:
        return load_device(gpu)
    except UserError:
        return None


def predict_kernels(table: Table, known: Known | None = None) -> tuple[Predicted, Array]:
    """Predictions for the rows of a table of kernels, and how the curve of each was come by.

    Args:
        table: with the columns of ``kernels.parquet``; text and numbers as :class:`Table` promises.
        known: profiles; default those of the catalogue.
    """
    known = known or Known.load()
    devices = {name: device_of(name) for name in set(table.text("gpu"))}
    reason = _first_reasons(table, devices)
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    origin = np.full(table.rows, "", dtype=object)
    state = _State(table=table, devices=devices, reason=reason, origin=origin, times=(seconds, low, high))
    state.run(known, table, "", 0.0)
    for source, kernel in STAND_INS:
        state.run(known, standing_in(table, source, kernel), ", stand-in", STAND_IN_ERROR)
    return Predicted(seconds=seconds, low_s=low, high_s=high, reason=reason), origin


def standing_in(table: Table, source: str, kernel: str) -> Table:
    """The table with an unknown source, or a kernel that is not given, replaced."""
    sources, kernels = table.text("source"), table.text("kernel")
    known = {name: bool(KNOWN_SOURCE.match(name)) for name in set(sources)}
    foreign = np.array([not known[name] for name in sources], bool)
    named = {"source": np.where(foreign & (source != ""), source, sources)}
    return Table({**table.columns, **named, "kernel": np.where(kernels == "", kernel, kernels)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Predictions while they are made, in arrays that are filled in."""

    table: Table
    devices: Mapping[str, Device | None]
    reason: Array
    origin: Array
    times: tuple[Array, Array, Array]
    """Seconds and the ends of the band."""

    def run(self, known: Known, table: Table, label: str, error: float) -> None:
        """Predicts the rows that have no prediction yet, as if they were those of `table`."""
        open_rows = np.isin(self.reason.astype(str), (NO_SHAPE, NO_CURVE))
        names, code = np.unique(table.text("op").astype(str), return_inverse=True)
        for family in ORDER:
            place = np.flatnonzero(open_rows & np.isin(names, list(family.ops))[code])
            if len(place):
                self._family(known, family, table.take(place), place, label, error)
                open_rows &= self.origin == ""

    def _family(self, known: Known, family: KernelFamily, table: Table, place: Array, label: str, error: float) -> None:
        shape = _shapes(family, table)
        good = readable(shape)
        place, shape = place[good], {name: column[good] for name, column in shape.items()}
        self.reason[place] = NO_CURVE
        for (gpu, dtype, timer), index in _cells(family, table.take(good)):
            device = self.devices[gpu]
            found = known.curve(device, _curves_of(family), dtype, timer) if device else None
            if device is None or found is None:
                continue
            curve = replace(found[0], band=widened(found[0].band, error)) if error else found[0]
            made = _times(family, curve, device, {name: column[index] for name, column in shape.items()})
            if made is None:
                continue
            rows = place[index]
            for column, values in zip(self.times, made, strict=True):
                column[rows] = values
            self.origin[rows] = found[1] + label
            self.reason[rows] = np.where(_positive(made[0]), "", NO_VALUE)


def _first_reasons(table: Table, devices: Mapping[str, Device | None]) -> Array:
    """Why each row has no prediction before any was made."""
    ops = frozenset[str]().union(*(family.ops for family in ORDER))
    known = np.array([devices[gpu] is not None for gpu in table.text("gpu")], bool)
    suspect = np.array(["SUSPECT" in notes for notes in table.text("notes")], bool)
    reason = np.array([NO_SHAPE if name in ops else NO_MODEL for name in table.text("op")], dtype=object)
    reason[~known] = NO_DEVICE
    reason[suspect] = SUSPECT
    reason[~_positive(table.number("latency_us"))] = NO_TIME
    return reason


def _curves_of(family: KernelFamily) -> str:
    """Name of the family whose curves it takes."""
    return FAMILY.name if family is BACKWARD else family.name


def _shapes(family: KernelFamily, table: Table) -> dict[str, Array]:
    """Shape arguments of the rows; NaN for a row whose cells cannot be read at all."""
    try:
        with np.errstate(all="ignore"):
            return {name: np.asarray(v, np.float64) for name, v in family.shape(table).items()}
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError):
        if table.rows == 1:
            return {"unreadable": np.full(1, np.nan)}
    middle = table.rows // 2
    parts = [_shapes(family, table.take(slice(*ends))) for ends in ((0, middle), (middle, table.rows))]
    names = {name for part in parts for name in part}
    sizes = (middle, table.rows - middle)
    nothing = [np.full(size, np.nan if "unreadable" in part else 0.0) for size, part in zip(sizes, parts, strict=True)]
    return {n: np.concatenate([p.get(n, gap) for p, gap in zip(parts, nothing, strict=True)]) for n in names}


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


def check_out(path: Path) -> None:
    """Refuses a file for residuals before the work, not after it.

    Raises:
        FieldError: it does not end in .csv.
        InputFileError: it cannot be written.
    """
    if path.suffix.lower() != ".csv":
        raise FieldError(
            "", "--out", f"{str(path)[:80]!r} does not end in .csv", hint="for example --out residuals.csv"
        )
    refuse_unwritable(path)


def write_residuals(result: Scored, path: Path) -> None:
    """Writes one line per row: what it is, measured and predicted time, error, curve, or why it was skipped.

    Raises:
        InputFileError: it cannot be written.
    """
    p, measured, good = result.score.predicted, result.score.measured_s, result.score.scored
    texts = [result.table.text(name) for name in ("source", "gpu")]
    origin = result.score.groups.get("by_curve", np.full(len(good), "", dtype=object))
    numbers = [_cells_of(v, np.isfinite(v)) for v in (measured,)]
    with np.errstate(all="ignore"):
        numbers += [_cells_of(v, good) for v in (p.seconds, p.low_s, p.high_s, p.seconds / measured - 1)]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = ("source", "gpu", "op", "dtype", "measured_s", "predicted_s", "low_s", "high_s", "error")
    lines.writerow(("row", *names, "curve", "skipped"))
    columns: list[Any] = [*texts, result.op, result.table.text("dtype"), *numbers, origin, p.reason]
    lines.writerows(zip(range(1, len(good) + 1), *columns, strict=True))
    write_whole(path, out.getvalue())


def _cells_of(values: Array, there: Array) -> list[str]:
    return [f"{v:.6g}" if good else "" for v, good in zip(values.tolist(), there.tolist(), strict=True)]
