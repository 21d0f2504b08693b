"""Report of the time of an iteration."""

from __future__ import annotations

from steptime.report import text as t
from steptime_lab.iterate.run import Iteration


def print_iteration(found: Iteration) -> None:
    """Print one line for each kernel, in order."""
    out = t.console()
    out.print(
        t.printable(f"{found.title}: {found.matrix}, {found.rows:,} rows, {found.nonzeros:,} elements"), style="bold"
    )
    over = "" if found.nodes == 1 else f" on the fullest of {found.nodes:,} nodes, which needs {found.halo_rows:,} of x"
    band = f"{found.error:.1%} mean error on structures that the profile has not seen"
    out.print(t.printable(f"{t.seconds(found.time_s)} an iteration{over} ({band})"))
    out.print()
    columns = ("kernel", "arrays", "time", "share", "of memory") + (("sent",) if found.nodes > 1 else ())
    table = t.grid(columns, left=(0, 1))
    for kernel in found.kernels:
        share = f"{100 * kernel.time_s / found.time_s:.1f} %"
        row = [kernel.op, t.printable(kernel.arrays), t.seconds(kernel.time_s), share, t.memory(kernel.memory_bytes)]
        table.add_row(*row, *([t.seconds(kernel.sent_s)] if found.nodes > 1 else []))
    out.print(table)
    out.print(t.printable(f"profile of {found.processor}: {found.provenance}"))
