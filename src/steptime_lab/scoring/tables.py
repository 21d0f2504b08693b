"""Tables of measured kernels and collectives: names of columns, files read, output of nccl-tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import InputFileError, first_few, shorten
from steptime.measure.runs.canonical import device_name
from steptime.measure.runs.read import name_key, table
from steptime.measure.table import Table, read_table
from steptime.num import Array
from steptime.store.files import is_file, read_text
from steptime_lab.calibrate.collectives import KINDS, kind_of
from steptime_lab.calibrate.expert_exchange import WAYS
from steptime_lab.scoring.plain_kernels import OTHER_NAMES as OPERATOR_NAMES
from steptime_lab.scoring.plain_kernels import PLAIN, operator_named

OTHER_NAMES: Final[Mapping[str, str]] = table("columns")["kernels_and_collectives"]
"""Other names of columns; the column's own name wins."""
TIMES: Final = ("time", "latency", "duration")
"""Names of a column of times, without the unit at their end."""
UNITS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3}
"""Ending of a column of times -> microseconds."""
TIME_COLUMNS: Final = "times stand in time_us, latency_us or duration_us, or with _ns, _ms or _s in place of _us"
LISTED: Final = 5
"""Largest number of unknown names in a hint."""
LISTED_COLUMNS: Final = 20
"""Largest number of columns of a table in a hint."""


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
    """Hint on a missing column: the columns of the table, and other names of the missing one.

    >>> instead_of("bytes", ["gpu", "size_mb"])
    'it has gpu, size_mb; bytes may also be called size or size_bytes; steptime score --columns lists all names'
    """
    others = [other for other, own in OTHER_NAMES.items() if own == missing]
    other = f"{missing} may also be called {' or '.join(others)}" if others else ""
    wanted = TIME_COLUMNS if missing.partition("_")[0] in TIMES else other
    parts = (f"it has {first_few(columns, LISTED_COLUMNS)}", wanted, "steptime score --columns lists all names")
    return "; ".join(filter(None, parts))


def numbers(column: Array) -> Array:
    """A column as numbers; NaN for a cell that is not a number."""
    return np.array([_number(v) for v in column], np.float64) if column.dtype == object else column


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return np.nan


