"""Compares a measured machine with the public profile of a device of the catalogue, operator by operator."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UnknownNameError, UserError
from steptime.hardware.library import device_named
from steptime.hardware.profiles import profile_names
from steptime.measure.kinds import KINDS
from steptime.measure.machine.cluster_file import kernel_rows
from steptime.measure.machine.profile import Fitted, Predictor
from steptime.measure.machine.runner import Measured
from steptime.measure.residuals import Score
from steptime.measure.table import Table
from steptime.store.files import write_whole

AUTO: Final = "auto"
"""Stands for the catalogue device that matches the machine's own name."""
ATTENTION_SOURCE: Final = "simumax"
"""Source of the catalogue that measured the same call of torch (scaled dot product attention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One operator: measured, and by both profiles."""

    op: str
    dtype: str
    shape: str
    measured_s: float
    public_s: float
    """NaN: the public profile has no model for it."""
    own_s: float
    """By the curves that were fitted just now; NaN: there is none."""
    origin: str
    """Origin of the public curve, or the reason why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Operators that tables of kernels have, and the errors of the public profile."""

    device: str
    residuals: tuple[Residual, ...]
    score: Mapping[str, Any]
    """Counts and errors as ``steptime score`` prints them."""


def public_device(given: str, processor: str = "") -> str:
    """Catalogue name of the device to compare with.

    Args:
        given: a name of the catalogue, or ``auto``.
        processor: name that the machine gives itself, for ``auto``.

    Raises:
        UnknownNameError: the device is unknown, or nothing is published about it.
        UserError: the machine is not in the catalogue.
    """
    known = profile_names()
    found = device_named(processor if given == AUTO else given)
    name = None if found is None else found.name
    if name is None and given == AUTO:
        raise UserError(
            f"the catalogue has no device that calls itself {processor!r}",
            hint=f"name one with --compare-to: {', '.join(known)}",
        )
    if name not in known:
        raise UnknownNameError("published profile of a device", given, known)
    return name


def compare(fitted: Fitted, device: str, method: str) -> Comparison:
    """Predicts the measured operators that tables of kernels have with the public profile of a device.

    Args:
        fitted: the calibration.
        device: catalogue name.
        method: timing method, as ``steptime score`` reads it.
    """
    pairs = [(one, row) for one in fitted.operators for row in kernel_rows([one], device, method)]
    source = {"source": ATTENTION_SOURCE}
    table = _table([row | source if row["op"].startswith("attention") else row for _, row in pairs])
    predicted = KINDS["kernels"].predict(table)
    origin = np.full(table.rows, "", dtype=object) if predicted.origin is None else predicted.origin
    measured = table["latency_us"] * 1e-6
    score = Score(measured_s=measured, predicted=predicted, groups={"by_op": table.text("op"), "by_curve": origin})
    why = np.where(origin == "", predicted.reason, origin)
    own = Predictor(fitted.curves)
    residuals = [
        Residual(
            op=one.task.kind,
            dtype=one.task.dtype,
            shape=" ".join(f"{k}={v}" for k, v in one.task.shape.items()),
            measured_s=one.seconds,
            public_s=float(public_s),
            own_s=_own_s(own, one),
            origin=str(text),
        )
        for (one, _), public_s, text in zip(pairs, predicted.seconds, why, strict=True)
    ]
    return Comparison(device=device, residuals=tuple(residuals), score=score.to_json())


def _own_s(predictor: Predictor, one: Measured) -> float:
    try:
        return predictor.seconds(one.task)
    except UserError:
        return float("nan")


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = sorted({name for row in rows for name in row})
    return Table(
        {
            name: np.array([row.get(name, "") for row in rows], dtype=object)
            if any(isinstance(row.get(name), str) for row in rows)
            else np.array([float(row.get(name, "nan")) for row in rows], np.float64)
            for name in names
        }
    )


def residuals_path(out: Path) -> Path:
    """Path of the residuals of a calibration.

    >>> str(residuals_path(Path("here/my.toml")))
    'here/my.residuals.csv'
    """
    return out.with_suffix(".residuals.csv")


def write_residuals(found: Comparison, path: Path) -> None:
    """One line per operator: measured time, and predicted time and error by the public profile and by the own one.

    Raises:
        InputFileError: it cannot be written.
    """
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = ("op", "dtype", "shape", "measured_s", "public_s", "public_error", "own_s", "own_error")
    lines.writerow((*names, "public_device", "public_curve"))
    for r in found.residuals:
        errors = [(_cell(s), _cell(s / r.measured_s - 1)) for s in (r.public_s, r.own_s)]
        cells = (r.op, r.dtype, r.shape, _cell(r.measured_s), *errors[0], *errors[1])
        lines.writerow((*cells, found.device, r.origin))
    write_whole(path, out.getvalue())


def _cell(value: float) -> str:
    return f"{value:.6g}" if np.isfinite(value) else ""
