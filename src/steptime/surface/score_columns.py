"""Names that tables of measured kernels and collectives may have: columns, operators, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from steptime.calibrate.collectives import KINDS
from steptime.calibrate.expert_exchange import WAYS
from steptime.calibrate.table import Table
from steptime.errors import first_few, shorten
from steptime.num import Array
from steptime.surface.plain_kernels import PLAIN, operator_named

OTHER_NAMES: Final = {
    "device": "gpu", "accelerator": "gpu", "operator": "op", "precision": "dtype", "gpus": "n_gpus", "ranks": "n_gpus",
    "nranks": "n_gpus", "size": "bytes", "size_bytes": "bytes",
}  # fmt: skip
"""Other names of columns; the column's own name wins."""
UNITS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}
"""Ending of a column of times -> microseconds."""
LISTED: Final = 5
"""Unknown names that a hint has."""


def renamed(table: Table, time: str) -> Table:
    """The table with its columns under their own names, and the times as microseconds in the column ``time``."""
    columns: dict[str, Array] = {}
    for name, column in table.items():
        own = OTHER_NAMES.get(name, name)
        if own == name or (own not in table and own not in columns):
            columns[own] = column
    for base in ("time", "latency"):
        for unit, factor in UNITS.items():
            name = f"{base}_{unit}"
            if time not in columns and name in table:
                columns[time] = factor * numbers(table[name])
    return Table(columns)


def numbers(column: Array) -> Array:
    """A column as numbers; NaN for a cell that is none."""
    return np.array([_number(v) for v in column], np.float64) if column.dtype == object else column


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return np.nan


def unknown_operators(ops: Iterable[str]) -> str:
    """What to write instead of operators that have no time model."""
    return f"{_listed(ops)}; operators are {', '.join(PLAIN)} (steptime score --columns)"


def unknown_collectives(names: Iterable[str]) -> str:
    """What to write instead of collectives that have no formula."""
    known = sorted({*KINDS.values(), *WAYS})
    return f"{_listed(names)}; collectives are {', '.join(known)}"


def unread_shapes(ops: Iterable[str]) -> str:
    """Columns that the shapes of operators need, and what else may be wrong; "" if that is not known of any."""
    needed = {op: " ".join(PLAIN[op].columns) for op in sorted({operator_named(op) for op in ops}) if op in PLAIN}
    words = [f"{op} needs {columns}" for op, columns in list(needed.items())[:LISTED]]
    return "; ".join([*words, "and a dtype such as bf16, fp16, fp32, fp8"]) if words else ""


def _listed(names: Iterable[str]) -> str:
    found = sorted({shorten(name, 30) or "an empty cell" for name in names})
    return first_few(found, LISTED)


def columns_of_kernels() -> list[dict[str, Any]]:
    """Operators with their columns (``=``: value of an empty cell) and other spellings."""
    return [{"op": op, "columns": list(plain.columns), "other_names": list(plain.names)} for op, plain in PLAIN.items()]


def names_of_collectives() -> dict[str, list[str]]:
    """Collectives with other spellings than such that differ in case, ``_``, ``-`` or space."""
    found: dict[str, list[str]] = {}
    for spelling, kind in KINDS.items():
        found.setdefault(kind, [])
        if spelling != kind.replace("_", ""):
            found[kind].append(spelling)
    return found | {way: [] for way in WAYS}


def other_columns() -> Mapping[str, list[str]]:
    """Columns of both tables with other names."""
    found: dict[str, list[str]] = {}
    for other, own in OTHER_NAMES.items():
        found.setdefault(own, []).append(other)
    return found
