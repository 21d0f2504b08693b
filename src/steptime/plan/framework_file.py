"""Frameworks as files: one file each, a common file of the fit, and the files of a user.

``frameworks/NAME.toml`` has the habits of one framework (``[habits]``), its memory beyond live tensors (``[memory]``),
its names in published runs and for users (``[names]``), its switches (``[switches]``), the defaults of a fine-tuning
stack (``[defaults]``), and values fitted to its runs (``[fitted]``, ``[fitted_memory]``). Each table has the source of
its values. ``base`` names a framework whose values are the defaults of the file.

``frameworks.toml`` has the common results of one fit: common values, doubts, bands, factors of devices. A user's own
fit is such a file with a table for each framework, looked for in the user's directories
(:mod:`steptime.hardware.search_path`); a user's framework is a file in their folder ``frameworks``, or any file by its
path. Files of the package are checked when it is built, files of users when they are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError, UserError
from steptime.hardware.library import architecture_of
from steptime.hardware.load import MAX_BYTES
from steptime.hardware.search_path import is_path, named_files, user_roots
from steptime.options import choices_of
from steptime.plan.framework import (
    BUSY,
    COPIES,
    IDEAL,
    KERNELS,
    MODEL_AXES,
    PARAMETERS,
    SHARES,
    Framework,
    Habits,
    Spread,
    kernel_factor,
    widening,
)
from steptime.plan.memory_profile import PLAIN, MemoryProfile
from steptime.schema import Each, Field, Row, Table, anything, as_given, checked, flag, text
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text

FOLDER: Final = "frameworks"
NAME: Final = "frameworks.toml"
PACKAGED: Final = Path(__file__).with_name(NAME)
FILES: Final = Path(__file__).with_name(FOLDER)
CODE: Final = (
    Path(__file__),
    *(Path(__file__).with_name(f"{name}.py") for name in ("framework", "memory_profile")),
    Path(__file__).parents[1] / "schema.py",
)
"""Sources of the checked tables in addition to the files: fields, defaults for older files, checks."""
NOTHING: Final = 1e-12
"""Smallest seconds, share and doubt, which stand for zero: their logarithm must be finite."""
MANY: Final = 1e9
"""Number of sources that stands for unlimited."""
KINDS: Final = ("documented", "measured", "fitted", "assumed")
"""Basis of a value: documentation or code of the software, a measurement, a fit, or an assumption."""
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "gradient_dtype": ("run", *choices_of("gradient_dtype")),
    "context": choices_of("context"),
    "overlap": choices_of("overlap"),
    "kernel": tuple(KERNELS),
    "fused_copies": COPIES,
    "unfused_copies": COPIES,
    "axes": MODEL_AXES,
}
"""Words that a habit may have; `run` as ``gradient_dtype`` is the dtype of the run."""

# Parameters and counts: above what any fit gives, below what formulas overflow at. Doubts: a factor of twenty thousand.
_PARAMETER: Final = Field(low=NOTHING, high=1e9, example="1.0")
_SHARE: Final = Field(low=NOTHING, high=1 - 1e-6, example="0.3")
_DOUBT: Final = Field(low=NOTHING, high=10.0, example="0.2")
_END: Final = Field(low=-1e9, high=1e9, example="-1.0")
_BYTES: Final = Field(low=0, high=1e12, example="2.0")
_STAGE: Final = Field(low=0, high=3, whole=True, example="3")
_VALUES: Final = {name: _SHARE if name in SHARES else _PARAMETER for name in PARAMETERS}
_DOUBTS: Final = dict.fromkeys(PARAMETERS, _DOUBT)
_COUNT: Final = as_given(Field(low=0, high=MANY, example="3"))
"""A number of runs or sources."""
_WRITTEN: Final = "steptime calibrate frameworks writes the file"


def _whole(rows: Mapping[str, Row], **more: Any) -> Table:
    """A table of a fit in which all rows are required."""
    return Table(**{"rows": rows, "required": rows, "hint": _WRITTEN, **more})


def _in_order(band: Any) -> None:
    if band["low"] > band["high"]:
        raise UserError(f"low is {band['low']:g}, above high, {band['high']:g}")


_BAND: Final = _whole({"low": _END, "high": _END}, also=_in_order)
_MODEL: Final = dict.fromkeys(("noise", "experts", "unknown_device", "unmeasured_device"), _DOUBT)
_OPEN: Final = Each(row=Table(rows={"names": Each(row=text()), "instead": text()}, required=("names", "instead")))
_FIT_ROWS: Final[Mapping[str, Row]] = {
    "provenance": Table(rows={"source": text()}, named=anything, required=("source",)),
    "common": _whole(_VALUES),
    "doubts": _whole(_DOUBTS),
    "generic": _whole({"slower": _PARAMETER}),
    "band": _whole({"named": _BAND, "generic": _BAND, "model": _whole({**_MODEL, "unknown_sources": _COUNT})}),
    "framework": Table(
        named=_whole({"runs": _COUNT, **_VALUES, "doubts": _whole(_DOUBTS)}, required=(*PARAMETERS, "doubts"))
    ),
    "device": Table(
        named=_whole({**dict.fromkeys(BUSY, _PARAMETER), "doubt": _DOUBT, "sources": _COUNT}),
    ),
}
FIT: Final = _whole({**_FIT_ROWS, "open": _OPEN}, required=_FIT_ROWS)
"""A fit of all frameworks together; that of the package also has names that could mean several frameworks."""


def _row_of(name: str, default: Any) -> Row:
    """Row of a field of :class:`Habits` or :class:`MemoryProfile`."""
    if isinstance(default, bool):
        return flag
    if isinstance(default, frozenset):
        return Each(row=text(*WORDS[name]) if name in WORDS else _STAGE)
    if isinstance(default, int):
        return _STAGE
    return text(*WORDS.get(name, ())) if isinstance(default, str) or name in WORDS else _BYTES


_ORIGIN: Final[Mapping[str, Row]] = {"source": text(), "kind": text(*KINDS)}


def _described(rows: Mapping[str, Row]) -> Table:
    """A table of values that may each have a source."""
    source = Table(rows={"fields": Each(row=text(*rows)), **_ORIGIN}, required=("fields", "source"))
    return Table(rows={**rows, **_ORIGIN, "sources": Each(row=source)})


_CALLED: Final = Each(row=Table(rows={"names": Each(row=text()), "why": text()}, required=("names",)))


def _pattern(given: object) -> str:
    try:
        return str(re.compile(text()(given)).pattern)
    except re.error as error:
        raise UserError(f"is no regular expression: {error}") from None


_PATTERN: Final = Table(
    rows={
        "order": Field(low=-1e6, high=1e6, example="10"),
        "columns": Each(row=text("framework", "model", "source", "notes")),
        "match": _pattern,
        "why": text(),
        "source_key": text(),
    },
    required=("columns", "match"),
)
FRAMEWORK: Final = Table(
    rows={
        **dict.fromkeys(("base", "title", "notes"), text()),
        **_ORIGIN,
        "published": flag,
        "names": Table(
            rows={
                "source_keys": Each(row=text()),
                "today": _CALLED,
                "nearest": _CALLED,
                "patterns": Each(row=_PATTERN),
            }
        ),
        "habits": _described({f.name: _row_of(f.name, f.default) for f in fields(Habits)}),
        "memory": _described({f.name: _row_of(f.name, f.default) for f in fields(MemoryProfile) if f.name != "name"}),
        "switches": Table(
            rows={
                **dict.fromkeys(("graphs", "dispatchers"), Each(row=text())),
                "overlap": Each(row=text(*WORDS["overlap"])),
                **_ORIGIN,
            }
        ),
        "defaults": Table(
            rows={
                **dict.fromkeys(("optimizer", "weights", "lora_targets", "checkpointing", "padding"), text()),
                **dict.fromkeys(("paged", "packing"), flag),
                **dict.fromkeys(("micro_batch", "seq_len", "lora_rank"), _COUNT),
                "lora_dropout": Field(low=0, high=1, example="0.05"),
                **_ORIGIN,
            }
        ),
        "fitted": Table(rows={"runs": _COUNT, **_VALUES, "doubts": Table(rows=_DOUBTS), **_ORIGIN}),
        "fitted_memory": Table(rows={"slack": Field(low=0, high=1, example="0.05"), "deviation": _DOUBT}),
    }
)
"""A file of one framework. `published`: a name in published runs only, which ``--framework`` does not take."""
INHERITED: Final = ("source", "kind", "habits", "memory", "switches", "defaults", "fitted_memory")


def framework_path() -> Path:
    """The file of the fit in use."""
    return next((path for root in user_roots() if (path := root / NAME).is_file()), PACKAGED)


def framework_table() -> Mapping[str, Any]:
    """The fit in use: common values of all frameworks, and the values of each by name.

    Raises:
        InputFileError: it cannot be read or is not TOML.
        FieldError: a value is missing or not allowed.
    """
    path = framework_path()
    return _packaged()[NAME] if path == PACKAGED else _fit(str(path), read_text(path, MAX_BYTES, "a file of a fit"))


@lru_cache(maxsize=8)
def _fit(where: str, given: str) -> Mapping[str, Any]:
    """The checked tables of a text; cached by content, as a file may be edited within one tick of its clock."""
    tables = completed({"framework": {}, "device": {}, "generic": {"slower": 1.0}, **parse_toml(given, where)})
    found: Mapping[str, Any] = checked(tables, FIT, where)
    return found


@cache
def _packaged() -> Mapping[str, Any]:
    """The fit of the package under :data:`NAME`, and its frameworks under their names."""
    found: Mapping[str, Any] = compiled(*_texts().values(), *_code()) or _checked()
    return found


def _texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (PACKAGED, *sorted(FILES.glob("*.toml")))}


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def _checked() -> dict[str, Any]:
    texts = _texts()
    fit = dict(_fit(str(PACKAGED), texts.pop(PACKAGED)))
    own = {path.stem: checked(parse_toml(given, str(path)), FRAMEWORK, str(path)) for path, given in texts.items()}
    fit["framework"] = {name: each["fitted"] for name, each in own.items() if "fitted" in each}
    checked(fit, FIT, str(FILES))  # a fit gives each framework all values

    def whole(name: str) -> dict[str, Any]:
        each: dict[str, Any] = own[name]
        return _over(each, whole(each["base"])) if "base" in each else each

    return {NAME: fit, **{name: whole(name) for name in own}}


def framework_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """The files of the package as one checked document, with the source texts, for the build."""
    yield (*_texts().values(), *_code()), json.loads(json.dumps(_checked()))


def _over(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """A framework completed by the values of its base; names, title and fitted values are never inherited."""
    out = dict(own)
    for part in (part for part in INHERITED if part in base):
        above, below = own.get(part), base[part]
        if isinstance(above, Mapping):
            sources = [*above.get("sources", ()), *below.get("sources", ())]
            out[part] = {**below, **above, **({"sources": sources} if sources else {})}
        elif above is None:
            out[part] = below
    return out


def _own_file(name: str) -> Path | None:
    """A user's file of a framework, by its path, or by its name in a folder ``frameworks`` of their directories."""
    if is_path(name):
        return Path(name).expanduser()
    files = (os.path.join(root, FOLDER, f"{name}.toml") for root in user_roots())  # noqa: PTH118 - asked for each job
    return next((Path(file) for file in files if os.path.isfile(file)), None)  # noqa: PTH113


