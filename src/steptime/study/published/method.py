"""The published model's rules beside its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from steptime.num import Num, floor_div, where
from steptime.plan.job import Job
from steptime.plan.legality import Rule
from steptime.plan.method import Method, StageSplit, Strategy
from steptime.plan.plans import Plans
from steptime.study.published.rows import Context2D, Summa2D, Tensor1D


class PublishedMethod(Method):
    """Equal stages, no optimiser time, slow pipeline links free where any stages share a domain."""

    name: ClassVar[str] = "published"
    strategies: ClassVar[Mapping[str, Strategy]] = {s.name: s for s in (Tensor1D(), Context2D(), Summa2D())}
    rules: ClassVar[tuple[Rule, ...]] = ()
    optimizer_step: ClassVar[bool] = False
    lone_rank_has_all_links: ClassVar[bool] = False
    share_replicated_gradients: ClassVar[bool] = False

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Whole micro-batches of a whole share: a remainder is dropped."""
        return floor_div(floor_div(job.global_batch, plans.dp), plans.micro_batch)

    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """All stages alike."""
        layers = floor_div(job.model.layers, plans.pp)
        return StageSplit(first=layers, middle=layers, last=layers)

    def slow_link_share(self, plans: Plans) -> Num:
        """The code asks for the time of a message among one rank, which is zero, wherever ``in_pp > 1``."""
        return where(plans.in_pp > 1, 0.0, 1.0)


PUBLISHED = PublishedMethod()
