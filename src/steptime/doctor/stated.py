"""Job of a run: the user's input completed by the log's declarations, with contradictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.doctor import gather
from steptime.doctor.records import PADDED_VOCAB, Stated
from steptime.doctor.trace import Recording
from steptime.measure.runs.meaning import USUAL, sole_choice
from steptime.model.known import catalogue_names, load_catalogue_model
from steptime.model.spec import ModelSpec
from steptime.plan.framework import piped_stage
from steptime.plan.framework_file import framework_called, framework_names, habits_of
from steptime.plan.recompute import spelled_out
from steptime.plan.space import MESH_COLUMNS

#: Pairs of given recipe and recipe of the run that may be the same.
_MAY_BE: Final = (
    *(("fp8", recipe) for recipe in ("fp8-te", "fp8-tensorwise", "fp8-blockwise", "mxfp8")),
    ("mxfp8", "fp8-te"),
    ("fp8-tensorwise", "fp8-te"),
    ("fp8-blockwise", "fp8-te"),
)
#: Entry of a plan -> entries that it qualifies.
_QUALIFIES: Final[Mapping[str, tuple[str, ...]]] = {"recompute_every": ("recompute",), "shard": (*MESH_COLUMNS, "zero")}
#: Dimensions of experts in a log.
_OF_EXPERTS: Final = ("experts_per_token", "expert_ffn_hidden")
#: Relative tolerance of a batch to a whole number: logs round times and rates.
_WHOLE: Final = 1e-3
PADDING: Final = 0.1
"""Largest share of padding in a padded vocabulary that distinguishes models of equal dimensions; our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedJob:
    """Settings and plan to predict with."""

    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    filled: tuple[str, ...]
    """Entries taken from the log, as ``tp 2``."""
    contradictions: tuple[str, ...]
    framework: str = ""
    """Fitted framework named by the run and used for the prediction; empty: the user's, or none."""
    habitual: tuple[str, ...] = ()
    """Defaults of the framework that differ from the estimate's and that neither user nor log override."""


def merged(settings: Mapping[str, Any], plan: Mapping[str, Any], stated: Stated, *, experts: bool = False) -> StatedJob:
    """The user's input completed by the log's declarations and the framework's defaults; the user wins.

    ``dp`` follows from the devices and the other degrees. An entry of the log that qualifies an entry which the user
    overrides is left out.

    Args:
        settings: the user's settings.
        plan: the user's entries of a plan.
        stated: declarations of the log.
        experts: True if the model has experts.
    """
    filled: list[str] = []
    contradictions: list[str] = []
    framework = _framework(settings, stated)
    plan = _in_words_of(settings.get("framework") or framework, plan)
    said = _overlapped(framework, {**stated.plan, **plan}, stated, experts=experts)
    out = []
    for given, told in ((settings, stated.settings), (plan, said)):
        table = dict(given)
        for name, value in told.items():
            if name not in given:
                if name != "dp" and not any(other in given for other in _QUALIFIES.get(name, ())):
                    table[name] = value
                    filled.append(f"{name} {value}")
            elif given[name] != value and not _same(name, given[name], value):
                contradictions.append(f"{name} is given as {given[name]}, but the run says {value}")
        out.append(table)
    habitual = _habitual(framework, out[0], out[1])
    for name, value in habitual.items():
        out[0 if name == "dtype" else 1][name] = value
    return StatedJob(
        settings=out[0] | ({"framework": framework} if framework else {}),
        plan=out[1],
        filled=tuple(filled),
        contradictions=tuple(contradictions),
        framework=framework,
        habitual=tuple(f"{name} {value}" for name, value in habitual.items()),
    )


