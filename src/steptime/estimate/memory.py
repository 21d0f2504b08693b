"""Device memory of the fullest pipeline stage in its fullest phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime.cost.memory import (
    activation_bytes,
    gathered_weights_bytes,
    held_buffers_bytes,
    largest_temporary_bytes,
    parameter_bytes,
)
from steptime.cost.pipeline import micro_batches_in_flight
from steptime.estimate.operators import Formula
from steptime.estimate.sizes import Part, Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set

STAGES = ("first", "middle", "last")
PHASES = ("backward", "loss")
"""Moments of a step that can need most: the backward pass of a layer, and the loss with the head's backward pass. The
optimiser's step comes when no activations are left; with fused kernels it needs no more than the states."""
LAYERS_TERM = "activations/layers/activation_bytes"


def gradient_ranks(strategy: Strategy, plans: Plans) -> Num:
    """Ranks that reduce a gradient together."""
    ranks: Num = 1
    for axis in strategy.gradient_axes:
        ranks = ranks * getattr(plans, axis)
    return ranks


def sharing_ranks(plans: Plans, ranks: Num) -> Num:
    """Ranks of a group of so many that ZeRO shares out over: all, or those of one replica of the shards."""
    if not isinstance(plans.shard, np.ndarray) and not plans.shard:
        return ranks
    return where(plans.shard > 0, minimum(plans.shard, ranks), ranks)


@dataclass(frozen=True, slots=True)
class Call:
    """A formula and what it is called with."""

    formula: Formula
    arguments: Mapping[str, Num]

    @property
    def value(self) -> Num:
        """Result."""
        return self.formula(self.arguments)


