"""How the layers lie on the stages of a pipeline, how long each takes, and which sets the pace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptime.cost.experts import hidden_exchange_s, paired_share
from steptime.cost.offload import exposed_copies_s
from steptime.estimate.layer import BACKWARD, FORWARD
from steptime.estimate.planned import PlannedJob
from steptime.estimate.work import EXPERT_AXIS, Pass
from steptime.num import Num, maximum, where
from steptime.plan.method import StageSplit
from steptime.plan.plans import FULL_RECOMPUTE, is_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Time of each part of the model for one micro-batch."""

    layer: Pass
    first: Pass
    last: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(StageSplit):
    """How the layers lie on the stages."""

    stages: Num
    virtual_stages: Num
    whole: Num
    """Layers of all stages."""
    recomputed: Num
    """Share of the layers whose forward runs once more."""
    paired: Num
    """Share of the passes whose exchange between experts may hide behind the opposite pass of another micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStage:
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
    """Parts of both that make gradients of weights, and that of the first stage."""
    slowest_weights_s: Num
    first_weights_s: Num


def layout_of(planned: PlannedJob) -> Layout:
    """Layers per stage, and how many of them are recomputed."""
    split, plans = planned.split, planned.plans
    equal = (split.first == split.middle) & (split.middle == split.last)
    whole = where(equal, split.first * plans.pp, float(planned.job.model.layers))
    full = where(is_set(plans.recompute, FULL_RECOMPUTE), 1.0, 0.0)
    return Layout(
        stages=plans.pp, virtual_stages=plans.vpp, first=split.first, middle=split.middle, last=split.last,
        whole=where(plans.pp <= 1, split.first, whole), recomputed=full / plans.recompute_every,
        paired=_paired(planned) * (1.0 - full),
    )  # fmt: skip


def _paired(planned: PlannedJob) -> Num:
    """Share of the passes that are paired; Megatron-Core does not pair them where layers are recomputed in full."""
    job, plans = planned.job, planned.plans
    if EXPERT_AXIS not in job.overlap or job.model.experts is None:
        return 0.0 * plans.pp
    return paired_share(planned.micro_batches, plans.vpp, plans.pp)


def exchanges_of(layout: Layout, layer: Pass) -> dict[str, dict[str, Num]]:
    """Arguments of :func:`steptime.cost.experts.hidden_exchange_s` for a layer's forward and backward pass."""
    forward_s, backward_s = layer.forward_exchange_s, layer.backward_exchange_s
    return {
        FORWARD: {
            "exchange_s": forward_s, "behind_s": layer.backward_s - backward_s, "share": layout.paired,
        },
        BACKWARD: {
            "exchange_s": backward_s, "behind_s": layer.forward_s - forward_s, "share": layout.paired,
        },
    }  # fmt: skip


def hidden_exchanges(layout: Layout, layer: Pass) -> tuple[Num, Num]:
    """Time of the exchange of experts that hides in a layer's forward and in its backward pass."""
    each = exchanges_of(layout, layer)
    return hidden_exchange_s(**each[FORWARD]), hidden_exchange_s(**each[BACKWARD])


def exposed_pass(layout: Layout, layer: Pass) -> Pass:
    """A layer's pass without what hides of it."""
    if not isinstance(layout.paired, np.ndarray) and not layout.paired:
        return layer
    forward, backward = hidden_exchanges(layout, layer)
    return replace(layer, forward_s=layer.forward_s - forward, backward_s=layer.backward_s - backward)


def critical_stage(layout: Layout, passes: Passes, copy_s: Num = 0.0, hides_copies: Num = 0.0) -> CriticalStage:
    """Slowest of the first, a middle and the last stage; ties go to the first.

    Args:
        layout: layers of the stages.
        passes: time of each part for one micro-batch.
        copy_s: copy of a layer's activations to the host, or back.
        hides_copies: 1 where computation hides them; what shows has a say in which stage is the slowest.
    """
    layer, alone = exposed_pass(layout, passes.layer), layout.stages <= 1
    backward_s = layer.backward_s + layout.recomputed * layer.forward_s
    one_layer_s = layer.forward_s + backward_s
    first_s = layout.first * one_layer_s + passes.first.both_s + where(alone, passes.last.both_s, 0.0)
    middle_s = where(layout.stages > 2, layout.middle * one_layer_s, 0.0)
    last_s = where(alone, 0.0, layout.last * one_layer_s + passes.last.both_s)
    waited = first_s, middle_s, last_s
    if isinstance(copy_s, np.ndarray) or copy_s:
        wait_s = exposed_copies_s(copy_s, layer.forward_s, backward_s, hides_copies)
        middle, end = where(layout.stages > 2, layout.middle, 0.0), where(alone, 0.0, layout.last)
        waited = first_s + layout.first * wait_s, middle_s + middle * wait_s, last_s + end * wait_s
    longest_s = maximum(waited[0], maximum(waited[1], waited[2]))
    is_first = waited[0] >= longest_s
    is_last = (waited[2] >= longest_s) & (waited[0] < longest_s)
    slowest_s = where(is_first, first_s, where(is_last, last_s, middle_s))
    layers = where(is_first, layout.first, where(is_last, layout.last, layout.middle))
    first, last = where(is_first, 1.0, 0.0), where(is_last, 1.0, where(is_first & alone, 1.0, 0.0))
    ends = passes.first.weights_s, passes.last.weights_s
    return CriticalStage(
        layers=layers, first=first, last=last, slowest_s=slowest_s,
        all_stages_s=layout.whole * one_layer_s + passes.first.both_s + passes.last.both_s,
        all_weights_s=layout.whole * layer.weights_s + ends[0] + ends[1],
        slowest_weights_s=layers * layer.weights_s + first * ends[0] + last * ends[1],
        first_weights_s=layout.first * layer.weights_s + ends[0],
    )  # fmt: skip
