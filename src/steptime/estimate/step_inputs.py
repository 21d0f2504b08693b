"""Inputs of a step other than the passes of its parts: layers on stages, links, the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from steptime.cost.experts import dual_paired_share, paired_share
from steptime.cost.pipeline import filling_passes, mean_stage_link_s
from steptime.estimate.communication import boundary_times_s, message_basis
from steptime.estimate.machine import Machine
from steptime.estimate.result import PlannedJob, copies_near
from steptime.estimate.traffic import (
    TRAVELS,
    host_optimizer_time_s,
    in_turn,
    layer_copy_s,
    matrix_time_s,
    optimizer_time_s,
    owned_of,
    parameter_traffic,
)
from steptime.estimate.work import EXPERT_AXIS
from steptime.num import Num, where
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set
from steptime.plan.strategies import Method
from steptime.terms import at, call


def of_mirrored(held: Num, first: Num, last: Num) -> tuple[Num, Num]:
    """Values of the first and the last stage; the mean of both if a rank holds one of two copies of each."""
    mean = (first + last) / 2
    return where(held > 1, mean, first), where(held > 1, mean, last)


def _paired(planned: PlannedJob) -> Num:
    """Share of the passes that are paired; Megatron-Core does not pair them if layers are recomputed in full."""
    job, plans = planned.job, planned.plans
    if EXPERT_AXIS not in job.overlap or job.model.experts is None:
        return 0.0 * plans.pp
    if job.pipeline.pairs:
        return dual_paired_share(planned.micro_batches * plans.vpp, plans.pp * plans.vpp)
    return paired_share(planned.micro_batches, plans.vpp, plans.pp)


NO_TRAFFIC: Final[Mapping[str, Num]] = {"one_layer_s": 0.0, "bucket": 1.0, "shown_end_s": 0.0, "hidden_end_s": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a step other than the passes of its parts, without the factors of a framework.

    ``layers`` counts all stages, ``first_layers``, ``middle_layers`` and ``last_layers`` one stage.
    """

    first_layers: Num
    middle_layers: Num
    last_layers: Num
    layers: Num
    stages: Num
    virtual_stages: Num
    recomputed: Num
    """Share of the layers whose forward pass runs again."""
    held: Num
    """Stages that a rank holds; with two, layers of the first and of the last stage are their mean."""
    folded: Num = 0.0
    """1 if the first rank has embedding and head."""
    paired: Num
    """Share of the passes whose exchange of experts may overlap with the opposite pass of another micro-batch."""
    devices: Num
    micro_batches: Num
    host_starts: Num
    """Micro-batches, or slices of them, that the host starts one by one."""
    slices: int = 1
    """Slices of a micro-batch that pass the stages, and are sent, one after another."""
    schedules: Mapping[str, Num]
    """1 for the plans that have a schedule, by its name."""
    filling: Num
    """Passes for gradients of weights that fill the bubble."""
    hides_data: Num
    """1 if data-parallel traffic may overlap with computation."""
    shares_near: Num = 0.0
    """1 if data-parallel traffic shares the links of the fast domain with other transfers."""
    shares_far: Num = 0.0
    """1 if data-parallel traffic shares the links beyond the fast domain with other transfers."""
    tiered: bool = False
    """True if the machine tells links beyond its fast domains apart, so that traffic which shares them is known."""
    stages_far: Num = 0.0
    """1 if messages between stages leave the fast domain."""
    hides_stages: Num
    """1 if messages between stages may overlap with computation."""
    hides_copies: Num
    """1 if copies of activations to the host and back may overlap with computation."""
    copy_s: Num
    """Time of a copy of a layer's activations in one direction, for one micro-batch."""
    fast_link_s: Num = 0.0
    """Time of one message to a stage in the same fast domain."""
    slow_link_s: Num = 0.0
    """Time of one message to a stage in another fast domain."""
    stage_link_s: Num = 0.0
    """Mean time of a message over the pipeline."""
    reduce: Mapping[str, Num] = field(default_factory=lambda: NO_TRAFFIC)
    """Reductions of gradients over the ranks that share weights or hold the same, on the first stage, on free links.

    The last backward pass of a step is that of the first stage, and its gradients are the last to be reduced; those of
    stage $s$ are ready $s$ backward passes earlier, with which their reduction overlaps. The weights that the first
    stage gathers are also needed first. Keys are arguments of :func:`steptime.cost.data_parallel.exposed_buckets_s`.
    """
    replicas_s: Num = 0.0
    """Sum of the shards of a layer over their replicas."""
    gather: Mapping[str, Num] = field(default_factory=lambda: NO_TRAFFIC)
    """Gathering of weights (0 where every rank keeps them whole)."""
    turns: Mapping[str, Any] = field(default_factory=dict)
    """Turns (:func:`steptime.estimate.traffic.in_turn`) of ``gradients`` and ``weights`` with a known order in a pass;
    without turns they are spread evenly over the layers."""
    by_unit: Any
    """True if each layer gathers its weights and reduces its gradients by itself (ZeRO-3), plan by plan."""
    chunks: Num
    """Virtual stages of a device, for buckets of gradients."""
    reductions: Num
    """Reductions of gradients per step."""
    gathers: Num
    """Gatherings of weights per step."""
    replicated_s: Num = 0.0
    """Reduction of gradients of weights that tensor-parallel ranks replicate."""
    owned: Num
    """Parameters that a rank updates, on the stage with most of them."""
    tensors: Num
    """Tensors of trained parameters of a rank, the mean over the stages."""
    optimizer_s: Num
    """Time of the optimiser on the device; 0 if the host runs it."""
    host_optimizer_s: Num
    updates: Num = 1.0
    """Updates of the weights in a step; times of the optimiser are of one update."""
    matrix_update_s: Num = 0.0
    """Matrix products in the optimiser's step."""
    momentum_gather_s: Num = 0.0


