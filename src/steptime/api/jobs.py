"""Conversion of the user's description of a training job into the record of the engine.

Names of optimisers: one list for captured modules and for models given by their dimensions.

A captured module runs PyTorch's optimiser of the same name; a model by its dimensions has the states of
:data:`steptime.plan.optimizers.OPTIMIZERS`. Two names of the same thing are accepted by every command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.api.expert_load import expert_load_of
from steptime.api.frameworks import framework_taken, no_framework
from steptime.api.models import check_captured, check_captured_choices, load_workload
from steptime.api.request import NameOrPath, choice, cluster_given, switch, text, whole
from steptime.errors import FieldError, PlanError, UnknownNameError, UserError, counted, shown
from steptime.estimate.kernels import models_of, of_device
from steptime.estimate.machine import issue_sharpness
from steptime.estimate.single import Setting
from steptime.hardware.records import Cluster, Device
from steptime.model.captured import CapturedModel
from steptime.model.spec import ModelSpec
from steptime.options import CHOICES, MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ, OPTIONS, usual_of
from steptime.plan.captured import CAPTURED
from steptime.plan.framework import IDEAL, Framework, without_hiding
from steptime.plan.framework_file import GENERIC, is_framework, load_framework
from steptime.plan.job import (
    PRECISIONS,
    PROJECTION_NAMES,
    QLORA_BYTES,
    TARGETS,
    Adapter,
    Job,
    Precision,
    default_overlap,
    dispatched_by,
    with_habits,
)
from steptime.plan.optimizers import OPTIMIZERS, Optimizer
from steptime.search.modes import Mode

CAPTURED_DEFAULT: Final = "adamw"
"""Default optimiser of a captured module; a model by its dimensions costs the same with ``adam`` and ``adamw``."""
#: Name -> name in captures; None: it cannot be captured.
_CAPTURED: Final[Mapping[str, str | None]] = {
    **{
        name: name
        for name in (
            "adamw",
            "adamw-loop",
            "adamw-fused",
            "adam",
            "adam-loop",
            "adam-fused",
            "sgd",
            "sgd-loop",
            "sgd-momentum",
            "sgd-momentum-loop",
            "adagrad",
            "rmsprop",
            "adafactor",
        )
    },
    "momentum": "sgd-momentum",
    **dict.fromkeys(("adam8bit", "lion", "ademamix", "schedule-free", "muon", "shampoo", "soap")),
}
CAPTURED_OPTIMIZERS: Final = tuple(name for name, own in _CAPTURED.items() if own == name)
"""Optimisers that can be captured, without aliases."""
#: Name -> name in estimates, if different.
_ESTIMATED: Final[Mapping[str, str]] = {"sgd-momentum": "momentum"}


def captured_optimizer(name: str, device: Device) -> str:
    """Name of an optimiser in captures; on the host the variant that loops over tensors, PyTorch's default there.

    Raises:
        UserError: the name is unknown, or it cannot be captured.

    >>> from dataclasses import replace
    >>> from steptime.hardware import load_device
    >>> h100 = load_device("h100-sxm")
    >>> captured_optimizer("momentum", h100), captured_optimizer("adamw", replace(h100, architecture="cpu"))
    ('sgd-momentum', 'adamw-loop')
    """
    if text("optimizer", name) not in _CAPTURED:
        raise UnknownNameError("optimizer", name, _CAPTURED)
    own = _CAPTURED[name]
    if own is None:
        raise FieldError(
            "", "optimizer", f"{name} cannot be captured", hint=f"captured are {', '.join(CAPTURED_OPTIMIZERS)}"
        )
    loop = f"{own}-loop"
    return loop if device.is_host and loop in CAPTURED_OPTIMIZERS else own


def estimated_optimizer(name: str) -> Optimizer:
    """States of an optimiser in the estimate of a model by its dimensions.

    Raises:
        UserError: the name is unknown, or for captured modules only.

    >>> estimated_optimizer("sgd-momentum").name, estimated_optimizer("adamw").state_bytes
    ('momentum', 8.0)
    """
    own = _ESTIMATED.get(name, name)
    if own in OPTIMIZERS:
        return OPTIMIZERS[own]
    if name in _CAPTURED:
        problem = f"{name} is for a module that is captured"
        raise FieldError("", "optimizer", problem, hint=f"a model by its dimensions takes {', '.join(OPTIMIZERS)}")
    raise UnknownNameError("optimizer", str(name), (*OPTIMIZERS, *_ESTIMATED))


LORA_KEYS = ("rank", "targets", "qlora", "dora")
OF_FRAMEWORK = ("overlap", "context", "gradient_dtype")
"""Choices whose default is a habit of the framework."""
ELSEWHERE = ("dispatcher", "attention_dtype", "expert_load")
"""Choices that do not set the field of their name directly."""
EXPERT_KEYS = tuple(name for name, row in OPTIONS.items() if row.of_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job as the user describes it."""

    model: str | CapturedModel
    cluster: NameOrPath | Cluster
    seq: int | None
    dtype: str
    optimizer: str
    mode: Mode
    framework: str | None
    lora: Mapping[str, Any] | None

    def setting(self, gpus: int, global_batch: int, chosen: Mapping[str, Any]) -> Setting:
        """Job, method and cluster; ``chosen``: checked choices common to all plans.

        Raises:
            UserError: something in the input is wrong; the message says what to change.
        """
        for field, value in (("dtype", self.dtype), ("optimizer", self.optimizer)):
            text(field, value)
        precision = attending(PRECISIONS[self.dtype], chosen)
        spec, captured = load_workload(self.model, dtype=self.dtype, seq=self.seq)
        cluster = cluster_given(self.cluster)
        framework = framework_of(self.framework, self.mode, cluster.device, precision)
        adapter = adapter_of(self.lora)
        _check_modelled(spec, precision, adapter, self.mode)
        _check_targets(spec, adapter)
        if captured is not None:
            check_captured(captured, precision, seq=self.seq, adapter=adapter, mode=self.mode)
            check_captured_choices(captured, chosen)
        job = Job(
            model=spec,
            gpus=whole("gpus", gpus, 1, MAX_DEVICES),
            global_batch=whole("global_batch", global_batch, 1, MAX_GLOBAL_BATCH),
            seq_len=spec.seq_len if self.seq is None else whole("seq", self.seq, 1, MAX_SEQ),
            precision=precision.on(cluster.device),
            optimizer=estimated_optimizer(self.optimizer),
            adapter=adapter,
            framework=framework,
            captured=captured,
        )
        job = with_choices(job, chosen)
        _check_offload(job, cluster.device)
        outermost, named = cluster.levels[-1], cluster.name if self.cluster is cluster else self.cluster
        if outermost.devices is not None and job.gpus > outermost.devices:
            raise UserError(
                f"{named}: its outermost level {outermost.name} joins {counted(outermost.devices, 'device')}, "
                f"not {job.gpus}",
                hint="add a level without devices that joins any number, or ask for fewer devices",
            )
        method = self.mode.method if captured is None else CAPTURED
        return Setting(
            method=method,
            job=job,
            cluster=cluster,
            statistics=self.mode.statistics,
            asked_overlap=_asked_overlap(job, chosen),
        )


