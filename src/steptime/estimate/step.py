"""Composes the time of a step from the time of a layer: pipeline, data parallelism, optimiser.

How the layers lie on the stages of a pipeline, how long each takes, and which sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from steptime.cost.data_parallel import (
    exposed_buckets_s,
    exposed_gather_s,
    exposed_sharded_s,
    free_links_s,
)
from steptime.cost.experts import hidden_exchange_s
from steptime.cost.host import exposed_copies_s, growth_s, lasting_s, stage_issue_s, step_overhead_s
from steptime.cost.network import fair_share_wait_s
from steptime.cost.pipeline import pipeline_bubble_s, zero_bubble_s
from steptime.estimate.hiding import DataParallel, Hiding, behind, ends, layerwise, shared_out
from steptime.estimate.layer import BACKWARD, FORWARD
from steptime.estimate.operators import Call, Formula, formula_of
from steptime.estimate.step_inputs import Layout, StepInputs, of_mirrored
from steptime.estimate.traffic import Sums
from steptime.estimate.work import Pass
from steptime.num import Num, maximum, where
from steptime.plan.framework import Framework
from steptime.schedule import SCHEDULES, Schedule

BUBBLE, ZERO_BUBBLE = formula_of(pipeline_bubble_s), formula_of(zero_bubble_s)
CONTENTION = Formula(fair_share_wait_s)
COPIES, HIDDEN = Formula(exposed_copies_s), Formula(hidden_exchange_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Time of each part of the model for one micro-batch."""

    layer: Pass
    first: Pass
    last: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStage:
    """The stage that sets the pace of the pipeline."""

    layers: Num
    first: Num
    """Share of the micro-batches that pass the embedding there: 1, 0, or a half where it is mirrored."""
    last: Num
    """Share of the micro-batches that pass the head there."""
    all_stages_s: Num
    """One micro-batch through all stages, forward and backward."""
    slowest_s: Num
    """The part of it that is spent on this stage."""
    all_weights_s: Num
    """Parts of both that make gradients of weights, and that of the first stage."""
    slowest_weights_s: Num
    first_weights_s: Num
    slowest_forward_s: Num
    """Forward pass of the slowest stage; of the last one its gradients of weights (:func:`zero_bubble_s`)."""


def shared_ends(layout: Layout, first: Num, last: Num) -> tuple[Num, Num]:
    """What the first and the last rank have of the two ends of the model, for one micro-batch."""
    if isinstance(layout.folded, np.ndarray) or layout.folded:
        first, last = where(layout.folded > 0, first + last, first), where(layout.folded > 0, 0.0 * last, last)
    return of_mirrored(layout.held, first, last)


def overlapped_exchanges(layout: Layout, layer: Pass) -> dict[str, Call]:
    """Overlapped time of the exchange of experts in a layer's forward and backward pass; empty where no pass is paired.

    Each runs behind the rest of the opposite pass of another micro-batch.
    """
    if not isinstance(layout.paired, np.ndarray) and not layout.paired:
        return {}
    forward_s, backward_s = layer.forward_exchange_s, layer.backward_exchange_s
    behind_s = {FORWARD: layer.backward_s - backward_s, BACKWARD: layer.forward_s - forward_s}
    return {
        phase: Call(HIDDEN, {"exchange_s": exchange_s, "behind_s": behind_s[phase], "share": layout.paired})
        for phase, exchange_s in ((FORWARD, forward_s), (BACKWARD, backward_s))
    }


def exposed_pass(layer: Pass, overlapped: Mapping[str, Call]) -> Pass:
    """A layer's pass without the exchanges that are overlapped."""
    if not overlapped:
        return layer
    forward_s, backward_s = (overlapped[phase].value for phase in (FORWARD, BACKWARD))
    return replace(layer, forward_s=layer.forward_s - forward_s, backward_s=layer.backward_s - backward_s)


class Copies(NamedTuple):
    """What a layer waits for copies of its activations, for one micro-batch."""

    wait_s: Num
    """Beside its whole passes."""
    more_s: Num
    """How much longer where nothing of the backward pass makes gradients of weights."""


