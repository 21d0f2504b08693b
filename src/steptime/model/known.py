"""Models by name from the catalogue, and where a model file of a user's is read.

What the catalogue has was checked when the package was built (:mod:`steptime.store.compiled`); only a file that is new
or edited passes the gate of :mod:`steptime.model.library`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError
from steptime.model.spec import Experts, LatentAttention, LayerKind, LayerOperator, ModelSpec, Vision
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Report of an import: keys of the file that were not used, and values that were assumed."""

    source: str
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Key (with its path, ``vision_config``) -> why it was not used."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Key that the file lacks -> the value taken, and why."""
    telling: frozenset[str] = frozenset()
    """Keys of both that matter to users of the model's numbers: parts left out, unknown keys, choices between several
    readings; not keys without a cost, nor defaults of the family."""


MAX_FILE_BYTES: Final = 16 * 2**20
"""Larger files are no descriptions of a model."""
_HYPHEN: Final = re.compile(r"(?<=[a-z])-(?=v?\d)")
_TRAINED: Final = re.compile(r"(-(instruct|chat|base|hf|it|pt))+(?=v?[\d.]*$)")
FOLDER: Final = Path(__file__).parent / "catalogue"
CODE: Final = (
    *(Path(__file__).with_name(f"{name}.py") for name in ("library", "spec", "kinds")),
    Path(__file__).parents[1] / "schema.py",
)
"""What a specification follows from in addition to its table: defaults and checks."""


def _operator(values: Mapping[str, Any]) -> LayerOperator:
    return LayerOperator(**{**values, "sizes": tuple((name, size) for name, size in values["sizes"])})


def _kind(values: Mapping[str, Any]) -> LayerKind:
    operators = tuple(map(_operator, values["operators"]))
    return LayerKind(**{**values, "block": _rebuilt(values["block"]), "operators": operators})


PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "latent": lambda values: LatentAttention(**values),
    "experts": lambda values: Experts(**values),
    "vision": lambda values: Vision(**values),
    "kinds": lambda values: tuple(map(_kind, values)),
    "pattern": tuple,
    "stem": lambda values: tuple(map(_operator, values)),
}
"""Fields of a specification that are records themselves, or lists of them -> from a document to these."""


@cache
def _catalogue() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Key of a name -> the name as written and its table, over all files of the catalogue."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        for name, table in parse_toml(file.read_text(encoding="utf-8"), str(file)).items():
            found[_key(name)] = (name, table)
    return MappingProxyType(found)


def _key(name: str) -> str:
    """Names are equal regardless of case, of ``-`` or ``_``, and of a hyphen between a word and its number.

    >>> _key("Llama-3.1_8B"), _key("llama3.1-8b"), _key("DeepSeek-V3"), _key("llama-3-18b")
    ('llama3.1-8b', 'llama3.1-8b', 'deepseekv3', 'llama3-18b')
    """
    return _HYPHEN.sub("", name.strip().lower().replace("_", "-"))


def _hub_key(name: str) -> str:
    """Key of a name (:func:`_key`) without the words of fine-tuned checkpoints, whose layers are the same.

    >>> _hub_key("Qwen/Qwen3-8B-Base"), _hub_key("meta-llama/Llama-2-7b-chat-hf")
    ('qwen/qwen3-8b', 'meta-llama/llama2-7b')
    """
    return _TRAINED.sub("", _key(name))


def catalogue_names() -> list[str]:
    """All names of the catalogue, sorted.

    >>> "llama2-7b" in catalogue_names()
    True
    """
    return sorted(name for name, _ in _catalogue().values())


def in_catalogue(name: str) -> bool:
    """True if the catalogue has a model of this name.

    >>> in_catalogue("GPT3_1t")
    True
    """
    return _key(name) in _catalogue()


@cache
def _hub_names() -> Mapping[str, str]:
    """Key of ORG/NAME of a model hub -> name in the catalogue, from where each entry says its figures are from."""
    found = {}
    for name, table in _catalogue().values():
        source = re.search(r"config\.json of ([\w.-]+/[\w.-]+)", str(table.get("source", "")))
        if source:
            found[_hub_key(source[1])] = name
    return MappingProxyType(found)


def hub_model(name: str) -> str | None:
    """The model of the catalogue that a model hub has under this name; None: none.

    >>> hub_model("meta-llama/Llama-2-7b-hf"), hub_model("meta-llama/Llama-2-7b-chat-hf"), hub_model("llama2-7b")
    ('llama2-7b', 'llama2-7b', None)
    """
    return _hub_names().get(_hub_key(name))


def load_catalogue_model(name: str) -> ModelSpec:
    """A model of the catalogue; neither case nor ``-`` against ``_`` matters, nor a hyphen before a number.

    Raises:
        UnknownNameError: the name is unknown; the message has the nearest names.

    >>> load_catalogue_model("GPT3_1T").hidden
    25600
    """
    if _key(name) not in _catalogue():
        raise UnknownNameError("model", name, catalogue_names())
    written, table = _catalogue()[_key(name)]
    values = compiled(*_texts(written, table))
    return _checked(written, table) if values is None else _rebuilt(values)


def _checked(written: str, table: Mapping[str, Any]) -> ModelSpec:
    from steptime.model.library import spec_from_table

    return spec_from_table(table, where=f"catalogue model {written}", name=written, source="catalogue")


def _rebuilt(values: Mapping[str, Any]) -> ModelSpec:
    parts = {name: None if values[name] is None else made(values[name]) for name, made in PARTS.items()}
    return ModelSpec(**{**values, **parts})


def _texts(written: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    return json.dumps([written, table], default=str), *_code()


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def catalogue_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Specifications of the catalogue as documents, with the texts that they follow from, for the build."""
    for written, table in _catalogue().values():
        spec = _checked(written, table)
        if _rebuilt(values := json.loads(json.dumps(asdict(spec)))) == spec:
            yield _texts(written, table), values


def read_model_toml(path: str | os.PathLike[str]) -> ModelSpec:
    """A model from a TOML file with the field names of :class:`ModelSpec`.

    Raises:
        InputFileError: the file cannot be read or is no TOML.
        FieldError: a field is unknown, missing, of the wrong type, out of range, or contradicts another.
    """
    from steptime.model.library import spec_from_table

    where = os.fspath(path)
    table = parse_toml(read_text(path, MAX_FILE_BYTES, "a model file"), where)
    if "layers" not in table and {"levels", "device", "memory", "matrix"} & set(table):
        raise FieldError(
            where, "layers", "this file describes a cluster or a device, not a model", hint="give it with --cluster"
        )
    return spec_from_table(table, where=where, name=Path(path).stem, source=f"file {where}")
