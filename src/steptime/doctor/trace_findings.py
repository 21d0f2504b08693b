"""Findings of traces: exposed communication, pauses of the device, groups of kernels above the prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from steptime.doctor.findings import WORTH, compared_line, excess, finding, share
from steptime.doctor.records import Compared, Finding, KernelTotal, LongGap, TraceTimes, Traffic
from steptime.doctor.timeline import spread
from steptime.doctor.trace import group_of
from steptime.errors import first_few, shorten
from steptime.estimate.result import Estimate
from steptime.units import format_seconds

#: Cause -> pattern of the host's event; first match wins. Names are from PyTorch's profiler.
_BY_HOST: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("data", re.compile(r"data_?loader|DataLoader|__next__|collate|batch.?generator|get_batch|next_batch")),
    ("garbage_collection", re.compile(r"\bgc\b|built-in function collect|garbage", re.I)),
    ("allocator", re.compile(r"(cuda|hip)(Malloc|Free)(?!Async|Host)|empty_cache")),
    ("compile", re.compile(r"dynamo|inductor|compile_fx|autotune|torch/fx|CachingAutotuner|cu(da)?ModuleLoad", re.I)),
    (
        "checkpoint",
        re.compile(
            r"save_?checkpoint|checkpoint\w*\.save|torch/serialization|\bsave\b|distributed[/.]checkpoint|state_dict",
            re.I,
        ),
    ),
    (
        "host_sync",
        re.compile(
            r"_local_scalar_dense|aten::(item|nonzero|is_nonzero|equal|masked_select|unique)|\.item|Synchronize|\.cpu\b"
        ),
    ),
    ("host_optimizer", re.compile(r"optimizer|optim[/.]|clip_grad|grad_scaler|zero_grad|adam|foreach", re.I)),
)
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
}
_WITH_STACKS: Final = "the trace was recorded with stacks, which slows the host: without them it is less"
_NAME: Final = 70
#: Most places named in one finding.
_SHOWN: Final = 3


def idle_findings(t: TraceTimes, framework: str) -> list[Finding]:
    """Findings of long pauses by cause, then of the cost of short ones."""
    if t.idle_s < 2 * WORTH * t.step_s:
        return []
    if t.launch_bound_s is None:
        gaps = _places(t.long_gaps[:_SHOWN]) or [f"longest gap {format_seconds(t.longest_gap_s)}"]
        evidence = [
            f"no kernel runs for {share(t.idle_s, t.step_s)}",
            *gaps,
            "the trace has no launches, so it does not say whether the host is late",
        ]
        cause = cause_of(t.long_gaps[0]) if t.long_gaps else "idle"
        advice = "idle" if cause == "stall" else cause
        return [finding("idle", "the device is idle between kernels", t.idle_s, evidence, framework, advice=advice)]
    late = [gap for gap in t.long_gaps if gap.waits_for_host]
    stalled_s = min(sum(gap.lost_s for gap in late), t.launch_bound_s)
    return [
        *_stall_findings(t, late, framework),
        *_launch_findings(t, stalled_s, framework),
        *_queue_findings(t, framework),
    ]


def cause_of(gap: LongGap) -> str:
    """Cause of a pause: from the host's event, else from the kernels around it; ``stall``: unknown."""
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
    """Frequency of pauses in words."""
    if per_step < 0.95:
        return f"one pause in {round(1 / per_step)} steps" if per_step else "no pause"
    number = round(per_step)
    return "one pause per step" if number == 1 else f"{number} pauses per step"


def _places(gaps: Sequence[LongGap]) -> list[str]:
    """One line of evidence for each place."""
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
    long = " in addition to the long pauses" if stalled_s else ""
    evidence = [
        f"no kernel runs for {share(t.idle_s, t.step_s)}; in {lost / t.idle_s * 100:.0f} % of that the next kernel had "
        f"not been launched yet{long}",
        f"{t.kernels_per_step:.0f} kernels per step, one every {format_seconds(each)}; "
        f"longest gap {format_seconds(t.longest_gap_s)}",
    ]
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


_TITLES: Final = {
    "compute": "matrix products and attention take longer than predicted",
    "memory_bound": "memory-bound kernels take longer than predicted",
    "optimizer": "the optimiser takes longer than predicted",
}


def trace_findings(t: TraceTimes, e: Estimate | None, rows: Sequence[Compared], framework: str) -> list[Finding]:
    """All findings of a trace, by itself or against the prediction."""
    return [
        *_traffic_findings(t, rows, framework),
        *idle_findings(t, framework),
        *_group_findings(t, rows, framework),
        *_attention_findings(t, e, framework),
        *_copy_findings(t, framework),
        *_blocking_findings(t, framework),
        *_step_findings(t, framework),
    ]


