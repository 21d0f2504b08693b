"""Predicted memory of a measured run in the terms of what the run's own tool prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.memory_definitions import UNSTATED, exceeding, memory_by_definition, memory_constants
from steptime.lab.measured.metrics import MemoryDefinition
from steptime.lab.measured.run import MeasuredRun
from steptime.plan.memory_profile import PLAIN

_NAMES: Final = {
    MemoryDefinition.ALLOCATED: "allocated", MemoryDefinition.RESERVED: "reserved", MemoryDefinition.DEVICE: "device",
}  # fmt: skip
#: What a framework's own log calls memory where a row does not say it: torchtitan prints `max_reserved`.
PRINTED: Final = {"torchtitan": "reserved", "megatron": "reserved"}


GIGABYTES: Final = 0.3
"""Chance that a figure without a unit counts 10^9 bytes, not 2^30."""
UNKNOWN: Final = 0.2
"""Standard deviation of the logarithm that software without a profile of its own adds; of the frameworks that have one,
predicted without it."""
_STEPS: Final = 50


def definition_of(run: MeasuredRun) -> str:
    """``allocated``, ``reserved`` or ``device``: what the measured memory of a run is, as far as it is known."""
    stated = MemoryDefinition.NOT_STATED if run.memory is None else run.memory.definition
    return _NAMES.get(stated) or PRINTED.get(run.framework, "allocated")


def is_stated(run: MeasuredRun) -> bool:
    """Whether a row says what its memory is, or the tool of its framework that prints it is known."""
    said = run.memory is not None and run.memory.definition is not MemoryDefinition.NOT_STATED
    return said or run.framework in PRINTED


def predicted_bytes(run: MeasuredRun, evaluation: Evaluation) -> float:
    """Predicted peak memory of one setting of a run, by the definition of its measurement.

    A run that was measured has run, so that its memory is at most that of the device.
    """
    needed = float(memory_by_definition(evaluation)[definition_of(run)])
    return min(needed, evaluation.machine.memory_bytes)


def deviation_of(run: MeasuredRun, profile: str) -> float:
    """Standard deviation of the logarithm of measured over predicted memory of a run under one setting.

    Args:
        run: the run.
        profile: name of the memory profile of its software; ``plain`` where it has none.
    """
    constants = memory_constants()
    known = constants.spread(definition_of(run), profile)
    if not is_stated(run):
        known = math.hypot(known, constants.deviation[UNSTATED])
    return math.hypot(known, UNKNOWN) if profile == PLAIN.name else known


def memory_band(run: MeasuredRun, settings: Sequence[tuple[float, Evaluation]]) -> tuple[float, float]:
    r"""5th and 95th percentile of the memory that the source of a run prints, read as the row is read.

    A mixture of log-normal ones over the settings of the run with their weights, each with the spread of
    :func:`deviation_of`; where the unit is not stated, of both units.
    """
    parts = [(w, predicted_bytes(run, e), deviation_of(run, e.job.memory.name)) for w, e in settings]
    if run.memory is not None and run.memory.unit_assumed:
        scale = run.memory.memory_bytes / run.memory.least_bytes
        parts = [(w * p, m * f, d) for w, m, d in parts for p, f in ((1 - GIGABYTES, 1.0), (GIGABYTES, scale))]
    return _quantile(parts, 0.05), _quantile(parts, 0.95)


def _quantile(parts: Sequence[tuple[float, float, float]], level: float) -> float:
    """Quantile of a mixture of log-normal distributions: weights, medians and deviations.

    >>> round(_quantile([(1.0, 100.0, 0.1)], 0.95), 1), round(_quantile([(0.5, 1.0, 0.01), (0.5, 2.0, 0.01)], 0.95), 2)
    (117.9, 2.03)
    """
    low, high = (math.log(f(m for _, m, _ in parts)) + sign * 6 * max(d for *_, d in parts)
                 for f, sign in ((min, -1), (max, 1)))  # fmt: skip
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = sum(w * (1 - exceeding(m, math.exp(middle), d)) for w, m, d in parts)
        low, high = (middle, high) if below < level else (low, middle)
    return math.exp(high)
