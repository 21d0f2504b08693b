"""A run as RUN.toml or options describe it, and the short way to it.

A document of which every key and every value is plainly right is taken as it is; any other goes through the gate of
:mod:`steptime.formats.run_toml`, which words what is wrong and takes longer to load than an estimate to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steptime.plan.keys import AXES, KEYS, MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ, Count, Ratio
from steptime.store.files import read_text

#: Largest file that is read as a description; a real one is a few kB, an estimate with details some MB.
MAX_FILE_BYTES: Final = 64 * 2**20
LONGEST_NAME: Final = 4096
LONGEST_WORD: Final = 64
JOB_COUNTS: Final[Mapping[str, Count]] = {
    "gpus": Count(1, MAX_DEVICES),
    "global_batch": Count(1, MAX_GLOBAL_BATCH),
    "seq": Count(1, MAX_SEQ),
}
"""Whole numbers of a job, with their ranges."""
JOB_WORDS: Final = ("dtype", "optimizer", "framework")
FIELDS: Final = ("model", "cluster", *JOB_COUNTS, "dtype", "optimizer", "strategy", "mode", "framework")
"""What a run may have without its plan and its adapters, in order."""
STRATEGIES: Final = ("1d", "2d", "context", "auto")
MODES: Final = ("corrected", "published")


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
        UserError: fields that are unknown, missing, of the wrong type or out of range.
    """
    if is_plain(document):
        given = {**_in_order(document, FIELDS), "plan": _in_order(document.get("plan", {}), (*KEYS, "placement"))}
    else:
        from steptime.formats.run_toml import checked_run

        given = checked_run(document, where)
    plan = given.pop("plan")
    if not plan.get("placement", True):
        del plan["placement"]
    model, cluster = given.pop("model"), given.pop("cluster", None)
    base = Path(where).parent
    return RunSpec(
        model=_relative(model, base),
        cluster=None if cluster is None else _relative(cluster, base),
        settings=given,
        plan=plan,
    )


def _in_order(table: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A table whose keys stand in the order of names, as the gate returns it."""
    return {
        name: _in_order(table[name], AXES) if name == "placement" else table[name] for name in names if name in table
    }


def is_plain(document: Mapping[str, Any]) -> bool:
    """Whether the gate would take every value of a document as it is, known without it.

    >>> is_plain({"model": "m", "gpus": 8, "plan": {"tp": 8}}), is_plain({"model": "m", "plan": {"overlap": ["dp"]}})
    (True, False)
    """
    plan = document.get("plan", {})
    if "model" not in document or not isinstance(plan, dict):
        return False
    return all(_plain_of_job(name, value) for name, value in document.items() if name != "plan") and all(
        _plain_of_plan(name, value) for name, value in plan.items()
    )


def _plain_of_job(name: str, value: object) -> bool:
    if name in JOB_COUNTS:
        return _counted(value, JOB_COUNTS[name])
    if name in ("model", "cluster"):
        return _text(value, LONGEST_NAME)
    if name in JOB_WORDS:
        return _text(value, LONGEST_WORD)
    return type(value) is str and value in {"strategy": STRATEGIES, "mode": MODES}.get(name, ())


def _plain_of_plan(name: str, value: object) -> bool:
    if name == "placement":
        return isinstance(value, dict) and all(axis in AXES and _counted(n, Count()) for axis, n in value.items())
    if name not in KEYS:
        return False
    key = KEYS[name]
    if isinstance(key, Count):
        return _counted(value, key)
    return type(value) is float and 0 < value <= key.high if isinstance(key, Ratio) else _text(value, LONGEST_WORD)


def _counted(value: object, of: Count) -> bool:
    return type(value) is int and of.low <= value <= of.high


def _text(value: object, longest: int) -> bool:
    return type(value) is str and 0 < len(value) <= longest


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
