"""Composes the time of a step from the time of a layer: pipeline, data parallelism, optimiser.

The slowest of the stages sets the pace of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from steptime.cost.data_parallel import (
    exposed_buckets_s,
    exposed_gather_s,
    exposed_in_turn_s,
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
from steptime.estimate.step_inputs import StepInputs, of_mirrored
from steptime.estimate.work import Pass, fitted_parameter
from steptime.num import Num, maximum, minimum, where
from steptime.plan.framework import Framework
from steptime.schedule import SCHEDULES, Schedule
from steptime.terms import at, call, part, term


def shared_ends(inputs: StepInputs, first: Num, last: Num) -> tuple[Num, Num]:
    """Shares of the first and the last rank in the two ends of the model, for one micro-batch."""
    if isinstance(inputs.folded, np.ndarray) or inputs.folded:
        first, last = where(inputs.folded > 0, first + last, first), where(inputs.folded > 0, 0.0 * last, last)
    return of_mirrored(inputs.held, first, last)


def overlapped_exchanges(paired: Num, layer: Pass) -> dict[str, Num]:
    """Overlapped time of the exchange of experts in a layer's forward and backward pass; empty where no pass is paired.

    Each overlaps with the rest of the opposite pass of another micro-batch. ``paired``: share of the passes.
    """
    if not isinstance(paired, np.ndarray) and not paired:
        return {}
    forward_s, backward_s = layer.forward_exchange_s, layer.backward_exchange_s
    behind_s = {FORWARD: layer.backward_s - backward_s, BACKWARD: layer.forward_s - forward_s}
    return {
        phase: call(hidden_exchange_s, exchange_s=exchange_s, behind_s=behind_s[phase], share=paired)
        for phase, exchange_s in ((FORWARD, forward_s), (BACKWARD, backward_s))
    }


def exposed_pass(layer: Pass, overlapped: Mapping[str, Num]) -> Pass:
    """A layer's pass without its overlapped exchanges."""
    if not overlapped:
        return layer
    forward_s, backward_s = overlapped[FORWARD], overlapped[BACKWARD]
    return replace(layer, forward_s=layer.forward_s - forward_s, backward_s=layer.backward_s - backward_s)


