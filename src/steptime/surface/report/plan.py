"""The report of a search: the best plans, the front, what failed and why, and where the winner's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptime.search.result import PlanResult
from steptime.surface.report import text as t
from steptime.surface.report.estimate import print_headline
from steptime.surface.report.tree import term_table

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.estimate.result import Estimate

#: Points of the front to show.
SHOWN_FRONT = 8


def print_plan_result(result: PlanResult, job: Mapping[str, Any]) -> None:
    """Write the report to standard output."""
    out = t.console()
    _print_header(out, result, job)
    if result.plans:
        _print_plans(out, result)
        _print_front(out, result)
    _print_reasons(out, result)
    if not result.feasible:
        _print_nearest(out, result)
    for line in result.advice:
        out.print(t.printable(f"advice: {line}"))
    if result.plans:
        _print_winner(out, result.plans[0])


def _print_header(out: Console, result: PlanResult, job: Mapping[str, Any]) -> None:
    first = result.plans[0] if result.plans else result.nearest
    mode = first.provenance.mode if first else job.get("mode") or "corrected"
    gpus, batch = t.count(job["gpus"]), t.count(job["global_batch"])
    title = f"{job['model']} on {job['cluster']}: {gpus} GPUs, global batch {batch} sequences, mode {mode}"
    out.print(t.printable(title), style="bold")
    out.print(f"{t.count(result.candidates)} candidates, {t.count(result.feasible)} feasible")
    stop = result.stop
    out.print(t.printable(f"{stop.reason}: {stop.proof} ({stop.elapsed_cpu_s:.1f} s CPU)"))


def _print_plans(out: Console, result: PlanResult) -> None:
    out.print()
    capacity = t.gib(result.plans[0].memory_capacity_bytes)
    columns = ("", "plan", "step", "bracket", "MFU", f"GiB of {capacity}", "main loss")
    table = t.grid(columns, left=(1, 3, 5, 6))
    for rank, e in enumerate(result.plans, 1):
        low, high = e.step_time_bracket_s
        bracket = f"{t.seconds(low)} to {t.seconds(high)}"
        values = (t.seconds(e.step_time_s), bracket, t.percent(e.mfu), t.gib(e.peak_memory_bytes))
        table.add_row(str(rank), t.plan_label(e.plan), *values, t.printable(t.main_loss(e.time)))
    out.print(table)


def _print_front(out: Console, result: PlanResult) -> None:
    if len(result.pareto) < 2:
        return
    out.print()
    table = t.grid(("less memory for more time (front)", "step", "GiB"))
    for point in result.pareto[:SHOWN_FRONT]:
        plan = t.plan_label(point["plan"])
        table.add_row(plan, t.seconds(point["step_time_s"]), t.gib(point["peak_memory_bytes"]))
    out.print(table)
    if len(result.pareto) > SHOWN_FRONT:
        out.print(f"{len(result.pareto) - SHOWN_FRONT} more points in --json")


def _print_reasons(out: Console, result: PlanResult) -> None:
    if not result.reasons:
        return
    out.print()
    table = t.grid(("candidates that do not fit, by reason (one may have several)", "count", "share"))
    for name, number in sorted(result.reasons.items(), key=lambda item: -item[1]):
        table.add_row(t.printable(name), t.count(number), t.share(number, result.candidates))
    out.print(table)


def _print_nearest(out: Console, result: PlanResult) -> None:
    t.heading(out, "no plan fits")
    nearest = result.nearest
    if nearest is None:
        return
    out.print(f"nearest: {t.plan_label(nearest.plan)}")
    lacking = nearest.peak_memory_bytes - nearest.memory_capacity_bytes
    if lacking > 0:
        peak, capacity = t.memory(nearest.peak_memory_bytes), t.memory(nearest.memory_capacity_bytes)
        out.print(f"it needs {peak} of {capacity}: {t.memory(lacking)} too much per device")
    if nearest.reasons:
        out.print(t.printable(f"reasons: {', '.join(nearest.reasons)}"))
    out.print()
    out.print(term_table(nearest.memory, t.memory, title="memory of the fullest device", show_all=False))


def _print_winner(out: Console, best: Estimate) -> None:
    t.heading(out, "the first plan")
    print_headline(out, best)
    out.print()
    groups = best.time.rollup(1)
    out.print(term_table(groups, t.seconds, title="where the time goes", show_all=False))
