"""Rows of tables that a fit of time models left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.errors import UserError, first_few, shorten
from steptime.hardware.library import NO_DEVICE, device_named
from steptime.measure.table import Table, is_suspect
from steptime.num import Array
from steptime_lab.calibrate.collectives import covered, enough, libraries, machine_rows, machines_of
from steptime_lab.calibrate.family import NOT_LAUNCHED, KernelFamily, launched, readable, shapes_of, timed
from steptime_lab.calibrate.fitting import Unexplained
from steptime_lab.calibrate.gemm import FAMILY
from steptime_lab.calibrate.kernel_families import FAMILIES
from steptime_lab.scoring.kernels import NO_SHAPE, NO_TIME, SUSPECT

NO_MODEL: Final = "operator that no curve is fitted to"
TOO_FEW: Final = "too few different shapes"
OTHERS: Final = "the fit takes other measurements of the same GPU, operator and dtype"
NO_MACHINE: Final = "not of the sources and GPUs that fabrics are fitted to"
NO_COLLECTIVE: Final = "time, size or group size missing or out of range for the fit of"
FEW_ROWS: Final = "too few rows, or too few different sizes, for a fit"
UNEXPLAINED: Final = "times far from what links or devices explain; are the units right?"
NAMED: Final = 4
"""Largest number of names that are listed with a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Fitted and refused rows of a table of kernels."""

    rows: Array
    """Rows that a curve was fitted to."""
    why: Array
    """Reason why the fit of a row was refused; "" where it was not."""

    @classmethod
    def none(cls, rows: int) -> Fitted:
        """A table of ``rows`` rows of which none was fitted or refused."""
        return cls(rows=np.zeros(rows, bool), why=np.full(rows, "", dtype=object))

    def refused(self, rows: Array, error: UserError) -> None:
        """Notes why the fit to some rows was refused."""
        self.why[rows] = UNEXPLAINED if isinstance(error, Unexplained) else str(error).partition("\n")[0]


def kernels_left_out(table: Table, fitted: Fitted, only: str | None) -> dict[str, int]:
    """Rows of kernels that no curve was fitted to, by reason.

    Args:
        table: measured kernels.
        fitted: its fitted and refused rows.
        only: a family; rows of other families do not count. None: all families.
    """
    asked = [family for family in (FAMILY, *FAMILIES) if only in (None, family.name)]
    known = frozenset[str]().union(*(family.ops for family in asked))
    devices = {gpu: device_named(gpu) for gpu in set(table.text("gpu"))}
    legible, timed_rows = _legible(table, asked), timed(table.number("latency_us") * 1e-6)
    launched_rows = launched(table)
    columns, sources = [table.text(name) for name in ("gpu", "op", "dtype", "notes")], table.text("source")
    measured = {cell[:3] for cell in zip(*(column[fitted.rows] for column in columns), strict=True)}
    found: list[tuple[str, str]] = []
    for i in np.flatnonzero(~fitted.rows).tolist():
        gpu, op, dtype, notes = (column[i] for column in columns)
        device = devices[gpu]
        if op not in known:
            found += [] if only else [(NO_MODEL, op)]
        elif not launched_rows[i]:
            found.append((NOT_LAUNCHED, f"{op} of {sources[i]}"))
        elif device is None:
            found.append((NO_DEVICE, gpu))
        elif fitted.why[i]:
            found.append((fitted.why[i], f"{op} on {device.name}"))
        elif is_suspect(notes):
            found.append((SUSPECT, f"{op} on {device.name}"))
        elif not timed_rows[i] or not legible[i]:
            found.append((NO_SHAPE if timed_rows[i] else NO_TIME, op))
        else:
            found.append((OTHERS if (gpu, op, dtype) in measured else TOO_FEW, f"{op} on {device.name}"))
    return _counted(found)


def _legible(table: Table, families: Sequence[KernelFamily]) -> Array:
    """Rows whose shape and dtype some family reads."""
    out, ops = np.zeros(table.rows, bool), table.text("op").astype(str)
    for family in families:
        place = np.flatnonzero(np.isin(ops, list(family.ops)) & ~out)
        if len(place):
            out[place] = readable(shapes_of(family, table.take(place)))
    return out


def collectives_left_out(table: Table, fabrics: Iterable[str]) -> dict[str, int]:
    """Rows of collectives that no fabric was fitted to, by reason; ``fabrics`` names the fitted ones."""
    names, library = set(fabrics), libraries(table)
    reason, name = (np.full(table.rows, "", dtype=object) for _ in range(2))
    fitted = np.zeros(table.rows, bool)
    for machine in machines_of(table):
        own, (places, rows) = covered(machine, table, library), machine_rows(machine, table, library)
        reason[own], name[own] = NO_COLLECTIVE, machine.name
        reason[places] = UNEXPLAINED if enough(rows) else FEW_ROWS
        fitted[places] |= machine.name in names
    other = reason == ""
    reason[other] = NO_MACHINE
    sources = zip(table.text("source")[other], table.text("gpu")[other], strict=True)
    name[other] = [f"{source or 'no source'} on {gpu}" for source, gpu in sources]
    return _counted(list(zip(reason[~fitted], name[~fitted], strict=True)))


def _counted(found: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Number of rows by reason, with the first names that a reason is about."""
    names: dict[str, dict[str, None]] = {}
    for reason, name in found:
        names.setdefault(reason, {}).setdefault(shorten(name, 40) or "an empty cell")
    counts = Counter(reason for reason, _ in found)
    return {f"{reason}: {first_few(list(names[reason]), NAMED)}": rows for reason, rows in counts.most_common()}
