"""The report of one estimate: headline, where time and memory go, what would change it, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptime.api.nouns import device_noun
from steptime.errors import counted
from steptime.estimate.result import Estimate
from steptime.plan.job import sample_noun
from steptime.report import risk
from steptime.report import text as t
from steptime.report.tree import term_table
from steptime.units import format_si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Constants of the weakest kind to show unless everything is wanted.
SHOWN_CONSTANTS = 8


def print_estimate(estimate: Estimate, *, show_all: bool = False, explain: bool = False) -> None:
    """Write the report to standard output; with ``explain``, how each term was computed instead of the tree."""
    out = t.console()
    print_headline(out, estimate)
    if explain:
        from steptime.report.explain import print_details

        print_details(out, estimate.details)
        return
    print_terms(out, estimate, show_all=show_all)
    _print_what_if(out, estimate)
    _print_provenance(out, estimate, show_all=show_all)


def print_headline(out: Console, e: Estimate) -> None:
    """What the step costs and whether it fits, one line each."""
    job = e.workload
    words = [e.provenance.model, f"on {e.provenance.cluster}"]
    words += [counted(job["gpus"], _noun(e), t.count(job["gpus"]))] if "gpus" in job else []
    sizes = ("global_batch", "seq_len") if _has_tokens(job) else ("global_batch",)
    words += [f"{key.replace('_', ' ')} {t.count(job[key])}" for key in sizes if key in job]
    words += [t.number(job[key]) for key in ("dtype", "optimizer") if key in job]
    words += [t.lora_label(job["lora"])] if "lora" in job else []
    out.print(t.printable(", ".join([*words, f"mode {e.provenance.mode}"])), style="bold")
    out.print(f"plan: {t.plan_label(e.plan)}")
    if t.note_on(e.plan):
        out.print(t.note_on(e.plan))
    out.print()
    for name, value in _headline_rows(e):
        out.print(f"{name:<16}{value}", soft_wrap=False)
    print_notes(out, e)
    for line in (*risk.failings(e), risk.warning(e)):
        if line:
            out.print(t.printable(line))


def print_notes(out: Console, e: Estimate) -> None:
    """What to know before using the numbers, one line each."""
    for note in e.notes:
        out.print(t.printable(f"note: {note}"))


def _noun(e: Estimate) -> str:
    return device_noun(e.provenance.device, e.provenance.is_gpu)


def _has_tokens(job: Mapping[str, Any]) -> bool:
    return sample_noun(job.get("seq_len", 0)) != "sample"


def _headline_rows(e: Estimate) -> list[tuple[str, str]]:
    low, high = e.step_time_bracket_s
    fits = "yes" if e.feasible else "no: " + (", ".join(e.reasons) or "see the memory below")
    chance = risk.chance_line(e)
    counted_as = "tokens" if _has_tokens(e.workload) else "samples"
    return [
        ("framework", t.printable(e.provenance.framework)),
        ("step time", t.seconds(e.step_time_s)),
        ("bracket", f"{t.seconds(low)} (all overlapped) to {t.seconds(high)} (nothing overlapped)"),
        ("band", t.band_text(e)),
        ("MFU, HFU", f"{t.percent(e.mfu)}, {t.percent(e.hfu)}"),
        (f"{counted_as}/s/{_noun(e)}", t.count(e.tokens_per_s_per_gpu)),
        ("model FLOPs", f"{format_si(e.model_flops, 'FLOP')} per step"),
        ("peak memory", memory_line(e)),
        *([] if chance is None else [("P(oom)", chance)]),
        ("feasible", t.printable(fits)),
        ("bottleneck", t.printable(e.bottleneck)),
    ]


def memory_line(e: Estimate) -> str:
    """Peak memory, what there is, and the share."""
    used = f"{t.memory(e.peak_memory_bytes)} of {t.memory(e.memory_capacity_bytes)}"
    return f"{used} ({t.share(e.peak_memory_bytes, e.memory_capacity_bytes)})"


def print_terms(out: Console, e: Estimate, *, show_all: bool) -> None:
    """Where the time and the memory go, and what hides behind something else."""
    out.print()
    out.print(term_table(e.time, t.seconds, title="time, exposed, per step", show_all=show_all))
    out.print()
    out.print(term_table(e.memory, t.memory, title="memory of the fullest device", show_all=show_all))
    hidden = e.overlapped.without_zeros()
    if hidden:
        out.print()
        out.print(term_table(hidden, t.seconds, title="overlapped (hidden, not in the step time)", show_all=show_all))


def change_table(e: Estimate) -> Table | None:
    """What would change the step time, most first; None where nothing is known."""
    known = {name: value for name, value in e.what_if.items() if math.isfinite(value)}
    if not known:
        return None
    table = t.grid(("what would change it", "step", "change"))
    for name, value in sorted(known.items(), key=lambda item: item[1]):
        change = (value - e.step_time_s) / e.step_time_s if e.step_time_s else math.nan
        table.add_row(t.printable(name.replace("_", " ")), t.seconds(value), t.change(change))
    return table


def _print_what_if(out: Console, e: Estimate) -> None:
    table = change_table(e)
    if table is not None:
        out.print()
        out.print(table)


def _print_provenance(out: Console, e: Estimate, *, show_all: bool) -> None:
    p = e.provenance
    t.heading(out, t.printable(f"weakest constants: {p.weakest_kind} (steptime {p.steptime_version})"))
    out.print(t.printable(f"model: {p.model_source}; device: {p.device}"))
    chosen = [(n, c) for n, c in p.constants.items() if show_all or c.get("kind") == p.weakest_kind]
    shown = chosen if show_all else chosen[:SHOWN_CONSTANTS]
    notes: dict[str, int] = {}
    table = t.grid(("constant", "value", "kind", "source"), left=(0, 2, 3))
    for name, constant in shown:
        note = notes.setdefault(str(constant.get("source", "")), len(notes) + 1)
        kind = t.printable(str(constant.get("kind", "")))
        table.add_row(t.printable(name), t.number(constant.get("value", "")), kind, f"[{note}]")
    if shown:
        out.print(table)
    for source, note in notes.items():
        out.print(t.printable(f"[{note}] {source}"))
    if len(p.constants) > len(shown):
        out.print(f"{len(p.constants) - len(shown)} more constants with --all")
    for assumption in p.assumptions:
        out.print(t.printable(f"assumed: {assumption}"))