def unknown_devices(names: Sequence[str], unknown: Sequence[bool]) -> str:
    """Hint on unknown devices, the most frequent first, each with its first row; rows count from 1.

    >>> unknown_devices(["h100", "abacus", "abacus", ""], [False, True, True, True])
    'abacus (2 rows, the first is row 2), no name (row 4); steptime devices lists those that there are'
    """
    rows: dict[str, list[int]] = {}
    for row, (name, is_unknown) in enumerate(zip(names, unknown, strict=True), 1):
        if is_unknown:
            rows.setdefault(shorten(name, 40) or "no name", []).append(row)
    named = [
        f"{name} ({f'{len(found)} rows, the first is ' if len(found) > 1 else ''}row {found[0]})"
        for name, found in sorted(rows.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    return f"{first_few(named, LISTED)}; steptime devices lists those that there are" if named else ""


def unknown_operators(ops: Iterable[str], scored: Iterable[str]) -> str:
    """Hint on operators that are left out.

    >>> unknown_operators(["moe", "gemm", "moe"], ["gemm", "rmsnorm"])
    'gemm, moe; scored are gemm, rmsnorm, unless source, kernel, notes or dtype name an implementation of serving'
    """
    rest = "unless source, kernel, notes or dtype name an implementation of serving"
    return f"{_listed(ops)}; scored are {', '.join(scored)}, {rest}"


def unknown_collectives(names: Iterable[str]) -> str:
    """Hint on collectives that have no formula."""
    known = sorted({*KINDS.values(), *WAYS})
    return f"{_listed(names)}; collectives are {', '.join(known)}"


def unread_shapes(ops: Iterable[str]) -> str:
    """Hint on unread shapes: the columns that their operators need; "" if none of these is known."""
    needed = {op: " ".join(PLAIN[op].columns) for op in sorted({operator_named(op) for op in ops}) if op in PLAIN}
    words = [f"{op} needs {columns}" for op, columns in list(needed.items())[:LISTED]]
    return "; ".join([*words, "and a dtype such as bf16, fp16, fp32, fp8"]) if words else ""


def _listed(names: Iterable[str]) -> str:
    found = sorted({shorten(name, 30) or "an empty cell" for name in names})
    return first_few(found, LISTED)


def columns_of_kernels() -> list[dict[str, Any]]:
    """Operators with their columns (``=``: value of an empty cell) and other spellings."""
    return [
        {"op": op, "columns": list(plain.columns), "other_names": list(OPERATOR_NAMES.get(op, ()))}
        for op, plain in PLAIN.items()
    ]


def names_of_collectives() -> dict[str, list[str]]:
    """Collectives with their other spellings, except those that differ in case, ``_``, ``-`` or space alone."""
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


#: Larger outputs are refused unread.
MAX_BYTES: Final = 16 * 2**20
HEAD: Final = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
"""Columns of version 2.11 and later."""
PLACES: Final = ("out-of-place", "in-place")
NCCL_TEXTS: Final = ("gpu", "collective", "dtype", "method", "source")
_TAG: Final = re.compile(r"^\[\d+,\d+\]<\w+>:? ?")
"""Prefix of each line under ``mpirun --tag-output``."""
_RANK: Final = re.compile(r"\bRank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\S+\s+\[[^\]]*\]\s*(.*?)\s*$")
_PROGRAM: Final = re.compile(r"\b([a-z][a-z_]*)_perf\b")
_LINE: Final = re.compile(r"^\s*\d+(\s+\S+){6,}\s*$")
_ASKED: Final = {
    "collective": ("the collective", "--collective"),
    "gpu": ("the device", "--gpu"),
    "n_gpus": ("the number of devices", "--gpus"),
}
"""Column -> what is missing without it, and the option that gives it."""


@dataclass(slots=True)
class _Run:
    """Facts of one run from the comments that were read so far."""

    collective: str = ""
    head: tuple[str, ...] = HEAD
    hosts: dict[int, str] = field(default_factory=dict)
    gpu: str = ""

    def comment(self, line: str) -> None:
        """Reads one line without figures."""
        words = tuple(line.lstrip("# ").split())
        if words[:1] == ("nThread",):
            self.hosts = {}
        if {"size", "time", "algbw"} <= set(words):
            self.head = words
        rank, program = _RANK.search(line), _PROGRAM.search(line)
        if rank:
            self.hosts[int(rank[1])] = rank[2]
            self.gpu = device_name(rank[3]).name or rank[3]
        if program and kind_of(program[1]):
            self.collective = program[1]

    def facts(self) -> dict[str, str | float]:
        """Columns that hold for all lines of the run; unknown ones are missing."""
        found: dict[str, str | float] = {"gpu": self.gpu, "collective": self.collective}
        if self.hosts:
            found |= {"n_gpus": len(self.hosts), "gpus_per_node": len(self.hosts) / len(set(self.hosts.values()))}
        return {name: value for name, value in found.items() if value}

    def lines(self, line: str) -> Iterator[dict[str, str | float]]:
        """One row per time of a line of figures."""
        cells = line.split()
        times = [i for i, name in enumerate(self.head) if name == "time" and i < len(cells)]
        for place, at in zip(PLACES, times, strict=False):
            if cells[at] != "N/A":
                yield {
                    "bytes": float(cells[0]),
                    "dtype": cells[self.head.index("type")],
                    "time_us": float(cells[at]),
                    "method": f"nccl-tests {place}",
                    "source": "nccl-tests",
                }


def is_nccl_tests(path: str | Path) -> bool:
    """True if a file that is no table looks like the output of nccl-tests."""
    file = Path(path)
    if file.name.lower().endswith((".parquet", ".gz")) or not is_file(file):
        return False
    with file.open("rb") as stream:
        start = stream.read(1 << 16).decode("utf-8", "replace")
    lines = [_TAG.sub("", line) for line in start.splitlines()]
    return any(re.match(r"\s*#.*\b(algbw|nThread)\b", line) for line in lines)


def read_nccl_tests(path: str | Path, given: Mapping[str, str | float]) -> Table:
    """The rows of one or more runs of nccl-tests.

    Args:
        path: the file with their output.
        given: columns ``gpu``, ``collective``, ``n_gpus``, ``gpus_per_node`` that override the output.

    Raises:
        InputFileError: it has no figures, or neither it nor ``given`` names collective, device and group.
    """
    where, run = str(path), _Run(collective=_of_name(Path(path).name))
    rows: list[dict[str, str | float]] = []
    for number, text in enumerate(read_text(path, MAX_BYTES, "an output of nccl-tests").splitlines(), 1):
        line = _TAG.sub("", text)
        if line.lstrip().startswith("#") or not _LINE.match(line):
            run.comment(line)
            continue
        facts = {**run.facts(), **given}
        missing = next((name for name in _ASKED if name not in facts), None)
        if missing is not None:
            what, option = _ASKED[missing]
            kinds = f", one of {', '.join(sorted(set(KINDS.values())))}" if missing == "collective" else ""
            raise InputFileError(where, f"does not say {what} before line {number}", hint=f"give {option}{kinds}")
        try:
            rows += [{**facts, **row} for row in run.lines(line)]
        except (ValueError, IndexError):
            raise InputFileError(where, f"line {number} is no line of nccl-tests: {line.strip()[:80]!r}") from None
    if not rows:
        raise InputFileError(where, "has no rows")
    return _table(rows)


def _of_name(name: str) -> str:
    """The collective in the name of a file, as in ``all_reduce_perf_16.txt``; "" without one."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((kind for kind in sorted(KINDS, key=len, reverse=True) if len(kind) > 5 and kind in key), "")


def _table(rows: list[dict[str, str | float]]) -> Table:
    names = sorted({name for row in rows for name in row})
    texts = {
        name: np.array([str(row.get(name, "")) for row in rows], dtype=object) for name in names if name in NCCL_TEXTS
    }
    numbers = {n: np.array([row.get(n, np.nan) for row in rows], np.float64) for n in names if n not in NCCL_TEXTS}
    return Table(texts | numbers)


TEXTS: Final = ("source", "gpu", "op", "collective", "interconnect", "dtype", "method", "kernel", "grid", "notes")
"""Columns that are text; all others are numbers."""
KERNEL_COLUMNS: Final = ("gpu", "op", "dtype", "latency_us")
COLLECTIVE_COLUMNS: Final = ("gpu", "collective", "n_gpus", "bytes", "time_us")


def read_collectives(path: str | Path, given: Mapping[str, str | float]) -> Table:
    """A table of collectives from a table, or from the output of nccl-tests; ``given`` fills missing columns.

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
