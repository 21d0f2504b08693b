"""Durations and memory of a simulated step: from the estimate, measured times of stages, slow ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, passes_of, works_of
from steptime.estimate.layer import BACKWARD, FORWARD, RECOMPUTE, part_times
from steptime.estimate.memory import kept_of_layer, stage_memory
from steptime.estimate.step import exposed_pass
from steptime.estimate.work import EXPERT_AXIS, exposed_links_s, phase_work
from steptime.num import Array
from steptime.schedule import ActionTable, Kind, Times
from steptime.schedule.sequence import best_slicing
from steptime.simulation.memory import Footprint
from steptime.simulation.simulate import Durations, total, two_streams
from steptime.simulation.stage_times import StageTimes


def mean_times(e: Evaluation) -> Times:
    """Times of a stage of mean length, for schedules whose order depends on times."""
    layer, ends, stages = (
        exposed_pass(e.passes["layer"], e.step.exchanges),
        (e.passes["first"], e.passes["last"]),
        e.plans.pp,
    )
    whole, again = float(e.inputs.layers), e.inputs.recomputed
    forward_s = whole * layer.forward_s + sum(end.forward_s for end in ends)
    backward_s = whole * layer.backward_with_s(again) + sum(end.backward_s for end in ends)
    weights_s = whole * layer.weights_s + sum(end.weights_s for end in ends)
    if not weights_s:
        weights_s = backward_s / 2
    return Times(
        forward_s=float(forward_s / stages),
        input_gradient_s=float((backward_s - weights_s) / stages),
        weight_gradient_s=float(weights_s / stages),
        message_s=float(e.step.stage_link_s),
    )


def durations_of(e: Evaluation, table: ActionTable, layers: Array) -> Durations:
    """Seconds of passes and of copies to the host by stage, and of messages by sender and receiver.

    Passes that run together share two streams where exchanges of experts overlap; otherwise they take as long as both.
    """
    layer, again = exposed_pass(e.passes["layer"], e.step.exchanges), e.inputs.recomputed

    def of_stages(of_layer: Any, of_first: Any, of_last: Any) -> Array:
        seconds = layers * float(of_layer)
        seconds[0] += float(of_first)
        seconds[-1] += float(of_last)
        return seconds

    first, last = e.passes["first"], e.passes["last"]
    backward_s = of_stages(layer.backward_with_s(again), first.backward_s, last.backward_s)
    weights_s = of_stages(layer.weights_s, first.weights_s, last.weights_s)
    forward_s = of_stages(layer.forward_s, first.forward_s, last.forward_s)
    copy_s = layers * float(e.inputs.copy_s) / table.slices
    inside, links = max(int(e.plans.in_pp), 1), e.job.framework.stage_links
    near_s, far_s = float(e.inputs.fast_link_s * links), float(e.inputs.slow_link_s * links)
    return Durations(
        forward_s=forward_s / table.slices,
        input_gradient_s=(backward_s - weights_s) / table.slices,
        weight_gradient_s=weights_s / table.slices,
        message_s=lambda sender, receiver: (
            np.where(sender // inside == receiver // inside, near_s, far_s) / table.slices
        ),
        offload_s=copy_s,
        reload_s=copy_s,
        together=two_streams if EXPERT_AXIS in e.job.overlap else total,
        collective_share=_tensor_shares(e, layers, forward_s, backward_s, weights_s),
    )


UNITS = 64
"""Pieces of a sequence from which the best slices are composed."""


def _slice_s(e: Evaluation, length: int, before: float) -> float:
    """Seconds of a layer, forward and backward, on a slice of `length` tokens after `before` others."""
    slices = e.job.pipeline.usual_slices
    job = e.job.slice_of(length, before, slices)
    works = works_of(part_times(e.strategy.block(job, e.plans), e.plans, e.machine), job, e.plans)
    layer = passes_of(works, e.job.framework)["layer"]
    return float(layer.forward_s + layer.backward_with_s(e.inputs.recomputed))


def slice_factors(e: Evaluation, lengths: Sequence[int]) -> Array:
    """Time of the passes of each slice, relative to the mean of equal slices; the time of a slice grows linearly with
    the tokens before it."""
    before = np.cumsum([0, *lengths[:-1]])
    mean_s = _slice_s(e, -(-int(e.job.seq_len) // len(lengths)), (e.job.seq_len - e.job.seq_len / len(lengths)) / 2)
    if len(set(lengths)) == 1:
        return np.linspace(_slice_s(e, lengths[0], 0.0), _slice_s(e, lengths[0], before[-1]), len(lengths)) / mean_s
    each = [_slice_s(e, length, float(ahead)) for length, ahead in zip(lengths, before, strict=True)]
    return np.array(each) / mean_s


def best_lengths(e: Evaluation) -> tuple[int, ...]:
    """Tokens of the slices with the shortest pipeline time of a step, in multiples of the sequence over
    :data:`UNITS`."""
    tokens = int(e.job.seq_len)
    unit = -(-tokens // UNITS)
    count = -(-tokens // unit)
    alone_s = np.array([_slice_s(e, size * unit, 0.0) for size in range(1, count + 1)])
    behind_s = [_slice_s(e, size * unit, float((count - size) * unit)) for size in range(1, count)]
    slope = np.append((np.array(behind_s) - alone_s[:-1]) / np.arange(count - 1, 0, -1), 0.0)
    seconds = alone_s[:, None] + slope[:, None] * np.arange(count)
    found = best_slicing(seconds, 1 + (int(e.plans.pp) - 1) / float(e.micro_batches)).lengths
    ends = np.minimum(np.cumsum(found) * unit, tokens)
    return tuple(np.diff(ends, prepend=0).tolist())


def _tensor_shares(e: Evaluation, layers: Array, forward_s: Array, backward_s: Array, weights_s: Array) -> Array:
    """Share of exposed communication with tensor, context and expert ranks in passes, by stage and kind of pass.

    Products of weight gradients have no communication of their own.
    """
    again, framework = e.inputs.recomputed, e.job.framework

    def of(phase: str) -> Array:
        layer, first, last = (float(exposed_links_s(phase_work(e.works[part], phase), framework)) for part in PARTS)
        seconds = layers * layer
        seconds[0] += first
        seconds[-1] += last
        return seconds

    layer_again_s = float(again * exposed_links_s(phase_work(e.works["layer"], RECOMPUTE), framework))
    sent_s = of(FORWARD), of(BACKWARD) + layers * layer_again_s
    parts = (sent_s[0], forward_s), (sent_s[1], backward_s), (sent_s[1], backward_s - weights_s)
    shares = [np.divide(sent, whole, out=np.zeros(len(layers)), where=whole > 0) for sent, whole in parts]
    found: Array = np.minimum(np.stack([*shares, np.zeros(len(layers))], axis=1), 1.0)
    return found


PARTS = ("layer", "first", "last")
"""Parts of the model by name in an evaluation's works."""


