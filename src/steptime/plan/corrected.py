"""The corrected method: uneven stages and shares are allowed, every link and every reduction is charged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from steptime.num import Num, ceil_div, floor_div, minimum, where
from steptime.plan.job import Job, replica_micro_batches
from steptime.plan.legality import RULES, Rule
from steptime.plan.method import Method, StageSplit, Strategy
from steptime.plan.plans import Plans
from steptime.plan.schedules import equal_but_for_ends, virtual_stage
from steptime.plan.strategies import STRATEGIES


class CorrectedMethod(Method):
    """The default."""

    name: ClassVar[str] = "corrected"
    strategies: ClassVar[Mapping[str, Strategy]] = STRATEGIES
    rules: ClassVar[tuple[Rule, ...]] = RULES
    calibrated: ClassVar[bool] = True
    optimizer_step: ClassVar[bool] = True
    lone_rank_has_all_links: ClassVar[bool] = True
    share_replicated_gradients: ClassVar[bool] = True

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """The last micro-batch of a share may be smaller; it is charged as a whole one."""
        return replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch)

    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """Layers left over go to the middle stages, then to the first: the ends have the embedding and the head.

        With virtual stages those are equal, but the very first and the very last may lack layers, the last more.
        """
        layers = job.model.layers
        least = floor_div(layers, plans.pp)
        over = layers - least * plans.pp
        each, lacking = virtual_stage(layers, plans.pp, plans.vpp)
        last = minimum(each, ceil_div(lacking, 2))
        cut = (plans.vpp > 1) & equal_but_for_ends(each, lacking)
        return StageSplit(
            first=where(
                cut, plans.vpp * each - (lacking - last), least + where((over > plans.pp - 2) & (over > 0), 1, 0)
            ),
            middle=where(cut, plans.vpp * each, least + where(over > 0, 1, 0)),
            last=where(cut, plans.vpp * each - last, least),
        )

    def slow_link_share(self, plans: Plans) -> Num:
        """Every link is charged."""
        return 1.0


CORRECTED = CorrectedMethod()
