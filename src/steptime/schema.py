"""Fields of a file as rows, and one checker for all of them.

A row says what one key may hold: a number with its unit and range (:class:`Field`), a list (:class:`Each`), a table of
rows (:class:`Table`), or anything that a function takes, as :func:`text` and :func:`flag` do. :func:`checked` gives the
values of a parsed file, numbers in SI, or names every field that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from steptime.errors import FieldError, UserError, did_you_mean, nearest, shorten, shown
from steptime.units import parse

SHOWN: Final = 10
"""Problems of a file that one message names."""
Check = Callable[[object], Any]
"""Function from the content of a file to its value; raises UserError with the problem and a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One number that a file may give."""

    record: str = ""
    """Name in the record; carries the unit."""
    dimension: str | None = None
    """Key of :data:`steptime.units.UNITS`; None: a bare number."""
    low: float
    high: float = math.inf
    """Infinite: any finite number from ``low``."""
    whole: bool = False
    required: bool = True
    example: str = ""
    """Example of the user's notation, shown when the unit is missing."""
    meaning: str = ""
    """Noun that a bare number counts, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a file; a key whose value is null, which JSON has, is as if it was not there."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    named: Row | None = None
    """Row of all other keys, which are names that the user chooses; None: other keys are unknown."""
    required: Collection[str] = ()
    hint: str = ""
    """Hint if a key is missing."""
    also: Callable[[Any], None] | None = None
    """Check of all its values together; raises UserError, or FieldError for a part of it."""
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
    """Check of all its values together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Null:
    """A row that may be null, and the value that null stands for."""

    row: Row
    means: Any = None


Row = Field | Table | Each | Null | Check
_Problems = list[tuple[str, str, str]]


def text(*allowed: str, pattern: str = ".*", called: str = "a text") -> Check:
    """Row of a text.

    Args:
        allowed: all that it may be; none: any that matches.
        pattern: regular expression that it matches as a whole.
        called: how errors call such a text.

    >>> text("a", "b")("a"), text(pattern="[a-z]+", called="small letters")("ab")
    ('a', 'ab')
    """
    matches = re.compile(pattern, re.DOTALL).fullmatch

    def check(given: object) -> str:
        if not isinstance(given, str) or not matches(given):
            raise UserError(f"{shown(given)} is not {called}")
        if allowed and given not in allowed:
            many = len(allowed) > SHOWN
            names = "the names that may stand here" if many else ", ".join(allowed)
            hint = did_you_mean(given, allowed) if many or nearest(given, allowed) else None
            raise UserError(f"{shown(given)} is none of {names}", hint=hint)
        return given

    return check


def letters(most: int) -> Check:
    """Row of a text that is neither empty nor longer than ``most``."""
    return text(pattern=f".{{1,{most}}}", called=f"a text of 1 to {most} letters")


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


def above(least: float) -> Check:
    """Row of any finite number above another."""

    def check(given: object) -> float:
        if (found := number(given)) <= least:
            raise UserError(f"{shown(given)} is not above {least:g}")
        return found

    return check


def as_given(row: Field | Check) -> Check:
    """Row of a number that stays as it is given: a whole one stays one."""

    def check(given: object) -> object:
        value_of(given, row) if isinstance(row, Field) else row(given)
        return given

    return check


def rows_of(record: Any, types: Mapping[str, Row], own: Mapping[str, Row]) -> dict[str, Row]:
    """Rows of the fields of a dataclass: each its own, or that of its type as the class writes it, None left out.

    >>> list(rows_of(Each, {"Row": text(), "int": number, "str": text()}, {"also": flag})), needed_by(Each)
    (['row', 'least', 'most', 'called', 'also'], ['row'])
    """
    return {f.name: own[f.name] if f.name in own else types[f.type.removesuffix(" | None")] for f in fields(record)}


def needed_by(record: Any) -> list[str]:
    """Fields of a dataclass that have no default."""
    return [f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING]


def filled(given: Mapping[str, Any]) -> None:
    """Check that a table has entries."""
    if not given:
        raise UserError("is a table without entries")


