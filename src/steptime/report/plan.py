"""Report of a search: the best plans, the front, reasons of failures, and the winner's time by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steptime.api.request import cluster_noun, device_noun
from steptime.errors import counted
from steptime.options import OPTIONS
from steptime.plan.job import sample_noun
from steptime.plan.plans import MEANING
from steptime.report import estimate
from steptime.report import text as t
from steptime.report.estimate import change_table, memory_line, print_notes, training_line
from steptime.report.text import term_table
from steptime.search.accumulators import telling_points
from steptime.search.planner import PlanResult, longest

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.estimate.result import Estimate

#: Most points of the front to show.
SHOWN_FRONT = 5
#: Largest step time of a shown point of the front, as a multiple of the fastest.
SLOWEST_OF_FRONT = 2.0
#: Most shown changes that make a plan fit, and the text if there is none.
SHOWN_REMEDIES, NO_REMEDY = 2, "no single change of it fits"
#: Default number of plans and of parts of the step in a report; widest frame in columns.
SHOWN_PLANS, SHOWN_SHARES, FRAME = 5, 5, 80
#: Least terminal columns for the last two tables side by side; else one follows the other.
WIDTH_FOR_BOTH = 80


def print_plan_result(
    result: PlanResult, job: Mapping[str, Any], *, top: int | None = None, long: bool = False
) -> None:
    """Write the report to standard output: the recommended plan, other plans, why not another axis.

    Args:
        result: result of a search.
        job: the requested job, with the names of the command line.
        top: plans to show; None: :data:`SHOWN_PLANS`, all in the long report.
        long: also the searched space and its proof, the front of time and memory, reasons of failures, choices left
            out, and the time of the first plan by group.
    """
    out = t.console()
    _print_header(out, result, job)
    if result.plans:
        _print_recommended(out, result)
        _print_plans(out, result, top or (len(result.plans) if long else SHOWN_PLANS), long=long)
        _print_why_not(out, result)
    if long:
        _print_search(out, result)
    if long and result.plans:
        _print_front(out, result)
    if long or not result.feasible:
        _print_reasons(out, result)
    if not result.feasible:
        _print_nearest(out, result)
    if long:
        _print_unsearched(out, result)
    for line in result.advice:
        out.print(t.printable(f"advice: {line}"))
    if result.plans:
        _print_notes(out, result.plans[0])
    if long and result.plans:
        _print_winner(out, result.plans[0])
    if not long:
        out.print(t.printable(f"{result.stop.proof}; --long says more"))


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
    for note in result.notes:
        out.print(t.printable(f"note: {note}"))


#: Column that a bill adds to the table of plans -> part of the bill, and its formatter.
_BILL: Final[Mapping[str, tuple[str, Callable[[Estimate], str]]]] = {
    "done in": ("goodput", lambda e: t.days(e.run["goodput"]["wall_days"])),
    "MWh": ("energy", lambda e: t.count(e.run["energy"]["kWh"] / 1e3)),
    "cost": ("money", lambda e: f"{t.big(e.run['money']['cost'])} {e.run['money']['currency']}"),
}


def _print_recommended(out: Console, result: PlanResult) -> None:
    """Print the first plan in a frame: settings, figures, time by group, and its gain over the second."""
    from rich.panel import Panel

    best = result.plans[0]
    lines = [settings(best.plan), *t.sharded_words(best.plan), figures(best)]
    if best.training:
        lines.append(f"training: {training_line(best)}")
    shares = {name: value / best.step_time_s for name, value in best.time.rollup(1).items() if value > 0}
    largest = dict(sorted(shares.items(), key=lambda item: -item[1])[:SHOWN_SHARES])
    lines.append(bar(list(largest.values()), max(min(out.width, FRAME) - 4, 8), out.encoding))
    lines.append(", ".join(f"{name} {value * 100:.0f} %" for name, value in largest.items()))
    if (why := _why_first(result)) is not None:
        lines.append(why)
    out.print()
    out.print(
        Panel(t.printable("\n".join(lines)), title="recommended", title_align="left", width=min(out.width, FRAME))
    )


def settings(plan: Mapping[str, Any]) -> str:
    """Settings of a plan: degrees, choices other than defaults, ranks inside a fast domain.

    >>> settings({"strategy": "1d", "tp": 8, "pp": 4, "dp": 2, "micro_batch": 1, "placement": {"tp": 8, "dp": 1}})
    'tp 8, pp 4, dp 2, micro-batch 1; in a fast domain: tp 8'
    """
    cells = {**plan_cells(plan), "strategy": "", "inside": ""}
    how = cells.pop("how", "")
    words = [f"{'micro-batch' if name == 'mbs' else name} {value}" for name, value in cells.items() if value]
    inside = ", ".join(f"{axis} {ranks}" for axis, ranks in t.ranks_inside(plan).items())
    return ", ".join([*words, *([how] if how else [])]) + (f"; in a fast domain: {inside}" if inside else "")


def figures(e: Estimate) -> str:
    """Texts of step time with band and MFU, and of memory with the probability of running out."""
    band = "" if e.step_time_band_s is None else ", 90 % in {} .. {}".format(*map(t.seconds, e.step_time_band_s))
    risk = "" if (chance := estimate.chance(e)) is None else f", {chance} to run out"
    return f"step {t.seconds(e.step_time_s)}{band}; MFU {t.percent(e.mfu)}\nmemory {memory_line(e)}{risk}"


def bar(shares: Sequence[float], width: int, encoding: str = "utf-8") -> str:
    """Bar of ``width`` characters for the shares of a whole, each with its own character; the rest is blank.

    >>> bar([0.5, 0.25], 8), bar([0.5, 0.25], 8, "ascii")
    ('████▓▓', '####==')
    """
    letters = "█▓▒░·" if "utf" in encoding.lower() else "#=+-."
    ends = [round(sum(shares[: i + 1]) * width) for i in range(len(shares))]
    return "".join(letter * (end - start) for letter, start, end in zip(letters, [0, *ends], ends, strict=False))


def _why_first(result: PlanResult) -> str | None:
    """Loss of the second plan against the first, by the terms that differ most; None: there is no second."""
    if len(result.plans) < 2:
        return None
    first, second = result.plans[0], result.plans[1]
    more_s = second.step_time_s - first.step_time_s
    name, longer_s = longest(second, first)
    if more_s <= 0 or longer_s <= 0:
        return None
    return f"plan 2 takes {t.share(more_s, first.step_time_s)} longer: {name} {t.seconds(longer_s)} more"


EXTRA: Final = ("band 90 %", "main loss")
"""Columns that are dropped first if there is no room."""


def _print_plans(out: Console, result: PlanResult, top: int, *, long: bool) -> None:
    """Print the plans with degrees and choices as columns; common values are printed once above the table."""
    plans = result.plans[:top]
    cells = [plan_cells(e.plan) for e in plans]
    usual = plan_cells({}, every=True)
    names = [name for name in usual if any(name in row for row in cells)]
    blanks: list[Mapping[str, str]] = [{} if e.plan.get("mesh") else usual for e in plans]
    values = {
        name: [row.get(name, blank.get(name, "")) for row, blank in zip(cells, blanks, strict=True)] for name in names
    }
    same = [f"{name} {column[0]}" for name, column in values.items() if len(set(column)) == 1 and column[0]]
    own = {name: column for name, column in values.items() if len(set(column)) > 1}
    outcomes = _outcomes(plans)
    surely = {name: outcomes[name] for name in outcomes if name not in EXTRA}
    ranks = {"": [str(rank) for rank in range(1, len(plans) + 1)]}
    # A cell of placements may fold to the width of its heading; numbers must not be cut.
    if own and _width(ranks | own | ({"inside": []} if "inside" in own else {}) | surely) > out.width:
        words = {"strategy": "", "how": "", "inside": "inside "}
        worded = [[cell and words.get(name, name) + cell for cell in column] for name, column in own.items()]
        own = {"plan": [" ".join(filter(None, row)) for row in zip(*worded, strict=True)]}
    shown, dropped = ranks | own | outcomes, list[str]()
    folded = {name: [" " * len("inside") * 2] for name in own if name in ("inside", "plan")}
    while (last := list(shown)[-1]) != "step" and _width(shown if last in EXTRA else shown | folded) > out.width:
        dropped.insert(0, last)
        del shown[last]
    table = t.grid(list(shown), left=[i for i, name in enumerate(shown) if name in ("inside", "plan")])
    alike: dict[tuple[str, ...], list[str]] = {}
    for rank, *row in zip(*shown.values(), strict=True):
        alike.setdefault(tuple(row), []).append(rank)
    for cells_of, ranked in alike.items():
        table.add_row(ranked[0], *cells_of)
    out.print()
    if same and len(plans) > 1:
        out.print(t.printable(f"all: {', '.join(same)}"))
    out.print(table)
    if len(alike) < len(plans):
        doubles = ", ".join(f"{each[0]} (+{len(each) - 1} alike)" for each in alike.values() if len(each) > 1)
        out.print(f"plans that differ in nothing shown are one row: {doubles}")
    if dropped and long:
        out.print(f"not shown at {out.width} columns: {', '.join(dropped)} (--json)")
    advice = estimate.advice(result.plans, result.likely_to_fit)
    if advice:
        out.print(t.printable(advice))
    _print_risky(out, result)


def _outcomes(plans: Sequence[Estimate]) -> dict[str, list[str]]:
    """Cells of every plan's results, by heading of the column."""
    unit, scale = t.memory_unit(e.peak_memory_bytes for e in plans)
    cell_of: dict[str, Callable[[Estimate], str]] = {"step": lambda e: t.seconds(e.step_time_s)}
    if any(e.training for e in plans):
        cell_of["days"] = lambda e: t.days(e.training["training_days"])
    cell_of |= {name: text for name, (part, text) in _BILL.items() if part in plans[0].run}
    cell_of |= {"MFU": lambda e: t.percent(e.mfu), unit: lambda e: f"{e.peak_memory_bytes / scale:.1f}"}
    if any(estimate.chance(e) is not None for e in plans):
        cell_of["P(oom)"] = lambda e: estimate.chance(e) or ""
    if any(e.step_time_band_s is not None for e in plans):
        cell_of["band 90 %"] = lambda e: " .. ".join(map(t.seconds, e.step_time_band_s or (math.nan, math.nan)))
    cell_of["main loss"] = lambda e: t.printable(t.main_loss(e.time))
    return {name: [text(e) for e in plans] for name, text in cell_of.items()}


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """Width of a table in characters."""
    return sum(max(map(len, [name, *cells])) + 2 for name, cells in columns.items()) - 2


