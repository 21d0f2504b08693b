"""Uncertainty of a step time: its 90 % band with the sources of the variance, and its bracket.

The bracket is the step time if all traffic overlaps and if none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from steptime.cost.roofline import memory_s, roofline_compute_s
from steptime.estimate.evaluate import Evaluation, Works
from steptime.estimate.layer import BACKWARD, FORWARD, PARTS, RECOMPUTE, PhaseTime, factor_of, kind_of, links_busy_s
from steptime.estimate.machine import Machine
from steptime.estimate.operators import KINDS, OPERATORS
from steptime.estimate.step import Step, compose
from steptime.estimate.step_inputs import inputs_of
from steptime.estimate.traffic import layer_copy_s
from steptime.estimate.work import NUMBERS, Pass, PhaseWork, paced_s, pass_of, phase_work, stacked
from steptime.num import Num, maximum, minimum, taken, where
from steptime.plan.framework import (
    BUSY,
    FACTORS,
    IDEAL,
    PARAMETERS,
    Framework,
    from_fitted_scale,
    to_fitted_scale,
    without_hiding,
)
from steptime.plan.plans import Plans

K = TypeVar("K")
DEVICE = "device"
"""Name of the doubt about a device's own factor."""
WIDEST = 100.0
"""Largest logarithm of a band edge over the step time: the doubts of a file may give a band that overflows."""
NOISE = "noise"
"""Name of the residual variance of runs whose configuration is known exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBand:
    """Interval in which nine of ten measured steps lie."""

    low_s: float
    high_s: float
    shares: Mapping[str, float]
    """Share of the variance by uncertain parameter, largest first."""


def band_of(e: Evaluation) -> StepBand | None:
    r"""Band around the step time of one plan; None for a framework without residuals.

    $$\sigma^2 = \sum_k \left(\ln \frac{T(\theta_k + \sigma_k)}{T}\right)^2 + \sigma_n^2, \qquad
      \left[T e^{q_{5} w \sigma},\ T e^{q_{95} w \sigma}\right]$$

    where $\theta_k$ are the parameters of the framework and the factor of the device, with standard deviations
    $\sigma_k$ on the scale of the fit (the logarithm; of shares the logit), $\sigma_n$ the noise of runs that are known
    exactly (with experts $\sigma_n^2$ has a further term), $q$ the quantiles of residuals of runs whose source had no
    part in the fit, and $w$ the widening for a device that few sources have measured
    (:func:`steptime.plan.framework.widening`).

    Args:
        e: evaluation of one plan.
    """
    spread, framework = e.job.framework.spread, e.job.framework
    if spread is None:
        return None
    # Change of the logarithm of time when each doubt moves by one standard deviation.
    many = _doubted(framework, tuple(spread.doubts.items()), spread.device_doubt)
    logs = np.log(compose(e.inputs, _passes(e.works, many), many).total_s)
    changes = dict(zip((*PARAMETERS, DEVICE), (logs[:-1] - logs[-1]).tolist(), strict=True))
    noise_variance = spread.noise**2 + (0.0 if e.job.model.experts is None else spread.experts**2)
    variances = {name: change**2 for name, change in changes.items()} | {NOISE: noise_variance}
    total = sum(variances.values())
    deviation, step_s = spread.widening * math.sqrt(total), float(e.step_time_s)
    largest = sorted(variances.items(), key=lambda pair: -pair[1])
    low, high = (math.exp(min(end * deviation, WIDEST)) for end in (spread.low, spread.high))
    return StepBand(
        low_s=step_s * low, high_s=step_s * high,
        shares={name: value / total for name, value in largest},
    )  # fmt: skip


def _passes(works: Works, many: Framework) -> dict[str, Pass]:
    """Time of each part of the model under the frameworks in columns; all parts are computed at once, as rows."""
    parts = [works[part] for part in PARTS]
    rows = {phase: _in_rows([phase_work(part, phase) for part in parts]) for phase in parts[0]}
    each: Any = pass_of(rows, many)
    return {
        part: Pass(**{field.name: taken(getattr(each, field.name), i) for field in fields(Pass)})
        for i, part in enumerate(PARTS)
    }


def _in_rows(works: list[PhaseWork]) -> PhaseWork:
    """One record for several works: each number becomes an array with a row per work and one column."""
    numbers = np.array([_NUMBERS_OF(work) for work in works]).T[:, :, None]
    links, busy = _columns([work.links_s for work in works]), _columns([work.busy_s for work in works])
    covered, beside = (stacked([getattr(work, n) for work in works], (-1, 1)) for n in ("covered_s", "beside_s"))
    own = dict(zip(NUMBERS, numbers, strict=True))
    return PhaseWork(**own, links_s=links, busy_s=busy, covered_s=covered, beside_s=beside)


def _columns(each: list[Mapping[K, Num]]) -> dict[K, Num]:
    """Numbers of several mappings by key as arrays of one column; a missing key counts as zero."""
    keys = dict.fromkeys(key for one in each for key in one)
    return {key: np.array([[one.get(key, 0.0)] for one in each]) for key in keys}


_NUMBERS_OF = attrgetter(*NUMBERS)


@lru_cache(maxsize=256)
def _doubted(framework: Framework, doubts: tuple[tuple[str, float], ...], device_doubt: float) -> Framework:
    """Frameworks in columns: one per parameter moved by its doubt, one for the device's doubt, the last unchanged."""
    count, by_name = len(PARAMETERS) + 2, dict(doubts)
    columns: dict[str, Any] = {}
    for i, name in enumerate(PARAMETERS):
        value = float(getattr(framework, name))
        columns[name] = np.full(count, value)
        columns[name][i] = from_fitted_scale(name, to_fitted_scale(name, value) + by_name[name])
        if name in BUSY:
            columns[name][-2] = value * math.exp(device_doubt)
    return replace(framework, **columns)


