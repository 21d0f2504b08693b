"""Checks of single values of a parsed TOML file; every error names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from steptime.errors import FieldError, did_you_mean, shown


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str, at: str) -> None:
    """Refuses a table that has a key of another name.

    Raises:
        FieldError: names the key and the likely ones.
    """
    for name in table:
        if name not in known:
            raise FieldError(where, at + name, "is unknown", hint=did_you_mean(name, sorted(known)))


def text_in(table: Mapping[str, Any], name: str, where: str, at: str) -> str:
    """A text of a table.

    Raises:
        FieldError: it is missing, empty or no text.
    """
    value = table.get(name)
    if not isinstance(value, str) or not value:
        raise FieldError(where, at + name, "must be a text")
    return value


def one_of(table: Mapping[str, Any], name: str, allowed: Collection[str], where: str, at: str) -> str:
    """A text of a table that is one of some names.

    Raises:
        FieldError: it is none of them.
    """
    value = text_in(table, name, where, at)
    if value not in allowed:
        raise FieldError(where, at + name, f"{shown(value)} is none of {', '.join(allowed)}")
    return value


def table_in(table: Mapping[str, Any], name: str, where: str, at: str) -> Mapping[str, Any]:
    """A table in a table.

    Raises:
        FieldError: it is missing, empty or no table.
    """
    value = table.get(name)
    if not isinstance(value, dict) or not value:
        raise FieldError(where, at + name, "must be a table with entries")
    return value


def count_in(table: Mapping[str, Any], name: str, where: str, at: str) -> int:
    """A whole number of a table, 0 or more.

    Raises:
        FieldError: it is none.
    """
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FieldError(where, at + name, "must be a whole number, 0 or more")
    return value


def number(value: object, where: str, at: str) -> float:
    """A finite number.

    Raises:
        FieldError: it is none.
    """
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    if not math.isfinite(found):
        raise FieldError(where, at, "must be a finite number")
    return found


def pair(value: object, where: str, at: str) -> tuple[float, float]:
    """Two finite numbers.

    Raises:
        FieldError: they are not.
    """
    if not isinstance(value, list) or len(value) != 2:
        raise FieldError(where, at, "must be two numbers")
    return number(value[0], where, at), number(value[1], where, at)


def band_in(table: Mapping[str, Any], where: str, at: str) -> tuple[float, float]:
    """The ``band`` of a table: two positive numbers.

    Raises:
        FieldError: they are not, or the larger one comes first.
    """
    low, high = pair(table.get("band"), where, at + "band")
    if not 0 < low <= high:
        raise FieldError(where, at + "band", "must be two positive numbers, the smaller first")
    return low, high
