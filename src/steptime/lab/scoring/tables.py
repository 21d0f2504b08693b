"""Tables of measured kernels and collectives, read from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from steptime.errors import InputFileError
from steptime.lab.calibrate.table import Table, read_table
from steptime.lab.scoring.columns import instead_of, numbers, renamed
from steptime.lab.scoring.nccl_tests import is_nccl_tests, read_nccl_tests
from steptime.num import Array

TEXTS: Final = (
    "source", "gpu", "op", "collective", "interconnect", "dtype", "method", "kernel", "grid", "notes",
)  # fmt: skip
"""Columns that are text; all others are numbers."""
KERNEL_COLUMNS: Final = ("gpu", "op", "dtype", "latency_us")
COLLECTIVE_COLUMNS: Final = ("gpu", "collective", "n_gpus", "bytes", "time_us")


def read_collectives(path: str | Path, given: Mapping[str, str | float]) -> Table:
    """A table of collectives from a table, or from what nccl-tests printed; ``given`` fills columns that are missing.

    Raises:
        InputFileError: as :func:`read_measurements`, or nothing says what ran where.
    """
    if is_nccl_tests(path):
        table = read_nccl_tests(path, given)
        empty = np.full(table.rows, "", dtype=object)
        return Table(dict.fromkeys(TEXTS, empty) | dict(table.columns))
    return read_measurements(path, COLLECTIVE_COLUMNS, given)


def read_measurements(
    path: str | Path, required: tuple[str, ...], given: Mapping[str, str | float] | None = None
) -> Table:
    """A table with text where text belongs and numbers (or NaN) everywhere else.

    Args:
        path: CSV, CSV.gz or Parquet.
        required: columns that must be there, the measured time last.
        given: value of columns that the table does not have.

    Raises:
        InputFileError: the file is no table, lacks a required column, or has no rows.
    """
    table = renamed(read_table(path), required[-1])
    more = {n: np.full(table.rows, v, object if n in TEXTS else None) for n, v in (given or {}).items()}
    table = Table({**more, **table.columns})
    missing = [name for name in required if name not in table]
    if missing:
        hint = instead_of(missing[0], list(table))
        raise InputFileError(str(path), f"lacks the column {missing[0]!r}", hint=hint)
    if not table.rows:
        raise InputFileError(str(path), "has no rows")
    clean = {name: _texts(table.text(name)) for name in TEXTS}
    return Table(clean | {name: numbers(table[name]) for name in table if name not in TEXTS})


def _texts(column: Array) -> Array:
    if column.dtype == object:
        return column
    return np.array(["" if np.isnan(value) else f"{value:g}" for value in column], dtype=object)
