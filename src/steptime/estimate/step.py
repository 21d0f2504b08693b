"""Composes the time of a step from the time of a layer: pipeline, data parallelism, optimiser.

How the layers lie on the stages of a pipeline, how long each takes, and which sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from steptime.cost.data_parallel import (
    exposed_buckets_s,
    exposed_gather_s,
    exposed_sharded_s,
    free_links_s,
    partly_hidden_s,
)
from steptime.cost.experts import hidden_exchange_s
from steptime.cost.host import exposed_copies_s, growth_s, lasting_s, stage_issue_s, step_overhead_s
from steptime.cost.network import fair_share_wait_s
from steptime.cost.pipeline import pipeline_bubble_s, waited_messages, zero_bubble_s
from steptime.estimate.layer import BACKWARD, FORWARD
from steptime.estimate.operators import formula_of
from steptime.estimate.step_inputs import Layout, StepInputs, of_mirrored
from steptime.estimate.traffic import Sums
from steptime.estimate.work import Pass, fitted_parameter
from steptime.num import Num, maximum, where
from steptime.plan.framework import Framework
from steptime.schedule import SCHEDULES, Schedule
from steptime.terms import at, call, part, term


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


def overlapped_exchanges(layout: Layout, layer: Pass) -> dict[str, Num]:
    """Overlapped time of the exchange of experts in a layer's forward and backward pass; empty where no pass is paired.

    Each runs behind the rest of the opposite pass of another micro-batch.
    """
    if not isinstance(layout.paired, np.ndarray) and not layout.paired:
        return {}
    forward_s, backward_s = layer.forward_exchange_s, layer.backward_exchange_s
    behind_s = {FORWARD: layer.backward_s - backward_s, BACKWARD: layer.forward_s - forward_s}
    return {
        phase: call(hidden_exchange_s, exchange_s=exchange_s, behind_s=behind_s[phase], share=layout.paired)
        for phase, exchange_s in ((FORWARD, forward_s), (BACKWARD, backward_s))
    }


def exposed_pass(layer: Pass, overlapped: Mapping[str, Num]) -> Pass:
    """A layer's pass without the exchanges that are overlapped."""
    if not overlapped:
        return layer
    forward_s, backward_s = overlapped[FORWARD], overlapped[BACKWARD]
    return replace(layer, forward_s=layer.forward_s - forward_s, backward_s=layer.backward_s - backward_s)


