"""What a model has, whatever it runs on: parameters, FLOPs, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steptime.api.models import import_notes, load_model
from steptime.api.request import NameOrPath, name_or_path, text, whole
from steptime.errors import counted
from steptime.estimate.evaluate import forward_flops_per_sequence
from steptime.estimate.result import FLOPS_CONVENTION, SCHEMA_VERSION
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.keys import MAX_SEQ
from steptime.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a model has, whatever it runs on."""

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
            "schema_version": SCHEMA_VERSION, "name": self.name, "family": self.family, "source": self.source,
            "parameters": dict(self.parameters), "parameters_total": self.parameters.total,
            "flops_per_sequence_forward": dict(self.flops), "bytes": dict(self.bytes),
            "flops_convention": FLOPS_CONVENTION, "notes": list(self.notes),
        }  # fmt: skip


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
        name=spec.name, family=spec.family, source=spec.source, parameters=parameters,
        flops=Terms(forward_flops_per_sequence(job)),
        bytes=Terms({
            "weights/parameter_bytes": count * precision.element_bytes,
            "gradients/parameter_bytes": count * precision.gradient_bytes,
            "adam_states/parameter_bytes": count * states,
        }),
        sample=job.sample,
        notes=(f"{job.sample} of {counted(length, 'token')}, {dtype}", *notes, *import_notes(model, seq=seq)),
    )  # fmt: skip
