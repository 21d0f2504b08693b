"""Statistics of predictions against measured runs: overall, by group, over sources, and of the order of plans."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from steptime.hardware.library import architecture_of
from steptime.measure.residuals import errors
from steptime.measure.runs.read import Flag
from steptime.measure.runs.run import MeasuredRun
from steptime.num import Array

LEAST_PLANS: Final = 3
"""Fewest plans of a group in which a best one is chosen."""
LEAST_RANKED: Final = 5
"""Fewest plans of a group whose order is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The order of the plans of one group."""

    source_key: str
    model: str
    device: str
    gpus: int
    plans: int
    """Different plans; runs of the same plan are averaged."""
    spearman: float | None
    """Rank correlation of predicted and measured time; None where either is the same for all plans."""
    regret: float
    """Measured time of the plan predicted fastest over that of the fastest, less 1; 0: the best was picked."""
    chance: float
    """Mean regret of a plan drawn at random."""
    spread: float
    """Slowest measured time over the fastest: the most that a good choice gains."""


def job_key(run: MeasuredRun) -> Hashable:
    """Key that is equal for runs that differ in their plan and batch alone."""
    return (
        run.source_key,
        run.model_name,
        run.device,
        run.gpus,
        run.seq_len,
        run.precisions,
        run.workload,
        run.framework,
        run.attention,
        run.model.layers,
        _table_of(run.source),
    )


def workload_key(run: MeasuredRun) -> Hashable:
    """Key that is equal for runs that differ in their plan alone."""
    return job_key(run), run.global_batch


def _table_of(source: str) -> str:
    """Table, section or release that a source names in brackets."""
    found = re.search(r"\[([^\[\]]*)\]", source)
    return found.group(1) if found else ""


def plan_key(run: MeasuredRun) -> Hashable:
    """The plan of a run as far as the row states it."""
    return (
        run.degrees,
        run.micro_batch,
        run.recompute,
        run.sharding,
        run.sequence_parallel,
        run.schedule,
        run.offload,
        run.accumulation,
    )


def ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of their ranks.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: Array = ((ends - counts + 1 + ends) / 2)[inverse]
    return mean


def spearman(one: Array, other: Array) -> float | None:
    """Rank correlation; None where one side is constant.

    >>> spearman(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 30.0]))
    1.0
    """
    a, b = ranks(one), ranks(other)
    spread = float(np.std(a) * np.std(b))
    if spread == 0:
        return None
    return float(np.clip(np.mean((a - a.mean()) * (b - b.mean())) / spread, -1, 1))


def ranked_groups(runs: Sequence[MeasuredRun], measured_s: Array, predicted_s: Array) -> list[Ranked]:
    """Every group of runs that differ in their plan alone and have :data:`LEAST_PLANS` plans or more.

    Args:
        runs: the runs.
        measured_s: their step times.
        predicted_s: predicted step times; a run without one (NaN) is left out.
    """
    groups: dict[Hashable, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, run in enumerate(runs):
        if np.isfinite(measured_s[index]) and np.isfinite(predicted_s[index]):
            groups[workload_key(run)][plan_key(run)].append(index)
    out = []
    for plans in groups.values():
        if len(plans) >= LEAST_PLANS:
            first = runs[next(iter(plans.values()))[0]]
            measured, predicted = (
                np.array([float(np.mean(times[index])) for index in plans.values()])
                for times in (measured_s, predicted_s)
            )
            out.append(_ranked(first, measured, predicted))
    return out


def _ranked(run: MeasuredRun, measured: Array, predicted: Array) -> Ranked:
    best = float(measured.min())
    return Ranked(
        source_key=run.source_key,
        model=run.model_name,
        device=run.device,
        gpus=run.gpus,
        plans=len(measured),
        spearman=spearman(measured, predicted),
        regret=float(measured[int(predicted.argmin())]) / best - 1,
        chance=float(measured.mean()) / best - 1,
        spread=float(measured.max()) / best,
    )


LEAST_ROWS: Final = 10
"""Rows that a source needs to count in the mean over sources."""
DOMINANT: Final = 0.4
"""Share of all rows from which statistics are also given without that source."""
DRAWN: Final = 1 << 20
"""Largest number of sources resampled at once, but at least one draw: it bounds memory and does not change results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun:
    """A measured run and its prediction; NaN for what is not predicted."""

    run: MeasuredRun
    step_time_s: float = math.nan
    low_s: float = math.nan
    """5th percentile."""
    high_s: float = math.nan
    """95th percentile."""
    memory_bytes: float = math.nan
    memory_low_bytes: float = math.nan
    """5th percentile."""
    memory_high_bytes: float = math.nan
    """95th percentile."""
    oom_probability: float = math.nan
    """Predicted chance that the run does not fit its device."""


def scale_band(gpus: int) -> str:
    """Range between powers of two that holds the number of devices of a run.

    >>> scale_band(1), scale_band(8), scale_band(1000)
    ('1', '8-15', '512-1023')
    """
    low = 1 << (gpus.bit_length() - 1)
    return "1" if gpus == 1 else f"{low}-{2 * low - 1}"


