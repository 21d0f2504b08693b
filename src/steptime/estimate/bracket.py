"""The bracket around a step time: everything overlapped, nothing overlapped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from steptime.estimate.evaluate import Evaluation, composed, evaluate
from steptime.estimate.layer import FORWARD, Pass, PhaseTime
from steptime.estimate.step import Passes, Step
from steptime.num import Num, maximum, minimum


def _resources(times: Iterable[PhaseTime], forward: bool) -> tuple[Num, Num, Num]:
    compute: Num = 0.0
    memory: Num = 0.0
    links: Num = 0.0
    for time in times:
        if (time.phase == FORWARD) == forward:
            moving_s = time.memory_busy_s
            if time.timed is not None:
                moving_s = maximum(moving_s - time.compute_s, 0.0)
            compute, memory = compute + time.compute_s, memory + moving_s
            for transfer in time.transfers:
                links = links + transfer.busy_s
    return compute, memory, links


def _fastest(times: Iterable[PhaseTime]) -> Pass:
    """Each part takes as long as its busiest resource."""
    rows = list(times)
    each = []
    for forward in (True, False):
        compute, memory, links = _resources(rows, forward)
        each.append(maximum(maximum(compute, memory), links))
    return Pass(forward_s=each[0], backward_s=each[1])


def _slowest(times: Iterable[PhaseTime]) -> Pass:
    """Each part takes as long as all its resources together."""
    rows = list(times)
    sums = [_resources(rows, forward) for forward in (True, False)]
    return Pass(forward_s=sum(sums[0]), backward_s=sum(sums[1]))


def _compose(e: Evaluation, passes: Passes, overlap: frozenset[str]) -> Step:
    job = replace(e.job, overlap=overlap)
    return composed(e.method, e.strategy, job, e.machine, e.plans, e.sizes, passes)


def bracket_s(e: Evaluation) -> tuple[Num, Num]:
    r"""Lower and upper bound of the step time under any overlap.

    Low: per micro-batch the busiest of arithmetic, memory and links, everything else hidden behind it, the pipeline
    still filling and draining; but no less than the data-parallel traffic of the step. Where fitted models time the
    step, that is at the rates of the datasheet and without latencies. High: arithmetic, memory traffic and
    communication one after the other.

    Source: the two bounds of a roofline, max and sum of the times.
    """
    if e.machine.bound is not None:
        least_s, _ = bracket_s(evaluate(e.method, e.strategy, e.job, e.machine.bound, e.plans))
        return minimum(least_s, e.step.total_s), maximum(_highest_s(e), e.step.total_s)
    low_passes = Passes(**{part: _fastest(times) for part, times in e.times.items()})
    low = _compose(e, low_passes, frozenset({"dp", "pp"}))
    hidden = low.steady_s + low.bubble_s - (e.plans.pp - 1) * 2 * low.stage_link_s + low.optimizer_s
    shared = e.step.gradient_busy_s + e.step.weight_gather_busy_s + e.step.backward_gather_busy_s
    return maximum(hidden, shared), _highest_s(e)


def _highest_s(e: Evaluation) -> Num:
    passes = Passes(**{part: _slowest(times) for part, times in e.times.items()})
    return _compose(e, passes, frozenset()).total_s
