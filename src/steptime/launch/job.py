"""A run and its completed plan as concepts of launch files, and back to ``RUN.toml``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from steptime import options
from steptime.api.calls import AskedPlan, asked_plan
from steptime.api.jobs import ELSEWHERE
from steptime.api.models import load_model
from steptime.errors import PlanError, UserError
from steptime.formats.run_spec import RunSpec
from steptime.hardware import load_cluster
from steptime.launch.values import NEUTRAL, OFFLOADS, OVERLAPS, Values, relevant
from steptime.model.spec import LatentAttention, ModelSpec
from steptime.options import KEYS
from steptime.plan.framework_file import habits_of
from steptime.plan.plans import MEANING, broken_rules, names_of
from steptime.plan.recompute import recompute_text

#: Cluster on which the plan of a run without a cluster is completed: nodes of eight devices.
PLACE: Final = "dgx-h100"
NODE: Final = 8
SETTINGS: Final = ("gpus", "global_batch", "seq", "dtype", "optimizer")
#: Keys of a plan that training software has; none has panels or a second tensor axis.
COUNTS: Final = tuple(name for name in options.COUNTS if name not in ("tp2", "panels"))
CHOICES: Final = tuple(name for name in KEYS if name not in (*options.COUNTS, "overlap", "offload", "expert_load"))
LORA: Final = ("lora.rank", "lora.targets", "lora.qlora")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run with its plan: the content of a launch file."""

    model: str
    """Name or file of the model."""
    cluster: str | None
    node_devices: int
    framework: str | None
    """Framework named by the run."""
    values: Mapping[str, Any]
    """Concept -> value, for every concept of the plan and of the model's dimensions."""
    placement: Mapping[str, int]
    """Devices of each axis inside the fast domain, if the run gives them."""


def launch_of(run: RunSpec) -> Launch:
    """The launch of a run; missing values are those of its estimate.

    Raises:
        UserError: the run cannot be estimated, or no training software can express it: a second tensor axis, a
            captured module, published mode.
    """
    settings = dict(run.settings)
    if settings.get("mode") == "published" or settings.get("strategy") == "2d" or run.plan.get("tp2", 1) > 1:
        raise PlanError("no training software runs tensor ranks of two axes, or a paper's own model", hint="drop them")
    asked = asked_plan(run.model, run.cluster or PLACE, plan=run.plan, **settings)
    if asked.setting.job.captured is not None:
        raise PlanError(f"{run.model}: a captured module has its own code, which no launch file holds")
    if broken := names_of(int(broken_rules(asked.setting.job, asked.plans))):
        raise PlanError(f"the plan is not legal: {'; '.join(MEANING[name] for name in broken)}")
    nodes = NODE if run.cluster is None else node_size(run.cluster)
    return Launch(
        model=_absolute(run.model),
        cluster=None if run.cluster is None else _absolute(run.cluster),
        node_devices=min(nodes, asked.setting.job.gpus),
        framework=settings.get("framework"),
        values=relevant(_values(asked) | dimensions(asked.setting.job.model)),
        placement=dict(run.plan.get("placement", {})),
    )


def node_size(cluster: str) -> int:
    """Devices of a node of a cluster; the fast domain if nodes are larger than those of launchers."""
    from steptime.estimate.machine import node_devices

    return node_devices(load_cluster(cluster))


def _absolute(name: str) -> str:
    return os.fspath(Path(name).resolve()) if name.endswith((".toml", ".json")) else name


def _values(asked: AskedPlan) -> Values:
    """All concepts of the engine's plan."""
    job, plans = asked.setting.job, asked.plans
    adapter = job.adapter
    out: Values = {name: int(getattr(plans, name)) for name in COUNTS}
    out |= {name: getattr(job, name) for name in options.CHOICES if name not in (*ELSEWHERE, "overlap", "offload")}
    out |= {
        "gpus": job.gpus,
        "global_batch": job.global_batch,
        "seq": job.seq_len,
        "dtype": job.precision.name,
        "optimizer": "adam" if job.optimizer.name == "adamw" else job.optimizer.name,
        "sp": "on" if plans.sp else "off",
        "recompute": recompute_text(int(plans.recompute)),
        "schedule": job.schedule_with(out["vpp"]),
        "attention_dtype": asked.given.get("attention_dtype"),
        "gradient_dtype": job.gradient_dtype or _narrow(job.precision.name),
        "dispatcher": job.dispatcher,
        "lora.rank": None if adapter is None else adapter.rank,
        "lora.targets": "linear" if adapter is None else adapter.targets,
        "lora.qlora": adapter is not None and adapter.weight_bytes is not None,
    }
    out |= {f"overlap.{name}": name in job.overlap for name in OVERLAPS}
    return out | {f"offload.{name}": name in job.offload for name in OFFLOADS}