def critical_stage(
    layout: Layout, passes: Passes, wait_s: Num, more_s: Num, filling: Num, micro_batches: Num
) -> CriticalStage:  # fmt: skip
    """Of the first, a middle and the last stage the one through which a step takes longest; ties go to the first.

    Args:
        layout: layers of the stages.
        passes: time of each part for one micro-batch, without what is overlapped of it.
        wait_s: wait of a layer for copies of its activations, for one micro-batch.
        more_s: how much longer that is where nothing of the backward pass makes gradients of weights.
        filling: passes for gradients of weights that fill the bubble (:func:`filling_passes`).
        micro_batches: micro-batches of a step.
    """
    layer, alone = passes.layer, layout.stages <= 1
    one_layer_s = layer.forward_s + layer.backward_with_s(layout.recomputed)
    first_s, last_s = shared_ends(layout, passes.first.both_s, passes.last.both_s)
    # Two stages have no middle, and a single one has both ends: stages that are not there are empty, and never longest.
    layers = layout.first, where(layout.stages > 2, layout.middle, 0.0), where(alone, 0.0, layout.last)
    busy_s = (
        layers[0] * one_layer_s + first_s + where(alone, last_s, 0.0),
        layers[1] * one_layer_s,
        layers[2] * one_layer_s + where(alone, 0.0, last_s),
    )
    first_weights_s, last_weights_s = shared_ends(layout, passes.first.weights_s, passes.last.weights_s)
    ends_weights_s = first_weights_s, 0.0, last_weights_s
    whole = {
        "all_stages_s": layout.whole * one_layer_s + first_s + last_s,
        "all_weights_s": layout.whole * layer.weights_s + sum(ends_weights_s),
        "first_weights_s": layout.first * layer.weights_s + first_weights_s,
    }
    # In the steady state every stage waits for the one whose passes take longest, copies to the host included.
    pace_s = _lasting_s(busy_s, layers, wait_s)
    forward_s = layout.first * layer.forward_s + passes.first.forward_s, layout.middle * layer.forward_s
    fills = isinstance(filling, np.ndarray) or bool(filling)
    if fills:
        # A stage that is long for its gradients of weights has more of them to fill its bubble with, so that another
        # may make the step longer: of each stage the step through it, all micro-batches and the bubble, is compared.
        others = {
            "all_stages_s": _lasting_s([whole["all_stages_s"]], [layout.whole], wait_s)[0],
            "all_weights_s": whole["all_weights_s"] - layout.whole * more_s,
            "first_weights_s": whole["first_weights_s"] - layout.first * more_s,
            "filling": filling,
            "virtual_stages": layout.virtual_stages,
        }
        weights_s = [n * (layer.weights_s - more_s) + end_s for n, end_s in zip(layers, ends_weights_s, strict=True)]
        # Forward passes fill too; on the last stage, which is the first to go back, gradients of weights alone do.
        fillers_s = *forward_s, weights_s[2]
        pace_s = [
            micro_batches * each_s
            + zero_bubble_s(slowest_stage_s=each_s, slowest_weights_s=own_s, slowest_forward_s=fill_s, **others)
            for each_s, own_s, fill_s in zip(pace_s, weights_s, fillers_s, strict=True)
        ]
    longest_s = maximum(pace_s[0], maximum(pace_s[1], pace_s[2]))
    is_first = pace_s[0] >= longest_s
    is_last = (pace_s[2] >= longest_s) & (pace_s[0] < longest_s)

    def of_it(first: Num, middle: Num, last: Num) -> Num:
        return where(is_first, first, where(is_last, last, middle))

    count = of_it(layout.first, layout.middle, layout.last)
    first, last = where(is_first, 1.0, 0.0), where(is_last, 1.0, where(is_first & alone, 1.0, 0.0))
    first_held, last_held = of_mirrored(layout.held, first, where(layout.folded > 0, first, last))
    slowest_weights_s = count * layer.weights_s + first * first_weights_s + last * last_weights_s
    return CriticalStage(
        layers=count, first=first_held, last=last_held, slowest_s=of_it(*busy_s), slowest_weights_s=slowest_weights_s,
        slowest_forward_s=of_it(*forward_s, slowest_weights_s) if fills else 0.0, **whole,
    )  # fmt: skip


def _lasting_s(busy_s: Sequence[Num], layers: Sequence[Num], wait_s: Num) -> list[Num]:
    """Passes of stages of some layers each, with the waits of these for copies."""
    if not isinstance(wait_s, np.ndarray) and not wait_s:
        return list(busy_s)
    return [each_s + count * wait_s for each_s, count in zip(busy_s, layers, strict=True)]


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
    exchanges: Mapping[str, Num]
    """Overlapped exchange of experts of a layer, by direction."""
    copies_s: Num
    """Waits for activations on their way to the host and back, filling and draining of the pipeline included."""
    copies_busy_s: Num
    overhead_s: Num
    """Time of a step that no work explains: what ranks do together, once a step."""
    contention_s: Num
    """Messages between stages that share their links with gradients in the background; 0 where the machine does not
    tell its links apart."""
    work_s: Num
    """Everything that grows with the work."""
    growth_s: Num
    """Stragglers and shared links of many devices."""
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
    def total_s(self) -> Num:
        """Time of the step."""
        return self.work_s + self.overhead_s + self.growth_s


def _split(inputs: StepInputs, passes: Passes) -> Passes:
    """The passes, of which only plans whose schedule splits backward passes have gradients of weights apart.

    Plans with several schedules side by side all have the column, which means something for some of them.
    """
    if len(inputs.schedules) == 1:
        return passes
    splits = _by_schedule(inputs, lambda row: float(row.splits))
    parts = {part: getattr(passes, part) for part in ("layer", "first", "last")}
    return Passes(**{part: replace(each, weights_s=each.weights_s * splits) for part, each in parts.items()})


