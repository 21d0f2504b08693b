"""Square matrices: one quantity between all devices, from row to column."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from steptime.errors import InputFileError, UserError, shorten
from steptime.lab.calibrate.mesh.cells import BPS_RANGE, MISSING, SECONDS_RANGE, Column, Rows, fail, si_value
from steptime.lab.calibrate.mesh.links import Links, Quantity
from steptime.lab.calibrate.mesh.prepare import MAX_DEVICES
from steptime.num import Array
from steptime.units import UNITS


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
    """Whether a cell holds a number, or says that nothing was measured."""
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
    """Numbers of one row in SI; the slow way through its cells only to say which one is wrong."""
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
