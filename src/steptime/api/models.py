"""Models from a name, a TOML file or a ``config.json``.

Captured modules as models of a job: their specification, mode and space.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from steptime.api.request import name_or_path as checked_name
from steptime.errors import InputFileError, PlanError, UnknownNameError, UserError, counted, first_few, shorten
from steptime.estimate.single import Setting
from steptime.model.captured import CapturedModel, is_target
from steptime.model.known import (
    ImportReport,
    catalogue_names,
    hub_model,
    in_catalogue,
    load_catalogue_model,
    read_model_toml,
)
from steptime.model.spec import ModelSpec
from steptime.plan.captured import CAPTURED
from steptime.plan.job import Precision
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.plan.space import CorrectedSpace
from steptime.registry import Registry
from steptime.search.modes import Mode

CAPTURED_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16"}
"""Training recipe -> element type in which a module is captured for it."""

MODULES: Final[Registry[Callable[..., Any]]] = Registry("reader of modules", "steptime.modules")
"""Functions that take a factory ``pkg.module:name`` and return: ``captured`` the captured module, ``element`` its type
of elements, ``sharded`` the best shardings of its training step."""
USUAL_DTYPE = "bf16"
"""Default training recipe."""
AS_MADE = "dtype was not given: the module is taken as it is made"
"""Note of every command that takes a factory's module without a dtype: ``plan``, ``fit``, ``shard`` and others."""


def element_for(recipe: str | None) -> str | None:
    """Element type in which a module is captured for a recipe; None: as it is made.

    >>> element_for("fp8"), element_for(None)
    ('bf16', None)
    """
    return None if recipe is None else CAPTURED_DTYPES.get(recipe, recipe)


def dtype_taken(model: str | CapturedModel, dtype: str | None, seq: int | None = None) -> str:
    """The given recipe; else that of the module's element type; :data:`USUAL_DTYPE` without a module or such a recipe.

    Args:
        model: a captured module, its factory, or a name or path.
        dtype: requested recipe; None: not given.
        seq: tokens of a sample, for a factory that takes them.
    """
    if dtype is not None:
        return dtype
    if isinstance(model, CapturedModel):
        element: str = model.dtype
    elif is_target(model) and not in_catalogue(model):
        element = MODULES["element"](model, seq=seq)
    else:
        return USUAL_DTYPE
    return next((recipe for recipe, each in CAPTURED_DTYPES.items() if each == element), USUAL_DTYPE)


def as_made(dtype: str) -> str:
    """Note on a module without a given element type.

    >>> as_made("fp32")
    'dtype was not given: the module is taken as it is made, in fp32 (--dtype bf16 converts it)'
    """
    other = "fp32" if dtype == USUAL_DTYPE else USUAL_DTYPE
    return f"{AS_MADE}, in {dtype} (--dtype {other} converts it)"


def summary_of(model: CapturedModel) -> ModelSpec:
    """The part of a specification that a job needs; the operators are in the captured model."""
    return ModelSpec(
        name=model.name,
        family="captured",
        source=model.source,
        layers=model.layers,
        hidden=1,
        heads=max(model.ranks),
        kv_heads=max(model.ranks),
        head_dim=1,
        ffn_hidden=1,
        gated_mlp=False,
        activation="captured",
        norm="layernorm",
        causal=True,
        seq_len=model.seq_len,
        vocab=0,
        position="none",
        tied_embeddings=any(one.tied for one in (*model.head, *model.tail)),
    )


def mode_of(setting: Setting, mode: Mode) -> Mode:
    """The mode for captured modules if the job has a captured module, else ``mode``."""
    model = setting.job.captured
    if model is None:
        return mode
    every = (RECOMPUTE_CODES["none"], RECOMPUTE_CODES["full"])
    space = CorrectedSpace(
        zero=(1, 2, 3), sp=(int(model.sequence_parallel),), recompute=every if model.repeats else every[:1]
    )
    return Mode(method=CAPTURED, space=space, auto={"1d": ()}, attentions=("fused",))


def check_captured(model: CapturedModel, precision: Precision, *, seq: int | None, adapter: Any, mode: Mode) -> None:
    """Refuse a setting that a captured module cannot have.

    Args:
        model: the captured module.
        precision: requested precision.
        seq: tokens of a sequence asked for; None: not given.
        adapter: requested adapters; None: none.
        mode: corrected or published.

    Raises:
        PlanError: the message names the setting, and an alternative.
    """
    if not mode.method.calibrated:
        raise PlanError(f"mode {mode.method.name} has no captured modules", hint="drop --mode")
    if adapter is not None:
        raise PlanError(f"{model.name} is captured as it is", hint="put the adapters into the module, and drop --lora")
    if seq not in (None, model.seq_len):
        raise PlanError(
            f"{model.name} was captured with {counted(model.seq_len, 'token')} a sample, not {seq}",
            hint="capture it with inputs of this length",
        )
    wanted = CAPTURED_DTYPES.get(precision.name)
    if wanted is None:
        raise PlanError(
            f"dtype {precision.name} is not modelled for captured modules", hint=f"one of {', '.join(CAPTURED_DTYPES)}"
        )
    if model.dtype != wanted:
        raise PlanError(
            f"{model.name} was captured in {model.dtype}, dtype {precision.name} needs {wanted}",
            hint=f"captured_model(..., dtype={wanted!r}), or another --dtype",
        )


