"""Read an estimate that ``steptime estimate --json`` wrote.

What the readers of user files share: a bound on what is read, and validation errors in our own words.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from steptime.cost.collective_algorithms import fabric_of
from steptime.errors import FieldError, InputFileError, UserError, did_you_mean, shorten, shown
from steptime.estimate.result import SCHEMA_VERSION, Argument, Detail, Estimate, FormulaCall, Provenance
from steptime.formats.run_spec import read_description
from steptime.store.files import keys_at
from steptime.terms import Terms

MAX_PROBLEMS: Final = 10


def as_user_error(error: ValidationError, where: str, root: type[BaseModel]) -> UserError:
    """All problems of one file as one error; each names its field."""
    problems = error.errors(include_url=False, include_context=True)
    first = [_problem(p, root) for p in problems[:MAX_PROBLEMS]]
    if len(problems) == 1:
        field, text, hint = first[0]
        return FieldError(where, field, text, hint=hint)
    lines = [f"{where}: {len(problems)} fields are wrong"]
    for field, text, hint in first:
        lines.append(f"  {field}: {text}" + (f" ({hint})" if hint else ""))
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    return UserError("\n".join(lines))


def _problem(problem: Any, root: type[BaseModel]) -> tuple[str, str, str | None]:
    loc = tuple(part for part in problem["loc"] if isinstance(part, (str, int)))
    field = shorten(".".join(str(part) for part in loc)) or "document"
    if problem["type"] == "extra_forbidden":
        return field, "unknown key", did_you_mean(str(loc[-1]), keys_at(root, loc[:-1]))
    if problem["type"] == "missing":
        return field, "missing", None
    given = shown(problem["input"], 60)
    return field, f"{given}: {problem['msg'][:1].lower()}{problem['msg'][1:]}", None


#: JSON has no infinity and no NaN; steptime writes null for both.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


def _bounded(words: str, allowed: Callable[[float], bool]) -> AfterValidator:
    """Refuses a number that is not ``allowed``, in ``words``; null is."""

    def checked(value: float) -> float:
        if not math.isnan(value) and not (math.isfinite(value) and allowed(value)):
            raise PydanticCustomError("range", f"has to be {words}")
        return value

    return AfterValidator(checked)


def _ordered(value: list[float]) -> list[float]:
    """Refuses bounds of which the lower is above the upper."""
    if value[0] > value[1]:
        raise PydanticCustomError("order", "the lower bound has to come first")
    return value


Positive = Annotated[Number, _bounded("above 0", lambda value: value > 0)]
Amount = Annotated[Number, _bounded("0 or more", lambda value: value >= 0)]
Share = Annotated[Number, _bounded("0 to 1", lambda value: 0 <= value <= 1)]
Bounds = Annotated[list[Amount], Field(min_length=2, max_length=2), AfterValidator(_ordered)]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Provenance(_Object):
    steptime_version: str
    mode: str
    model: str
    model_source: str
    cluster: str
    device: str
    weakest_kind: str
    constants: dict[str, dict[str, Any]]
    assumptions: list[str] = Field(default_factory=list)
    band: str = "uncalibrated"
    framework: str = "ideal"
    is_gpu: bool | None = None


class _Call(_Object):
    function: str
    arguments: dict[str, Number | str | dict[str, Any]]
    factors: dict[str, Number] = Field(default_factory=dict)


class _Detail(_Call):
    path: str
    value: Number
    basis: str = ""
    further: list[_Call] = Field(default_factory=list)


class _Estimate(_Object):
    schema_version: int
    flops_convention: str = ""
    step_time_s: Positive
    step_time_bracket_s: Bounds
    step_time_band_s: Bounds | None
    mfu: Share
    hfu: Share
    tokens_per_s_per_gpu: Amount
    samples_per_s: Amount
    model_flops: Amount
    time: dict[str, Amount]
    overlapped: dict[str, Amount]
    peak_memory_bytes: Amount
    memory: dict[str, Amount]
    memory_capacity_bytes: Positive
    oom_probability: Share
    feasible: bool
    reasons: list[str]
    bottleneck: str
    plan: dict[str, Any]
    provenance: _Provenance
    workload: dict[str, Any] = Field(default_factory=dict)
    memory_by_definition: dict[str, Amount] = Field(default_factory=dict)
    band_shares: dict[str, Amount] = Field(default_factory=dict)
    what_if: dict[str, Positive] = Field(default_factory=dict)
    published: dict[str, Any] | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    details: list[_Detail] = Field(default_factory=list)


def parse_estimate(text: str, path: str) -> Estimate:
    """The estimate in a JSON text, of a search that of its first plan; ``path`` is the file that errors name.

    Raises:
        InputFileError: the text is not JSON, or is another document of steptime's.
        UserError: fields that are unknown, missing, of the wrong type or out of range.
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
    try:
        return _record(_Estimate.model_validate(document))
    except ValidationError as error:
        raise as_user_error(error, path, _Estimate) from None


class Written(NamedTuple):
    """A plan in a file, and the job that it was made for."""

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


def _record(given: _Estimate) -> Estimate:
    fields = {name: getattr(given, name) for name in type(given).model_fields}
    for name in ("schema_version", "flops_convention"):
        del fields[name]
    provenance = given.provenance.model_dump()
    provenance["assumptions"] = tuple(provenance["assumptions"])
    fields |= {
        "step_time_bracket_s": (given.step_time_bracket_s[0], given.step_time_bracket_s[1]),
        "step_time_band_s": None if given.step_time_band_s is None else tuple(given.step_time_band_s),
        "time": Terms(given.time),
        "overlapped": Terms(given.overlapped),
        "memory": Terms(given.memory),
        "reasons": tuple(given.reasons),
        "notes": tuple(given.notes),
        "provenance": Provenance(**provenance),
        "details": tuple(_detail(detail) for detail in given.details),
    }
    return Estimate(**fields)


def _detail(given: _Detail) -> Detail:
    further = tuple(FormulaCall(**_call(call)) for call in given.further)
    return Detail(path=given.path, value=given.value, basis=given.basis, further=further, **_call(given))


def _call(given: _Call) -> dict[str, Any]:
    arguments = {name: _argument(value) for name, value in given.arguments.items()}
    return {"function": given.function, "arguments": arguments, "factors": given.factors}


def _argument(value: float | str | dict[str, Any]) -> Argument:
    """A number or a name as it is; a record is a fabric."""
    if not isinstance(value, dict):
        return value
    return fabric_of({name: math.inf if item is None else item for name, item in value.items()})


def _document(text: str, path: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputFileError(path, f"not valid JSON: {problem}") from None


def _whole(digits: str) -> int:
    """A whole number that floating-point numbers reach; no field of an estimate is larger."""
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