def with_choices(job: Job, chosen: Mapping[str, Any]) -> Job:
    """The job with the habits of its framework, overridden by the user's choices.

    If the framework overlaps transfers and the user chooses ``overlap`` none, all traffic is exposed, including the
    share contained in the fitted factors; factors of a framework without default overlap contain no share.

    Raises:
        UserError: the exchange of experts is to overlap, and the model has no experts.
    """
    if "ep" in chosen.get("overlap", ()) and job.model.experts is None:
        has = "has no experts" if job.captured is None else "is captured: its experts are not divided"
        raise UserError(f"overlap ep: {job.model.name} {has}", hint="leave ep out")
    if chosen.get("compile") and job.captured is not None:
        raise UserError(
            f"compile: {job.model.name} is captured: its operators are timed as they were recorded",
            hint="leave it out; steptime rewrite fuses them",
        )
    own = {name: chosen.get(name, usual_of(name)) for name in CHOICES if name not in (*OF_FRAMEWORK, *ELSEWHERE)}
    job = replace(job, **own, expert_load=expert_load_of(chosen.get("expert_load"), job.model))
    default = with_habits(job, job.framework.name)
    if default_overlap(job, job.framework.name) and "overlap" in chosen and not chosen["overlap"]:
        default = replace(default, framework=without_hiding(job.framework))
    if "dispatcher" in chosen:
        default = dispatched_by(default, chosen["dispatcher"])
    return replace(default, **{key: chosen[key] for key in OF_FRAMEWORK if key in chosen})


