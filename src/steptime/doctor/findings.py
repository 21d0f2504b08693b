"""Findings of logs, some of them shared with traces: inputs, memory, drift, slow timers, slow ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from steptime.doctor.advice import advice_for
from steptime.doctor.gather import NAMES
from steptime.doctor.records import Compared, Finding, Log, Outside, Series, Variant
from steptime.errors import counted, first_few
from steptime.estimate.result import Estimate
from steptime.units import format_bytes, format_seconds

#: Share of the step below which a loss is not reported.
WORTH: Final = 0.01
#: A changed plan explains the measured step if its relative error is below the first number, and below the second
#: number times the error of the plan as given.
_VARIANT_CLOSE: Final = 0.04
_VARIANT_BETTER: Final = 0.5
#: A full memory makes the allocator free and map again.
_FULL_RESERVED: Final = 0.95
_FULL_ALLOCATED: Final = 0.90
#: Range of measured over predicted peak without a finding: some five times the spread of measured peaks.
MEMORY_RATIOS: Final = (0.75, 1.15)
#: A changed plan explains the memory if it leaves at most this share of the difference.
_EXPLAINS: Final = 0.35
#: Order of findings that are not in seconds; the others follow, largest first.
_FIRST: Final = ("inputs",)
VARIANT: Final = "variant"


def finding(
    code: str,
    title: str,
    lost_s: float | None,
    evidence: Iterable[str],
    framework: str,
    *more: str,
    advice: str = "",
    relative: bool = False,
) -> Finding:
    """A finding with the advice of its code, or of ``advice``; ``more`` comes before it."""
    words = (*more, *advice_for(advice or code, framework))
    return Finding(code=code, title=title, lost_s=lost_s, evidence=tuple(evidence), advice=words, relative=relative)


def possibly(found: Finding) -> Finding:
    """A finding marked as a possibility if it rests on the prediction: that agrees with the run, or is not of the
    run."""
    if not found.relative:
        return found
    return replace(
        found, possible=True, title=f"possibly: {found.title}", lost_s=None if found.code == VARIANT else found.lost_s
    )


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in order: wrong inputs first, then by seconds lost; findings without seconds last."""
    return tuple(sorted(findings, key=lambda f: (f.code not in _FIRST, f.lost_s is None, -(f.lost_s or 0.0))))


def share(part: float, whole: float) -> str:
    """A part of the step as text for evidence."""
    return f"{format_seconds(part)}, {part / whole * 100:.1f} % of the step"


def input_findings(contradictions: Sequence[str], framework: str) -> list[Finding]:
    """Finding of contradictions between the user's input and the run."""
    if not contradictions:
        return []
    title = "what is given contradicts the run"
    return [finding("inputs", title, None, contradictions, framework)]


def faster_finding(e: Estimate | None, step_s: float, framework: str) -> list[Finding]:
    """Finding of a run that is faster than full overlap allows."""
    if e is None or step_s >= e.step_time_bracket_s[0]:
        return []
    low = e.step_time_bracket_s[0]
    shape = ", ".join(f"{key} {value}" for key, value in e.workload.items())
    evidence = [
        f"measured {format_seconds(step_s)}, with everything overlapped {format_seconds(low)}",
        f"predicted for {shape}",
    ]
    return [finding("inputs", "measured faster than the bracket: an input is wrong", None, evidence, framework)]


def memory_findings(
    e: Estimate | None, peak: float | None, capacity: float | None, kind: str, retries: int, framework: str
) -> list[Finding]:
    """Findings on memory: close to the capacity, allocator retries, a peak far from the prediction."""
    whole = capacity or (None if e is None else e.memory_capacity_bytes)
    full = _FULL_RESERVED if kind == "reserved" else _FULL_ALLOCATED
    out = []
    if retries or (peak and whole and peak > full * whole):
        evidence = []
        if peak and whole:
            part = f"{format_bytes(peak)} of {format_bytes(whole)}"
            evidence.append(f"{kind} at the peak: {part} ({peak / whole * 100:.0f} %)")
        if retries:
            evidence.append(
                f"the allocator had to free and retry, reported {counted(retries, 'time')}; each one stalls the device"
            )
        out.append(finding("memory", "memory is close to what there is", None, evidence, framework))
    return out


def memory_is_off(ratio: float | None) -> bool:
    """True if measured over predicted peak memory is beyond the error of the model."""
    return ratio is not None and not MEMORY_RATIOS[0] <= ratio <= MEMORY_RATIOS[1]


def memory_row_findings(
    e: Estimate | None, row: Compared | None, kind: str, variants: Sequence[Variant], framework: str
) -> list[Finding]:
    """Finding of a peak far from the prediction: a choice of the run differs, or something else holds memory."""
    if e is None or row is None or row.measured is None or row.predicted is None or not memory_is_off(row.ratio):
        return []
    measured, change = row.measured, row.measured - row.predicted
    way = "more" if change > 0 else "less"
    evidence = [
        f"measured {format_bytes(measured)}, predicted {format_bytes(row.predicted)}, both {kind}: "
        f"{format_bytes(abs(change))} {way}"
    ]
    parts = sorted(e.memory.rollup(1).items(), key=lambda item: -item[1])[:4]
    evidence.append("predicted: " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(v)}" for name, v in parts))
    near = [v for v in variants if kind in v.memory and abs(v.memory[kind] - measured) < _EXPLAINS * abs(change)]
    for v in sorted(near, key=lambda v: abs(v.memory[kind] - measured))[:2]:
        evidence.append(f"with {v.change} it would be {format_bytes(v.memory[kind])}: a fit, not a proof")
    advice = "memory_more" if change > 0 else "memory_less"
    title = f"the run takes {abs(change) / row.predicted * 100:.0f} % {way} memory than predicted"
    return [finding("memory_off", title, None, evidence, framework, advice=advice)]


