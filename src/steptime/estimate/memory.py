"""Device memory of the fullest pipeline stage in its fullest phase.

A stage has some parts of the model, and a number of micro-batches that it holds at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime.cost.host import HELD_LAYERS
from steptime.cost.memory import (
    activation_bytes,
    gathered_weights_bytes,
    held_buffers_bytes,
    largest_temporary_bytes,
    parameter_bytes,
    stashed_weights_bytes,
)
from steptime.estimate.operators import Call, Formula
from steptime.estimate.result import PlannedJob
from steptime.estimate.sizes import Sizes
from steptime.model.captured import Sharded
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set
from steptime.schedule.schedules import PipelineBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """Count of each part of the model on one stage; zero if the plan lacks the stage."""

    name: str
    exists: Num
    layers: Num
    ahead: Num
    """Layers of it that belong to the first stage of the model."""
    first: Num
    """1 if it has the embedding."""
    last: Num
    """1 if it has the head."""

    def of_layers(self, sizes: Sizes, pool: str, layers: int) -> Num:
        """Sum of a pool over the layers of the stage; exact if the model begins with dense layers, else by the mean."""
        if sizes.later is None:
            mean: Num = getattr(sizes.layer, pool)
            return mean * self.layers
        dense, later = _of_kinds(sizes, pool, layers)
        count = minimum(self.ahead, sizes.leading)
        return count * dense + (self.layers - count) * later

    def largest_layer(self, sizes: Sizes, pool: str, layers: int) -> Num:
        """Largest pool of a layer of the stage; the mean of all layers unless the model begins with dense ones."""
        if sizes.later is None:
            mean: Num = getattr(sizes.layer, pool)
            return mean
        dense, later = _of_kinds(sizes, pool, layers)
        if self.name != "first":
            return later
        return where(self.layers > sizes.leading, maximum(dense, later), dense)


def _of_kinds(sizes: Sizes, pool: str, layers: int) -> tuple[Num, Num]:
    """Pool of a leading dense layer, and of a layer with experts.

    With $d$ dense of $L$ layers, a mean $m$ and $e$ in a layer with experts, a dense one has $(L m - (L - d) e) / d$.
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
    """A stage by name; under 1F1B the first of several holds most micro-batches, the last holds one."""
    return Stage(**_parts(planned, name), in_flight=_in_flight(planned, name))


