"""Ledger of a model without a machine: parameters, FLOPs, bytes of states and activations, ZeRO stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from steptime.api.models import import_notes, load_model
from steptime.api.request import NameOrPath, name_or_path, text, whole
from steptime.cost.data_parallel import zero_sent_bytes
from steptime.cost.memory import activation_bytes, parameter_bytes
from steptime.errors import counted
from steptime.estimate.evaluate import forward_flops_per_sequence, model_flops_per_step, recomputed_flops_per_step
from steptime.estimate.result import FLOPS_CONVENTION, SCHEMA_VERSION
from steptime.estimate.sizes import sizes_of, state_bytes_of_model
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.options import MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ
from steptime.plan.job import PRECISIONS, Job
from steptime.plan.optimizers import OPTIMIZERS
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.strategies import CORRECTED
from steptime.terms import Terms

RANKS: Final = (8, 64, 1024)
"""Default numbers of ranks for ZeRO stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroStage:
    """Bytes that each data-parallel rank holds of a model's states, and sends per step, under one ZeRO stage.

    >>> row = ZeroStage(stage=1, ranks=8, weights_bytes=2.0, gradients_bytes=2.0, states_bytes=1.5, sent_bytes=3.5)
    >>> row.total_bytes
    5.5
    """

    stage: int
    """ZeRO stage; 0: plain data parallelism."""
    ranks: int
    weights_bytes: float
    gradients_bytes: float
    states_bytes: float
    sent_bytes: float

    @property
    def total_bytes(self) -> float:
        """All bytes that a rank holds."""
        return self.weights_bytes + self.gradients_bytes + self.states_bytes


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
    """Weights, gradients and optimiser states of the whole model in training, independent of its checkpoint's dtype."""
    notes: tuple[str, ...] = ()
    sample: str = "sequence"
    """Unit of the FLOPs, in the singular: sequence, image."""
    samples: int = 1
    """Number of samples that the activations are for."""
    activations: Mapping[str, float] = field(default_factory=dict)
    """Activation bytes of the samples, on one device that holds all of them: ``layer_input`` of one layer,
    ``layer_inputs`` of all layers (kept under full recomputation), ``kept`` (kept by all layers without recomputation,
    with fused attention)."""
    zero: tuple[ZeroStage, ...] = ()
    """Bytes of a rank under each ZeRO stage, for some numbers of ranks."""
    recomputation: Mapping[str, float] = field(default_factory=dict)
    """Recomputation -> FLOPs of a step over FLOPs of its forward pass. The value for ``none`` counts model FLOPs only,
    so that MFU over HFU is this value over the others."""

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
            "samples": self.samples,
            "activations_bytes": dict(self.activations),
            "zero": [asdict(row) | {"total_bytes": row.total_bytes} for row in self.zero],
            "step_over_forward_flops": dict(self.recomputation),
            "mfu_over_hfu": {name: self.recomputation["none"] / flops for name, flops in self.recomputation.items()},
            "flops_convention": FLOPS_CONVENTION,
            "notes": list(self.notes),
        }


def ledger(
    model: NameOrPath,
    *,
    seq: int | None = None,
    dtype: str = "bf16",
    optimizer: str = "adam",
    global_batch: int = 1,
    dp: int | None = None,
) -> Ledger:
    """Parameters, FLOPs and bytes of a model without a cluster.

    Args:
        model: catalogue name, ``config.json`` or TOML file.
        seq: tokens of a sequence; None: the model's own.
        dtype: training recipe, as for an estimate.
        optimizer: optimiser whose states count, as for an estimate.
        global_batch: number of sequences for the activations.
        dp: ranks for the stages of ZeRO; None: each number of :data:`RANKS`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    model = name_or_path("model", model)
    spec, precision = load_model(model), PRECISIONS[text("dtype", dtype)]
    length = spec.seq_len if seq is None else whole("seq", seq, 1, MAX_SEQ)
    parameters, active = parameter_terms(spec), active_parameter_terms(spec).total
    notes = [] if active == parameters.total else [f"{active:,.0f} parameters are active per token"]
    chosen = OPTIMIZERS[text("optimizer", optimizer)]
    samples = whole("global_batch", global_batch, 1, MAX_GLOBAL_BATCH)
    job = Job(model=spec, gpus=1, global_batch=1, seq_len=length, precision=precision, optimizer=chosen)
    count, each = parameters.total, (precision.element_bytes, precision.gradient_bytes)
    sizes = sizes_of(CORRECTED.strategy("1d").block(job, Plans()), chosen.matrices)
    states = float(state_bytes_of_model(sizes, job, count)) / count
    ranks = RANKS if dp is None else (whole("dp", dp, 1, MAX_DEVICES),)
    return Ledger(
        name=spec.name,
        family=spec.family,
        source=spec.source,
        parameters=parameters,
        flops=Terms(forward_flops_per_sequence(job)),
        bytes=Terms(
            {
                "weights/parameter_bytes": count * each[0],
                "gradients/parameter_bytes": count * each[1],
                f"{chosen.name}_states/parameter_bytes": count * states,
            }
        ),
        sample=job.sample,
        samples=samples,
        activations={name: samples * size for name, size in _activations(job).items()},
        zero=tuple(_zero_stage(count, (*each, states), stage, n) for stage in range(4) for n in ranks),
        recomputation=_recomputation(job),
        notes=(f"{job.sample} of {counted(length, 'token')}, {dtype}", *notes, *import_notes(model, seq=seq)),
    )


def _activations(job: Job) -> dict[str, float]:
    """Activation bytes of one sample on one device."""
    sizes = sizes_of(CORRECTED.strategy("1d").block(job, Plans()))
    boundary, layers = float(sizes.boundary_bytes), job.model.layers
    kept = [activation_bytes(sizes.layer.kept_bytes, layers, 1), sizes.first.kept_bytes, sizes.last.kept_bytes]
    return {
        "layer_input": boundary,
        "layer_inputs": float(activation_bytes(boundary, layers, 1)),
        "kept": float(sum(kept)),
    }


def _zero_stage(count: float, each_bytes: tuple[float, float, float], stage: int, ranks: int) -> ZeroStage:
    """Bytes of one rank under a ZeRO stage, which shards states from 1, gradients from 2, weights in 3."""
    weights, gradients, states = (
        float(parameter_bytes(count, each, ranks if stage >= least else 1))
        for each, least in zip(each_bytes, (3, 2, 1), strict=True)
    )
    sent = zero_sent_bytes(count * each_bytes[0], count * each_bytes[1], ranks, 2 if stage == 3 else stage > 0)
    return ZeroStage(
        stage=stage,
        ranks=ranks,
        weights_bytes=weights,
        gradients_bytes=gradients,
        states_bytes=states,
        sent_bytes=float(sent),
    )


def _recomputation(job: Job) -> dict[str, float]:
    """FLOPs of a step over FLOPs of its forward pass, by recomputation."""
    forward, step = sum(forward_flops_per_sequence(job).values()), model_flops_per_step(job)
    return {
        name: (step + recomputed_flops_per_step(job, recompute_code(name))) / forward
        for name in ("none", "attention", "full")
    }
