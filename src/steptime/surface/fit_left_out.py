"""Rows of tables that a fit of time models left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from steptime.calibrate.collectives import covered, enough, libraries, machine_rows, machines_of
from steptime.calibrate.family import KernelFamily
from steptime.calibrate.gemm import FAMILY
from steptime.calibrate.kernel_families import FAMILIES
from steptime.calibrate.table import Table
from steptime.errors import first_few, shorten
from steptime.hardware.library import NO_DEVICE, device_named
from steptime.hardware.profile import Curve

NO_MODEL: Final = "operator that no curve is fitted to"
TOO_FEW: Final = "too few different shapes that can be read"
NO_MACHINE: Final = "not of the sources and GPUs that fabrics are fitted to"
NO_COLLECTIVE: Final = "no time, size or group that a collective has, or beyond the groups of"
FEW_ROWS: Final = "too few rows, or sizes among them, for a fit"
UNEXPLAINED: Final = "times far from what links explain; are the units right?"
NAMED: Final = 4
"""Names that a reason has."""


def kernels_left_out(table: Table, written: Mapping[str, Sequence[Curve]], only: str | None) -> dict[str, int]:
    """Rows of kernels that no curve of their device and operator came of, by reason.

    Args:
        table: measured kernels.
        written: curves by device.
        only: the family that was asked for; rows of others do not count.
    """
    asked = [family for family in (FAMILY, *FAMILIES) if only in (None, family.name)]
    devices = {gpu: device_named(gpu) for gpu in set(table.text("gpu"))}
    found: list[tuple[str, str]] = []
    for gpu, op in zip(table.text("gpu"), table.text("op"), strict=True):
        own, device = [family for family in asked if op in family.ops], devices[gpu]
        if not own:
            found += [] if only else [(NO_MODEL, op)]
        elif device is None:
            found.append((NO_DEVICE, gpu))
        elif not _fitted(own, written.get(device.name, ())):
            found.append((TOO_FEW, f"{op} on {device.name}"))
    return _counted(found)


def collectives_left_out(table: Table, fabrics: Iterable[str]) -> dict[str, int]:
    """Rows of collectives that no fabric came of, by reason; ``fabrics`` are the names of those that were fitted."""
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


def _fitted(families: Sequence[KernelFamily], curves: Sequence[Curve]) -> bool:
    return bool({family.name for family in families} & {curve.family for curve in curves})


def _counted(found: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Rows by reason, each with the names that it is about."""
    names: dict[str, dict[str, None]] = {}
    for reason, name in found:
        names.setdefault(reason, {}).setdefault(shorten(name, 40) or "an empty cell")
    counts = Counter(reason for reason, _ in found)
    return {f"{reason}: {first_few(list(names[reason]), NAMED)}": rows for reason, rows in counts.most_common()}
