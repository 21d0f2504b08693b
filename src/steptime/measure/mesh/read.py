"""Measured links from CSV files: one row per pair, or a square matrix."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from steptime.errors import InputFileError, UserError, shorten
from steptime.measure.mesh.links import MAX_DEVICES, Links, Quantity
from steptime.num import Array
from steptime.store.files import BROKEN, is_file, refuse_endless, unreadable
from steptime.store.tables import beginning, delimiter_of, first_line, opened, refuse_surplus, says_nothing
from steptime.units import UNITS, parse

#: Range of a measured link in SI; outside it the unit is wrong.
SECONDS_RANGE = (1e-9, 100.0)
BPS_RANGE = (1e3, 1e14)

#: Rows of a file with their line numbers.
Rows = Iterator[tuple[int, list[str]]]

#: Title of a column of a file of links -> its role.
_ROLES = {
    **dict.fromkeys(("source", "src", "from"), "source"),
    **dict.fromkeys(("target", "dst", "dest", "destination", "to"), "target"),
    **dict.fromkeys(("bytes", "size", "message"), "bytes"),
    **dict.fromkeys(("seconds", "time"), "seconds"),
    **dict.fromkeys(("latency", "alpha"), "latency"),
    **dict.fromkeys(("bandwidth", "bw"), "bandwidth"),
}
DIMENSIONS = {"bytes": "bytes", "seconds": "s", "latency": "s", "bandwidth": "Bps"}
IMPLIED = {"bytes": "B", "seconds": "s"}
SPELLING = {"bytes": "size_KiB", "seconds": "time_us", "latency": "latency_us", "bandwidth": "bandwidth_GB/s"}
#: Unknown titles that an error names.
MOST_NAMED = 8
MISSING = frozenset({"", "-"})


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a file of pairs."""

    title: str
    role: str
    place: int
    factor: float | None
    """To SI; None if every cell has to bring its unit."""


def fail(where: str, line: int, column: str | None, problem: str, hint: str | None = None) -> NoReturn:
    """Raises the error for one place in a file."""
    place = f"line {line}" + (f", column {shorten(column, 40)!r}" if column is not None else "")
    raise InputFileError(where, f"{place}: {problem}", hint=hint)


def fail_header(where: str, line: int, titles: Sequence[str], problem: str) -> NoReturn:
    """Raises the error for a header that is not understood; it names unknown and known titles."""
    unknown = [repr(shorten(title, 40)) for title in titles if role_and_unit(title)[0] is None][:MOST_NAMED]
    named = f"; {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown" if unknown else ""
    fail(where, line, None, f"{problem}{named}", f"rename columns; known are {known_titles()}")


def known_titles() -> str:
    """Titles of columns by role, synonyms joined by ``or``.

    >>> known_titles().split("; ")[-2:]
    ['latency or alpha', 'bandwidth or bw (with a unit: bandwidth_GB/s, time_us, size_KiB)']
    """
    roles: dict[str, list[str]] = {}
    for title, role in _ROLES.items():
        roles.setdefault(role, []).append(title)
    return "; ".join(" or ".join(titles) for titles in roles.values()) + (
        f" (with a unit: {SPELLING['bandwidth']}, {SPELLING['seconds']}, {SPELLING['bytes']})"
    )


def role_and_unit(title: str) -> tuple[str | None, str]:
    """Role of a column and the unit in its title.

    >>> role_and_unit("latency_us"), role_and_unit("Bandwidth (GB/s)"), role_and_unit("dst"), role_and_unit("seconds")
    (('latency', 'us'), ('bandwidth', 'GB/s'), ('target', ''), ('seconds', ''))
    """
    name, _, rest = re.sub(r"[\s_(\[]+", "_", title.strip(), count=1).partition("_")
    unit = rest.strip(" )]_")
    return _ROLES.get(name.lower()), "B" if unit in ("bytes", "byte") else unit