def critical_stage(
    inputs: StepInputs, passes: Mapping[str, Pass], wait_s: Num, more_s: Num
) -> tuple[dict[str, Num], dict[str, Num]]:
    """The critical stage, through which a step takes longest: first, a middle or last; ties go to the first.

    Args:
        inputs: layers of the stages, micro-batches, and what fills the bubble.
        passes: exposed time of each part for one micro-batch.
        wait_s: wait of a layer for copies of its activations, for one micro-batch.
        more_s: increase of the wait if the backward pass makes no gradients of weights.

    Returns:
        Counts of each part of the model on that stage per micro-batch: its layers, and for embedding and head 1, 0, or
        a half if they are mirrored. And seconds of one micro-batch, forward and backward, by the names of the arguments
        of :func:`steptime.cost.pipeline.zero_bubble_s`, which determine the bubble.
    """
    layer, first, last, alone = passes["layer"], passes["first"], passes["last"], inputs.stages <= 1
    one_layer_s = layer.forward_s + layer.backward_with_s(inputs.recomputed)
    first_s, last_s = shared_ends(inputs, first.both_s, last.both_s)
    # Two stages have no middle, and a single one has both ends: stages that are not there are empty, and never longest.
    layers = (
        inputs.first_layers,
        where(inputs.stages > 2, inputs.middle_layers, 0.0),
        where(alone, 0.0, inputs.last_layers),
    )
    busy_s = (
        layers[0] * one_layer_s + first_s + where(alone, last_s, 0.0),
        layers[1] * one_layer_s,
        layers[2] * one_layer_s + where(alone, 0.0, last_s),
    )
    first_weights_s, last_weights_s = shared_ends(inputs, first.weights_s, last.weights_s)
    ends_weights_s = first_weights_s, 0.0, last_weights_s
    times_s = {
        "all_stages_s": inputs.layers * one_layer_s + first_s + last_s,
        "all_weights_s": inputs.layers * layer.weights_s + sum(ends_weights_s),
        "first_weights_s": inputs.first_layers * layer.weights_s + first_weights_s,
    }
    # In the steady state every stage waits for the one whose passes take longest, copies to the host included.
    waits = isinstance(wait_s, np.ndarray) or bool(wait_s)
    pace_s = [each_s + n * wait_s if waits else each_s for each_s, n in zip(busy_s, layers, strict=True)]
    forward_s = inputs.first_layers * layer.forward_s + first.forward_s, inputs.middle_layers * layer.forward_s
    fills = isinstance(inputs.filling, np.ndarray) or bool(inputs.filling)
    if fills:
        # A stage that is slow because of gradients of weights also has more of them to fill its bubble with, so that
        # another stage may make the step longer: compare the whole step, all micro-batches and bubble, of each stage.
        all_s = times_s["all_stages_s"]
        others = {
            "all_stages_s": all_s + inputs.layers * wait_s if waits else all_s,
            "all_weights_s": times_s["all_weights_s"] - inputs.layers * more_s,
            "first_weights_s": times_s["first_weights_s"] - inputs.first_layers * more_s,
            "filling": inputs.filling,
            "virtual_stages": inputs.virtual_stages,
        }
        weights_s = [n * (layer.weights_s - more_s) + end_s for n, end_s in zip(layers, ends_weights_s, strict=True)]
        # Forward passes fill too; on the last stage, which is the first to go back, gradients of weights alone do.
        fillers_s = *forward_s, weights_s[2]
        pace_s = [
            inputs.micro_batches * each_s
            + zero_bubble_s(slowest_stage_s=each_s, slowest_weights_s=own_s, slowest_forward_s=fill_s, **others)
            for each_s, own_s, fill_s in zip(pace_s, weights_s, fillers_s, strict=True)
        ]
    longest_s = maximum(pace_s[0], maximum(pace_s[1], pace_s[2]))
    is_first = pace_s[0] >= longest_s
    is_last = (pace_s[2] >= longest_s) & (pace_s[0] < longest_s)

    def of_it(first: Num, middle: Num, last: Num) -> Num:
        return where(is_first, first, where(is_last, last, middle))

    count = of_it(inputs.first_layers, inputs.middle_layers, inputs.last_layers)
    embeds, heads = where(is_first, 1.0, 0.0), where(is_last, 1.0, where(is_first & alone, 1.0, 0.0))
    own_weights_s = count * layer.weights_s + embeds * first_weights_s + heads * last_weights_s
    times_s |= {
        "slowest_stage_s": of_it(*busy_s), "slowest_weights_s": own_weights_s,
        "slowest_forward_s": of_it(*forward_s, own_weights_s) if fills else 0.0,
    }  # fmt: skip
    embeds, heads = of_mirrored(inputs.held, embeds, where(inputs.folded > 0, embeds, heads))
    return {"layer": count, "first": embeds, "last": heads}, times_s


