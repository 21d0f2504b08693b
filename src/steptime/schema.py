"""Fields of a file as rows, and one checker for all of them.

A row says what one key may hold: a number with its unit and range (:class:`Field`), a list (:class:`Each`), a table of
rows (:class:`Table`), or anything that a function takes, as :func:`text` and :func:`flag` do. :func:`checked` gives the
values of a parsed file, numbers in SI, or names every field that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.errors import FieldError, UserError, did_you_mean, shorten, shown
from steptime.units import parse

SHOWN: Final = 10
"""Problems of a file that one message names."""
Check = Callable[[object], Any]
"""From what a file has to its value; raises UserError with the problem and a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One number that a file may give."""

    record: str = ""
    """Name in the record; carries the unit."""
    dimension: str | None = None
    """Key of :data:`steptime.units.UNITS`; None: a bare number."""
    low: float
    high: float
    whole: bool = False
    required: bool = True
    example: str
    """How a user writes it; shown when the unit is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a file."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    named: Row | None = None
    """Row of all other keys, which are names that the user chooses; None: other keys are unknown."""
    required: Collection[str] = ()
    hint: str = ""
    """What to do where a key is missing."""
    also: Callable[[Any], None] | None = None
    """What holds of its values together; raises UserError, or FieldError of a part of it."""
    short: str = ""
    """Key for which a bare text may stand in place of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """A list, each entry by one row."""

    row: Row
    least: int = 0
    most: int = 2**31
    called: str = "a list"
    """How a user writes it."""
    also: Callable[[Any], None] | None = None
    """What holds of its values together."""


Row = Field | Table | Each | Check
_Problems = list[tuple[str, str, str]]


def text(*allowed: str, empty: bool = True) -> Check:
    """Row of a text, one of ``allowed`` where these are given.

    >>> text("a", "b")("a")
    'a'
    """

    def check(given: object) -> str:
        if not isinstance(given, str) or not (given or empty):
            raise UserError(f"{shown(given)} is not a valid string")
        if allowed and given not in allowed:
            many = len(allowed) > SHOWN
            names = "the names that may stand here" if many else ", ".join(allowed)
            raise UserError(f"{shown(given)} is none of {names}", hint=did_you_mean(given, allowed) if many else None)
        return given

    return check


def flag(given: object) -> bool:
    """Row of a switch."""
    if not isinstance(given, bool):
        raise UserError(f"{shown(given)} is neither true nor false")
    return given


def number(given: object) -> float:
    """Row of any finite number."""
    try:
        found = math.nan if isinstance(given, bool) or not isinstance(given, int | float) else float(given)
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    if not math.isfinite(found):
        raise UserError(f"{shown(given)} is not a finite number")
    return found


def positive(given: object) -> float:
    """Row of any positive number."""
    if (found := number(given)) <= 0:
        raise UserError(f"{found:g} is not positive")
    return found


def filled(given: Mapping[str, Any]) -> None:
    """What holds of a table that has entries."""
    if not given:
        raise UserError("is a table without entries")


def anything(given: object) -> object:
    """Row of what nothing reads."""
    return given


def checked(given: object, row: Row, where: str, at: str = "") -> Any:
    """The value of a row, numbers in SI.

    Args:
        given: the parsed file, or a part of it.
        row: what it may hold.
        where: the file, for errors.
        at: path of the part in the file, for errors.

    Raises:
        FieldError: names the first wrong field; up to ten problems stand in the message.

    >>> memory = Field(dimension="bytes", low=1, high=1e15, example="80 GB")
    >>> checked({"memory": "80 GB"}, Table(rows={"memory": memory}), "own.toml")
    {'memory': 80000000000.0}
    """
    problems: _Problems = []
    value = _value(given, row, at, problems)
    if not problems:
        return value
    (first, problem, hint), lines = problems[0], []
    if len(problems) > 1:
        problem = f"{problem} ({hint})" if hint else problem
        lines = [f"{name}: {what}" + (f" ({how})" if how else "") for name, what, how in problems[1:SHOWN]]
        lines += [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        hint = "\n  ".join(lines)
    raise FieldError(where, first, problem, hint=hint or None)


def _value(given: object, row: Row, at: str, problems: _Problems) -> Any:
    """The value of a row; what is wrong is added to the problems, each with its field and a hint."""
    try:
        if isinstance(row, Table):
            return _table(given, row, at, problems)
        if isinstance(row, Each):
            if not isinstance(given, list) or not row.least <= len(given) <= row.most:
                raise UserError(f"{shown(given)} is not {row.called}")
            before, out = len(problems), [_value(one, row.row, f"{at}[{i}]", problems) for i, one in enumerate(given)]
            if row.also is not None and len(problems) == before:
                row.also(out)
            return out
        return value_of(given, row) if isinstance(row, Field) else row(given)
    except FieldError as error:  # of a part of it
        problems.append((f"{at}.{error.field}" if at else error.field, error.problem, error.hint or ""))
    except UserError as error:
        problem, _, hint = str(error).partition("\n  ")
        problems.append((at, problem, hint))


def _table(given: object, table: Table, at: str, problems: _Problems) -> Any:
    if table.short and isinstance(given, str):
        return _value(given, table.rows[table.short], at, problems)
    if not isinstance(given, Mapping):
        raise UserError(f"{shown(given)} is not a table")
    before, out = len(problems), {}
    for name, one in given.items():
        path = f"{at}.{shorten(name, 40)}" if at else shorten(name, 40)
        row = table.rows.get(name, table.named)
        if row is None:
            problems.append((path, "is unknown", did_you_mean(name, sorted(table.rows))))
        else:
            out[name] = _value(one, row, path, problems)
    if len(problems) == before:  # a key that is misspelt is not missing too
        missing = [name for name in table.required if name not in given]
        problems += [(f"{at}.{name}" if at else name, "is missing", table.hint) for name in missing]
    if table.also is not None and len(problems) == before:
        table.also(out)
    return out


def value_of(given: object, field: Field) -> float:
    """Number in SI of what a file gives for ``field``.

    Raises:
        UserError: a bare number where a unit is needed, a unit where none belongs, not finite, or out of range.

    >>> memory = Field(dimension="bytes", low=1e6, high=1e15, example="80 GB")
    >>> value_of("80 GB", memory)
    80000000000.0
    >>> value_of(80, memory)
    Traceback (most recent call last):
    steptime.errors.UserError: 80 has no unit
      write it as text with a unit, for example "80 GB"
    """
    value = _plain(given, field) if field.dimension is None else _quantity(given, field, field.dimension)
    if not field.low <= value <= field.high:  # true of nan as well
        raise UserError(
            f"{shown(given)} is not between {_bound(field.low, field)} and {_bound(field.high, field)}",
            hint=f"for example {_example(field)}",
        )
    return int(value) if field.whole else value


def _quantity(given: object, field: Field, dimension: str) -> float:
    if isinstance(given, str):
        return parse(given, dimension)
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise UserError(
            f"{shown(given)} has no unit", hint=f"write it as text with a unit, for example {_example(field)}"
        )
    raise UserError(f"{shown(given)} is not a text with a number and a unit", hint=f"for example {_example(field)}")


def _plain(given: object, field: Field) -> float:
    allowed: tuple[type, ...] = (int,) if field.whole else (int, float)
    if isinstance(given, bool) or not isinstance(given, allowed):
        kind = "whole number" if field.whole else "number"
        raise UserError(f"{shown(given)} is not a {kind}", hint=f"write it bare, for example {field.example}")
    try:
        return given if isinstance(given, int) and field.whole else float(given)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


def _example(field: Field) -> str:
    return field.example if field.dimension is None else f'"{field.example}"'


def _bound(value: float, field: Field) -> str:
    unit = {"bytes": "B", "Bps": "B/s", "flops_per_s": "FLOP/s", None: ""}.get(field.dimension, field.dimension or "")
    return f"{value:g} {unit}".rstrip()