def check_captured_choices(model: CapturedModel, chosen: Mapping[str, Any]) -> None:
    """Refuse choices that are fixed in the captured module.

    Raises:
        PlanError: the message names the choice.
    """
    for name in ("attention_dtype", "document_length"):
        if name in chosen:
            raise PlanError(
                f"{name} {chosen[name]}: {model.name} is captured with an attention of its own", hint="drop it"
            )


def check_strategy(setting: Setting, strategy: str) -> None:
    """Refuse strategies other than 1d for a captured module, because they need the meaning of operators.

    Raises:
        PlanError: the strategy is not 1d.
    """
    if setting.job.captured is not None and strategy not in ("auto", "1d"):
        raise PlanError(
            f"strategy {strategy}: a captured module has data, pipeline and 1D tensor parallelism only",
            hint="give --strategy 1d",
        )


MAX_NAMED_KEYS: Final = 6
"""Largest number of keys of a file that a note names."""
OF_MODULE: Final = (
    "for a torch module, pass steptime.captured_model(module, inputs_of_batch), or its factory: 'file.py:factory'"
)
"""Hint for an object that is no model."""


def load_model(name_or_path: str | os.PathLike[str]) -> ModelSpec:
    """The model of a name or file (:func:`read_model`)."""
    return read_model(name_or_path)[0]


def model_given(model: Any) -> str | CapturedModel:
    """A checked model: a captured module, or a name or path as text.

    Raises:
        FieldError: it is neither.
    """
    return model if isinstance(model, CapturedModel) else checked_name("model", model, OF_MODULE)


def load_workload(given: str | CapturedModel, *, dtype: str, seq: int | None) -> tuple[ModelSpec, CapturedModel | None]:
    """Specification of a model, and for a captured module its operators.

    Args:
        given: as for :func:`read_model`, a factory ``pkg.module:name`` of a torch module, or a captured module.
        dtype: training recipe for the capture of a factory's module.
        seq: tokens of a sample, for a factory that takes them.

    Raises:
        UserError: as :func:`read_model`, or the module cannot be captured.
    """
    if isinstance(given, CapturedModel):
        return summary_of(given), given
    if is_target(given) and not in_catalogue(given):
        captured: CapturedModel = MODULES["captured"](given, dtype=dtype, seq=seq)
        return summary_of(captured), captured
    return load_model(given), None


def read_model(name_or_path: str | os.PathLike[str]) -> tuple[ModelSpec, ImportReport]:
    """A model, and a report of the unused and the assumed values of its file.

    Args:
        name_or_path: a name of the catalogue (in any case), a ``.toml`` model file, a Hugging Face
            ``.json`` configuration, or a folder with a ``config.json``. A name of the catalogue comes first;
            write ``./name`` for a folder. Otherwise the hub name (ORG/NAME) of a catalogue model is accepted.

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
        raise InputFileError(
            given,
            "an ONNX file is recorded by steptime profile only",
            hint="to plan or fit it, write its PyTorch module as file.py:factory",
        )
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


def read_notes(model: str | CapturedModel, setting: Setting, seq: int | None, dtype: str | None) -> tuple[str, ...]:
    """Notes on how the model was read."""
    made = setting.job.captured is not None and isinstance(model, str) and dtype is None
    return (*import_notes(model, seq=seq), *((as_made(setting.job.precision.name),) if made else ()))


def import_notes(given: str | CapturedModel, *, seq: int | None) -> tuple[str, ...]:
    """Notes on the file of a model: parts left out, assumed values, facts of the checkpoint; empty without a file.

    Args:
        given: model for :func:`load_workload`, known to load.
        seq: requested tokens of a sequence; None: the model's own.
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
    said += [f"{first_few([shorten(k, 40) for k in keys], MAX_NAMED_KEYS)} {of}: {why}" for why, keys in kept.items()]
    said += [f"{key} {of}: {value}" for key, value in taken.items()]
    if spec.weight_bytes is not None:
        stored = f"{spec.weight_bytes:.3g} bytes per weight {of} are those of the checkpoint"
        said.append(f"{stored}: training holds weights in the dtype of the run")
    return tuple(said)


def which_of(file: str) -> str:
    """Hint for a Python file given without the name of a module's class or function."""
    return f"write {shorten(file)}:NAME of a module's class, or of a function that returns (module, inputs)"


def _ending(given: str) -> str:
    """Kind of file that a text names: ``.toml``, ``.json``, ``folder``, or ``file``; empty: no file."""
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
    """Error for an unknown model; an ORG/NAME of a model hub is compared by its NAME."""
    if "/" in given and not given.startswith((".", "/")):
        error = UnknownNameError("model", given.rsplit("/", 1)[1], catalogue_names())
        hint = f"nothing is downloaded: give its config.json, or a name of the catalogue ({error.hint})"
        return UserError(f"there is no model or folder {shorten(given)!r}", hint=hint)
    return UnknownNameError("model", given, catalogue_names())
