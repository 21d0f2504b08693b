"""Measured links from CSV files: one row per pair, or a square matrix."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from steptime.errors import InputFileError
from steptime.lab.calibrate.mesh.cells import Rows, fail_header, role_and_unit
from steptime.lab.calibrate.mesh.links import Links
from steptime.lab.calibrate.mesh.read_matrix import read_matrix
from steptime.lab.calibrate.mesh.read_pairs import columns_of, read_pairs
from steptime.store.files import BROKEN, is_file, refuse_endless, unreadable
from steptime.store.tables import beginning, delimiter_of, first_line, opened, refuse_surplus, says_nothing
from steptime.units import UNITS

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
    _check_file(file)
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
                lacking = " and ".join(repr(role) for role in ("source", "target") if role not in roles)
                fail_header(str(path), line, first, f"the header lacks a column {lacking}")
            return read_matrix(line, first, rows, str(path), unit)
    except UnicodeDecodeError:
        raise InputFileError(str(path), "is not UTF-8 text") from None
    except BROKEN as error:
        raise unreadable(path, error) from None


def _heads_pairs(first: list[str], unit: str | None) -> bool:
    """Whether a first row is the header of pairs and not of a matrix: it names an end, or titles say what is measured.

    A matrix has a unit, and its devices may have any names.
    """
    roles = [role_and_unit(cell)[0] for cell in first]
    united = unit is not None or first[0] in UNITS["s"] or first[0] in UNITS["Bps"]
    return "source" in roles or "target" in roles or (not united and any(roles[1:]))


def _check_file(file: Path) -> None:
    refuse_endless(file)
    if is_file(file) and file.stat().st_size > MAX_BYTES:
        raise InputFileError(str(file), f"is larger than {MAX_BYTES >> 20} MiB", hint="measure fewer message sizes")


def _delimiter(stream: TextIO, where: str) -> str:
    """What separates the cells of a file, which is read from its start afterwards."""
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
    """The rows, none of which says more than the header has cells for."""
    for line, row in rows:
        refuse_surplus(row, cells, line, delimiter, where)
        yield line, row
