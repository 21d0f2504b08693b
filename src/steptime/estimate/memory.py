"""Device memory of the fullest pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime.cost.memory import activation_bytes, gathered_weights_bytes, largest_temporary_bytes, parameter_bytes
from steptime.cost.pipeline import micro_batches_in_flight
from steptime.estimate.operators import Formula
from steptime.estimate.sizes import Part, Sizes
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set

STAGES = ("first", "middle", "last")
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
    full = is_set(plans.recompute, FULL_RECOMPUTE)
    kept = where(full, minimum(sizes.boundary_bytes, sizes.layer.kept_bytes), sizes.layer.kept_bytes)
    if isinstance(plans.recompute_every, np.ndarray) or plans.recompute_every != 1:
        kept = (kept + (plans.recompute_every - 1) * sizes.layer.kept_bytes) / plans.recompute_every
    ends = sizes.first.kept_bytes * has_first * in_flight + sizes.last.kept_bytes * has_last
    ends_weights = sizes.first.weights * has_first + sizes.last.weights * has_last
    ranks, precision = sharing_ranks(plans, gradient_ranks(strategy, plans)), job.precision
    counts = {"layer": layers, "first": has_first, "last": has_last}

    def states(bytes_each: float, zero: int) -> Call:
        shards = where(plans.zero >= zero, ranks, 1)
        return Call(PARAMETERS, {"parameters": weights, "bytes_each": bytes_each, "shards": shards})

    def activations(bytes_each: Num, layers: Num, in_flight: Num) -> Call:
        return Call(ACTIVATIONS, {"kept_bytes_per_layer": bytes_each, "layers": layers, "in_flight": in_flight})

    sharded = where((plans.zero >= 3) & (layers > 0), 1.0, 0.0)
    return {
        "weights/parameter_bytes": states(precision.element_bytes, 3),
        "gradients/parameter_bytes": states(job.gradient_bytes, 2),
        "optimizer/parameter_bytes": states(job.optimizer.bytes_per_parameter(precision), 1),
        **_expert_calls(job, plans, sizes, counts),
        **_frozen_calls(strategy, plans, sizes, counts),
        LAYERS_TERM: activations(kept, layers, in_flight),
        "activations/ends/activation_bytes": activations(ends, 1, 1),
        "working/largest_temporary_bytes": Call(TEMPORARY, {
            "temporary_bytes": sizes.working_bytes * exists,
            "recomputed_bytes": where(full, sizes.layer.kept_bytes, 0.0) * exists}),
        "working/gathered_weights_bytes": Call(GATHERED, {
            "parameters": gathered_parameters(sizes.layer) * sharded, "ends_parameters": ends_weights * sharded,
            "bytes_each": precision.element_bytes, "layers_at_once": 2.0}),
    }  # fmt: skip


def _total(sizes: Sizes, pool: str, counts: Mapping[str, Num]) -> Num:
    """Sum of one pool of parameters over the parts of a stage."""
    total: Num = 0.0
    for part, count in counts.items():
        total = total + getattr(getattr(sizes, part), pool) * count
    return total


def _parameters(parameters: Num, bytes_each: Num, shards: Num) -> Call:
    return Call(PARAMETERS, {"parameters": parameters, "bytes_each": bytes_each, "shards": shards})


def _expert_calls(job: Job, plans: Plans, sizes: Sizes, counts: Mapping[str, Num]) -> dict[str, Call]:
    """Weights, gradients and states of routed experts: shared out over the ranks that hold the same ones."""
    if _absent(sizes, "expert_weights"):
        return {}
    parameters, ranks = _total(sizes, "expert_weights", counts), sharing_ranks(plans, plans.edp)
    states = job.optimizer.bytes_per_parameter(job.precision)
    each = {"weights": (job.precision.element_bytes, 3), "gradients": (job.gradient_bytes, 2), "optimizer": (states, 1)}
    return {
        f"expert_{name}/parameter_bytes": _parameters(parameters, size, where(plans.zero >= zero, ranks, 1))
        for name, (size, zero) in each.items()
    }


def _frozen_calls(strategy: Strategy, plans: Plans, sizes: Sizes, counts: Mapping[str, Num]) -> dict[str, Call]:
    """Weights that are not trained, in the dtype of the run or in their own."""
    out: dict[str, Call] = {}
    if _absent(sizes, "frozen") and _absent(sizes, "frozen_experts"):
        return out
    dense = gradient_ranks(strategy, plans)
    for pool, own, ranks in (("frozen", "frozen_bytes", dense), ("frozen_experts", "frozen_expert_bytes", plans.edp)):
        if _absent(sizes, pool):
            continue
        shards = where(plans.zero >= 3, sharing_ranks(plans, ranks), 1)
        parameters, stored = _total(sizes, pool, counts), _total(sizes, own, counts)
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
