"""Checks of single values that a user gives: whole numbers, numbers, texts, names, switches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

from steptime.errors import FieldError, UnknownNameError, shown

NameOrPath: TypeAlias = "str | os.PathLike[str]"
"""A name of a catalogue, or a path as text or as ``pathlib.Path``."""
MAX_COUNT = 10**9
"""Largest dim, degree, depth or count that makes sense."""
SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False}


def digits(text: str) -> int:
    """The whole number that up to 12 digits say; -1 for any other text.

    >>> digits("8"), digits("+8"), digits("1" * 13)
    (8, -1, -1)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1


def whole(field: str, value: Any, low: int, high: int) -> int:
    """A whole number within bounds.

    Raises:
        FieldError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise FieldError("", field, f"{shown(value)} must be a whole number from {low} to {high}")
    return int(value)


def number(field: str, value: Any, low: float, high: float, meaning: str) -> float:
    """A number within bounds; ``meaning`` says what it is in the error.

    Raises:
        FieldError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not _fits(value):
        raise FieldError("", field, f"{shown(value)} is not a number", hint=meaning)
    if not low <= float(value) <= high:
        near = low if float(value) < low else high
        problem = f"{float(value):g} must lie from {low:g} to {high:g} ({meaning}); the nearest is {near:g}"
        raise FieldError("", field, problem)
    return float(value)


def _fits(value: Any) -> bool:
    """Whether a number is finite as a float; a whole number may be too large for one."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def text(field: str, value: Any) -> str:
    """A text.

    Raises:
        FieldError: it is none.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{shown(value)} is not a text")
    return value


def name_or_path(field: str, value: Any, otherwise: str = "") -> str:
    """A name, or a path as text or as ``pathlib.Path``; ``otherwise`` says what to do with anything else.

    Raises:
        FieldError: it is neither.

    >>> from pathlib import PurePosixPath
    >>> name_or_path("cluster", "dgx-h100"), name_or_path("cluster", PurePosixPath("ours/cluster.toml"))
    ('dgx-h100', 'ours/cluster.toml')
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise FieldError("", field, f"{shown(value)} is neither a name nor a path", hint=otherwise or None)
    return given


def choice(field: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some names.

    Raises:
        FieldError: it is no text.
        UnknownNameError: it is none of them.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{shown(value)} is not one of {', '.join(allowed)}")
    if value not in allowed:
        raise UnknownNameError(field, value, allowed)
    return value


def switch(field: str, value: Any) -> bool:
    """A truth value: a boolean, 0 or 1, ``on`` or ``off``.

    Raises:
        FieldError: it is none.

    >>> switch("sp", "off"), switch("sp", 1)
    (False, True)
    """
    if isinstance(value, str) and value.lower() in SWITCH:
        return SWITCH[value.lower()]
    if isinstance(value, (bool, Integral)) and int(value) in (0, 1):
        return bool(value)
    raise FieldError("", field, f"{shown(value)} is neither on nor off")


def some_of(field: str, value: Any, allowed: Sequence[str]) -> frozenset[str]:
    """Some of some names, from ``"dp,pp"``, ``"none"`` or a list.

    Raises:
        UserError: something else.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise FieldError("", field, f"{shown(value)} is not a list of {', '.join(allowed)}, or none")
    names = [n.strip() if isinstance(n, str) else n for n in names]
    if names in (["none"], [""], []):
        return frozenset()
    return frozenset(choice(field, name, allowed) for name in names)