Calls = dict[str, Call]
PARAMETERS, ACTIVATIONS = Formula(parameter_bytes), Formula(activation_bytes)
TEMPORARY, GATHERED = Formula(largest_temporary_bytes), Formula(gathered_weights_bytes)
HELD = Formula(held_buffers_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: how often it has each part of the model, and what it holds (zero where the plan has no such stage)."""

    name: str
    exists: Num
    layers: Num
    first: Num
    """1 where it has the embedding; likewise the head."""
    last: Num
    in_flight: Num

    def of_layers(self, sizes: Sizes, pool: str, layers: int) -> Num:
        """Sum of something over the layers of the stage: the mean of all, or where dense ones stand first, of its own.

        With $d$ leading of $L$ layers, a mean $m$ and $e$ of a layer with experts, one without has
        $(L m - (L - d) e) / d$.
        """
        mean: Num = getattr(sizes.layer, pool)
        if sizes.later is None:
            return mean * self.layers
        later: Num = getattr(sizes.later, pool)
        dense = (layers * mean - (layers - sizes.leading) * later) / sizes.leading
        count = minimum(self.layers, sizes.leading) if self.name == "first" else 0.0
        return count * dense + (self.layers - count) * later


def stage_of(method: Method, job: Job, plans: Plans, name: str) -> Stage:
    """A stage by name.

    The first of several stages holds the embedding and, under 1F1B, most micro-batches; the last holds the head
    and one micro-batch; a single stage is ``first`` and holds both ends.
    """
    split, alone = method.stage_split(job, plans), plans.pp <= 1
    exists = where({"first": plans.pp >= 1, "middle": plans.pp > 2, "last": plans.pp > 1}[name], 1.0, 0.0)
    return Stage(
        name=name, exists=exists,
        layers=exists * {"first": split.first, "middle": split.middle, "last": split.last}[name],
        first=exists * float(name == "first"),
        last=exists * (float(name == "last") + float(name == "first") * where(alone, 1.0, 0.0)),
        in_flight=_in_flight(method, job, plans, name),
    )  # fmt: skip


def held_calls(strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: Stage) -> Calls:
    """What a stage holds throughout: weights, gradients, states, buffers."""
    weights = _total(sizes, "weights", stage, job)
    ranks = sharing_ranks(plans, gradient_ranks(strategy, plans))
    each = state_bytes(job)

    def states(name: str) -> Call:
        size, zero = each[name]
        return _parameters(weights, size, where(plans.zero >= zero, ranks, 1))

    return {
        **{f"{name}/parameter_bytes": states(name) for name in each},
        **_expert_calls(job, plans, sizes, stage),
        **_frozen_calls(strategy, job, plans, sizes, stage),
        **_buffer_calls(job, sizes, stage),
    }


def state_bytes(job: Job) -> dict[str, tuple[float, int]]:
    """Bytes per trained parameter of weights, gradients and states, and the ZeRO stage from which they are sharded."""
    memory, precision = job.memory, job.precision
    weight = precision.element_bytes if memory.weight_bytes is None else memory.weight_bytes
    states = job.optimizer.bytes_per_parameter(precision)
    if precision.master_weights and weight >= 4:
        states = job.optimizer.state_bytes
    gradient = job.gradient_bytes
    if precision.attention_dtype == "bf16":
        gradient += memory.bf16_gradient_bytes
    if memory.pure:
        states = job.optimizer.state_bytes * min(precision.element_bytes / 4, 1.0)
    if "optimizer" in job.offload:
        states, gradient = 0.0, 0.0 if memory.offloads_gradients else gradient
    return {"weights": (weight, 3), "gradients": (gradient, 2), "optimizer": (states, 1)}


def _buffer_calls(job: Job, sizes: Sizes, stage: Stage) -> Calls:
    memory = job.memory
    if not (memory.placeholder_bytes or memory.workspace_bytes or memory.bucket_bytes):
        return {}
    has_layers = where(stage.layers > 0, 1.0, 0.0)
    return {"buffers/held_buffers_bytes": Call(HELD, {
        "parameters": sizes.layer.products * has_layers, "bytes_each": memory.placeholder_bytes,
        "bucket_bytes": memory.bucket_bytes * stage.exists, "workspace_bytes": memory.workspace_bytes * stage.exists,
    })}  # fmt: skip


def phase_calls(job: Job, plans: Plans, sizes: Sizes, stage: Stage, phase: str) -> Calls:
    """What a stage holds beside that in one phase: kept activations, temporaries, gathered weights."""
    full = is_set(plans.recompute, FULL_RECOMPUTE)
    kept = _kept_bytes(job, plans, sizes, stage, full)
    exists = stage.exists if phase == "backward" else stage.last
    ends = sizes.first.kept_bytes * stage.first * stage.in_flight
    temporary, recomputed = sizes.working_bytes * exists, where(full, _largest(sizes).kept_bytes, 0.0) * exists
    if phase == "loss":
        ends = ends + sizes.last.kept_bytes * stage.last
        temporary, recomputed = sizes.loss_bytes * exists, 0.0 * recomputed
    return {
        LAYERS_TERM: _activations(kept, stage.layers, stage.in_flight),
        "activations/ends/activation_bytes": _activations(ends, 1, 1),
        f"working/{phase}/largest_temporary_bytes": Call(
            TEMPORARY, {"temporary_bytes": temporary, "recomputed_bytes": recomputed}
        ),
        f"working/{phase}/gathered_weights_bytes": _gathered(job, plans, sizes, stage, phase),
    }


def _largest(sizes: Sizes) -> Part:
    """The layer that has most: where layers differ, one with experts."""
    return sizes.layer if sizes.later is None else sizes.later


def _kept_bytes(job: Job, plans: Plans, sizes: Sizes, stage: Stage, full: Num) -> Num:
    """Kept bytes of a layer per micro-batch, the mean over layers where only some are recomputed."""
    if "activations" in job.offload:
        return 0.0 * sizes.layer.kept_bytes
    whole: Num = sizes.layer.kept_bytes
    if sizes.later is not None:
        whole = stage.of_layers(sizes, "kept_bytes", job.model.layers) / maximum(stage.layers, 1)
    kept = where(full, minimum(sizes.boundary_bytes, whole), whole)
    if isinstance(plans.recompute_every, np.ndarray) or plans.recompute_every != 1:
        kept = (kept + (plans.recompute_every - 1) * whole) / plans.recompute_every
    return kept


def _activations(bytes_each: Num, layers: Num, in_flight: Num) -> Call:
    return Call(ACTIVATIONS, {"kept_bytes_per_layer": bytes_each, "layers": layers, "in_flight": in_flight})


def _gathered(job: Job, plans: Plans, sizes: Sizes, stage: Stage, phase: str) -> Call:
    """Weights that ZeRO-3 gathers, and in a layer's backward pass its gradients before they are scattered."""
    sharded = where((plans.zero >= 3) & (stage.layers > 0), 1.0, 0.0)
    ends = sizes.first.weights * stage.first + sizes.last.weights * stage.last
    layer = gathered_parameters(sizes.layer) * sharded
    gradient = job.memory.layer_gradient_bytes if phase == "backward" else 0.0
    return Call(GATHERED, {
        "parameters": layer, "ends_parameters": ends * sharded, "bytes_each": job.precision.element_bytes,
        "layers_at_once": 2.0, "trained": (sizes.layer.weights + sizes.layer.expert_weights) * sharded,
        "gradient_bytes": gradient,
    })  # fmt: skip


def _total(sizes: Sizes, pool: str, stage: Stage, job: Job) -> Num:
    """Sum of one pool of parameters over the parts of a stage."""
    layers = stage.of_layers(sizes, pool, job.model.layers)
    first: Num = getattr(sizes.first, pool)
    last: Num = getattr(sizes.last, pool)
    return layers + first * stage.first + last * stage.last


def _parameters(parameters: Num, bytes_each: Num, shards: Num) -> Call:
    return Call(PARAMETERS, {"parameters": parameters, "bytes_each": bytes_each, "shards": shards})


def _expert_calls(job: Job, plans: Plans, sizes: Sizes, stage: Stage) -> Calls:
    """Weights, gradients and states of routed experts: shared out over the ranks that hold the same ones."""
    if _absent(sizes, "expert_weights"):
        return {}
    parameters, ranks = _total(sizes, "expert_weights", stage, job), sharing_ranks(plans, plans.edp)
    return {
        f"expert_{name}/parameter_bytes": _parameters(parameters, size, where(plans.zero >= zero, ranks, 1))
        for name, (size, zero) in state_bytes(job).items()
    }


def _frozen_calls(strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: Stage) -> Calls:
    """Weights that are not trained, in the dtype of the run or in their own."""
    out: Calls = {}
    if _absent(sizes, "frozen") and _absent(sizes, "frozen_experts"):
        return out
    dense = gradient_ranks(strategy, plans)
    for pool, own, ranks in (("frozen", "frozen_bytes", dense), ("frozen_experts", "frozen_expert_bytes", plans.edp)):
        if _absent(sizes, pool):
            continue
        shards = where(plans.zero >= 3, sharing_ranks(plans, ranks), 1)
        parameters, stored = _total(sizes, pool, stage, job), _total(sizes, own, stage, job)
        mean_bytes = stored / where(parameters > 0, parameters, 1)
        out[f"{pool}_weights/parameter_bytes"] = _parameters(parameters, mean_bytes, shards)
    return out


def _absent(sizes: Sizes, pool: str) -> bool:
    parts = [getattr(part, pool) for part in (sizes.layer, sizes.first, sizes.last)]
    return all(isinstance(value, float) and value == 0.0 for value in parts)


def gathered_parameters(part: Part) -> Num:
    """Parameters that ZeRO-3 gathers: all of a layer."""
    total = part.weights
    for pool in (part.expert_weights, part.frozen, part.frozen_experts):
        if not isinstance(pool, float) or pool:
            total = total + pool
    return total


def _in_flight(method: Method, job: Job, plans: Plans, stage: str) -> Num:
    """Micro-batches in flight on the first, the second (the fullest of the middle) or the last stage."""
    index = {"first": 0, "middle": minimum(1, plans.pp - 1), "last": plans.pp - 1}[stage]
    return micro_batches_in_flight(plans.pp, method.micro_batches(job, plans), plans.vpp, index)


def stage_calls(
    method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str, phase: str | None = None
) -> Calls:
    """Memory terms of one stage in one phase, by default the fullest of a single plan, as calls of formulas."""
    found = stage_of(method, job, plans, stage)
    held = held_calls(strategy, job, plans, sizes, found)
    phases = {name: phase_calls(job, plans, sizes, found, name) for name in PHASES}
    if phase is None:
        phase = max(PHASES, key=lambda name: float(np.max(total_bytes(phases[name]))))
    return {**held, **phases[phase]}


def total_bytes(calls: Mapping[str, Call]) -> Num:
    """Sum of some calls."""
    return stage_total({path: call.value for path, call in calls.items()})


def stage_terms(
    method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str, phase: str | None = None
) -> dict[str, Num]:
    """Memory terms of one stage in bytes."""
    calls = stage_calls(method, strategy, job, plans, sizes, stage, phase)
    return {path: call.value for path, call in calls.items()}


def stage_total(terms: Mapping[str, Num]) -> Num:
    """Sum of a stage's terms."""
    total: Num = 0.0
    for value in terms.values():
        total = total + value
    return total


def fullest_phase(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes, stage: str) -> str:
    """Phase in which one stage of a single plan needs most."""
    found = stage_of(method, job, plans, stage)
    return max(PHASES, key=lambda name: float(total_bytes(phase_calls(job, plans, sizes, found, name))))


def peak_bytes(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes) -> Num:
    """Memory of the fullest stage in its fullest phase."""
    peak: Num = 0.0
    for name in STAGES:
        stage = stage_of(method, job, plans, name)
        held = total_bytes(held_calls(strategy, job, plans, sizes, stage))
        for phase in PHASES:
            if phase == "loss" and (name == "middle" or _no_loss(sizes)):
                continue
            total = held
            for call in phase_calls(job, plans, sizes, stage, phase).values():
                total = total + call.value
            peak = maximum(peak, total)
    return peak


def _no_loss(sizes: Sizes) -> bool:
    """Whether the head neither keeps nor needs anything, so that the loss cannot bind."""
    return all(isinstance(value, float) and value == 0.0 for value in (sizes.loss_bytes, sizes.last.kept_bytes))
