"""Names that tables of measured kernels and collectives may have: columns, operators, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from steptime.errors import first_few, shorten
from steptime.lab.calibrate.collectives import KINDS
from steptime.lab.calibrate.expert_exchange import WAYS
from steptime.lab.calibrate.table import Table
from steptime.lab.measured.columns import name_key
from steptime.lab.scoring.plain_kernels import PLAIN, operator_named
from steptime.num import Array

OTHER_NAMES: Final = {
    "device": "gpu", "accelerator": "gpu", "operator": "op", "precision": "dtype", "gpus": "n_gpus", "ranks": "n_gpus",
    "nranks": "n_gpus", "size": "bytes", "size_bytes": "bytes",
}  # fmt: skip
"""Other names of columns; the column's own name wins."""
TIMES: Final = ("time", "latency", "duration")
"""Names of a column of times, before the unit that it ends in."""
UNITS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3}
"""Ending of a column of times -> microseconds."""
TIME_COLUMNS: Final = "times stand in time_us, latency_us or duration_us, or with _ns, _ms or _s in place of _us"
LISTED: Final = 5
"""Unknown names that a hint has."""
LISTED_COLUMNS: Final = 20
"""Columns of a table that a hint has."""


def renamed(table: Table, time: str) -> Table:
    """The table with its columns under their own names, and the times as microseconds in the column ``time``."""
    columns: dict[str, Array] = {}
    for name, column in table.items():
        key = name_key(name) or name
        own = OTHER_NAMES.get(key, key)
        if own == name or (own not in table and own not in columns):
            columns[own] = column
    times = [(f"{base}_{unit}", factor) for base in TIMES for unit, factor in UNITS.items()]
    for name, factor in times:
        if time not in columns and name in columns:
            columns[time] = factor * numbers(columns[name])
    return Table(columns)


def instead_of(missing: str, columns: Sequence[str]) -> str:
    """What to write instead of a column that a table lacks, beside the columns that it has.

    >>> instead_of("bytes", ["gpu", "size_mb"])
    'it has gpu, size_mb; bytes may also be called size or size_bytes; steptime score --columns lists all names'
    """
    others = [other for other, own in OTHER_NAMES.items() if own == missing]
    other = f"{missing} may also be called {' or '.join(others)}" if others else ""
    wanted = TIME_COLUMNS if missing.partition("_")[0] in TIMES else other
    parts = (f"it has {first_few(columns, LISTED_COLUMNS)}", wanted, "steptime score --columns lists all names")
    return "; ".join(filter(None, parts))


def numbers(column: Array) -> Array:
    """A column as numbers; NaN for a cell that is none."""
    return np.array([_number(v) for v in column], np.float64) if column.dtype == object else column


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return np.nan


def unknown_devices(names: Sequence[str], unknown: Sequence[bool]) -> str:
    """Each device that is not known with the first row that names it, the most frequent first; rows count from 1.

    >>> unknown_devices(["h100", "abacus", "abacus", ""], [False, True, True, True])
    'abacus (2 rows, the first is row 2), no name (row 4); steptime devices lists those that there are'
    """
    rows: dict[str, list[int]] = {}
    for row, (name, is_unknown) in enumerate(zip(names, unknown, strict=True), 1):
        if is_unknown:
            rows.setdefault(shorten(name, 40) or "no name", []).append(row)
    told = [
        f"{name} ({f'{len(found)} rows, the first is ' if len(found) > 1 else ''}row {found[0]})"
        for name, found in sorted(rows.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    return f"{first_few(told, LISTED)}; steptime devices lists those that there are" if told else ""


def unknown_operators(ops: Iterable[str], scored: Iterable[str]) -> str:
    """What to write instead of operators that are left out.

    >>> unknown_operators(["moe", "gemm", "moe"], ["gemm", "rmsnorm"])
    'gemm, moe; scored are gemm, rmsnorm, unless source, kernel, notes or dtype name an implementation of serving'
    """
    rest = "unless source, kernel, notes or dtype name an implementation of serving"
    return f"{_listed(ops)}; scored are {', '.join(scored)}, {rest}"


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
