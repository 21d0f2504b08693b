"""Evaluates one plan, or a block of plans, through every layer of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from steptime.estimate.layer import PhaseTime, phase_times
from steptime.estimate.machine import Machine
from steptime.estimate.memory import StageMemory, fullest_bytes, memory_of
from steptime.estimate.planned import PlannedJob, planned_job
from steptime.estimate.sizes import sizes_of
from steptime.estimate.stages import Passes, layout_of
from steptime.estimate.step import Step, StepInputs, compose, inputs_of
from steptime.estimate.traffic import layer_copy_s
from steptime.estimate.work import Pass, PhaseWork, pass_of, work_of
from steptime.num import Num
from steptime.plan.framework import Framework
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import Plans
from steptime.plan.rows import Block

PARTS = ("layer", "first", "last")
Works = dict[str, dict[str, PhaseWork]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(PlannedJob):
    """Everything that is known about a plan (or, column by column, about a block of plans) on a machine."""

    machine: Machine
    block: Block
    times: dict[str, tuple[PhaseTime, ...]]
    """Times of the rows, by part of the model."""
    works: Works
    inputs: StepInputs
    passes: Passes
    step: Step
    memory: Mapping[str, StageMemory]
    """By pipeline stage."""
    peak_bytes: Num

    @property
    def step_time_s(self) -> Num:
        """Time of one optimiser step."""
        return self.step.total_s


def part_times(block: Block, plans: Plans, machine: Machine) -> dict[str, tuple[PhaseTime, ...]]:
    """Times of the rows of each part for one micro-batch."""
    return {part: tuple(phase_times(getattr(block, part), plans, machine)) for part in PARTS}


def works_of(times: dict[str, tuple[PhaseTime, ...]], job: Job, plans: Plans) -> Works:
    """Work of each part for one micro-batch, by direction."""
    return {part: work_of(times[part], plans, splits=job.splits_backward, graphs=job.graphs) for part in PARTS}


def passes_of(works: Works, framework: Framework) -> Passes:
    """Time of each part for one micro-batch under a framework."""
    each: dict[str, Pass] = {part: pass_of(works[part], framework) for part in PARTS}
    return Passes(layer=each["layer"], first=each["first"], last=each["last"])


def composed(planned: PlannedJob, machine: Machine, passes: Passes) -> tuple[StepInputs, Step]:
    """Step of plans whose passes are known, and what else it is composed of."""
    inputs = inputs_of(planned, machine, layout_of(planned), layer_copy_s(planned, machine))
    return inputs, compose(inputs, passes, planned.job.framework)


def evaluate(method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans) -> Evaluation:
    """Time and memory of the plans on the machine."""
    block = strategy.block(job, plans)
    planned = planned_job(method, strategy, job, plans, sizes_of(block))
    memory = memory_of(planned)
    times = part_times(block, plans, machine)
    works = works_of(times, job, plans)
    passes = passes_of(works, job.framework)
    inputs, step = composed(planned, machine, passes)
    return Evaluation(
        **{each.name: getattr(planned, each.name) for each in fields(PlannedJob)},
        machine=machine, block=block, times=times, works=works, inputs=inputs, passes=passes, step=step,
        memory=memory, peak_bytes=fullest_bytes(memory),
    )  # fmt: skip