def si_value(text: str, column: Column, line: int, where: str) -> float:
    """A cell in SI."""
    try:
        value = float(text) * column.factor if column.factor is not None else parse(text, DIMENSIONS[column.role])
    except UserError as error:
        fail(
            where,
            line,
            column.title,
            str(error).splitlines()[0],
            f"or put the unit in the title: {SPELLING[column.role]}",
        )
    except ValueError:
        try:
            value = parse(text, DIMENSIONS[column.role])
        except UserError:
            fail(where, line, column.title, f"{shorten(text, 40)!r} is not a number")
    _check_value(value, column.role, text, column.title, line, where)
    return value


def _check_value(value: float, role: str, text: str, column: str, line: int, where: str) -> None:
    if not np.isfinite(value):
        fail(where, line, column, f"{shorten(text, 40)!r} is not a finite number", "leave out what was not measured")
    if role == "bytes":
        if value < 0 or value != int(value):
            fail(where, line, column, f"{shorten(text, 40)} is not a whole number of bytes")
        return
    if value <= 0:
        fail(where, line, column, f"{shorten(text, 40)} is not positive", "leave out what was not measured")
    low, high = BPS_RANGE if role == "bandwidth" else SECONDS_RANGE
    if not low <= value <= high:
        unit, hint = ("B/s", "bandwidth_GB/s") if role == "bandwidth" else ("s", "latency_us or time_us")
        fail(
            where,
            line,
            column,
            f"{shorten(text, 40)} is {value:g} {unit}, which no link has; is the unit wrong?",
            f"the title can name it: {hint}",
        )


def read_matrix(line: int, first: list[str], rows: Rows, where: str, unit: str | None) -> Links:
    """Links from a square matrix; its diagonal is ignored.

    Args:
        line: number of the first row.
        first: the first row: names of devices, or numbers.
        rows: the others.
        where: file, for messages.
        unit: of all numbers; None: it stands in the first cell.

    Raises:
        InputFileError: no unit, a bad cell, not square, too large, or names that do not match.
    """
    second = next(rows, None)
    if second is None:
        raise InputFileError(where, f"line {line}: one row is no matrix, and no header of a file of pairs")
    names, corner = _header(first, second[1])
    rest = chain([second], rows) if names else chain([(line, first), second], rows)
    kind, factor, title = _unit(unit, corner, where, line)
    column = Column(title, kind, 0, factor)
    width = len(names) or len(first) - (not _is_value(first[0]))
    if width > MAX_DEVICES:
        fail(where, line, None, f"there are {width} columns; more than {MAX_DEVICES} devices are too many")
    found: list[Array] = []
    row_names: list[str] = []
    named = len(second[1]) == width + 1
    for number, row in rest:
        if len(found) == width:
            fail(where, number, None, f"is one row too many: the matrix has {width} columns and is not square")
        if len(row) != width + named:
            fail(where, number, None, f"has {len(row) - named} numbers; the matrix has {width} columns")
        if named:
            row_names.append(row[0])
            row = row[1:]
        found.append(_row(row, len(found), column, names, number, where))
    if len(found) != width or width < 2:
        problem = f"is no square matrix of two or more devices: it has {len(found)} rows and {width} columns"
        raise InputFileError(where, problem)
    labels = names or row_names or [str(i) for i in range(width)]
    _check_names(labels, row_names, where)
    return Links(names=tuple(labels), quantities=(Quantity(kind=kind, values=np.array(found)),), origin=where)


def _header(first: list[str], second: list[str]) -> tuple[list[str], str]:
    """Names of the columns and the cell before them; none if the first row holds numbers."""
    corner, names = first[0], first[1:]
    known = corner in UNITS["s"] or corner in UNITS["Bps"]
    numbered = names == [str(i) for i in range(len(names))] and (corner == "" or second[0] == "0")
    if known or numbered:
        return names, corner
    if all(_is_value(cell) for cell in names):
        return [], ""
    if len(second) == len(first) and _is_value(second[0]) and not _is_value(corner):
        return first, ""
    return names, corner


def _is_value(cell: str) -> bool:
    """True if a cell holds a number, or says that nothing was measured."""
    try:
        float(cell)
    except ValueError:
        return cell in MISSING
    return True


