"""What a step does once, on its critical stage: traffic over the data-parallel group, and the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptime.cost.data_parallel import adam_step_bytes
from steptime.cost.offload import host_adam_s, host_copy_s
from steptime.cost.roofline import memory_s
from steptime.estimate.communication import collective_over_s, collective_time_s, group_of
from steptime.estimate.machine import Machine
from steptime.estimate.memory import gradient_ranks, kept_of_layer, sharing_ranks
from steptime.estimate.memory_kernels import streamed
from steptime.estimate.sizes import Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import Plans

Group = tuple[Num, Num]
"""Ranks of a group, and how many of them are in each fast domain."""


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
    all_weights_s: Num
    """Parts of both that make gradients of weights."""
    slowest_weights_s: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives over the data-parallel group on the critical stage, on free links."""

    reduce_s: Num
    """Reduction of the gradients of one layer."""
    gather_s: Num
    """Gathering of the weights of one layer (0 where every rank keeps them whole)."""
    gather_again_s: Num
    """Its repetition for the backward pass (ZeRO-3)."""
    reduce_ends_s: Num
    """Reduction of the gradients of embedding and head; likewise the gathering of their weights."""
    gather_ends_s: Num
    reductions: Num
    """Times per step that gradients are reduced; likewise weights gathered."""
    gathers: Num


