"""The report of a collective: its algorithms at one size, their parts, and time over size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.report import text as t
from steptime.report.figure import drawn
from steptime.units import format_bytes, format_si

if TYPE_CHECKING:
    from steptime.simulation.collectives.times import Collective


def print_collective(found: Collective, plot: Path | None = None) -> None:
    """Write the report to standard output; ``plot``: file with a picture of it, to be named."""
    out = t.console()
    domains = found.ranks // found.inside
    where = f"{found.inside} in each of {domains} fast domains" if domains > 1 else "in one fast domain"
    what = f"{found.operation} of {format_bytes(found.size_bytes)} over {found.ranks} ranks of {found.cluster}"
    out.print(t.printable(f"{what}, {where}"), style="bold")
    out.print()
    table = t.grid(("algorithm", "time", "algbw", "busbw"))
    for one in found.times:
        rates = (format_si(one.algorithm_Bps, "B/s"), format_si(one.bus_Bps, "B/s"))
        table.add_row(one.algorithm, t.seconds(one.time_s), *rates)
    out.print(table)
    chosen = next((one.chosen for one in found.times if one.chosen), "")
    if chosen:
        t.indented(out, f"{found.library}: {chosen}; {found.basis}", by=0)
    _print_parts(out, found)
    _print_sizes(out, found)
    if plot is not None:
        out.print(t.printable(f"\nDrawn in {plot}"), soft_wrap=True)


def _print_parts(out: Any, found: Collective) -> None:
    """Latency, transfer and additions of the textbook's algorithms."""
    timed = [one for one in found.times if one.latency_s is not None]
    if not timed:
        return
    t.heading(out, "Parts, on the links of the catalogue")
    table = t.grid(("algorithm", "hops", "bytes", "additions"))
    for one in timed:
        parts = (one.latency_s, one.transfer_s, one.reduction_s)
        table.add_row(one.algorithm, *(t.seconds(part) for part in parts if part is not None))
    out.print(table)
    inner = f"alpha {t.seconds(found.inner_hop_s)}, 1/beta {format_si(found.inner_Bps, 'B/s')} inside a domain"
    outer = f"{t.seconds(found.outer_hop_s)}, {format_si(found.outer_Bps, 'B/s')} out of one"
    gamma = f"1/gamma {format_si(1 / found.reduction_s_per_byte, 'B/s')}: a third of what device memory streams"
    shown = (inner, outer, gamma) if found.ranks > found.inside else (inner, gamma)
    t.indented(out, "; ".join(shown), by=0)


def _print_sizes(out: Any, found: Collective) -> None:
    """Time of every algorithm over the size, with what the library chooses."""
    if len(found.sizes_bytes) < 2:
        return
    t.heading(out, "Time over size")
    choice = (f"{found.library} chooses",) if found.chosen else ()
    table = t.grid(("size", *found.seconds, *choice), left=(len(found.seconds) + 1,))
    for i, size in enumerate(found.sizes_bytes):
        times = [t.seconds(values[i]) for values in found.seconds.values()]
        table.add_row(format_bytes(size), *times, *([found.chosen[i]] if found.chosen else []))
    out.print(table)


def write_plot(found: Collective, path: Path) -> None:
    """Time of every algorithm over the size, on logarithmic axes.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    with drawn(path) as figure:
        axes = figure.add_subplot()
        for name, seconds in found.seconds.items():
            axes.plot(found.sizes_bytes, seconds, label=name)
        title = f"{found.operation}, {found.ranks} ranks of {found.cluster}"
        axes.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel="time (s)", title=t.printable(title))
        axes.legend()
