"""Measured runs as the input of a fit: every plausible setting evaluated once, under the ideal framework."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.kernels import of_device
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.memory_definitions import (
    UNSTATED,
    exceeding,
    memory_by_definition,
    memory_constants,
    oom_probability,
)
from steptime.hardware.library import architecture_of, cluster_names, load_cluster
from steptime.hardware.records import Cluster, Device
from steptime.measure.runs.candidates import Candidate, candidates, job_of, plans_of, precision_of
from steptime.measure.runs.fitting import FrameworkFit, Runs, Sample
from steptime.measure.runs.metrics import MemoryDefinition
from steptime.measure.runs.run import MeasuredRun
from steptime.num import Array
from steptime.plan.framework import IDEAL, Framework, kernel_factor
from steptime.plan.framework_file import habits_of
from steptime.plan.job import Job, Precision
from steptime.plan.memory_profile import PLAIN
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

EAGER: Final = 2.5
"""Traffic of norms, activations, rotary embeddings and adapters operator by operator, over that of fused kernels: about
10 passes for 2 (norm), 5 for 3 (gated activation), 8 for 2 (rotary embedding); counted in a Llama of Hugging Face."""
_EAGER: Final = re.compile(r"(?:^|[;,])\s*(?:eager\s*|kernel opts:\s*(?:-|\d+)\s*)(?:$|[;,])", re.IGNORECASE)
LARGEST_NODE: Final = 8
"""Largest fast domain that is a node, whose number of devices a run may state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One plausible setting of a run."""

    weight: float
    job: Job
    cluster: Cluster
    machine: Machine
    plans: Plans

    def evaluate(self, framework: Framework = IDEAL) -> Evaluation:
        """Time and memory of the setting under a framework."""
        strategy = CORRECTED.strategy("context" if self.plans.cp > 1 else "1d")
        return evaluate(CORRECTED, strategy, replace(self.job, framework=framework), self.machine, self.plans)


@lru_cache(maxsize=1)
def _clusters() -> dict[str, Cluster]:
    """The catalogue's cluster of each device; a vendor's own system first."""
    found: dict[str, Cluster] = {}
    for name in sorted(cluster_names(), key=lambda name: (not name.startswith("dgx"), name)):
        if not name.startswith("published"):
            cluster = load_cluster(name)
            found.setdefault(cluster.device.name, cluster)
    return found


@lru_cache(maxsize=512)
def cluster_of(device: str, per_node: int, network_Bps: float | None) -> Cluster:
    """Cluster of a run: that of the catalogue for its device, with the node and the network that the run states."""
    cluster = _clusters().get(device) or load_cluster(device)
    inner, *outer = cluster.levels
    if inner.devices is not None and per_node < inner.devices <= LARGEST_NODE:
        inner = replace(inner, devices=per_node)
    if network_Bps and outer:
        known = {**outer[-1].catalogue, "link_Bps": network_Bps, "links_per_device": 1.0}
        outer[-1] = replace(outer[-1], link_Bps=network_Bps, links_per_device=1.0, catalogue=known)
    return replace(cluster, levels=(inner, *outer))


@lru_cache(maxsize=2048)
def _machine(device: str, per_node: int, network_Bps: float | None, gpus: int, precision: Precision) -> Machine:
    cluster = cluster_of(device, per_node, network_Bps)
    return machine_of(cluster, gpus, precision, lone_rank_has_all_links=True, calibrated=True)


def factors_of(run: MeasuredRun, attention: str) -> dict[str, float]:
    """Factors on times that the software of a run has in addition to those of its framework.

    ``attention``: its kernel over the newest one; ``vector``: operators bound by memory, where a row says that nothing
    fuses them (see :data:`EAGER`).

    >>> from types import SimpleNamespace
    >>> run = SimpleNamespace(notes="eager; 8 GPUs", kernel="flash2", framework="torchtitan", device="h100-sxm")
    >>> factors_of(run, "fused")
    {'attention': 1.7, 'vector': 2.5}
    """
    habits = habits_of(run.framework)
    kernel = kernel_factor(run.kernel or habits.kernel, architecture_of(run.device))
    return {"attention": kernel if attention == "fused" else 1.0, "vector": EAGER if _EAGER.search(run.notes) else 1.0}


def settings_of(run: MeasuredRun) -> tuple[Setting, ...]:
    """Plausible settings of a run with weights that sum to 1.

    Raises:
        UserError: none of them can be modelled.
    """
    found, problem = [], None
    for candidate in candidates(run):
        try:
            found.append(_setting(run, candidate))
        except UserError as error:
            problem = error
    if not found:
        raise problem or UserError("no plausible setting")
    total = sum(s.weight for s in found)
    return tuple(replace(s, weight=s.weight / total) for s in found)


def _setting(run: MeasuredRun, found: Candidate) -> Setting:
    precision = precision_of(run, found)
    key = (run.device, run.gpus_per_node, run.internode_Bps)
    cluster, machine = cluster_of(*key), _machine(*key, run.gpus, precision)
    return Setting(
        weight=found.weight,
        job=job_of(run, found, precision),
        cluster=cluster,
        machine=machine,
        plans=plans_of(found, cluster.fast_domain),
    )


_NAMES: Final = {
    MemoryDefinition.ALLOCATED: "allocated",
    MemoryDefinition.RESERVED: "reserved",
    MemoryDefinition.DEVICE: "device",
}
#: Framework -> memory that its log prints, where a row does not say which: torchtitan prints `max_reserved`.
PRINTED: Final = {"torchtitan": "reserved", "megatron": "reserved"}


GIGABYTES: Final = 0.3
"""Chance that a figure without a unit counts 10^9 bytes, not 2^30."""
UNKNOWN: Final = 0.2
"""Standard deviation of ln(memory) that software without a profile of its own adds: the error of frameworks that have
one when they are predicted without it."""
_STEPS: Final = 50


def definition_of(run: MeasuredRun) -> str:
    """Definition of a run's measured memory: ``allocated``, ``reserved`` or ``device``; ``allocated`` if unknown."""
    stated = MemoryDefinition.NOT_STATED if run.memory is None else run.memory.definition
    return _NAMES.get(stated) or PRINTED.get(run.framework, "allocated")


