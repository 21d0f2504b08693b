"""From a ``config.json`` to a model: parse, find the family, build, report what was not used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError, shorten, shown
from steptime.formats.huggingface.dense import DENSE, PARALLEL, VISION
from steptime.formats.huggingface.encoders import ENCODERS
from steptime.formats.huggingface.experts import EXPERTS
from steptime.formats.huggingface.fields import (
    CAPTURE,
    NOT_YET,
    REASONS,
    SAME_TYPE,
    THEIR_NAMES,
    UNKNOWN_KEY,
    WAYS,
    WITHOUT_COST,
    Family,
    Fields,
)
from steptime.formats.huggingface.hybrids import HYBRIDS
from steptime.formats.huggingface.linear import LINEAR
from steptime.formats.huggingface.towers import WITH_TOWERS
from steptime.model.known import MAX_FILE_BYTES, ImportReport
from steptime.model.spec import ModelSpec, check_spec
from steptime.store.files import read_text

#: A language model alone is read by the later tables where a family with a tower has the same name.
FAMILIES: dict[str, Family] = WITH_TOWERS | DENSE | PARALLEL | EXPERTS | VISION | HYBRIDS | LINEAR | ENCODERS

_OPEN_LIMITS = ("time_step_limit", "mamba_dt_limit")
_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForImageClassification", "ForConditionalGeneration", "Model")
_INNER = ("text_config", "vision_config")
#: Keys that stand next to a nested configuration but belong to it.
_INHERITED = ("quantization_config", "tie_word_embeddings")


def read_huggingface(path: str | os.PathLike[str]) -> tuple[ModelSpec, ImportReport]:
    """A model from a Hugging Face ``config.json``, or from the folder that has one.

    The family is found by ``model_type``, else by ``architectures``; a wrapper is read through its ``text_config``
    (CLIP through its ``vision_config``). A key that is missing takes the default of the family's configuration class.

    Returns:
        The model, and a report: ignored keys with the reason, assumed values.

    Raises:
        InputFileError: the file cannot be read or is no JSON object.
        UnknownNameError: no family has this ``model_type``.
        FieldError: a field is missing, of the wrong type, out of range, or contradicts another.
        UserError: the model is of a kind that is known but not supported.
    """
    folder = _is_folder(path)
    file = Path(path) / "config.json" if folder else Path(path)
    where = os.fspath(file)
    raw = _parse(where, read_text(file, MAX_FILE_BYTES, "a model file"))
    name = Path(where).parent.name if file.name == "config.json" else file.stem
    return _read(raw, where, name or "model")


def _is_folder(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text, parse_constant=_Constant)
        constant = next(_constants(raw), None)
    except RecursionError:
        raise InputFileError(where, "is nested too deeply") from None
    except ValueError as error:
        raise InputFileError(where, f"is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputFileError(where, f"holds a {type(raw).__name__}, not a JSON object", hint="give a config.json")
    if constant is not None:
        raise InputFileError(where, f"has {constant}, which is no JSON number")
    return raw


class _Constant(str):
    """NaN or Infinity as a file has it."""


def _constants(value: Any) -> Iterator[_Constant]:
    """Constants in a document, except in the limits of step sizes, which state-space models leave open."""
    if isinstance(value, _Constant):
        yield value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if key not in _OPEN_LIMITS:
            yield from _constants(part)


def _read(raw: Mapping[str, Any], where: str, name: str) -> tuple[ModelSpec, ImportReport]:
    outer_type = _model_type(raw, where)
    inner_key = _inner_key(raw, outer_type, where)
    ignored: dict[str, str] = {}
    if inner_key is None:
        model_type, config, prefix = outer_type, dict(raw), ""
    else:
        config, prefix = dict(raw[inner_key]), f"{inner_key}."
        model_type = "clip_vision_model" if outer_type == "clip" else outer_type
        if "model_type" in config:
            model_type = _model_type(config, where, prefix)
        taken = [key for key in _INHERITED if key in raw and key not in config]
        config |= {key: raw[key] for key in taken}
        ignored = {key: _reason(key, outer_type) for key in raw if key not in (inner_key, *taken)}
    if model_type is None:
        raise FieldError(where, f"{prefix}model_type", "is missing", hint=f"supported: {_supported()}")
    seen = model_type in WITH_TOWERS and bool(raw.get("vision_config"))
    family = WITH_TOWERS[model_type] if seen else _family(model_type, where, prefix)
    f = Fields(config, where=where, prefix=prefix, defaults=family.defaults, aliases=family.aliases)
    values = family.build(f)
    known = model_type if seen else SAME_TYPE.get(model_type, model_type)
    spec = ModelSpec(name=name, family=known, source=f"config {where}", **values)
    ignored |= {prefix + key: _reason(key.rpartition(".")[2], model_type) for key in f.unused()}
    names = {ours: prefix + theirs for ours, theirs in THEIR_NAMES.items()}
    given = {**raw, **{prefix + key: value for key, value in config.items()}}
    # an unknown key that is off does not change the cost
    telling = f.chosen | {
        key
        for key, reason in ignored.items()
        if reason not in WITHOUT_COST and (reason != UNKNOWN_KEY or given.get(key, True))
    }
    report = ImportReport(source=where, ignored=ignored, assumed=dict(f.assumed), telling=frozenset(telling))
    return check_spec(spec, where, names), report


def _reason(key: str, model_type: str | None) -> str:
    if key == "text_config" and model_type == "clip":
        return "only the image tower is read"
    return REASONS.get(key, UNKNOWN_KEY)


def _model_type(raw: Mapping[str, Any], where: str, prefix: str = "") -> str | None:
    """``model_type``, or the family whose name an entry of ``architectures`` begins with."""
    given = raw.get("model_type")
    if given is not None and not isinstance(given, str):
        raise FieldError(where, prefix + "model_type", f"is {shown(given, 40)}", hint="allowed: a text")
    if given:
        return given
    names = raw.get("architectures")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FieldError(where, prefix + "architectures", f"is {shown(names, 40)}", hint="allowed: a list of texts")
    known = {key.replace("_", "").lower(): key for key in (*FAMILIES, *NOT_YET)}
    for name in names:
        for ending in ("", *_CLASS_ENDINGS):
            stem = name.removesuffix(ending).lower()
            if stem in known:
                return known[stem]
    return shorten(names[0]) if names else None


def _inner_key(raw: Mapping[str, Any], model_type: str | None, where: str) -> str | None:
    """The nested configuration to read, if this one is a wrapper."""
    for key in _INNER[::-1] if model_type == "clip" else _INNER[:1]:
        if (
            (model_type in WITH_TOWERS and raw.get("vision_config"))
            or raw.get(key) is None
            or (model_type in FAMILIES and "hidden_size" in raw)
        ):
            continue
        if not isinstance(raw[key], dict):
            raise FieldError(where, key, f"is {shown(raw[key], 40)}", hint="allowed: an object")
        return key
    return None


def _supported() -> str:
    alike = {kind for kind in SAME_TYPE if kind.islower() and not kind.endswith("_text")}
    return ", ".join(sorted({*FAMILIES, *alike}))


def _family(model_type: str, where: str, prefix: str) -> Family:
    model_type = SAME_TYPE.get(model_type, model_type)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in NOT_YET:
        kind = NOT_YET[model_type]
        message = f"{where}: {prefix}model_type: {model_type!r} is {kind}, which is not supported yet"
        raise UserError(message, hint=f"{WAYS.get(kind, CAPTURE)}\n  supported: {_supported()}")
    hint = f"{CAPTURE}\n  supported: {_supported()}"
    raise UnknownNameError("supported model_type", model_type, {*FAMILIES, *SAME_TYPE}, where=where, always=hint)