def plan_cells(plan: Mapping[str, Any], *, every: bool = False) -> dict[str, str]:
    """Degrees and choices of a plan by the heading of their column, in order.

    Args:
        plan: record of the plan.
        every: include default values.

    >>> plan_cells({"tp": 8, "dp": 2, "zero": 3, "placement": {"tp": 8}})
    {'tp': '8', 'dp': '2', 'mbs': '1', 'zero': '3', 'inside': 'tp8'}
    >>> plan_cells({"strategy": "shardings", "mesh": {"data": 2, "model": 8}})
    {'strategy': 'shardings', 'how': 'mesh data=2 x model=8'}
    """
    if plan.get("mesh"):
        return {"strategy": str(plan["strategy"]), "how": f"mesh {t.mesh_words(plan)}"}
    out = {"strategy": str(plan.get("strategy", ""))}
    degrees = [name for name in t.DEGREES if every or plan.get(name, 1) != 1 or name in t.ALWAYS]
    out |= {t.SHORT.get(name, name): t.number(plan.get(name, 1)) for name in degrees}
    labels = {name: str(row.label) for name, row in OPTIONS.items() if row.label is not None}
    out |= {labels[name]: t.option_text(plan, name) for name in (labels if every else t.unusual_options(plan))}
    out |= {"how": ", ".join(t.unusual(plan))}
    out |= {"inside": " ".join(f"{axis}{ranks}" for axis, ranks in t.ranks_inside(plan).items())}
    return {name: text for name, text in out.items() if text or every}


