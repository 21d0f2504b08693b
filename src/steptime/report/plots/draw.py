"""Charts drawn by matplotlib: readable in grey, in distinguishable colours, with reproducible bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from steptime.report.figure import COLOURS, LINES, MARKERS, drawn
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.text import printable

HATCHES: Final = ("", "///", "---", "xxx", "\\\\\\", "++", "|||", "/-")
"""Hatches made of lines only: dots and circles would make a file many times as large."""
WIDTH, HEIGHT, ROW, LEGEND = 3.6, 3.4, 0.32, 1.7
"""Inches of a panel, of a row of boxes, and of a legend."""
AREA: Final = 1600.0
"""Area (square points) of a point with a share of 1."""
NAMED: Final = ("line", "step", "points")
"""Styles whose values may have texts next to them."""
BOXES: Final = ("#0072b2", "#f0e442", "#56b4e9", "#d55e00", "#bbbbbb", "#009e73", "#e69f00", "#444444")
"""Colours of boxes: neighbours differ in lightness, so that narrow boxes are distinct in grey."""
DARK: Final = (0, 3, 7)
"""Indices of the colours with white texts."""
FEW: Final = 300
"""Largest number of boxes with hatches, if they have no texts."""
MANY: Final = 4000
"""Number of boxes from which they are rasterised: a file of shapes would be large."""
CELLS: Final = 150
"""Largest number of cells of a grid with written values."""
UNITS: Final[Mapping[str, tuple[tuple[float, str], ...]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (1.0, "B")),
    "FLOP/s": ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")),
}
"""SI unit -> customary units with their sizes, the largest first."""


def unit_for(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """The largest unit in which the largest value is at least two, else the smallest unit.

    >>> unit_for("s", [0.25]), unit_for("B", [80 * 2.0**30]), unit_for("days", [3.0])
    ((0.001, 'ms'), (1073741824.0, 'GiB'), (1.0, 'days'))
    """
    most = max((abs(value) for value in values), default=1.0)
    known = UNITS.get(unit, ((1.0, unit),))
    return next((each for each in known if most >= 2 * each[0]), known[-1])


def plain(text: str) -> str:
    """Literal text: without control characters, and without formulas between dollars.

    >>> plain("$x$")
    '\\\\$x\\\\$'
    """
    return printable(text).replace("$", r"\$")


def write_chart(chart: Chart, path: Path) -> None:
    """Draw a chart into a file of the kind given by its suffix.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    rows = max((len(panel.y.ticks) for panel in chart.panels), default=0)
    boxes = any(series.style == "box" for panel in chart.panels for series in panel.series)
    columns = max((len(panel.x.ticks) for panel in chart.panels), default=0)
    wide = max(WIDTH, min(0.62 * columns, 12.0)) if not boxes or chart.kind == "mesh" else 2 * WIDTH
    alike = [[series.name for series in panel.series] for panel in chart.panels]
    legends = 1 if all(names == alike[0] for names in alike) else len(alike)
    tall = (
        max(1.4, min(ROW * rows * (1.6 if chart.kind == "mesh" else 1.0), 16.0) + 0.9)
        if boxes
        else max(HEIGHT, 0.17 * max(map(len, alike)) + 0.7)
    )
    with drawn(path, wide * len(chart.panels) + LEGEND * legends, tall) as figure:
        places = figure.subplots(1, len(chart.panels), squeeze=False)[0]
        for i, (axes, panel) in enumerate(zip(places, chart.panels, strict=True)):
            _panel(axes, panel, legend=legends > 1 or i == len(chart.panels) - 1)
        if chart.title:
            figure.suptitle(plain(chart.title), fontsize=10)
        if chart.notes:
            figure.supxlabel(plain("; ".join(chart.notes)), fontsize=7)
        figure.draw_without_rendering()  # axes have their places from here on
        for axes, panel in zip(places, chart.panels, strict=True):
            (x, _), (y, _) = _units(panel)
            _named(axes, [_scaled(series, x, y) for series in panel.series if series.style in NAMED])


def _panel(axes: Any, panel: Panel, *, legend: bool) -> None:
    """Draw the series of a panel in multiples of SI units, then its axes and names."""
    sizes = _units(panel)
    tops: dict[float, float] = {}
    counts: dict[str, int] = {}
    for series in panel.series:
        number = counts.get(series.style, 0)
        counts[series.style] = number + 1
        if series.x:
            _STYLES[series.style](axes, _scaled(series, sizes[0][0], sizes[1][0]), number, tops)
    for name, (_, shown) in zip("xy", sizes, strict=True):
        _axis(axes, panel, name, shown)
    _frame(axes, panel, tops, sizes[1][0])
    if any(series.style == "cell" for series in panel.series):
        _scale(axes, panel)
    elif legend:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0)