class _Stages(NamedTuple):
    """The first, a middle and the last stage, each for one micro-batch."""

    fills: bool
    """Whether their passes for gradients of weights fill waits."""
    layers: tuple[Num, Num, Num]
    busy_s: tuple[Num, Num, Num]
    ends_weights_s: tuple[Num, Num, Num]
    """Gradients of weights of embedding and head."""
    forward_s: tuple[Num, Num]
    """Of the first and a middle stage."""


def _lasting_s(busy_s: Num, layers: Num, copies: Copies) -> Num:
    """Passes of a stage of so many layers with the waits for their copies."""
    waits = isinstance(copies.wait_s, np.ndarray) or copies.wait_s
    return busy_s + layers * copies.wait_s if waits else busy_s


def _paces_s(
    layout: Layout, layer: Pass, stages: _Stages, whole: Mapping[str, Num], copies: Copies, filling: Num,
    micro_batches: Num,
) -> list[Num]:  # fmt: skip
    """What makes one stage slower than another: its passes, or where they fill waits the step through each of them."""
    lasting_s = [_lasting_s(each_s, count, copies) for each_s, count in zip(stages.busy_s, stages.layers, strict=True)]
    if not stages.fills:
        return lasting_s
    weights_s = layer.weights_s - copies.more_s
    others = {
        "all_stages_s": _lasting_s(whole["all_stages_s"], layout.whole, copies),
        "all_weights_s": whole["all_weights_s"] - layout.whole * copies.more_s,
        "first_weights_s": whole["first_weights_s"] - layout.first * copies.more_s,
        "filling": filling,
        "virtual_stages": layout.virtual_stages,
    }
    of_weights = [count * weights_s + end_s for count, end_s in zip(stages.layers, stages.ends_weights_s, strict=True)]
    forward_s = (*stages.forward_s, of_weights[2])
    return [
        micro_batches * each_s
        + zero_bubble_s(slowest_stage_s=each_s, slowest_weights_s=own_s, slowest_forward_s=fills_s, **others)
        for each_s, own_s, fills_s in zip(lasting_s, of_weights, forward_s, strict=True)
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
    first_s, last_s = shared_ends(layout, passes.first.both_s, passes.last.both_s)
    busy_s = (
        counts[0] * one_layer_s + first_s + where(alone, last_s, 0.0),
        counts[1] * one_layer_s,
        counts[2] * one_layer_s + where(alone, 0.0, last_s),
    )
    first_weights_s, last_weights_s = shared_ends(layout, passes.first.weights_s, passes.last.weights_s)
    of_weights = first_weights_s, 0.0, last_weights_s
    stages = _Stages(
        fills=isinstance(filling, np.ndarray) or bool(filling), layers=counts, busy_s=busy_s, ends_weights_s=of_weights,
        forward_s=(layout.first * layer.forward_s + passes.first.forward_s, layout.middle * layer.forward_s),
    )  # fmt: skip
    whole = {
        "all_stages_s": layout.whole * one_layer_s + first_s + last_s,
        "all_weights_s": layout.whole * layer.weights_s + sum(of_weights),
        "first_weights_s": layout.first * layer.weights_s + of_weights[0],
    }
    pace_s = _paces_s(layout, layer, stages, whole, copies, filling, micro_batches)
    longest_s = maximum(pace_s[0], maximum(pace_s[1], pace_s[2]))
    is_first = pace_s[0] >= longest_s
    is_last = (pace_s[2] >= longest_s) & (pace_s[0] < longest_s)
    layers = where(is_first, layout.first, where(is_last, layout.last, layout.middle))
    first, last = where(is_first, 1.0, 0.0), where(is_last, 1.0, where(is_first & alone, 1.0, 0.0))
    first_held, last_held = of_mirrored(layout.held, first, where(layout.folded > 0, first, last))
    slowest_weights_s = layers * layer.weights_s + first * of_weights[0] + last * of_weights[2]
    forward_s: Num = 0.0
    if stages.fills:
        forward_s = where(is_first, stages.forward_s[0], where(is_last, slowest_weights_s, stages.forward_s[1]))
    return CriticalStage(
        layers=layers, first=first_held, last=last_held,
        slowest_s=where(is_first, busy_s[0], where(is_last, busy_s[2], busy_s[1])),
        slowest_weights_s=slowest_weights_s, slowest_forward_s=forward_s, **whole,
    )  # fmt: skip


def _mean_passes(layout: Layout, passes: Passes) -> dict[str, Num]:
    """Passes of a rank, the mean over the ranks, without overlap; and what a pair of passes overlaps."""
    layer, ends, again = passes.layer, (passes.first, passes.last), layout.recomputed
    pair = exposed_pass(layer, overlapped_exchanges(replace(layout, paired=where(layout.paired > 0, 1.0, 0.0)), layer))
    hidden_s = layout.whole * (layer.forward_s - pair.forward_s + layer.backward_s - pair.backward_s)
    forward_s = layout.whole * layer.forward_s + sum(end.forward_s for end in ends)
    backward_s = layout.whole * layer.backward_with_s(again) + sum(end.backward_s for end in ends)
    weights_s = layout.whole * layer.weights_s + sum(end.weights_s for end in ends)
    sums_s = {"forward_s": forward_s, "inputs_s": backward_s - weights_s, "weights_s": weights_s, "hidden_s": hidden_s}
    return {name: sum_s / layout.stages for name, sum_s in sums_s.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Terms of one optimiser step on the critical stage; exposed unless the name says otherwise."""

    stage: CriticalStage
    micro_batches: Num
    steady_s: Num
    """All micro-batches through the critical stage."""
    stage_link_s: Num
    """One message to the next stage, on average."""
    waited_messages: Num
    """Those that it waits for, beside the ones that fill and drain the pipeline; below their time."""
    filling_messages: Num
    pipeline_comm_s: Num
    idle_s: Num
    """Filling and draining of the pipeline, but for the messages between stages."""
    bubble_links_s: Num
    """Those."""
    stage_host_s: Num
    """Time that the host loses per micro-batch."""
    data: DataParallel
    updates: Num
    """Updates of the weights in the step; the times below and those of ``data`` are of all of them."""
    replicated_s: Num
    """Gradients of weights that tensor-parallel ranks replicate."""
    optimizer_s: Num
    matrix_update_s: Num
    """Products of matrices in the optimiser's step; below gathering of the momentum that they are made of."""
    momentum_gather_s: Num
    owned: Num
    """Parameters that a rank of the stage with most of them updates."""
    bubble: Call
    """How :attr:`idle_s` was computed."""
    copies: tuple[tuple[Call, Num], ...]
    """How :attr:`copies_s` was computed: the sum of these calls, each so many times."""
    exchanges: Mapping[str, Call]
    """Overlapped exchange of experts of a layer, by direction."""
    copies_s: Num
    """Waits for activations on their way to the host and back, filling and draining of the pipeline included."""
    copies_busy_s: Num
    overhead_s: Num
    """Time of a step that no work explains: what ranks do together, once a step."""
    contention: Call | None
    """Messages between stages that share their links with gradients in the background; None: the machine does not
    tell its links apart."""
    devices: Num
    growth: Num
    """Relative growth of its work per doubling of the devices."""
    behind_forward_s: Num
    """Forward time of one layer, behind which a gathering can hide; likewise backward."""
    behind_backward_s: Num

    @property
    def bubble_s(self) -> Num:
        """Filling and draining of the pipeline."""
        return self.idle_s + self.bubble_links_s

    @property
    def update_s(self) -> Num:
        """What one update takes: its exposed traffic, and its pass of the optimiser."""
        update_s = self.optimizer_s + self.matrix_update_s + self.momentum_gather_s
        return (self.data.exposed_s + self.replicated_s + update_s) / self.updates

    @property
    def work_s(self) -> Num:
        """Everything that grows with the work."""
        alone_s = (
            self.steady_s + self.pipeline_comm_s + self.bubble_s + self.data.exposed_s + self.replicated_s
            + self.optimizer_s + self.matrix_update_s + self.momentum_gather_s + self.stage_host_s + self.copies_s
        )  # fmt: skip
        return alone_s if self.contention is None else alone_s + self.contention.value

    @property
    def growth_s(self) -> Num:
        """Stragglers and shared links of many devices."""
        return self._growth_s(self.work_s)

    @property
    def total_s(self) -> Num:
        """Time of the step."""
        work_s = self.work_s
        return work_s + self.overhead_s + self._growth_s(work_s)

    def _growth_s(self, work_s: Num) -> Num:
        if isinstance(self.growth, float) and not self.growth:
            return 0.0
        return growth_s(work_s, self.devices, self.growth)


def _split(inputs: StepInputs, passes: Passes) -> Passes:
    """The passes, of which only plans whose schedule splits backward passes have gradients of weights apart.

    Plans with several schedules side by side all have the column, which means something for some of them.
    """
    if len(inputs.schedules) == 1:
        return passes
    splits = _by_schedule(inputs, lambda row: float(row.splits))
    parts = {part: getattr(passes, part) for part in ("layer", "first", "last")}
    return Passes(**{part: replace(each, weights_s=each.weights_s * splits) for part, each in parts.items()})


def compose(inputs: StepInputs, passes: Passes, framework: Framework) -> Step:
    """One optimiser step from the times of its parts."""
    layout, passes, updates = inputs.layout, _split(inputs, passes), inputs.updates
    exchanges = overlapped_exchanges(layout, passes.layer)
    layer = exposed_pass(passes.layer, exchanges)
    copies = _layer_copies(inputs, layer)
    stage = critical_stage(layout, replace(passes, layer=layer), copies, inputs.filling, inputs.micro_batches)
    stages, chunks, links = layout.stages, layout.virtual_stages, framework.stage_links
    link_s = inputs.stage_link_s * links
    waited, filling = _messages(inputs)
    backward_s = layer.backward_with_s(layout.recomputed)
    idle_s, bubble = _bubble(inputs, passes, stage)
    waits = _copies(inputs, layer, stage, copies)
    data = _data_parallel(
        inputs, framework, *_free_s(inputs, layer, backward_s), where(stages > 1, 0.0, passes.last.backward_s)
    )
    return Step(
        stage=stage,
        micro_batches=inputs.micro_batches,
        steady_s=inputs.micro_batches * stage.slowest_s,
        stage_link_s=link_s,
        waited_messages=waited,
        pipeline_comm_s=waited * link_s,
        filling_messages=filling,
        idle_s=idle_s,
        bubble=bubble, copies=waits, exchanges=exchanges,
        bubble_links_s=filling * link_s,
        stage_host_s=stage_issue_s(inputs.host_starts, chunks, stages, framework.stage_s),
        updates=updates,
        replicated_s=inputs.replicated_s * updates,
        owned=inputs.owned,
        optimizer_s=(inputs.optimizer_s * framework.optimizer + inputs.host_optimizer_s) * updates,
        matrix_update_s=inputs.matrix_update_s * framework.matrix * updates,
        momentum_gather_s=inputs.momentum_gather_s * framework.data_links * updates,
        overhead_s=step_overhead_s(framework.step_s, inputs.devices, inputs.tensors),
        copies_s=sum((call.value * times for call, times in waits), start=0.0),
        copies_busy_s=2 * inputs.copy_s * inputs.micro_batches * stage.layers,
        devices=inputs.devices,
        growth=framework.growth,
        behind_forward_s=layer.forward_s,
        behind_backward_s=backward_s,
        data=data, contention=_contention(inputs, data, link_s),
    )  # fmt: skip


def _contention(inputs: StepInputs, data: DataParallel, link_s: Num) -> Call | None:
    """How much longer messages between stages take while gradients are reduced in the background of the same links.

    Each virtual stage has one during the last backward pass, behind which its gradients go.
    """
    if not np.any(inputs.tiered):
        return None
    background_s = data.gradient_busy_s * inputs.hides_data * inputs.shares_far
    exposed_s = inputs.layout.virtual_stages * link_s * inputs.stages_far
    return Call(CONTENTION, {"background_s": background_s, "exposed_s": exposed_s})


def _by_schedule(inputs: StepInputs, of_row: Callable[[Schedule], Num]) -> Num:
    """Something of each plan's schedule; of a single one without more ado, as searches cost large blocks of it."""
    each = [(of_row(SCHEDULES[name]), share) for name, share in inputs.schedules.items()]
    if len(each) == 1:
        return each[0][0]
    return sum((where(share > 0, value, 0.0) for value, share in each), start=0.0)


def _messages(inputs: StepInputs) -> tuple[Num, Num]:
    """Messages between stages that a step waits for: those in between, and those that fill and drain the pipeline."""
    layout = inputs.layout
    names = ("stages", "micro_batches", "virtual_stages", "hides")
    values = (layout.stages, inputs.micro_batches * inputs.slices, layout.virtual_stages, inputs.hides_stages)
    arguments = dict(zip(names, values, strict=True))
    waited = _by_schedule(inputs, lambda row: formula_of(row.messages)(arguments))
    return waited, _by_schedule(inputs, lambda row: 2 * (layout.stages - 1) if row.synchronous else 0.0)


def _bubble(inputs: StepInputs, passes: Passes, stage: CriticalStage) -> tuple[Num, Call]:
    """Bubble of the schedule in seconds, and its formula; of plans with several schedules that of the last.

    ``passes``: with the exchanges that are overlapped.
    """
    calls = {name: _bubble_call(inputs, SCHEDULES[name], passes, stage) for name in inputs.schedules}
    bubble_s = _by_schedule(inputs, lambda row: calls[row.name].value)
    return where(inputs.layout.stages > 1, bubble_s, 0.0), [*calls.values()][-1]


def _bubble_call(inputs: StepInputs, row: Schedule, passes: Passes, stage: CriticalStage) -> Call:
    formula = formula_of(row.closed_forms()[0])
    means = _mean_passes(inputs.layout, passes) if "forward_s" in formula.arguments else {}
    return _waits(inputs, stage, formula, {"slices": inputs.slices, **means})


def _waits(inputs: StepInputs, stage: CriticalStage, formula: Formula, further: Mapping[str, Num]) -> Call:
    """A formula of waits with what it takes of the times of stages."""
    arguments = {
        "all_stages_s": stage.all_stages_s, "slowest_stage_s": stage.slowest_s,
        "all_weights_s": stage.all_weights_s, "slowest_weights_s": stage.slowest_weights_s,
        "first_weights_s": stage.first_weights_s, "slowest_forward_s": stage.slowest_forward_s,
        "stages": inputs.layout.stages, "virtual_stages": inputs.layout.virtual_stages,
        "micro_batches": inputs.micro_batches, "filling": inputs.filling, **further,
    }  # fmt: skip
    return Call(formula, {name: arguments[name] for name in formula.arguments})


def _free_s(inputs: StepInputs, layer: Pass, backward_s: Num) -> tuple[Num, Num]:
    """Parts of a layer's passes, forward and backward, beside which data-parallel traffic finds its links free."""
    again, near, far = inputs.layout.recomputed, inputs.shares_near, inputs.shares_far
    forward_busy_s = near * layer.forward_near_s + far * layer.forward_far_s
    again_busy_s = forward_busy_s - near * layer.ended_near_s - far * layer.ended_far_s
    backward_busy_s = near * layer.backward_near_s + far * layer.backward_far_s + again * again_busy_s
    passes = (layer.forward_s, forward_busy_s), (backward_s, backward_busy_s)
    forward, backward = (
        free_links_s(lasting_s(pass_s, inputs.copy_s, inputs.hides_copies), busy_s) for pass_s, busy_s in passes
    )
    return forward, backward


def _filled_bubble(inputs: StepInputs, stage: CriticalStage) -> Call:
    """Bubble of a pipeline that runs one way; gradients of weights that are apart fill some of it."""
    fills = isinstance(inputs.filling, np.ndarray) or inputs.filling
    return _waits(inputs, stage, ZERO_BUBBLE if fills else BUBBLE, {})


def _layer_copies(inputs: StepInputs, layer: Pass) -> Copies:
    """Waits of a layer for copies of its activations, for one micro-batch."""
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return Copies(0.0, 0.0)
    wait_s = _copy_wait(inputs, layer).value
    if not isinstance(layer.weights_s, np.ndarray) and not layer.weights_s:
        return Copies(wait_s, 0.0)
    of_inputs = replace(layer, backward_s=layer.backward_s - layer.weights_s)
    return Copies(wait_s, _copy_wait(inputs, of_inputs).value - wait_s)


def _copy_wait(inputs: StepInputs, layer: Pass) -> Call:
    """Wait of a layer for copies of its activations, for one micro-batch."""
    backward_s = layer.backward_with_s(inputs.layout.recomputed)
    return Call(COPIES, {
        "copy_s": inputs.copy_s, "forward_s": layer.forward_s, "backward_s": backward_s, "hides": inputs.hides_copies,
    })  # fmt: skip


def _copies(
    inputs: StepInputs, layer: Pass, stage: CriticalStage, copies: Copies
) -> tuple[tuple[Call, Num], ...]:  # fmt: skip
    """Waits for copied activations: of all micro-batches on the critical stage, and what they add to the bubble."""
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return ()
    waits = _copy_wait(inputs, layer), inputs.micro_batches * stage.layers
    if isinstance(copies.wait_s, float) and not copies.wait_s:
        return (waits,)
    layout, layers, piped = inputs.layout, stage.layers, where(inputs.layout.stages > 1, 1.0, 0.0)
    lasting = replace(
        stage, all_stages_s=stage.all_stages_s + layout.whole * copies.wait_s,
        slowest_s=stage.slowest_s + layers * copies.wait_s,
        all_weights_s=stage.all_weights_s - layout.whole * copies.more_s,
        slowest_weights_s=stage.slowest_weights_s - layers * copies.more_s,
        first_weights_s=stage.first_weights_s - layout.first * copies.more_s,
    )  # fmt: skip
    return (
        waits,
        (_filled_bubble(inputs, lasting), piped),
        (_filled_bubble(inputs, stage), -piped),
    )


def _data_parallel(
    inputs: StepInputs, framework: Framework, forward_s: Num, backward_s: Num, head_s: Num
) -> DataParallel:
    """Traffic over the data-parallel group, exposed and busy, beside what passes of a layer and of the head leave."""
    traffic, links = inputs.traffic, framework.data_links
    exposed = 1.0 - inputs.hides_data * (1.0 - framework.data_exposed)
    sharded = where(traffic.by_unit, 1.0, 0.0)
    reduce, gather = traffic.reduce.times(links), traffic.gather.times(links)
    layers, again_s = inputs.layout.first * inputs.layout.held, sharded * gather.one_layer_s
    replicas_s = traffic.replicas_s * links
    again = {"gather_s": again_s, "layers": layers, **ends(reduce)}
    summed_s = reduce.one_layer_s + replicas_s
    backward = layerwise(
        _bucketed(inputs, replace(reduce, one_layer_s=summed_s), backward_s, traffic.reductions),
        Hiding(exposed_sharded_s,
               {"reduce_s": reduce.one_layer_s, "replicas_s": replicas_s, "behind_s": backward_s, "head_s": head_s,
                **again},
               {"reduce_s": summed_s, "replicas_s": 0.0, "behind_s": 0.0, "head_s": 0.0, **again}),
        sharded, exposed, traffic.reductions,
    )  # fmt: skip
    forward = layerwise(
        _bucketed(inputs, gather, forward_s, traffic.gathers),
        behind(exposed_gather_s, {"one_layer_s": gather.one_layer_s, "layers": layers, **ends(gather)}, forward_s),
        sharded, exposed, traffic.gathers,
    )  # fmt: skip
    return shared_out(backward, forward, layers * again_s)


def _bucketed(inputs: StepInputs, sums: Sums, behind_s: Num, times: Num) -> Hiding:
    """Buckets of layers; what travels with every micro-batch has the passes of that one only to overlap with."""
    stages = where(times > 1, 1.0, inputs.layout.stages)
    return behind(exposed_buckets_s, {
        "one_layer_s": sums.one_layer_s, "layers": inputs.layout.first * inputs.layout.held, "bucket": sums.bucket,
        "chunks": inputs.traffic.chunks, "stages": stages, **ends(sums),
    }, behind_s)  # fmt: skip