def is_stated(run: MeasuredRun) -> bool:
    """True if a row defines its memory, or the log of its framework is known to."""
    said = run.memory is not None and run.memory.definition is not MemoryDefinition.NOT_STATED
    return said or run.framework in PRINTED


def predicted_bytes(run: MeasuredRun, evaluation: Evaluation) -> float:
    """Predicted peak memory of one setting of a run, by the definition of its measurement.

    A measured run did fit, so its memory is at most that of the device.
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
    r"""5th and 95th percentile of the printed memory of a run (bytes), in the unit in which its row was read.

    The distribution is a mixture of log-normals, one for each setting with its weight and the spread of
    :func:`deviation_of`, and for each of both units where the row states none.
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
    low, high = (
        math.log(f(m for _, m, _ in parts)) + sign * 6 * max(d for *_, d in parts) for f, sign in ((min, -1), (max, 1))
    )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = sum(w * (1 - exceeding(m, math.exp(middle), d)) for w, m, d in parts)
        low, high = (middle, high) if below < level else (low, middle)
    return math.exp(high)


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Runs that could be evaluated, and why others could not."""

    runs: tuple[MeasuredRun, ...]
    fit: FrameworkFit
    memory_bytes: Array
    """Geometric mean of the peak memory over the settings of each run."""
    refused: tuple[tuple[MeasuredRun, str], ...]
    oom: Array
    """Predicted chance that each run does not fit its device: the mean over its settings."""
    memory_bands: Array
    """5th and 95th percentile of the peak memory in bytes, a row for each run."""


def modelled(runs: Sequence[MeasuredRun], progress: Progress | None = None) -> Modelled:
    """Evaluates the plausible settings of all runs.

    Args:
        runs: measured runs; one without a time is evaluated for its memory.
        progress: called with runs done and all runs.
    """
    samples: list[Sample] = []
    used: list[MeasuredRun] = []
    refused: list[tuple[MeasuredRun, str]] = []
    log_memory: list[float] = []
    oom: list[float] = []
    bands: list[tuple[float, float]] = []
    for done, run in enumerate(runs, start=1):
        try:
            found = _evaluated(run)
        except UserError as error:
            refused.append((run, str(error)))
        else:
            for weight, evaluation, device in found:
                factors, own = factors_of(run, evaluation.job.attention), of_device(device, evaluation.machine.models)
                samples.append(Sample.of(len(used), weight, evaluation, **factors, of_device=own))
            log_memory.append(sum(w * math.log(predicted_bytes(run, e)) for w, e, _ in found))
            oom.append(sum(w * oom_probability(e) for w, e, _ in found))
            bands.append(memory_band(run, [(w, e) for w, e, _ in found]))
            used.append(run)
        if progress:
            progress(done, len(runs))
    if not used:
        raise UserError("none of the measured runs can be modelled", hint="see the reasons of the rows")
    columns = Runs(
        measured_s=np.array([run.step_time_s or 1.0 for run in used]),
        source=np.array([run.source_key for run in used]),
        framework=np.array([run.framework for run in used]),
        device=np.array([run.device for run in used]),
        experts=np.array([run.model.experts is not None for run in used]),
    )
    return Modelled(
        runs=tuple(used),
        fit=FrameworkFit(samples, columns),
        refused=tuple(refused),
        memory_bytes=np.exp(log_memory),
        oom=np.array(oom),
        memory_bands=np.array(bands),
    )


def _evaluated(run: MeasuredRun) -> list[tuple[float, Evaluation, Device]]:
    settings: tuple[Setting, ...] = settings_of(run)
    found = [(setting.weight, setting.evaluate(), setting.cluster.device) for setting in settings]
    found = [
        (w, e, d) for w, e, d in found if 0 < float(e.step_time_s) < math.inf and 0 < float(e.peak_bytes) < math.inf
    ]
    if not found:
        raise UserError("no plausible setting gives a finite time")
    total = sum(weight for weight, _, _ in found)
    return [(weight / total, evaluation, device) for weight, evaluation, device in found]
