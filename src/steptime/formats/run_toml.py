"""Read RUN.toml: one training job and one plan for it.

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

A model or cluster that is a path is relative to the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from steptime.formats.fields import as_user_error
from steptime.plan.keys import AXES, KEYS, MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ, SEVERAL, Count, Ratio


def _joined(given: Any) -> Any:
    """The text that means the same as a list of words; everything else as it is."""
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        return given
    return ",".join(given) or "none"


Name = Annotated[str, Field(min_length=1, max_length=4096)]
Word = Annotated[str, Field(min_length=1, max_length=64)]
Words = Annotated[Word, BeforeValidator(_joined)]
"""Words joined by commas, as options have them; or a list of words."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _value(name: str) -> Any:
    """Type of a key of a plan."""
    key = KEYS[name]
    if isinstance(key, Count):
        return Annotated[int, Field(ge=key.low, le=key.high)]
    if isinstance(key, Ratio):
        return Annotated[float, Field(gt=0, le=key.high)]
    if name in SEVERAL:
        return Words
    return Any if name == "sp" else Word


def _table(title: str, **types: Any) -> Any:
    fields: Any = {name: (kind | None, None) for name, kind in types.items()}
    return create_model(title, __base__=_Table, **fields)


_Placement = _table("_Placement", **{axis: _value(axis) for axis in AXES})
_Plan = _table("_Plan", **{name: _value(name) for name in KEYS}, placement=_Placement)


class _Lora(_Table):
    rank: Annotated[int, Field(ge=1, le=10**5)] | None = None
    targets: Word | None = None
    qlora: bool | None = None


class _Run(_Table):
    model: Name
    cluster: Name | None = None
    gpus: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    global_batch: Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH)] | None = None
    seq: Annotated[int, Field(ge=1, le=MAX_SEQ)] | None = None
    dtype: Word | None = None
    optimizer: Word | None = None
    strategy: Literal["1d", "2d", "context", "auto"] | None = None
    mode: Literal["corrected", "published"] | None = None
    framework: Word | None = None
    lora: _Lora | None = None
    plan: _Plan = Field(default_factory=_Plan)  # type: ignore[valid-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A job and its plan, as far as they are given."""

    model: str
    cluster: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """``gpus global_batch seq dtype optimizer strategy mode framework lora``, only those that are given."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Degrees and choices of the plan, only those that are given; ``placement`` is a mapping."""


def parse_run(document: Mapping[str, Any], where: str) -> RunSpec:
    """Check a parsed document; ``where`` is the file that errors name and that paths are relative to."""
    try:
        run = _Run.model_validate(document)
    except ValidationError as error:
        raise as_user_error(error, where, _Run) from None
    given = run.model_dump(exclude_none=True)
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


def is_run_document(document: Mapping[str, Any]) -> bool:
    """Whether a TOML document describes a run (it names a model) and not a model itself."""
    return isinstance(document.get("model"), str) or isinstance(document.get("plan"), Mapping)


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