def compose(inputs: StepInputs, passes: Passes, framework: Framework, host_basis: str = "") -> Step:
    """One optimiser step from the times of its parts, the terms of a report in their order.

    ``host_basis``: what the rate of the link to the host rests on, for the tape.
    """
    layout, passes, updates = inputs.layout, _split(inputs, passes), inputs.updates
    with at("exchange"):
        exchanges = overlapped_exchanges(layout, passes.layer)
    layer = exposed_pass(passes.layer, exchanges)
    copies = _layer_copies(inputs, layer)
    stage = critical_stage(layout, replace(passes, layer=layer), *copies, inputs.filling, inputs.micro_batches)
    steady_s = inputs.micro_batches * stage.slowest_s
    backward_s = layer.backward_with_s(layout.recomputed)
    head_s = where(layout.stages > 1, 0.0, passes.last.backward_s)
    data = _data_parallel(inputs, framework, *_free_s(inputs, layer, backward_s), head_s)
    _traffic_parts(framework)
    replicated_s = term("dp_comm/replicated_weights", inputs.replicated_s * updates, times_per_step=updates)
    # Messages between stages: those that a step waits for in between, and those that fill and drain the pipeline.
    links, (waited, filling) = framework.stage_links, _messages(inputs)
    link_s = inputs.stage_link_s * links
    pipeline_comm_s = term(
        "pp_comm", waited * link_s, lambda: waited_messages(*_sent(inputs), 0.0) * link_s,
        times_per_step=waited, framework_factor=links,
    )  # fmt: skip
    contention_s = _contention_s(inputs, data, link_s)
    idle_s = term("bubble", _bubble_s(inputs, passes, stage))
    bubble_links_s = filling * link_s
    term("bubble", bubble_links_s, None, "pp_comm", times_per_step=filling, framework_factor=links)
    copies_busy_s = 2 * inputs.copy_s * inputs.micro_batches * stage.layers
    copies_s = _copies_s(inputs, layer, stage, copies, host_basis)
    term("offload/activations", copies_s, lambda: maximum(copies_busy_s, copies_s))
    part("offload/activations/one_layer")
    device_s = term("optimizer", inputs.optimizer_s * framework.optimizer * updates, None, "optimizer/device",
                    times_per_step=updates, framework_factor=framework.optimizer)  # fmt: skip
    host_s = term("optimizer", inputs.host_optimizer_s * updates, None, "optimizer/host", times_per_step=updates)
    matrix_s = term("optimizer", inputs.matrix_update_s * framework.matrix * updates, None, "optimizer/matrices",
                    times_per_step=updates, framework_factor=framework.matrix)  # fmt: skip
    momentum_s = term("optimizer/momentum", inputs.momentum_gather_s * framework.data_links * updates,
                      times_per_step=updates, framework_factor=framework.data_links)  # fmt: skip
    with at("host/stages"):
        stage_host_s = term("host/stages", call(
            stage_issue_s, fitted_parameter(framework, "stage_s"), micro_batches=inputs.host_starts,
            virtual_stages=layout.virtual_stages, stages=layout.stages, stage_s=framework.stage_s,
        ))  # fmt: skip
    with at("overhead"):
        overhead_s = term("overhead", call(
            step_overhead_s, fitted_parameter(framework, "step_s"), step_s=framework.step_s, devices=inputs.devices,
            tensors=inputs.tensors,
        ))  # fmt: skip
    work_s = (
        steady_s + pipeline_comm_s + (idle_s + bubble_links_s) + data.exposed_s + replicated_s
        + (device_s + host_s) + matrix_s + momentum_s + stage_host_s + copies_s + contention_s
    )  # fmt: skip
    with at("scaling"):
        grown_s = term("scaling", 0.0 if isinstance(framework.growth, float) and not framework.growth else call(
            growth_s, fitted_parameter(framework, "growth"), work_s=work_s, devices=inputs.devices,
            growth=framework.growth,
        ))  # fmt: skip
    return Step(
        stage=stage, micro_batches=inputs.micro_batches, steady_s=steady_s, stage_link_s=link_s,
        waited_messages=waited, filling_messages=filling, pipeline_comm_s=pipeline_comm_s, idle_s=idle_s,
        bubble_links_s=bubble_links_s, stage_host_s=stage_host_s, data=data, updates=updates,
        replicated_s=replicated_s, optimizer_s=device_s + host_s, matrix_update_s=matrix_s,
        momentum_gather_s=momentum_s, owned=inputs.owned, exchanges=exchanges, copies_s=copies_s,
        copies_busy_s=copies_busy_s, overhead_s=overhead_s, contention_s=contention_s, work_s=work_s,
        growth_s=grown_s, behind_forward_s=layer.forward_s, behind_backward_s=backward_s,
    )  # fmt: skip


