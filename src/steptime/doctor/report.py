"""Report of ``steptime doctor``: verdict, measured and predicted figures, findings, assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from steptime.doctor.advice import NAMES
from steptime.doctor.records import Diagnosis, Finding
from steptime.errors import counted, shorten
from steptime.report import text as t
from steptime.units import format_si

if TYPE_CHECKING:
    from rich.console import Console

_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "s": t.seconds,
    "bytes": t.memory,
    "fraction": t.percent,
    "flops_per_s": lambda v: format_si(v, "FLOP/s"),
}
_TOP: Final = 8


def print_diagnosis(d: Diagnosis) -> None:
    """Write the report to standard output."""
    out = t.console()
    out.print(t.printable(_source_line(d)), style="bold")
    out.print(t.printable(d.verdict.text))
    band = None if d.predicted is None else d.predicted["step_time_band_s"]
    if band is not None:
        out.print(f"predicted band {t.seconds(band[0])} to {t.seconds(band[1])} (5th to 95th percentile)")
    for line in _measured_lines(d):
        out.print(t.printable(line))
    _print_rows(out, d)
    if d.source["kind"] == "trace":
        _print_top(out, d.measured["top_kernels"])
    _print_findings(out, d)
    if d.warnings:
        out.print()
    for warning in d.warnings:
        out.print(t.printable(f"note: {warning}"))


def _source_line(d: Diagnosis) -> str:
    s = d.source
    if s["kind"] == "log":
        lines = f"{_number(s['steps'], 'step')} in {_number(s['step_lines'], 'line')}"
        return f"{s['path']}: log of {NAMES[s['framework']]}, {lines}"
    words = [f"{s['path']}: trace, {s['steps_used']} of {_number(s['steps'] or s['steps_used'], 'step')} used"]
    words += [str(s["device"])] if s["device"] else []
    words += [f"one of {_number(s['gpus'], 'rank')}"] if s["gpus"] else []
    return ", ".join(words)


def _number(number: float, noun: str) -> str:
    return counted(number, noun, t.count(number))


def _measured_lines(d: Diagnosis) -> list[str]:
    m = d.measured
    if d.source["kind"] == "trace":
        times = m["step_times_s"]
        line = f"steps {t.seconds(min(times))} to {t.seconds(max(times))}" if len(times) > 1 else "one step"
        return [f"{line}, {_number(m['kernels_per_step'], 'kernel')} each on {_number(m['streams'], 'stream')}"]
    basis = "" if m["step_time_basis"] == "stated" else f", {m['step_time_basis']}"
    out = [
        f"median of the steps; 5 to 95 %: {t.seconds(m['step_time_p5_s'])} to {t.seconds(m['step_time_p95_s'])}, "
        f"{_number(m['warmup_lines'], 'warm-up line')} left out{basis}"
    ]
    if m["restarts"]:
        out.append(f"the run restarted {_number(m['restarts'], 'time')}")
    return out


def _print_rows(out: Console, d: Diagnosis) -> None:
    out.print()
    table = t.grid(("per step", "measured", "predicted", "ratio", "bracket"))
    for row in d.rows:
        show = _FORMATS[row.unit]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bracket = "" if row.bracket is None else f"{show(row.bracket[0])} to {show(row.bracket[1])}"
        measured, predicted = (("-" if value is None else show(value)) for value in (row.measured, row.predicted))
        table.add_row(t.printable(row.name), measured, predicted, ratio, bracket)
    out.print(table)
    notes: dict[str, list[str]] = {}
    for row in d.rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    for note, names in notes.items():
        out.print(t.printable(f"{', '.join(names)}: {note}"))


def _print_top(out: Console, kernels: list[Mapping[str, Any]]) -> None:
    out.print()
    table = t.grid(("largest kernels, per step", "time", "calls", "group"), left=(0, 3))
    for kernel in kernels[:_TOP]:
        table.add_row(
            t.printable(shorten(str(kernel["name"]), 60)),
            t.seconds(kernel["time_s"]),
            t.number(round(kernel["calls_per_step"], 1)),
            t.printable(str(kernel["group"])),
        )
    out.print(table)


def _print_findings(out: Console, d: Diagnosis) -> None:
    t.heading(out, "findings, by seconds lost per step" if d.findings else "no findings")
    if any(each.possible for each in d.findings):
        inside = d.verdict.where == "inside_band"
        why = "The step is inside the error band" if inside else "The prediction is not of this run"
        out.print(f"{why}: what differs from it is a possibility, no loss.")
    for i, each in enumerate(d.findings, 1):
        _print_finding(out, i, each, d.measured["step_time_s"])


def _print_finding(out: Console, i: int, each: Finding, step_s: float) -> None:
    lost = "" if each.lost_s is None else f": {t.seconds(each.lost_s)} ({t.share(each.lost_s, step_s)})"
    out.print(t.printable(f"{i}. {each.title}{lost}"))
    for line in each.evidence:
        t.indented(out, line)
    for line in each.advice:
        t.indented(out, f"try: {line}")