def attending(precision: Precision, chosen: Mapping[str, Any]) -> Precision:
    """The precision with the products of attention in the chosen format, if any.

    Raises:
        PlanError: the attention has no kernel in it, or trains in more than 16 bits.
    """
    dtype = chosen.get("attention_dtype")
    if dtype is None:
        return precision
    if chosen.get("attention", "fused") != "fused":
        raise PlanError(
            f"attention_dtype {dtype}: attention {chosen['attention']} has no kernel for it",
            hint="drop it, or give --attention fused",
        )
    if precision.element_bytes > 2:
        raise PlanError(
            f"attention_dtype {dtype}: dtype {precision.name} has inputs of more than 16 bits",
            hint="drop it, or give a --dtype of 16 bits or fewer",
        )
    return precision.attending_in(dtype)


def _asked_overlap(job: Job, chosen: Mapping[str, Any]) -> frozenset[str]:
    """The user's choice of overlap; empty if it equals the framework's default."""
    given: frozenset[str] = chosen.get("overlap", frozenset())
    return frozenset() if given == with_habits(job, job.framework.name).overlap else given


def framework_of(name: str | None, mode: Mode, device: Device, precision: Precision) -> Framework:
    """The framework of a name; without a name ``generic``, or ``ideal`` in a mode that reproduces a paper.

    Names from tables of measured runs, such as NeMo, are accepted too.

    Args:
        name: the user's name; None: not given.
        mode: corrected or published.
        device: device of the cluster; a framework has factors of its own on some devices.
        precision: precision of the job.

    Raises:
        UnknownNameError: the name is unknown.
        PlanError: the mode has none but the ideal one.
    """
    if not mode.method.calibrated:
        if name not in (None, IDEAL.name):
            raise PlanError(
                f"framework {name}: mode {mode.method.name} knows the ideal framework only",
                hint="drop --framework, or use --mode corrected",
            )
        return IDEAL
    given = framework_taken(text("framework", GENERIC if name is None else name)) or GENERIC
    if not is_framework(given):
        raise no_framework(given)
    models = models_of(device, precision)
    factors = of_device(device, models)
    framework = load_framework(given, device.measured_as, factors, measured="matmul" in models)
    return replace(framework, issue_sharpness=issue_sharpness(device))


def adapter_of(lora: Mapping[str, Any] | None) -> Adapter | None:
    """Low-rank adapters from ``{"rank": 16, "targets": "linear", "qlora": False}``.

    Raises:
        UserError: a key is unknown, or a value is wrong.
    """
    if lora is None:
        return None
    if not isinstance(lora, Mapping):
        raise FieldError("", "lora", f"{shown(lora)} is not a table such as {{'rank': 16}}")
    for key in lora:
        if key not in LORA_KEYS:
            raise UnknownNameError("key of lora", key, LORA_KEYS)
    if lora.get("rank") is None:
        raise FieldError("", "lora.rank", "missing: the adapters need a rank", hint="for example 16 (--lora-rank 16)")
    weight_bytes = QLORA_BYTES if switch("lora.qlora", lora.get("qlora", False)) else None
    return Adapter(
        rank=whole("lora.rank", lora["rank"], 1, 10**5),
        weight_bytes=weight_bytes,
        dora=switch("lora.dora", lora.get("dora", False)),
        targets=_targets(lora.get("targets", "linear")),
    )