def _narrow(dtype: str) -> str:
    return {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16"}.get(dtype, "bf16")


#: Fields of a model that training software has options for.
DIMENSIONS: Final = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "gated_mlp", "activation", "norm"),
    *("position", "tied_embeddings", "qkv_bias", "mlp_bias", "qk_norm", "parallel_block", "window", "mtp_depth"),
    "dropout",
)
LATENT: Final = tuple(field.name for field in fields(LatentAttention))
EXPERTS: Final = ("experts", "experts_per_token", "expert_ffn_hidden", "shared_ffn_hidden", "moe_layers")


def dimensions(model: ModelSpec) -> Values:
    """Dimensions of a model under the names of launch files, without neutral ones.

    Raises:
        UserError: its layers are of several kinds.
    """
    if model.kinds:
        names = ", ".join(kind.name for kind in model.kinds)
        hint = "training software has names of its own for each; take the plan's degrees from the estimate"
        raise UserError(
            f"{model.name} has layers of several kinds ({names}): no launch file is written for them", hint=hint
        )
    out = {f"model.{name}": getattr(model, name) for name in DIMENSIONS}
    experts, latent = model.experts, model.latent
    if experts is not None:
        out |= {f"model.experts.{name}": getattr(experts, name) for name in EXPERTS}
    if latent is not None:
        out |= {f"model.latent.{name}": getattr(latent, name) for name in LATENT}
    return {name: value for name, value in out.items() if value is not None}


def defaults_of(framework: str, zero: int, dtype: str) -> Values:
    """Defaults of a framework."""
    habits = habits_of(framework)
    return {
        "context": habits.context,
        "gradient_dtype": (habits.gradient_dtype if _narrow(dtype) != "fp32" else None) or _narrow(dtype),
        "dispatcher": "deepep" if habits.exchange_once else "all_to_all",
        "zero": zero,
        **{f"overlap.{name}": name in habits.overlap for name in OVERLAPS},
    }


def run_text(launch: Launch, *, kept: Mapping[str, Any] | None = None, notes: tuple[str, ...] = ()) -> str:
    """``RUN.toml`` of a launch, without default values.

    Args:
        launch: the run.
        kept: options of the launch file without a key of a run; they are written as comments at the end.
        notes: comments at the top.
    """
    values = launch.values
    head: list[tuple[str, Any]] = [("model", launch.model), ("cluster", launch.cluster)]
    head += [(name, values.get(name)) for name in SETTINGS]
    head.append(("framework", launch.framework))
    lines = [f"# {note}" for note in notes] + [f"{name} = {_toml(value)}" for name, value in head if value is not None]
    lines += ["", "[plan]"]
    for name in (*COUNTS, *CHOICES):
        value = values.get(name)
        differs = name == "vpp" or name not in NEUTRAL or value != NEUTRAL[name]  # a schedule has a vpp of its own
        if value is not None and differs:
            lines.append(f"{name} = {_toml(value)}")
    overlap = [name for name in OVERLAPS if values.get(f"overlap.{name}")]
    if any(f"overlap.{name}" in values for name in OVERLAPS):
        lines.append(f"overlap = {_toml(overlap)}")
    if offload := [name for name in OFFLOADS if values.get(f"offload.{name}")]:
        lines.append(f"offload = {_toml(offload)}")
    lines += _tables(launch)
    lines += [f"# kept: {name} = {_toml(value)}" for name, value in (kept or {}).items()]
    return "\n".join([*lines, ""])


def _tables(launch: Launch) -> list[str]:
    out = []
    if launch.placement:
        out += ["", "[plan.placement]", *(f"{axis} = {n}" for axis, n in launch.placement.items())]
    if launch.values.get("lora.rank") is not None:
        given = {name.partition(".")[2]: launch.values.get(name) for name in LORA}
        out += ["", "[lora]", *(f"{name} = {_toml(value)}" for name, value in given.items() if value is not None)]
    return out


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=True)


def spec_of(name: str) -> ModelSpec:
    """The dimensions of a model by its name or file.

    Raises:
        UserError: it is unknown.
    """
    return load_model(name)
