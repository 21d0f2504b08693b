"""The report of a calibration: rates, curves with their errors, and measured against predicted times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.errors import UserError
from steptime.measure.machine.profile import Fitted, Predictor
from steptime.report.figure import drawn
from steptime.report.text import console, grid, heading, indented, percent, printable, seconds
from steptime.units import format_si

#: Size of the text plot in characters.
COLUMNS: Final = 60
ROWS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measurement and its prediction by the fit."""

    family: str
    """Operator or collective, with its dtype or ranks."""
    shape: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


def residuals_of(fitted: Fitted) -> list[Residual]:
    """Every measurement that a curve covers (the fit has seen these; its cross-validated errors are in the curves)."""
    predictor = Predictor(fitted.curves)
    out = []
    for one in fitted.operators:
        shape = " ".join(f"{name}={value}" for name, value in one.task.shape.items())
        try:
            predicted = predictor.seconds(one.task)
        except UserError:
            continue
        family = f"{one.task.kind} {one.task.dtype}"
        out.append(Residual(family=family, shape=shape, measured_s=one.seconds, predicted_s=predicted))
    for timed in fitted.collectives:
        try:
            predicted = predictor.collective_s(timed.kind, timed.axis, timed.ranks, timed.size_bytes)
        except UserError:
            continue
        family, shape = f"{timed.kind} {timed.axis} {timed.ranks}", f"bytes={timed.size_bytes}"
        out.append(Residual(family=family, shape=shape, measured_s=timed.seconds, predicted_s=predicted))
    return out


def as_document(fitted: Fitted, residuals: Sequence[Residual]) -> dict[str, Any]:
    """The content of the JSON document."""
    noise = fitted.noise if math.isfinite(fitted.noise) else None
    return {
        "host": fitted.host,
        "device": fitted.device,
        "levels": fitted.levels,
        "curves": fitted.curves,
        "operators": len(fitted.operators),
        "collectives": len(fitted.collectives),
        "noise": noise,
        "rejected_samples": sum(one.rejected for one in fitted.operators),
        "skipped": fitted.skipped,
        "residuals": [
            {"family": r.family, "shape": r.shape, "measured_s": r.measured_s, "predicted_s": r.predicted_s}
            for r in residuals
        ],
    }


def print_report(fitted: Fitted, residuals: Sequence[Residual], out: Path) -> None:
    """Prints rates, curves and a plot for people."""
    screen, device = console(), fitted.device
    screen.print(printable(f"{fitted.host.title}, torch {fitted.host.torch}"), style="bold")
    noise = percent(fitted.noise) if math.isfinite(fitted.noise) else "unknown, one round"
    screen.print(
        f"{len(fitted.operators)} operators and {len(fitted.collectives)} collectives; noise between rounds {noise}"
    )
    heading(screen, "Sustained rates")
    table = grid(("", "sustained", "of best seen"))
    for dtype, peak in device.matrix_flops_per_s.items():
        rate = peak * device.matrix_efficiency
        table.add_row(f"matrix {dtype}", format_si(rate, "FLOP/s"), percent(device.matrix_efficiency))
    for dtype, peak in device.vector_flops_per_s.items():
        rate = peak * device.vector_efficiency
        table.add_row(f"vector {dtype}", format_si(rate, "FLOP/s"), percent(device.vector_efficiency))
    memory_Bps = device.memory_Bps * device.memory_efficiency
    table.add_row("memory", format_si(memory_Bps, "B/s"), percent(device.memory_efficiency))
    table.add_row("kernel latency", seconds(device.kernel_latency_s), "")
    if device.issue_s is not None:
        table.add_row("host, per operator of a step", seconds(device.issue_s), "")
    for level in fitted.levels:
        name = f"level {level.name}" + ("" if level.points else " (assumed)")
        table.add_row(name, format_si(level.link_Bps * level.efficiency, "B/s"), percent(level.efficiency))
        table.add_row("  latency of a hop", seconds(level.latency_s), "")
    screen.print(table)
    _print_curves(screen, fitted)
    if residuals:
        heading(screen, "Measured against predicted (the line is equality)")
        screen.print(text_plot(residuals))
    for note in fitted.skipped:
        indented(screen, f"not fitted: {note}", by=0)
    screen.print(f"\nWritten to {out}; use it as --cluster {out}", soft_wrap=True)


def _print_curves(screen: Any, fitted: Fitted) -> None:
    heading(screen, "Curves (errors on shapes that the fit did not see)")
    table = grid(("model/operator", "dtype", "points", "median", "mean", "bias"), left=(0, 1))
    for curve in sorted(fitted.curves, key=lambda c: (c.family.partition("/")[2], c.dtype)):
        table.add_row(
            curve.family,
            curve.dtype,
            f"{curve.points}",
            percent(curve.median_ape),
            percent(curve.mean_ape),
            percent(curve.bias),
        )
    screen.print(table)


def text_plot(residuals: Sequence[Residual]) -> str:
    """Measured (across) against predicted (up) times on logarithmic axes.

    >>> point = Residual(family="a", shape="", measured_s=1e-3, predicted_s=1e-3)
    >>> sum("o" in line for line in text_plot([point]).splitlines()[:ROWS])
    1
    """
    logs = [(math.log10(r.measured_s), math.log10(max(r.predicted_s, 1e-12))) for r in residuals]
    low = min(min(pair) for pair in logs)
    span = max(max(max(pair) for pair in logs) - low, 0.1)
    cells: dict[tuple[int, int], str] = {}
    for i in range(COLUMNS):
        cells[round(i / (COLUMNS - 1) * (ROWS - 1)), i] = "."
    for x, y in logs:
        cells[round((y - low) / span * (ROWS - 1)), round((x - low) / span * (COLUMNS - 1))] = "o"
    lines = [
        "  |" + "".join(cells.get((row, i), " ") for i in range(COLUMNS)).rstrip() for row in reversed(range(ROWS))
    ]
    scale = f"{seconds(10**low)} to {seconds(10 ** (low + span))} on both axes"
    return "\n".join([*lines, "  +" + "-" * COLUMNS, f"   {scale}"])


def write_plot(path: Path, residuals: Sequence[Residual]) -> None:
    """Plots measured against predicted times with matplotlib.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    ends = [min((r.measured_s for r in residuals), default=1e-6), max((r.measured_s for r in residuals), default=1.0)]
    with drawn(path, 6, 6) as figure:
        axes = figure.add_subplot()
        for name in sorted({r.family.split()[0] for r in residuals}):
            points = [r for r in residuals if r.family.split()[0] == name]
            axes.plot([r.measured_s for r in points], [r.predicted_s for r in points], linestyle="", label=name)
        axes.plot(ends, ends, "-", color="black", marker="", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured (s)", ylabel="predicted (s)")
        axes.legend()
