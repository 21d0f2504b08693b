"""Files of pairs: one row per ordered pair of devices and message size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steptime.errors import InputFileError, shorten
from steptime.lab.calibrate.mesh.cells import (
    BPS_RANGE,
    DIMENSIONS,
    IMPLIED,
    MISSING,
    SPELLING,
    Column,
    Rows,
    fail,
    fail_header,
    role_and_unit,
    si_value,
)  # fmt: skip
from steptime.lab.calibrate.mesh.links import Links, Quantity
from steptime.lab.calibrate.mesh.prepare import MAX_DEVICES
from steptime.num import Array
from steptime.units import UNITS

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
        fail(where, line, out["seconds"].title, "needs a column 'bytes' beside it", "an empty message is a latency_us")
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
        fail(where, line, column.title, f"{size:g} bytes in {seconds:g} s is no link; is a unit wrong?",
              "the title can name it: time_us, size_KiB")  # fmt: skip


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
        raise InputFileError(where, f"has {len(sizes)} message sizes between {count} devices: too many",
                             hint=f"give at most {min(MAX_SIZES, MAX_NUMBERS // count**2)} sizes")  # fmt: skip
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
    return Links(names=tuple(pairs.names), quantities=_well_covered(out), origin=where)


def _refuse_duplicates(pairs: _Pairs, key: Array, where: str) -> None:
    order = np.argsort(key, kind="stable")
    same = np.flatnonzero(key[order][1:] == key[order][:-1])
    if len(same):
        first, second = order[same[0]], order[same[0] + 1]
        names = list(pairs.names)
        fail(where, pairs.line[second], None, f"{shorten(names[pairs.source[second]], 40)!r} to "
              f"{shorten(names[pairs.target[second]], 40)!r} stands in line {pairs.line[first]} already",
              "give one row per pair and message size; take the median of repeats")  # fmt: skip


def _well_covered(quantities: list[Quantity]) -> tuple[Quantity, ...]:
    """Those measured on at least half as many pairs as the best."""
    known = [int(np.isfinite(quantity.values).sum()) for quantity in quantities]
    return tuple(q for q, n in zip(quantities, known, strict=True) if 2 * n >= max(known))