_TARGET_OF: Final = {
    "all-linear": "linear",
    **{f"{name}_proj": name for name in PROJECTION_NAMES[:7]},
    "q_a_proj": "q_down",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_b_proj": "kv_up",
}
"""Name of a module in PEFT's `target_modules` -> steptime's name."""


def _targets(value: Any) -> str:
    """Targets of adapters: ``linear``, ``attention``, or projections separated by commas, each once and in order.

    >>> _targets("v_proj,q_proj"), _targets("attention")
    ('q,v', 'attention')
    """
    names = [_TARGET_OF.get(name, name) for name in text("lora.targets", value).replace(" ", "").split(",")]
    if names[0] in TARGETS and len(names) == 1:
        return names[0]
    chosen = {choice("lora.targets", name, (*TARGETS, *PROJECTION_NAMES)) for name in names}
    if group := chosen & set(TARGETS):
        raise FieldError("", "lora.targets", f"{group.pop()} stands alone", hint="or name projections: q,k,v,o")
    return ",".join(name for name in PROJECTION_NAMES if name in chosen)


def _check_targets(spec: ModelSpec, adapter: Adapter | None) -> None:
    """Refuse projections that a model of equal blocks does not have."""
    if adapter is None or adapter.targets in TARGETS or spec.kinds:
        return
    latent = spec.latent
    attention: tuple[str, ...] = ("q", "k", "v") if latent is None else ("kv_down", "kv_up")
    if latent is not None:
        attention += ("q",) if latent.q_lora_rank is None else ("q_down", "q_up")
    has = (*attention, "o", *(("gate",) if spec.gated_mlp else ()), "up", "down")
    for name in adapter.targets.split(","):
        if name not in has:
            raise FieldError(
                "", "lora.targets", f"{spec.name} has no projection {name}", hint=f"it has {', '.join(has)}"
            )


def _check_modelled(spec: ModelSpec, precision: Precision, adapter: Adapter | None, mode: Mode) -> None:
    """Refuse features that the model of a reproduced paper does not have."""
    if mode.method.calibrated:
        return
    absent = {
        f"experts, which {spec.name} has": spec.experts,
        f"latent attention, which {spec.name} has": spec.latent,
        "adapters": adapter,
        f"quantisation, as dtype {precision.name} has": precision.quantised_bytes,
    }
    for what, given in absent.items():
        if given is not None:
            raise PlanError(f"the published model has no {what}", hint="use --mode corrected")


def _check_offload(job: Job, device: Device) -> None:
    """Refuse to offload from a device that is the host itself."""
    if job.offload and device.is_host:
        raise PlanError(
            f"offload {','.join(sorted(job.offload))}: {device.name} is a CPU, whose memory is the host's",
            hint="drop offload",
        )
    if "optimizer" in job.offload and job.optimizer.matrices is not None:
        raise PlanError(
            f"offload optimizer: {job.optimizer.name} updates whole matrices, which no software does on the host",
            hint="drop offload optimizer, or take adamw",
        )


def check_model(job: Job, strategy: str, given: Mapping[str, Any]) -> None:
    """Refuse a plan that does not apply to the model, or is not modelled for it.

    Raises:
        PlanError: SUMMA of experts or latent attention, or expert ranks of a model without experts or of a module.
    """
    spec = job.model
    what = "experts" if spec.experts else "latent attention" if spec.latent else None
    if strategy == "2d" and what:
        raise PlanError(
            f"strategy 2d: SUMMA is not modelled for {what}, which {spec.name} has",
            hint="give --strategy 1d or --strategy context",
        )
    if spec.experts is None:
        for key in EXPERT_KEYS:
            if given.get(key, 1) not in (1, None) and job.captured is not None:
                hint = f"drop {key}, or give the model by its name or config.json (steptime models)"
                raise PlanError(f"{key} {given[key]}: experts of a captured module are not divided", hint=hint)
            if given.get(key, 1) not in (1, None):
                raise PlanError(f"{key} {given[key]}: {spec.name} has no experts", hint=f"drop {key}")