def framework_tables(name: str, seen: tuple[Path, ...] = ()) -> Mapping[str, Any]:
    """Tables of a framework, with those inherited from its base; empty for an unknown framework.

    Raises:
        InputFileError: a file of a user's cannot be read or is not TOML.
        FieldError: it has an unknown key or a value that is not allowed, or its bases form a circle.
        UnknownNameError: its base is no framework.
    """
    path = _own_file(name)
    if path is None:
        found: Mapping[str, Any] = _packaged().get(name, {})
        return found
    own = _own(str(path), read_text(path, MAX_BYTES, "a file of a framework"))
    base = own.get("base")
    if base is None:
        return own
    if path in seen:
        raise FieldError(str(path), "base", f"{base!r} leads back to this file")
    base = str(path.parent / base) if is_path(base) else base
    below = framework_tables(base, (*seen, path))
    if not below:
        raise UnknownNameError("framework", base, framework_names(), where=f"{path}: base")
    return {**_over(own, below), "base": base}


@lru_cache(maxsize=64)
def _own(where: str, given: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {
        "source": where,
        "kind": "assumed",
        **checked(parse_toml(given, where), FRAMEWORK, where),
    }
    return found


def source_of(tables: Mapping[str, Any], table: str, name: str) -> tuple[str, str]:
    """Source and kind of one value of a framework: its own, else those of its table, else those of the file."""
    part = tables.get(table, {})
    own = next(
        (entry for entry in part.get("sources", ()) if name in entry["fields"]), part if "source" in part else tables
    )
    return str(own.get("source", "")), str(own.get("kind", "assumed"))


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a table as the fields of a record."""
    values = {name: value for name, value in given.items() if name not in ("source", "kind", "sources")}
    return {name: frozenset(value) if isinstance(value, list) else value for name, value in values.items()}


def habits_of(name: str) -> Habits:
    """Habits of a framework; the defaults for one without an entry.

    >>> habits_of("torchtitan").zero_with(1), habits_of("torchtitan").zero_with(4), habits_of("ddp").zero_with(4)
    (3, 1, 0)
    """
    own = _values(framework_tables(name).get("habits", {}))
    if own.get("gradient_dtype") == "run":
        del own["gradient_dtype"]
    return Habits(**own)


def memory_profile_of(name: str) -> MemoryProfile:
    """Memory profile of a framework; the plain one for one without an entry.

    >>> memory_profile_of("torchtitan").weight_bytes, memory_profile_of("ideal").name
    (4.0, 'plain')
    """
    own = framework_tables(name).get("memory")
    return PLAIN if own is None else MemoryProfile(name=name, **_values(own))


def completed(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file of an older steptime completed by later parameters, at values without effect as when it was fitted."""
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


GENERIC = "generic"
"""Name of the unknown framework: the common values, slower by as much as frameworks outside a fit were, with the spread
between frameworks as doubt."""
SLOWED: Final = ("matrix", "attention", "vector")
"""Factors that are larger in an unknown framework (:func:`slowed`)."""
_JOINTS: Final = str.maketrans("", "", "-_. ")


def slowed(framework: Framework, slower: float) -> Framework:
    """The framework with all computation of the device slower by a factor.

    >>> slowed(Framework(vector=2.0), 1.1).vector, slowed(Framework(), 1.1).data_links
    (2.2, 1.0)
    """
    return replace(framework, **{name: getattr(framework, name) * slower for name in SLOWED})


def is_slowed(name: str, fitted: Collection[str]) -> bool:
    """True if no fit has runs of a framework: the unknown framework, or a stack without runs.

    Args:
        name: name of the framework.
        fitted: names of the frameworks with runs.

    >>> is_slowed("transformers", ["ddp"]), is_slowed("ddp", ["ddp"]), is_slowed("generic", ["generic"])
    (True, False, True)
    """
    return name == GENERIC or (name not in fitted and needs_no_fit(framework_tables(name)))


def framework_names() -> list[str]:
    """Names that :func:`load_framework` takes: of the fit in use, of files that need none, of the user's own files."""
    others = [name for name, tables in _packaged().items() if name != NAME and needs_no_fit(tables)]
    return ["ideal", GENERIC, *sorted({*framework_table()["framework"], *others, *named_files(FOLDER)})]


def needs_no_fit(tables: Mapping[str, Any]) -> bool:
    """True if a framework can be chosen without a fit: a fine-tuning stack, or one that no fit has."""
    return "defaults" in tables or (bool(tables) and "fitted" not in tables and not tables.get("published"))


def is_framework(name: str) -> bool:
    """True if a name, or the file at a path, is a framework.

    Raises:
        UserError: the file at the path cannot be used.
    """
    return bool(framework_tables(name)) if is_path(name) else name in framework_names()


def bare_name(name: str) -> str:
    """A name without case and separators; names that are then equal mean the same framework.

    >>> bare_name("Megatron_Core"), bare_name("megatron-core")
    ('megatroncore', 'megatroncore')
    """
    return name.lower().translate(_JOINTS)


def unknown_framework(name: str, instead: str = "") -> UnknownNameError:
    """The error for a name that is no framework, with a remark if a fit of the user is in use.

    Args:
        name: the given name.
        instead: hint for a name to give in its place; empty: the default hint.

    Raises:
        UserError: the name is a file of the user that cannot be used.
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
        measured: products on the device are timed by curves fitted to measurements; a device without runs and without
            curves is less certain.

    Raises:
        UnknownNameError: the framework is unknown.
    """
    if name == IDEAL.name:
        return IDEAL
    if not is_framework(name):
        raise unknown_framework(name)
    table = framework_table()
    common, own = table["common"], fitted_values(name)
    values = {p: float(own.get(p, common[p])) for p in PARAMETERS}
    known = table["device"].get(device, {})
    values |= {p: values[p] * float(known[p]) for p in BUSY if p in known and p in factors}
    values["attention"] *= kernel_factor(habits_of(name).kernel, architecture_of(device))
    spread = _spread(table, own, known, measured)
    found = replace(IDEAL, name=name, spread=spread, **values)
    return found if own else slowed(found, float(table["generic"]["slower"]))


def fitted_values(name: str) -> Mapping[str, Any]:
    """Values fitted to runs of a framework, with the doubts: from its own file over its base, else from the fit in use;
    empty if there are none."""
    if _own_file(name) is None:
        found: Mapping[str, Any] = framework_table()["framework"].get(name, {})
        return found
    tables = framework_tables(name)
    own, below = tables.get("fitted", {}), fitted_values(tables["base"]) if "base" in tables else {}
    doubts = {**below.get("doubts", {}), **own.get("doubts", {})}
    return {**below, **own, "runs": own.get("runs"), "doubts": doubts} if own or below else {}


def _spread(table: Mapping[str, Any], own: Mapping[str, Any], device: Mapping[str, Any], measured: bool) -> Spread:
    band, model = table["band"]["named" if own else "generic"], table["band"]["model"]
    doubts = {**table["doubts"], **own.get("doubts", {})}
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


def name_rules() -> Mapping[str, Any]:
    """Rules for the names of frameworks in published runs and for users, with the framework of each rule.

    ``source_key`` of a source -> framework; ``pattern``: regular expressions without case on named columns, in order;
    ``nearest``: names of software without runs of its own, by :func:`bare_name`; ``today``: current meaning of a name
    that in published rows means an older framework; ``open``: names that could mean several, with the hint to show.
    """
    own = named_files(FOLDER)
    return _rules((*_packaged(), *own)) if own else _packaged_rules()


@cache
def _packaged_rules() -> Mapping[str, Any]:
    return _rules(_packaged())


def _rules(names: Iterable[str]) -> Mapping[str, Any]:
    every = {name: framework_tables(name).get("names", {}) for name in names if name != NAME}
    found: dict[str, Any] = {
        kind: [{**rule, "framework": name} for name, own in every.items() for rule in own.get(key, ())]
        for kind, key in (("pattern", "patterns"), ("nearest", "nearest"), ("today", "today"))
    }
    found["pattern"].sort(key=lambda rule: rule.get("order", 0))
    found["source_key"] = {key: name for name, own in every.items() for key in own.get("source_keys", ())}
    return {**found, "open": _packaged()[NAME].get("open", ())}


def own_names() -> frozenset[str]:
    """Names that the rules give frameworks."""
    rules = name_rules()
    return frozenset([*rules["source_key"].values(), *(rule["framework"] for rule in rules["pattern"])])


def framework_called(text: str) -> str | None:
    """The framework with exactly this name, spelling or older name in the rules; None if there is none.

    >>> [framework_called(text) for text in ("NeMo", "Megatron-LM", "Megatron_DeepSpeed", "megatron", "megatrn")]
    ['megatron-core', 'megatron-core', 'megatron-deepspeed', 'megatron', None]
    """
    rule = _rule_called(text)
    return None if rule is None else str(rule["framework"])


def why_called(text: str) -> str:
    """Reason why a name of other software stands for a framework; empty if it needs none.

    >>> why_called("Megatron-LM"), why_called("torchtitan"), why_called("megatrn")
    ('Megatron-LM trains with Megatron-Core since 2023', '', '')
    """
    return str((_rule_called(text) or {}).get("why", ""))


def _rule_called(text: str) -> Mapping[str, Any] | None:
    """The rule that gives a framework this name."""
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
    """Hint for a name that could mean several frameworks; empty for any other name.

    >>> left_open("JAX"), left_open("megatron")
    ('name what runs on it: maxtext or paxml', '')
    """
    named = bare_name(text.strip())
    return next((str(rule["instead"]) for rule in name_rules()["open"] if named in rule["names"]), "")
