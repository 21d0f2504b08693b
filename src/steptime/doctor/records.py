"""Records of a log or a trace, statistics of its steps, and the diagnosis (SI units)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steptime.errors import InputFileError

PADDED_VOCAB: Final = "padded_vocab"
"""Field of a declared model: the padded vocabulary, which distinguishes models of equal dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of a log with the speed of a step, or the mean of a few."""

    number: int
    time_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    at_s: float | None = None
    """Time of the line, seconds since some start; None: not printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """Event that a log reports between its steps."""

    kind: str
    """``checkpoint``, ``evaluation``, ``garbage_collection``, ``allocator_retry`` or ``out_of_memory``."""
    after_step: int
    """The last step logged before the event."""
    time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Job as the log declares it, under steptime's names."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """``gpus``, ``global_batch``, ``seq``, ``dtype``, ``optimizer``."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Degrees and choices of a plan."""
    model: Mapping[str, int] = field(default_factory=dict)
    """Fields of a model: ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``ffn_hidden``, ``vocab``; ``experts`` (0:
    none), ``experts_per_token``, ``expert_ffn_hidden``."""
    model_name: str = ""
    """Name of the model in the log: ``llama3 8B``."""
    framework: str = ""
    """Fitted framework to predict with unless the user names one; empty: unknown."""
    tokens_per_gpu: float | None = None
    """Tokens of a step on one device; None: unknown."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Other printed settings, under the framework's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A training log as read."""

    path: str
    framework: str
    """``megatron``, ``megatron-deepspeed``, ``nemo``, ``deepspeed``, ``torchtitan``, ``maxtext``, ``transformers`` or
    ``trainer``."""
    steps: tuple[StepLine, ...]
    stated: Stated
    timers: Mapping[str, tuple[float, float]]
    """Timer -> median over the log of its smallest and largest time over the ranks (s per step)."""
    rank_steps: Mapping[int, tuple[StepLine, ...]]
    """Step lines by rank, where several ranks wrote into the log."""
    events: tuple[LogEvent, ...] = ()
    peak_memory_bytes: float | None = None
    memory_kind: str = ""
    """``allocated`` or ``reserved``."""
    device: str = ""
    """Accelerator as the log names it; empty: not named, or unknown to the catalogue."""
    capacity_bytes: float | None = None
    """Memory of the device."""
    skipped_steps: int = 0
    """Optimiser steps skipped after an overflow, without those at the start of dynamic loss scaling."""
    restarts: int = 0
    tflops_per_gpu: float | None = None
    """Median of the TFLOP/s per GPU that the log prints, in units of 1e12 FLOP/s."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    """Outliers among the steps of a series."""

    numbers: tuple[int, ...]
    lost_s: float
    """Excess of the spikes over the median, spread over all steps (s per step)."""
    median_excess_s: float
    period: int | None
    """Steps from one spike to the next; None: irregular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Wall-clock time between the steps."""

    mean_s: float
    """Mean per step."""
    longest_s: float
    """Longest single pause."""
    longest_before: int
    """Step after the longest pause."""
    rest_s: float
    """Mean per step, without the longest pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Statistics of the step times of a run, without its warm-up."""

    lines: int
    steps: int
    """Number of steps that the lines cover."""
    warmup_lines: int
    median_s: float
    p5_s: float
    p95_s: float
    mean_s: float
    drift: float
    """Change from the first to the last step, as a fraction of the median; 0 if it is within noise."""
    spikes: Spikes
    outside: Outside | None = None
    """Wall-clock time that no step accounts for; None: the log has no usable times of day."""
    basis: str = "stated"
    """``stated``, ``from throughput`` or ``from times of day``."""

    @property
    def outside_s(self) -> float | None:
        """Wall-clock seconds per step that no step accounts for."""
        return None if self.outside is None else self.outside.mean_s

    @property
    def drift_lost_s(self) -> float:
        """Seconds per step above the level at the start, on average over the run."""
        return max(self.drift, 0.0) * self.median_s / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTotal:
    """All calls of one kernel."""

    name: str
    group: str
    calls_per_step: float
    time_s: float
    """Per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Communication over one axis of the mesh, per step."""

    axis: str
    """``tp``, ``cp``, ``dp``, ``pp``, ``ep``, or ``unassigned``."""
    busy_s: float
    exposed_s: float
    """Not covered by any other kernel."""
    waiting_s: float
    """Time above the shortest call of the same collective and size: waits for other ranks, or shared links."""
    collectives: Mapping[str, float]
    """Busy seconds by kind of collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongGap:
    """A pause of the device that is longer than any launch, at one place of the steps."""

    time_s: float
    """Mean length."""
    per_step: float
    before: str
    """Kernel that ran last."""
    after: str
    """Kernel that runs next."""
    between_steps: bool
    position: float | None = None
    """Start of the pause as a share of the step; None: between the steps, or at many places."""
    host: str = ""
    """Event of the host during most of the pause; empty: the trace shows none."""
    waits_for_host: bool | None = None
    """True if the next kernel was not yet launched during most of the pause; None: no launches in the trace."""

    @property
    def lost_s(self) -> float:
        """Seconds per step."""
        return self.time_s * self.per_step

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in (*self.__slots__, "lost_s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTimes:
    """Times of the traced steps; ``groups``, exposed traffic and idle time add up to ``step_s``."""

    path: str
    step_s: float
    """Mean over the used steps."""
    step_times_s: tuple[float, ...]
    steps_found: int
    groups: Mapping[str, float]
    """``matmul``, ``attention``, ``optimizer``, ``memory_bound``, ``copies``: seconds per step, none counted twice."""
    traffic: tuple[Traffic, ...]
    idle_s: float
    launch_bound_s: float | None
    """Part of the idle time in which the next kernel had not been launched yet; None: no launches in the trace."""
    longest_gap_s: float
    long_gaps: tuple[LongGap, ...]
    """Pauses longer than any launch, by place, those that cost most first."""
    kernels_per_step: float
    top: tuple[KernelTotal, ...]
    synchronisations: Mapping[str, tuple[float, float]]
    """Blocking runtime call -> calls and seconds per step."""
    streams: int
    gpus: int | None = None
    device: str | None = None
    capacity_bytes: float | None = None
    with_stack: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A measured and a predicted figure."""

    name: str
    unit: str
    """``s``, ``bytes``, ``flops_per_s`` or ``fraction``."""
    measured: float | None
    predicted: float | None
    bracket: tuple[float, float] | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "unit": self.unit,
            "measured": self.measured,
            "predicted": self.predicted,
            "ratio": self.ratio,
            "bracket": None if self.bracket is None else list(self.bracket),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, with evidence and advice."""

    code: str
    title: str
    lost_s: float | None
    """Seconds per step; None: cannot be given in seconds."""
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    relative: bool = False
    """True if the finding rests on the prediction too, not on measurements alone."""
    possible: bool = False
    """True: a possibility, no loss, since the prediction errs by as much as it explains or is of another job."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": self.code,
            "title": self.title,
            "lost_s": self.lost_s,
            "possible": self.possible,
            "evidence": list(self.evidence),
            "advice": list(self.advice),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The prediction with one choice of the plan changed."""

    change: str
    """For people: ``no overlap of data-parallel traffic``."""
    step_time_s: float
    memory: Mapping[str, float] = field(default_factory=dict)
    """Peak memory in bytes by definition: ``allocated``, ``reserved``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Position of the measured step relative to the prediction."""

    where: str
    """``inside_band``, ``inside_bracket``, ``slower``, ``faster`` or ``no_prediction``."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Report of ``steptime doctor``."""

    source: Mapping[str, Any]
    """Path, kind, framework and size of the file."""
    measured: Mapping[str, Any]
    predicted: Mapping[str, Any] | None
    rows: tuple[Compared, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    warnings: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the schema version, which the caller adds."""
        return {
            "source": dict(self.source),
            "measured": dict(self.measured),
            "predicted": None if self.predicted is None else dict(self.predicted),
            "verdict": {"where": self.verdict.where, "text": self.verdict.text},
            "comparison": [row.to_json() for row in self.rows],
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": list(self.warnings),
        }


Floats = NDArray[np.float64]

#: A leading step belongs to the warm-up if it exceeds this multiple of the median of the second half.
WARMUP_EXCESS: Final = 1.2
#: A step is a spike if it exceeds the median by this share of it, and by this many standard deviations.
SPIKE_SHARE: Final = 0.1
SPIKE_DEVIATIONS: Final = 6.0
#: Least drift that is reported: share of the median, and standard errors.
DRIFT_SHARE: Final = 0.03
DRIFT_ERRORS: Final = 4.0
#: Median absolute deviation -> standard deviation of a normal distribution.
_MAD: Final = 1.4826
#: Most points for a slope; more are thinned evenly.
_SLOPE_POINTS: Final = 400
#: Shortest log (s) whose times of day are used for the time between steps.
_SHORTEST_WALL_S: Final = 20.0


def series_of(log: Log, settings: Mapping[str, Any]) -> Series:
    """Statistics of the steps of a log.

    Args:
        log: the log.
        settings: ``global_batch``, ``seq`` and ``gpus`` of the job as far as known; they turn throughput into time.

    Raises:
        InputFileError: throughput cannot be turned into time, and the log has no times of day either.
    """
    times, basis = times_of(log.steps, settings)
    if not len(times):
        missing = " and ".join(
            f"--{name.replace('_', '-')}"
            for name in (("global_batch",) if log.steps[0].samples_per_s else ("global_batch", "seq", "gpus"))
            if name not in settings
        )
        raise InputFileError(
            log.path, "states only throughput, which is no time without the batch", hint=f"give {missing or 'more'}"
        )
    covers = _covers(log.steps)
    start = _warmup(times)
    kept, weights = times[start:], covers[start:]
    level = float(np.median(kept))
    slope_span = _drift(kept, weights)
    at = np.linspace(-0.5, 0.5, len(kept)) if len(kept) > 1 else np.zeros(1)
    spikes = _spikes(kept - slope_span * at, weights, [step.number for step in log.steps[start:]])
    return Series(
        lines=len(times),
        steps=int(covers.sum()),
        warmup_lines=start,
        median_s=level,
        p5_s=float(np.quantile(kept, 0.05)),
        p95_s=float(np.quantile(kept, 0.95)),
        mean_s=float(np.average(kept, weights=weights)),
        drift=slope_span / level,
        spikes=spikes,
        outside=None if basis == CLOCK else _outside(log.steps[start:], kept, weights),
        basis=basis,
    )


CLOCK: Final = "from times of day"


def times_of(steps: Sequence[StepLine], settings: Mapping[str, Any]) -> tuple[Floats, str]:
    """Time of each step, and its source; empty if it is unknown."""
    batch, seq, gpus = (settings.get(name) for name in ("global_batch", "seq", "gpus"))
    if all(step.time_s for step in steps):
        return np.array([step.time_s for step in steps], dtype=float), "stated"
    if batch and all(step.samples_per_s for step in steps):
        return batch / np.array([step.samples_per_s for step in steps], dtype=float), "from throughput"
    if batch and seq and gpus and all(step.tokens_per_s_per_gpu for step in steps):
        rates = np.array([step.tokens_per_s_per_gpu for step in steps], dtype=float)
        return batch * seq / gpus / rates, "from throughput"
    return _from_clock(steps), CLOCK


def _from_clock(steps: Sequence[StepLine]) -> Floats:
    """Times between the lines; the first line takes the time of the second."""
    stamps = [step.at_s for step in steps if step.at_s is not None]
    if len(stamps) != len(steps) or len(steps) < 3 or stamps[-1] <= stamps[0]:
        return np.zeros(0)
    times = np.diff(np.array(stamps)) / _covers(steps)[1:]
    return np.concatenate([times[:1], times]) if bool(np.all(times > 0)) else np.zeros(0)


def _covers(steps: Sequence[StepLine]) -> Floats:
    """Number of steps that each line covers: steps since the previous line; the usual number after a restart."""
    gaps = np.diff(np.array([step.number for step in steps], dtype=float))
    usual = float(np.median(gaps[gaps > 0])) if bool(np.any(gaps > 0)) else 1.0
    first = min(max(float(steps[0].number), 1.0), usual)
    return np.concatenate([[first], np.where(gaps > 0, gaps, usual)])


def _warmup(times: Floats) -> int:
    """Number of warm-up lines: the first line, and the lines after it that are slower than the second half."""
    if len(times) < 4:
        return 0
    level = float(np.median(times[len(times) // 2 :]))
    start = 1
    while start < len(times) // 2 and times[start] > WARMUP_EXCESS * level:
        start += 1
    return start


def _drift(times: Floats, covers: Floats) -> float:
    """Change of the step time from the first step to the last (s): the median slope between all pairs; 0 if noise.

    Source: Theil and Sen, the median of the slopes of all pairs of points.
    """
    if len(times) < 8:
        return 0.0
    keep = np.unique(np.linspace(0, len(times) - 1, min(len(times), _SLOPE_POINTS)).astype(int))
    x, y = np.cumsum(covers)[keep], times[keep]
    i, j = np.triu_indices(len(keep), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    span = slope * float(x[-1] - x[0])
    rest = y - slope * x
    sigma = _MAD * float(np.median(np.abs(rest - np.median(rest))))
    error = sigma * (12.0 / len(times)) ** 0.5
    real = abs(span) > max(DRIFT_SHARE * float(np.median(y)), DRIFT_ERRORS * error)
    return span if real else 0.0


def _spikes(times: Floats, covers: Floats, numbers: Sequence[int]) -> Spikes:
    level = float(np.median(times))
    sigma = _MAD * float(np.median(np.abs(times - level)))
    out = times - level > max(SPIKE_SHARE * level, SPIKE_DEVIATIONS * sigma)
    if len(times) < 5 or not bool(np.any(out)) or float(np.mean(out)) > 0.4:
        return Spikes(numbers=(), lost_s=0.0, median_excess_s=0.0, period=None)
    excess = (times - level)[out]
    found = [number for number, spike in zip(numbers, out, strict=True) if spike]
    return Spikes(
        numbers=tuple(found),
        lost_s=float((excess * covers[out]).sum() / covers.sum()),
        median_excess_s=float(np.median(excess)),
        period=_period(found, float(np.median(covers))),
    )


def _period(numbers: Sequence[int], grain: float) -> int | None:
    """Steps between spikes, if at least three in four gaps are whole multiples of the median gap."""
    gaps = np.diff(np.array(numbers, dtype=float))
    gaps = gaps[gaps > 0]
    if len(gaps) < 2:
        return None
    usual = float(np.median(gaps))
    off = np.abs(gaps / usual - np.round(gaps / usual)) * usual
    regular = float(np.mean(off <= max(0.5 * (grain - 1), 0.02 * usual)))
    return round(usual) if regular >= 0.75 and usual > grain else None


def _outside(steps: Sequence[StepLine], times: Floats, covers: Floats) -> Outside | None:
    stamps = [step.at_s for step in steps]
    if len(steps) < 3 or any(stamp is None for stamp in stamps):
        return None
    numbers = [step.number for step in steps]
    if any(b <= a for a, b in pairwise(numbers)):
        return None
    wall = float((stamps[-1] or 0.0) - (stamps[0] or 0.0))
    inside = times[1:] * covers[1:]
    if wall < _SHORTEST_WALL_S:
        return None
    each = np.diff(np.array(stamps, dtype=float)) - inside
    at = int(np.argmax(each))
    total, longest = max(wall - float(inside.sum()), 0.0), float(each[at])
    return Outside(
        mean_s=total / float(covers[1:].sum()),
        longest_s=longest,
        longest_before=numbers[at + 1],
        rest_s=max(total - longest, 0.0) / float(covers[1:].sum()),
    )


def rank_spread(log: Log, settings: Mapping[str, Any]) -> dict[int, float]:
    """Median step time by rank, if several ranks wrote lines."""
    out = {}
    for rank, steps in log.rank_steps.items():
        times, _ = times_of(steps, settings)
        if len(times):
            out[rank] = median(times[_warmup(times) :].tolist())
    return out
