"""Measured runs as a fit takes them: every plausible setting evaluated once, before any framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.kernels import of_device
from steptime.estimate.memory_definitions import oom_probability
from steptime.hardware.records import Device
from steptime.lab.calibrate.frameworks.fit import FrameworkFit, Runs, Sample
from steptime.lab.measured.engine import Setting, factors_of, settings_of
from steptime.lab.measured.memory import memory_band, predicted_bytes
from steptime.lab.measured.run import MeasuredRun
from steptime.num import Array

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
    """Chance that a run does not fit its device, by the prediction: the mean over its settings."""
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
        framework=np.array([run.framework for run in used]), device=np.array([run.device for run in used]),
        experts=np.array([run.model.experts is not None for run in used]),
    )  # fmt: skip
    return Modelled(
        runs=tuple(used), fit=FrameworkFit(samples, columns), refused=tuple(refused),
        memory_bytes=np.exp(log_memory), oom=np.array(oom), memory_bands=np.array(bands),
    )  # fmt: skip


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
