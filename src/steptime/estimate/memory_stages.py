"""Stages of a pipeline: which parts of the model each has, and the micro-batches that it holds at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steptime.cost.pipeline import (
    dual_pipe_in_flight,
    dual_pipe_in_flight_at_ends,
    micro_batches_in_flight,
    zero_bubble_in_flight,
)
from steptime.estimate.planned import PlannedJob
from steptime.estimate.sizes import Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """How often one stage has each part of the model; zero where the plan has no such stage."""

    name: str
    exists: Num
    layers: Num
    ahead: Num
    """Those of them that the first stage of the model has."""
    first: Num
    """1 where it has the embedding; likewise the head."""
    last: Num

    def of_layers(self, sizes: Sizes, pool: str, layers: int) -> Num:
        """Sum of something over the layers of the stage: the mean of all, or its own where dense ones stand first."""
        if sizes.later is None:
            mean: Num = getattr(sizes.layer, pool)
            return mean * self.layers
        dense, later = _of_kinds(sizes, pool, layers)
        count = minimum(self.ahead, sizes.leading)
        return count * dense + (self.layers - count) * later

    def largest_layer(self, sizes: Sizes, pool: str, layers: int) -> Num:
        """The most of something that a layer of the stage has: the mean of all, or where dense ones stand first."""
        if sizes.later is None:
            mean: Num = getattr(sizes.layer, pool)
            return mean
        dense, later = _of_kinds(sizes, pool, layers)
        if self.name != "first":
            return later
        return where(self.layers > sizes.leading, maximum(dense, later), dense)


def _of_kinds(sizes: Sizes, pool: str, layers: int) -> tuple[Num, Num]:
    """Something of a dense layer, of those that stand first, and of a layer with experts.

    With $d$ leading of $L$ layers, a mean $m$ and $e$ of a layer with experts, one without has $(L m - (L - d) e) / d$.
    """
    mean: Num = getattr(sizes.layer, pool)
    later: Num = getattr(sizes.later, pool)
    return (layers * mean - (layers - sizes.leading) * later) / sizes.leading, later


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(StageParts):
    """One stage, and the micro-batches that it holds at once."""

    in_flight: Num


def stage_parts(planned: PlannedJob, name: str) -> StageParts:
    """Parts of a stage by name: the first has the embedding, the last the head, a single one is ``first``."""
    return StageParts(**_parts(planned, name))


def stage_of(planned: PlannedJob, name: str) -> Stage:
    """A stage by name; of several, the first holds most micro-batches under 1F1B, the last holds one."""
    return Stage(**_parts(planned, name), in_flight=_in_flight(planned, name))


def _parts(planned: PlannedJob, name: str) -> dict[str, Any]:
    plans = planned.plans
    exists = where({"first": plans.pp >= 1, "middle": plans.pp > 2, "last": plans.pp > 1}[name], 1.0, 0.0)
    if planned.job.stages_held > 1:
        return _mirrored(planned, name, exists)
    is_first, is_last = float(name == "first"), float(name == "last")
    return {
        "name": name, "exists": exists, "layers": exists * getattr(planned.split, name),
        "ahead": exists * is_first * planned.split.first, "first": exists * is_first,
        "last": exists * (is_last + is_first * where(plans.pp <= 1, 1.0, 0.0)),
    }  # fmt: skip


def _mirrored(planned: PlannedJob, name: str, exists: Num) -> dict[str, Any]:
    """Parts of both stages that a rank holds: the first and the last, or two of the middle."""
    split, is_first = planned.split, float(name == "first")
    layers = {"first": split.first + split.last, "middle": 2 * split.middle, "last": 0.0}[name]
    own = exists * float(name != "last")
    return {"name": name, "exists": own, "layers": own * layers, "ahead": own * is_first * split.first,
            "first": own * is_first, "last": own * is_first}  # fmt: skip


def on_stage(planned: PlannedJob, pool: str, stage: StageParts) -> Num:
    """Sum of one pool of parameters over the parts of a stage."""
    sizes = planned.sizes
    layers = stage.of_layers(sizes, pool, planned.job.model.layers)
    first: Num = getattr(sizes.first, pool)
    last: Num = getattr(sizes.last, pool)
    return layers + first * stage.first + last * stage.last


def _share_of_first(planned: PlannedJob) -> Num:
    """What the layers of the first stage keep of a micro-batch, over what those of the first and the last keep."""
    ends = _parts(planned, "first")
    own = StageParts(**ends | {"layers": ends["ahead"]})
    kept, both = (
        each.of_layers(planned.sizes, "kept_bytes", planned.job.model.layers) for each in (own, StageParts(**ends))
    )
    return kept / where(both > 0, both, 1)


def _in_flight(planned: PlannedJob, stage: str) -> Num:
    """Micro-batches in flight on the first, the second (the fullest of the middle) or the last stage."""
    plans, micro_batches = planned.plans, planned.micro_batches
    index = {"first": 0, "middle": minimum(1, plans.pp - 1), "last": plans.pp - 1}[stage]
    if planned.job.stages_held > 1:
        if stage == "first":
            return dual_pipe_in_flight_at_ends(plans.pp, micro_batches, _share_of_first(planned))
        return dual_pipe_in_flight(plans.pp, micro_batches)
    depths = SCHEDULES[planned.job.schedule].depths
    if depths:
        return zero_bubble_in_flight(plans.pp, micro_batches, depths)
    return micro_batches_in_flight(plans.pp, micro_batches, plans.vpp, index)
