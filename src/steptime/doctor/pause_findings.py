"""What the pauses of a device say: a host that launches too slowly, or one that stops now and then, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from steptime.doctor.findings import WORTH, finding, share
from steptime.doctor.kernels import group_of
from steptime.doctor.records import Finding, LongGap, TraceTimes
from steptime.errors import shorten
from steptime.units import format_seconds

#: Cause -> what the host is in; first match wins. Names are those of PyTorch's profiler.
_BY_HOST: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("data", re.compile(r"data_?loader|DataLoader|__next__|collate|batch.?generator|get_batch|next_batch")),
    ("garbage_collection", re.compile(r"\bgc\b|built-in function collect|garbage", re.I)),
    ("allocator", re.compile(r"(cuda|hip)(Malloc|Free)(?!Async|Host)|empty_cache")),
    ("compile", re.compile(r"dynamo|inductor|compile_fx|autotune|torch/fx|CachingAutotuner|cu(da)?ModuleLoad", re.I)),
    ("checkpoint", re.compile(
        r"save_?checkpoint|checkpoint\w*\.save|torch/serialization|\bsave\b|distributed[/.]checkpoint|state_dict",
        re.I)),
    ("host_sync", re.compile(
        r"_local_scalar_dense|aten::(item|nonzero|is_nonzero|equal|masked_select|unique)|\.item|Synchronize|\.cpu\b")),
    ("host_optimizer", re.compile(r"optimizer|optim[/.]|clip_grad|grad_scaler|zero_grad|adam|foreach", re.I)),
)  # fmt: skip
TITLES: Final[Mapping[str, str]] = {
    "data": "the device waits for the next batch",
    "garbage_collection": "the device waits while the host collects garbage",
    "allocator": "the device waits while memory is allocated or freed",
    "compile": "the device waits while the host compiles kernels",
    "checkpoint": "the device waits while the host saves",
    "host_sync": "the host reads a value from the device and goes on late",
    "host_optimizer": "the device waits for the host at the optimiser",
    "between_steps": "the device waits for the host between the steps",
    "stall": "the device waits for the host in few long pauses",
}  # fmt: skip
_WITH_STACKS: Final = "the trace was recorded with stacks, which slows the host: without them it is less"
_NAME: Final = 70
#: Most places that one finding names.
_SHOWN: Final = 3


def idle_findings(t: TraceTimes, framework: str) -> list[Finding]:
    """Long pauses by their cause, then what the short ones cost."""
    if t.idle_s < 2 * WORTH * t.step_s:
        return []
    if t.launch_bound_s is None:
        gaps = _places(t.long_gaps[:_SHOWN]) or [f"longest gap {format_seconds(t.longest_gap_s)}"]
        evidence = [f"no kernel runs for {share(t.idle_s, t.step_s)}", *gaps,
                    "the trace has no launches, so it does not say whether the host is late"]  # fmt: skip
        cause = cause_of(t.long_gaps[0]) if t.long_gaps else "idle"
        advice = "idle" if cause == "stall" else cause
        return [finding("idle", "the device is idle between kernels", t.idle_s, evidence, framework, advice=advice)]
    late = [gap for gap in t.long_gaps if gap.waits_for_host]
    stalled_s = min(sum(gap.lost_s for gap in late), t.launch_bound_s)
    return [
        *_stall_findings(t, late, framework), *_launch_findings(t, stalled_s, framework),
        *_queue_findings(t, framework),
    ]  # fmt: skip


def cause_of(gap: LongGap) -> str:
    """Why the host stopped: what it was in, else the kernels around the pause; ``stall`` where neither says it."""
    found = next((cause for cause, pattern in _BY_HOST if pattern.search(gap.host)), None)
    if found is not None:
        return found
    if gap.before.startswith("Memcpy DtoH"):
        return "host_sync"
    if gap.between_steps:
        return "data" if gap.after.startswith("Memcpy HtoD") else "between_steps"
    return "host_optimizer" if group_of(gap.after) == "optimizer" else "stall"


def _stall_findings(t: TraceTimes, late: Sequence[LongGap], framework: str) -> list[Finding]:
    by_cause: dict[str, list[LongGap]] = {}
    for gap in late:
        by_cause.setdefault(cause_of(gap), []).append(gap)
    out = []
    for cause, gaps in by_cause.items():
        lost = sum(gap.lost_s for gap in gaps)
        if lost < WORTH * t.step_s:
            continue
        evidence = [f"{share(lost, t.step_s)}, in {_count(sum(gap.per_step for gap in gaps))}", *_places(gaps[:_SHOWN])]
        if t.with_stack:
            evidence.append(_WITH_STACKS)
        elif not any(gap.host for gap in gaps):
            evidence.append("no event of the host covers it: with_stack=True names the Python function")
        out.append(finding("stall", TITLES[cause], lost, evidence, framework, advice=cause))
    return out


def _count(per_step: float) -> str:
    """How often, in words."""
    if per_step < 0.95:
        return f"one pause in {round(1 / per_step)} steps" if per_step else "no pause"
    number = round(per_step)
    return "one pause per step" if number == 1 else f"{number} pauses per step"


def _places(gaps: Sequence[LongGap]) -> list[str]:
    """One line for each place."""
    out = []
    for gap in gaps:
        where = "between the steps" if gap.between_steps else "at several places of the step"
        if gap.position is not None:
            where = f"at {gap.position * 100:.0f} % of the step"
        before, after, host = (shorten(name, _NAME) for name in (gap.before, gap.after, gap.host))
        text = f"{format_seconds(gap.time_s)} {where}, after {before}, before {after}"
        out.append(text + (f"; the host is in {host}" if host else ""))
    return out


def _launch_findings(t: TraceTimes, stalled_s: float, framework: str) -> list[Finding]:
    lost = (t.launch_bound_s or 0.0) - stalled_s
    if lost <= WORTH * t.step_s:
        return []
    each = t.step_s / max(t.kernels_per_step, 1.0)
    long = " beside the long pauses" if stalled_s else ""
    evidence = [
        f"no kernel runs for {share(t.idle_s, t.step_s)}; in {lost / t.idle_s * 100:.0f} % of that the next kernel had "
        f"not been launched yet{long}",
        f"{t.kernels_per_step:.0f} kernels per step, one every {format_seconds(each)}; "
        f"longest gap {format_seconds(t.longest_gap_s)}",
    ]  # fmt: skip
    if t.with_stack:
        evidence.append(_WITH_STACKS)
    return [finding("launch", "the device waits for the host to launch kernels", lost, evidence, framework)]


def _queue_findings(t: TraceTimes, framework: str) -> list[Finding]:
    rest = t.idle_s - (t.launch_bound_s or 0.0)
    if rest <= WORTH * t.step_s:
        return []
    queued = [gap for gap in t.long_gaps if gap.waits_for_host is False]
    if sum(gap.lost_s for gap in queued) > rest / 2 or rest > t.idle_s / 2:
        places = _places(queued[:_SHOWN]) or [f"longest gap {format_seconds(t.longest_gap_s)}"]
        evidence = [f"no kernel runs for {share(rest, t.step_s)} although the next one had been launched", *places]
        return [finding("idle", "the device is idle although work is queued", rest, evidence, framework)]
    evidence = [f"{share(rest, t.step_s)}: from launch to start, or between queued kernels"]
    return [finding("idle", "short pauses between queued kernels", rest, evidence, framework, advice="launch")]