def _print_why_not(out: Console, result: PlanResult) -> None:
    """Print one line on each axis that the first plan does not use."""
    if not result.why_not:
        return
    out.print()
    first_s = result.plans[0].step_time_s
    for each in result.why_not:
        said = "" if each.step_time_s is None else f"{each.step_time_s / first_s:.2f} times as long, "
        out.print(t.printable(f"why not {each.change}: {said}{each.because}".rstrip(", ")))


def _print_risky(out: Console, result: PlanResult) -> None:
    """Print the fastest risky plan that is faster than the first, and changes that make it fit, if there is room."""
    if not result.risky or result.oom_limit is None:
        return
    each = result.risky[0]
    fits = [f"{one.change} ({t.seconds(one.step_time_s)})" for one in each.remedies[:SHOWN_REMEDIES]]
    risk = f"{t.seconds(each.estimate.step_time_s)}, P(oom) {estimate.chance(each.estimate)}"
    what = f"fits with {' or '.join(fits)}" if fits else NO_REMEDY
    out.print(t.printable(f"faster, above --oom-limit: {t.plan_label(each.estimate.plan)}, {risk}; {what}"))


def _print_front(out: Console, result: PlanResult) -> None:
    """Print some points of the front in one line, among those that are not much slower."""
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
    """Print one line on choices kept at one value, and on those that make the first plan faster."""
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
    shortage_bytes = nearest.peak_memory_bytes - nearest.memory_capacity_bytes
    if shortage_bytes > 0:
        peak, capacity = t.memory(nearest.peak_memory_bytes), t.memory(nearest.memory_capacity_bytes)
        out.print(f"it needs {peak} of {capacity}: {t.memory(shortage_bytes)} too much per device")
    elif (chance := estimate.chance_line(nearest)) is not None:
        out.print(f"P(oom): {chance}")
    if nearest.reasons:
        out.print(t.printable(f"reasons: {', '.join(nearest.reasons)}"))
    out.print()
    out.print(term_table(nearest.memory, t.memory, title="memory of the fullest device", show_all=False))


def _print_search(out: Console, result: PlanResult) -> None:
    """Print the searched space, the time of the search, and its proof."""
    stop, many = result.stop, counted(result.candidates, "candidate", t.count(result.candidates))
    out.print()
    out.print(f"{many}, {t.count(result.feasible)} feasible; {stop.reason} in {t.seconds(stop.elapsed_cpu_s)} CPU")
    out.print(t.printable(stop.proof))


def _print_notes(out: Console, best: Estimate) -> None:
    note = t.note_on(best.plan)
    if note:
        out.print(note)
    print_notes(out, best)


def _print_winner(out: Console, best: Estimate) -> None:
    """Print the terms of the first plan's time, and the changes of it."""
    from rich.table import Table

    low, high = best.step_time_bracket_s
    words = [f"the first plan: {t.seconds(best.step_time_s)} (bracket {t.seconds(low)} to {t.seconds(high)})"]
    words += [f"MFU {t.percent(best.mfu)}", memory_line(best)]
    t.heading(out, t.printable(", ".join(words)))
    out.print(f"band {t.band_text(best)}")
    if best.training:
        out.print(f"training: {training_line(best)}")
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