def _in_words_of(framework: str, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's plan, with selective recomputation in the sense of the framework."""
    given = plan.get("recompute")
    if not isinstance(given, str):
        return plan
    return {**plan, "recompute": spelled_out(given, framework_called(str(framework)) or str(framework))}


def _overlapped(framework: str, whole: Mapping[str, Any], stated: Stated, *, experts: bool) -> Mapping[str, Any]:
    """Plan of the log, with its overlap of gradients and ``tp`` and the framework's other overlaps.

    Arguments without an entry for ``tp`` come from a version that cannot overlap it. Messages between virtual stages
    overlap with computation, as in measured runs.
    """
    said, overlaps = stated.plan, dict[str, bool]()
    if "overlap" in said:
        overlaps["dp"] = said["overlap"] == "dp"
    tensor = stated.flags.get("tp_comm_overlap", "False" if "overlap" in said else "")
    if tensor in gather.SAID:
        overlaps["tp"] = tensor == "True"
    if isinstance(whole.get("vpp"), int) and whole["vpp"] > 1:
        overlaps["pp"] = True
    if not framework or not overlaps:
        return said
    habit = habits_of(framework).overlap_with(frozenset(), experts=experts)
    overlapped = (habit - overlaps.keys()) | {axis for axis, does in overlaps.items() if does}
    return {**said, "overlap": ",".join(sorted(overlapped)) or "none"}


def _habitual(framework: str, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Sole choices of a framework that neither user nor log give and that differ from the estimate's defaults."""
    if not framework:
        return {}
    choices = {name: sole_choice(framework, name) for name in USUAL if name not in settings and name not in plan}
    found: dict[str, Any] = {name: choice for name, choice in choices.items() if choice is not None}
    if "zero" in found:
        pp = plan.get("pp", 1)
        found["zero"] = piped_stage(int(found["zero"]), pp if isinstance(pp, int) else 1)
    if "sp" in found:
        found["sp"] = "on" if found["sp"] == "true" or plan.get("tp", 1) == 1 else "off"
    return {name: choice for name, choice in found.items() if choice != USUAL[name]}


def _framework(settings: Mapping[str, Any], stated: Stated) -> str:
    """The framework of the run if it is fitted; empty if the user names one or reproduces a paper."""
    if "framework" in settings or settings.get("mode") == "published":
        return ""
    return stated.framework if stated.framework in framework_names() else ""


def _same(name: str, given: Any, said: Any) -> bool:
    """True if two values have the same meaning."""
    if name == "optimizer":
        return {given, said} <= {"adam", "adamw"} or {given, said} <= {"momentum", "sgd-momentum"}
    if name == "recompute":
        return set(str(given).split("+")) == set(str(said).split("+"))
    if name == "sp":
        return (str(given).lower() in ("on", "true", "1")) == bool(said == "on")
    if name == "dtype":
        return (given, said) in _MAY_BE
    if name == "offload":
        return str(said) in str(given).split(",")
    if name == "overlap":
        return ("dp" in str(given).split(",")) == ("dp" in str(said).split(","))
    return False


def model_contradictions(model: ModelSpec, stated: Mapping[str, int]) -> tuple[str, ...]:
    """Contradictions between the dimensions of the model and of the log.

    >>> model_contradictions(load_catalogue_model("llama3-8b"), {"layers": 32, "experts": 8, "expert_ffn_hidden": 9})
    ('llama3-8b has experts 0, but the run says 8',)
    """
    own = ((name, _dimension(model, name), value) for name, value in stated.items())
    return tuple(
        f"{model.name} has {name} {has}, but the run says {value}"
        for name, has, value in own
        if has is not None and has != value
    )


def _dimension(model: ModelSpec, name: str) -> int | None:
    """A dimension of a model or of its experts; None: it has no such dimension, or the dimension may differ."""
    experts = model.experts
    if name == PADDED_VOCAB:
        return None
    if name == "experts":
        return 0 if experts is None else experts.experts
    if name in _OF_EXPERTS:
        return None if experts is None else int(getattr(experts, name))
    if name == "ffn_hidden" and experts is not None and experts.moe_layers == model.layers:
        return None
    return int(getattr(model, name))


def with_batch(model: ModelSpec | None, given: Mapping[str, Any], stated: Stated) -> Stated:
    """Declarations of a log, with the global batch if it follows from the tokens per device and step.

    >>> spec = load_catalogue_model("gpt3-175b")
    >>> with_batch(spec, {"gpus": 128}, Stated(tokens_per_gpu=16384.4)).settings
    {'global_batch': 1024}
    """
    known = {**stated.settings, **given}
    seq, gpus = known.get("seq") or (model.seq_len if model else None), known.get("gpus")
    if "global_batch" in known or not (seq and gpus and stated.tokens_per_gpu):
        return stated
    batch = stated.tokens_per_gpu * gpus / seq
    whole = round(batch) > 0 and abs(batch / round(batch) - 1.0) < _WHOLE
    return replace(stated, settings={**stated.settings, "global_batch": round(batch)}) if whole else stated


def held_against(model: ModelSpec, stated: Stated) -> tuple[Stated, tuple[str, ...]]:
    """Declarations of a log that are possible for the model, and contradictions with the model.

    A dense model has no expert ranks.
    """
    found, ranks = model_contradictions(model, stated.model), stated.plan.get("ep", 1)
    if model.experts is not None or ranks == 1:
        return stated, found
    plan = {name: value for name, value in stated.plan.items() if name not in ("ep", "etp")}
    said = () if stated.model.get("experts") else (f"{model.name} has no experts, but the run has ep {ranks}",)
    return replace(stated, plan=plan), (*found, *said)


def catalogue_model(stated: Mapping[str, int], called: str = "") -> str | None:
    """The catalogue's model with these dimensions; None: too few dimensions, or no model fits.

    Args:
        stated: dimensions that the log prints.
        called: the log's name of its model; it decides between models of equal dimensions, or alone.

    >>> catalogue_model({"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008})
    'llama2-7b'
    >>> big = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672}
    >>> [catalogue_model({**big, "padded_vocab": n}) for n in (32768, 128256, 900)]
    ['llama2-70b', 'llama3-70b', 'llama2-70b']
    >>> catalogue_model({}, "llama3 405B")
    'llama3.1-405b'
    >>> catalogue_model({"layers": 32, "hidden": 4096, "heads": 32, "experts": 8, "expert_ffn_hidden": 14336})
    'mixtral-8x7b'
    """
    known, padded = {"layers", "hidden", "heads"} <= set(stated), stated.get(PADDED_VOCAB)
    names = [name for name in catalogue_names() if _plain(name) == _plain(called)]
    names.sort(key=lambda name: _without_separators(name) != _without_separators(called))
    found = []
    for name in names if not known else (*names, *_plainest_first()):
        model = load_catalogue_model(name)
        alike = bool(model.experts) == bool(stated.get("experts")) and not model.kinds
        if not model_contradictions(model, stated) and (name in names or alike):
            if padded is None or 0 <= padded - model.vocab <= PADDING * padded:
                return name
            found.append(name)
    return found[0] if found else None


def _plainest_first() -> list[str]:
    """Models of the catalogue: among models of equal dimensions LLaMA's come first, parallel blocks and kinds last."""
    specs = {name: load_catalogue_model(name) for name in catalogue_names()}
    return sorted(
        specs, key=lambda name: (bool(specs[name].kinds), specs[name].parallel_block, specs[name].family != "llama")
    )


def _without_separators(name: str) -> str:
    """A model's name in lower case without separators."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _plain(name: str) -> str:
    """A model's name in lower case without separators and minor versions: ``llama3 405B`` is Llama 3.1."""
    return _without_separators(re.sub(r"(?<=\d)\.\d(?=\D)", "", name))


def stated_by_trace(recording: Recording) -> dict[str, int]:
    """Settings declared by a trace: the ranks of its job."""
    info = recording.header.get("distributedInfo")
    world = info.get("world_size") if isinstance(info, dict) else None
    if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= 10**7:
        return {}
    return {"gpus": world}


def framework_of(recording: Recording) -> str:
    """Framework recognised by the names of process groups; empty: unknown."""
    groups = " ".join(meta.group for meta in recording.collectives)
    return "megatron" if "MODEL_PARALLEL_GROUP" in groups or "DATA_PARALLEL_GROUP" in groups else ""
