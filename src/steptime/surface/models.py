"""A model from whatever the user gives: a name, a TOML file, a ``config.json``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from steptime.errors import InputFileError, UnknownNameError, UserError, shorten
from steptime.surface.formats.record import ImportReport
from steptime.workload.library import catalogue_names, in_catalogue, load_catalogue_model, read_model_toml
from steptime.workload.spec import ModelSpec

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_model(name_or_path: str | os.PathLike[str]) -> ModelSpec:
    """The model of that name or file; see :func:`read_model`."""
    return read_model(name_or_path)[0]


def read_model(name_or_path: str | os.PathLike[str]) -> tuple[ModelSpec, ImportReport]:
    """A model, and what its file said that was not used or did not say that was assumed.

    Args:
        name_or_path: a name of the catalogue (in any case), a ``.toml`` model file, a Hugging Face
            ``.json`` configuration, or a folder with a ``config.json``. A name of the catalogue comes first;
            write ``./name`` for a folder.

    Raises:
        UnknownNameError: neither a name of the catalogue nor a file.
        UserError: the file is wrong (see :func:`read_model_toml`, :func:`read_huggingface`), or a
            factory ``pkg.module:name`` was given.
    """
    given = os.fspath(name_or_path)
    if not given.strip():
        raise UserError("the model is an empty text", hint="give a name of the catalogue, a .toml, or a config.json")
    if in_catalogue(given):
        return load_catalogue_model(given), ImportReport(source="catalogue")
    ending = _ending(given)
    if ending == ".toml":
        return read_model_toml(given), ImportReport(source=given)
    if ending in (".json", "folder"):
        from steptime.surface.formats.huggingface import read_huggingface

        return read_huggingface(given)
    if ending == "file":
        raise InputFileError(given, "is neither a .toml nor a .json file", hint="rename it, or give another file")
    if _FACTORY.fullmatch(given):
        hint = "give a name of the catalogue, a .toml, or a Hugging Face config.json"
        raise UserError(f"{shorten(given)!r}: capturing a torch module is not available in this version", hint=hint)
    raise _unknown(given)


def _ending(given: str) -> str:
    """What the text points to: ``.toml``, ``.json``, ``folder``, another ``file``, or nothing."""
    try:
        path = Path(given)
        if path.is_dir():
            return "folder"
        if path.suffix.lower() in (".toml", ".json"):
            return path.suffix.lower()
        return "file" if path.exists() else ""
    except (OSError, ValueError):
        return ""


def _unknown(given: str) -> UserError:
    """Unknown names; an ORG/NAME of a model hub is compared by its NAME."""
    if "/" in given and not given.startswith((".", "/")):
        error = UnknownNameError("model", given.rsplit("/", 1)[1], catalogue_names())
        hint = f"nothing is downloaded: give its config.json, or a name of the catalogue ({error.hint})"
        return UserError(f"there is no model or folder {shorten(given)!r}", hint=hint)
    return UnknownNameError("model", given, catalogue_names())
