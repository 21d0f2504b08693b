"""Values of one field of a study: a single one, a list, or a range that is counted before it is written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptime.errors import FieldError, UserError, counted, shown
from steptime.formats.estimate_file import as_user_error

MOST_VALUES: Final = 10**6
"""Values that one field may have."""
_HOW: Final = ("step", "times", "count")


class Range(BaseModel):
    """``{from, to}`` with one of ``step`` (sums), ``times`` (products) or ``count`` (how many, even or in ``log``)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    low: Any = Field(alias="from")
    to: Any
    step: Annotated[float, Field(gt=0)] | None = None
    times: Annotated[float, Field(gt=1)] | None = None
    count: Annotated[int, Field(ge=1, le=MOST_VALUES)] | None = None
    spacing: Literal["even", "log"] = "even"


def values_of(given: Any, where: str, path: str, convert: Callable[[Any], Any] = lambda v: v) -> list[Any]:
    """All values of a field.

    Args:
        given: one value, the table of a :class:`Range`, or a list of values and ranges.
        where: the file, for errors.
        path: the field in it, for errors.
        convert: checks one value and gives it as it is kept.

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
    try:
        found = Range.model_validate(given)
    except ValidationError as error:
        raise as_user_error(error, f"{where}: {path}", Range) from None
    how = [name for name in _HOW if getattr(found, name) is not None]
    if len(how) != 1:
        problem = f"{' and '.join(how)} contradict each other" if how else "does not say how it goes on"
        raise FieldError(where, path, problem, hint="a range has one of step, times or count")
    low, high = (_converted(v, where, f"{path}.{n}", convert) for n, v in (("from", found.low), ("to", found.to)))
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (low, high)):
        raise FieldError(where, path, "a range needs two numbers", hint="give a list instead")
    if low > high:
        raise FieldError(where, path, f"the range is empty: from {shown(found.low)} is above to {shown(found.to)}")
    whole = isinstance(low, int) and isinstance(high, int)
    values = _points(found, how[0], low, high, where, path)
    if not whole:
        return values
    rounded = [round(v) for v in values]
    if any(not math.isclose(r, v, rel_tol=1e-9) for r, v in zip(rounded, values, strict=True)) and how[0] != "count":
        raise FieldError(where, f"{path}.{how[0]}", "leads to values that are not whole numbers")
    return list(dict.fromkeys(rounded))


def _points(found: Range, how: str, low: float, high: float, where: str, path: str) -> list[float]:
    """Values of a range in SI units; ``step`` is in the unit of ``from`` where that has one."""
    logarithmic = how == "times" or (how == "count" and found.spacing == "log")
    if found.spacing == "log" and how != "count":
        raise FieldError(where, f"{path}.spacing", f"log contradicts {how}", hint="give count, or drop spacing")
    if logarithmic and low <= 0:
        raise FieldError(
            where, f"{path}.from", f"{shown(found.low)} is not above zero, from which factors lead nowhere"
        )
    if how == "count":
        return _even(low, high, found.count or 1, logarithmic)
    if how == "step" and isinstance(found.low, str):
        raise FieldError(where, f"{path}.step", "a range with units has count or times", hint="count = 10")
    width = found.step if how == "step" else found.times
    assert width is not None
    steps = math.log(high / low) / math.log(width) if logarithmic else (high - low) / width
    number = _number_of(steps, where, path)
    return [low * width**i if logarithmic else low + width * i for i in range(number)]


def _number_of(steps: float, where: str, path: str) -> int:
    number = math.floor(steps * (1 + 1e-12) + 1e-9) + 1
    if number > MOST_VALUES:
        raise FieldError(where, path, f"{counted(number, 'value')}, at most {MOST_VALUES:,}")
    return number


def _even(low: float, high: float, count: int, logarithmic: bool) -> list[float]:
    """Values from one to the other, both included; of a single one the first."""
    if count == 1:
        return [low]
    shares = [i / (count - 1) for i in range(count)]
    between = (low * (high / low) ** s if logarithmic else low + (high - low) * s for s in shares[1:-1])
    return [low, *between, high]
