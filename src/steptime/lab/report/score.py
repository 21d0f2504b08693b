"""Reports of scores and of fits: tables of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steptime.errors import counted
from steptime.hardware.profiles import FabricProfile
from steptime.hardware.records import Curve
from steptime.lab.report.error_tables import error_table, print_doubts, print_groups, print_skipped
from steptime.report.text import change, console, grid, heading, indented, percent, printable

ERRORS: Final = ("median_ape", "mape", "p90_ape", "bias", "coverage90")
TITLES: Final = {
    "by_op": "By operator", "by_gpu": "By GPU", "by_source": "By source", "by_curve": "By origin of the curve",
}  # fmt: skip
MOST: Final = 20
"""Rows of a table, the groups with the most measurements; --json has all."""


def print_score(score: Mapping[str, Any]) -> None:
    """Counts, reasons and errors, overall and by group."""
    screen = console()
    screen.print(f"{score['scored']} of {counted(score['rows'], 'row')} scored")
    for reason, number in sorted(score["skipped"].items(), key=lambda item: (-item[1], item[0])):
        indented(screen, f"{number} skipped: {reason}", by=2)
        if reason in score.get("hints", {}):
            indented(screen, printable(score["hints"][reason]), by=6)
    if not score["scored"]:
        return
    heading(screen, "Errors of predicted against measured time")
    screen.print(error_table({"all": score["time"] | {"rows": score["scored"]}}, ERRORS))
    for grouping, title in TITLES.items():
        print_groups(screen, title, grouping, score, ERRORS, MOST)
    screen.print("\nIn band: share of the measurements inside the predicted 90 % band.", soft_wrap=True)


def print_stage_score(score: Mapping[str, Any]) -> None:
    """Counts, reasons and errors of each time of a stage."""
    screen = console()
    screen.print(f"{score['scored']} of {counted(score['rows'], 'row')} scored")
    print_skipped(screen, score)
    print_doubts(screen, score)
    stated = {name: errors for name, errors in score["stages"].items() if errors["rows"]}
    if stated:
        heading(screen, "Errors of predicted against measured times of stages")
        screen.print(error_table({**stated, "T_F, T_B, T_W": score["passes"]}, ERRORS[:-1]))


def print_curves(
    profiles: Mapping[str, Sequence[Curve]], fabrics: Sequence[FabricProfile],
    left_out: Mapping[str, Mapping[str, int]], out: Path,
) -> None:  # fmt: skip
    """What was fitted, with errors on shapes that the fit did not see, and rows that nothing was fitted to."""
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
