"""Report of the decision procedure: questions, answers, numbers, and the plan at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.errors import counted
from steptime.report import text as t

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.study.guide.decisions import Alternative, Decision, Guide


def print_guide(found: Guide) -> None:
    """Write the report to standard output."""
    out = t.console()
    out.print(t.printable(f"{found.model} on {found.cluster}, {counted(found.gpus, 'device')}"), style="bold")
    for number, each in enumerate(found.decisions, 1):
        _print_decision(out, number, each)
    for note in found.notes:
        t.indented(out, f"note: {note}", by=0)


def _print_decision(out: Console, number: int, each: Decision) -> None:
    t.heading(out, f"{number} {each.question} {each.answer}.")
    t.indented(out, each.because, by=2)
    if each.plan is not None and each.step_time_s is not None:
        t.indented(out, f"plan: {t.plan_label(each.plan)}: {t.seconds(each.step_time_s)} a step", by=2)
    for other in each.beaten:
        t.indented(out, f"{'instead' if each.answer == 'no' else 'beaten'}: {_beaten(other)}", by=2)
    if each.turns:
        t.indented(out, f"turned round by: {each.turns}", by=2)


def _beaten(other: Alternative) -> str:
    """An alternative in one line."""
    if other.step_time_s is None:
        need = "" if other.peak_memory_bytes is None else f", needs {t.memory(other.peak_memory_bytes)}"
        return f"{other.name}: {'does not fit' if need else 'no plan of it exists'}{need}"
    plan = "" if other.plan is None else f" ({t.plan_label(other.plan)})"
    return f"{other.name}: {t.seconds(other.step_time_s)}{plan}"