def _unit(unit: str | None, corner: str, where: str, line: int) -> tuple[str, float, str]:
    """Kind of the quantity, factor to SI, and the unit."""
    text = unit if unit is not None else corner
    for kind, dimension in (("latency", "s"), ("bandwidth", "Bps")):
        if text in UNITS[dimension]:
            return kind, UNITS[dimension][text], text
    problem = f"{shorten(text, 20)!r} is no unit of time or of bytes per second" if text else "the matrix has no unit"
    if unit is not None:
        raise UserError(f"--unit: {problem}", hint="give for example --unit us or --unit GB/s")
    return fail(
        where,
        line,
        "1",
        problem,
        "write for example us or GB/s in the top left cell, or give --unit us; a file of pairs has a header "
        "with source and target",
    )


def _row(cells: list[str], row: int, column: Column, names: Sequence[str], line: int, where: str) -> Array:
    """Numbers of one row in SI; cells are read one by one only to report which is wrong."""
    out = np.full(len(cells), np.nan)
    known = np.array([cell not in MISSING for cell in cells])
    known[row] = False
    low, high = BPS_RANGE if column.role == "bandwidth" else SECONDS_RANGE
    try:
        out[known] = [float(cell) for cell, wanted in zip(cells, known, strict=True) if wanted]
        out *= column.factor
        if bool(((out[known] >= low) & (out[known] <= high)).all()):
            return out
    except ValueError:
        pass
    for place in np.flatnonzero(known).tolist():
        title = names[place] if names else str(place + 1)
        out[place] = si_value(cells[place], Column(title, column.role, place, column.factor), line, where)
    return out


def _check_names(names: Sequence[str], row_names: Sequence[str], where: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InputFileError(where, f"names the device {shorten(twice, 40)!r} twice")
    if not row_names or list(row_names) == list(names):
        return
    row = next((i for i, (a, b) in enumerate(zip(row_names, names, strict=False)) if a != b), len(row_names))
    given = row_names[row] if row < len(row_names) else ""
    raise InputFileError(
        where,
        f"row {row + 1} is called {shorten(given, 40)!r}, column {row + 1} {shorten(names[row], 40)!r}",
        hint="rows and columns are the same devices in the same order",
    )


#: Longest name of a device.
MAX_NAME = 200
#: Numbers that all matrices of one file may hold together.
MAX_NUMBERS = 2**28
#: Message sizes of one file.
MAX_SIZES = 64
#: Bytes up to which a message is small, and the seconds that it cannot take.
SMALL_MESSAGE = (4096.0, 1.0)


@dataclass(slots=True)
class _Pairs:
    """Rows as they are read."""

    names: dict[str, int] = field(default_factory=dict)
    line: array[int] = field(default_factory=lambda: array("q"))
    source: array[int] = field(default_factory=lambda: array("i"))
    target: array[int] = field(default_factory=lambda: array("i"))
    size: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, array[float]] = field(default_factory=dict)


def columns_of(titles: Sequence[str], line: int, where: str) -> list[Column]:
    """Columns of a file of pairs by the titles in its header; others are ignored.

    Raises:
        InputFileError: a column twice, an unknown unit, or nothing measured.
    """
    out: dict[str, Column] = {}
    for place, title in enumerate(titles):
        role, unit = role_and_unit(title)
        if role is None:
            continue
        if role in out:
            fail(where, line, title, f"is a second column for {role}; the first is {out[role].title!r}")
        unit = unit or IMPLIED.get(role, "")
        if title.strip().lower() in ("time", "size", "message"):
            unit = ""
        factor = None
        if unit and role in DIMENSIONS:
            known = UNITS[DIMENSIONS[role]]
            if unit not in known:
                fail(where, line, title, f"{unit!r} is no unit of {role}", f"write for example {SPELLING[role]}")
            factor = known[unit]
        out[role] = Column(title, role, place, factor)
    given = out.keys()
    if not given & {"seconds", "latency", "bandwidth"}:
        fail_header(where, line, titles, "the header has no column with a time, latency or bandwidth")
    if "seconds" in given and "bytes" not in given:
        fail(where, line, out["seconds"].title, "needs a column 'bytes' too", "an empty message is a latency_us")
    return list(out.values())


