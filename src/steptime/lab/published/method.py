"""The published model's rules beside its rows."""

from __future__ import annotations

from typing import ClassVar

from steptime.lab.published.defects import Defects
from steptime.lab.published.rows import Context2D, Summa2D, Tensor1D
from steptime.num import Num, floor_div, where
from steptime.plan.job import Job
from steptime.plan.plans import Plans, Rule
from steptime.plan.strategies import CORRECTED, Method, StageSplit, Strategy


class PublishedMethod(Method):
    """The published model with all its defects, or with some of them."""

    name: ClassVar[str] = "published"
    calibrated: ClassVar[bool] = False
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, defects: Defects = Defects()) -> None:  # noqa: B008 - frozen
        self.defects = defects
        strategies: tuple[Strategy, ...] = (Tensor1D(defects), Context2D(defects), Summa2D(defects))
        vars(self).update(
            strategies={s.name: s for s in strategies},
            optimizer_step=not defects.no_optimizer_time,
            lone_rank_has_all_links=not defects.lone_rank_one_link,
            share_replicated_gradients=not defects.free_replicated_gradients,
        )

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Whole micro-batches of a whole share: a remainder is dropped, or rounded up."""
        if not self.defects.equal_shares:
            return CORRECTED.micro_batches(job, plans)
        return floor_div(floor_div(job.global_batch, plans.dp), plans.micro_batch)

    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """All stages alike, or uneven as in the corrected method."""
        if not self.defects.equal_stages:
            return CORRECTED.stage_split(job, plans)
        layers = floor_div(job.model.layers, plans.pp)
        return StageSplit(first=layers, middle=layers, last=layers)

    def slow_link_share(self, plans: Plans) -> Num:
        """The code asks for the time of a message among one rank, which is zero, wherever ``in_pp > 1``."""
        return where(plans.in_pp > 1, 0.0, 1.0) if self.defects.free_slow_stage_links else 1.0


PUBLISHED = PublishedMethod()