def measured(durations: Durations, times: StageTimes | None, table: ActionTable, overhead_s: float) -> Durations:
    """Durations with measured times of passes, and of messages if given, in place of the estimate's.

    A message takes the time given for its sender's stage, the mean if a rank has several. Copies to the host keep the
    estimate's times; the share of communication in a measured pass is not known.

    Args:
        durations: durations of the estimate.
        times: measured times of each stage; None: keep the estimate's.
        table: the schedule.
        overhead_s: extra time of each micro-batch on each rank, spread over its passes in proportion to their times.

    Raises:
        UserError: the schedule has backward passes in two parts, and the times have not.
    """
    if times is None:
        return durations
    if np.any(table.kind == Kind.WEIGHT_GRADIENT) and times.weight_gradient_s is None:
        raise UserError(
            "the schedule has gradients of weights in passes of their own, which the measured times do not have",
            hint="give input_gradient_s and weight_gradient_s in place of backward_s, or another --schedule",
        )
    all_s = times.forward_s + times.backward_s
    extra_s = np.divide(overhead_s * table.ranks / table.stages, all_s, out=np.zeros_like(all_s), where=all_s > 0)
    factor = (1 + extra_s) / table.slices

    def of(seconds: Array | None) -> Array:
        each: Array = factor * (0.0 if seconds is None else seconds)
        return each if each.shape[1] > 1 else each[:, 0]

    message: Any = durations.message_s
    if times.message_s is not None:
        forward = table.kind == Kind.FORWARD
        counts = np.bincount(table.rank[forward], minlength=table.ranks)
        sums = np.bincount(table.rank[forward], times.message_s[table.stage[forward]], table.ranks)
        sent_s = sums / np.maximum(counts, 1) / table.slices
        message = np.broadcast_to(sent_s[:, None], (table.ranks, table.ranks))
    return replace(
        durations,
        forward_s=of(times.forward_s),
        backward_s=of(times.backward_s),
        input_gradient_s=of(times.input_gradient_s),
        weight_gradient_s=of(times.weight_gradient_s),
        message_s=message,
        together=total,
        collective_share=0.0,
    )