def inputs_of(planned: PlannedJob, machine: Machine) -> StepInputs:
    """Inputs of a step on the links and memory of a machine."""
    unlinked = unlinked_inputs(planned, machine)
    sent = messages_of(planned, machine), parameter_traffic(planned, machine)
    return linked_inputs(unlinked, planned.method, planned.job, planned.plans, machine, *sent)


MESSAGES_REGARDLESS = ("recompute", "recompute_every", "zero", "shard", "vpp", "ep", "etp")
"""Columns of plans on which :func:`messages_of` does not depend: messages keep their size and route."""


def messages_of(planned: PlannedJob, machine: Machine) -> dict[str, Any]:
    """Messages between stages on the machine's links, by their names in :class:`StepInputs`."""
    sent_bytes = planned.sizes.boundary_bytes / planned.job.pipeline.usual_slices
    near_s, far_s = boundary_times_s(planned.job, machine, planned.plans, sent_bytes)
    return {"fast_link_s": near_s, "slow_link_s": far_s * planned.method.slow_link_share(planned.plans)}


def linked_inputs(
    unlinked: StepInputs,
    method: Method,
    job: Job,
    plans: Plans,
    machine: Machine,
    messages: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> StepInputs:
    """The inputs of :func:`unlinked_inputs` completed by messages and parameter traffic."""
    is_near = plans.is_near("dp") & plans.is_near("cp") & copies_near(job, plans)
    near, shares = where(is_near, 1.0, 0.0), float(method.calibrated)
    with at("pp_comm"):
        stage_link_s = call(
            mean_stage_link_s, partial(message_basis, machine, plans.pp, plans.in_pp),
            stages=plans.pp, inside=plans.in_pp, fast_s=messages["fast_link_s"], slow_s=messages["slow_link_s"],
        )  # fmt: skip
    return replace(
        unlinked,
        shares_near=near * shares, shares_far=(1.0 - near) * shares, tiered=machine.network is not None,
        stages_far=where(plans.is_near("pp"), 0.0, 1.0), stage_link_s=stage_link_s, **messages, **parameters,
    )  # fmt: skip


def unlinked_inputs(planned: PlannedJob, machine: Machine) -> StepInputs:
    """Inputs of a step without communication, which are the same for all placements."""
    job, plans, micro_batches, row = planned.job, planned.plans, planned.micro_batches, planned.job.pipeline
    owned, updates, sizes = owned_of(planned, "weights"), job.updates(plans), planned.sizes
    passes = micro_batches / job.stages_held  # each of two mirrored stages sees half of the micro-batches
    split, full = planned.split, where(is_set(plans.recompute, FULL_RECOMPUTE), 1.0, 0.0)
    equal = (split.first == split.middle) & (split.middle == split.last)
    whole = where(plans.pp <= 1, split.first, where(equal, split.first * plans.pp, float(job.model.layers)))
    first, last = of_mirrored(job.stages_held, split.first, split.last)
    turns = in_turn(job.captured.turns) if job.captured is not None else ()
    return StepInputs(
        turns=dict.fromkeys(TRAVELS, turns) if turns else {},
        first_layers=first, middle_layers=split.middle, last_layers=last, layers=whole,
        stages=plans.pp, virtual_stages=plans.vpp, recomputed=plans.recomputed, held=job.stages_held,
        folded=float(row.folded), paired=_paired(planned) * (1.0 - full), devices=job.gpus, micro_batches=micro_batches,
        host_starts=micro_batches * row.usual_slices if job.graphs != "step" else 0.0, slices=row.usual_slices,
        schedules={row.name: 1.0},
        filling=filling_passes(row.fills, plans.pp, micro_batches) if row.fills else 0.0,
        hides_data=float("dp" in job.overlap), hides_stages=float("pp" in job.overlap),
        hides_copies=float("offload" in job.overlap), copy_s=layer_copy_s(planned, machine),
        by_unit=plans.shares("weights"), chunks=plans.vpp if planned.method.calibrated else 1,
        reductions=plans.reductions(passes, updates), gathers=plans.gathers(passes, updates), owned=owned,
        tensors=(whole * sizes.layer.tensors + sizes.first.tensors + sizes.last.tensors) / plans.pp,
        optimizer_s=optimizer_time_s(planned, owned, machine),
        host_optimizer_s=host_optimizer_time_s(job, owned, machine),
        matrix_update_s=matrix_time_s(planned, machine), updates=updates,
    )  # fmt: skip