def _traffic_parts(framework: Framework) -> None:
    """Collectives of a layer and of the ends of the model, from which the exposed traffic follows."""
    links = framework.data_links
    for name in ("gradients", "weights"):
        for which in ("one_layer", "embedding", "head"):
            part(f"dp_comm/{name}/{which}", framework_factor=links)
    part("offload/parameters/one_layer")
    part("dp_comm/gradients/replicas", framework_factor=links)


def _contention_s(inputs: StepInputs, data: DataParallel, link_s: Num) -> Num:
    """How much longer messages between stages take while gradients are reduced in the background of the same links.

    Each virtual stage has one during the last backward pass, behind which its gradients go.
    """
    if not np.any(inputs.tiered):
        return 0.0
    with at("pp_comm/contention"):
        return term("pp_comm/contention", call(
            fair_share_wait_s, "messages share the links of a node with gradients",
            background_s=data.gradient_busy_s * inputs.hides_data * inputs.shares_far,
            exposed_s=inputs.layout.virtual_stages * link_s * inputs.stages_far,
        ))  # fmt: skip


def _by_schedule(inputs: StepInputs, of_row: Callable[[Schedule], Num]) -> Num:
    """Something of each plan's schedule; of a single one without more ado, as searches cost large blocks of it."""
    each = [(of_row(SCHEDULES[name]), share) for name, share in inputs.schedules.items()]
    if len(each) == 1:
        return each[0][0]
    return sum((where(share > 0, value, 0.0) for value, share in each), start=0.0)


def _sent(inputs: StepInputs) -> tuple[Num, Num, Num]:
    """Stages, messages in one direction between two of them, virtual stages."""
    return inputs.layout.stages, inputs.micro_batches * inputs.slices, inputs.layout.virtual_stages


def _messages(inputs: StepInputs) -> tuple[Num, Num]:
    """Messages between stages that a step waits for: those in between, and those that fill and drain the pipeline."""
    layout = inputs.layout
    names = ("stages", "micro_batches", "virtual_stages", "hides")
    arguments = dict(zip(names, (*_sent(inputs), inputs.hides_stages), strict=True))
    waited = _by_schedule(inputs, lambda row: formula_of(row.messages)(arguments))
    return waited, _by_schedule(inputs, lambda row: 2 * (layout.stages - 1) if row.synchronous else 0.0)


def _bubble_s(inputs: StepInputs, passes: Passes, stage: CriticalStage) -> Num:
    """Bubble of the schedule in seconds; ``passes``: with the exchanges that are overlapped."""
    means: dict[str, Num] = {}

    def of_row(row: Schedule) -> Num:
        formula = row.closed_forms()[0]
        if not means and "forward_s" in formula_of(formula).arguments:
            means.update(_mean_passes(inputs.layout, passes))
        with at("bubble"):
            return _waits_s(inputs, stage, formula, slices=inputs.slices, **means)

    return where(inputs.layout.stages > 1, _by_schedule(inputs, of_row), 0.0)


def _waits_s(inputs: StepInputs, stage: CriticalStage, formula: Callable[..., Num], **further: Num) -> Num:
    """A formula of waits on what it takes of the times of stages."""
    arguments = {
        "all_stages_s": stage.all_stages_s, "slowest_stage_s": stage.slowest_s,
        "all_weights_s": stage.all_weights_s, "slowest_weights_s": stage.slowest_weights_s,
        "first_weights_s": stage.first_weights_s, "slowest_forward_s": stage.slowest_forward_s,
        "stages": inputs.layout.stages, "virtual_stages": inputs.layout.virtual_stages,
        "micro_batches": inputs.micro_batches, "filling": inputs.filling, **further,
    }  # fmt: skip
    return call(formula, **{name: arguments[name] for name in formula_of(formula).arguments})


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


def _filled_bubble_s(inputs: StepInputs, stage: CriticalStage) -> Num:
    """Bubble of a pipeline that runs one way; gradients of weights that are apart fill some of it."""
    fills = isinstance(inputs.filling, np.ndarray) or inputs.filling
    return _waits_s(inputs, stage, zero_bubble_s if fills else pipeline_bubble_s)


