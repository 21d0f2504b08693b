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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steptime.options import ADAPTERS, AXES, KEYS, OPTIONS, SETTINGS, Count, Flag, Named, OneOf, Ratio, SomeOf, Switch
from steptime.schema import Field, Row, Table, anything, as_given, checked, flag, letters, text
from steptime.store.files import read_text

#: Largest file that is read as a description; a real one is a few kB, an estimate with details some MB.
MAX_FILE_BYTES: Final = 64 * 2**20
_NAME: Final = letters(4096)
_WORD: Final = letters(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The given values of a job and its plan."""

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
    """True if a TOML document describes a run (it names a model) and not a model."""
    return isinstance(document.get("model"), str) or isinstance(document.get("plan"), Mapping)


def parse_run(document: Mapping[str, Any], where: str) -> RunSpec:
    """Check a parsed document; ``where`` is the file that errors name and that paths are relative to.

    Raises:
        UserError: fields that are unknown, missing, of the wrong type or out of range; the message has all of them.
    """
    given = _ordered(checked(document, _RUN, where), _RUN)
    plan = given.pop("plan", {})
    model, cluster = given.pop("model"), given.pop("cluster", None)
    base = Path(where).parent
    return RunSpec(
        model=_relative(model, base),
        cluster=None if cluster is None else _relative(cluster, base),
        settings=given,
        plan=plan,
    )


def _words(given: object) -> str:
    """Check of names given as a text with commas, or as a list."""
    if isinstance(given, list) and all(isinstance(word, str) for word in given):
        return ",".join(given) or "none"
    return str(_WORD(given))


def _row(name: str, *, of_job: bool = False) -> Row:
    """Check of an option. The allowed names of a plan depend on its mode; the names of a job are fixed."""
    match OPTIONS[name].takes:
        case Count(low, high):
            return Field(low=low, high=high, whole=True)
        case Ratio(low, high, meaning):
            return as_given(Field(low=low, high=high, meaning=meaning))
        case Flag():
            return flag
        case Switch():
            return anything
        case SomeOf():
            return _words
        case OneOf(names) if of_job:
            return text(*names)
        case Named("cluster"):
            return _NAME
    return _WORD


_PLAN: Final = {name: _row(name) for name in KEYS}
_RUN: Final = Table(
    rows={
        "model": _NAME,
        **{name: _row(name, of_job=True) for name in SETTINGS},
        "lora": Table(rows={name.removeprefix("lora_"): _row(name) for name in ADAPTERS}),
        "plan": Table(rows={**_PLAN, "order": _WORD, "placement": Table(rows={a: _PLAN[a] for a in AXES})}),
    },
    required=("model",),
)


def _ordered(found: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The values of a table in the order of its rows, without empty tables."""
    values = {
        name: _ordered(found[name], row) if isinstance(row, Table) else found[name]
        for name, row in table.rows.items()
        if name in found
    }
    return {name: value for name, value in values.items() if value != {}}


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