def _mean_passes(inputs: StepInputs, passes: Mapping[str, Pass]) -> dict[str, Num]:
    """Mean passes of a rank over all ranks, without overlap, and the overlapped time of a pair of passes."""
    layer, ends = passes["layer"], (passes["first"], passes["last"])
    pair = exposed_pass(layer, overlapped_exchanges(where(inputs.paired > 0, 1.0, 0.0), layer))
    hidden_s = inputs.layers * (layer.forward_s - pair.forward_s + layer.backward_s - pair.backward_s)
    forward_s = inputs.layers * layer.forward_s + sum(end.forward_s for end in ends)
    backward_s = inputs.layers * layer.backward_with_s(inputs.recomputed) + sum(end.backward_s for end in ends)
    weights_s = inputs.layers * layer.weights_s + sum(end.weights_s for end in ends)
    sums_s = {"forward_s": forward_s, "inputs_s": backward_s - weights_s, "weights_s": weights_s, "hidden_s": hidden_s}
    return {name: sum_s / inputs.stages for name, sum_s in sums_s.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Terms of one optimiser step on the critical stage; exposed unless the name says otherwise."""

    counts: Mapping[str, Num]
    """Counts of each part of the model on the critical stage per micro-batch (:func:`critical_stage`)."""
    stage_s: Mapping[str, Num]
    """Seconds of one micro-batch on the critical stage and on all, by argument name of the formulas of the bubble."""
    micro_batches: Num
    steady_s: Num
    """Time of all micro-batches on the critical stage."""
    stage_link_s: Num
    """Mean time of one message to the next stage."""
    waited_messages: Num
    """Messages that the step waits for between filling and draining of the pipeline."""
    filling_messages: Num
    """Messages that fill and drain the pipeline."""
    pipeline_comm_s: Num
    idle_s: Num
    """Filling and draining of the pipeline, without the messages between stages."""
    bubble_links_s: Num
    """Time of the messages that fill and drain the pipeline."""
    stage_host_s: Num
    """Time that the host loses at the starts of micro-batches."""
    data_s: Mapping[str, Num]
    """Exposed traffic over the data-parallel group, embedding and head included: ``gradients`` reduced, ``weights``
    gathered, and ``weights_again`` for the backward pass (ZeRO-3)."""
    data_busy_s: Mapping[str, Num]
    """Time for which this traffic keeps the links busy."""
    updates: Num
    """Updates of the weights in the step; data-parallel traffic and the optimiser's times are of all of them."""
    replicated_s: Num
    """Reduction of gradients of weights that tensor-parallel ranks replicate."""
    optimizer_s: Num
    matrix_update_s: Num
    """Matrix products in the optimiser's step."""
    momentum_gather_s: Num
    owned: Num
    """Parameters that a rank updates, on the stage with most of them."""
    exchanges: Mapping[str, Num]
    """Overlapped exchange of experts of a layer, by direction."""
    copies_s: Num
    """Waits for copies of activations to the host and back, filling and draining of the pipeline included."""
    copies_busy_s: Num
    overhead_s: Num
    """Fixed time of a step, such as steps that all ranks take together."""
    contention_s: Num
    """Delay of messages between stages by gradients on the same links; 0 if the machine does not tell its links
    apart."""
    work_s: Num
    """Sum of all times that grow with the work."""
    growth_s: Num
    """Time lost to stragglers and shared links of many devices."""
    behind_forward_s: Num
    """Forward time of one layer, with which gathering of weights can overlap."""
    behind_backward_s: Num

    @property
    def bubble_s(self) -> Num:
        """Filling and draining of the pipeline."""
        return self.idle_s + self.bubble_links_s

    @property
    def update_s(self) -> Num:
        """Time of one update: its exposed traffic, and its pass of the optimiser."""
        update_s = self.optimizer_s + self.matrix_update_s + self.momentum_gather_s
        return (sum(self.data_s.values()) + self.replicated_s + update_s) / self.updates

    @property
    def total_s(self) -> Num:
        """Time of the step."""
        return self.work_s + self.overhead_s + self.growth_s


def _split(inputs: StepInputs, passes: Mapping[str, Pass]) -> Mapping[str, Pass]:
    """The passes with separate gradients of weights only for plans whose schedule splits backward passes.

    In a block of plans with several schedules all plans have the column, although it applies to some only.
    """
    if len(inputs.schedules) == 1:
        return passes
    splits = _by_schedule(inputs, lambda row: float(row.splits))
    return {part: replace(each, weights_s=each.weights_s * splits) for part, each in passes.items()}


def compose(inputs: StepInputs, passes: Mapping[str, Pass], framework: Framework, host_basis: str = "") -> Step:
    """One optimiser step from the passes of each part of the model; terms are noted in the order of a report.

    ``host_basis``: basis of the rate of the link to the host, for the tape.
    """
    passes, updates = _split(inputs, passes), inputs.updates
    with at("exchange"):
        exchanges = overlapped_exchanges(inputs.paired, passes["layer"])
    layer = exposed_pass(passes["layer"], exchanges)
    copies = _layer_copies(inputs, layer)
    counts, stage_s = critical_stage(inputs, {**passes, "layer": layer}, *copies)
    steady_s = inputs.micro_batches * stage_s["slowest_stage_s"]
    backward_s = layer.backward_with_s(inputs.recomputed)
    head_s = where(inputs.stages > 1, 0.0, passes["last"].backward_s)
    data_s, data_busy_s = _data_parallel(inputs, framework, *_free_s(inputs, layer, backward_s), head_s)
    _traffic_parts(framework)
    replicated_s = term("dp_comm/replicated_weights", inputs.replicated_s * updates, times_per_step=updates)
    # Messages between stages: those that the steady state waits for, and those that fill and drain the pipeline.
    links, (waited, filling) = framework.stage_links, _messages(inputs)
    link_s = inputs.stage_link_s * links
    pipeline_comm_s = term(
        "pp_comm", waited * link_s, lambda: waited_messages(*_sent(inputs), 0.0) * link_s,
        times_per_step=waited, framework_factor=links,
    )  # fmt: skip
    contention_s = _contention_s(inputs, data_busy_s["gradients"], link_s)
    idle_s = term("bubble", _bubble_s(inputs, passes, stage_s))
    bubble_links_s = filling * link_s
    term("bubble", bubble_links_s, None, "pp_comm", times_per_step=filling, framework_factor=links)
    copies_busy_s = 2 * inputs.copy_s * inputs.micro_batches * counts["layer"]
    copies_s = _copies_s(inputs, layer, counts["layer"], stage_s, copies, host_basis)
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
            virtual_stages=inputs.virtual_stages, stages=inputs.stages, stage_s=framework.stage_s,
        ))  # fmt: skip
    with at("overhead"):
        overhead_s = term("overhead", call(
            step_overhead_s, fitted_parameter(framework, "step_s"), step_s=framework.step_s, devices=inputs.devices,
            tensors=inputs.tensors,
        ))  # fmt: skip
    work_s = (
        steady_s + pipeline_comm_s + (idle_s + bubble_links_s) + sum(data_s.values()) + replicated_s
        + (device_s + host_s) + matrix_s + momentum_s + stage_host_s + copies_s + contention_s
    )  # fmt: skip
    with at("scaling"):
        grown_s = term("scaling", 0.0 if isinstance(framework.growth, float) and not framework.growth else call(
            growth_s, fitted_parameter(framework, "growth"), work_s=work_s, devices=inputs.devices,
            growth=framework.growth,
        ))  # fmt: skip
    return Step(
        counts=counts, stage_s=stage_s, micro_batches=inputs.micro_batches, steady_s=steady_s, stage_link_s=link_s,
        waited_messages=waited, filling_messages=filling, pipeline_comm_s=pipeline_comm_s, idle_s=idle_s,
        bubble_links_s=bubble_links_s, stage_host_s=stage_host_s, data_s=data_s, data_busy_s=data_busy_s,
        updates=updates, replicated_s=replicated_s, optimizer_s=device_s + host_s, matrix_update_s=matrix_s,
        momentum_gather_s=momentum_s, owned=inputs.owned, exchanges=exchanges, copies_s=copies_s,
        copies_busy_s=copies_busy_s, overhead_s=overhead_s, contention_s=contention_s, work_s=work_s,
        growth_s=grown_s, behind_forward_s=layer.forward_s, behind_backward_s=backward_s,
    )  # fmt: skip


