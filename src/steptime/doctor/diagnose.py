"""Comparison of measured and predicted figures, and the diagnosis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from steptime.doctor.advice import untried
from steptime.doctor.findings import (
    faster_finding,
    input_findings,
    log_findings,
    memory_findings,
    memory_row_findings,
    possibly,
    ranked,
    slow_rank_findings,
    unexplained_finding,
    variant_findings,
)
from steptime.doctor.gather import NAMES
from steptime.doctor.records import (
    Compared,
    Diagnosis,
    Log,
    Series,
    TraceTimes,
    Variant,
    Verdict,
    rank_spread,
    series_of,
)
from steptime.doctor.trace_findings import trace_findings
from steptime.errors import counted
from steptime.estimate.result import Estimate
from steptime.measure.runs.metrics import TflopsDefinition, flops_per_token, forward_flops
from steptime.model.spec import ModelSpec
from steptime.units import format_seconds

_FULL, _CAUSAL, _HARDWARE = TflopsDefinition.MODEL_FULL, TflopsDefinition.MODEL_CAUSAL, TflopsDefinition.HARDWARE
#: FLOPs that the releases of a framework count; where they differ, the printed rate decides. torchtitan
#: (`get_num_flop_per_token`) counts all pairs of tokens; Megatron-LM, NeMo and MaxText did, and later halve them;
#: Megatron-LM of 2021 and Megatron-DeepSpeed add recomputed FLOPs (arXiv 2104.04473, equation 3).
_COUNTED: Final[Mapping[str, tuple[TflopsDefinition, ...]]] = {
    "torchtitan": (_FULL,),
    "megatron": (_FULL, _CAUSAL, _HARDWARE),
    "nemo": (_FULL, _CAUSAL),
    "maxtext": (_FULL, _CAUSAL),
    "megatron-deepspeed": (_HARDWARE, _FULL, _CAUSAL),
}
_WORDS: Final = {
    _FULL: "with the full attention mask",
    _CAUSAL: "with half of the attention mask",
    _HARDWARE: "with what is recomputed and the full attention mask",
    TflopsDefinition.SIX_N: "as 6 per weight",
    TflopsDefinition.SIX_N_FULL: "as 6 per weight, and the full attention mask",
}
#: Largest relative difference in FLOPs per token at which a printed rate matches a definition; the difference comes
#: from padded vocabularies, norms, rounding.
_CLOSE: Final = 0.04


def rate_row(log: Log, step_s: float, e: Estimate | None, model: ModelSpec | None) -> Compared | None:
    """FLOP/s of one device as the log counts them, with the prediction if the definition of the log is known.

    Args:
        log: the log.
        step_s: its step time.
        e: the prediction.
        model: model of the prediction.
    """
    if log.tflops_per_gpu is None:
        return None
    measured = log.tflops_per_gpu * 1e12
    if e is None or model is None or not all(e.workload.get(name) for name in ("gpus", "global_batch", "seq_len")):
        return Compared(
            name=NAME, unit="flops_per_s", measured=measured, predicted=None, note="measured: as the log counts FLOPs"
        )
    tokens, gpus = float(e.workload["global_batch"]) * e.workload["seq_len"], int(e.workload["gpus"])
    printed = measured * gpus * step_s / tokens
    parts, again = forward_flops(model, int(e.workload["seq_len"])), _recomputed(e)
    counts = {kind: flops_per_token(kind, parts, again) for kind in _COUNTED.get(log.framework, tuple(_WORDS))}
    kind = min(counts, key=lambda kind: abs(printed / counts[kind] - 1.0))
    if abs(printed / counts[kind] - 1.0) > _CLOSE:
        note = (
            f"measured: as the log counts FLOPs, {printed / 1e9:.3g} GFLOP per token; the predicted job has "
            f"{counts[kind] / 1e9:.3g} {_WORDS[kind]}: not compared, check model, sequence, batch and GPUs"
        )
        return Compared(name=NAME, unit="flops_per_s", measured=measured, predicted=None, note=note)
    predicted = counts[kind] * tokens / e.step_time_s / gpus
    return Compared(
        name=NAME,
        unit="flops_per_s",
        measured=measured,
        predicted=predicted,
        note=f"both counted as the log does, {_WORDS[kind]}",
    )


NAME: Final = "FLOP/s per GPU"


def _recomputed(e: Estimate) -> str:
    """Recomputation as a definition of hardware FLOPs names it."""
    words = str(e.plan.get("recompute", "none"))
    return words if words == "full" else "attention" if "attention" in words.split("+") else "none"


#: Groups of the estimate with a row of their own in the report of a trace.
_ROWED: Final = ("compute", "memory_bound", "optimizer", "pp_comm", "bubble")
#: Name of the row of the largest memory.
MEMORY: Final = "peak memory"
#: Timer of a log -> its prediction: phases of the layers, heads of the term tree, and a note.
_TIMERS: Final[Mapping[str, tuple[Sequence[str], Sequence[str], str]]] = NAMES["timers"]
#: Timer of a log -> heads of its prediction with sharded weights, which are gathered in both passes.
_SHARDED: Final[Mapping[str, Sequence[str]]] = NAMES["sharded_timers"]


def phases_s(e: Estimate, phases: Collection[str]) -> float:
    """Predicted exposed seconds of the layers in these phases."""
    return float(sum(v for path, v in e.time.items() if path.split("/")[1:2] and path.split("/")[1] in phases))


def mfu_at(e: Estimate, step_s: float) -> float:
    """MFU of the job at a step time."""
    return e.mfu * e.step_time_s / step_s


def _step_rows(e: Estimate | None, step_s: float) -> list[Compared]:
    if e is None:
        return [Compared(name="step time", unit="s", measured=step_s, predicted=None)]
    low, high = e.step_time_bracket_s
    return [
        Compared(name="step time", unit="s", measured=step_s, predicted=e.step_time_s, bracket=(low, high)),
        Compared(
            name="MFU",
            unit="fraction",
            measured=mfu_at(e, step_s),
            predicted=e.mfu,
            bracket=(mfu_at(e, high), mfu_at(e, low)),
            note="measured: the predicted FLOPs over the measured time",
        ),
    ]


def log_rows(log: Log, series: Series, e: Estimate | None, model: ModelSpec | None = None) -> tuple[Compared, ...]:
    """Step, MFU, FLOP rate, memory and timers of a log."""
    rows = _step_rows(e, series.median_s)
    if (rate := rate_row(log, series.median_s, e, model)) is not None:
        rows.append(rate)
    if log.peak_memory_bytes is not None:
        predicted = None if e is None else e.memory_by_definition.get(log.memory_kind, e.peak_memory_bytes)
        rows.append(
            Compared(
                name=MEMORY,
                unit="bytes",
                measured=log.peak_memory_bytes,
                predicted=predicted,
                note=f"both as {log.memory_kind} by PyTorch",
            )
        )
    for name, (_, most_s) in log.timers.items():
        rows.append(_timer_row(name, most_s, e))
    return tuple(rows)


def _timer_row(name: str, measured_s: float, e: Estimate | None) -> Compared:
    if e is None or name not in _TIMERS:
        return Compared(name=name, unit="s", measured=measured_s, predicted=None)
    phases, heads, note = _TIMERS[name]
    if e.plan.get("zero") == 3:
        heads = _SHARDED.get(name, heads)
    exposed = phases_s(e, phases) + sum(e.time.group(head) for head in heads)
    overlapped_s = sum(e.overlapped.group(head) for head in heads)
    bracket = (0.0, exposed + overlapped_s) if overlapped_s else None
    return Compared(name=name, unit="s", measured=measured_s, predicted=exposed, bracket=bracket, note=note)


def trace_rows(t: TraceTimes, e: Estimate | None) -> tuple[Compared, ...]:
    """Step and groups of a trace; the groups add up to the step."""
    rows = _step_rows(e, t.step_s)

    def add(name: str, measured: float | None, heads: tuple[str, ...], note: str = "") -> None:
        predicted = bracket = None
        if e is not None and heads:
            predicted = sum(e.time.group(head) for head in heads)
            overlapped_s = sum(e.overlapped.group(head) for head in heads)
            bracket = (0.0, predicted + overlapped_s) if overlapped_s else None
        if measured or predicted or bracket:
            rows.append(
                Compared(name=name, unit="s", measured=measured, predicted=predicted, bracket=bracket, note=note)
            )

    add("compute", t.groups["matmul"] + t.groups["attention"], ("compute",))
    add("memory_bound", t.groups["memory_bound"], ("memory_bound",))
    add("optimizer", t.groups["optimizer"], ("optimizer",))
    traffic = {each.axis: each.exposed_s for each in t.traffic}
    heads = () if e is None else tuple(dict.fromkeys(path.split("/")[0] for path in (*e.time, *e.overlapped)))
    axes = dict.fromkeys((*(a for a in traffic if a != "pp"), *(h[:-5] for h in heads if h.endswith("_comm"))))
    kinds = ", ".join(kind for each in t.traffic if each.axis == "unassigned" for kind in each.collectives)
    for axis in axes:
        if axis == "unassigned":
            add("unassigned_comm", traffic[axis], (), f"exposed: {kinds}")
        elif axis != "pp":
            add(f"{axis}_comm", traffic.get(axis, 0.0), (f"{axis}_comm",), "exposed")
    pipeline = "with the bubble, which receivers spend waiting"
    add("pp_comm", traffic.get("pp", 0.0), ("pp_comm", "bubble"), pipeline)
    add("copies", t.groups["copies"], (), "memcpy and memset that nothing covers")
    add("idle", t.idle_s, (), "no kernel runs")
    rest = tuple(head for head in heads if head not in _ROWED and not head.endswith("_comm"))
    if rest:
        add("other", None, rest, "predicted only: " + ", ".join(rest))
    return tuple(rows)


def verdict_of(e: Estimate | None, step_s: float) -> Verdict:
    """Verdict on the measured step: in the band, in the bracket, or outside both."""
    measured = format_seconds(step_s)
    if e is None:
        return Verdict(where="no_prediction", text=f"{measured} per step; nothing to compare it with")
    low, high = e.step_time_bracket_s
    band = e.step_time_band_s
    change = step_s / e.step_time_s - 1.0
    off = f"{abs(change) * 100:.1f} % {'above' if change >= 0 else 'below'} the prediction of"
    text = f"{measured} per step, {off} {format_seconds(e.step_time_s)}"
    if band is not None and band[0] <= step_s <= band[1]:
        return Verdict(where="inside_band", text=f"{text}: inside the error band, no more than the model's own error")
    beyond = "; outside the error band" if band is not None else ""
    unsure = "" if band is not None else "; the prediction has no error band yet"
    if low <= step_s <= high:
        return Verdict(where="inside_bracket", text=f"{text}: inside the bracket of full and no overlap{beyond}")
    if step_s > high:
        more = f"slower than with nothing overlapped ({format_seconds(high)})"
        return Verdict(where="slower", text=f"{text}: {more}{beyond}{unsure}")
    less = f"faster than with everything overlapped ({format_seconds(low)})"
    return Verdict(where="faster", text=f"{text}: {less}{beyond}; an input is wrong, or the profile is")


def prediction(e: Estimate) -> dict[str, Any]:
    """The part of the estimate that the report shows."""
    band = e.step_time_band_s
    return {
        "step_time_s": e.step_time_s,
        "step_time_bracket_s": list(e.step_time_bracket_s),
        "step_time_band_s": None if band is None else list(band),
        "mfu": e.mfu,
        "peak_memory_bytes": e.peak_memory_bytes,
        "memory_capacity_bytes": e.memory_capacity_bytes,
        "time": e.time.rollup(1),
        "overlapped": e.overlapped.rollup(1),
        "plan": dict(e.plan),
        "workload": dict(e.workload),
        "model": e.provenance.model,
        "cluster": e.provenance.cluster,
    }


def diagnose_log(
    log: Log,
    settings: Mapping[str, Any],
    estimate: Estimate | None = None,
    *,
    model: ModelSpec | None = None,
    contradictions: Sequence[str] = (),
    variants: Sequence[Variant] = (),
    memory_variants: Sequence[Variant] = (),
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Diagnosis of a log, compared with the prediction if there is one.

    Args:
        log: what :func:`~steptime.doctor.log.read_log` returns.
        settings: ``global_batch``, ``seq`` and ``gpus`` of the job as far as known.
        estimate: the prediction of the same job.
        model: its model; with it printed FLOP/s are compared as the log counts them.
        contradictions: contradictions between the user's input and the log.
        variants: predictions with one choice of the plan changed, to compare with the step time.
        memory_variants: predictions with one choice changed, to compare with the peak memory.
        notes: further remarks for the reader of the report.

    Raises:
        InputFileError: the log's throughput cannot be turned into times.
    """
    series = series_of(log, settings)
    rows = log_rows(log, series, estimate, model)
    retries = sum(event.kind == "allocator_retry" for event in log.events)
    found = [
        *log_findings(log, series, rows),
        *slow_rank_findings(log, rank_spread(log, settings)),
        *memory_findings(estimate, log.peak_memory_bytes, log.capacity_bytes, log.memory_kind, retries, log.framework),
        *memory_row_findings(
            estimate,
            next((row for row in rows if row.name == MEMORY), None),
            log.memory_kind,
            memory_variants,
            log.framework,
        ),
    ]
    said = {**log.stated.flags, **log.stated.plan}
    found = [replace(each, advice=untried(each.advice, said)) for each in found]
    if series.warmup_lines == 0:
        notes = (*notes, f"only {counted(series.lines, 'step line')}: none was left out as warm-up")
    return Diagnosis(
        source={
            "path": log.path,
            "kind": "log",
            "framework": log.framework,
            "step_lines": series.lines,
            "steps": series.steps,
        },
        measured=_log_measured(log, series),
        predicted=None if estimate is None else prediction(estimate),
        rows=rows,
        verdict=verdict_of(estimate, series.median_s),
        warnings=(*log.warnings, *notes),
        findings=_all(found, estimate, series.median_s, contradictions, variants, log.framework),
    )