def anything(given: object) -> object:
    """Row of a value that nothing reads."""
    return given


def mapping(given: object) -> Mapping[str, Any]:
    """Row of a table that stays as it is given."""
    if not isinstance(given, Mapping):
        raise UserError(f"{shown(given)} is not a table")
    return given


def checked(given: object, row: Row, where: str, at: str = "") -> Any:
    """The value of a row, numbers in SI.

    Args:
        given: the parsed file, or a part of it.
        row: what it may hold.
        where: the file, for errors.
        at: path of the part in the file, for errors.

    Raises:
        FieldError: one field is wrong.
        UserError: several are; the message has up to ten.

    >>> memory = Field(dimension="bytes", low=1, high=1e15, example="80 GB")
    >>> checked({"memory": "80 GB"}, Table(rows={"memory": memory}), "own.toml")
    {'memory': 80000000000.0}
    """
    problems: _Problems = []
    value = _value(given, row, at, problems)
    if not problems:
        return value
    if len(problems) == 1:
        name, problem, hint = problems[0]
        raise FieldError(where, name or "the file", problem, hint=hint or None)
    lines = [f"{name}: {problem}" + (f" ({hint})" if hint else "") for name, problem, hint in problems[:SHOWN]]
    lines += [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise UserError(f"{where}: {len(problems)} fields are wrong".removeprefix(": "), hint="\n  ".join(lines))


def _value(given: object, row: Row, at: str, problems: _Problems) -> Any:
    """The value of a row; errors are added to the problems, each with its field and a hint."""
    try:
        if isinstance(row, Null):
            return row.means if given is None else _value(given, row.row, at, problems)
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
    before, out, unknown = len(problems), {}, False
    for name, one in mapping(given).items():
        path = shorten(name, 40) if isinstance(name, str) else shown(name, 40)
        path = f"{at}.{path}" if at else path
        row = table.rows.get(name, table.named)
        if row is None:
            unknown = True
            told = len(problems) < SHOWN  # looking for the nearest of many keys takes long
            problems.append((path, "unknown key", did_you_mean(str(name), [*table.rows]) if told else ""))
        elif one is not None or isinstance(row, Null):
            out[name] = _value(one, row, path, problems)
    if not unknown:  # a key that is misspelt is not missing too
        missing = [name for name in table.required if name not in out]
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
    value = _plain(given, field.whole) if field.dimension is None else _quantity(given, field, field.dimension)
    if not field.low <= value <= field.high or value == math.inf:  # true of nan as well
        hint = f"for example {_example(field)}" if field.example else None
        raise UserError(f"{shown(given)} is not {_allowed(field)}", hint=hint)
    return int(value) if field.whole else value


def _quantity(given: object, field: Field, dimension: str) -> float:
    if isinstance(given, str):
        return parse(given, dimension)
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise UserError(
            f"{shown(given)} has no unit", hint=f"write it as text with a unit, for example {_example(field)}"
        )
    raise UserError(f"{shown(given)} is not a text with a number and a unit", hint=f"for example {_example(field)}")


def _plain(given: object, whole: bool) -> float:
    """A bare number; nan where it is none, or has a fraction and may have none."""
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float):
        return math.nan
    try:
        return given if isinstance(given, int) and whole else float(given)
    except OverflowError:
        return math.inf


def _example(field: Field) -> str:
    return field.example if field.dimension is None else f'"{field.example}"'


def _allowed(field: Field) -> str:
    """The range of a field in words."""
    if field.dimension is not None:
        unit = {"bytes": "B", "Bps": "B/s", "flops_per_s": "FLOP/s"}.get(field.dimension, field.dimension)
        return f"between {field.low:g} {unit} and {field.high:g} {unit}"
    form, kind = (".0f", "a whole number") if field.whole else ("g", "a number")
    ends = (
        f"of {field.low:{form}} or more"
        if field.high == math.inf
        else f"from {field.low:{form}} to {field.high:{form}}"
    )
    return f"{kind} {ends}" + (f" ({field.meaning})" if field.meaning else "")
