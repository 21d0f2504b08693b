"""Report of ways to make batches."""

from __future__ import annotations

from steptime.cost.lengths import attended_length, mean_of
from steptime.jobs.batches.run import Batches
from steptime.report import text as t
from steptime.report.estimate import shortfall


def print_batches(found: Batches) -> None:
    """Print one line for each way: feasible ways first, by useful tokens per second."""
    own, out = found.lengths, t.console()
    text = (
        f"documents of {mean_of(own.shares):,.0f} tokens in the mean, as many pairs of attention as "
        f"{attended_length(own.shares):,.0f} each; sequences of {own.longest:,} at most"
    )
    out.print(t.printable(text))
    for note in found.notes:
        out.print(t.printable(f"note: {note}"))
    if not any(way.feasible for way in found.ways):
        out.print("no way is feasible: the reasons are below", style="bold")
    out.print()
    table = t.grid(("batches", "", "useful", "waits", "step", "useful tokens/s"), left=(0, 1))
    for way in found.ways:
        useful, waits = f"{100 * way.useful_share:.1f} %", f"{100 * (way.slowest - 1):.1f} %"
        rate = f"{way.useful_tokens_per_s:,.0f}"
        table.add_row(way.name, t.printable(way.what), useful, waits, t.seconds(way.step_time_s), rate)
    out.print(table)
    for way in found.ways:
        if way.name == "bucket":
            out.print(t.printable(f"buckets: {', '.join(f'{top:,}' for top in way.tops)} tokens"))
        if way.context_load > 1.005:
            out.print(t.printable(f"context ranks: {way.name} gives the fullest {way.context_load:.2f} of the mean"))
    for why, names in _failing(found).items():
        out.print(t.printable(f"not feasible: {', '.join(names)}: {why}"))


def _failing(found: Batches) -> dict[str, list[str]]:
    """Reason -> ways that are not feasible for it."""
    out: dict[str, list[str]] = {}
    for way in found.ways:
        for name in way.reasons:
            why = shortfall(name, way.peak_memory_bytes, found.memory_capacity_bytes)
            out.setdefault(why, []).append(way.name)
    return out
