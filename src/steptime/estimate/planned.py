"""A job under some plans: what its step and its memory follow from, whatever the machine."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.estimate.sizes import Sizes
from steptime.num import Num
from steptime.plan.job import Job
from steptime.plan.method import Method, StageSplit, Strategy
from steptime.plan.plans import Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job under one plan, or column by column under a block of plans."""

    method: Method
    strategy: Strategy
    job: Job
    plans: Plans
    sizes: Sizes
    """What a device holds of each part of the model."""
    split: StageSplit
    micro_batches: Num
    """Micro-batches of the replica that has most of them."""

    @property
    def gradient_ranks(self) -> Num:
        """Ranks that hold the same weights and sum their gradients, both copies of a mirrored stage among them."""
        return self.strategy.gradient_ranks(self.plans) * self.job.stages_held

    @property
    def copies_near(self) -> Num:
        """Whether both copies of a mirrored stage share a fast domain, as they do where the whole pipeline does."""
        return True if self.job.stages_held == 1 else self.plans.in_pp >= self.plans.pp

    @property
    def expert_ranks(self) -> Num:
        """Likewise of the weights of routed experts."""
        return self.plans.edp * self.job.stages_held


def planned_job(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes) -> PlannedJob:
    """A job under plans whose sizes are known (:func:`steptime.estimate.sizes.sizes_of`)."""
    return PlannedJob(
        method=method, strategy=strategy, job=job, plans=plans, sizes=sizes, split=method.stage_split(job, plans),
        micro_batches=method.micro_batches(job, plans),
    )  # fmt: skip
