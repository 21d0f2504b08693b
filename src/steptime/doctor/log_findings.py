"""What a log shows: spikes, drift, time between the steps, timers above the prediction, slow ranks, skipped steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from steptime.doctor.findings import WORTH, beside, excess, finding, share
from steptime.doctor.records import Compared, Finding, Log, Outside, Series
from steptime.errors import first_few
from steptime.units import format_seconds

#: Kinds of events that can be behind a spike, and their titles.
_CAUSES: Final[Mapping[str, str]] = {
    "checkpoint": "checkpoints", "evaluation": "evaluations", "garbage_collection": "garbage collection",
    "allocator_retry": "allocator retries",
}  # fmt: skip
#: Printed intervals that a period may equal -> kind of event.
_INTERVALS: Final[Mapping[str, str]] = {
    "save_interval": "checkpoint", "eval_interval": "evaluation", "manual_gc_interval": "garbage_collection",
    "gc_freq": "garbage_collection",
}  # fmt: skip
#: Timers whose excess has its own advice; the order is that of the search.
_TIMER_CODES: Final[Mapping[str, str]] = {
    "all-grads-sync": "dp_comm", "params-all-gather": "dp_comm", "backward_allreduce": "dp_comm",
    "backward-params-all-reduce": "dp_comm",
    "optimizer": "optimizer", "step": "optimizer", "forward-backward": "compute", "forward-compute": "compute",
    "backward-compute": "compute", "forward": "compute", "backward_inner": "compute",
}  # fmt: skip
#: Timers that hold others: their excess is reported only where the inner ones are not logged.
_HOLDS: Final[Mapping[str, tuple[str, ...]]] = {"forward-backward": ("forward-compute", "backward-compute")}
_DATA_TIMERS: Final = ("batch-generator", "batch generator", "batch_generator")
#: A single time between two steps is a halt of the job from so many seconds, where it is this share of all such time.
_HALT_S: Final = 600.0
_HALT_SHARE: Final = 0.5
#: Spread of a timer over the ranks that is worth a look.
_SPREAD: Final = 0.1


def log_findings(log: Log, series: Series, rows: Sequence[Compared]) -> list[Finding]:
    """Everything that a log shows by itself or against the prediction."""
    return [
        *_spike_findings(log, series), *_drift_findings(log, series), *_outside_findings(log, series),
        *_timer_findings(log, series, rows), *_rank_findings(log, series), *_skip_findings(log, series),
    ]  # fmt: skip


def cause_of(log: Log, numbers: Sequence[int], period: int | None) -> str | None:
    """The kind of event that stands beside most of these steps, or whose printed interval is their period."""
    if not numbers:
        return None
    before = {number: max((s.number for s in log.steps if s.number < number), default=0) for number in numbers[:200]}
    for kind in _CAUSES:
        at = {event.after_step for event in log.events if event.kind == kind}
        hits = sum(any(low <= step <= number for step in at) for number, low in before.items()) if at else 0
        if hits >= 0.6 * len(before) and len(at) <= 3 * len(numbers):
            return kind
    for flag, kind in _INTERVALS.items():
        if period is not None and log.stated.flags.get(flag) == str(period):
            return kind
    return None


def _spike_findings(log: Log, series: Series) -> list[Finding]:
    spikes = series.spikes
    if not spikes.numbers or spikes.lost_s < 0.2 * WORTH * series.median_s:
        return []
    cause = cause_of(log, spikes.numbers, spikes.period)
    shown = first_few([str(number) for number in spikes.numbers], 6)
    every = f"every {spikes.period} steps" if spikes.period else "at irregular steps"
    title = f"slow steps {every}" + (f", at {_CAUSES[cause]}" if cause else "")
    evidence = [
        f"{len(spikes.numbers)} of {series.lines - series.warmup_lines} logged steps, typically "
        f"{format_seconds(spikes.median_excess_s)} above the median of {format_seconds(series.median_s)}: {shown}"
    ]  # fmt: skip
    return [finding("spikes", title, spikes.lost_s, evidence, log.framework, advice=cause or "spikes")]


def _drift_findings(log: Log, series: Series) -> list[Finding]:
    if not series.drift:
        return []
    way = "slower" if series.drift > 0 else "faster"
    evidence = [f"{abs(series.drift) * 100:.1f} % {way} at the end of the log than at its start"]
    lost = series.drift_lost_s if series.drift > 0 else None
    return [finding("drift", f"the steps get {way}", lost, evidence, log.framework)]


def _outside_findings(log: Log, series: Series) -> list[Finding]:
    between = series.outside
    if between is None:
        return []
    halted = between.longest_s > max(_HALT_S, _HALT_SHARE * between.mean_s * series.steps)
    halts = [_halt(log, series, between)] if halted else []
    outside = between.rest_s if halted else between.mean_s
    if outside < 0.02 * series.median_s:
        return halts
    kinds = {kind: sum(event.kind == kind for event in log.events) for kind in ("checkpoint", "evaluation")}
    evidence = [f"times of day run ahead of the logged steps by {share(outside, series.median_s)}"]
    evidence += [f"the log shows {n} {_CAUSES[kind] if n > 1 else kind}" for kind, n in kinds.items() if n]
    timed = sum(event.time_s or 0.0 for event in log.events if event.kind in kinds)
    if timed:
        evidence.append(f"of these the log times {format_seconds(timed)} in all")
    title = "time between the steps, which the step time leaves out"
    saved = sum(event.time_s or 0.0 for event in log.events if event.kind == "checkpoint")
    mostly = saved > 0.5 * outside * series.steps
    return [*halts, finding("outside", title, outside, evidence, log.framework, advice="checkpoint" if mostly else "")]


def _halt(log: Log, series: Series, between: Outside) -> Finding:
    title = f"the job stood still once, for {format_seconds(between.longest_s)}, before step {between.longest_before}"
    evidence = [f"without it the time between the steps is {share(between.rest_s, series.median_s)}"]
    return finding("halt", title, None, evidence, log.framework)  # once, and so no cost of a step


def _timer_findings(log: Log, series: Series, rows: Sequence[Compared]) -> list[Finding]:
    out = []
    by_name = {row.name: row for row in rows}
    for name, code in _TIMER_CODES.items():
        row = by_name.get(name)
        lost = excess(row, series.median_s)
        if row is None or lost is None or any(inner in log.timers for inner in _HOLDS.get(name, ())):
            continue
        title = f"{name} takes longer than predicted"
        out.append(finding(code, title, lost, [beside(row)], log.framework, relative=True))
    for name in _DATA_TIMERS:
        data_s = log.timers.get(name, (0.0, 0.0))[1]
        if data_s > WORTH * series.median_s:
            evidence = [f"{name}: {share(data_s, series.median_s)} on the slowest rank"]
            out.append(finding("data", "the step waits for data", data_s, evidence, log.framework))
    return out


def _rank_findings(log: Log, series: Series) -> list[Finding]:
    out = []
    for name in ("forward-compute", "backward-compute", "forward-backward"):
        low, high = log.timers.get(name, (0.0, 0.0))
        if high > 0 and (high - low) / high > _SPREAD and high - low > WORTH * series.median_s:
            evidence = [f"{name}: {format_seconds(low)} on the fastest rank, {format_seconds(high)} on the slowest"]
            lost = None if log.stated.plan.get("pp", 1) > 1 else (high - low) / 2
            out.append(finding("stragglers", "some ranks take longer than others", lost, evidence, log.framework))
            break
    return out


def slow_rank_findings(log: Log, by_rank: Mapping[int, float]) -> list[Finding]:
    """Ranks whose own lines say that they are slower than the middle one."""
    if len(by_rank) < 2:
        return []
    times = sorted(by_rank.values())
    middle = times[len(times) // 2]
    slow = sorted((r for r, t in by_rank.items() if t > (1 + _SPREAD / 2) * middle), key=lambda r: -by_rank[r])
    if not slow:
        return []
    shown = first_few([f"rank {r} {format_seconds(by_rank[r])}" for r in slow], 5)
    evidence = [f"median step of the ranks {format_seconds(middle)}; {shown}"]
    return [finding("stragglers", f"{len(slow)} of {len(by_rank)} ranks report slower steps",
                    max(by_rank.values()) - middle, evidence, log.framework)]  # fmt: skip


def _skip_findings(log: Log, series: Series) -> list[Finding]:
    part = log.skipped_steps / max(series.steps, 1)
    if part < 0.005:
        return []
    evidence = [f"{log.skipped_steps} of about {series.steps} steps after the first 100: computed and thrown away"]
    return [finding("skipped", "steps skipped after overflows", part * series.median_s, evidence, log.framework)]