def _traffic_parts(framework: Framework) -> None:
    """Notes the collectives of a layer and of the ends of the model, from which the exposed traffic is computed."""
    links = framework.data_links
    for name in ("gradients", "weights"):
        for which in ("one_layer", "embedding", "head"):
            part(f"dp_comm/{name}/{which}", framework_factor=links)
    part("offload/parameters/one_layer")
    part("dp_comm/gradients/replicas", framework_factor=links)


def _contention_s(inputs: StepInputs, gradients_s: Num, link_s: Num) -> Num:
    """Delay of messages between stages while gradients are reduced in the background on the same links.

    Each virtual stage has one message during the last backward pass, with which its gradients overlap.
    """
    if not np.any(inputs.tiered):
        return 0.0
    with at("pp_comm/contention"):
        return term("pp_comm/contention", call(
            fair_share_wait_s, "messages share the links of a node with gradients",
            background_s=gradients_s * inputs.hides_data * inputs.shares_far,
            exposed_s=inputs.virtual_stages * link_s * inputs.stages_far,
        ))  # fmt: skip


def _by_schedule(inputs: StepInputs, of_row: Callable[[Schedule], Num]) -> Num:
    """Value of ``of_row`` for the schedule of each plan; a single schedule takes a short cut, as in large searches."""
    each = [(of_row(SCHEDULES[name]), share) for name, share in inputs.schedules.items()]
    if len(each) == 1:
        return each[0][0]
    return sum((where(share > 0, value, 0.0) for value, share in each), start=0.0)


