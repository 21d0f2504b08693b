"""Model FLOPs, and what share of the machine they use."""

from __future__ import annotations

from dataclasses import replace

from steptime.estimate.layer import FORWARD, RECOMPUTE, phase_times
from steptime.estimate.machine import Machine
from steptime.plan.corrected import CORRECTED
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans
from steptime.plan.rows import Row

_UNIT = Machine(
    matrix_flops_per_s=1.0, attention_flops_per_s=1.0, vector_flops_per_s=1.0, peak_flops_per_s=1.0, memory_Bps=1.0,
    memory_bytes=1.0, kernel_latency_s=0.0, fast_Bps=1.0, fast_latency_s=0.0, slow_Bps=1.0, lone_slow_Bps=1.0,
    slow_latency_s=0.0, fast_domain=1,
)  # fmt: skip


def _forward_matrix_flops(rows: tuple[Row, ...], plans: Plans) -> float:
    return float(sum(t.matrix_flops for t in phase_times(rows, plans, _UNIT) if t.phase == FORWARD))


def forward_flops_per_sequence(job: Job) -> dict[str, float]:
    """Matrix operations of one sequence forward, by part of the model, on one device.

    A product of m x k by k x n counts 2mnk; a causal mask counts the unmasked pairs once; fused or not makes no
    difference. These are model FLOPs: they depend on neither plan nor machine.
    """
    plans = Plans()
    block = CORRECTED.strategies["1d"].block(_fused(job), plans)
    parts = {"layers": job.model.layers * _forward_matrix_flops(block.layer, plans)}
    for name, rows in (("embedding", block.first), ("head", block.last)):
        if rows:
            parts[name] = _forward_matrix_flops(rows, plans)
    return parts


def _fused(job: Job) -> Job:
    return replace(job, attention="fused")


def model_flops_per_step(job: Job) -> float:
    """Forward and backward (twice forward) of the whole global batch."""
    return 3.0 * job.global_batch * sum(forward_flops_per_sequence(job).values())


def recomputed_flops_per_step(job: Job, recompute: int) -> float:
    """Matrix operations that recomputation of the layers, or of unfused attention alone, adds to a step."""
    if recompute == FULL_RECOMPUTE:
        return job.global_batch * forward_flops_per_sequence(job)["layers"]
    plans = Plans(recompute=recompute)
    rows = CORRECTED.strategies["1d"].block(job, plans).layer
    again = sum(t.matrix_flops for t in phase_times(rows, plans, _UNIT) if t.phase == RECOMPUTE)
    return float(job.global_batch * job.model.layers * again)


def utilisation(flops: float, step_time_s: float, gpus: int, peak_flops_per_s: float) -> float:
    r"""Share of the peak: $F / (t\, n\, R)$ for $F$ = `flops` per step on $n$ = `gpus` of peak $R$.

    >>> utilisation(4e15, 2.0, 4, 1e15)
    0.5
    """
    return flops / (step_time_s * gpus * peak_flops_per_s)