def _traffic_findings(t: TraceTimes, rows: Sequence[Compared], framework: str) -> list[Finding]:
    by_name = {row.name: row for row in rows}
    out = []
    for each in t.traffic:
        name = f"{each.axis}_comm"
        row = by_name.get(name)
        lost = excess(row, t.step_s) if row is not None and row.predicted is not None else None
        if lost is None and (row is None or row.predicted is None) and each.exposed_s > WORTH * t.step_s:
            lost = each.exposed_s
        if lost is None:
            continue
        against = " more than predicted" if row is not None and row.predicted is not None else ""
        evidence = ([compared_line(row)] if row is not None and against else []) + _traffic_evidence(each, t)
        out.append(finding(name, f"{name} is exposed{against}", lost, evidence, framework, relative=bool(against)))
    return out


def _traffic_evidence(each: Traffic, t: TraceTimes) -> list[str]:
    overlapped_s = max(each.busy_s - each.exposed_s, 0.0)
    part = overlapped_s / each.busy_s * 100 if each.busy_s else 0.0
    out = [f"busy {format_seconds(each.busy_s)} per step, of which {part:.0f} % is hidden behind other kernels"]
    if each.collectives:
        kinds = sorted(each.collectives.items(), key=lambda item: -item[1])
        out.append("; ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in kinds[:4]))
    if each.waiting_s > 0.3 * each.busy_s and each.waiting_s > WORTH * t.step_s:
        out.append(
            f"{format_seconds(each.waiting_s)} of it is beyond the fastest call of the same size: waiting for slower "
            "ranks, or busy links"
        )
    return out


def _group_findings(t: TraceTimes, rows: Sequence[Compared], framework: str) -> list[Finding]:
    out = []
    for name, title in _TITLES.items():
        row = next((row for row in rows if row.name == name), None)
        lost = excess(row, t.step_s)
        if row is None or lost is None:
            continue
        groups = ("matmul", "attention") if name == "compute" else (name,)
        evidence = [compared_line(row)]
        top = [k for k in t.top if k.group in groups][:3]
        evidence += map(_of_kernel, top)
        if name == "compute" and any("sgemm" in k.name.lower() or "f32f32" in k.name.lower() for k in top):
            evidence.append("some of these products run in fp32")
        out.append(finding(name, title, lost, evidence, framework, relative=True))
    return out


def _of_kernel(k: KernelTotal) -> str:
    return f"{k.name[:60]}: {k.calls_per_step:.0f} calls, {format_seconds(k.time_s)}"


def _attention_findings(t: TraceTimes, e: Estimate | None, framework: str) -> list[Finding]:
    softmax = sum(k.time_s for k in t.top if "softmax" in k.name.lower() and k.group == "memory_bound")
    if (
        t.groups["attention"] > 0
        or softmax < WORTH * t.step_s
        or (e is not None and e.plan.get("attention") != "fused")
    ):
        return []
    evidence = [f"no fused attention kernel ran, but softmax kernels took {share(softmax, t.step_s)}"]
    return [finding("attention", "attention is not fused", softmax, evidence, framework)]


def _copy_findings(t: TraceTimes, framework: str) -> list[Finding]:
    lost = t.groups["copies"]
    if lost < WORTH * t.step_s:
        return []
    kinds = [_of_kernel(k) for k in t.top if k.group == "copies"][:3]
    return [finding("copies", "copies that no kernel covers", lost, [share(lost, t.step_s), *kinds], framework)]


def _of_host_calls(found: Mapping[str, tuple[float, float]]) -> list[str]:
    return [f"{name}: {calls:.1f} calls, {format_seconds(s)} per step" for name, (calls, s) in found.items()]


def _blocking_findings(t: TraceTimes, framework: str) -> list[Finding]:
    out = []
    memory = {name: v for name, v in t.synchronisations.items() if "Malloc" in name or "Free" in name}
    memory = {name: v for name, v in memory.items() if v[0] >= 0.5 and "Async" not in name and "Host" not in name}
    if memory:
        evidence = _of_host_calls(memory)
        out.append(
            finding("allocator", "device memory is allocated or freed inside the steps", None, evidence, framework)
        )
    waits = {name: v for name, v in t.synchronisations.items() if name not in memory and "Synchronize" in name}
    calls = sum(v[0] for v in waits.values())
    if calls > 4 and t.launch_bound_s is not None and t.launch_bound_s > WORTH * t.step_s:
        evidence = _of_host_calls(waits)
        out.append(finding("synchronise", "the host waits for the device inside the step", None, evidence, framework))
    return out


def _step_findings(t: TraceTimes, framework: str) -> list[Finding]:
    more = spread(t.step_times_s)
    if len(t.step_times_s) < 3 or more < 0.1:
        return []
    lost = t.step_s - sorted(t.step_times_s)[len(t.step_times_s) // 2]
    times = first_few([format_seconds(s) for s in t.step_times_s], 8)
    return [finding("spikes", "the traced steps differ", max(lost, 0.0), [f"steps of {times}"], framework)]