def _sent(inputs: StepInputs) -> tuple[Num, Num, Num]:
    """Stages, messages in one direction between two stages, virtual stages."""
    return inputs.stages, inputs.micro_batches * inputs.slices, inputs.virtual_stages


def _messages(inputs: StepInputs) -> tuple[Num, Num]:
    """Messages between stages that a step waits for in the steady state, and those that fill and drain the pipeline."""
    names = ("stages", "micro_batches", "virtual_stages", "hides")
    arguments = dict(zip(names, (*_sent(inputs), inputs.hides_stages), strict=True))
    waited = _by_schedule(inputs, lambda row: formula_of(row.messages)(arguments))
    return waited, _by_schedule(inputs, lambda row: 2 * (inputs.stages - 1) if row.synchronous else 0.0)


def _bubble_s(inputs: StepInputs, passes: Mapping[str, Pass], stage_s: Mapping[str, Num]) -> Num:
    """Bubble of the schedule in seconds; ``passes``: overlapped exchanges included."""
    means: dict[str, Num] = {}

    def of_row(row: Schedule) -> Num:
        formula = row.closed_forms()[0]
        if not means and "forward_s" in formula_of(formula).arguments:
            means.update(_mean_passes(inputs, passes))
        with at("bubble"):
            return _waits_s(inputs, stage_s, formula, slices=inputs.slices, **means)

    return where(inputs.stages > 1, _by_schedule(inputs, of_row), 0.0)


def _waits_s(inputs: StepInputs, stage_s: Mapping[str, Num], formula: Callable[..., Num], **further: Num) -> Num:
    """Value of a formula of waits, with its arguments taken from the times of stages, the inputs and ``further``."""
    arguments = {
        **stage_s, "stages": inputs.stages, "virtual_stages": inputs.virtual_stages,
        "micro_batches": inputs.micro_batches, "filling": inputs.filling, **further,
    }  # fmt: skip
    return call(formula, **{name: arguments[name] for name in formula_of(formula).arguments})


def _free_s(inputs: StepInputs, layer: Pass, backward_s: Num) -> tuple[Num, Num]:
    """Parts of a layer's forward and backward pass in which the links are free for data-parallel traffic."""
    again, near, far = inputs.recomputed, inputs.shares_near, inputs.shares_far
    forward_busy_s = near * layer.forward_near_s + far * layer.forward_far_s
    again_busy_s = forward_busy_s - near * layer.ended_near_s - far * layer.ended_far_s
    backward_busy_s = near * layer.backward_near_s + far * layer.backward_far_s + again * again_busy_s
    passes = (layer.forward_s, forward_busy_s), (backward_s, backward_busy_s)
    forward, backward = (
        free_links_s(lasting_s(pass_s, inputs.copy_s, inputs.hides_copies), busy_s) for pass_s, busy_s in passes
    )
    return forward, backward


def _filled_bubble_s(inputs: StepInputs, stage_s: Mapping[str, Num]) -> Num:
    """Bubble of a one-way pipeline; separate gradients of weights fill a part of it."""
    fills = isinstance(inputs.filling, np.ndarray) or inputs.filling
    return _waits_s(inputs, stage_s, zero_bubble_s if fills else pipeline_bubble_s)