def traffic_of(
    strategy: Strategy, job: Job, machine: Machine, plans: Plans, sizes: Sizes, stage: Stage, micro_batches: Num
) -> Traffic:
    """Collectives over the data-parallel group, by ZeRO stage."""
    group = group_of(plans, strategy.gradient_axes)
    pools = [Pool(weights="weights", frozen="frozen_bytes", group=group)]
    if sizes.has("expert_weights") or sizes.has("frozen_expert_bytes"):
        group = group_of(plans, ("edp",))
        pools.append(Pool(weights="expert_weights", frozen="frozen_expert_bytes", group=group))
    zero = plans.zero

    def ends(name: str) -> Num:
        total: Num = getattr(sizes.first, name) * stage.first + getattr(sizes.last, name) * stage.last
        return total

    def summed(name: str, of: Callable[[Pool], tuple[Num, Num]]) -> Num:
        total: Num = 0.0
        for pool in pools:
            weights, frozen = of(pool)
            move = _reduced_s if name == "reduce" else _gathered_s
            total = total + move(job, machine, plans, pool.group, weights, frozen)
        return total

    def layer(pool: Pool) -> tuple[Num, Num]:
        return getattr(sizes.layer, pool.weights), getattr(sizes.layer, pool.frozen)

    def outer(pool: Pool) -> tuple[Num, Num]:
        return ends(pool.weights), ends(pool.frozen)

    gather_s = summed("gather", layer)
    return Traffic(
        reduce_s=summed("reduce", layer), gather_s=gather_s, gather_again_s=where(zero >= 3, 1.0, 0.0) * gather_s,
        reduce_ends_s=summed("reduce", outer), gather_ends_s=summed("gather", outer),
        reductions=where(zero >= 2, micro_batches, 1.0), gathers=where(zero >= 3, micro_batches, 1.0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Parameters that are reduced and shared out together: names of their sums, ranks of their group, those inside."""

    weights: str
    frozen: str
    group: Group


def _reduced_s(job: Job, machine: Machine, plans: Plans, group: Group, weights: Num, _: Num) -> Num:
    """Reduction of gradients: each shard on its ranks, then over the replicas of the shards."""
    size_bytes = weights * job.gradient_bytes
    halves = where(plans.zero >= 1, 1.0, 2.0)
    if not isinstance(plans.shard, np.ndarray) and not plans.shard:
        return halves * collective_over_s("reduce_scatter", machine, size_bytes, *group)
    (ranks, inside), (copies, copies_inside) = _shards(plans, group)
    own_s = collective_over_s("reduce_scatter", machine, size_bytes, ranks, inside)
    copies_s = collective_over_s("all_reduce", machine, size_bytes / ranks, copies, copies_inside)
    return halves * own_s + copies_s


def _gathered_s(job: Job, machine: Machine, plans: Plans, group: Group, weights: Num, frozen: Num) -> Num:
    """Gathering of weights that are shared out; frozen ones only under ZeRO-3."""
    size_bytes = weights * job.precision.element_bytes + frozen * where(plans.zero >= 3, 1.0, 0.0)
    gathered = where(plans.zero >= 1, 1.0, 0.0)
    if not isinstance(plans.shard, np.ndarray) and not plans.shard:
        return gathered * collective_over_s("all_gather", machine, size_bytes, *group)
    (ranks, inside), _ = _shards(plans, group)
    return gathered * collective_over_s("all_gather", machine, size_bytes, ranks, inside)


def _shards(plans: Plans, group: Group) -> tuple[Group, Group]:
    """One group of shards, and the replicas of one shard."""
    ranks, inside = group
    own = sharing_ranks(plans, ranks)
    own_inside = minimum(own, inside)
    return (own, own_inside), (ranks / own, maximum(inside / own_inside, 1))


def replicated_s(
    method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans, sizes: Sizes, stage: Stage
) -> Num:
    """Reduction of the gradients of weights that tensor-parallel ranks replicate."""
    if not method.share_replicated_gradients:
        return 0.0 * plans.tp
    size_bytes = _on_stage(sizes, stage, "replicated") * job.gradient_bytes * where(plans.sp > 0, 1.0, 0.0)
    return collective_time_s("all_reduce", plans, machine, (strategy.replicated_axis,), size_bytes)


NODE = 8
"""Devices of one host, as a rule."""


def offloaded_arguments(job: Job, optimizer_bytes: Num, machine: Machine) -> dict[str, Num]:
    """Arguments of the optimiser step on the host."""
    precision = job.precision
    states = job.optimizer.bytes_per_parameter(precision)
    owned = optimizer_bytes / adam_step_bytes(1, states, job.gradient_bytes, precision.element_bytes)
    return {
        "parameters": owned, "ranks": float(min(NODE, machine.fast_domain, job.gpus)),
        "moved_bytes": owned * (job.gradient_bytes + precision.element_bytes),
    }  # fmt: skip


def layer_copy_s(job: Job, plans: Plans, sizes: Sizes) -> Num:
    """Time of a layer's activations to the host, or back, for one micro-batch; 0 where they stay on the device."""
    if "activations" not in job.offload:
        return 0.0
    return host_copy_s(kept_of_layer(sizes.layer.kept_bytes, sizes.boundary_bytes, plans))


def optimizer_time_s(job: Job, optimizer_bytes: Num, machine: Machine) -> Num:
    """Time of the optimiser's pass over its tensors, on the device or on the host."""
    if "optimizer" in job.offload:
        return host_adam_s(**offloaded_arguments(job, optimizer_bytes, machine))
    fitted = streamed(machine.models, optimizer_bytes)
    if fitted is None:
        return memory_s(optimizer_bytes, machine.memory_Bps)
    return where(optimizer_bytes > 0, fitted.seconds, 0.0)


def optimizer_bytes_of(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: Stage) -> Num:
    """Memory traffic of the optimiser on the critical stage."""
    if not method.optimizer_step:
        return 0.0 * plans.dp
    owned = _owned(plans, _on_stage(sizes, stage, "weights"), gradient_ranks(strategy, plans))
    if sizes.has("expert_weights"):
        owned = owned + _owned(plans, _on_stage(sizes, stage, "expert_weights"), plans.edp)
    precision = job.precision
    state_bytes = job.optimizer.bytes_per_parameter(precision)
    return adam_step_bytes(owned, state_bytes, job.gradient_bytes, precision.element_bytes)


def _owned(plans: Plans, weights: Num, ranks: Num) -> Num:
    """Parameters whose states one rank has."""
    return weights / where(plans.zero >= 1, sharing_ranks(plans, ranks), 1)


def _on_stage(sizes: Sizes, stage: Stage, name: str) -> Num:
    """Sum of a size over what the stage holds."""
    layer, first, last = (getattr(part, name) for part in (sizes.layer, sizes.first, sizes.last))
    total: Num = layer * stage.layers + first * stage.first + last * stage.last
    return total
