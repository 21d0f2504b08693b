"""The bracket around a step time: everything overlapped, nothing overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from steptime.cost.roofline import memory_s, roofline_compute_s
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import BACKWARD, FORWARD, RECOMPUTE, PhaseTime, factor_of, kind_of, links_busy_s
from steptime.estimate.machine import Machine
from steptime.estimate.operators import KINDS, OPERATORS
from steptime.estimate.stages import Passes
from steptime.estimate.step import Step, compose, inputs_of
from steptime.estimate.traffic import layer_copy_s
from steptime.estimate.work import Pass, PhaseWork, paced_s, phase_work
from steptime.num import Num, maximum, minimum, where
from steptime.plan.framework import FACTORS, IDEAL, Framework, without_hiding
from steptime.plan.plans import Plans

Directions = tuple[list[PhaseTime], list[PhaseTime], list[PhaseTime]]
"""Rows forward, rows of the backward pass, and those forward that run again in full recomputation."""
Resources = tuple[Num, Num, Num]
"""Seconds that some rows keep arithmetic, memory and links busy."""


def _directions(times: Iterable[PhaseTime]) -> Directions:
    """The rows by direction."""
    forward: list[PhaseTime] = []
    backward: list[PhaseTime] = []
    for time in times:
        (forward if time.direction == FORWARD else backward).append(time)
    again = [time for time in forward if time.row.runs_again]
    return forward, backward, again if len(again) < len(forward) else forward


def _each(directions: Directions, busy: Callable[[list[PhaseTime]], Resources]) -> tuple[Resources, ...]:
    """Resources of all directions; where the whole forward pass runs again, they are found once."""
    forward, backward, again = directions
    of_forward = busy(forward)
    return of_forward, busy(backward), of_forward if again is forward else busy(again)


def _resources(times: Iterable[PhaseTime], framework: Framework) -> Resources:
    compute: Num = 0.0
    memory: Num = 0.0
    links: Num = 0.0
    factors = {(kind, narrow): factor_of(kind, narrow, framework) for kind in KINDS for narrow in (False, True)}
    for time in times:
        factor, moving_s = factors[kind_of(time.row), time.narrow], time.memory_busy_s
        if time.timed is not None:
            moving_s = maximum(moving_s - time.compute_s, 0.0)
        compute, memory = compute + time.compute_s * factor, memory + moving_s * factor
        for transfer in time.transfers:
            links = links + transfer.busy_s * framework.links(transfer.transfer.axis)
    return compute, memory, links


def _bound_resources(times: Iterable[PhaseTime], plans: Plans, bound: Machine) -> Resources:
    """As :func:`_resources` on a machine without latencies and fitted models, which times a sum as its parts."""
    matrix: Num = 0.0
    attention: Num = 0.0
    vector: Num = 0.0
    moved: Num = 0.0
    links: Num = 0.0
    for time in times:
        operator = OPERATORS[time.row.operator]
        if operator.attends or operator.wide:
            attention = attention + time.matrix_flops / (bound.wide_share if operator.wide else 1.0)
        else:
            matrix = matrix + time.matrix_flops
        vector, moved = vector + time.vector_flops, moved + time.moved_bytes
        if time.transfers:
            links = links + links_busy_s(time, plans, bound)
    vector_rate = bound.vector_flops_per_s
    compute = roofline_compute_s(matrix, vector, bound.matrix_flops_per_s, vector_rate, 0.0)
    compute = compute + roofline_compute_s(attention, 0.0, bound.attention_flops_per_s, vector_rate, 0.0)
    return compute, memory_s(moved, bound.memory_Bps), links


def _fastest(*resources: Resources, splits: bool) -> Pass:
    """Each direction takes as long as its busiest resource; what is split of a backward pass is at most half of it."""
    forward, backward, again = (maximum(maximum(*busy_s[:2]), busy_s[2]) for busy_s in resources)
    return Pass(
        forward_s=forward, backward_s=backward, weights_s=backward / 2 if splits else 0.0, ended_s=forward - again
    )


def _slowest(directions: Directions, works: Mapping[str, PhaseWork], framework: Framework) -> Pass:
    """Each direction takes as long as all its resources together, or as the host if it is slower."""
    resources = _each(directions, partial(_resources, framework=framework))
    forward, backward, again = (
        paced_s(sum(busy_s), phase_work(works, phase), framework)
        for phase, busy_s in zip((FORWARD, BACKWARD, RECOMPUTE), resources, strict=True)
    )
    return Pass(forward_s=forward, backward_s=backward, ended_s=forward - again)


def _compose(e: Evaluation, machine: Machine, passes: Passes, overlap: bool, framework: Framework) -> Step:
    """A step of which all traffic overlaps or none; where it does, copies to the host make no stage slower."""
    inputs, copy_s = e.inputs, 0.0 if overlap else layer_copy_s(e, machine)
    if machine is not e.machine:
        inputs = inputs_of(e, machine, inputs.layout, copy_s)
    hides = float(overlap)
    inputs = replace(inputs, hides_data=hides, hides_stages=hides, hides_copies=hides, copy_s=copy_s)
    return compose(inputs, passes, framework)


def bracket_s(e: Evaluation) -> tuple[Num, Num]:
    r"""Lower and upper bound of the step time under any overlap.

    Low: per micro-batch the busiest of arithmetic, memory and links, everything else hidden behind it, the pipeline
    still filling and draining; but no less than the data-parallel traffic of the step and than the copies of
    activations to the host, and no more than the estimate. Where fitted models time the step, that is at the rates of
    the datasheet and without latencies, under the ideal framework; elsewhere at the rates that are assumed to be
    sustained, without overheads, each part as much faster as the framework makes it, if it does. High: arithmetic,
    memory traffic and communication one after the other, each as much slower as the framework makes it; a factor of its
    on links below 1, where the fit found traffic hidden behind computation, counts as 1.

    Source: the two bounds of a roofline, max and sum of the times.
    """
    bound, splits = e.machine.bound, e.job.splits_backward
    parts = {part: _directions(times) for part, times in e.times.items()}
    highest_s = _highest_s(e, parts)
    if bound is None:
        eased = _eased(e.job.framework)
        passes = {
            part: _fastest(*_each(directions, partial(_resources, framework=eased)), splits=splits)
            for part, directions in parts.items()
        }
        return minimum(_lowest_s(e, e.machine, Passes(**passes), eased), e.step.total_s), maximum(
            highest_s, e.step.total_s
        )
    least = {
        part: _fastest(*_each(directions, partial(_bound_resources, plans=e.plans, bound=bound)), splits=splits)
        for part, directions in parts.items()
    }
    return minimum(_lowest_s(e, bound, Passes(**least), IDEAL), e.step.total_s), maximum(highest_s, e.step.total_s)


def _lowest_s(e: Evaluation, machine: Machine, passes: Passes, framework: Framework) -> Num:
    low = _compose(e, machine, passes, True, framework)
    hidden = low.steady_s + low.idle_s + low.optimizer_s
    layout, one_s = e.inputs.layout, layer_copy_s(e, machine) * low.micro_batches
    fullest = maximum(maximum(layout.first, layout.last), where(layout.stages > 2, layout.middle, 0.0))
    return maximum(maximum(hidden, low.data.busy_s), one_s * fullest)


def _highest_s(e: Evaluation, parts: Mapping[str, Directions]) -> Num:
    framework = without_hiding(e.job.framework)
    passes = Passes(**{part: _slowest(rows, e.works[part], framework) for part, rows in parts.items()})
    return _compose(e, e.machine, passes, False, framework).total_s


def _eased(framework: Framework) -> Framework:
    """The framework where it is faster than the ideal one: runs of a device may beat the rates assumed of it."""
    faster: dict[str, Any] = {name: minimum(getattr(framework, name), 1.0) for name in FACTORS}
    return replace(IDEAL, **faster)
