"""The file of fitted frameworks: where it is looked for, and what it has to hold.

``frameworks.toml`` is looked for in the user's directories (:mod:`steptime.hardware.schema`); without one there,
it is that of the package. One file holds all frameworks, since
their doubts and bands come from one fit.

Fitted frameworks: those of the package, or those of the user's own fit by `steptime calibrate frameworks`.

Names of training frameworks: their own, those of other software that trains with them, and older ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError
from steptime.hardware.library import architecture_of
from steptime.hardware.load import MAX_BYTES
from steptime.hardware.search_path import refuse_unknown, user_roots
from steptime.plan.framework import (
    BUSY,
    IDEAL,
    PARAMETERS,
    SHARES,
    Framework,
    Spread,
    habits_of,
    kernel_factor,
    widening,
)
from steptime.plan.stacks import STACKS
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text

NAME: Final = "frameworks.toml"
PACKAGED: Final = Path(__file__).with_name(NAME)
CODE: Final = (Path(__file__), Path(__file__).with_name("framework.py"))
"""What the tables follow from in addition to the file: parameters, what older files lack, checks."""
NOTHING: Final = 1e-12
"""Stands for no seconds, no share and no doubt, whose logarithm must be finite."""
MANY: Final = 1e9
"""Stands for sources enough that their number says nothing."""
LARGEST: Final = 1e9
"""Largest parameter, count of sources and end of a band: above what any fit gives, below what formulas overflow at."""
LARGEST_DOUBT: Final = 10.0
"""Largest standard deviation of a logarithm: a factor of twenty thousand."""

KEYS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    (): ("provenance", "common", "doubts", "generic", "band", "framework", "device"),
    ("generic",): ("slower",),
    ("common",): PARAMETERS,
    ("doubts",): PARAMETERS,
    ("band",): ("named", "generic", "model"),
    ("band", "named"): ("low", "high"),
    ("band", "generic"): ("low", "high"),
    ("band", "model"): ("noise", "experts", "unknown_device", "unmeasured_device", "unknown_sources"),
}
"""Path of a table -> its keys; those of the provenance are free."""
FRAMEWORK_KEYS: Final = (*PARAMETERS, "runs", "doubts")
DEVICE_KEYS: Final = (*BUSY, "doubt", "sources")


def framework_path() -> Path:
    """The file in use."""
    return next((path for root in user_roots() if (path := root / NAME).is_file()), PACKAGED)


def framework_table() -> Mapping[str, Any]:
    """The file in use, as it is.

    Raises:
        InputFileError: it cannot be read or is not TOML.
        FieldError: a value is missing or not allowed.
    """
    path = framework_path()
    return _tables(str(path), read_text(path, MAX_BYTES, "a hardware file"))


@lru_cache(maxsize=8)
def _tables(where: str, text: str) -> Mapping[str, Any]:
    """The tables of a text: by its content, as a file may be edited within one tick of its clock."""
    checked: Mapping[str, Any] | None = compiled(text, *_code())
    return _checked(text, where) if checked is None else checked


def _checked(text: str, where: str) -> Mapping[str, Any]:
    tables = completed({"framework": {}, "device": {}, "generic": {"slower": 1.0}, **parse_toml(text, where)})
    check_tables(tables, where)
    return tables


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def framework_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """The file of the package, checked, with the texts that it follows from, for the build."""
    text = PACKAGED.read_text(encoding="utf-8")
    yield (text, *_code()), _checked(text, str(PACKAGED))


def completed(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file of an older steptime with the parameters that came later: without effect, as when it was fitted."""
    frameworks = tables["framework"].values() if isinstance(tables["framework"], dict) else ()
    parts = [part for part in (tables.get("common"), tables.get("doubts"), *frameworks) if isinstance(part, dict)]
    later = [name for name in PARAMETERS if not any(name in part for part in parts)]
    values = {name: float(getattr(IDEAL, name)) or NOTHING for name in later}
    doubts = dict.fromkeys(later, NOTHING)
    for part in parts:
        part |= doubts if part is tables.get("doubts") else values
        if isinstance(part.get("doubts"), dict):
            part["doubts"] |= doubts
    devices = tables["device"].values() if isinstance(tables["device"], dict) else ()
    for part in (part for part in devices if isinstance(part, dict)):
        part |= {name: 1.0 for name in BUSY if name in later}
        part.setdefault("sources", MANY)
    band = tables.get("band")
    model = band.get("model") if isinstance(band, dict) else None
    if isinstance(model, dict):
        model |= {"experts": NOTHING, "unknown_sources": MANY} | model
    return tables