def _layer_copies(inputs: StepInputs, layer: Pass) -> tuple[Num, Num]:
    """Wait of a layer for copies of its activations, for one micro-batch: beside its whole passes, and how much longer
    where nothing of the backward pass makes gradients of weights.
    """
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return 0.0, 0.0
    wait_s = _copy_wait_s(inputs, layer)
    if not isinstance(layer.weights_s, np.ndarray) and not layer.weights_s:
        return wait_s, 0.0
    of_inputs = replace(layer, backward_s=layer.backward_s - layer.weights_s)
    return wait_s, _copy_wait_s(inputs, of_inputs) - wait_s


def _copy_wait_s(inputs: StepInputs, layer: Pass, basis: str = "") -> Num:
    """Wait of a layer for copies of its activations, for one micro-batch."""
    backward_s = layer.backward_with_s(inputs.layout.recomputed)
    return call(exposed_copies_s, basis, copy_s=inputs.copy_s, forward_s=layer.forward_s, backward_s=backward_s,
                hides=inputs.hides_copies)  # fmt: skip


def _copies_s(inputs: StepInputs, layer: Pass, stage: CriticalStage, copies: tuple[Num, Num], basis: str) -> Num:
    """Waits for copied activations: of all micro-batches on the critical stage, and what they add to the bubble."""
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return 0.0
    path, times = "offload/activations", inputs.micro_batches * stage.layers
    with at(path, times_per_step=times):
        waits_s = _copy_wait_s(inputs, layer, basis) * times
    wait_s, more_s = copies
    if isinstance(wait_s, float) and not wait_s:
        return waits_s
    layout, layers, piped = inputs.layout, stage.layers, where(inputs.layout.stages > 1, 1.0, 0.0)
    lasting = replace(
        stage, all_stages_s=stage.all_stages_s + layout.whole * wait_s,
        slowest_s=stage.slowest_s + layers * wait_s,
        all_weights_s=stage.all_weights_s - layout.whole * more_s,
        slowest_weights_s=stage.slowest_weights_s - layers * more_s,
        first_weights_s=stage.first_weights_s - layout.first * more_s,
    )  # fmt: skip
    with at(path, times_per_step=piped):
        longer_s = _filled_bubble_s(inputs, lasting) * piped
    with at(path, times_per_step=-piped):
        return waits_s + longer_s + _filled_bubble_s(inputs, stage) * -piped


class DataParallel(NamedTuple):
    """Traffic over the data-parallel group, embedding and head included."""

    gradient_s: Num
    """Reduction of gradients."""
    gradient_busy_s: Num
    backward_gather_s: Num
    """Weights gathered again for the backward pass (ZeRO-3)."""
    backward_gather_busy_s: Num
    weight_gather_s: Num
    weight_gather_busy_s: Num

    @property
    def exposed_s(self) -> Num:
        """All that it adds to a step."""
        return self.gradient_s + self.backward_gather_s + self.weight_gather_s

    @property
    def busy_s(self) -> Num:
        """Time on the links."""
        return self.gradient_busy_s + self.backward_gather_busy_s + self.weight_gather_busy_s


