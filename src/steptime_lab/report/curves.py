"""Report of curves fitted to kernels and fabrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from steptime.errors import counted
from steptime.hardware.profiles import FabricProfile
from steptime.hardware.records import Curve
from steptime.report.text import change, console, grid, heading, indented, percent, printable


def print_curves(
    profiles: Mapping[str, Sequence[Curve]],
    fabrics: Sequence[FabricProfile],
    left_out: Mapping[str, Mapping[str, int]],
    out: Path,
) -> None:
    """Print the fitted curves with errors on shapes held out of the fit, and the rows that nothing was fitted to."""
    screen = console()
    screen.print("Errors on shapes that the fit did not see")
    if profiles:
        table = grid(("device", "family", "dtype", "timer", "points", "median", "mean", "bias"), left=(0, 1, 2, 3))
        for device, curves in sorted(profiles.items()):
            for c in sorted(curves, key=lambda c: (c.family, c.dtype, c.timer)):
                table.add_row(device, c.family, c.dtype, c.timer, str(c.points), *_held_out(c))
        screen.print(table)
    if fabrics:
        heading(screen, "Fabrics")
        table = grid(("fabric", "points", "median", "mean", "bias"))
        for fabric in fabrics:
            table.add_row(fabric.name, str(fabric.points), *_held_out(fabric))
        screen.print(table)
    if any(left_out.values()):
        screen.print()
    for kind, reasons in left_out.items():
        for reason, rows in reasons.items():
            indented(screen, f"{counted(rows, 'row')} of {kind} left out: {reason}", by=0)
    screen.print(printable(f"\nWritten to {out}"), soft_wrap=True)


def _held_out(fit: Curve | FabricProfile) -> list[str]:
    return [percent(fit.median_ape), percent(fit.mean_ape), change(fit.bias)]