def check_tables(tables: Mapping[str, Any], where: str) -> None:
    """Refuses a file that lacks something or holds what no fit gives.

    Raises:
        FieldError: names the file and the field.
    """
    _known_keys(tables, where)
    if not isinstance(_table(tables, "provenance", where).get("source"), str):
        raise FieldError(where, "provenance.source", "is missing or no text")
    _values(tables, "common", where)
    _positive(tables, "doubts", PARAMETERS, where, most=LARGEST_DOUBT)
    _positive(tables, "generic", ("slower",), where)
    _positive(
        tables, "band.model", ("noise", "experts", "unknown_device", "unmeasured_device"), where, most=LARGEST_DOUBT
    )
    _count(tables, "band.model", "unknown_sources", where)
    for title in ("named", "generic"):
        low, high = (_number(tables, f"band.{title}", end, where) for end in ("low", "high"))
        if low > high:
            raise FieldError(where, f"band.{title}", f"low is {low:g}, above high, {high:g}")
    for name in _table(tables, "framework", where):
        _values(tables["framework"], name, where, "framework.")
        _positive(tables["framework"][name], "doubts", PARAMETERS, where, f"framework.{name}.", LARGEST_DOUBT)
    for name in _table(tables, "device", where):
        _positive(tables["device"], name, BUSY, where, "device.")
        _positive(tables["device"], name, ("doubt",), where, "device.", LARGEST_DOUBT)
        _count(tables["device"], name, "sources", where, "device.")


def _known_keys(tables: Mapping[str, Any], where: str) -> None:
    """Refuses keys that nothing reads; what is no table is refused where it is read."""
    allowed = dict(KEYS)
    for name in _part(tables, ("framework",)):
        allowed |= {("framework", name): FRAMEWORK_KEYS, ("framework", name, "doubts"): PARAMETERS}
    allowed |= {("device", name): DEVICE_KEYS for name in _part(tables, ("device",))}
    for path, keys in allowed.items():
        refuse_unknown(_part(tables, path), keys, where, "".join(f"{name}." for name in path))


