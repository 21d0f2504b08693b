"""Device memory of the fullest pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptime.cost.memory import activation_bytes, gathered_weights_bytes, largest_temporary_bytes, parameter_bytes
from steptime.cost.pipeline import micro_batches_in_flight
from steptime.estimate.operators import Formula
from steptime.estimate.sizes import Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import FULL_RECOMPUTE, Plans

STAGES = ("first", "middle", "last")
LAYERS_TERM = "activations/layers/activation_bytes"


def gradient_ranks(strategy: Strategy, plans: Plans) -> Num:
    """Ranks that reduce a gradient together."""
    ranks: Num = 1
    for axis in strategy.gradient_axes:
        ranks = ranks * getattr(plans, axis)
    return ranks


@dataclass(frozen=True, slots=True)
class Call:
    """A formula and what it is called with."""

    formula: Formula
    arguments: Mapping[str, Num]

    @property
    def value(self) -> Num:
        """Result."""
        return self.formula(self.arguments)


PARAMETERS, ACTIVATIONS = Formula(parameter_bytes), Formula(activation_bytes)
TEMPORARY, GATHERED = Formula(largest_temporary_bytes), Formula(gathered_weights_bytes)


def stage_calls(
    method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str
) -> dict[str, Call]:
    """Memory terms of one stage as calls of formulas (zero for a stage that the plan does not have).

    The first of several stages holds the embedding and, under 1F1B, most micro-batches; the last holds the head
    and one micro-batch; a single stage is ``first`` and holds both ends.
    """
    split, alone = method.stage_split(job, plans), plans.pp <= 1
    exists = where({"first": plans.pp >= 1, "middle": plans.pp > 2, "last": plans.pp > 1}[stage], 1.0, 0.0)
    layers = exists * {"first": split.first, "middle": split.middle, "last": split.last}[stage]
    in_flight = _in_flight(method, job, plans, stage)
    has_first = exists * float(stage == "first")
    has_last = exists * (float(stage == "last") + float(stage == "first") * where(alone, 1.0, 0.0))
    weights = sizes.layer.weights * layers + sizes.first.weights * has_first + sizes.last.weights * has_last
    full = plans.recompute == FULL_RECOMPUTE
    kept = where(full, minimum(sizes.boundary_bytes, sizes.layer.kept_bytes), sizes.layer.kept_bytes)
    ends = sizes.first.kept_bytes * has_first * in_flight + sizes.last.kept_bytes * has_last
    ends_weights = sizes.first.weights * has_first + sizes.last.weights * has_last
    ranks, precision = gradient_ranks(strategy, plans), job.precision

    def states(bytes_each: float, zero: int) -> Call:
        shards = where(plans.zero >= zero, ranks, 1)
        return Call(PARAMETERS, {"parameters": weights, "bytes_each": bytes_each, "shards": shards})

    def activations(bytes_each: Num, layers: Num, in_flight: Num) -> Call:
        return Call(ACTIVATIONS, {"kept_bytes_per_layer": bytes_each, "layers": layers, "in_flight": in_flight})

    sharded = where((plans.zero >= 3) & (layers > 0), 1.0, 0.0)
    return {
        "weights/parameter_bytes": states(precision.element_bytes, 3),
        "gradients/parameter_bytes": states(precision.gradient_bytes, 2),
        "optimizer/parameter_bytes": states(job.optimizer.bytes_per_parameter(precision), 1),
        LAYERS_TERM: activations(kept, layers, in_flight),
        "activations/ends/activation_bytes": activations(ends, 1, 1),
        "working/largest_temporary_bytes": Call(TEMPORARY, {
            "temporary_bytes": sizes.working_bytes * exists,
            "recomputed_bytes": where(full, sizes.layer.kept_bytes, 0.0) * exists}),
        "working/gathered_weights_bytes": Call(GATHERED, {
            "parameters": sizes.layer.weights * sharded, "ends_parameters": ends_weights * sharded,
            "bytes_each": precision.element_bytes, "layers_at_once": 2.0}),
    }  # fmt: skip


def _in_flight(method: Method, job: Job, plans: Plans, stage: str) -> Num:
    """Micro-batches in flight on the first, the second (the fullest of the middle) or the last stage."""
    index = {"first": 0, "middle": minimum(1, plans.pp - 1), "last": plans.pp - 1}[stage]
    return micro_batches_in_flight(plans.pp, method.micro_batches(job, plans), plans.vpp, index)


def stage_terms(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str) -> dict[str, Num]:
    """Memory terms of one stage in bytes."""
    calls = stage_calls(method, strategy, job, plans, sizes, stage)
    return {path: call.value for path, call in calls.items()}


def stage_total(terms: Mapping[str, Num]) -> Num:
    """Sum of a stage's terms."""
    total: Num = 0.0
    for value in terms.values():
        total = total + value
    return total


def peak_bytes(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes) -> Num:
    """Memory of the fullest stage."""
    peak: Num = 0.0
    for stage in STAGES:
        peak = maximum(peak, stage_total(stage_terms(method, strategy, job, plans, sizes, stage)))
    return peak
