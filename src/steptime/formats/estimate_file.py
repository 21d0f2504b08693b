"""Read an estimate that ``steptime estimate --json`` wrote."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from steptime.cost.collective_algorithms import Fabric, fabric_of
from steptime.errors import FieldError, InputFileError, UserError
from steptime.estimate.result import SCHEMA_VERSION, Argument, Detail, Estimate, FormulaCall, Provenance
from steptime.formats.run_spec import read_description
from steptime.schema import (
    Each,
    Field,
    Null,
    Row,
    Table,
    above,
    checked,
    flag,
    mapping,
    needed_by,
    number,
    rows_of,
    text,
)
from steptime.terms import Terms


def _ordered(bounds: Any) -> None:
    if bounds[0] > bounds[1]:
        raise UserError(f"{bounds}: the lower bound has to come first")


def _argument(given: object) -> Argument:
    """Check of an argument: a number or a name is kept; a record is a fabric, in which null is infinity."""
    if not isinstance(given, Mapping):
        return given if isinstance(given, str) else number(given)
    if missing := [name for name in needed_by(Fabric) if name not in given]:
        raise FieldError("", missing[0], "is missing")
    return fabric_of({name: math.inf if item is None else item for name, item in given.items()})


#: JSON has no infinity and no NaN; steptime writes null for both.
_NUMBER: Final = Null(row=number, means=math.nan)
_POSITIVE: Final = Null(row=above(0), means=math.nan)
_AMOUNT: Final = Null(row=Field(low=0), means=math.nan)
_SHARE: Final = Null(row=Field(low=0, high=1), means=math.nan)
_BOUNDS: Final = Each(row=_AMOUNT, least=2, most=2, called="two numbers", also=_ordered)
_TYPES: Final[Mapping[str, Row]] = {
    "str": text(),
    "bool": flag,
    "float": _AMOUNT,
    "tuple[float, float]": _BOUNDS,
    "tuple[str, ...]": Each(row=text()),
    "Terms": Table(named=_AMOUNT),
    "Mapping[str, float]": Table(named=_AMOUNT),
    "Mapping[str, Any]": mapping,
    "Mapping[str, Mapping[str, Any]]": Table(named=mapping),
    "Mapping[str, Argument]": Table(named=Null(row=_argument, means=math.nan)),
}


def _of(record: type, **own: Row) -> Table:
    """Table of checks for a record of an estimate."""
    return Table(rows=rows_of(record, _TYPES, own), required=needed_by(record))


_FACTORS: Final = Table(named=_NUMBER)
_CALL: Final = _of(FormulaCall, factors=_FACTORS)
_DETAIL: Final = _of(Detail, value=_NUMBER, factors=_FACTORS, further=Each(row=_CALL))
_RESULT: Final = _of(
    Estimate,
    **dict.fromkeys(("step_time_s", "memory_capacity_bytes"), _POSITIVE),
    **dict.fromkeys(("mfu", "hfu", "oom_probability"), _SHARE),
    step_time_band_s=Null(row=_BOUNDS),
    what_if=Table(named=_POSITIVE),
    provenance=_of(Provenance),
    details=Each(row=_DETAIL),
)
_OF_FILE: Final[Mapping[str, Row]] = {
    "schema_version": Field(low=SCHEMA_VERSION, high=SCHEMA_VERSION, whole=True),
    "flops_convention": text(),
}
_ESTIMATE: Final = Table(rows={**_OF_FILE, **_RESULT.rows}, required=_RESULT.required)


def parse_estimate(text: str, path: str) -> Estimate:
    """The estimate in a JSON text, for a search of its first plan; ``path``: the file for errors.

    Raises:
        InputFileError: the text is not JSON, or is another document of steptime.
        UserError: fields are unknown, missing, of the wrong type or out of range.
    """
    document = _document(text, path)
    plans = document.get("plans") if isinstance(document, Mapping) else None
    if isinstance(plans, list):
        if not plans:
            raise InputFileError(path, "a `steptime plan` that found none", hint="its advice says what else to ask for")
        document = plans[0]
    if not isinstance(document, Mapping) or "step_time_s" not in document:
        raise InputFileError(path, "not an estimate", hint="write one with: steptime estimate RUN.toml --json > a.json")
    if document.get("schema_version") != SCHEMA_VERSION:
        given = document.get("schema_version")
        raise FieldError(path, "schema_version", f"{given!r}; this steptime reads {SCHEMA_VERSION}")
    return _record(checked(document, _ESTIMATE, path))


class Written(NamedTuple):
    """A plan from a file, and the job that it was made for."""

    plan: dict[str, Any]
    workload: dict[str, Any]


def read_plan(path: str) -> Written:
    """The plan of an estimate, or the first plan of a search, in a file that ``--json`` wrote.

    Raises:
        InputFileError: the file cannot be read, is not JSON, or has no plan.
    """
    document = _document(read_description(path), path)
    plans = document.get("plans") if isinstance(document, Mapping) else None
    if isinstance(plans, list) and plans:
        document = plans[0]
    plan = document.get("plan") if isinstance(document, Mapping) else None
    if not isinstance(plan, dict):
        raise InputFileError(path, "holds no plan", hint="write one with: steptime plan ... --json > plans.json")
    workload = document["workload"] if isinstance(document.get("workload"), dict) else {}
    return Written(plan, workload)


def _record(values: Mapping[str, Any]) -> Estimate:
    given = _tuples({name: value for name, value in values.items() if name not in _OF_FILE})
    terms = {name: Terms(given[name]) for name in ("time", "overlapped", "memory")}
    details = tuple(
        Detail(**{**detail, "further": tuple(FormulaCall(**call) for call in detail.get("further", ()))})
        for detail in given.get("details", ())
    )
    return Estimate(**{**given, **terms, "provenance": Provenance(**_tuples(given["provenance"])), "details": details})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _document(text: str, path: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputFileError(path, f"not valid JSON: {problem}") from None


def _whole(digits: str) -> int:
    """An integer within the range of floating-point numbers; no field of an estimate is larger."""
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
