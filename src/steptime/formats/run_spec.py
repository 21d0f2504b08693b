"""Check RUN.toml: one training job and one plan for it.

::

    model = "gpt3-1t"                  # catalogue name, config.json, TOML, or pkg.module:factory
    cluster = "published-b200-nvs8"
    gpus = 16384
    global_batch = 4096                # sequences

    [plan]
    tp = 8
    pp = 64

    [plan.placement]                   # devices of an axis inside the fast domain
    tp = 8

A model or cluster that is a path is relative to the file. Keys and ranges: :data:`steptime.options.OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UserError, did_you_mean, shorten, shown
from steptime.options import (
    ADAPTERS,
    AXES,
    KEYS,
    OPTIONS,
    SETTINGS,
    Count,
    Flag,
    Named,
    OneOf,
    Ratio,
    SomeOf,
    Switch,
    Takes,
    Text,
)
from steptime.store.files import read_text

#: Largest file that is read as a description; a real one is a few kB, an estimate with details some MB.
MAX_FILE_BYTES: Final = 64 * 2**20
LONGEST_NAME: Final = 4096
LONGEST_WORD: Final = 64
MAX_PROBLEMS: Final = 10
"""Problems of one file that a message lists at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A job and its plan, as far as they are given."""

    model: str
    cluster: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """``gpus global_batch seq dtype optimizer strategy mode framework lora``, only those that are given."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Degrees and choices of the plan, only those that are given; ``placement`` is a mapping."""


def read_description(path: str) -> str:
    """Text of a file that describes a run or an estimate.

    Raises:
        InputFileError: as :func:`steptime.store.files.read_text`.
    """
    return read_text(path, MAX_FILE_BYTES, "a description of a run")


def is_run_document(document: Mapping[str, Any]) -> bool:
    """Whether a TOML document describes a run (it names a model) and not a model itself."""
    return isinstance(document.get("model"), str) or isinstance(document.get("plan"), Mapping)


def parse_run(document: Mapping[str, Any], where: str) -> RunSpec:
    """Check a parsed document; ``where`` is the file that errors name and that paths are relative to.

    Raises:
        UserError: fields that are unknown, missing, of the wrong type or out of range; the message has all of them.
    """
    problems: list[tuple[str, str, str | None]] = []
    given = _checked(document, "", problems)
    if document.get("model") is None:
        problems.append(("model", "missing", None))
    if problems:
        raise _together(problems, where)
    plan = given.pop("plan", {})
    model, cluster = given.pop("model"), given.pop("cluster", None)
    base = Path(where).parent
    return RunSpec(
        model=_relative(model, base),
        cluster=None if cluster is None else _relative(cluster, base),
        settings=given,
        plan=plan,
    )


#: Tables in a document -> what each key of theirs takes.
_TABLES: Final[Mapping[str, Mapping[str, Takes]]] = {
    "": {"model": Named("model"), **{name: OPTIONS[name].takes for name in SETTINGS}},
    "lora": {name.removeprefix("lora_"): OPTIONS[name].takes for name in ADAPTERS},
    "plan": {**{name: OPTIONS[name].takes for name in KEYS}, "order": Text()},
    "plan.placement": {axis: OPTIONS[axis].takes for axis in AXES},
}


def _checked(given: Mapping[str, Any], path: str, problems: list[tuple[str, str, str | None]]) -> dict[str, Any]:
    """The values of a table in the order of its keys; what is wrong with it joins the problems: field, words, hint."""
    takes = _TABLES[path]
    out: dict[str, Any] = {}
    inside = {name.rpartition(".")[2]: name for name in _TABLES if name and name.rpartition(".")[0] == path}
    for key in given:
        if key not in takes and key not in inside:
            problems.append((f"{path}.{key}".lstrip("."), "unknown key", did_you_mean(str(key), [*takes, *inside])))
    for key in (*takes, *inside):
        value, field = given.get(key), f"{path}.{key}".lstrip(".")
        if value is None:
            continue
        if key in inside:
            if isinstance(value, Mapping):
                out[key] = _checked(value, inside[key], problems)
            else:
                problems.append((field, f"{shown(value, 60)} is not a table", None))
        elif words := _wrong(takes[key], value, of_job=not path):
            problems.append((field, f"{shown(value, 60)} {words}", None))
        else:
            several = isinstance(value, list) and isinstance(takes[key], SomeOf)
            out[key] = (",".join(value) or "none") if several else value
    return {key: value for key, value in out.items() if value != {} or key == "plan"}


def _wrong(takes: Takes, value: Any, *, of_job: bool) -> str:
    """What is wrong with a value, in words; empty: nothing that this file can know.

    Which names a plan may have follows from its mode; those of the job are closed.
    """
    match takes:
        case Count(low, high):
            right = type(value) is int and low <= value <= high
            return "" if right else f"is not a whole number from {low} to {high}"
        case Ratio(_, high, meaning):
            right = type(value) in (int, float) and 0 < value <= high
            return "" if right else f"is not a number above 0 and at most {high:g} ({meaning})"
        case Flag():
            return "" if type(value) is bool else "is neither true nor false"
        case Switch():
            return ""
        case SomeOf() if type(value) is list and all(type(word) is str for word in value):
            return ""
        case OneOf(names) if of_job and type(value) is str and value not in names:
            return f"is not one of {', '.join(names)}"
    longest = LONGEST_NAME if isinstance(takes, Named) and takes.kind in ("model", "cluster") else LONGEST_WORD
    return "" if type(value) is str and 0 < len(value) <= longest else f"is not a text of 1 to {longest} letters"


def _together(problems: Sequence[tuple[str, str, str | None]], where: str) -> UserError:
    """All problems of one file as one error; each names its field."""
    if len(problems) == 1:
        field, words, hint = problems[0]
        return FieldError(where, shorten(field), words, hint=hint)
    lines = [f"{where}: {len(problems)} fields are wrong"]
    lines += [f"  {shorten(field)}: {words}" + (f" ({hint})" if hint else "") for field, words, hint in problems]
    if len(problems) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS + 1 :] = [f"  and {len(problems) - MAX_PROBLEMS} more"]
    return UserError("\n".join(lines))


def _relative(value: str, base: Path) -> str:
    """A path in the file is relative to the file; a catalogue name stays as it is."""
    is_file = value.lower().endswith((".toml", ".json"))
    looks_like_path = is_file or "/" in value or "\\" in value
    if not looks_like_path:
        return value
    candidate = base / value
    try:
        exists = candidate.exists()
    except (OSError, ValueError):
        exists = False
    return str(candidate) if exists or is_file else value
