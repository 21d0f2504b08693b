"""Measured beside predicted: the rows of the comparison, and where the measured step lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from steptime.doctor.rates import rate_row
from steptime.doctor.records import Compared, Log, Series, TraceTimes, Verdict
from steptime.estimate.result import Estimate
from steptime.model.spec import ModelSpec
from steptime.units import format_seconds

#: Groups of the estimate that have a row of their own in a trace.
_ROWED: Final = ("compute", "memory_bound", "optimizer", "pp_comm", "bubble")
#: Name of the row of the largest memory.
MEMORY: Final = "peak memory"
#: Timers of a log -> what is predicted of them: phases of the layers, heads of the term tree, and a note.
_TIMERS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...], str]]] = {
    "forward-backward": (("forward", "backward", "recompute"), ("pp_comm", "bubble"), "with pipeline waits"),
    "forward-compute": (("forward",), (), ""),
    "backward-compute": (("backward", "recompute"), (), ""),
    "all-grads-sync": ((), ("dp_comm/gradients", "dp_comm/replicated_weights"), "what is exposed"),
    "backward-params-all-reduce": ((), ("dp_comm/gradients", "dp_comm/replicated_weights"), "what is exposed"),
    "params-all-gather": ((), ("dp_comm/weights",), "what is exposed"),
    "optimizer": ((), ("optimizer",), "with clipping and copies"),
    "forward": (("forward",), (), ""),
    "backward_inner": (("backward", "recompute"), (), ""),
    "backward_allreduce": ((), ("dp_comm/gradients", "dp_comm/replicated_weights"), "what is exposed"),
    "step": ((), ("optimizer", "dp_comm/weights"), ""),
}  # fmt: skip
#: The same where weights are sharded too, and gathered in both passes.
_SHARDED: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("dp_comm/weights",), "backward_inner": ("dp_comm/weights_again",), "step": ("optimizer",),
}  # fmt: skip


def phases_s(e: Estimate, phases: Collection[str]) -> float:
    """Predicted exposed seconds of the layers in these phases."""
    return float(sum(v for path, v in e.time.items() if path.split("/")[1:2] and path.split("/")[1] in phases))


def mfu_at(e: Estimate, step_s: float) -> float:
    """MFU of the job if its step takes so long."""
    return e.mfu * e.step_time_s / step_s


def _step_rows(e: Estimate | None, step_s: float) -> list[Compared]:
    if e is None:
        return [Compared(name="step time", unit="s", measured=step_s, predicted=None)]
    low, high = e.step_time_bracket_s
    return [
        Compared(name="step time", unit="s", measured=step_s, predicted=e.step_time_s, bracket=(low, high)),
        Compared(name="MFU", unit="fraction", measured=mfu_at(e, step_s), predicted=e.mfu,
                 bracket=(mfu_at(e, high), mfu_at(e, low)),
                 note="measured: the predicted FLOPs over the measured time"),
    ]  # fmt: skip


def log_rows(
    log: Log, series: Series, e: Estimate | None, model: ModelSpec | None = None
) -> tuple[Compared, ...]:  # fmt: skip
    """Step, MFU, FLOP rate, memory and timers of a log."""
    rows = _step_rows(e, series.median_s)
    if (rate := rate_row(log, series.median_s, e, model)) is not None:
        rows.append(rate)
    if log.peak_memory_bytes is not None:
        predicted = None if e is None else e.memory_by_definition.get(log.memory_kind, e.peak_memory_bytes)
        rows.append(Compared(name=MEMORY, unit="bytes", measured=log.peak_memory_bytes, predicted=predicted,
                             note=f"both as {log.memory_kind} by PyTorch"))  # fmt: skip
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
    hidden = sum(e.overlapped.group(head) for head in heads)
    bracket = (0.0, exposed + hidden) if hidden else None
    return Compared(name=name, unit="s", measured=measured_s, predicted=exposed, bracket=bracket, note=note)


def trace_rows(t: TraceTimes, e: Estimate | None) -> tuple[Compared, ...]:
    """Step and groups of a trace; the groups add up to the step."""
    rows = _step_rows(e, t.step_s)

    def add(name: str, measured: float | None, heads: tuple[str, ...], note: str = "") -> None:
        predicted = bracket = None
        if e is not None and heads:
            predicted = sum(e.time.group(head) for head in heads)
            hidden = sum(e.overlapped.group(head) for head in heads)
            bracket = (0.0, predicted + hidden) if hidden else None
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
    for axis in axes:
        if axis != "pp":
            add(f"{axis}_comm", traffic.get(axis, 0.0), (f"{axis}_comm",) if axis != "unassigned" else (), "exposed")
    pipeline = "with the bubble, which receivers spend waiting"
    add("pp_comm", traffic.get("pp", 0.0), ("pp_comm", "bubble"), pipeline)
    add("copies", t.groups["copies"], (), "memcpy and memset that nothing covers")
    add("idle", t.idle_s, (), "no kernel runs")
    rest = tuple(head for head in heads if head not in _ROWED and not head.endswith("_comm"))
    if rest:
        add("other", None, rest, "predicted only: " + ", ".join(rest))
    return tuple(rows)


def verdict_of(e: Estimate | None, step_s: float) -> Verdict:
    """Where the measured step lies: in the band, in the bracket, or outside of both."""
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
        "step_time_s": e.step_time_s, "step_time_bracket_s": list(e.step_time_bracket_s),
        "step_time_band_s": None if band is None else list(band), "mfu": e.mfu,
        "peak_memory_bytes": e.peak_memory_bytes, "memory_capacity_bytes": e.memory_capacity_bytes,
        "time": e.time.rollup(1), "overlapped": e.overlapped.rollup(1), "plan": dict(e.plan),
        "workload": dict(e.workload), "model": e.provenance.model, "cluster": e.provenance.cluster,
    }  # fmt: skip
