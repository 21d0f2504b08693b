"""The small languages of options: ``--fix tp=8``, ``--limit 'pp<=16'``, ``--placement tp=4,dp=2``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from steptime.api.request import digits
from steptime.errors import FieldError, UnknownNameError, shorten
from steptime.plan.keys import AXES, CHANCE, COUNTS, KEYS, RATIOS, SHOWN

_FIX: Final = re.compile(r"\s*([^=<>]*?)\s*=\s*([^=<>]*?)\s*")
_LIMIT: Final = re.compile(r"\s*([^=<>]*?)\s*(<=|>=|==|=|<|>)\s*([^=<>]*?)\s*")


def parse_fix(texts: Sequence[str]) -> dict[str, int | float | str]:
    """Degrees that the search may not vary.

    Raises:
        FieldError: a text that is not ``key=value``, a value out of range, or two values for one key.
        UnknownNameError: a key that is no degree.

    >>> parse_fix(["tp=8", "micro-batch=1", "mbs=1", "recompute=full"])
    {'tp': 8, 'micro_batch': 1, 'recompute': 'full'}
    """
    out: dict[str, int | float | str] = {}
    for text in texts:
        match = _FIX.fullmatch(text)
        if match is None or not match.group(2):
            raise FieldError(
                "", "--fix", f"{shorten(text)!r} is not of the form key=value", hint="for example --fix tp=8 --fix pp=4"
            )
        key = _key("--fix", match.group(1), KEYS)
        value = _value(key, match.group(2))
        if out.setdefault(key, value) != value:
            raise FieldError("", "--fix", f"{key} is given twice, as {out[key]} and as {value}")
    return out


def parse_limits(texts: Sequence[str]) -> list[str]:
    """Bounds on the degrees and on the chance of running out of memory, each as ``key<=value`` with that operator.

    Raises:
        FieldError: a text that is not a comparison, or a bound that is not a whole number (of the chance: a share).
        UnknownNameError: a key that is no degree.

    >>> parse_limits(["pp <= 16", "micro-batch<4", "P(oom) <= 10 %"])
    ['pp<=16', 'micro_batch<4', 'oom_probability<=0.1']
    """
    out = []
    for text in texts:
        match = _LIMIT.fullmatch(text)
        if match is None or not match.group(3):
            raise FieldError(
                "", "--limit", f"{shorten(text)!r} is not a comparison", hint="for example --limit 'pp<=16' (quoted)"
            )
        key = _key("--limit", match.group(1), (*COUNTS, CHANCE))
        operator = match.group(2).replace("==", "=")
        bound = _share(match.group(3)) if key == CHANCE else _whole("--limit", key, match.group(3))
        out.append(f"{key}{operator}{bound}")
    return out


def parse_placement(text: str) -> dict[str, int]:
    """Devices that each axis has inside the fast domain.

    Raises:
        FieldError: not a list of ``axis=devices``.
        UnknownNameError: an axis that does not exist.

    >>> parse_placement("tp=4,dp=2")
    {'tp': 4, 'dp': 2}
    """
    out: dict[str, int] = {}
    for part in text.split(","):
        match = _FIX.fullmatch(part)
        if match is None or not match.group(2):
            problem = f"{shorten(part)!r} is not of the form axis=devices"
            raise FieldError("", "--placement", problem, hint="for example --placement tp=4,dp=2")
        axis = _key("--placement", match.group(1), AXES)
        if axis in out:
            raise FieldError("", "--placement", f"{axis} is given twice")
        out[axis] = _whole("--placement", axis, match.group(2))
    return out


def _key(option: str, given: str, allowed: Collection[str]) -> str:
    spelt = given.replace("-", "_").lower()
    name = SHOWN.get(spelt, spelt)
    if name not in allowed:
        raise UnknownNameError("axis" if option == "--placement" else "degree", given, allowed, where=option)
    return name


def _value(key: str, text: str) -> int | float | str:
    if key in RATIOS:
        try:
            return float(text)
        except ValueError:
            raise FieldError("", "--fix", f"{key} is {shorten(text)!r}; it must be a number") from None
    return _whole("--fix", key, text) if key in COUNTS else text


def _share(text: str) -> float | str:
    """A number; of percent as a share. What is no number stays: the request says what it must be."""
    number, percent, _ = text.partition("%")
    try:
        return float(f"{float(number) / 100:.15g}") if percent else float(number)
    except ValueError:
        return text


def _whole(option: str, key: str, text: str) -> int:
    low, high = COUNTS[key]
    value = digits(text)
    if not low <= value <= high:
        raise FieldError("", option, f"{key} is {shorten(text)!r}; it must be a whole number from {low} to {high}")
    return value
