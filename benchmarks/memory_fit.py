"""Fits what lies between allocated, reserved and used memory, and how far predicted peaks can be trusted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime.estimate.memory_definitions import DEFINITIONS, UNSTATED, MemoryConstants, exceeding
from steptime.hardware.profiles import toml_text
from steptime.num import Array
from steptime.plan.framework import PRIOR_SOURCES, widening

SLACKS = tuple(0.01 * i for i in range(41))
COMMUNICATOR_BYTES = tuple(0.05e9 * i for i in range(41))
"""Values that are tried; the fit is one of least absolute relative errors."""
LEAST_ROWS = 20
LEAST_RESERVED_ROWS = 10
"""A framework with fewer rows, of used memory and of reserved memory, has the common slack."""
OWN_SPREAD = frozenset({"hf-trainer"})
"""Frameworks whose runs say nothing of the spread of others: allocators that lengths of sequences fragment."""
RELEASED = 0.5
"""Assumed of the allocator's slack: the half that lies in blocks which it can give back."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """One measured peak beside the predicted allocated one (bytes)."""

    source: str
    framework: str
    definition: str
    allocated_bytes: float
    communicators: float
    measured_bytes: float
    stated: bool = True
    """Whether the source says what its figure is, or the tool that printed it is known."""


def slack_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Share that the allocator holds beyond allocated memory: the geometric mean of measured pairs, less one.

    Args:
        pairs: allocated and reserved bytes of the same run.

    >>> round(slack_of([(100.0, 110.0), (100.0, 110.0)]), 6)
    0.1
    """
    return math.exp(sum(math.log(reserved / allocated) for allocated, reserved in pairs) / len(pairs)) - 1


def reserved_slack(points: Sequence[MemoryPoint]) -> float:
    """Share that the allocator of one framework holds beyond allocated memory: the median over its runs, 0 at least.

    A median, since jobs of few tokens hold fragments of buffers that the activations of long ones fill.

    Args:
        points: runs of one framework whose memory is what the allocator holds.
    """
    return max(float(np.median([p.measured_bytes / p.allocated_bytes for p in points])) - 1.0, 0.0)


def device_line(points: Sequence[MemoryPoint], context_bytes: float) -> tuple[float, float]:
    """Slack and bytes per communicator of runs whose memory is what the driver reports: least absolute errors.

    Args:
        points: runs of one framework.
        context_bytes: of the driver, which is not fitted.

    Returns:
        Slack as a share and bytes per communicator.
    """
    allocated = np.array([p.allocated_bytes for p in points])
    count = np.array([p.communicators for p in points])
    measured = np.array([p.measured_bytes for p in points])

    def error(slack: float, each: float) -> float:
        predicted = allocated * (1 + slack) + context_bytes + count * each
        return float(np.mean(np.abs(predicted / measured - 1)))

    return min(itertools.product(SLACKS, COMMUNICATOR_BYTES), key=lambda pair: error(*pair))


def predicted_bytes(point: MemoryPoint, constants: MemoryConstants) -> float:
    """Predicted peak of a point by its own definition."""
    return float(constants.defined(point.allocated_bytes, point.communicators, point.framework)[point.definition])


def errors_of(points: Sequence[MemoryPoint], constants: MemoryConstants) -> Array:
    """Logarithm of measured over predicted."""
    return np.array([math.log(p.measured_bytes / predicted_bytes(p, constants)) for p in points])


def deviation_of(points: Sequence[MemoryPoint], constants: MemoryConstants, least: float = 0.02) -> float:
    """Root mean square of the errors, each source with equal weight and each error at most three medians."""
    errors = np.abs(errors_of(points, constants))
    most = 3 * 1.4826 * float(np.median(errors)) + least
    clipped = np.minimum(errors, most) ** 2
    sources = np.array([p.source for p in points])
    means = [float(np.mean(clipped[sources == name])) for name in sorted(set(sources.tolist()))]
    return max(math.sqrt(sum(means) / len(means)), least)


def fitted_constants(
    points: Sequence[MemoryPoint], pairs: Sequence[tuple[float, float]], context_bytes: float, source: str
) -> MemoryConstants:
    """Constants from measured peaks.

    Args:
        points: measured peaks with what is predicted.
        pairs: allocated and reserved bytes of the same runs.
        context_bytes: of the driver, which is assumed.
        source: what the points are.
    """
    reserved = {name: reserved_slack(own) for name, own in _by_framework(points, "reserved", LEAST_RESERVED_ROWS)}
    lines = {name: device_line(own, context_bytes) for name, own in _by_framework(points, "device", LEAST_ROWS)}
    each = [per for _, per in lines.values()]
    found = reserved | {name: slack for name, (slack, _) in lines.items()}
    slacks = {name: {"slack": slack} for name, slack in found.items()}
    first = MemoryConstants(
        slack=slack_of(pairs),
        own=slacks,
        context_bytes=context_bytes,
        communicator_bytes=sum(each) / len(each) if each else 0.0,
        deviation=dict.fromkeys(DEFINITIONS, 0.1),
        source=source,
    )
    deviation = {}
    told = [p for p in points if p.framework not in OWN_SPREAD]
    for name in (*DEFINITIONS, UNSTATED):
        own = [p for p in told if (p.definition if p.stated else UNSTATED) == name]
        deviation[name] = deviation_of(own, first) if own else 0.1
    wider = {name: {"deviation": wide} for name, wide in _wider(points, first, deviation).items()}
    own = {name: {**slacks.get(name, {}), **wider.get(name, {})} for name in (*slacks, *wider)}
    return replace(first, deviation=deviation, own=own)


def _wider(points: Sequence[MemoryPoint], constants: MemoryConstants, common: Mapping[str, float]) -> dict[str, float]:
    """Deviation of each framework with rows enough that spreads wider than all runs of a definition together."""
    out = {}
    for name in sorted({p.framework for p in points}):
        own = [p for p in points if p.framework == name]
        wide = deviation_of(own, constants) if len(own) >= LEAST_ROWS else 0.0
        if wide > max(common[p.definition] for p in own):
            out[name] = wide
    return out


def unseen_deviation(points: Sequence[MemoryPoint], without: Mapping[str, MemoryConstants]) -> float:
    """Deviation of software that no fit has seen: of sources each predicted without its rows, each counting once.

    With the factor that a spread known from so few sources has (:func:`steptime.plan.framework.widening`).
    """
    names = sorted({p.source for p in points})
    each = [deviation_of([p for p in points if p.source == name], without[name]) ** 2 for name in names]
    return widening(len(names) - 1 - PRIOR_SOURCES) * math.sqrt(sum(each) / len(each))


def _by_framework(points: Sequence[MemoryPoint], definition: str, least: int) -> list[tuple[str, list[MemoryPoint]]]:
    """Points of a definition by framework, of those that have so many at least."""
    own = [p for p in points if p.definition == definition]
    groups = [(name, [p for p in own if p.framework == name]) for name in sorted({p.framework for p in own})]
    return [(name, group) for name, group in groups if len(group) >= least]


def reliability(points: Sequence[MemoryPoint], constants: MemoryConstants) -> Mapping[float, float]:
    """Nominal probability -> share of the points whose memory is below the quantile that the spread gives it."""
    levels = [
        1 - exceeding(predicted_bytes(p, constants), p.measured_bytes, constants.spread(p.definition, p.framework))
        for p in points
    ]
    return {q: sum(level <= q for level in levels) / len(levels) for q in QUANTILES}


def as_toml(constants: MemoryConstants, fitted: str, rows: int) -> str:
    """The file that :mod:`steptime.estimate.memory_definitions` reads; what is of one framework is in its own."""
    lines = [
        "# Written by `benchmarks/bench_memory.py --write`; edits are lost when it runs again.",
        "",
        "[provenance]",
        f"source = {toml_text(constants.source)}",
        f"rows = {rows}",
        f"fitted = {toml_text(fitted)}",
        "",
        "[slack]",
        f"value = {constants.slack:.5g}",
        'kind = "fitted"',
        f"released = {constants.released:.5g}  # assumed",
        "",
        "[context_bytes]",
        f"value = {constants.context_bytes:.5g}",
        'kind = "assumed"',
        "",
        "[communicator_bytes]",
        f"value = {constants.communicator_bytes:.5g}",
        'kind = "fitted"',
        "",
        "[deviation]",
        *(f"{name} = {value:.5g}" for name, value in constants.deviation.items()),
        "",
        "[deviation.unseen]",
        f"value = {constants.unseen:.5g}",
    ]
    return "\n".join(lines) + "\n"
