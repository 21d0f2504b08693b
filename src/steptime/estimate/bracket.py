"""The bracket around a step time: everything overlapped, nothing overlapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from steptime.estimate.evaluate import Evaluation, composed, part_times
from steptime.estimate.layer import BACKWARD, FORWARD, Pass, PhaseTime, Work, device_s, kind_of, paced_s
from steptime.estimate.machine import Machine
from steptime.estimate.step import Passes, Step
from steptime.num import Num, maximum, minimum
from steptime.plan.framework import IDEAL, Framework

Times = dict[str, tuple[PhaseTime, ...]]


def _resources(times: Iterable[PhaseTime], forward: bool, framework: Framework) -> tuple[Num, Num, Num]:
    compute: Num = 0.0
    memory: Num = 0.0
    links: Num = 0.0
    for time in times:
        if (time.phase == FORWARD) == forward:
            factor: Num = getattr(framework, kind_of(time.row))
            moving_s = time.memory_busy_s
            if time.timed is not None:
                moving_s = maximum(moving_s - time.compute_s, 0.0)
            compute, memory = compute + time.compute_s * factor, memory + moving_s * factor
            for transfer in time.transfers:
                links = links + transfer.busy_s * framework.links(transfer.transfer.axis)
    return compute, memory, links


def _fastest(times: Iterable[PhaseTime]) -> Pass:
    """Each part takes as long as its busiest resource."""
    rows = list(times)
    each = []
    for forward in (True, False):
        compute, memory, links = _resources(rows, forward, IDEAL)
        each.append(maximum(maximum(compute, memory), links))
    return Pass(forward_s=each[0], backward_s=each[1])


def _slowest(times: Iterable[PhaseTime], works: Mapping[str, Work], framework: Framework) -> Pass:
    """Each part takes as long as all its resources together, and what it waits for the host."""
    rows, each = list(times), []
    for forward in (True, False):
        work = works[FORWARD if forward else BACKWARD]
        waited_s = paced_s(work, framework) - device_s(work, framework)
        each.append(sum(_resources(rows, forward, framework)) + waited_s)
    return Pass(forward_s=each[0], backward_s=each[1])


def _compose(e: Evaluation, machine: Machine, passes: Passes, overlap: frozenset[str], framework: Framework) -> Step:
    job = replace(e.job, overlap=overlap, framework=framework)
    return composed(e.method, e.strategy, job, machine, e.plans, e.sizes, passes)


def bracket_s(e: Evaluation) -> tuple[Num, Num]:
    r"""Lower and upper bound of the step time under any overlap.

    Low: per micro-batch the busiest of arithmetic, memory and links, everything else hidden behind it, the pipeline
    still filling and draining; but no less than the data-parallel traffic of the step; under the ideal framework. Where
    fitted models time the step, that is at the rates of the datasheet and without latencies. High: arithmetic, memory
    traffic and communication one after the other, each as much slower as the framework makes it.

    Source: the two bounds of a roofline, max and sum of the times.
    """
    bound = e.machine.bound
    highest_s = _highest_s(e)
    if bound is None:
        return _lowest_s(e, e.machine, e.times), highest_s
    least_s = _lowest_s(e, bound, part_times(e.block, e.plans, bound))
    return minimum(least_s, e.step.total_s), maximum(highest_s, e.step.total_s)


def _lowest_s(e: Evaluation, machine: Machine, times: Times) -> Num:
    passes = Passes(**{part: _fastest(rows) for part, rows in times.items()})
    low = _compose(e, machine, passes, frozenset({"dp", "pp"}), IDEAL)
    hidden = low.steady_s + low.bubble_s - (e.plans.pp - 1) * 2 * low.stage_link_s + low.optimizer_s
    return maximum(hidden, low.gradient_busy_s + low.weight_gather_busy_s + low.backward_gather_busy_s)


def _highest_s(e: Evaluation) -> Num:
    framework = e.job.framework
    passes = Passes(**{part: _slowest(times, e.works[part], framework) for part, times in e.times.items()})
    return _compose(e, e.machine, passes, frozenset(), framework).total_s
