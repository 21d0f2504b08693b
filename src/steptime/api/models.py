"""A model from whatever the user gives: a name, a TOML file, a ``config.json``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from steptime.api.captured import summary_of
from steptime.api.values import name_or_path as checked_name
from steptime.errors import InputFileError, UnknownNameError, UserError, first_few, shorten
from steptime.formats.record import ImportReport
from steptime.model.captured import CapturedModel
from steptime.model.library import catalogue_names, hub_model, in_catalogue, load_catalogue_model, read_model_toml
from steptime.model.spec import ModelSpec
from steptime.model.target import is_target
from steptime.registry import loaded

KEYS: Final = 6
"""Keys of a file that a note names."""
OF_MODULE: Final = (
    "of a torch module make a workload: steptime.captured_model(module, inputs_of_batch), "
    "or name the factory that makes it: 'file.py:factory'"
)
"""What to give in place of an object that is no model."""


def load_model(name_or_path: str | os.PathLike[str]) -> ModelSpec:
    """The model of that name or file; see :func:`read_model`."""
    return read_model(name_or_path)[0]


def model_given(model: Any) -> str | CapturedModel:
    """A model as the user gives it: a captured module, or a name or path as text.

    Raises:
        FieldError: it is neither.
    """
    return model if isinstance(model, CapturedModel) else checked_name("model", model, OF_MODULE)


def load_workload(given: str | CapturedModel, *, dtype: str, seq: int | None) -> tuple[ModelSpec, CapturedModel | None]:
    """Specification of a model; of a captured module its summary, and the module's operators.

    Args:
        given: as for :func:`read_model`, a factory ``pkg.module:name`` of a torch module, or a captured module.
        dtype: training recipe for which a factory's module is captured.
        seq: tokens of a sample, for a factory that takes them.

    Raises:
        UserError: as :func:`read_model`, or the module cannot be captured.
    """
    if isinstance(given, CapturedModel):
        return summary_of(given), given
    if is_target(given) and not in_catalogue(given):
        captured: CapturedModel = loaded("steptime.captured.target:captured_target")(given, dtype, seq)
        return summary_of(captured), captured
    return load_model(given), None


def read_model(name_or_path: str | os.PathLike[str]) -> tuple[ModelSpec, ImportReport]:
    """A model, and what its file said that was not used or did not say that was assumed.

    Args:
        name_or_path: a name of the catalogue (in any case), a ``.toml`` model file, a Hugging Face
            ``.json`` configuration, or a folder with a ``config.json``. A name of the catalogue comes first;
            write ``./name`` for a folder. What is none of these may be the ORG/NAME that a model of the
            catalogue has on the hub.

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
        from steptime.formats.huggingface import read_huggingface

        return read_huggingface(given)
    if ending == "file" and given.lower().endswith(".onnx"):
        raise InputFileError(given, "an ONNX file is recorded by steptime profile only",
                             hint="to plan or fit it, write its PyTorch module as file.py:factory")  # fmt: skip
    if ending == "file" and given.lower().endswith(".py"):
        raise InputFileError(given, "does not say which module of it", hint=which_of(given))
    if ending == "file":
        raise InputFileError(given, "is neither a .toml nor a .json file", hint="rename it, or give another file")
    if is_target(given):
        hint = "give --cluster to plan or estimate it, or use steptime profile"
        raise UserError(f"{shorten(given)!r}: a torch module has no specification", hint=hint)
    known = hub_model(given)
    if known is not None:
        return load_catalogue_model(known), ImportReport(source="catalogue")
    raise _unknown(given)


def import_notes(given: str | CapturedModel, *, seq: int | None) -> tuple[str, ...]:
    """What a model's file left out, left open, or says of its checkpoint alone; empty for a model without a file.

    Args:
        given: as for :func:`load_workload`; it can be loaded.
        seq: tokens of a sequence as asked for; None: the model's own.
    """
    if isinstance(given, CapturedModel) or _ending(given) not in (".json", ".toml", "folder") or in_catalogue(given):
        return ()
    spec, report = read_model(given)
    kept: dict[str, list[str]] = {}
    for key, reason in report.ignored.items():
        if key in report.telling:
            kept.setdefault(reason, []).append(key)
    taken = {key: value for key, value in report.assumed.items() if key in report.telling}
    length = [taken.pop(key) for key in list(taken) if key.rpartition(".")[2] == "seq_len"]
    of = f"of {Path(report.source).name}"
    said = [
        f"seq was not given: {n} was taken {why}" for n, _, why in (text.partition(" ") for text in length) if not seq
    ]
    said += [f"{first_few([shorten(key, 40) for key in keys], KEYS)} {of}: {reason}" for reason, keys in kept.items()]
    said += [f"{key} {of}: {value}" for key, value in taken.items()]
    if spec.weight_bytes is not None:
        stored = f"{spec.weight_bytes:.3g} bytes per weight {of} are those of the checkpoint"
        said.append(f"{stored}: training holds weights in the dtype of the run")
    return tuple(said)


def which_of(file: str) -> str:
    """What to write instead of the name of a Python file."""
    return f"write {shorten(file)}:NAME of a module's class, or of a function that returns (module, inputs)"


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
