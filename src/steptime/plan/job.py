"""What is to be trained and how: everything that is the same for all candidate plans."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.registry import Registry
from steptime.workload.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Formats of one training recipe."""

    name: str
    matrix_dtype: str
    """Rate of the matrix units that products run at."""
    attention_dtype: str
    """Rate that the two products of attention run at."""
    vector_dtype: str
    element_bytes: float
    """Bytes of a weight in use and of an activation element."""
    gradient_bytes: float
    master_weights: bool
    """The optimiser keeps its own fp32 copy of the weights."""
    mask_bytes: float = 1.0
    """Bytes of one dropout flag."""


PRECISIONS: Registry[Precision] = Registry("dtype", "steptime.precisions")
for _precision in (
        Precision(
            name="fp32", matrix_dtype="fp32", attention_dtype="fp32", vector_dtype="fp32",
            element_bytes=4, gradient_bytes=4, master_weights=False,
        ),
        Precision(
            name="tf32", matrix_dtype="tf32", attention_dtype="tf32", vector_dtype="fp32",
            element_bytes=4, gradient_bytes=4, master_weights=False,
        ),
        Precision(
            name="fp16", matrix_dtype="fp16", attention_dtype="fp16", vector_dtype="fp16",
            element_bytes=2, gradient_bytes=2, master_weights=True,
        ),
        Precision(
            name="bf16", matrix_dtype="bf16", attention_dtype="bf16", vector_dtype="bf16",
            element_bytes=2, gradient_bytes=2, master_weights=True,
        ),
        Precision(
            name="fp8", matrix_dtype="fp8", attention_dtype="bf16", vector_dtype="bf16",
            element_bytes=2, gradient_bytes=2, master_weights=True,
        ),
    ):  # fmt: skip
    PRECISIONS.add(_precision.name, _precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """States that an optimiser keeps per parameter, the fp32 copy of the weight apart."""

    name: str
    state_bytes: float

    def bytes_per_parameter(self, precision: Precision) -> float:
        """States and, with reduced precision, the fp32 master weight (Adam with bf16: 12)."""
        return self.state_bytes + (4.0 if precision.master_weights else 0.0)


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "steptime.optimizers")
for _optimizer in (
    Optimizer(name="adam", state_bytes=8.0),
    Optimizer(name="adamw", state_bytes=8.0),
    Optimizer(name="adam8bit", state_bytes=2.0),
    Optimizer(name="sgd", state_bytes=0.0),
    Optimizer(name="momentum", state_bytes=4.0),
):
    OPTIMIZERS.add(_optimizer.name, _optimizer)

ATTENTIONS = ("fused", "unfused", "summa")
RECOMPUTES = ("none", "attention", "full")
SCHEDULES = ("1f1b", "interleaved")
OVERLAPS = ("dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job on so many devices."""

    model: ModelSpec
    gpus: int
    global_batch: int
    """Sequences per optimiser step."""
    seq_len: int
    precision: Precision
    optimizer: Optimizer
    attention: str = "fused"
    """``fused`` (flash), ``unfused``, or ``summa`` (scores blocked over both tensor axes)."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that runs behind computation where it can: of :data:`OVERLAPS`."""
