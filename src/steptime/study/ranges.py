"""Values of one field of a study: a single value, a list, or a range, counted before it is enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from steptime.errors import FieldError, UserError, counted, shown
from steptime.schema import Field, Table, above, anything, checked, text

MOST_VALUES: Final = 10**6
"""Largest number of values of one field."""
_HOW: Final = ("step", "times", "count")


_RANGE: Final = Table(
    rows={
        "from": anything,
        "to": anything,
        "step": above(0),
        "times": above(1),
        "count": Field(low=1, high=MOST_VALUES, whole=True),
        "spacing": text("even", "log"),
    },
    required=("from", "to"),
)
"""``{from, to}`` with one of ``step`` (sums), ``times`` (products) or ``count`` (number, even or ``log`` spacing)."""


def values_of(given: Any, where: str, path: str, convert: Callable[[Any], Any] = lambda v: v) -> list[Any]:
    """All values of a field.

    Args:
        given: one value, the table of a range (:data:`_RANGE`), or a list of values and ranges.
        where: the file, for errors.
        path: the field in it, for errors.
        convert: checks one value and converts it.

    Raises:
        FieldError: a list or range is empty, contradicts itself, or a value is not allowed; names the path.

    >>> values_of({"from": 4, "to": 64, "times": 2}, "a.toml", "job.gpus")
    [4, 8, 16, 32, 64]
    >>> values_of({"from": 1.0, "to": 100.0, "count": 3, "spacing": "log"}, "a.toml", "x")
    [1.0, 10.0, 100.0]
    """
    if isinstance(given, dict) and "from" in given:
        return _range(given, where, path, convert)
    if not isinstance(given, list):
        return [_converted(given, where, path, convert)]
    if not given:
        raise FieldError(
            where, path, "the list is empty, so the study has no points", hint="give one value, or drop it"
        )
    if len(given) > MOST_VALUES:
        raise FieldError(where, path, f"{counted(len(given), 'value')}, at most {MOST_VALUES:,}")
    out: list[Any] = []
    for i, value in enumerate(given):
        at = f"{path}[{i}]"
        if isinstance(value, dict) and "from" in value:  # ranges may meet at their ends
            out += [one for one in _range(value, where, at, convert) if one not in out]
            continue
        one = _converted(value, where, at, convert)
        if one in out:
            raise FieldError(where, at, f"{shown(value)} is given twice")
        out.append(one)
    return out


def _converted(value: Any, where: str, path: str, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except FieldError as error:
        raise FieldError(where, path, error.problem, hint=error.hint) from None
    except UserError as error:
        raise FieldError(where, path, str(error)) from None


def _range(given: dict[str, Any], where: str, path: str, convert: Callable[[Any], Any]) -> list[Any]:
    found = checked(given, _RANGE, where, path)
    how = [name for name in _HOW if name in found]
    if len(how) != 1:
        problem = f"{' and '.join(how)} contradict each other" if how else "does not say how it goes on"
        raise FieldError(where, path, problem, hint="a range has one of step, times or count")
    low, high = (_converted(found[end], where, f"{path}.{end}", convert) for end in ("from", "to"))
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (low, high)):
        raise FieldError(where, path, "a range needs two numbers", hint="give a list instead")
    if low > high:
        ends = f"from {shown(found['from'])} is above to {shown(found['to'])}"
        raise FieldError(where, path, f"the range is empty: {ends}")
    whole = isinstance(low, int) and isinstance(high, int)
    values = _points(found, how[0], low, high, where, path)
    if not whole:
        return values
    rounded = [round(v) for v in values]
    if any(not math.isclose(r, v, rel_tol=1e-9) for r, v in zip(rounded, values, strict=True)) and how[0] != "count":
        raise FieldError(where, f"{path}.{how[0]}", "leads to values that are not whole numbers")
    return list(dict.fromkeys(rounded))


def _points(found: Mapping[str, Any], how: str, low: float, high: float, where: str, path: str) -> list[float]:
    """Values of a range in SI units; ``step`` is in the unit of ``from``, if it has one."""
    log = found.get("spacing") == "log"
    logarithmic = how == "times" or (how == "count" and log)
    if log and how != "count":
        raise FieldError(where, f"{path}.spacing", f"log contradicts {how}", hint="give count, or drop spacing")
    if logarithmic and low <= 0:
        problem = f"{shown(found['from'])} is not above zero, from which factors lead nowhere"
        raise FieldError(where, f"{path}.from", problem)
    if how == "count":
        return _even(low, high, found["count"], logarithmic)
    if how == "step" and isinstance(found["from"], str):
        raise FieldError(where, f"{path}.step", "a range with units has count or times", hint="count = 10")
    width = found[how]
    steps = math.log(high / low) / math.log(width) if logarithmic else (high - low) / width
    number = _number_of(steps, where, path)
    return [low * width**i if logarithmic else low + width * i for i in range(number)]


def _number_of(steps: float, where: str, path: str) -> int:
    number = math.floor(steps * (1 + 1e-12) + 1e-9) + 1
    if number > MOST_VALUES:
        raise FieldError(where, path, f"{counted(number, 'value')}, at most {MOST_VALUES:,}")
    return number


def _even(low: float, high: float, count: int, logarithmic: bool) -> list[float]:
    """``count`` values from ``low`` to ``high``, both included; ``low`` alone if ``count`` is 1."""
    if count == 1:
        return [low]
    shares = [i / (count - 1) for i in range(count)]
    between = (low * (high / low) ** s if logarithmic else low + (high - low) * s for s in shares[1:-1])
    return [low, *between, high]
