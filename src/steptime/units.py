"""Quantities with units at the border: parse ``"900 GB/s"`` to SI, format SI for people.

Inside steptime every number is in SI base units and says so in its name (``_s``, ``_bytes``,
``_Bps``, ``_flops``, ``_flops_per_s``, ``_W``, ``_Hz``). GB is 10^9 bytes and GiB 2^30 bytes.
A bare number in a user's file is refused wherever the unit could be mistaken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from steptime.errors import UserError, did_you_mean, shorten

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _scaled(unit: str, prefixes: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    return {prefix + unit: scale * factor for prefix, scale in prefixes.items()}


_BYTES: Final = _scaled("B", _DECIMAL) | _scaled("B", _BINARY)
_BITS: Final = _scaled("b", _DECIMAL, 1 / 8) | _scaled("bit", _DECIMAL, 1 / 8)
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_SECONDS_LONG: Final = {"day": 86400.0, "days": 86400.0, "d": 86400.0}

#: dimension -> unit -> factor to SI.
UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "bytes": _BYTES,
    "Bps": {f"{u}/s": f for u, f in (_BYTES | _BITS).items()}
    | {f"{u}ps": f for u, f in (_scaled("b", _DECIMAL, 1 / 8) | _scaled("B", _DECIMAL)).items()},
    "flops": _scaled("FLOP", _DECIMAL) | _scaled("flop", _DECIMAL),
    "flops_per_s": _scaled("FLOP/s", _DECIMAL)
    | _scaled("FLOPS", _DECIMAL)
    | _scaled("flop/s", _DECIMAL)
    | _scaled("OP/s", _DECIMAL)
    | _scaled("OPS", _DECIMAL),
    "s": _SECONDS | _SECONDS_LONG,
    "Hz": _scaled("Hz", _DECIMAL),
    "W": _scaled("W", _DECIMAL),
}

_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")


def parse(text: str, dimension: str) -> float:
    """Value in SI of a text such as ``"900 GB/s"``.

    Args:
        text: a number and a unit, separated by optional white space.
        dimension: key of :data:`UNITS` (``"bytes"``, ``"Bps"``, ``"flops_per_s"``, ``"s"``, ...).

    Raises:
        UserError: no number, no unit, a unit of another dimension, or a value that is not finite.

    >>> parse("900 GB/s", "Bps")
    900000000000.0
    >>> parse("80 GiB", "bytes")
    85899345920.0
    >>> parse("400 Gb/s", "Bps")
    50000000000.0
    >>> parse("80", "bytes")
    Traceback (most recent call last):
    steptime.errors.UserError: '80' has no unit
      write for example '80 GB'
    """
    units = UNITS[dimension]
    match = _QUANTITY.fullmatch(text) if len(text) <= 200 else None
    if match is None:
        raise UserError(f"{shorten(text)!r} is not a number with a unit", hint=_example(dimension, "80"))
    number, unit = match.group(1), match.group(2)
    if unit is None:
        raise UserError(f"{text!r} has no unit", hint=_example(dimension, number))
    if unit.startswith(","):
        raise UserError(f"{text!r} has a comma in its number", hint="write it without, for example '5200' or '5.2'")
    if unit not in units:
        known = next((d for d, table in UNITS.items() if unit in table), None)
        problem = f"{unit!r} is a unit of {known}, not of {dimension}" if known else f"unknown unit {unit!r}"
        raise UserError(f"{text!r}: {problem}", hint=did_you_mean(unit, units))
    try:
        value = float(Decimal(number.replace("_", "")) * Decimal(repr(units[unit])))
    except ArithmeticError:
        value = math.inf
    if not math.isfinite(value):
        raise UserError(f"{text!r} is not finite")
    return value


_EXAMPLES: Final = {
    "bytes": "GB",
    "Bps": "GB/s",
    "flops": "TFLOP",
    "flops_per_s": "TFLOP/s",
    "s": "us",
    "Hz": "MHz",
    "W": "W",
}


_BASE: Final = {"bytes": "B", "Bps": "B/s", "flops": "FLOP", "flops_per_s": "FLOP/s", "s": "s", "Hz": "Hz", "W": "W"}


def _example(dimension: str, number: str) -> str:
    """The number with the usual unit, or with the SI unit if its size suggests that it is in SI already.

    >>> _example("flops_per_s", "900"), _example("flops_per_s", "900e12"), _example("s", "5e-6")
    ("write for example '900 TFLOP/s'", "write for example '900e12 FLOP/s'", "write for example '5e-6 s'")
    """
    size = abs(float(number.replace("_", "")))
    plain = size < 1e-2 if dimension == "s" else size >= 1e6
    return f"write for example '{number} {(_BASE if plain and size else _EXAMPLES)[dimension]}'"


def format_si(value: float, unit: str, digits: int = 3) -> str:
    """Value with a decimal prefix.

    >>> format_si(9.0e11, "B/s")
    '900 GB/s'
    >>> format_si(0.0, "B/s")
    '0 B/s'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    prefixes = [("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18)]
    symbol, scale = max((p for p in prefixes if abs(value) >= p[1]), key=lambda p: p[1], default=prefixes[0])
    return f"{_significant(value / scale, digits)} {symbol}{unit}"


def format_bytes(value: float, digits: int = 3) -> str:
    """Value in binary units.

    >>> format_bytes(80 * 2**30)
    '80 GiB'
    """
    for symbol, scale in (("PiB", 2.0**50), ("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {symbol}"
    return f"{_significant(value, digits)} B"


def format_seconds(value: float, digits: int = 4) -> str:
    """Value in the unit a person would use; below a nanosecond only that it is.

    >>> format_seconds(2.0e-5), format_seconds(7.9e-11), format_seconds(0.0)
    ('20 us', '<1 ns', '0 s')
    >>> format_seconds(200000.0)
    '2.315 days'
    """
    if not math.isfinite(value):
        return f"{value:g} s"
    for symbol, scale in (("days", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {symbol}"
    return "<1 ns" if value > 0 else f"{value:g} s"


def _significant(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text
