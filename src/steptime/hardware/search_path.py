"""Where files of the user and of the package are looked for.

The directories of ``$STEPTIME_PATH``, then ``~/.config/steptime`` (or ``$XDG_CONFIG_HOME/steptime``), then the
catalogue of the package. Each has a folder per kind of file: ``devices``, ``clusters``, ``links``, ``profiles``,
``fabrics``.

Checks of single values of a parsed TOML file; every error names the file and the field.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, did_you_mean, shown

CATALOGUE: Final = Path(__file__).parent / "catalogue"
"""The folder that comes with the package."""


def user_roots() -> Iterator[Path]:
    """Directories of the user, the most specific first."""
    for part in os.environ.get("STEPTIME_PATH", "").split(os.pathsep):
        if part:
            yield Path(part).expanduser()
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    yield Path(config) / "steptime"


def search_roots() -> Iterator[Path]:
    """Directories to search: those of the user, then the catalogue."""
    yield from user_roots()
    yield CATALOGUE


def is_path(name: str) -> bool:
    """Whether a text stands for a file and not for a name of the catalogue.

    >>> is_path("./my.toml"), is_path("h100-sxm")
    (True, False)
    """
    separators = {os.sep, os.altsep or os.sep, "/"}
    return name.endswith(".toml") or any(separator in name for separator in separators)


def named_files(folder: str) -> dict[str, Path]:
    """Name to TOML file in such a folder of the directories; the first directory that has a name wins.

    >>> named_files("clusters")["dgx-h100"].name
    'dgx-h100.toml'
    """
    found: dict[str, Path] = {}
    for root in search_roots():
        try:
            entries = list((root / folder).iterdir())
        except (OSError, ValueError):
            continue
        for path in entries:
            if path.suffix == ".toml":
                found.setdefault(path.stem, path)
    return found


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str, at: str) -> None:
    """Refuse a table that has an unknown key.

    Args:
        table: of a file.
        known: keys that it may have.
        where: the file, for errors.
        at: path of the table in the file, ending in a dot, for errors.

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
