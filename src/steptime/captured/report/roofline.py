"""Roofline plot of a recorded program: what the device allows, and what each operator reaches."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.captured.cost import CostTable, Group
from steptime.cost.matmul import attainable_flops_per_s
from steptime.errors import UserError
from steptime.report import text as t
from steptime.report.text import short_operator

SIZE: Final = (7.2, 4.8)
NAMED: Final = 12
APART: Final = 0.3
"""Least difference of the logarithms of the rates of two names on the same side."""
AREA: Final = 1200.0
"""Area in square points of an operator that takes the whole time."""
SUFFIXES: Final = (".svg", ".png")
COLOURS: Final = {
    "product": "#2b6cb0", "attention": "#c05621", "convolution": "#2f855a", "recurrent": "#6b46c1", "norm": "#b7791f",
    "optimiser": "#718096", "map": "#319795", "move": "#a0aec0", "unknown": "#c53030",
}  # fmt: skip
MARGIN: Final = 4.0
"""Factor by which the axes go beyond the points."""


def write_roofline(table: CostTable, path: Path) -> Path:
    """Draw the roofs of the device and one point per operator, its area by its time.

    Args:
        table: costs of the program.
        path: file to write, ``.svg`` or ``.png``.

    Raises:
        UserError: another suffix, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: a plot is not written as {path.suffix or 'a file without suffix'!r}",
                        hint=f"give a name that ends in {' or '.join(SUFFIXES)}")  # fmt: skip
    require_matplotlib()
    settings = {"svg.hashsalt": "steptime", "svg.fonttype": "none", "font.size": 9, "savefig.dpi": 140}
    with import_module("matplotlib").rc_context(settings):
        figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot(), table)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def require_matplotlib() -> None:
    """Raises UserError where there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install 'steptime[calibrate]'")


def draw(axes: Any, table: CostTable) -> None:
    """Roofs, points and labels on log-log axes."""
    groups = [group for group in table.by_operator() if group.flops + group.vector_flops and group.seconds]
    rates = [(group.flops + group.vector_flops) / group.seconds for group in groups]
    used = {cost.work.family for cost in table.kinds if cost.work.family not in ("", "view")}
    _roofs(axes, table, [group.intensity for group in groups])
    _points(axes, table, groups, rates)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if rates:
        axes.set_ylim(bottom=min(rates) / MARGIN)
    axes.set_xlabel("operations per byte of memory traffic")
    axes.set_ylabel("operations per second")
    for family, colour in COLOURS.items():
        if family in used:
            axes.scatter([], [], s=30, color=colour, label=family)
    axes.legend(loc="lower right", fontsize=7, frameon=False)
    axes.set_title(f"{t.printable(table.program.name)} on {table.timer.device.title}: area is time", fontsize=9)


def _roofs(axes: Any, table: CostTable, intensities: list[float]) -> None:
    """Peak of each element type that products run in, and of the vector units, behind the slope of the memory."""
    device = table.timer.device
    used = dict.fromkeys(cost.dtype for cost in table.kinds if cost.work.matrix_flops)
    peaks = {f"{dtype} matrix": device.matrix_flops_per_s[dtype] for dtype in used}
    peaks["vector"] = device.peak_vector_flops_per_s
    ridge = max(peaks.values()) / device.memory_Bps
    low = min([*intensities, 1.0]) / MARGIN
    high = max([*intensities, ridge]) * MARGIN
    x = np.geomspace(low, high, 200)
    for name, peak in peaks.items():
        axes.plot(x, attainable_flops_per_s(x, peak, device.memory_Bps), color="black", lw=0.9,
                  ls="-" if name != "vector" else "--")  # fmt: skip
        axes.annotate(name, (high, peak), ha="right", va="bottom", fontsize=7)


def _points(axes: Any, table: CostTable, groups: list[Group], rates: list[float]) -> None:
    """One point per operator; the longest are named, each unless its name would cover another."""
    family = {cost.op: cost.work.family for cost in table.kinds}
    whole_s = table.totals.device_s
    middle = np.sqrt(min((g.intensity for g in groups), default=1.0) * max((g.intensity for g in groups), default=1.0))
    named: list[tuple[bool, float]] = []
    for group, rate in zip(groups, rates, strict=True):
        colour = COLOURS.get(family.get(group.name, ""), COLOURS["unknown"])
        area = max(AREA * group.seconds / whole_s, 6.0)
        axes.scatter([group.intensity], [rate], s=area, color=colour, alpha=0.6, linewidths=0)
        left = bool(group.intensity > middle)
        free = all(side != left or abs(np.log(rate / other)) > APART for side, other in named)
        if free and len(named) < NAMED:
            named.append((left, rate))
            label = f"{short_operator(group.name)} {t.share(group.seconds, whole_s)}"
            away = 3 + np.sqrt(area) / 2
            axes.annotate(label, (group.intensity, rate), (-away if left else away, -2), textcoords="offset points",
                          fontsize=6, ha="right" if left else "left")  # fmt: skip