def _parts(planned: PlannedJob, name: str) -> dict[str, Any]:
    plans = planned.plans
    exists = where({"first": plans.pp >= 1, "middle": plans.pp > 2, "last": plans.pp > 1}[name], 1.0, 0.0)
    if planned.job.stages_held > 1:
        return _mirrored(planned, name, exists)
    is_first, is_last = float(name == "first"), float(name == "last")
    ahead = planned.split.first
    ends = is_last + is_first * where(plans.pp <= 1, 1.0, 0.0)
    if planned.job.pipeline.folded:
        ahead, ends = ahead / plans.vpp, is_first
    return {
        "name": name, "exists": exists, "layers": exists * getattr(planned.split, name),
        "ahead": exists * is_first * ahead, "first": exists * is_first, "last": exists * ends,
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
    """Kept bytes of the layers of the first stage over those of the first and the last, for one micro-batch."""
    ends = _parts(planned, "first")
    own = StageParts(**ends | {"layers": ends["ahead"]})
    kept, both = (
        each.of_layers(planned.sizes, "kept_bytes", planned.job.model.layers) for each in (own, StageParts(**ends))
    )
    return kept / where(both > 0, both, 1)


def _place(planned: PlannedJob, stage: str) -> tuple[PipelineBlock, Num]:
    """Counts of the schedule, and the rank of a stage; for ``middle`` the fullest middle rank."""
    plans, row = planned.plans, planned.job.pipeline
    index = {"first": 0, "middle": row.fullest(plans.pp), "last": plans.pp - 1}[stage]
    return planned.job.counts(plans, planned.micro_batches), index


def _in_flight(planned: PlannedJob, stage: str) -> Num:
    """Micro-batches in flight on a stage; where a rank holds two stages, the mean of both."""
    row, (counts, index) = planned.job.pipeline, _place(planned, stage)
    if row.held_at_ends is not None and stage == "first":
        return row.held_at_ends(counts.ranks, counts.micro_batches, _share_of_first(planned))
    held = row.closed_forms()[1](counts, index)
    return held / row.copies if row.copies > 1 else held


STAGES = ("first", "middle", "last")
PHASES = ("backward", "loss")
"""Phases of a step with the largest need: backward pass of a layer, and the loss with the head's backward pass."""
UPDATE = "update"
"""Phase of the optimiser's step, which has no activations left; with fused kernels it needs only the states, so that it
only counts for software with temporaries in it."""
GRADIENTS = "gradients/parameter_bytes"
LAYERS_TERM = "activations/layers/activation_bytes"


Calls = dict[str, Call]
States = dict[str, float]
PARAMETERS, ACTIVATIONS = Formula(parameter_bytes), Formula(activation_bytes)
TEMPORARY, GATHERED = Formula(largest_temporary_bytes), Formula(gathered_weights_bytes)
HELD, STASHED = Formula(held_buffers_bytes), Formula(stashed_weights_bytes)


def held_calls(planned: PlannedJob, stage: Stage) -> Calls:
    """Memory that a stage holds throughout a step: weights, gradients, states, buffers."""
    plans, weights = planned.plans, on_stage(planned, "weights", stage)
    each = state_bytes(planned.job)

    def states(name: str) -> Call:
        size = each[name]
        stored = weights - _narrowed(planned, stage, size) if name == "weights" else weights
        if name == "optimizer" and planned.sizes.has("matrices"):
            stored = weights - on_stage(planned, "matrices", stage)
        return _parameters(stored, size, plans.shards(name, planned.gradient_ranks))

    return {
        **{f"{name}/parameter_bytes": states(name) for name in each},
        **_matrix_calls(planned, stage),
        **_expert_calls(planned, stage, each),
        **_frozen_calls(planned, stage),
        **_stashed_calls(planned, stage, each["weights"]),
        **_buffer_calls(planned, stage),
    }


def _matrix_calls(planned: PlannedJob, stage: Stage) -> Calls:
    """Further states of matrices that the optimiser updates as matrices: per element, and per matrix."""
    update, plans, job = planned.job.optimizer.matrices, planned.plans, planned.job
    if update is None or "optimizer" in job.offload:
        return {}
    of_elements = replace(job, optimizer=replace(job.optimizer, state_bytes=update.element_bytes))
    each, out = state_bytes(of_elements)["optimizer"], {}
    for kind, ranks in (("", planned.gradient_ranks), ("expert_", planned.expert_ranks)):
        shards = plans.shards("optimizer", ranks)
        for pool, name, size in (("matrices", "optimizer", each), ("matrix_state_bytes", "preconditioners", 1.0)):
            if planned.sizes.has(f"{kind}{pool}"):
                held = on_stage(planned, f"{kind}{pool}", stage)
                out[f"{kind}{name}/matrices/parameter_bytes"] = _parameters(held, size, shards)
    return out


def _stashed_calls(planned: PlannedJob, stage: Stage, bytes_each: float) -> Calls:
    """Older versions of weights, which asynchronous schedules keep."""
    plans, job = planned.plans, planned.job
    versions = job.pipeline.weight_versions(*_place(planned, stage.name))
    if not isinstance(versions, np.ndarray) and versions == 1:
        return {}
    pools = ("weights", planned.gradient_ranks), ("expert_weights", planned.expert_ranks)
    out: Calls = {}
    for pool, ranks in pools:
        if pool == "weights" or planned.sizes.has(pool):
            arguments = {"parameters": on_stage(planned, pool, stage), "bytes_each": bytes_each, "versions": versions}
            shards = plans.shards("weights", ranks)
            out[f"weight_versions/{pool}/stashed_weights_bytes"] = Call(STASHED, arguments | {"shards": shards})
    return out


def state_bytes(job: Job) -> States:
    """Bytes per trained parameter of weights, gradients and optimiser states, before sharding."""
    memory, precision = job.memory, job.precision
    weight = precision.element_bytes if memory.weight_bytes is None else memory.weight_bytes
    states = job.optimizer.bytes_per_parameter(master_weights=precision.master_weights)
    if precision.master_weights and weight >= 4:
        states = job.optimizer.state_bytes
    gradient = job.gradient_bytes
    if precision.vector_dtype == "bf16" and memory.bf16_gradient_bytes:
        gradient = precision.gradient_bytes + memory.bf16_gradient_bytes
    if memory.updates_in_backward:
        gradient = 0.0
    if memory.pure:
        narrow = job.optimizer.state_bytes < 4  # 8-bit states do not depend on the dtype of the weights
        states = job.optimizer.state_bytes * (1.0 if narrow else min(precision.element_bytes / 4, 1.0))
    if job.adapter is not None and memory.adapter_bytes is not None:
        weight = gradient = memory.adapter_bytes
        states = job.optimizer.state_bytes
    if "optimizer" in job.offload:
        states, gradient = 0.0, 0.0 if memory.offloads_gradients else gradient
        weight = 0.0 if memory.offloads_weights else weight
    if "parameters" in job.offload:
        weight = 0.0
    return {"weights": weight, "gradients": gradient, "optimizer": states}


def _narrowed(planned: PlannedJob, stage: Stage, weight_bytes: float) -> Num:
    """Parameters of full width that storage of the layers' weights in a narrow format saves."""
    narrow = planned.job.precision.quantised_bytes
    if not planned.job.memory.narrow_weights or narrow is None or weight_bytes <= narrow:
        return 0.0
    layers = stage.of_layers(planned.sizes, "weights", planned.job.model.layers)
    return layers * (1.0 - narrow / weight_bytes)


def _buffer_calls(planned: PlannedJob, stage: Stage) -> Calls:
    memory, out = planned.job.memory, {}
    nothing = {"parameters": 0.0, "bytes_each": 0.0, "bucket_bytes": 0.0, "workspace_bytes": 0.0}
    if memory.placeholder_bytes or memory.workspace_bytes:
        has_layers = where(stage.layers > 0, 1.0, 0.0)
        out["buffers/held_buffers_bytes"] = Call(HELD, nothing | {
            "parameters": planned.sizes.layer.products * has_layers, "bytes_each": memory.placeholder_bytes,
            "workspace_bytes": memory.workspace_bytes * stage.exists,
        })  # fmt: skip
    if memory.bucket_bytes:
        buckets = nothing | {"bucket_bytes": memory.bucket_bytes * stage.exists}
        out["buffers/reduce_buckets/held_buffers_bytes"] = Call(HELD, buckets)
    if memory.live_bytes:
        live = nothing | {"bucket_bytes": minimum(memory.live_bytes, _whole_bytes(planned, stage))}
        out["buffers/live_parameters/held_buffers_bytes"] = Call(HELD, live)
    return out


def _whole_bytes(planned: PlannedJob, stage: Stage) -> Num:
    """Unsharded bytes of the weights of a stage that ZeRO-3 shards over several ranks; others count 0."""
    plans, element = planned.plans, planned.job.precision.element_bytes
    pools = [(on_stage(planned, "weights", stage), planned.gradient_ranks)]
    if planned.sizes.has("expert_weights"):
        pools.append((on_stage(planned, "expert_weights", stage), planned.expert_ranks))
    out: Num = 0.0
    for parameters, ranks in pools:
        shared = plans.shares("weights") & (plans.sharing_ranks(ranks) > 1)
        out = out + where(shared, parameters * element, 0.0)
    for name, ranks in (("frozen_bytes", planned.gradient_ranks), ("frozen_expert_bytes", planned.expert_ranks)):
        if planned.sizes.has(name):
            shared = plans.shares("weights") & (plans.sharing_ranks(ranks) > 1)
            out = out + where(shared, on_stage(planned, name, stage), 0.0)
    return out


def phase_calls(planned: PlannedJob, stage: Stage, phase: str) -> Calls:
    """Memory of a stage on top of the held one in a phase: kept activations, temporaries, gathered weights."""
    if phase == UPDATE:
        return _update_calls(planned, stage)
    sizes, full = planned.sizes, is_set(planned.plans.recompute, FULL_RECOMPUTE)
    kept = _kept_bytes(planned, stage)
    exists = stage.exists if phase == "backward" else stage.last
    # Micro-batches with activations of the head: in the loss it includes the one whose backward pass runs.
    waiting = planned.job.pipeline.held_behind_head(_place(planned, stage.name)[0])
    waiting = waiting if phase == "loss" else waiting - 1.0
    ends = sizes.first.kept_bytes * stage.first * stage.in_flight + sizes.last.kept_bytes * stage.last * waiting
    kept_bytes, remade_bytes = (
        stage.largest_layer(sizes, pool, planned.job.model.layers) for pool in ("kept_bytes", "remade_bytes")
    )
    temporary, recomputed = sizes.working_bytes * exists, where(full, kept_bytes, remade_bytes) * exists
    if phase == "loss":
        temporary, recomputed = sizes.loss_bytes * exists, 0.0 * recomputed
    return {
        LAYERS_TERM: _activations(kept, *_on_device(planned.job, stage)),
        "activations/ends/activation_bytes": _activations(ends, 1, 1),
        f"working/{phase}/largest_temporary_bytes": Call(
            TEMPORARY, {"temporary_bytes": temporary, "recomputed_bytes": recomputed}
        ),
        f"working/{phase}/gathered_weights_bytes": _gathered(planned, stage, phase),
    }


def _update_calls(planned: PlannedJob, stage: Stage) -> Calls:
    """Temporaries of the optimiser's step, over the parameters that a rank updates.

    Schedules that update weights within a step hold micro-batches whose backward passes are still to come.
    """
    plans = planned.plans
    trained = on_stage(planned, "weights", stage) / plans.shards("optimizer", planned.gradient_ranks)
    if planned.sizes.has("expert_weights"):
        shards = plans.shards("optimizer", planned.expert_ranks)
        trained = trained + on_stage(planned, "expert_weights", stage) / shards
    each = 0.0 if "optimizer" in planned.job.offload else planned.job.memory.update_bytes
    temporary = {"temporary_bytes": trained * each, "recomputed_bytes": 0.0 * trained}
    calls = {f"working/{UPDATE}/largest_temporary_bytes": Call(TEMPORARY, temporary)}
    if planned.job.pipeline.synchronous:
        return calls
    others = maximum(stage.in_flight - 1.0, 0.0)
    kept, (layers, held) = _kept_bytes(planned, stage), _on_device(planned.job, replace(stage, in_flight=others))
    return {
        LAYERS_TERM: _activations(kept, layers, held),
        "activations/ends/activation_bytes": _activations(planned.sizes.first.kept_bytes * stage.first * others, 1, 1),
        **calls,
    }


def _kept_bytes(planned: PlannedJob, stage: Stage) -> Num:
    """Kept bytes of a layer of a stage per micro-batch."""
    sizes = planned.sizes
    whole: Num = sizes.layer.kept_bytes
    if sizes.later is not None:
        whole = stage.of_layers(sizes, "kept_bytes", planned.job.model.layers) / maximum(stage.layers, 1)
    return kept_of_layer(whole, sizes.boundary_bytes, planned.plans)


def _on_device(job: Job, stage: Stage) -> tuple[Num, Num]:
    """Layers and micro-batches whose activations the device holds."""
    if "activations" not in job.offload:
        return stage.layers, stage.in_flight
    return minimum(stage.layers, HELD_LAYERS), minimum(stage.in_flight, 1.0)


def kept_of_layer(whole: Num, boundary_bytes: Num, plans: Plans) -> Num:
    """Kept activations of a layer, the mean over layers if only some are recomputed."""
    kept = where(is_set(plans.recompute, FULL_RECOMPUTE), minimum(boundary_bytes, whole), whole)
    if isinstance(plans.recompute_every, np.ndarray) or plans.recompute_every != 1:
        kept = (kept + (plans.recompute_every - 1) * whole) / plans.recompute_every
    return kept


def _activations(bytes_each: Num, layers: Num, in_flight: Num) -> Call:
    return Call(ACTIVATIONS, {"kept_bytes_per_layer": bytes_each, "layers": layers, "in_flight": in_flight})


def _gathered(planned: PlannedJob, stage: Stage, phase: str) -> Call:
    """Gathered weights of ZeRO-3, and in the backward pass of a layer its gradients before they are scattered."""
    plans, sizes, job = planned.plans, planned.sizes, planned.job
    sharded, layer, each = plans.shares("weights") & (stage.layers > 0), sizes.layer, job.precision.element_bytes
    dense = where(sharded & (plans.sharing_ranks(planned.gradient_ranks) > 1), 1.0, 0.0)
    parameters, trained = (layer.weights + layer.frozen_bytes / each) * dense, layer.weights * dense
    if sizes.has("expert_weights") or sizes.has("frozen_expert_bytes"):
        experts = where(sharded & (plans.sharing_ranks(planned.expert_ranks) > 1), 1.0, 0.0)
        parameters = parameters + (layer.expert_weights + layer.frozen_expert_bytes / each) * experts
        trained = trained + layer.expert_weights * experts
    first, last = (end.weights + end.frozen_bytes / each for end in (sizes.first, sizes.last))
    ends = (first * stage.first + last * stage.last) * dense
    return Call(GATHERED, {
        "parameters": parameters, "ends_parameters": ends, "bytes_each": each,
        "layers_at_once": minimum(2.0, stage.layers), "trained": trained,
        "gradient_bytes": job.memory.layer_gradient_bytes if phase == "backward" else 0.0,
    })  # fmt: skip


def _parameters(parameters: Num, bytes_each: Num, shards: Num) -> Call:
    return Call(PARAMETERS, {"parameters": parameters, "bytes_each": bytes_each, "shards": shards})


def _expert_calls(planned: PlannedJob, stage: Stage, states: States) -> Calls:
    """Weights, gradients and states of routed experts, sharded over the ranks that hold the same experts."""
    if not planned.sizes.has("expert_weights"):
        return {}
    plans, parameters = planned.plans, on_stage(planned, "expert_weights", stage)
    others = parameters - on_stage(planned, "expert_matrices", stage)
    return {
        f"expert_{name}/parameter_bytes": _parameters(
            others if name == "optimizer" else parameters, size, plans.shards(name, planned.expert_ranks)
        )
        for name, size in states.items()
    }


def _frozen_calls(planned: PlannedJob, stage: Stage) -> Calls:
    """Frozen weights, in the dtype of the run or in their own."""
    plans, sizes = planned.plans, planned.sizes
    out: Calls = {}
    if not sizes.has("frozen") and not sizes.has("frozen_experts"):
        return out
    dense, experts = planned.gradient_ranks, planned.expert_ranks
    for pool, own, ranks in (("frozen", "frozen_bytes", dense), ("frozen_experts", "frozen_expert_bytes", experts)):
        if not sizes.has(pool):
            continue
        shards = plans.shards("weights", ranks)
        away = 0.0 if "parameters" in planned.job.offload else 1.0
        parameters, stored = on_stage(planned, pool, stage), away * on_stage(planned, own, stage)
        mean_bytes = stored / where(parameters > 0, parameters, 1)
        out[f"{pool}_weights/parameter_bytes"] = _parameters(parameters, mean_bytes, shards)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage as calls of formulas."""

    held: Calls
    phases: Mapping[str, Calls]
    """Memory on top of the held one, by phase."""
    totals: Mapping[str, Num]
    """Bytes of the stage by phase."""

    @property
    def fullest_phase(self) -> str:
        """Phase with the largest need, for a single plan."""
        return max(self.totals, key=lambda name: float(np.max(self.totals[name])))

    def calls(self, phase: str | None = None) -> Calls:
        """Terms of one phase, by default of the fullest phase of a single plan."""
        return {**self.held, **self.phases[self.fullest_phase if phase is None else phase]}


def _made(planned: PlannedJob, whole: Call, calls: Calls, phase: str) -> Call:
    """Gradients in a phase, for software in which the first backward pass of a step allocates them.

    With a single micro-batch there are none in the loss, and in the backward pass the gradients of a layer are made
    when its activations are freed: the maximum is at one end of the pass, activations alone or gradients alone.
    """
    single = planned.micro_batches <= 1
    there: Num = 0.0 if phase == "loss" else 1.0
    if phase == "backward":
        size = whole.value
        there = maximum(size - calls[LAYERS_TERM].value, 0.0) / maximum(size, 1.0)
    share = 1.0 if phase == UPDATE else where(single, there, 1.0)
    return replace(whole, arguments={**whole.arguments, "parameters": whole.arguments["parameters"] * share})


def stage_memory(planned: PlannedJob, stage: str, phases: Sequence[str] = PHASES) -> StageMemory:
    """Memory of one stage in some phases, and in the optimiser's step for software with temporaries in it."""
    found = stage_of(planned, stage)
    held = held_calls(planned, found)
    made = planned.job.memory.gradients_made
    phases = (*phases, UPDATE) if planned.job.memory.update_bytes or made else phases
    by_phase = {name: phase_calls(planned, found, name) for name in phases}
    if made and (gradients := held.pop(GRADIENTS, None)) is not None:
        by_phase = {n: {GRADIENTS: _made(planned, gradients, calls, n), **calls} for n, calls in by_phase.items()}
    held_bytes = total_bytes(held)
    totals = {name: total_bytes(calls, held_bytes) for name, calls in by_phase.items()}
    return StageMemory(held=held, phases=by_phase, totals=totals)


def total_bytes(calls: Mapping[str, Call], further_bytes: Num = 0.0) -> Num:
    """Sum of the values of some calls, on top of ``further_bytes``."""
    total = further_bytes
    for call in calls.values():
        total = total + call.value
    return total


def stage_terms(planned: PlannedJob, stage: str, phase: str | None = None) -> dict[str, Num]:
    """Memory terms of one stage in bytes, in its fullest phase unless another is named."""
    calls = stage_memory(planned, stage).calls(phase)
    return {path: call.value for path, call in calls.items()}


def _sharded_memory(sharded: Sharded) -> StageMemory:
    """Memory of a device under a choice of shardings, which gives the bytes that are alive at once."""
    made = {
        "parameter_bytes": lambda size: _parameters(size, 1.0, 1.0),
        "activation_bytes": lambda size: _activations(size, 1.0, 1.0),
        "largest_temporary_bytes": lambda size: Call(TEMPORARY, {"temporary_bytes": size, "recomputed_bytes": 0.0}),
    }
    held = {path: made[path.rpartition("/")[2]](size) for path, size in sharded.memory.items()}
    return StageMemory(held=held, phases={PHASES[0]: {}}, totals={PHASES[0]: total_bytes(held)})


def memory_of(planned: PlannedJob) -> dict[str, StageMemory]:
    """Memory of the stages and phases that can need most."""
    if planned.sizes.sharded is not None:
        return {STAGES[0]: _sharded_memory(planned.sizes.sharded)}
    plans, out, sizes = planned.plans, {}, planned.sizes
    # If the head has neither kept bytes nor temporaries, the loss cannot be the fullest phase.
    no_loss = all(isinstance(each, float) and each == 0.0 for each in (sizes.loss_bytes, sizes.last.kept_bytes))
    for name in STAGES:
        if name == "first" or isinstance(plans.pp, np.ndarray) or plans.pp > (name == "middle") + 1:
            phases = PHASES[:1] if name == "middle" or no_loss else PHASES
            out[name] = stage_memory(planned, name, phases)
    return out


def fullest_bytes(memory: Mapping[str, StageMemory]) -> Num:
    """Memory of the fullest stage in its fullest phase."""
    peak: Num = 0.0
    for stage in memory.values():
        for total in stage.totals.values():
            peak = maximum(peak, total)
    return peak


def peak_bytes(planned: PlannedJob) -> Num:
    """Memory of the fullest stage in its fullest phase."""
    return fullest_bytes(memory_of(planned))


def initialisation_bytes(planned: PlannedJob) -> Num:
    """Weights of a rank with the buffer to which software copies the trained ones before the first step, on the stage
    with most; no part of the peak of a step. 0 for software without the copy.

    Source: DeepSpeed, runtime/zero/stage_1_and_2.py: on the device where there is room, else through the host, where
    the allocator keeps what was freed until memory is short (deepspeedai/DeepSpeed#1611, #7677).
    """
    plans, sizes, element = planned.plans, planned.sizes, planned.job.precision.element_bytes
    most: Num = 0.0
    for name in STAGES if planned.job.memory.joins_weights else ():
        stage = stage_parts(planned, name)
        total: Num = 0.0
        pools = {"weights": 2 * element, "expert_weights": 2 * element, "frozen_bytes": 1, "frozen_expert_bytes": 1}
        for pool, each in pools.items():
            total = total + each * on_stage(planned, pool, stage) if pool == "weights" or sizes.has(pool) else total
        most = maximum(most, where(plans.shares("optimizer") & ~plans.shares("weights"), total, 0.0))
    return most