def architecture_group(run: MeasuredRun) -> str:
    """Architecture of the devices of a run; the device itself where it declares none."""
    return architecture_of(run.device) or run.device


def experts_group(run: MeasuredRun) -> str:
    """``experts`` where the layers of the model route tokens to experts, else ``dense``."""
    return "dense" if run.model.experts is None else "experts"


#: Name of a grouping -> group of a run.
GROUPINGS: Final[dict[str, Callable[[MeasuredRun], str]]] = {
    "by_source": lambda run: run.source_key,
    "by_gpu": lambda run: run.device,
    "by_architecture": architecture_group,
    "by_experts": experts_group,
    "by_architecture_and_experts": lambda run: f"{architecture_group(run)}, {experts_group(run)}",
    "by_scale": lambda run: scale_band(run.gpus),
    "by_dtype": lambda run: " or ".join(run.precisions) or "not stated",
    "by_kind": lambda run: run.model_kind,
    "by_workload": lambda run: run.workload,
    "by_framework": lambda run: run.framework,
    "by_time_origin": lambda run: run.time.origin.name.lower() if run.time else "none",
}


def statistics(scored: Sequence[ScoredRun]) -> dict[str, Any]:
    """Errors of the step time of the runs that have both times; ``None`` for each statistic of no rows.

    ``mape``, ``median_ape``, ``p90_ape`` of :math:`|e|`; ``bias`` the mean and ``median_bias`` the median of
    :math:`e`; ``coverage90`` the share of measured times inside the band.
    """
    measured, predicted, low, high = _columns(timed(scored))
    found: dict[str, Any] = dict(errors(measured, predicted, low, high))
    found["median_bias"] = float(np.median(predicted / measured - 1)) if len(measured) else None
    return {"rows": len(measured), **found}