def _layer_copies(inputs: StepInputs, layer: Pass) -> tuple[Num, Num]:
    """Wait of a layer for copies of its activations per micro-batch, and its increase without gradients of weights."""
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return 0.0, 0.0
    wait_s = _copy_wait_s(inputs, layer)
    if not isinstance(layer.weights_s, np.ndarray) and not layer.weights_s:
        return wait_s, 0.0
    of_inputs = replace(layer, backward_s=layer.backward_s - layer.weights_s)
    return wait_s, _copy_wait_s(inputs, of_inputs) - wait_s


def _copy_wait_s(inputs: StepInputs, layer: Pass, basis: str = "") -> Num:
    """Wait of a layer for copies of its activations, for one micro-batch."""
    backward_s = layer.backward_with_s(inputs.recomputed)
    return call(exposed_copies_s, basis, copy_s=inputs.copy_s, forward_s=layer.forward_s, backward_s=backward_s,
                hides=inputs.hides_copies)  # fmt: skip


def _copies_s(
    inputs: StepInputs, layer: Pass, layers: Num, stage_s: Mapping[str, Num], copies: tuple[Num, Num], basis: str
) -> Num:
    """Waits for copied activations: of all micro-batches on the critical stage, and in the bubble."""
    if not isinstance(inputs.copy_s, np.ndarray) and not inputs.copy_s:
        return 0.0
    path, times = "offload/activations", inputs.micro_batches * layers
    with at(path, times_per_step=times):
        waits_s = _copy_wait_s(inputs, layer, basis) * times
    wait_s, more_s = copies
    if isinstance(wait_s, float) and not wait_s:
        return waits_s
    piped = where(inputs.stages > 1, 1.0, 0.0)
    lasting_s = {
        **stage_s,
        "all_stages_s": stage_s["all_stages_s"] + inputs.layers * wait_s,
        "slowest_stage_s": stage_s["slowest_stage_s"] + layers * wait_s,
        "all_weights_s": stage_s["all_weights_s"] - inputs.layers * more_s,
        "slowest_weights_s": stage_s["slowest_weights_s"] - layers * more_s,
        "first_weights_s": stage_s["first_weights_s"] - inputs.first_layers * more_s,
    }
    with at(path, times_per_step=piped):
        longer_s = _filled_bubble_s(inputs, lasting_s) * piped
    with at(path, times_per_step=-piped):
        return waits_s + longer_s + _filled_bubble_s(inputs, stage_s) * -piped


