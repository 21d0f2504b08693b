"""Evaluates one plan, or a block of plans, through every layer of the model.

Also computes model FLOPs, and the share of the machine that they use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from steptime.cost.experts import kept_share
from steptime.estimate.kernels import timed, winograd_saved_flops
from steptime.estimate.layer import PARTS, PhaseTime, part_times
from steptime.estimate.machine import Machine
from steptime.estimate.memory import StageMemory, fullest_bytes, memory_of
from steptime.estimate.operators import OPERATORS
from steptime.estimate.result import PlannedJob, planned_job
from steptime.estimate.sizes import sizes_of
from steptime.estimate.step import Step, compose
from steptime.estimate.step_inputs import StepInputs, inputs_of
from steptime.estimate.work import Pass, PhaseWork, pass_of, work_of
from steptime.num import Num
from steptime.plan.attention import FROZEN
from steptime.plan.framework import IDEAL, Framework
from steptime.plan.job import ExpertLoad, Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans
from steptime.plan.rows import Block, Row
from steptime.plan.strategies import CORRECTED, Method, Strategy

Works = dict[str, dict[str, PhaseWork]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(PlannedJob):
    """A plan (or, column by column, a block of plans) evaluated on a machine: times, memory and the step."""

    machine: Machine
    block: Block
    times: dict[str, tuple[PhaseTime, ...]]
    """Times of the rows, by part of the model."""
    works: Works
    inputs: StepInputs
    passes: Mapping[str, Pass]
    """Time of each part of the model for one micro-batch."""
    step: Step
    memory: Mapping[str, StageMemory]
    """Memory by pipeline stage."""
    peak_bytes: Num

    @property
    def step_time_s(self) -> Num:
        """Time of one optimiser step."""
        return self.step.total_s


def works_of(times: dict[str, tuple[PhaseTime, ...]], job: Job, plans: Plans) -> Works:
    """Work of each part for one micro-batch, by direction."""
    splits, graphs, reads = job.splits_backward, job.graphs, job.reads_sizes
    return {part: work_of(each, plans, splits=splits, graphs=graphs, reads_sizes=reads) for part, each in times.items()}


def passes_of(works: Works, framework: Framework) -> dict[str, Pass]:
    """Time of each part for one micro-batch under a framework."""
    return {part: pass_of(works[part], framework, part) for part in PARTS}


def evaluate(method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans) -> Evaluation:
    """Time and memory of the plans on the machine."""
    # Operators of a layer and of both ends of the model, with their local sizes and transfers (plan/strategies.py).
    block = strategy.block(job, plans)
    # Parameters and kept bytes that they add up to on a rank, layers and micro-batches of the stages (sizes.py).
    planned = planned_job(method, strategy, job, plans, sizes_of(block, job.optimizer.matrices))
    # Memory of each stage that can be the fullest, in the phases of a step that can need most (memory.py).
    memory = memory_of(planned)
    # Each operator by its fitted curve or the roofline, forward, backward and again, and its transfers (layer.py).
    times = part_times(block, plans, machine)
    # Sums by kind of work, and the time that the framework and the host that issues them make of these (work.py).
    works = works_of(times, job, plans)
    passes = passes_of(works, job.framework)
    # What happens once a step: gradients, gathered weights, messages between stages, the optimiser (traffic.py).
    inputs = inputs_of(planned, machine)
    # The stage that sets the pace, its bubble, the traffic that computation does not overlap, overheads (step.py).
    step = compose(inputs, passes, job.framework, machine.host_basis)
    return Evaluation(
        **{each.name: getattr(planned, each.name) for each in fields(PlannedJob)},
        machine=machine, block=block, times=times, works=works, inputs=inputs, passes=passes, step=step,
        memory=memory, peak_bytes=fullest_bytes(memory),
    )  # fmt: skip


def _row_flops(row: Row) -> float:
    """Matrix operations of a row forward, per layer."""
    formula = OPERATORS[row.operator].forward.matrix_flops
    return 0.0 if formula is None else float(formula(row.shape) * row.share)


def _part_rows(job: Job) -> dict[str, tuple[float, tuple[Row, ...]]]:
    """Number of runs of each part of the model, with its rows on one device; no tokens are counted twice."""
    return _plain_rows(_plain(replace(job, attention="fused")), 0)


def _plain(job: Job) -> Job:
    """The job without settings that its rows ignore; its experts compute each choice that has a slot once."""
    kept = kept_choices(job.expert_capacity, job.expert_load)
    return replace(job, gpus=1, global_batch=1, framework=IDEAL, gradient_dtype=None, expert_imbalance=1.0,
                   expert_load=None, expert_capacity=None if kept == 1.0 else kept)  # fmt: skip


@lru_cache(maxsize=64)
def _plain_rows(job: Job, recompute: int) -> dict[str, tuple[float, tuple[Row, ...]]]:
    block = CORRECTED.strategy("1d").block(job, Plans(recompute=recompute))
    parts = {"layers": (float(job.model.layers), block.layer)}
    return parts | {name: (1.0, rows) for name, rows in (("embedding", block.first), ("head", block.last)) if rows}


def kept_choices(expert_capacity: float | None, load: ExpertLoad | None = None) -> float:
    """Largest share of the tokens' choices of experts that can have a slot; from a capacity of 1 on it may be all.

    With a known load of the experts it is the exact share.

    >>> kept_choices(None), kept_choices(1.25), kept_choices(0.1)
    (1.0, 1.0, 0.1)
    """
    if expert_capacity is None or load is None:
        return 1.0 if expert_capacity is None else min(expert_capacity, 1.0)
    return kept_share(load.shares, expert_capacity)


def forward_flops_per_sequence(job: Job) -> dict[str, float]:
    """Matrix operations of one sequence forward, by part of the model, on one device.

    A product of m x k by k x n counts 2mnk; a causal mask counts the unmasked pairs once; fused or not makes no
    difference; an expert counts for the tokens that choose it and have a slot (:func:`kept_choices`). These are
    model FLOPs: they depend on neither plan nor machine. For a model that predicts several tokens the head includes
    the further layers.
    """
    if job.captured is not None:
        return {name: float(flops.at(0, 1)) for name, flops in job.captured.forward_flops.items()}
    return {name: count * _flops(rows) for name, (count, rows) in _part_rows(job).items()}


def _flops(rows: Iterable[Row]) -> float:
    return float(sum(_row_flops(row) for row in rows))


def model_flops_per_step(job: Job) -> float:
    """FLOPs of forward and backward (twice forward, once for frozen weights) over the whole global batch."""
    if job.captured is not None:
        return float(job.captured.model_flops.at(0, job.global_batch))
    if job.adapter is None:
        return 3.0 * job.global_batch * sum(forward_flops_per_sequence(job).values())
    total = sum(  # frozen weights have no gradient: two products for one forward, not three
        count * sum((2.0 if row.operator in FROZEN.values() else 3.0) * _row_flops(row) for row in rows)
        for count, rows in _part_rows(job).values()
    )
    return job.global_batch * total


def winograd_flops_per_step(job: Job, machine: Machine) -> float:
    """Operations of a step of a captured module that Winograd's algorithm saves, by curves fitted to it; else 0."""
    model, total = job.captured, 0.0
    if model is None:
        return total
    for part, count in ((model.head, 1), (model.block, model.layers if model.repeats else 1), (model.tail, 1)):
        for one in part:
            if one.kernel is None or "winograd_taps" not in one.kernel.shape:
                continue
            shape = {name: size.at(0, job.global_batch) for name, size in one.kernel.shape.items()}
            call = timed(machine.models, one.kernel.operator, shape, {}, backward=one.kernel.backward)
            total += 0.0 if call is None else count * one.times * winograd_saved_flops(call)
    if model.sharded is None:
        return total
    # One device may repeat operators of others: scaled by the share of its FLOPs that counts for the whole job.
    own = sum(one.times * float(one.matrix_flops.at(0, job.global_batch)) for one in model.block)
    return total / max(own, 1.0) * model_flops_per_step(job)


