"""Device memory of the fullest pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping

from steptime.cost.memory import activation_bytes, parameter_bytes
from steptime.cost.pipeline import micro_batches_in_flight
from steptime.estimate.sizes import Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import Plans

STAGES = ("first", "middle", "last")


def gradient_ranks(strategy: Strategy, plans: Plans) -> Num:
    """Ranks that reduce a gradient together."""
    ranks: Num = 1
    for axis in strategy.gradient_axes:
        ranks = ranks * getattr(plans, axis)
    return ranks


def stage_terms(
    method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str
) -> Mapping[str, Num]:
    """Memory terms of one stage (zero for a stage that the plan does not have).

    The first of several stages holds the embedding and, under 1F1B, most micro-batches; the last holds the head
    and one micro-batch; a single stage is ``first`` and holds both ends.
    """
    split, alone = method.stage_split(job, plans), plans.pp <= 1
    layers = {"first": split.first, "middle": split.middle, "last": split.last}[stage]
    exists = {"first": plans.pp >= 1, "middle": plans.pp > 2, "last": plans.pp > 1}[stage]
    in_flight = micro_batches_in_flight(plans.pp, method.micro_batches(job, plans), plans.vpp)
    in_flight = {
        "first": in_flight,
        "middle": minimum(in_flight, maximum(plans.pp - 1, 1)),
        "last": minimum(in_flight, 1),
    }[stage]  # fmt: skip
    has_first = where(exists, float(stage == "first"), 0.0)
    has_last = where((stage == "last") | ((stage == "first") & alone), where(exists, 1.0, 0.0), 0.0)
    layers = where(exists, layers, 0.0)
    weights = sizes.layer.weights * layers + sizes.first.weights * has_first + sizes.last.weights * has_last
    full = plans.recompute == 2
    kept = where(full, minimum(sizes.boundary_bytes, sizes.layer.kept_bytes), sizes.layer.kept_bytes)
    ends = sizes.first.kept_bytes * has_first * in_flight + sizes.last.kept_bytes * has_last
    ranks = gradient_ranks(strategy, plans)
    state_bytes = job.optimizer.bytes_per_parameter(job.precision)
    precision = job.precision
    working = (sizes.working_bytes + where(full, sizes.layer.kept_bytes, 0.0)) * where(exists, 1.0, 0.0)
    return {
        "weights/parameter_bytes": parameter_bytes(
            weights, precision.element_bytes, where(plans.zero >= 3, ranks, 1)
        ),
        "gradients/parameter_bytes": parameter_bytes(
            weights, precision.gradient_bytes, where(plans.zero >= 2, ranks, 1)
        ),
        "optimizer/parameter_bytes": parameter_bytes(weights, state_bytes, where(plans.zero >= 1, ranks, 1)),
        "activations/layers/activation_bytes": activation_bytes(kept, layers, in_flight),
        "activations/ends/activation_bytes": activation_bytes(ends, 1, 1),
        "working/largest_temporary_bytes": working,
        "working/gathered_weights_bytes": where(
            (plans.zero >= 3) & (layers > 0), 2 * sizes.layer.weights * precision.element_bytes, 0.0
        ),
    }  # fmt: skip


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