def _data_parallel(
    inputs: StepInputs, framework: Framework, forward_s: Num, backward_s: Num, head_s: Num
) -> tuple[dict[str, Num], dict[str, Num]]:
    """Exposed and busy time of traffic over the data-parallel group, given the free time in passes of layers and head.

    Without ZeRO-3 gradients travel in buckets that overlap with the last backward pass of a step, weights before its
    first forward pass. With ZeRO-3 every pass gathers the weights of its layers, and the backward pass gathers them
    again and reduces their gradients at once: both use the same links, so that the exposed time is divided in
    proportion to their times.
    """
    links = framework.data_links
    exposed = 1.0 - inputs.hides_data * (1.0 - framework.data_exposed)
    sharded = where(inputs.by_unit, 1.0, 0.0)
    reduce, gather = (
        {name: each if name == "bucket" else each * links for name, each in one.items()}
        for one in (inputs.reduce, inputs.gather)
    )
    layers, again_s = inputs.first_layers * inputs.held, sharded * gather["one_layer_s"]
    replicas_s = inputs.replicas_s * links
    summed_s = reduce["one_layer_s"] + replicas_s
    units = {
        "reduce_s": reduce["one_layer_s"], "replicas_s": replicas_s, "behind_s": backward_s, "head_s": head_s,
        "gather_s": again_s, "layers": layers,
        "shown_end_s": reduce["shown_end_s"], "hidden_end_s": reduce["hidden_end_s"],
    }  # fmt: skip
    alone = {"reduce_s": summed_s, "replicas_s": 0.0, "behind_s": 0.0, "head_s": 0.0}
    back_s, back_busy_s, whole_s = _layerwise(
        "dp_comm/backward", exposed, inputs.reductions, sharded,
        _once(inputs, "gradients", {**reduce, "one_layer_s": summed_s}, backward_s, inputs.reductions),
        (exposed_sharded_s, units, alone),
    )  # fmt: skip
    units = {"one_layer_s": gather["one_layer_s"], "layers": layers, "shown_end_s": gather["shown_end_s"],
             "hidden_end_s": gather["hidden_end_s"], "behind_s": forward_s}  # fmt: skip
    there_s, there_busy_s, _ = _layerwise(
        "dp_comm/forward", exposed, inputs.gathers, sharded,
        _once(inputs, "weights", gather, forward_s, inputs.gathers),
        (exposed_gather_s, units, {"behind_s": 0.0}),
    )  # fmt: skip
    share = layers * again_s / where(whole_s > 0, whole_s, 1.0)
    data_s = {"gradients": back_s * (1.0 - share), "weights_again": back_s * share, "weights": there_s}
    busy_s = {"gradients": back_busy_s * (1.0 - share), "weights_again": back_busy_s * share, "weights": there_busy_s}
    for name, path, times, shares in (
        ("gradients", "dp_comm/backward", inputs.reductions, {"share_of_traffic": 1.0 - share}),
        ("weights", "dp_comm/forward", inputs.gathers, {}),
        ("weights_again", "dp_comm/backward", inputs.reductions, {"share_of_traffic": share}),
    ):
        term(f"dp_comm/{name}", data_s[name], busy_s[name], path, times_per_step=times, **shares)
    return data_s, busy_s


Layerwise: TypeAlias = tuple[Callable[..., Num], dict[str, Num], dict[str, Num]]
"""Formula of traffic by layers, its arguments, and the arguments that differ if none of it overlaps."""


def _layerwise(
    path: str, exposed_share: Num, times: Num, sharded: Num, once: Layerwise, always: Layerwise
) -> tuple[Num, Num, Num]:
    """Exposed and busy time of traffic in a step, and its time once; ``always`` is for ``sharded`` = 1 (ZeRO-3).

    ``exposed_share``: exposed share of the traffic that could overlap.
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


def _once(inputs: StepInputs, name: str, sums: Mapping[str, Num], behind_s: Num, times: Num) -> Layerwise:
    """Traffic that travels once a step, or with every micro-batch, and overlaps with the passes of the layers.

    With a known order of messages it is the largest exposed time over all turns and the last bucket. Otherwise buckets
    have equal layers. Traffic of every micro-batch overlaps only with the passes of that micro-batch.
    """
    if name in inputs.turns:
        layers = inputs.first_layers
        given = {"all_s": layers * sums["one_layer_s"], "behind_s": layers * behind_s}
        # The last bucket waits for everything that it carries, and has nothing left to overlap with.
        sent: Num = minimum(sums["bucket"] / layers, 1.0)
        beside: Num = 0.0
        most_s = exposed_in_turn_s(**given, sent_share=sent, beside_share=beside)
        for beside_share, sent_share in inputs.turns[name]:
            exposed_s = exposed_in_turn_s(**given, sent_share=sent_share, beside_share=beside_share)
            longer, most_s = exposed_s > most_s, maximum(exposed_s, most_s)
            sent, beside = where(longer, sent_share, sent), where(longer, beside_share, beside)
        return exposed_in_turn_s, {**given, "sent_share": sent, "beside_share": beside}, {
            "sent_share": 1.0, "beside_share": 0.0,
        }  # fmt: skip
    stages = where(times > 1, 1.0, inputs.stages)
    return exposed_buckets_s, {
        "one_layer_s": sums["one_layer_s"], "layers": inputs.first_layers * inputs.held, "bucket": sums["bucket"],
        "chunks": inputs.chunks, "stages": stages, "shown_end_s": sums["shown_end_s"],
        "hidden_end_s": sums["hidden_end_s"], "behind_s": behind_s,
    }, {"behind_s": 0.0}  # fmt: skip
