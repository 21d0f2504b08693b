"""Evaluates one plan, or a block of plans, through every layer of the model."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.estimate.layer import Pass, PhaseTime, pass_of, phase_times
from steptime.estimate.machine import Machine
from steptime.estimate.memory import peak_bytes
from steptime.estimate.sizes import Sizes, sizes_of
from steptime.estimate.step import Passes, Step, compose
from steptime.num import Num
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import Plans
from steptime.plan.rows import Block

PARTS = ("layer", "first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that is known about a plan (or, column by column, about a block of plans)."""

    method: Method
    strategy: Strategy
    job: Job
    machine: Machine
    plans: Plans
    block: Block
    sizes: Sizes
    times: dict[str, tuple[PhaseTime, ...]]
    """Times of the rows, by part of the model."""
    passes: Passes
    step: Step
    peak_bytes: Num

    @property
    def step_time_s(self) -> Num:
        """Time of one optimiser step."""
        return self.step.total_s


def part_times(block: Block, plans: Plans, machine: Machine) -> dict[str, tuple[PhaseTime, ...]]:
    """Times of the rows of each part for one micro-batch."""
    return {part: tuple(phase_times(getattr(block, part), plans, machine)) for part in PARTS}


def passes_of(times: dict[str, tuple[PhaseTime, ...]]) -> Passes:
    """Exposed time of each part for one micro-batch."""
    each: dict[str, Pass] = {part: pass_of(times[part]) for part in PARTS}
    return Passes(layer=each["layer"], first=each["first"], last=each["last"])


def evaluate(method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans) -> Evaluation:
    """Time and memory of the plans on the machine."""
    block = strategy.block(job, plans)
    sizes = sizes_of(block)
    times = part_times(block, plans, machine)
    passes = passes_of(times)
    return Evaluation(
        method=method, strategy=strategy, job=job, machine=machine, plans=plans, block=block, sizes=sizes,
        times=times, passes=passes, step=compose(method, strategy, job, machine, plans, sizes, passes),
        peak_bytes=peak_bytes(method, strategy, job, plans, sizes),
    )  # fmt: skip
