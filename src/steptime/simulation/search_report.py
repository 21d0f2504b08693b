"""A searched schedule next to the named ones, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.table import Table

from steptime.report import text as t
from steptime.simulation.search import FoundSchedule
from steptime.simulation.synthesis import Progress

EVERY_S = 0.2
"""Seconds between two lines of progress."""


@contextmanager
def progress_line() -> Iterator[Progress]:
    """A line of progress on standard error, if it is a terminal."""
    shown = sys.stderr.isatty()
    last_s = 0.0

    def show(passes: int, span_s: float, bound_s: float) -> None:
        nonlocal last_s
        if shown and monotonic() - last_s > EVERY_S:
            last_s = monotonic()
            text = f"{passes:,} passes timed; best {span_s:g} s, bound {bound_s:g} s; Ctrl-C: stop here"
            print(f"\r{text:79}", end="", file=sys.stderr, flush=True)

    yield show
    if shown:
        print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)


def print_found(found: FoundSchedule) -> None:
    """Print the named schedules, the found one, the bound and the gap."""
    out, table = t.console(), Table(box=None, pad_edge=False)
    for number, head in enumerate(("schedule", "chunks", "step to step", "held", "")):
        table.add_column(head, justify="right" if 0 < number < 4 else "left", no_wrap=not number)
    for each in found.named:
        notes = ["does not fit"] * (not each.fits) + [f"{each.copies} copies"] * (each.copies > 1)
        table.add_row(each.name, str(each.chunks), t.seconds(each.span_s), f"{each.held:g}", ", ".join(notes))
    held = max(found.found.held)
    table.add_row("found", str(found.chunks), t.seconds(found.found.span_s), f"{held:g}", found.found.placement)
    table.add_row("bound", "", t.seconds(found.bound_s), "", "")
    out.print(f"{found.ranks} ranks, {found.micro_batches} micro-batches")
    out.print(table)
    best = found.best_named
    if best is not None:
        faster = 1 - found.found.span_s / best.span_s
        out.print(f"found is {100 * max(faster, 0.0):.2f} % faster than {best.name}, made from {found.found.began}")
    out.print(f"gap to the bound: {100 * found.gap:.2f} %; {found.found.stop}")
    out.print("step to step: longest time from a rank's first pass to its last;")
    out.print("held: micro-batches whose activations the fullest rank holds")
