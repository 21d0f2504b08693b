"""Cells of a measured file: roles and units of columns, numbers in SI, errors with file, line and column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from steptime.errors import InputFileError, UserError, shorten
from steptime.units import parse

#: What a measured link can be, in SI; beyond, the unit is wrong.
SECONDS_RANGE = (1e-9, 100.0)
BPS_RANGE = (1e3, 1e14)

#: Rows of a file with their line numbers.
Rows = Iterator[tuple[int, list[str]]]

_ROLES = {
    "source": "source", "src": "source", "from": "source",
    "target": "target", "dst": "target", "dest": "target", "destination": "target", "to": "target",
    "bytes": "bytes", "size": "bytes", "message": "bytes",
    "seconds": "seconds", "time": "seconds", "latency": "latency", "alpha": "latency",
    "bandwidth": "bandwidth", "bw": "bandwidth",
}  # fmt: skip
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
    """Raise the error for one place in a file."""
    place = f"line {line}" + (f", column {shorten(column, 40)!r}" if column is not None else "")
    raise InputFileError(where, f"{place}: {problem}", hint=hint)


def fail_header(where: str, line: int, titles: Sequence[str], problem: str) -> NoReturn:
    """Raise the error for a header that is not understood: which of its titles are unknown, and which there are."""
    unknown = [repr(shorten(title, 40)) for title in titles if role_and_unit(title)[0] is None][:MOST_NAMED]
    named = f"; {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown" if unknown else ""
    fail(where, line, None, f"{problem}{named}", f"rename columns; known are {known_titles()}")


def known_titles() -> str:
    """Titles by role, each with the others that mean it.

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
        fail(where, line, column.title, str(error).splitlines()[0], f"or put the unit in the title: "
              f"{SPELLING[column.role]}")  # fmt: skip
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
        fail(where, line, column, f"{shorten(text, 40)} is {value:g} {unit}, which no link has; is the unit wrong?",
              f"the title can name it: {hint}")  # fmt: skip