def _part(tables: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The table at a path; an empty one where there is none."""
    found: Any = tables
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _values(tables: Mapping[str, Any], path: str, where: str, before: str = "") -> None:
    own = _positive(tables, path, PARAMETERS, where, before)
    for name in SHARES:
        if own[name] >= 1:
            raise FieldError(where, f"{before}{path}.{name}", f"{own[name]:g} is no share", hint="below 1")


def _positive(
    tables: Mapping[str, Any], path: str, names: tuple[str, ...], where: str, before: str = "", most: float = LARGEST
) -> dict[str, float]:
    found = {name: _number(tables, path, name, where, before) for name in names}
    for name, value in found.items():
        if not 0 < value <= most:
            problem = f"{value:g} is not positive" if value <= 0 else f"{value:g} is too large"
            raise FieldError(where, f"{before}{path}.{name}", problem, hint=f"at most {most:g}")
    return found


def _count(tables: Mapping[str, Any], path: str, name: str, where: str, before: str = "") -> None:
    value = _number(tables, path, name, where, before)
    if value < 0:
        raise FieldError(where, f"{before}{path}.{name}", f"{value:g} is negative")


def _number(tables: Mapping[str, Any], path: str, name: str, where: str, before: str = "") -> float:
    own = _table(tables, path, where, before)
    value = own.get(name)
    if (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST
    ):  # nan as well
        problem = "is missing" if value is None else f"is not a finite number up to {LARGEST:g}"
        raise FieldError(where, f"{before}{path}.{name}", problem, hint="steptime calibrate frameworks writes the file")
    return float(value)


def _table(tables: Mapping[str, Any], path: str, where: str, before: str = "") -> Mapping[str, Any]:
    """A table; dots in ``path`` part the names of the package's own tables, names of users are one part."""
    found: Any = tables
    for part in path.split(".") if path.startswith("band.") else (path,):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise FieldError(
            where, before + path, "is missing or no table", hint="steptime calibrate frameworks writes the file"
        )
    return found


GENERIC = "generic"
"""Name of the framework that nobody named: the common values, slower as far as frameworks were that no fit had seen,
with the spread between frameworks as doubt."""
SLOWED: Final = ("matrix", "attention", "vector")
"""Factors that are larger by as much in a framework that nobody named (:func:`slowed`)."""
_JOINTS: Final = str.maketrans("", "", "-_. ")


def slowed(framework: Framework, slower: float) -> Framework:
    """The framework with all that its device computes slower by a factor.

    >>> slowed(Framework(vector=2.0), 1.1).vector, slowed(Framework(), 1.1).data_links
    (2.2, 1.0)
    """
    return replace(framework, **{name: getattr(framework, name) * slower for name in SLOWED})


def is_slowed(name: str, fitted: Collection[str]) -> bool:
    """Whether a framework is software that no fit has seen: one that nobody named, or a stack without runs.

    Args:
        name: of the framework.
        fitted: names of those with runs.

    >>> is_slowed("transformers", ["ddp"]), is_slowed("ddp", ["ddp"]), is_slowed("generic", ["generic"])
    (True, False, True)
    """
    return name == GENERIC or (name in STACKS and name not in fitted)


def framework_names() -> list[str]:
    """Names that :func:`load_framework` takes."""
    return ["ideal", GENERIC, *sorted({*framework_table()["framework"], *STACKS})]


def bare_name(name: str) -> str:
    """A name without case and without what joins its words: names that are equal then mean one framework.

    >>> bare_name("Megatron_Core"), bare_name("megatron-core")
    ('megatroncore', 'megatroncore')
    """
    return name.lower().translate(_JOINTS)


def unknown_framework(name: str, instead: str = "") -> UnknownNameError:
    """The error for a name that is no framework; where the user's own file is in use, it says so.

    Args:
        name: as given.
        instead: what to give in its place, where that is known.

    Raises:
        UserError: it is a file of the user's and cannot be used.
    """
    path = framework_path()
    own = f"{path} is in use, which has no others than {', '.join(framework_names())}" if path != PACKAGED else ""
    return UnknownNameError("framework", name, framework_names(), always=own or instead)


def load_framework(name: str, device: str, factors: Collection[str] = BUSY, *, measured: bool = True) -> Framework:
    """A framework on a device.

    Args:
        name: one of :func:`framework_names`; ``generic`` where the framework is not known.
        device: name of the device in the catalogue; one without runs has the common factor and a wider band.
        factors: parameters of :data:`~steptime.plan.framework.BUSY` that the device's own factors multiply.
        measured: whether products on the device are timed by curves that were fitted to measurements; of a device
            without runs and without them less is known.

    Raises:
        UnknownNameError: the framework is unknown.
    """
    if name == IDEAL.name:
        return IDEAL
    table = framework_table()
    unfitted = is_slowed(name, table["framework"])
    if not unfitted and name not in table["framework"]:
        raise unknown_framework(name)
    common, own = table["common"], table["framework"].get(name, {})
    values = {p: float(own.get(p, common[p])) for p in PARAMETERS}
    known = table["device"].get(device, {})
    values |= {p: values[p] * float(known[p]) for p in BUSY if p in known and p in factors}
    values["attention"] *= kernel_factor(habits_of(name).kernel, architecture_of(device))
    spread = _spread(table, own, known, measured)
    found = replace(IDEAL, name=name, spread=spread, **values)
    return slowed(found, float(table["generic"]["slower"])) if unfitted else found


def _spread(table: Mapping[str, Any], own: Mapping[str, Any], device: Mapping[str, Any], measured: bool) -> Spread:
    band, model = table["band"]["named" if own else "generic"], table["band"]["model"]
    doubts = own.get("doubts") or table["doubts"]
    unknown = model["unknown_device" if measured else "unmeasured_device"]
    return Spread(
        doubts={p: float(doubts[p]) for p in PARAMETERS},
        device_doubt=float(device.get("doubt", unknown)),
        noise=float(model["noise"]),
        low=float(band["low"]),
        high=float(band["high"]),
        source=str(table["provenance"]["source"]),
        experts=float(model["experts"]),
        widening=widening(float(device.get("sources", model["unknown_sources"]))),
    )


@cache
def name_rules() -> Mapping[str, Any]:
    """The rules: ``source_key``, ``pattern``, ``nearest``, ``today`` and ``open`` names."""
    file = Path(__file__).with_name("framework_names.toml")
    return parse_toml(file.read_text(encoding="utf-8"), str(file))


@cache
def own_names() -> frozenset[str]:
    """Names that the rules give frameworks."""
    rules = name_rules()
    return frozenset([*rules["source_key"].values(), *(rule["framework"] for rule in rules["pattern"])])


def framework_called(text: str) -> str | None:
    """The framework that has exactly that name, spelling or older name in the rules; None: no framework has.

    >>> [framework_called(text) for text in ("NeMo", "Megatron-LM", "Megatron_DeepSpeed", "megatron", "megatrn")]
    ['megatron-core', 'megatron-core', 'megatron-deepspeed', 'megatron', None]
    """
    rule = _rule_called(text)
    return None if rule is None else str(rule["framework"])


def why_called(text: str) -> str:
    """Why a framework has that name of other software; empty where that goes without saying.

    >>> why_called("Megatron-LM"), why_called("torchtitan"), why_called("megatrn")
    ('Megatron-LM trains with Megatron-Core since 2023', '', '')
    """
    return str((_rule_called(text) or {}).get("why", ""))


def _rule_called(text: str) -> Mapping[str, Any] | None:
    """The rule by which a framework has that name."""
    rules: Mapping[str, Any] = name_rules()
    named = text.strip().lower()
    if (rule := rule_with(rules["today"], named)) is not None:
        return rule
    if named in own_names():
        return {"framework": named}
    if (rule := rule_with(rules["nearest"], bare_name(named))) is not None:
        return rule
    patterns: Sequence[Mapping[str, Any]] = rules["pattern"]
    whole = (p for p in patterns if "framework" in p["columns"] and "source_key" not in p)
    return next((p for p in whole if re.fullmatch(p["match"], named)), None)


def rule_with(rules: Sequence[Mapping[str, Any]], named: str) -> Mapping[str, Any] | None:
    """The first of some rules that lists a name."""
    return next((rule for rule in rules if named in rule["names"]), None)


def left_open(text: str) -> str:
    """Hint for a name that several frameworks could have; empty for any other name.

    >>> left_open("JAX"), left_open("megatron")
    ('name what runs on it: maxtext or paxml', '')
    """
    named = bare_name(text.strip())
    return next((str(rule["instead"]) for rule in name_rules()["open"] if named in rule["names"]), "")
