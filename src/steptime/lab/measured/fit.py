"""Which settings of a run fit into the memory of its device, by the engine's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from steptime.estimate.memory import peak_bytes
from steptime.estimate.memory_definitions import communicators, exceeding, memory_constants
from steptime.estimate.result import planned_job
from steptime.estimate.sizes import sizes_of
from steptime.lab.measured.candidate import Candidate
from steptime.lab.measured.run import MeasuredRun
from steptime.lab.measured.setting import job_of, plans_of, precision_of
from steptime.num import Array
from steptime.plan.plans import concatenate
from steptime.plan.strategies import CORRECTED

UNFIT_WEIGHT: Final = 0.002
"""Least weight: the estimate may be wrong, or the run less usual than it seems."""


def needed_bytes(run: MeasuredRun, settings: Sequence[Candidate]) -> Array:
    """Memory in use on the device under each setting, all of one precision, attention and offload at once."""
    out = np.zeros(len(settings))
    strategy = CORRECTED.strategy("context")
    domain = run.gpus_per_node
    kinds = [(c.precision, c.attention, *sorted(c.offload)) for c in settings]
    for kind in sorted(set(kinds)):
        chosen = [i for i, each in enumerate(kinds) if each == kind]
        first = settings[chosen[0]]
        job = job_of(run, first, precision_of(run, first))
        plans = concatenate([plans_of(settings[i], domain) for i in chosen], [1] * len(chosen))
        planned = planned_job(CORRECTED, strategy, job, plans, sizes_of(strategy.block(job, plans)))
        out[chosen] = memory_constants().defined(peak_bytes(planned), communicators(plans), job.memory.name)["device"]
    return out


def fit_weight(needed: float, capacity_bytes: float) -> float:
    """Chance that a setting fits, as a factor on its weight.

    Args:
        needed: predicted memory in bytes.
        capacity_bytes: memory of the device.

    >>> fit_weight(40e9, 80e9) > 0.999, fit_weight(80e9, 80e9), fit_weight(200e9, 80e9)
    (True, 0.5, 0.002)
    """
    return max(UNFIT_WEIGHT, 1.0 - exceeding(needed, capacity_bytes, memory_constants().deviation["device"]))
