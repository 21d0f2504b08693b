"""Shared parts of files of prices and failures: source, date, rates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import UserError, shown
from steptime.schema import Check, Row, letters
from steptime.store.files import parse_toml, read_text

MOST_BYTES: Final = 1 << 20
_RATE: Final = re.compile(r"\s*(\d[\d_]*\.?\d*|\.\d+)\s*([A-Z]{3}|\$|€|kg|g)\s*(?:/\s*(h|hour|kWh))?\s*")
_CODES: Final = {"$": "USD", "€": "EUR"}


@cache
def catalogue(name: str) -> Mapping[str, Any]:
    """A TOML file of this package."""
    return parse_toml((Path(__file__).parent / name).read_text(encoding="utf-8"), name)


def user_table(path: str, what: str) -> dict[str, Any]:
    """A user's TOML file.

    Raises:
        UserError: it cannot be read, or is no TOML.
    """
    return parse_toml(read_text(path, MOST_BYTES, what), path)


def day(given: object) -> str:
    """Check of a date, a TOML date or a text."""
    text = given.isoformat() if isinstance(given, date) else given
    try:
        return date.fromisoformat(text).isoformat()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(f"{shown(given)} is no date", hint='write date = "2026-01-15"') from None


ORIGIN: Final[Mapping[str, Row]] = {"source": letters(4096), "date": day}
DATED: Final = 'numbers that age need source and date: source = "quote of 2026-01-15", date = "2026-01-15"'


def rate(per: str, unit: str | None = None) -> Check:
    """Check of a number per hour or kWh with its currency (or mass), such as ``"2.50 USD/h"``.

    Args:
        per: ``h`` or ``kWh``.
        unit: ``kg``, or None for any currency.

    >>> rate("h")("2.50 USD/h"), rate("h")("$3 / h"), rate("kWh", "kg")("400 g/kWh")
    ((2.5, 'USD'), (3.0, 'USD'), (0.4, 'kg'))
    """
    hint = f'write for example "0.4 kg/{per}"' if unit else f'write for example "2.50 USD/{per}"'

    def check(given: object) -> tuple[float, str]:
        text = given if isinstance(given, str) and len(given) < 60 else ""
        match = _RATE.fullmatch(re.sub(r"^\s*([$€])\s*([\d._]+)", r"\2 \1", text))
        if match is None:
            raise UserError(f"{shown(given)} has no unit", hint=hint)
        value, sign = float(match[1].replace("_", "")), match[2]
        value, sign = (value / 1e3, "kg") if sign == "g" else (value, _CODES.get(sign, sign))
        if {"hour": "h"}.get(match[3], match[3]) != per or (sign == "kg") != (unit == "kg"):
            raise UserError(f"{shown(given)} is in another unit", hint=hint)
        return value, sign

    return check