def read_pairs(columns: Sequence[Column], rows: Rows, where: str) -> Links:
    """Links from the rows below the header; pairs of a device with itself are ignored.

    Raises:
        InputFileError: a bad cell, a pair given twice, too many devices or sizes.
    """
    by_role = {column.role: column for column in columns}
    measured = [column for column in columns if column.role in ("seconds", "latency", "bandwidth")]
    if "seconds" in by_role:
        measured = [by_role["seconds"]]
    width = max(column.place for column in columns)
    size = by_role.get("bytes")
    pairs = _Pairs(values={column.role: array("d") for column in measured})
    for line, row in rows:
        if len(row) <= width:
            fail(where, line, None, f"has {len(row)} columns; the header has more")
        ends = [_device(pairs, row[by_role[role].place], role, line, where) for role in ("source", "target")]
        cells = [row[column.place] for column in measured]
        if ends[0] == ends[1] or all(cell in MISSING for cell in cells):
            continue
        pairs.line.append(line)
        pairs.source.append(ends[0])
        pairs.target.append(ends[1])
        pairs.size.append(si_value(row[size.place], size, line, where) if size is not None else 0.0)
        for column, cell in zip(measured, cells, strict=True):
            value = si_value(cell, column, line, where) if cell not in MISSING else float("nan")
            pairs.values[column.role].append(value)
            if column.role == "seconds":
                _check_pace(pairs.size[-1], value, column, line, where)
    return _links(pairs, size is not None, where)


def _check_pace(size: float, seconds: float, column: Column, line: int, where: str) -> None:
    small, slow = SMALL_MESSAGE
    if size / seconds > BPS_RANGE[1] or (size <= small and seconds > slow):
        fail(
            where,
            line,
            column.title,
            f"{size:g} bytes in {seconds:g} s is no link; is a unit wrong?",
            "the title can name it: time_us, size_KiB",
        )


def _device(pairs: _Pairs, name: str, role: str, line: int, where: str) -> int:
    if not name or len(name) > MAX_NAME:
        fail(where, line, role, f"{shorten(name, 40)!r} is no name of a device")
    number = pairs.names.setdefault(name, len(pairs.names))
    if number >= MAX_DEVICES:
        fail(where, line, role, f"there are more than {MAX_DEVICES} devices")
    return number


def _links(pairs: _Pairs, sized: bool, where: str) -> Links:
    source, target, size = np.array(pairs.source), np.array(pairs.target), np.array(pairs.size)
    count = len(pairs.names)
    if count < 2 or not len(source):
        raise InputFileError(where, "has no measured link between two devices", hint="a mesh needs at least two")
    sizes, which = np.unique(size, return_inverse=True)
    kinds = ["seconds"] if sized else list(pairs.values)
    if len(sizes) > MAX_SIZES or len(sizes) * len(kinds) * count**2 > MAX_NUMBERS:
        raise InputFileError(
            where,
            f"has {len(sizes)} message sizes between {count} devices: too many",
            hint=f"give at most {min(MAX_SIZES, MAX_NUMBERS // count**2)} sizes",
        )
    _refuse_duplicates(pairs, (which * count + source) * count + target, where)
    out = []
    for number, bytes_ in enumerate(sizes):
        rows = which == number
        for kind in kinds:
            values = np.array(pairs.values[kind if kind in pairs.values else "bandwidth"])[rows]
            if sized and kind not in pairs.values:
                values = bytes_ / values
            matrix = np.full((count, count), np.nan)
            matrix[source[rows], target[rows]] = values
            out.append(Quantity(kind=kind, size_bytes=float(bytes_) if sized else None, values=matrix))
    known = [int(np.isfinite(quantity.values).sum()) for quantity in out]
    # quantities measured on less than half as many pairs as the best are dropped
    kept = tuple(q for q, n in zip(out, known, strict=True) if 2 * n >= max(known))
    return Links(names=tuple(pairs.names), quantities=kept, origin=where)