def _units(panel: Panel) -> list[tuple[float, str]]:
    """The unit of both axes, with its size."""
    return [unit_for(axis.unit, _along(panel, name)) for axis, name in ((panel.x, "x"), (panel.y, "y"))]


def _along(panel: Panel, name: str) -> list[float]:
    """All values along an axis, with both ends of boxes and the sums of bars."""
    out: list[float] = []
    sums: dict[float, float] = {}
    for series in panel.series:
        values = getattr(series, name)
        if series.style == "bar" and name == "y":
            for at, value in zip(series.x, values, strict=True):
                sums[at] = sums.get(at, 0.0) + value
        ends = (
            (a + b for a, b in zip(values, series.size, strict=True)) if series.style == "box" and name == "x" else ()
        )
        out += [*values, *ends]
    return [*out, *sums.values()]


def _scaled(series: Series, x: float, y: float) -> Series:
    return replace(
        series,
        x=tuple(value / x for value in series.x),
        y=tuple(value / y for value in series.y),
        size=tuple(value / x for value in series.size) if series.style == "box" else series.size,
    )


def _axis(axes: Any, panel: Panel, name: str, unit: str) -> None:
    """Set label with unit, names of places, and scale: logarithmic only if all values are above zero."""
    axis: Axis = getattr(panel, name)
    label = f"{axis.label} ({unit})" if unit and axis.label else axis.label or unit
    getattr(axes, f"set_{name}label")(plain(label.replace("_", " ")))
    if axis.ticks:
        long = name == "x" and max(map(len, axis.ticks)) > 8 and len(axis.ticks) > 1
        turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if long else {}
        every = max(1, len(axis.ticks) // 40)
        places = range(0, len(axis.ticks), every)
        getattr(axes, f"set_{name}ticks")(places, [plain(axis.ticks[i][:32]) for i in places], **turned)
        axes.grid(visible=False, axis=name)
    if axis.log and min(_along(panel, name), default=0.0) > 0:
        getattr(axes, f"set_{name}scale")("log")
        _log_ticks(axes, name)


def _log_ticks(axes: Any, name: str) -> None:
    """Set ticks at 1, 2 and 5 times powers of ten for few decades; matplotlib's labels would overlap."""
    from matplotlib.ticker import FixedLocator, NullFormatter

    low, high = getattr(axes, f"get_{name}lim")()
    if not 0 < low < high or high / low > 200:
        return
    steps = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    places = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    places = [place for place in places if low <= place <= high]
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(FixedLocator([]))


def _frame(axes: Any, panel: Panel, tops: Mapping[float, float], size: float) -> None:
    """Apply the styles of a panel: start of axes, exposed totals on bars, rows from top to bottom."""
    styles = {series.style for series in panel.series}
    if tops:
        axes.set_xlim(-0.8, max(tops) + 0.8)
        axes.set_ylim(0, 1.07 * axes.get_ylim()[1])
        for at, top in tops.items():
            exposed = sum(s.y[s.x.index(at)] for s in panel.series if s.style == "bar" and not s.faint and at in s.x)
            axes.annotate(
                f"{exposed / size:.3g}", (at, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    if "box" in styles:
        axes.invert_yaxis()
        axes.grid(visible=False)
    if panel.x.label == "devices":
        counts = sorted({value for series in panel.series for value in series.x})
        kept = counts[:: max(1, (len(counts) + 7) // 8)]
        axes.set_xticks(kept, [f"{value:g}" for value in kept], rotation=30)
        axes.minorticks_off()
    if panel.y.label in ("efficiency", "utilisation of the peak"):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _line(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    turn, other = number % len(COLOURS), (number + number // len(COLOURS)) % len(COLOURS)
    axes.plot(
        series.x,
        series.y,
        color=COLOURS[turn],
        marker=MARKERS[other],
        linestyle=LINES[other],
        label=plain(series.name),
        markevery=max(1, len(series.x) // 12),
        zorder=3,
    )


def _step(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    _line(axes, series, number, tops)
    axes.lines[-1].set(drawstyle="steps-post", markevery=1, markersize=4)


def _rule(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    axes.plot(
        series.x,
        series.y,
        color="black",
        marker="",
        linewidth=1.0,
        linestyle=("-", "--", ":", "-.")[number % 4],
        label=plain(series.name),
        zorder=2,
    )


def _points(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    turn = number % len(COLOURS)
    colour = "#aaaaaa" if series.faint else COLOURS[turn]
    areas = [max(AREA * share, 8.0) for share in series.size] or [12.0] * len(series.x)
    axes.scatter(
        series.x,
        series.y,
        s=areas,
        color=colour,
        marker=MARKERS[turn],
        alpha=0.55,
        edgecolors="black",
        linewidths=0.3 if series.faint else 0.5,
        zorder=2 if series.faint else 3,
    )
    axes.scatter(
        [], [], s=30, color=colour, marker=MARKERS[turn], edgecolors="black", linewidths=0.5, label=plain(series.name)
    )


def _named(axes: Any, named: Sequence[Series]) -> None:
    """Put texts next to values without covering others; a text without a free place is left out."""
    taken: list[tuple[float, float, float, float]] = []
    low, high = axes.transAxes.transform(((0, 0), (1, 1)))
    for series in named:
        areas = [max(AREA * share, 8.0) for share in series.size] or [14.0] * len(series.x)
        for x, y, text, area in zip(series.x, series.y, series.labels, areas, strict=False):
            at, wide, away = axes.transData.transform((x, y)), 5.0 * len(text), 3 + 0.5 * area**0.5
            right, left = at[0] + away, at[0] - away - wide
            places = [(left, at[1] - 4), (right, at[1] - 4)]
            places = places if at[0] > (low[0] + high[0]) / 2 else places[::-1]
            places += [(at[0] - wide / 2, at[1] + away), (at[0] - wide / 2, at[1] - away - 9)]
            for left, bottom in places if text else ():
                box = (left, bottom, left + wide, bottom + 9)
                if left >= low[0] and left + wide <= high[0] and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    offset = ((left - at[0]) * 0.72, (bottom - at[1]) * 0.72)
                    axes.annotate(
                        plain(text), (x, y), xytext=offset, textcoords="offset points", fontsize=6.5, zorder=5
                    ).set_in_layout(False)
                    break


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _bar(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    turn = number % len(COLOURS)
    bottom = [tops.get(at, 0.0) for at in series.x]
    style: dict[str, Any] = {"color": COLOURS[turn], "hatch": HATCHES[turn], "edgecolor": "black", "linewidth": 0.5}
    if series.faint:
        style |= {"color": "white", "hatch": HATCHES[1 + turn % (len(HATCHES) - 1)], "edgecolor": "#777777"}
    axes.bar(series.x, series.y, bottom=bottom, width=0.62, label=plain(series.name), zorder=2, **style)
    tops.update({at: low + value for at, low, value in zip(series.x, bottom, series.y, strict=True)})


def _cap(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    axes.hlines(
        series.y,
        [at - 0.45 for at in series.x],
        [at + 0.45 for at in series.x],
        color="black",
        linewidth=1.8,
        linestyle="--",
        label=plain(series.name),
        zorder=4,
    )


def _box(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    from matplotlib.collections import PolyCollection

    turn = number % len(COLOURS)
    shapes = [
        ((x, y - 0.42), (x + w, y - 0.42), (x + w, y + 0.42), (x, y + 0.42))
        for x, y, w in zip(series.x, series.y, series.size, strict=True)
    ]
    many = len(shapes) > MANY
    named = any(series.labels)
    hatch = HATCHES[turn][:2] if len(shapes) <= FEW and not named else ""
    drawn_as = PolyCollection(
        shapes,
        facecolor=BOXES[turn],
        edgecolor="none" if many else "black",
        linewidth=0.3,
        hatch=hatch,
        label=plain(series.name),
    )
    drawn_as.set_rasterized(many)
    axes.add_collection(drawn_as)
    axes.autoscale_view()
    for x, y, w, text in zip(series.x, series.y, series.size, series.labels, strict=False):
        if text:
            axes.text(
                x + w / 2,
                y,
                plain(text),
                ha="center",
                va="center",
                fontsize=5.5,
                color="white" if turn in DARK else "black",
            )


def _cell(axes: Any, series: Series, number: int, tops: dict[float, float]) -> None:
    import numpy as np

    width, height = int(max(series.x)) + 1, int(max(series.y)) + 1
    grid = np.full((height, width), np.nan)
    grid[[int(y) for y in series.y], [int(x) for x in series.x]] = series.size
    axes.imshow(grid, origin="lower", aspect="auto", cmap="cividis_r")
    axes.grid(visible=False)


def _scale(axes: Any, panel: Panel) -> None:
    """Draw the colour scale of a grid, and its values if they are few."""
    size, unit = unit_for(panel.value.unit, panel.series[0].size)
    image = axes.images[0]
    image.set_data(image.get_array() / size)
    image.autoscale()
    label = f"{panel.value.label} ({unit})" if unit else panel.value.label
    axes.figure.colorbar(image, ax=axes, label=plain(label))
    for series in panel.series:
        for x, y, value in zip(series.x, series.y, series.size, strict=True) if len(series.x) <= CELLS else ():
            dark = image.norm(value / size) > 0.55
            axes.text(
                x, y, f"{value / size:.3g}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )


_STYLES: Final[Mapping[str, Callable[[Any, Series, int, dict[float, float]], None]]] = {
    "line": _line,
    "step": _step,
    "rule": _rule,
    "points": _points,
    "bar": _bar,
    "cap": _cap,
    "box": _box,
    "cell": _cell,
}
"""Style of a series -> function that draws it, given the index among series of the style and the tops of bars."""