def _data_parallel(
    inputs: StepInputs, framework: Framework, forward_s: Num, backward_s: Num, head_s: Num
) -> DataParallel:
    """Traffic over the data-parallel group, exposed and busy, beside what passes of a layer and of the head leave.

    Without ZeRO-3 gradients travel in buckets behind the last backward pass of a step, weights before its first forward
    pass. With it every pass gathers the weights of its layers, and the backward pass gathers them again and reduces
    their gradients at once: both use its links, so that what they expose is shared out by how long each takes.
    """
    links = framework.data_links
    exposed = 1.0 - inputs.hides_data * (1.0 - framework.data_exposed)
    sharded = where(inputs.by_unit, 1.0, 0.0)
    reduce, gather = inputs.reduce.times(links), inputs.gather.times(links)
    layers, again_s = inputs.layout.first * inputs.layout.held, sharded * gather.one_layer_s
    replicas_s = inputs.replicas_s * links
    summed_s = reduce.one_layer_s + replicas_s
    ends = {"shown_end_s": reduce.shown_end_s, "hidden_end_s": reduce.hidden_end_s}
    again = {"gather_s": again_s, "layers": layers, **ends}
    units = {
        "reduce_s": reduce.one_layer_s,
        "replicas_s": replicas_s,
        "behind_s": backward_s,
        "head_s": head_s,
        **again,
    }
    alone = {"reduce_s": summed_s, "replicas_s": 0.0, "behind_s": 0.0, "head_s": 0.0}
    back_s, back_busy_s, whole_s = _layerwise(
        "dp_comm/backward", exposed, inputs.reductions, sharded,
        (exposed_buckets_s, *_buckets(inputs, replace(reduce, one_layer_s=summed_s), backward_s, inputs.reductions)),
        (exposed_sharded_s, units, alone),
    )  # fmt: skip
    units = {"one_layer_s": gather.one_layer_s, "layers": layers, "shown_end_s": gather.shown_end_s,
             "hidden_end_s": gather.hidden_end_s, "behind_s": forward_s}  # fmt: skip
    there_s, there_busy_s, _ = _layerwise(
        "dp_comm/forward", exposed, inputs.gathers, sharded,
        (exposed_buckets_s, *_buckets(inputs, gather, forward_s, inputs.gathers)),
        (exposed_gather_s, units, {"behind_s": 0.0}),
    )  # fmt: skip
    share = layers * again_s / where(whole_s > 0, whole_s, 1.0)
    data = DataParallel(
        gradient_s=back_s * (1.0 - share), gradient_busy_s=back_busy_s * (1.0 - share),
        backward_gather_s=back_s * share, backward_gather_busy_s=back_busy_s * share,
        weight_gather_s=there_s, weight_gather_busy_s=there_busy_s,
    )  # fmt: skip
    again_s, again_busy_s = data.backward_gather_s, data.backward_gather_busy_s
    term("dp_comm/gradients", data.gradient_s, data.gradient_busy_s, "dp_comm/backward",
         times_per_step=inputs.reductions, share_of_traffic=1.0 - share)  # fmt: skip
    term("dp_comm/weights", there_s, there_busy_s, "dp_comm/forward", times_per_step=inputs.gathers)
    term("dp_comm/weights_again", again_s, again_busy_s, "dp_comm/backward", times_per_step=inputs.reductions,
         share_of_traffic=share)  # fmt: skip
    return data


Layerwise: TypeAlias = tuple[Callable[..., Num], dict[str, Num], dict[str, Num]]
"""Formula of traffic by layers, its arguments, and those of them that differ where nothing hides any of it."""


def _layerwise(
    path: str, exposed_share: Num, times: Num, sharded: Num, once: Layerwise, always: Layerwise
) -> tuple[Num, Num, Num]:
    """Exposed and busy time in a step of traffic ``once``, where ``sharded`` is 1 ``always`` (ZeRO-3); its time once.

    ``exposed_share``: of what could hide, what does not.
    """

    def limits_s(formula: Callable[..., Num], arguments: dict[str, Num], alone: dict[str, Num]) -> tuple[Num, Num]:
        with at(path, share_of_time=1.0 - exposed_share):
            least_s = call(formula, **arguments)
        with at(path, share_of_time=exposed_share):
            return least_s, call(formula, **arguments | alone)

    least_s, whole_s = limits_s(*(always if np.all(sharded) else once))
    if np.any(sharded) and not np.all(sharded):
        sharded_least_s, sharded_whole_s = limits_s(*always)
        least_s, whole_s = where(sharded > 0, sharded_least_s, least_s), where(sharded > 0, sharded_whole_s, whole_s)
    return partly_hidden_s(least_s, whole_s, exposed_share) * times, whole_s * times, whole_s


def _buckets(inputs: StepInputs, sums: Sums, behind_s: Num, times: Num) -> tuple[dict[str, Num], dict[str, Num]]:
    """Buckets of layers; what travels with every micro-batch has the passes of that one only to overlap with."""
    stages = where(times > 1, 1.0, inputs.layout.stages)
    return {
        "one_layer_s": sums.one_layer_s, "layers": inputs.layout.first * inputs.layout.held, "bucket": sums.bucket,
        "chunks": inputs.chunks, "stages": stages, "shown_end_s": sums.shown_end_s,
        "hidden_end_s": sums.hidden_end_s, "behind_s": behind_s,
    }, {"behind_s": 0.0}  # fmt: skip
