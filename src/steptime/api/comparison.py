"""Two estimates compared, and the ledger of a model without a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steptime.api.models import import_notes, load_model
from steptime.api.request import (
    NameOrPath,
    name_or_path,
    text,
    whole,
)
from steptime.errors import FieldError, counted, shown
from steptime.estimate.evaluate import forward_flops_per_sequence
from steptime.estimate.result import FLOPS_CONVENTION, SCHEMA_VERSION, Estimate
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.keys import MAX_SEQ
from steptime.terms import Terms
from steptime.units import format_bytes, format_seconds

HEADLINE = (
    "step_time_s",
    "step_time_bracket_s",
    "step_time_band_s",
    "mfu",
    "hfu",
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "peak_memory_bytes",
    "memory_capacity_bytes",
    "feasible",
    "bottleneck",
)

OF_JOB = ("model", "cluster", "mode")
"""What an estimate says of its job in addition to the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two estimates side by side; each value is [first, second]."""

    headline: Mapping[str, list[Any]]
    plan: Mapping[str, list[Any]]
    """Only what differs, of the job and of the plan."""
    time: Mapping[str, list[float]]
    memory: Mapping[str, list[float]]

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        (a_s, b_s), (a_bytes, b_bytes) = self.headline["step_time_s"], self.headline["peak_memory_bytes"]
        time = f"{format_seconds(a_s)} to {format_seconds(b_s)}"
        memory = f"{format_bytes(a_bytes)} to {format_bytes(b_bytes)}"
        return f"<Difference: {time}, {memory}; of the plan: {', '.join(self.plan) or 'nothing'}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "headline": dict(self.headline),
            "plan": dict(self.plan),
            "time": dict(self.time),
            "memory": dict(self.memory),
        }


def diff(a: Estimate, b: Estimate) -> Difference:
    """Two estimates side by side.

    Raises:
        FieldError: one of them is no estimate.
    """
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Estimate):
            raise FieldError("", name, f"{shown(given)} is no estimate", hint="steptime.api.estimate makes one")
    said = [{**{k: getattr(e.provenance, k) for k in OF_JOB}, **e.workload, **e.plan} for e in (a, b)]
    differing = {key: pair for key, pair in _pairs(said[0], said[1], None).items() if pair[0] != pair[1]}
    return Difference(
        headline={name: [getattr(a, name), getattr(b, name)] for name in HEADLINE},
        plan=differing,
        time=_pairs(a.time, b.time, 0.0),
        memory=_pairs(a.memory, b.memory, 0.0),
    )


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any], default: Any) -> dict[str, list[Any]]:
    keys = dict.fromkeys((*first, *second))
    return {key: [first.get(key, default), second.get(key, default)] for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Parameters, FLOPs and bytes of a model, without a machine."""

    name: str
    family: str
    source: str
    parameters: Terms
    flops: Terms
    """Model FLOPs of one sequence (or image) forward, by part."""
    bytes: Terms
    """Weights, gradients and optimiser states of the whole model in training, whatever its checkpoint is stored in."""
    notes: tuple[str, ...] = ()
    sample: str = "sequence"
    """What the FLOPs are of, in the singular: a sequence, an image."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "family": self.family,
            "source": self.source,
            "parameters": dict(self.parameters),
            "parameters_total": self.parameters.total,
            "flops_per_sequence_forward": dict(self.flops),
            "bytes": dict(self.bytes),
            "flops_convention": FLOPS_CONVENTION,
            "notes": list(self.notes),
        }


def ledger(model: NameOrPath, *, seq: int | None = None, dtype: str = "bf16") -> Ledger:
    """Parameters, FLOPs and bytes of a model without a cluster.

    Args:
        model: catalogue name, ``config.json`` or TOML file.
        seq: tokens of a sequence; None: the model's own.
        dtype: training recipe, as for an estimate.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    model = name_or_path("model", model)
    spec, precision = load_model(model), PRECISIONS[text("dtype", dtype)]
    length = spec.seq_len if seq is None else whole("seq", seq, 1, MAX_SEQ)
    parameters, active = parameter_terms(spec), active_parameter_terms(spec).total
    notes = [] if active == parameters.total else [f"{active:,.0f} parameters are active per token"]
    adam = OPTIMIZERS["adam"]
    job = Job(model=spec, gpus=1, global_batch=1, seq_len=length, precision=precision, optimizer=adam)
    states, count = adam.bytes_per_parameter(precision), parameters.total
    return Ledger(
        name=spec.name,
        family=spec.family,
        source=spec.source,
        parameters=parameters,
        flops=Terms(forward_flops_per_sequence(job)),
        bytes=Terms(
            {
                "weights/parameter_bytes": count * precision.element_bytes,
                "gradients/parameter_bytes": count * precision.gradient_bytes,
                "adam_states/parameter_bytes": count * states,
            }
        ),
        sample=job.sample,
        notes=(f"{job.sample} of {counted(length, 'token')}, {dtype}", *notes, *import_notes(model, seq=seq)),
    )