def of_steps(durations: Durations, steps: int) -> Durations:
    """Durations of several consecutive steps as one: durations by micro-batch repeat in each step."""
    names = ("forward_s", "backward_s", "input_gradient_s", "weight_gradient_s")
    given = {name: getattr(durations, name) for name in names}
    again: dict[str, Any] = {name: np.tile(each, (1, steps)) for name, each in given.items() if np.ndim(each) > 1}
    return replace(durations, **again)


def measured_mean(times: StageTimes, ranks: int) -> Times:
    """Measured times of all stages of a rank, mean over ranks, for schedules whose order depends on times."""
    forward_s, backward_s = (float(each.mean(axis=1).sum()) / ranks for each in (times.forward_s, times.backward_s))
    weights = times.backward_s / 2 if times.weight_gradient_s is None else times.weight_gradient_s
    weights_s = float(weights.mean(axis=1).sum()) / ranks
    return Times(
        forward_s=forward_s,
        input_gradient_s=backward_s - weights_s,
        weight_gradient_s=weights_s,
        message_s=0.0 if times.message_s is None else float(times.message_s.mean()),
    )


def slowdown_of(slow_ranks: Mapping[int, float], ranks: int) -> Array:
    """Factor on the passes of each rank.

    Raises:
        UserError: a rank or a factor is out of range.

    >>> slowdown_of({1: 1.2}, 3).tolist()
    [1.0, 1.2, 1.0]
    """
    factors = np.ones(ranks)
    for rank, factor in slow_ranks.items():
        if not 0 <= rank < ranks:
            raise UserError(
                f"slow rank {rank}: the pipeline has ranks 0 to {ranks - 1}", hint="as in --slow-rank 1:1.2"
            )
        if not 0.1 <= factor <= 100:
            raise UserError(f"slow rank {rank}: a factor of {factor:g}", hint="0.1 to 100; 1.2: 20 % slower")
        factors[rank] = factor
    return factors


def footprint_of(e: Evaluation, table: ActionTable, layers: Array) -> Footprint:
    """Bytes that stages hold; states and temporaries of a rank are divided over its stages, which run one at a time."""
    stages, sizes = table.stages, e.sizes
    each = float(kept_of_layer(sizes.layer.kept_bytes, sizes.boundary_bytes, e.plans))
    kept, copied = layers * each, layers * each
    kept[0] += float(sizes.first.kept_bytes)
    kept[-1] += float(sizes.last.kept_bytes)
    ranks = table.ranks
    copies = len(np.unique(table.rank * stages + table.stage)) / stages
    sharing = copies if e.plans.shares("optimizer") else 1.0
    looped = stages > ranks and bool(np.all(table.rank == table.stage % ranks))
    held, weights = np.zeros(stages), np.zeros(stages)
    for stage in range(stages):
        place = stage % ranks if looped else stage
        name = "first" if place == 0 else "last" if place == (ranks if looped else stages) - 1 else "middle"
        found = stage_memory(e, name if ranks > 2 or name != "middle" else "first")
        own = {path: float(call.value) for path, call in found.held.items()}
        own = {path: value / (sharing if "optimizer" in path.split("/")[0] else 1) for path, value in own.items()}
        working = {path: float(call.value) for path, call in found.calls().items() if path.startswith("working/")}
        weights[stage] = sum(value for path, value in own.items() if path.split("/")[0].endswith("weights"))
        held[stage] = sum(own.values()) - weights[stage] + sum(working.values()) / copies
        if found.fullest_phase == "backward" and name == "last":  # the loss of the micro-batch has gone back by then
            held[stage] -= float(sizes.last.kept_bytes)
    share = ranks / stages
    return Footprint(
        activation_bytes=kept,
        copied_bytes=copied,
        deferred_bytes=kept,
        weights_bytes=weights * share,
        fixed_bytes=held * share,
    )


def once_of(e: Evaluation, pipeline_s: float, *, updates: bool = False) -> dict[str, float]:
    """Seconds that occur once per step, by name; the growth is that of the whole step's work.

    With ``updates``, gradient traffic and the optimiser are actions of the schedule and not among the result.
    """
    step = e.step
    of_update = {
        "data_parallel": float(sum(step.data_s.values()) + step.replicated_s),
        "optimizer": float(step.optimizer_s + step.matrix_update_s + step.momentum_gather_s),
    }
    found = {
        **({} if updates else of_update),
        "host": float(step.stage_host_s),
        "contention": float(step.contention_s),
    }
    work_s = pipeline_s + sum(found.values())
    grown = float(step.growth_s) / float(step.work_s) * work_s
    return {
        name: value for name, value in {**found, "overhead": float(step.overhead_s), "growth": grown}.items() if value
    }
