"""The gate that a file passes before it is converted: pydantic models, strict, unknown keys forbidden.

Importing this module imports pydantic, so it is imported only when a user's own file is read. The files
of the catalogue pass the same gate in the test suite and are not checked again at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model
from pydantic import Field as Field_
from pydantic_core import ErrorDetails, PydanticCustomError

from steptime.errors import FieldError, UserError, did_you_mean, shorten, shown
from steptime.hardware.load import DEVICE, LEVEL, LINK, RATE, RATES, Field, value_of
from steptime.hardware.topology import KINDS, LARGEST, MOST_DIMS, PLACEMENTS
from steptime.store.files import keys_at

SHOWN: Final = 10
_Definitions = dict[str, Any]


class Strict(BaseModel):
    """Base: no coercion, no unknown key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _refuse(error: UserError) -> PydanticCustomError:
    problem, _, hint = str(error).partition("\n  ")
    return PydanticCustomError("given", "{problem}", {"problem": problem, "hint": hint})


def _number(field: Field) -> Any:
    def check(given: object) -> float:
        try:
            return value_of(given, field)
        except UserError as error:
            raise _refuse(error) from None

    return Annotated[Any, BeforeValidator(check)]


def _one_of(allowed: tuple[str, ...]) -> Callable[[object], object]:
    def check(given: object) -> object:
        if isinstance(given, str) and given in allowed:
            return given
        problem = f"{shown(given)} is not a field that has a number here"
        raise _refuse(UserError(problem, hint=did_you_mean(str(given), allowed)))

    return check


def _base_of(given: object) -> object:
    """A device written as a bare name stands for a table with that base."""
    return {"base": given} if isinstance(given, str) else given


_Kind = Literal["datasheet", "measured", "fitted", "assumed"]
_ORIGIN: Final[_Definitions] = {"source": (str | None, None), "kind": (_Kind | None, None)}


def _model(name: str, *parts: _Definitions) -> type[Strict]:
    definitions = {key: value for part in parts for key, value in part.items()}
    return create_model(name, __base__=Strict, **definitions)


def _with_sources(allowed: tuple[str, ...]) -> _Definitions:
    name = Annotated[str, BeforeValidator(_one_of(allowed))]
    entry: Any = _model("Sources", {"fields": (list[name], ...)}, _ORIGIN)
    return {**_ORIGIN, "sources": (list[entry], [])}


def _numbers(table: Mapping[str, Field]) -> _Definitions:
    return {key: (_number(field), None) for key, field in table.items()}


def _texts(*keys: str) -> _Definitions:
    return dict.fromkeys(keys, (str | None, None))


def _rates(table: str) -> Any:
    return _model(table.title(), {dtype: (_number(RATE), None) for dtype in RATES[table][1]}) | None


_RATE_NAMES: Final = tuple(f"{table}.{dtype}" for table, (_, dtypes) in RATES.items() for dtype in dtypes)

DeviceFile: Final = _model(
    "DeviceFile",
    _texts("base", "name", "title", "vendor", "architecture", "notes", "cluster", "curves"),
    _numbers(DEVICE),
    {table: (_rates(table), None) for table in RATES},
    _with_sources((*DEVICE, *RATES, *_RATE_NAMES)),
)
LinkFile: Final = _model("LinkFile", _texts("base", "title", "notes"), _numbers(LINK), _with_sources(tuple(LINK)))
LevelTable: Final = _model("LevelTable", _texts("link", "notes"), _numbers(LEVEL), _with_sources(tuple(LEVEL)))
_Size = Annotated[int, Field_(ge=1, le=LARGEST)]
TopologyTable: Final = _model(
    "TopologyTable",
    _texts("notes", "source"),
    {
        "kind": (Literal[*KINDS], ...),
        "shape": (Annotated[list[_Size], Field_(min_length=1, max_length=MOST_DIMS)] | None, None),
        **dict.fromkeys(("rails", "groups", "pool", "wraps"), (_Size | None, None)),
        "forwarding": (bool | None, None),
        "placement": (Literal[*PLACEMENTS] | None, None),
    },
)
ClusterFile: Final = _model(
    "ClusterFile",
    _texts("base", "name", "title", "notes"),
    {
        "device": (Annotated[DeviceFile | None, BeforeValidator(_base_of)], None),
        "levels": (dict[str, LevelTable], {}),  # type: ignore[valid-type]
        "topology": (TopologyTable | None, None),
    },
    _ORIGIN,
)
MODELS: Final[Mapping[str, type[Strict]]] = {"device": DeviceFile, "link": LinkFile, "cluster": ClusterFile}

#: Keys that every model file has.
MODEL_KEYS: Final = {"layers", "hidden", "heads"}


def check(raw: Mapping[str, object], kind: str, where: str) -> None:
    """Refuse a parsed file that is not a well-formed ``kind`` ("device", "link", "cluster").

    Raises:
        FieldError: names the first wrong field; up to ten problems stand in the message.
    """
    if set(raw) >= MODEL_KEYS:
        raise FieldError(where, "layers", f"this file describes a model, not a {kind}", hint="give it as MODEL")
    model = MODELS[kind]
    try:
        model.model_validate(dict(raw))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
    else:
        return
    lines = [_line(detail, model) for detail in details[:SHOWN]]
    if len(details) > SHOWN:
        lines.append(f"... and {len(details) - SHOWN} more")
    field, _, problem = lines[0].partition(": ")
    raise FieldError(where, field, problem, hint="\n  ".join(lines[1:]) or None)


def _line(detail: ErrorDetails, model: type[BaseModel]) -> str:
    path = [str(part) for part in detail["loc"]]
    field = ".".join(shorten(part.replace(": ", ":"), 40) for part in path)
    if detail["type"] == "extra_forbidden":
        return f"{field}: the key is unknown ({did_you_mean(path[-1], keys_at(model, path[:-1]))})"
    if detail["type"] == "given":
        context = detail["ctx"]
        return f"{field}: {context['problem']}" + (f" ({context['hint']})" if context["hint"] else "")
    return f"{field}: {detail['msg'][0].lower()}{detail['msg'][1:]}; given {shown(detail['input'], 60)}"
