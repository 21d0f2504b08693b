"""The report of a model without a machine: parameters, FLOPs, bytes."""

from __future__ import annotations

from typing import Any

from steptime.report import text as t
from steptime.report.tree import term_table
from steptime.units import format_si


def print_ledger(ledger: Any) -> None:
    """Write the ledger to standard output."""
    out = t.console()
    out.print(t.printable(f"{ledger.name} ({ledger.family})"), style="bold")
    out.print(t.printable(f"source: {ledger.source}"))
    parts = (
        ("parameters", ledger.parameters, t.big),
        (f"FLOPs, forward, one {ledger.sample}", ledger.flops, lambda value: format_si(value, "FLOP")),
        ("bytes of the states", ledger.bytes, t.memory),
    )
    for title, terms, unit in parts:
        out.print()
        out.print(term_table(terms, unit, title=title, show_all=False))
    for note in ledger.notes:
        out.print(t.printable(f"note: {note}"))
