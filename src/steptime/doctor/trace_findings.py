"""What a trace shows: exposed communication, idle time, groups of kernels above the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from steptime.doctor.findings import WORTH, beside, excess, finding, share
from steptime.doctor.pause_findings import idle_findings
from steptime.doctor.records import Compared, Finding, KernelTotal, TraceTimes, Traffic
from steptime.doctor.timeline import spread
from steptime.errors import first_few
from steptime.estimate.result import Estimate
from steptime.units import format_seconds

_TITLES: Final = {
    "compute": "matrix products and attention take longer than predicted",
    "memory_bound": "memory-bound kernels take longer than predicted",
    "optimizer": "the optimiser takes longer than predicted",
}  # fmt: skip


def trace_findings(t: TraceTimes, e: Estimate | None, rows: Sequence[Compared], framework: str) -> list[Finding]:
    """Everything that a trace shows by itself or against the prediction."""
    return [
        *_traffic_findings(t, rows, framework), *idle_findings(t, framework), *_group_findings(t, rows, framework),
        *_attention_findings(t, e, framework), *_copy_findings(t, framework), *_blocking_findings(t, framework),
        *_step_findings(t, framework),
    ]  # fmt: skip


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
        evidence = ([beside(row)] if row is not None and against else []) + _traffic_evidence(each, t)
        out.append(finding(name, f"{name} is exposed{against}", lost, evidence, framework, relative=bool(against)))
    return out


def _traffic_evidence(each: Traffic, t: TraceTimes) -> list[str]:
    hidden = each.busy_s - each.exposed_s
    part = hidden / each.busy_s * 100 if each.busy_s else 0.0
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
        evidence = [beside(row)]
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
