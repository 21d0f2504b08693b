"""Tables of a user's TOML file: each key with its unit and range, unknown keys refused, source and date required."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError, UserError, shown
from steptime.schema import Field, value_of
from steptime.store.files import parse_toml, read_text

MOST_BYTES: Final = 1 << 20
_RATE: Final = re.compile(r"\s*(\d[\d_]*\.?\d*|\.\d+)\s*([A-Z]{3}|\$|€|kg|g)\s*(?:/\s*(h|hour|kWh))?\s*")
_CODES: Final = {"$": "USD", "€": "EUR"}


@cache
def catalogue(name: str) -> Mapping[str, Any]:
    """A file of this room."""
    return parse_toml((Path(__file__).parent / name).read_text(encoding="utf-8"), name)


def user_table(path: str, what: str) -> dict[str, Any]:
    """A user's TOML file.

    Raises:
        UserError: it cannot be read, or is no TOML.
    """
    return parse_toml(read_text(path, MOST_BYTES, what), path)


def origin(where: str, table: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Source and date of a table, or those of the one around it.

    Raises:
        FieldError: one is missing or no text, or the date is none.
    """
    out = {key: table.get(key, (given or {}).get(key)) for key in ("source", "date")}
    for key, example in (("source", "quote of 2026-01-15"), ("date", "2026-01-15")):
        value = out[key]
        out[key] = value = value.isoformat() if isinstance(value, date) else value
        if not isinstance(value, str) or not value:
            raise FieldError(where, key, "missing; numbers that age need it", hint=f'write {key} = "{example}"')
    try:
        date.fromisoformat(out["date"])
    except ValueError:
        raise FieldError(where, "date", f"{shown(out['date'])} is no date", hint='write date = "2026-01-15"') from None
    return out


def numbers(where: str, table: Mapping[str, Any], fields: Mapping[str, Field], prefix: str = "") -> dict[str, float]:
    """Numbers of a table in SI by the names of their fields.

    Raises:
        UnknownNameError: a key is unknown.
        FieldError: a value has no unit, another one, or is out of range.
    """
    out = {}
    for key, given in table.items():
        if key not in fields:
            raise UnknownNameError(f"key of {where}", prefix + str(key), [prefix + name for name in fields])
        try:
            out[fields[key].record] = value_of(given, fields[key])
        except UserError as error:
            problem, _, hint = str(error).partition("\n  ")
            raise FieldError(where, prefix + key, problem, hint=hint or None) from None
    return out


def subtable(where: str, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a document, empty where it has none.

    Raises:
        FieldError: it is no table.
    """
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise FieldError(where, name, f"{shown(table)} is not a table", hint=f"write [{name}]")
    return table


def rate(where: str, field: str, given: Any, per: str, unit: str | None = None) -> tuple[float, str]:
    """A number per hour or kWh with its currency (or mass), as ``"2.50 USD/h"``.

    Args:
        where: file.
        field: key in it.
        given: what it says.
        per: ``h`` or ``kWh``.
        unit: ``kg``, or None for any currency.

    Raises:
        FieldError: it has no unit, or another one.

    >>> rate("f", "x", "2.50 USD/h", "h"), rate("f", "x", "$3 / h", "h"), rate("f", "x", "400 g/kWh", "kWh", "kg")
    ((2.5, 'USD'), (3.0, 'USD'), (0.4, 'kg'))
    """
    example = f'"0.4 kg/{per}"' if unit else f'"2.50 USD/{per}"'
    text = given if isinstance(given, str) and len(given) < 60 else ""
    text = re.sub(r"^\s*([$€])\s*([\d._]+)", r"\2 \1", text)
    match = _RATE.fullmatch(text)
    if match is None:
        raise FieldError(where, field, f"{shown(given)} has no unit", hint=f"write for example {example}")
    value, sign = float(match[1].replace("_", "")), match[2]
    value, sign = (value / 1e3, "kg") if sign == "g" else (value, _CODES.get(sign, sign))
    if {"hour": "h"}.get(match[3], match[3]) != per or (sign == "kg") != (unit == "kg"):
        raise FieldError(where, field, f"{shown(given)} is in another unit", hint=f"write for example {example}")
    return value, sign