def recomputed_flops_per_step(job: Job, recompute: int, every: int = 1) -> float:
    """Matrix operations that recomputation of every ``every``-th layer, or of parts of all layers, adds to a step."""
    if recompute & FULL_RECOMPUTE:
        return job.global_batch * _layers_again_flops(job) / every
    if not recompute or job.captured is not None:
        return 0.0
    count, rows = _plain_rows(_plain(job), recompute)["layers"]
    return float(job.global_batch * count * sum(float(row.recomputed) * _row_flops(row) for row in rows))


def _layers_again_flops(job: Job) -> float:
    """Matrix operations of one sequence that full recomputation of all layers runs again."""
    if job.captured is not None:
        return forward_flops_per_sequence(job)["layers"]
    count, rows = _part_rows(job)["layers"]
    return count * _flops(row for row in rows if row.runs_again)


def least_step_s(flops: float, gpus: int, peak_flops_per_s: float) -> float:
    r"""Lower bound of a step: its executed FLOPs at the peak of all devices, :math:`F / (N R)`.

    >>> least_step_s(8e15, 8, 1e15)
    1.0
    """
    return flops / (gpus * peak_flops_per_s)


def utilisation(flops: float, step_time_s: float, gpus: int, peak_flops_per_s: float) -> float:
    r"""Share of the peak: $F / (t\, n\, R)$ for $F$ = `flops` per step on $n$ = `gpus` of peak $R$.

    >>> utilisation(4e15, 2.0, 4, 1e15)
    0.5
    """
    return flops / (step_time_s * gpus * peak_flops_per_s)
