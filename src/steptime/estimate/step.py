"""Composes the time of a step from the time of a layer: pipeline, data parallelism, optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.cost.collective import point_to_point_s
from steptime.cost.data_parallel import adam_step_bytes, exposed_layerwise_s
from steptime.cost.pipeline import mean_stage_link_s, pipeline_bubble_s
from steptime.cost.roofline import memory_s
from steptime.estimate.layer import Pass, ring_arguments
from steptime.estimate.machine import Machine
from steptime.estimate.memory import gradient_ranks
from steptime.estimate.operators import COLLECTIVES
from steptime.estimate.sizes import Sizes
from steptime.num import Num, maximum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import FULL_RECOMPUTE, Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Exposed time of each part of the model for one micro-batch."""

    layer: Pass
    first: Pass
    last: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The stage that sets the pace of the pipeline."""

    layers: Num
    first: Num
    """1 where it holds the embedding."""
    last: Num
    """1 where it holds the head."""
    all_stages_s: Num
    """One micro-batch through all stages, forward and backward."""
    slowest_s: Num
    """The part of it that is spent on this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Terms of one optimiser step on the critical stage; exposed unless the name says otherwise."""

    stage: Stage
    micro_batches: Num
    repeats: Num
    """Forward passes per micro-batch: 2 with full recomputation."""
    steady_s: Num
    """All micro-batches through the critical stage."""
    stage_link_s: Num
    """One message to the next stage, on average."""
    fast_link_s: Num
    slow_link_s: Num
    pipeline_comm_s: Num
    bubble_s: Num
    """Filling and draining of the pipeline, the messages between stages included."""
    bubble_links_s: Num
    """That part of it."""
    gradient_s: Num
    """Reduction of gradients over the data-parallel group."""
    gradient_busy_s: Num
    backward_gather_s: Num
    """Weights gathered again for the backward pass (ZeRO-3)."""
    backward_gather_busy_s: Num
    weight_gather_s: Num
    weight_gather_busy_s: Num
    replicated_s: Num
    """Gradients of weights that tensor-parallel ranks replicate."""
    optimizer_s: Num
    optimizer_bytes: Num
    """Memory traffic of the optimiser."""
    one_reduction_s: Num
    """Reduction of the gradients of one layer; likewise the gathering of its weights."""
    one_gather_s: Num
    behind_forward_s: Num
    """Forward time of one layer, behind which a gathering can hide; likewise backward."""
    behind_backward_s: Num

    @property
    def total_s(self) -> Num:
        """Time of the step."""
        return (
            self.steady_s + self.pipeline_comm_s + self.bubble_s + self.gradient_s + self.backward_gather_s
            + self.weight_gather_s + self.replicated_s + self.optimizer_s
        )  # fmt: skip


def critical_stage(method: Method, job: Job, plans: Plans, passes: Passes) -> Stage:
    """Slowest of the first, a middle and the last stage; ties go to the first."""
    split = method.stage_split(job, plans)
    again = where(plans.recompute == FULL_RECOMPUTE, passes.layer.forward_s, 0.0)
    one_layer_s = passes.layer.both_s + again
    alone = plans.pp <= 1
    first_s = split.first * one_layer_s + passes.first.both_s + where(alone, passes.last.both_s, 0.0)
    middle_s = where(plans.pp > 2, split.middle * one_layer_s, 0.0)
    last_s = where(alone, 0.0, split.last * one_layer_s + passes.last.both_s)
    slowest_s = maximum(first_s, maximum(middle_s, last_s))
    is_first = first_s >= slowest_s
    is_last = (last_s >= slowest_s) & (first_s < slowest_s)
    layers = where(is_first, split.first, where(is_last, split.last, split.middle))
    whole = where(alone, split.first, _all_layers(split.first, split.middle, split.last, job, plans))
    return Stage(
        layers=layers, first=where(is_first, 1.0, 0.0),
        last=where(is_last, 1.0, where(is_first & alone, 1.0, 0.0)),
        all_stages_s=whole * one_layer_s + passes.first.both_s + passes.last.both_s, slowest_s=slowest_s,
    )  # fmt: skip


def _all_layers(first: Num, middle: Num, last: Num, job: Job, plans: Plans) -> Num:
    """Layers of all stages; equal stages may floor away a remainder."""
    return where((first == middle) & (middle == last), first * plans.pp, float(job.model.layers))


def _stage_links_s(method: Method, plans: Plans, sizes: Sizes, machine: Machine) -> tuple[Num, Num]:
    """A message to a stage in the same fast domain, and to one in another."""
    fast = point_to_point_s(sizes.boundary_bytes, machine.fast_Bps, machine.fast_latency_s)
    slow = point_to_point_s(sizes.boundary_bytes, machine.lone_slow_Bps, machine.slow_latency_s)
    return fast, slow * method.slow_link_share(plans)


def _behind(job: Job, one_s: Num, layers: Num, behind_s: Num) -> Num:
    if "dp" in job.overlap:
        return exposed_layerwise_s(one_s, layers, behind_s)
    return one_s * layers


def compose(
    method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans, sizes: Sizes, passes: Passes
) -> Step:
    """One optimiser step from the times of its parts."""
    stage = critical_stage(method, job, plans, passes)
    micro_batches = method.micro_batches(job, plans)
    fast_s, slow_s = _stage_links_s(method, plans, sizes, machine)
    link_s = mean_stage_link_s(plans.pp, plans.in_pp, fast_s, slow_s)
    again = where(plans.recompute == FULL_RECOMPUTE, 1.0, 0.0)
    backward_s = passes.layer.backward_s + again * passes.layer.forward_s
    shared = _data_parallel(strategy, job, machine, plans, sizes, stage, passes.layer.forward_s, backward_s,
                            micro_batches)  # fmt: skip
    weights = sizes.layer.weights * stage.layers + sizes.first.weights * stage.first + sizes.last.weights * stage.last
    optimizer_bytes = _optimizer_bytes(method, strategy, job, plans, weights)
    return Step(
        stage=stage,
        micro_batches=micro_batches,
        repeats=1.0 + again,
        steady_s=micro_batches * stage.slowest_s,
        stage_link_s=link_s,
        fast_link_s=fast_s,
        slow_link_s=slow_s,
        pipeline_comm_s=(0.0 if "pp" in job.overlap else 1.0) * 2 * micro_batches * link_s * plans.vpp,
        bubble_s=pipeline_bubble_s(stage.all_stages_s, stage.slowest_s, plans.vpp) + (plans.pp - 1) * 2 * link_s,
        bubble_links_s=(plans.pp - 1) * 2 * link_s,
        replicated_s=_replicated_s(method, strategy, job, machine, plans, sizes, stage),
        optimizer_bytes=optimizer_bytes,
        optimizer_s=memory_s(optimizer_bytes, machine.memory_Bps),
        behind_forward_s=passes.layer.forward_s,
        behind_backward_s=backward_s,
        **shared,
    )


def _data_parallel(
    strategy: Strategy, job: Job, machine: Machine, plans: Plans, sizes: Sizes, stage: Stage,
    forward_s: Num, backward_s: Num, micro_batches: Num,
) -> dict[str, Num]:  # fmt: skip
    """Traffic over the data-parallel group, exposed and busy, by ZeRO stage."""
    precision, gather, scatter = job.precision, COLLECTIVES["all_gather"], COLLECTIVES["reduce_scatter"]
    ends = sizes.first.weights * stage.first + sizes.last.weights * stage.last

    def ring(formula_bytes: Num) -> dict[str, Num]:
        return ring_arguments(plans, machine, strategy.gradient_axes, formula_bytes)

    halves = where(plans.zero >= 1, 1.0, 2.0)
    reduce_s = halves * scatter(ring(sizes.layer.weights * precision.gradient_bytes))
    gather_s = where(plans.zero >= 1, 1.0, 0.0) * gather(ring(sizes.layer.weights * precision.element_bytes))
    reduce_ends_s = halves * scatter(ring(ends * precision.gradient_bytes))
    gather_ends_s = where(plans.zero >= 1, 1.0, 0.0) * gather(ring(ends * precision.element_bytes))
    reductions = where(plans.zero >= 2, micro_batches, 1.0)
    gathers = where(plans.zero >= 3, micro_batches, 1.0)
    again_s = where(plans.zero >= 3, 1.0, 0.0) * gather_s
    both_s = reduce_s + again_s
    exposed_s = _behind(job, both_s, stage.layers, backward_s) * reductions
    share = reduce_s / (both_s + (both_s == 0))
    return {
        "one_reduction_s": reduce_s,
        "one_gather_s": gather_s,
        "gradient_s": exposed_s * share + reduce_ends_s * reductions,
        "gradient_busy_s": (reduce_s * stage.layers + reduce_ends_s) * reductions,
        "backward_gather_s": exposed_s * (1.0 - share) * where(plans.zero >= 3, 1.0, 0.0),
        "backward_gather_busy_s": again_s * stage.layers * gathers,
        "weight_gather_s": (_behind(job, gather_s, stage.layers, forward_s) + gather_ends_s) * gathers,
        "weight_gather_busy_s": (gather_s * stage.layers + gather_ends_s) * gathers,
    }


def _replicated_s(
    method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans, sizes: Sizes, stage: Stage
) -> Num:
    if not method.share_replicated_gradients:
        return 0.0 * plans.tp
    replicated = (
        sizes.layer.replicated * stage.layers + sizes.first.replicated * stage.first
        + sizes.last.replicated * stage.last
    )  # fmt: skip
    size_bytes = replicated * job.precision.gradient_bytes
    return COLLECTIVES["all_reduce"](ring_arguments(plans, machine, (strategy.replicated_axis,), size_bytes))


def _optimizer_bytes(method: Method, strategy: Strategy, job: Job, plans: Plans, weights: Num) -> Num:
    if not method.optimizer_step:
        return 0.0 * plans.dp
    owned = weights / where(plans.zero >= 1, gradient_ranks(strategy, plans), 1)
    precision = job.precision
    state_bytes = job.optimizer.bytes_per_parameter(precision)
    return adam_step_bytes(owned, state_bytes, precision.gradient_bytes, precision.element_bytes)