def timed(scored: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Runs with a measured and a positive predicted step time."""
    return [s for s in scored if s.run.step_time_s and math.isfinite(s.step_time_s) and s.step_time_s > 0]


def _columns(scored: Sequence[ScoredRun]) -> tuple[Array, Array, Array, Array]:
    rows = [(s.run.step_time_s or math.nan, s.step_time_s, s.low_s, s.high_s) for s in scored]
    table = np.array(rows, np.float64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def grouped(scored: Sequence[ScoredRun], group: Callable[[MeasuredRun], str]) -> dict[str, dict[str, Any]]:
    """:func:`statistics` of every group that has rows."""
    groups: dict[str, list[ScoredRun]] = defaultdict(list)
    for s in timed(scored):
        groups[group(s.run)].append(s)
    return {name: statistics(own) for name, own in sorted(groups.items())}


def macro(scored: Sequence[ScoredRun], without: str | None = None, least: int = LEAST_ROWS) -> dict[str, Any]:
    """Means over the sources with ``least`` rows or more, each counting once; ``without`` names one to leave out."""
    by_source = grouped(scored, GROUPINGS["by_source"])
    rows = [s for name, s in by_source.items() if s["rows"] >= least and name != without]
    out: dict[str, Any] = {"sources": len(rows)}
    for name in ("mape", "median_ape", "bias", "median_bias", "p90_ape", "coverage90"):
        values = [s[name] for s in rows if s[name] is not None]
        out[name] = float(np.mean(values)) if values else None
    return out


def dominant_source(scored: Sequence[ScoredRun]) -> str | None:
    """The source that has at least 40 % of the rows, if one has and it is not the only one."""
    rows = Counter(s.run.source_key for s in timed(scored))
    top = max(rows, key=lambda name: (rows[name], name), default=None)
    return top if top and len(rows) > 1 and rows[top] >= DOMINANT * rows.total() else None


def memory_statistics(scored: Sequence[ScoredRun]) -> dict[str, dict[str, Any]]:
    """Errors of the peak memory, for each definition of it; ``coverage90``: share inside the 90 % band.

    ``within_unit``: share of predictions between the number read as GB and as GiB, where the row has no unit.
    """
    out = {}
    rows = [s for s in scored if s.run.memory and math.isfinite(s.memory_bytes) and s.memory_bytes > 0]
    for name in sorted({s.run.memory.definition.name for s in rows if s.run.memory}):
        own = [s for s in rows if s.run.memory and s.run.memory.definition.name == name]
        measured, predicted, low, high = memory_columns(own)
        least = np.array([s.run.memory.least_bytes for s in own if s.run.memory])
        found: dict[str, Any] = dict(errors(measured, predicted, low, high))
        found["median_bias"] = float(np.median(predicted / measured - 1))
        found["within_unit"] = float(np.mean((least <= predicted) & (predicted <= measured)))
        out[name.lower()] = {"rows": len(own), **found}
    return out


def choice_statistics(scored: Sequence[ScoredRun]) -> dict[str, Any]:
    """Regret of the plan predicted fastest over the fastest measured, in groups of three plans or more.

    ``mean_regret``, ``median_regret``, ``p90_regret``; ``best_picked`` the share of groups without regret; ``chance``
    the mean regret of a plan drawn at random.
    """
    groups = groups_of_plans(scored)
    regret = np.array([g.regret for g in groups])
    if not len(regret):
        return {"groups": 0, **dict.fromkeys(("mean_regret", "median_regret", "p90_regret", "best_picked", "chance"))}
    return {
        "groups": len(groups),
        "mean_regret": float(regret.mean()),
        "median_regret": float(np.median(regret)),
        "p90_regret": float(np.quantile(regret, 0.9)),
        "best_picked": float(np.mean(regret == 0)),
        "chance": float(np.mean([g.chance for g in groups])),
    }


def memory_columns(scored: Sequence[ScoredRun]) -> tuple[Array, Array, Array, Array]:
    """Measured and predicted memory in bytes and the ends of its band, of runs that have a measured one."""
    rows = [
        (s.run.memory.memory_bytes, s.memory_bytes, s.memory_low_bytes, s.memory_high_bytes)
        for s in scored
        if s.run.memory
    ]
    table = np.array(rows, np.float64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def groups_of_plans(scored: Sequence[ScoredRun]) -> list[Ranked]:
    """Groups of runs that differ in their plan alone, with their predicted order."""
    usable = timed(scored)
    measured, predicted, _, _ = _columns(usable)
    return ranked_groups([s.run for s in usable], measured, predicted)


def rank_statistics(scored: Sequence[ScoredRun]) -> dict[str, Any]:
    """Order of plans in groups of five or more: median and mean Spearman correlation, mean regret, and every group."""
    groups = [g for g in groups_of_plans(scored) if g.plans >= LEAST_RANKED]
    values = [g.spearman for g in groups if g.spearman is not None]
    return {
        "groups": len(groups),
        "median_spearman": float(np.median(values)) if values else None,
        "mean_spearman": float(np.mean(values)) if values else None,
        "mean_regret": float(np.mean([g.regret for g in groups])) if groups else None,
        "best_picked": float(np.mean([g.regret == 0 for g in groups])) if groups else None,
        "each": [asdict(g) for g in groups],
    }


def covered(scored: Sequence[ScoredRun]) -> dict[str, list[bool]]:
    """Source -> true for each measured time in its band; runs without a band are left out."""
    inside: dict[str, list[bool]] = {}
    for s in timed(scored):
        if math.isfinite(s.low_s) and math.isfinite(s.high_s) and s.run.step_time_s:
            inside.setdefault(s.run.source_key, []).append(s.low_s <= s.run.step_time_s <= s.high_s)
    return inside


def coverage_interval(
    scored: Sequence[ScoredRun], *, level: float = 0.9, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Bootstrap interval of the coverage; it resamples whole sources, since rows of one source err together.

    Args:
        scored: the runs.
        level: share of the bootstrap distribution inside the interval.
        draws: bootstrap samples.
        seed: of the generator; the same arguments give the same interval.

    Returns:
        Lower and upper end, or None with fewer than two sources with bands.
    """
    inside = covered(scored)
    if len(inside) < 2:
        return None
    hits, rows = (np.array([f(own) for own in inside.values()], np.float64) for f in (sum, len))
    generator, at_once = np.random.default_rng(seed), max(DRAWN // len(hits), 1)
    shares = np.empty(draws)
    for start in range(0, draws, at_once):
        part = shares[start : start + at_once]
        picks = generator.integers(len(hits), size=(len(part), len(hits)))
        part[:] = hits[picks].sum(axis=1) / rows[picks].sum(axis=1)
    low, high = np.quantile(shares, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summary(scored: Sequence[ScoredRun]) -> dict[str, Any]:
    """All statistics: overall, rows that support claims, over sources, every grouping, order of plans, memory."""
    top = dominant_source(scored)
    interval = coverage_interval(scored)
    sound = [s for s in scored if s.run.supports_claim]
    measured = [s for s in scored if Flag.COMPUTED not in s.run.flags]
    out: dict[str, Any] = {
        "time": statistics(scored),
        "time_supporting_claims": statistics(sound),
        "macro_supporting_claims": macro(sound),
        "computed": dict(Counter(s.run.source_key for s in timed(scored) if Flag.COMPUTED in s.run.flags)),
        "time_without_computed": statistics(measured),
        "macro_without_computed": macro(measured),
        "coverage90_by_source_interval": list(interval) if interval else None,
        "macro": macro(scored),
        "macro_all_sources": macro(scored, least=1),
        "dominant_source": top,
        "time_without_dominant": statistics([s for s in scored if s.run.source_key != top]) if top else None,
        "macro_without_dominant": macro(scored, top) if top else None,
        "rank": rank_statistics(scored),
        "choice": choice_statistics(scored),
        "memory": memory_statistics(scored),
    }
    return out | {name: grouped(scored, group) for name, group in GROUPINGS.items()}