Directions = tuple[list[PhaseTime], list[PhaseTime], list[PhaseTime]]
"""Rows of the forward pass, of the backward pass, and the forward rows that full recomputation runs again."""
Resources = tuple[Num, Num, Num]
"""Seconds for which some rows keep arithmetic, memory and links busy."""


def _directions(times: Iterable[PhaseTime]) -> Directions:
    """The rows by direction."""
    forward: list[PhaseTime] = []
    backward: list[PhaseTime] = []
    for time in times:
        (forward if time.direction == FORWARD else backward).append(time)
    again = [time for time in forward if time.row.runs_again]
    return forward, backward, again if len(again) < len(forward) else forward


def _each(directions: Directions, busy: Callable[[list[PhaseTime]], Resources]) -> tuple[Resources, ...]:
    """Resources of all directions; computed once for forward and recomputation if the whole forward pass runs again."""
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
    """Busy seconds on a machine without latencies and fitted models, on which work can be summed before it is timed."""
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
    """Pass in which each direction takes as long as its busiest resource.

    At most half of a split backward pass makes gradients of weights.
    """
    forward, backward, again = (maximum(maximum(*busy_s[:2]), busy_s[2]) for busy_s in resources)
    return Pass(
        forward_s=forward, backward_s=backward, weights_s=backward / 2 if splits else 0.0, ended_s=forward - again
    )


def _slowest(directions: Directions, works: Mapping[str, PhaseWork], framework: Framework) -> Pass:
    """Pass in which each direction takes as long as all its resources in turn, or as the host if that is slower."""
    resources = _each(directions, partial(_resources, framework=framework))
    forward, backward, again = (
        paced_s(sum(busy_s), phase_work(works, phase), framework)
        for phase, busy_s in zip((FORWARD, BACKWARD, RECOMPUTE), resources, strict=True)
    )
    return Pass(forward_s=forward, backward_s=backward, ended_s=forward - again)


def _compose(e: Evaluation, machine: Machine, passes: Mapping[str, Pass], overlap: bool, framework: Framework) -> Step:
    """Step with all traffic overlapped or none; if overlapped, copies to the host slow down no stage."""
    inputs, copy_s = e.inputs, 0.0 if overlap else layer_copy_s(e, machine)
    if machine is not e.machine:
        inputs = inputs_of(e, machine)
    hides = float(overlap)
    inputs = replace(inputs, hides_data=hides, hides_stages=hides, hides_copies=hides, copy_s=copy_s)
    return compose(inputs, passes, framework)


def bracket_s(e: Evaluation) -> tuple[Num, Num]:
    r"""Lower and upper bound of the step time under any overlap.

    Low: each micro-batch takes as long as its busiest resource (arithmetic, memory or links), with everything else
    overlapped; the pipeline still fills and drains. The bound is at least the data-parallel traffic of the step and
    the copies of activations to the host, and at most the estimate. Where fitted models time the step, rates are those
    of the datasheet, without latencies and under the ideal framework; elsewhere they are the assumed sustained rates,
    without overheads, and framework factors below 1 apply. High: arithmetic, memory traffic and communication run one
    after the other, each with the framework's factor; a factor on links below 1, which stands for overlap that the fit
    found, counts as 1.

    Source: the two bounds of a roofline, max and sum of the times.
    """
    bound, splits = e.machine.bound, e.job.splits_backward
    parts = {part: _directions(times) for part, times in e.times.items()}
    plain = without_hiding(e.job.framework)
    slowest = {part: _slowest(rows, e.works[part], plain) for part, rows in parts.items()}
    highest_s = maximum(_compose(e, e.machine, slowest, False, plain).total_s, e.step.total_s)
    machine, framework = (e.machine, _eased(e.job.framework)) if bound is None else (bound, IDEAL)
    busy = (
        partial(_resources, framework=framework)
        if bound is None
        else partial(_bound_resources, plans=e.plans, bound=bound)
    )
    fastest = {part: _fastest(*_each(rows, busy), splits=splits) for part, rows in parts.items()}
    return minimum(_lowest_s(e, machine, fastest, framework), e.step.total_s), highest_s


def _lowest_s(e: Evaluation, machine: Machine, passes: Mapping[str, Pass], framework: Framework) -> Num:
    low = _compose(e, machine, passes, True, framework)
    hidden = low.steady_s + low.idle_s + low.optimizer_s + low.matrix_update_s
    inputs, one_s = e.inputs, layer_copy_s(e, machine) * low.micro_batches
    middle = where(inputs.stages > 2, inputs.middle_layers, 0.0)
    fullest = maximum(maximum(inputs.first_layers, inputs.last_layers), middle)
    return maximum(maximum(hidden, sum(low.data_busy_s.values())), one_s * fullest)


def _eased(framework: Framework) -> Framework:
    """The ideal framework with the factors below 1 of another: runs on a device may beat the rates assumed for it."""
    faster: dict[str, Any] = {name: minimum(getattr(framework, name), 1.0) for name in FACTORS}
    return replace(IDEAL, **faster)
