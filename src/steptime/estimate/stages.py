"""How the layers lie on the stages of a pipeline, how long each takes, and which sets the pace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from steptime.cost.experts import dual_paired_share, hidden_exchange_s, paired_share
from steptime.cost.pipeline import zero_bubble_s
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
    held: Num
    """Stages that a rank holds; where two, ``first`` and ``last`` are their mean."""
    paired: Num
    """Share of the passes whose exchange between experts may hide behind the opposite pass of another micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStage:
    """The stage that sets the pace of the pipeline."""

    layers: Num
    first: Num
    """Share of the micro-batches that pass the embedding there: 1, 0, or a half where it is mirrored."""
    last: Num
    """Likewise the head."""
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
    split, plans, held = planned.split, planned.plans, planned.job.stages_held
    equal = (split.first == split.middle) & (split.middle == split.last)
    whole = where(equal, split.first * plans.pp, float(planned.job.model.layers))
    full = where(is_set(plans.recompute, FULL_RECOMPUTE), 1.0, 0.0)
    first, last = shared_ends(held, split.first, split.last)
    return Layout(
        stages=plans.pp, virtual_stages=plans.vpp, first=first, middle=split.middle, last=last,
        whole=where(plans.pp <= 1, split.first, whole), recomputed=plans.recomputed, held=held,
        paired=_paired(planned) * (1.0 - full),
    )  # fmt: skip


def shared_ends(held: Num, first: Num, last: Num) -> tuple[Num, Num]:
    """Something of the first and of the last stage; the mean of both where a rank holds both (DualPipe)."""
    mean = (first + last) / 2
    return where(held > 1, mean, first), where(held > 1, mean, last)


def _paired(planned: PlannedJob) -> Num:
    """Share of the passes that are paired; Megatron-Core does not pair them where layers are recomputed in full."""
    job, plans = planned.job, planned.plans
    if EXPERT_AXIS not in job.overlap or job.model.experts is None:
        return 0.0 * plans.pp
    if job.stages_held > 1:
        return dual_paired_share(planned.micro_batches, plans.pp)
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


class Copies(NamedTuple):
    """What a layer waits for copies of its activations, for one micro-batch."""

    wait_s: Num
    """Beside its whole passes."""
    more_s: Num
    """How much longer where nothing of the backward pass makes gradients of weights."""


def _lasting_s(busy_s: Num, layers: Num, copies: Copies) -> Num:
    """Passes of a stage of so many layers with the waits for their copies."""
    waits = isinstance(copies.wait_s, np.ndarray) or copies.wait_s
    return busy_s + layers * copies.wait_s if waits else busy_s


def _paces_s(
    layout: Layout, layer: Pass, busy_s: tuple[Num, ...], counts: tuple[Num, ...], whole: Mapping[str, Num],
    of_weights: tuple[Num, ...], copies: Copies, filling: Num, micro_batches: Num,
) -> list[Num]:  # fmt: skip
    """What makes one stage slower than another: its passes, or where they fill waits the step through each of them."""
    lasting_s = [_lasting_s(each_s, count, copies) for each_s, count in zip(busy_s, counts, strict=True)]
    if not isinstance(filling, np.ndarray) and not filling:
        return lasting_s
    weights_s = layer.weights_s - copies.more_s
    others = {
        "all_stages_s": _lasting_s(whole["all_stages_s"], layout.whole, copies),
        "all_weights_s": whole["all_weights_s"] - layout.whole * copies.more_s,
        "first_weights_s": whole["first_weights_s"] - layout.first * copies.more_s,
        "filling": filling,
        "virtual_stages": 1,
    }
    return [
        micro_batches * each_s
        + zero_bubble_s(slowest_stage_s=each_s, slowest_weights_s=count * weights_s + end_s, **others)
        for each_s, count, end_s in zip(lasting_s, counts, of_weights, strict=True)
    ]


def critical_stage(layout: Layout, passes: Passes, copies: Copies, filling: Num, micro_batches: Num) -> CriticalStage:
    """Of the first, a middle and the last stage the one through which a step takes longest; ties go to the first.

    Args:
        layout: layers of the stages.
        passes: time of each part for one micro-batch, without what hides of it.
        copies: waits of a layer, which have a say in which stage is the slowest.
        filling: passes for gradients of weights that fill the bubble (:func:`filling_passes`): a stage that is slow for
            its gradients of weights has more to fill it with.
        micro_batches: micro-batches of a step.
    """
    layer, alone, deep = passes.layer, layout.stages <= 1, layout.stages > 2
    one_layer_s = layer.forward_s + layer.backward_with_s(layout.recomputed)
    counts = layout.first, where(deep, layout.middle, 0.0), where(alone, 0.0, layout.last)
    first_s, last_s = shared_ends(layout.held, passes.first.both_s, passes.last.both_s)
    busy_s = (
        counts[0] * one_layer_s + first_s + where(alone, last_s, 0.0),
        counts[1] * one_layer_s,
        counts[2] * one_layer_s + where(alone, 0.0, last_s),
    )
    first_weights_s, last_weights_s = shared_ends(layout.held, passes.first.weights_s, passes.last.weights_s)
    of_weights = first_weights_s, 0.0, last_weights_s
    whole = {
        "all_stages_s": layout.whole * one_layer_s + first_s + last_s,
        "all_weights_s": layout.whole * layer.weights_s + sum(of_weights),
        "first_weights_s": layout.first * layer.weights_s + of_weights[0],
    }
    pace_s = _paces_s(layout, layer, busy_s, counts, whole, of_weights, copies, filling, micro_batches)
    longest_s = maximum(pace_s[0], maximum(pace_s[1], pace_s[2]))
    is_first = pace_s[0] >= longest_s
    is_last = (pace_s[2] >= longest_s) & (pace_s[0] < longest_s)
    layers = where(is_first, layout.first, where(is_last, layout.last, layout.middle))
    first, last = where(is_first, 1.0, 0.0), where(is_last, 1.0, where(is_first & alone, 1.0, 0.0))
    first_held, last_held = shared_ends(layout.held, first, last)
    return CriticalStage(
        layers=layers, first=first_held, last=last_held,
        slowest_s=where(is_first, busy_s[0], where(is_last, busy_s[2], busy_s[1])),
        slowest_weights_s=layers * layer.weights_s + first * of_weights[0] + last * of_weights[2], **whole,
    )  # fmt: skip


def mirrored_bubble(layout: Layout, passes: Passes, stage: CriticalStage) -> dict[str, Num]:
    """Arguments of :func:`steptime.cost.pipeline.dual_pipe_bubble_s`."""
    layer, ends, again = passes.layer, (passes.first, passes.last), layout.recomputed
    beside = exposed_pass(replace(layout, paired=where(layout.paired > 0, 1.0, 0.0)), layer)
    together_s = layout.whole * (beside.forward_s + beside.backward_with_s(again)) + sum(end.both_s for end in ends)
    backward_s = layout.whole * layer.backward_with_s(again) + sum(end.backward_s for end in ends)
    stages = layout.stages
    return {
        "stages": stages,
        "together_s": together_s / stages,
        "backward_s": backward_s / stages,
        "weights_s": stage.all_weights_s / stages,
        "slowest_s": stage.slowest_s,
        "mean_s": stage.all_stages_s / stages,
    }
