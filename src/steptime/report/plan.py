"""The report of a search: the best plans, the front, what failed and why, and where the winner's time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.api.request import cluster_noun, device_noun
from steptime.errors import counted
from steptime.plan.job import sample_noun
from steptime.plan.plans import MEANING
from steptime.report import estimate
from steptime.report import text as t
from steptime.report.estimate import change_table, days, memory_line, print_notes, training_line
from steptime.report.text import term_table
from steptime.search.accumulators import telling_points
from steptime.search.planner import PlanResult

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.estimate.result import Estimate

#: Points of the front to show.
SHOWN_FRONT = 5
#: They take at most this many times the fastest step.
SLOWEST_OF_FRONT = 2.0
#: Changes of a plan that make it fit to show, and what to say without one.
SHOWN_REMEDIES, NO_REMEDY = 2, "no single change of it fits"
#: Columns of the terminal from which the main loss and the band have room next to a plan on one line.
WIDTH_FOR_LOSS, WIDTH_FOR_BAND = 128, 92
#: Columns of the terminal from which the two last tables have room next to each other; below, one follows the other.
WIDTH_FOR_BOTH = 80


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
    _print_unsearched(out, result)
    for line in result.advice:
        out.print(t.printable(f"advice: {line}"))
    if result.plans:
        _print_winner(out, result.plans[0])


def _print_header(out: Console, result: PlanResult, job: Mapping[str, Any]) -> None:
    first = result.plans[0] if result.plans else result.nearest
    mode = first.provenance.mode if first else job.get("mode") or "corrected"
    noun = device_noun(first.provenance.device, first.provenance.is_gpu) if first else cluster_noun(job["cluster"])
    gpus, batch = t.count(job["gpus"]), t.count(job["global_batch"])
    work = first.workload if first else result.workload
    sample = work.get("sample") or sample_noun(work.get("seq_len", 0))
    length = f" of {t.count(work['seq_len'])} tokens" if "seq_len" in work and sample != "sample" else ""
    words = [
        f"{job['model']} on {job['cluster']}: {counted(job['gpus'], noun, gpus)}",
        f"global batch {counted(job['global_batch'], sample, batch)}{length}",
        *([t.lora_label(work["lora"])] if "lora" in work else []),
        f"mode {mode}",
    ]
    framework = first.provenance.framework if first else work.get("framework", job.get("framework"))
    out.print(t.printable(", ".join([*words, f"framework {framework}"] if framework else words)), style="bold")
    stop = result.stop
    counts = (
        f"{counted(result.candidates, 'candidate', t.count(result.candidates))}, {t.count(result.feasible)} feasible"
    )
    out.print(f"{counts}; {stop.reason} in {t.seconds(stop.elapsed_cpu_s)} CPU")
    out.print(t.printable(stop.proof))
    for note in result.notes:
        out.print(t.printable(f"note: {note}"))


#: What a bill adds to the table of plans -> its text.
_BILL: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "done in": lambda run: days(run["goodput"]["wall_days"]),
    "MWh": lambda run: t.count(run["energy"]["kWh"] / 1e3),
    "cost": lambda run: f"{t.big(run['money']['cost'])} {run['money']['currency']}",
}


def _billed(result: PlanResult) -> list[str]:
    """Columns of the bill that the plans have."""
    run = result.plans[0].run
    return [name for name, part in (("done in", "goodput"), ("MWh", "energy"), ("cost", "money")) if part in run]


def _print_plans(out: Console, result: PlanResult) -> None:
    banded = any(e.step_time_band_s is not None for e in result.plans)
    loss, band = out.width >= WIDTH_FOR_LOSS, banded and out.width >= WIDTH_FOR_BAND
    timed = any(e.training for e in result.plans)
    risky = any(estimate.chance(e) is not None for e in result.plans)
    unit, scale = t.memory_unit(e.peak_memory_bytes for e in result.plans)
    columns = [
        "",
        "plan",
        "step",
        *(["days"] if timed else []),
        *_billed(result),
        *(["band 90 %"] if band else []),
        "MFU",
        unit,
        *(["P(oom)"] if risky else []),
    ]
    table = t.grid([*columns, "main loss"] if loss else columns, left=(1, len(columns)))
    rows: dict[tuple[str, ...], list[str]] = {}  # plans may differ in nothing that is shown; --json has them all
    for rank, e in enumerate(result.plans, 1):
        low, high = e.step_time_band_s or (math.nan, math.nan)
        row = [t.plan_label(e.plan), t.seconds(e.step_time_s)]
        row += [days(e.training["training_days"])] if timed else []
        row += [_BILL[name](e.run) for name in _billed(result)]
        row += [f"{t.seconds(low)} .. {t.seconds(high)}"] if band else []
        row += [t.percent(e.mfu), f"{e.peak_memory_bytes / scale:.1f}", *([estimate.chance(e) or ""] if risky else [])]
        row += [t.printable(t.main_loss(e.time))] if loss else []
        rows.setdefault(tuple(row), []).append(str(rank))
    for (label, *others), ranks in rows.items():
        table.add_row(ranks[0], f"{label} (+{len(ranks) - 1} alike)" if len(ranks) > 1 else label, *others)
    out.print()
    out.print(table)
    hidden = [*([] if band or not banded else ["band 90 %"]), *([] if loss else ["main loss"])]
    if hidden:
        out.print(f"not shown at {out.width} columns: {', '.join(hidden)} (--json)")
    advice = estimate.advice(result.plans, result.likely_to_fit)
    if advice:
        out.print(t.printable(advice))
    _print_risky(out, result)


def _print_risky(out: Console, result: PlanResult) -> None:
    """The fastest plan that would be before the first, and the changes that make it fit, as far as there is room."""
    if not result.risky or result.oom_limit is None:
        return
    each = result.risky[0]
    fits = [f"{one.change} ({t.seconds(one.step_time_s)})" for one in each.remedies[:SHOWN_REMEDIES]]
    risk = f"{t.seconds(each.estimate.step_time_s)}, P(oom) {estimate.chance(each.estimate)}"
    what = f"fits with {' or '.join(fits)}" if fits else NO_REMEDY
    out.print(t.printable(f"faster, above --oom-limit: {t.plan_label(each.estimate.plan)}, {risk}; {what}"))


def _print_front(out: Console, result: PlanResult) -> None:
    """Some points of the front in one line, those that tell most of what is not much slower."""
    points = [p for p in result.pareto if p["step_time_s"] <= SLOWEST_OF_FRONT * result.pareto[0]["step_time_s"]]
    if len(points) < 2:
        return
    time_s, memory = (np.array([p[name] for p in points]) for name in ("step_time_s", "peak_memory_bytes"))
    chosen = telling_points(time_s, memory, SHOWN_FRONT)
    unit, scale = t.memory_unit(memory)
    words = [f"{t.seconds(time_s[i])} {memory[i] / scale:.1f} {unit}" for i in chosen]
    rest = f" ({len(result.pareto)} points in --json)" if len(result.pareto) > len(chosen) else ""
    out.print()
    out.print(f"less memory for more time: {', '.join(words)}{rest}")


def _print_unsearched(out: Console, result: PlanResult) -> None:
    """One line on what the search kept at one value, and which of it makes the first plan faster."""
    left, faster = result.unsearched.names, result.unsearched.faster
    if not left:
        return
    gains = ", ".join(f"{one.change} {t.seconds(one.step_time_s)}" for one in faster)
    out.print()
    out.print(
        t.printable(f"not searched: {', '.join(left)}{f'; the first plan with {gains} (--fix)' if gains else ''}")
    )


def _print_reasons(out: Console, result: PlanResult) -> None:
    if not result.reasons:
        return
    out.print()
    table = t.grid(("not feasible (one candidate may have several reasons)", "count", "share"))
    for name, number in sorted(result.reasons.items(), key=lambda item: -item[1]):
        meaning = MEANING.get(name)
        label = f"{name}: {meaning}" if meaning else name
        table.add_row(t.printable(label), t.count(number), t.share(number, result.candidates))
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
    elif (chance := estimate.chance_line(nearest)) is not None:
        out.print(f"P(oom): {chance}")
    if nearest.reasons:
        out.print(t.printable(f"reasons: {', '.join(nearest.reasons)}"))
    out.print()
    out.print(term_table(nearest.memory, t.memory, title="memory of the fullest device", show_all=False))


def _print_winner(out: Console, best: Estimate) -> None:
    """Where the time of the first plan goes, next to what would change it."""
    from rich.table import Table

    low, high = best.step_time_bracket_s
    words = [f"the first plan: {t.seconds(best.step_time_s)} (bracket {t.seconds(low)} to {t.seconds(high)})"]
    words += [f"MFU {t.percent(best.mfu)}", memory_line(best)]
    t.heading(out, t.printable(", ".join(words)))
    out.print(f"band {t.band_text(best)}")
    if best.training:
        out.print(f"training: {training_line(best)}")
    note = t.note_on(best.plan)
    if note:
        out.print(note)
    print_notes(out, best)
    out.print()
    loss = term_table(best.time.rollup(1), t.seconds, title="where the time goes", show_all=False)
    changes = change_table(best)
    if changes is None or out.width < WIDTH_FOR_BOTH:
        out.print(loss)
        if changes is not None:
            out.print()
            out.print(changes)
        return
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(loss, changes)
    out.print(both)
