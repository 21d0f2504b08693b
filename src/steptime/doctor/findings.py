"""Findings that logs and traces share: inputs, memory, what a changed plan would cost, what stays unexplained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from steptime.doctor.advice import advice_for
from steptime.doctor.records import Compared, Finding, Variant
from steptime.errors import counted
from steptime.estimate.result import Estimate
from steptime.units import format_bytes, format_seconds

#: Share of the step below which a loss is not worth a line.
WORTH: Final = 0.01
#: A changed plan explains the measured step if it comes so close, and so much closer than the plan as given.
_VARIANT_CLOSE: Final = 0.04
_VARIANT_BETTER: Final = 0.5
#: A full memory makes the allocator free and map again.
_FULL_RESERVED: Final = 0.95
_FULL_ALLOCATED: Final = 0.90
#: Measured over predicted peak between which nothing is said: some five times the spread of measured peaks.
MEMORY_RATIOS: Final = (0.75, 1.15)
#: A changed plan explains the memory where it leaves so much of the difference.
_EXPLAINS: Final = 0.35
#: Order of findings that are not in seconds; the others follow, largest first.
_FIRST: Final = ("inputs",)
VARIANT: Final = "variant"


def finding(
    code: str, title: str, lost_s: float | None, evidence: Iterable[str], framework: str, *more: str, advice: str = "",
    relative: bool = False,
) -> Finding:  # fmt: skip
    """A finding with the advice of its code, or of ``advice``; ``more`` comes before it."""
    words = (*more, *advice_for(advice or code, framework))
    return Finding(
        code=code, title=title, lost_s=lost_s, evidence=tuple(evidence), advice=words, relative=relative
    )  # fmt: skip


def possibly(found: Finding) -> Finding:
    """A finding where the prediction agrees with the run, or is not of it: what rests on it is a possibility."""
    if not found.relative:
        return found
    return replace(
        found, possible=True, title=f"possibly: {found.title}", lost_s=None if found.code == VARIANT else found.lost_s
    )  # fmt: skip


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Wrong inputs first, then by seconds lost; what cannot be put in seconds last."""
    return tuple(sorted(findings, key=lambda f: (f.code not in _FIRST, f.lost_s is None, -(f.lost_s or 0.0))))


def share(part: float, whole: float) -> str:
    """A part of the step, for evidence."""
    return f"{format_seconds(part)}, {part / whole * 100:.1f} % of the step"


def input_findings(contradictions: Sequence[str], framework: str) -> list[Finding]:
    """What the user gives against what the run says."""
    if not contradictions:
        return []
    title = "what is given contradicts the run"
    return [finding("inputs", title, None, contradictions, framework)]


def faster_finding(e: Estimate | None, step_s: float, framework: str) -> list[Finding]:
    """The run is faster than any overlap allows."""
    if e is None or step_s >= e.step_time_bracket_s[0]:
        return []
    low = e.step_time_bracket_s[0]
    shape = ", ".join(f"{key} {value}" for key, value in e.workload.items())
    evidence = [
        f"measured {format_seconds(step_s)}, with everything overlapped {format_seconds(low)}", f"predicted for {shape}"
    ]  # fmt: skip
    return [finding("inputs", "measured faster than the bracket: an input is wrong", None, evidence, framework)]


def memory_findings(
    e: Estimate | None, peak: float | None, capacity: float | None, kind: str, retries: int, framework: str
) -> list[Finding]:
    """Memory close to what there is, allocator retries, and a peak far from the prediction."""
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
    """Whether measured over predicted peak memory is beyond what the model errs by."""
    return ratio is not None and not MEMORY_RATIOS[0] <= ratio <= MEMORY_RATIOS[1]


def memory_row_findings(
    e: Estimate | None, row: Compared | None, kind: str, variants: Sequence[Variant], framework: str
) -> list[Finding]:
    """The peak is far from the prediction: a choice of the run is other than given, or something else holds memory."""
    if e is None or row is None or row.measured is None or row.predicted is None or not memory_is_off(row.ratio):
        return []
    measured, change = row.measured, row.measured - row.predicted
    way = "more" if change > 0 else "less"
    evidence = [f"measured {format_bytes(measured)}, predicted {format_bytes(row.predicted)}, both {kind}: "
                f"{format_bytes(abs(change))} {way}"]  # fmt: skip
    parts = sorted(e.memory.rollup(1).items(), key=lambda item: -item[1])[:4]
    evidence.append("predicted: " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(v)}" for name, v in parts))
    near = [v for v in variants if kind in v.memory and abs(v.memory[kind] - measured) < _EXPLAINS * abs(change)]
    for v in sorted(near, key=lambda v: abs(v.memory[kind] - measured))[:2]:
        evidence.append(f"with {v.change} it would be {format_bytes(v.memory[kind])}: a fit, not a proof")
    advice = "memory_more" if change > 0 else "memory_less"
    title = f"the run takes {abs(change) / row.predicted * 100:.0f} % {way} memory than predicted"
    return [finding("memory_off", title, None, evidence, framework, advice=advice)]


def variant_findings(e: Estimate | None, step_s: float, variants: Sequence[Variant], framework: str) -> list[Finding]:
    """A changed plan whose prediction fits the measured step, where the plan as given does not."""
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
    """What is left between the prediction and the measured step once the findings are taken off."""
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
    """Seconds above the prediction, where they are worth a finding: 1 % of the step and a tenth of the prediction."""
    if row is None or row.measured is None or row.predicted is None:
        return None
    lost = row.measured - row.predicted
    return lost if lost > max(WORTH * step_s, 0.1 * row.predicted) else None


def beside(row: Compared) -> str:
    """Measured and predicted in one line of evidence."""
    predicted = "nothing" if row.predicted is None else format_seconds(row.predicted)
    text = f"{row.name}: measured {format_seconds(row.measured or 0.0)}, predicted {predicted}"
    return text + (f", {format_seconds(row.bracket[1])} if nothing of it were hidden" if row.bracket else "")