def variant_findings(e: Estimate | None, step_s: float, variants: Sequence[Variant], framework: str) -> list[Finding]:
    """Finding of a changed plan that predicts the measured step if the given plan does not."""
    if e is None:
        return []
    miss = abs(step_s / e.step_time_s - 1.0)
    close = [v for v in variants if abs(step_s / v.step_time_s - 1.0) < min(_VARIANT_CLOSE, _VARIANT_BETTER * miss)]
    best = min(close, key=lambda v: abs(step_s / v.step_time_s - 1.0), default=None)
    if best is None or step_s <= e.step_time_s:
        return []
    evidence = (
        f"predicted with {best.change}: {format_seconds(best.step_time_s)}; as given: {format_seconds(e.step_time_s)}; "
        f"measured: {format_seconds(step_s)}",
        "a fit, not a proof: other causes can cost the same",
    )
    title = f"the run costs what {best.change} would"
    return [finding(VARIANT, title, step_s - e.step_time_s, evidence, framework, relative=True)]


def unexplained_finding(e: Estimate | None, step_s: float, found: Sequence[Finding], framework: str) -> list[Finding]:
    """Finding of the time between prediction and measured step that no other finding explains."""
    if e is None or any(f.code == VARIANT for f in found):
        return []
    explained = sum(f.lost_s or 0.0 for f in found if f.code not in ("spikes", "outside", "skipped"))
    upper = e.step_time_band_s[1] if e.step_time_band_s is not None else e.step_time_s * 1.05
    rest = step_s - e.step_time_s - explained
    if step_s <= upper or rest < 0.03 * step_s:
        return []
    evidence = [f"measured {format_seconds(step_s)}, predicted {format_seconds(e.step_time_s)}"]
    if explained > 0:
        evidence.append(f"the findings below or above explain {format_seconds(explained)}")
    evidence.append("it may be the run, or the prediction: the device's profile and the plan are worth a check too")
    return [
        finding("unexplained", "slower than predicted, and this file does not say where", rest, evidence, framework)
    ]


def excess(row: Compared | None, step_s: float) -> float | None:
    """Seconds above the prediction; None: not above :data:`WORTH` of the step and a tenth of the prediction."""
    if row is None or row.measured is None or row.predicted is None:
        return None
    lost = row.measured - row.predicted
    return lost if lost > max(WORTH * step_s, 0.1 * row.predicted) else None


def compared_line(row: Compared) -> str:
    """One line of evidence with the measured and the predicted time."""
    predicted = "nothing" if row.predicted is None else format_seconds(row.predicted)
    text = f"{row.name}: measured {format_seconds(row.measured or 0.0)}, predicted {predicted}"
    return text + (f", {format_seconds(row.bracket[1])} if nothing of it were hidden" if row.bracket else "")


#: Kinds of events that can cause a spike, and their titles.
_CAUSES: Final[Mapping[str, str]] = NAMES["causes"]
#: Printed interval that may equal the period of spikes -> kind of event.
_INTERVALS: Final[Mapping[str, str]] = NAMES["intervals"]
#: Timer with its own advice -> code of the finding, in the order of the search.
_TIMER_CODES: Final[Mapping[str, str]] = NAMES["timer_findings"]
#: Timer -> timers that it includes: its excess is reported only if the included ones are not logged.
_HOLDS: Final[Mapping[str, tuple[str, ...]]] = {"forward-backward": ("forward-compute", "backward-compute")}
_DATA_TIMERS: Final = ("batch-generator", "batch generator", "batch_generator")
#: A single pause between two steps is a halt of the job if it exceeds these seconds and this share of all pauses.
_HALT_S: Final = 600.0
_HALT_SHARE: Final = 0.5
#: Relative spread of a timer over the ranks from which it is reported.
_SPREAD: Final = 0.1


def log_findings(log: Log, series: Series, rows: Sequence[Compared]) -> list[Finding]:
    """All findings of a log, by itself or against the prediction."""
    return [
        *_spike_findings(log, series),
        *_drift_findings(log, series),
        *_outside_findings(log, series),
        *_timer_findings(log, series, rows),
        *_rank_findings(log, series),
        *_skip_findings(log, series),
    ]


def cause_of(log: Log, numbers: Sequence[int], period: int | None) -> str | None:
    """Kind of event that occurs at most of these steps, or whose printed interval equals their period."""
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
    ]
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
        out.append(finding(code, title, lost, [compared_line(row)], log.framework, relative=True))
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
    """Finding of ranks whose own lines show slower steps than the median rank's."""
    if len(by_rank) < 2:
        return []
    times = sorted(by_rank.values())
    middle = times[len(times) // 2]
    slow = sorted((r for r, t in by_rank.items() if t > (1 + _SPREAD / 2) * middle), key=lambda r: -by_rank[r])
    if not slow:
        return []
    shown = first_few([f"rank {r} {format_seconds(by_rank[r])}" for r in slow], 5)
    evidence = [f"median step of the ranks {format_seconds(middle)}; {shown}"]
    return [
        finding(
            "stragglers",
            f"{len(slow)} of {len(by_rank)} ranks report slower steps",
            max(by_rank.values()) - middle,
            evidence,
            log.framework,
        )
    ]


def _skip_findings(log: Log, series: Series) -> list[Finding]:
    part = log.skipped_steps / max(series.steps, 1)
    if part < 0.005:
        return []
    evidence = [f"{log.skipped_steps} of about {series.steps} steps after the first 100: computed and thrown away"]
    return [finding("skipped", "steps skipped after overflows", part * series.median_s, evidence, log.framework)]
