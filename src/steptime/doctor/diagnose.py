"""From what was measured and what was predicted to a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from steptime.doctor.advice import untried
from steptime.doctor.compare import MEMORY, log_rows, prediction, trace_rows, verdict_of
from steptime.doctor.findings import (
    faster_finding,
    input_findings,
    memory_findings,
    memory_row_findings,
    possibly,
    ranked,
    unexplained_finding,
    variant_findings,
)
from steptime.doctor.log_findings import log_findings, slow_rank_findings
from steptime.doctor.records import Diagnosis, Log, Series, TraceTimes, Variant
from steptime.doctor.series import rank_spread, series_of
from steptime.doctor.trace_findings import trace_findings
from steptime.errors import counted
from steptime.estimate.result import Estimate
from steptime.model.spec import ModelSpec


def diagnose_log(
    log: Log, settings: Mapping[str, Any], estimate: Estimate | None = None, *, model: ModelSpec | None = None,
    contradictions: Sequence[str] = (),
    variants: Sequence[Variant] = (), memory_variants: Sequence[Variant] = (), notes: Sequence[str] = (),
) -> Diagnosis:  # fmt: skip
    """What a log shows, beside the prediction if there is one.

    Args:
        log: what :func:`~steptime.doctor.log.read_log` returns.
        settings: ``global_batch``, ``seq`` and ``gpus`` of the job as far as known.
        estimate: the prediction of the same job.
        model: its model; with it printed FLOP/s are compared as the log counts them.
        contradictions: what the user gives against what the log states.
        variants: predictions with one choice of the plan changed, held against the step time.
        memory_variants: likewise, held against the peak memory.
        notes: what the reader of the report has to know beside.

    Raises:
        InputFileError: the log's throughput cannot be turned into times.
    """
    series = series_of(log, settings)
    rows = log_rows(log, series, estimate, model)
    retries = sum(event.kind == "allocator_retry" for event in log.events)
    found = [
        *log_findings(log, series, rows),
        *slow_rank_findings(log, rank_spread(log, settings)),
        *memory_findings(
            estimate, log.peak_memory_bytes, log.capacity_bytes, log.memory_kind, retries, log.framework
        ),
        *memory_row_findings(
            estimate, next((row for row in rows if row.name == MEMORY), None), log.memory_kind, memory_variants,
            log.framework,
        ),
    ]  # fmt: skip
    said = {**log.stated.flags, **log.stated.plan}
    found = [replace(each, advice=untried(each.advice, said)) for each in found]
    if series.warmup_lines == 0:
        notes = (*notes, f"only {counted(series.lines, 'step line')}: none was left out as warm-up")
    return Diagnosis(
        source={"path": log.path, "kind": "log", "framework": log.framework, "step_lines": series.lines,
                "steps": series.steps},
        measured=_log_measured(log, series), predicted=None if estimate is None else prediction(estimate),
        rows=rows, verdict=verdict_of(estimate, series.median_s), warnings=(*log.warnings, *notes),
        findings=_all(found, estimate, series.median_s, contradictions, variants, log.framework),
    )  # fmt: skip


def diagnose_trace(
    times: TraceTimes, estimate: Estimate | None = None, *, contradictions: Sequence[str] = (),
    variants: Sequence[Variant] = (), notes: Sequence[str] = (), framework: str = "",
) -> Diagnosis:  # fmt: skip
    """What a trace shows, beside the prediction if there is one; arguments as in :func:`diagnose_log`."""
    rows = trace_rows(times, estimate)
    found = trace_findings(times, estimate, rows, framework)
    return Diagnosis(
        source={"path": times.path, "kind": "trace", "framework": framework or None, "steps": times.steps_found,
                "steps_used": len(times.step_times_s), "device": times.device, "gpus": times.gpus},
        measured=_trace_measured(times), predicted=None if estimate is None else prediction(estimate), rows=rows,
        verdict=verdict_of(estimate, times.step_s), warnings=(*times.warnings, *notes),
        findings=_all(found, estimate, times.step_s, contradictions, variants, framework),
    )  # fmt: skip


def _all(
    found: list[Any], e: Estimate | None, step_s: float, contradictions: Sequence[str], variants: Sequence[Variant],
    framework: str,
) -> tuple[Any, ...]:  # fmt: skip
    wrong = input_findings(contradictions, framework) or faster_finding(e, step_s, framework)
    found = [*wrong, *found]
    found += variant_findings(e, step_s, variants, framework)
    if not contradictions:
        found += unexplained_finding(e, step_s, found, framework)
    doubtful = bool(contradictions) or verdict_of(e, step_s).where == "inside_band"
    return ranked([possibly(each) for each in found] if doubtful else found)


def _log_measured(log: Log, series: Series) -> dict[str, Any]:
    spikes = series.spikes
    return {
        "step_time_s": series.median_s, "step_time_p5_s": series.p5_s, "step_time_p95_s": series.p95_s,
        "step_time_mean_s": series.mean_s, "step_time_basis": series.basis, "steps": series.steps,
        "step_lines": series.lines, "warmup_lines": series.warmup_lines, "drift": series.drift,
        "spikes": {"steps": list(spikes.numbers), "period": spikes.period, "lost_s": spikes.lost_s},
        "outside_s": series.outside_s, "skipped_steps": log.skipped_steps, "restarts": log.restarts,
        "peak_memory_bytes": log.peak_memory_bytes, "memory_kind": log.memory_kind,
        "timers": {name: list(pair) for name, pair in log.timers.items()},
        "events": {kind: sum(e.kind == kind for e in log.events) for kind in sorted({e.kind for e in log.events})},
    }  # fmt: skip


def _trace_measured(t: TraceTimes) -> dict[str, Any]:
    return {
        "step_time_s": t.step_s, "step_times_s": list(t.step_times_s), "groups": dict(t.groups),
        "traffic": {
            each.axis: {"busy_s": each.busy_s, "exposed_s": each.exposed_s, "waiting_s": each.waiting_s,
                        "collectives": dict(each.collectives)}
            for each in t.traffic
        },
        "idle_s": t.idle_s, "launch_bound_s": t.launch_bound_s, "longest_gap_s": t.longest_gap_s,
        "long_gaps": [gap.to_json() for gap in t.long_gaps],
        "kernels_per_step": t.kernels_per_step, "streams": t.streams,
        "top_kernels": [
            {"name": k.name, "group": k.group, "calls_per_step": k.calls_per_step, "time_s": k.time_s} for k in t.top
        ],
        "synchronisations": {
            name: {"calls": calls, "time_s": s} for name, (calls, s) in t.synchronisations.items()
        },
    }  # fmt: skip