def diagnose_trace(
    times: TraceTimes,
    estimate: Estimate | None = None,
    *,
    contradictions: Sequence[str] = (),
    variants: Sequence[Variant] = (),
    notes: Sequence[str] = (),
    framework: str = "",
) -> Diagnosis:
    """Diagnosis of a trace, compared with the prediction if there is one; arguments as in :func:`diagnose_log`."""
    rows = trace_rows(times, estimate)
    found = trace_findings(times, estimate, rows, framework)
    return Diagnosis(
        source={
            "path": times.path,
            "kind": "trace",
            "framework": framework or None,
            "steps": times.steps_found,
            "steps_used": len(times.step_times_s),
            "device": times.device,
            "gpus": times.gpus,
        },
        measured=_trace_measured(times),
        predicted=None if estimate is None else prediction(estimate),
        rows=rows,
        verdict=verdict_of(estimate, times.step_s),
        warnings=(*times.warnings, *notes),
        findings=_all(found, estimate, times.step_s, contradictions, variants, framework),
    )


def _all(
    found: list[Any],
    e: Estimate | None,
    step_s: float,
    contradictions: Sequence[str],
    variants: Sequence[Variant],
    framework: str,
) -> tuple[Any, ...]:
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
        "step_time_s": series.median_s,
        "step_time_p5_s": series.p5_s,
        "step_time_p95_s": series.p95_s,
        "step_time_mean_s": series.mean_s,
        "step_time_basis": series.basis,
        "steps": series.steps,
        "step_lines": series.lines,
        "warmup_lines": series.warmup_lines,
        "drift": series.drift,
        "spikes": {"steps": list(spikes.numbers), "period": spikes.period, "lost_s": spikes.lost_s},
        "outside_s": series.outside_s,
        "skipped_steps": log.skipped_steps,
        "restarts": log.restarts,
        "peak_memory_bytes": log.peak_memory_bytes,
        "memory_kind": log.memory_kind,
        "timers": {name: list(pair) for name, pair in log.timers.items()},
        "events": {kind: sum(e.kind == kind for e in log.events) for kind in sorted({e.kind for e in log.events})},
    }


def _trace_measured(t: TraceTimes) -> dict[str, Any]:
    return {
        "step_time_s": t.step_s,
        "step_times_s": list(t.step_times_s),
        "groups": dict(t.groups),
        "traffic": {
            each.axis: {
                "busy_s": each.busy_s,
                "exposed_s": each.exposed_s,
                "waiting_s": each.waiting_s,
                "collectives": dict(each.collectives),
            }
            for each in t.traffic
        },
        "idle_s": t.idle_s,
        "launch_bound_s": t.launch_bound_s,
        "longest_gap_s": t.longest_gap_s,
        "long_gaps": [gap.to_json() for gap in t.long_gaps],
        "kernels_per_step": t.kernels_per_step,
        "streams": t.streams,
        "top_kernels": [
            {"name": k.name, "group": k.group, "calls_per_step": k.calls_per_step, "time_s": k.time_s} for k in t.top
        ],
        "synchronisations": {name: {"calls": calls, "time_s": s} for name, (calls, s) in t.synchronisations.items()},
    }