def _refuse_duplicates(pairs: _Pairs, key: Array, where: str) -> None:
    order = np.argsort(key, kind="stable")
    same = np.flatnonzero(key[order][1:] == key[order][:-1])
    if len(same):
        first, second = order[same[0]], order[same[0] + 1]
        names = list(pairs.names)
        fail(
            where,
            pairs.line[second],
            None,
            f"{shorten(names[pairs.source[second]], 40)!r} to "
            f"{shorten(names[pairs.target[second]], 40)!r} stands in line {pairs.line[first]} already",
            "give one row per pair and message size; take the median of repeats",
        )


#: Larger files are refused unread.
MAX_BYTES = 2**30


def read_links(path: str | Path, unit: str | None = None) -> Links:
    """Reads measured links.

    A file of pairs has a header with ``source`` and ``target`` and either ``bytes`` and ``seconds`` (or ``bytes`` and
    ``bandwidth_GB/s``), or ``latency_us``, ``bandwidth_GB/s`` or both. A column without unit in its title needs one in
    each cell (``3.1 us``). Any other file is a square matrix from row to column, with or without names of devices, in
    one unit, which stands in its top left cell or is given. An empty cell or ``-`` was not measured.

    Args:
        path: CSV or CSV.gz, separated by comma, semicolon or tab.
        unit: of a square matrix: of time (latencies) or of bytes per second (bandwidths).

    Raises:
        InputFileError: it cannot be read, or something in it is wrong; the message names file, line and column.
    """
    file = Path(path)
    refuse_endless(file)
    if is_file(file) and file.stat().st_size > MAX_BYTES:
        raise InputFileError(str(file), f"is larger than {MAX_BYTES >> 20} MiB", hint="measure fewer message sizes")
    try:
        with opened(file) as stream:
            delimiter = _delimiter(stream, str(path))
            rows = _rows(stream, delimiter, str(path))
            line, first = next(rows, (0, []))
            if not first:
                raise InputFileError(str(path), "is empty")
            roles = {role_and_unit(cell)[0] for cell in first}
            if {"source", "target"} <= roles:
                below = _no_wider(rows, len(first), delimiter, str(path))
                return read_pairs(columns_of(first, line, str(path)), below, str(path))
            if _heads_pairs(first, unit):
                missing = " and ".join(repr(role) for role in ("source", "target") if role not in roles)
                fail_header(str(path), line, first, f"the header lacks a column {missing}")
            return read_matrix(line, first, rows, str(path), unit)
    except UnicodeDecodeError:
        raise InputFileError(str(path), "is not UTF-8 text") from None
    except BROKEN as error:
        raise unreadable(path, error) from None


def _heads_pairs(first: list[str], unit: str | None) -> bool:
    """True if a first row is the header of pairs and not of a matrix: it names an end, or titles name a measurement.

    A matrix has a unit, and its devices may have any names.
    """
    roles = [role_and_unit(cell)[0] for cell in first]
    united = unit is not None or first[0] in UNITS["s"] or first[0] in UNITS["Bps"]
    return "source" in roles or "target" in roles or (not united and any(roles[1:]))


def _delimiter(stream: TextIO, where: str) -> str:
    """Separator of the cells of a file; the stream is set back to its start."""
    before, first = first_line(beginning(stream))
    if "\0" in first:
        raise InputFileError(where, f"is not text: line {before + 1} has a zero byte")
    stream.seek(0)
    return delimiter_of(first)


def _rows(stream: TextIO, delimiter: str, where: str) -> Rows:
    """Rows with their line numbers; blank lines and comments are left out."""
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if not says_nothing(row):
                yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise InputFileError(where, f"line {reader.line_num}: {error}") from None


def _no_wider(rows: Rows, cells: int, delimiter: str, where: str) -> Rows:
    """The rows; a row with more cells than the header is refused."""
    for line, row in rows:
        refuse_surplus(row, cells, line, delimiter, where)
        yield line, row
