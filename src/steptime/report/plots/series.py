"""Charts of estimates, searches, profiles and rows of studies, from results as JSON to plain data.

:data:`KINDS` lists the kinds of charts with the results that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from steptime.errors import UnknownNameError, UserError, did_you_mean, first_few
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.plots.layouts import mesh, timeline, title_of
from steptime.report.plots.limits import utilisation
from steptime.report.plots.results import WRITERS, Result
from steptime.report.plots.roofline import hierarchical, roofline

MOST_SERIES: Final = 7
"""Largest number of named parts of a bar or systems of a chart; smaller ones are summed."""
MOST_LINES: Final = 30
"""Largest number of lines of a scaling chart."""
MOST_BARS: Final = 10
"""Largest number of plans of a search that are drawn side by side."""
GPUS, STEP, DAYS = (
    ("gpus", "workload.gpus", "devices"),
    ("step_time_s", "step_s"),
    ("training_days", "training.training_days", "days"),
)
SYSTEM: Final = ("system", "cluster", "provenance.cluster")
MODEL: Final = ("model", "provenance.model")
STRATEGY: Final = ("strategy", "plan.strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The user's options of a chart."""

    x: str = ""
    """Column along a heat map."""
    y: str = ""
    """Column up a heat map."""
    value: str = ""
    """Column of the drawn value."""
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of chart."""

    build: Callable[[Sequence[Result], Options], Chart]
    takes: tuple[str, ...]
    """Kinds of results that it takes."""
    several: bool
    """True if it shows more than one result."""
    text: str


def chart(kind: str, results: Sequence[Result], options: Options = Options()) -> Chart:
    """The chart of some results.

    Args:
        kind: a name of :data:`KINDS`.
        results: one or more, all of a kind that this chart takes.
        options: what to draw.

    Raises:
        UserError: the kind is unknown, or the results are none, too many, of a wrong kind, or without its numbers.

    >>> from steptime.report.plots.results import result
    >>> rows = [{"cluster": "a", "gpus": g, "step_time_s": 8.0 / g} for g in (8, 16)]
    >>> [panel.y.label for panel in chart("scaling", [result("r", rows)]).panels]
    ['step time', 'efficiency']
    """
    if kind not in KINDS:
        raise UnknownNameError("kind of plot", kind, KINDS)
    row = KINDS[kind]
    if not results:
        raise UserError(f"plot {kind}: there is no result to draw", hint=_wanted(row))
    for each in results:
        if each.kind not in row.takes:
            raise UserError(f"plot {kind}: {each.name} is a result of {each.kind}", hint=_wanted(row))
    if len({each.kind for each in results}) > 1 and kind != "scaling":
        kinds = ", ".join(dict.fromkeys(each.kind for each in results))
        raise UserError(f"plot {kind}: the results are of different kinds: {kinds}", hint=_wanted(row))
    if len(results) > 1 and not row.several:
        raise UserError(f"plot {kind}: it shows one result, not {len(results)}", hint="draw one file for each")
    return row.build(results, options)


def _wanted(row: Kind) -> str:
    return f"give {' or '.join(WRITERS[kind] for kind in row.takes)}"


def breakdown(results: Sequence[Result]) -> Chart:
    """Stacked step time of each result by group of terms; overlapped time is faint and above exposed time."""
    estimates = _bars_of(results)
    exposed = [_rolled(each.numbers("time")) for each in estimates]
    overlapped = [_rolled(each.numbers("overlapped")) if each.has("overlapped") else {} for each in estimates]
    series = [*_bars(exposed), *_bars(overlapped, ", overlapped", faint=True)]
    panel = Panel(
        x=Axis(label="", ticks=_names(estimates)), y=Axis(label="time of a step", unit="s"), series=tuple(series)
    )
    return Chart(kind="breakdown", title=_common(estimates), panels=(panel,))


def memory(results: Sequence[Result]) -> Chart:
    """Stacked memory of each result at its peak by group of terms, and the capacity of its device."""
    estimates = _bars_of(results)
    held = [_rolled(each.numbers("memory")) for each in estimates]
    places = tuple(float(i) for i in range(len(estimates)))
    capacity = tuple(each.real("memory_capacity_bytes") for each in estimates)
    cap = Series(name="capacity", style="cap", x=places, y=capacity)
    panel = Panel(
        x=Axis(label="", ticks=_names(estimates)),
        y=Axis(label="memory of the fullest device", unit="B"),
        series=(*_bars(held), cap),
    )
    return Chart(kind="memory", title=_common(estimates), panels=(panel,))


def overview(results: Sequence[Result]) -> Chart:
    """Breakdown of time and memory side by side."""
    time, held = breakdown(results), memory(results)
    return Chart(kind="overview", title=time.title, panels=(*time.panels, *held.panels))


def _bars_of(results: Sequence[Result]) -> list[Result]:
    """Estimates to draw: the first of each result; for a single search its best plans."""
    return _estimates(results[0]) if len(results) == 1 else [_estimates(each)[0] for each in results]


def _estimates(found: Result) -> list[Result]:
    """The estimates of a result: an estimate itself, or the best plans of a search, the fastest first."""
    if found.kind == "estimate":
        return [found]
    count = len(found.items("plans"))
    if not count:
        raise UserError(f"{found.name}: no plan is feasible, there is nothing to draw")
    return [found.below(found.name, "estimate", "plans", i) for i in range(min(count, MOST_BARS))]


def _names(estimates: Sequence[Result]) -> tuple[str, ...]:
    """Names of the bars: of their results; a single bar is named by its plan."""
    if len({each.name for each in estimates}) == 1:
        return tuple(_plan_words(each.table("plan")) for each in estimates)
    return tuple(each.name for each in estimates)


def _plan_words(plan: Mapping[str, Any]) -> str:
    """Degrees of a plan in a few words.

    >>> _plan_words({"tp": 8, "pp": 1, "dp": 2})
    'tp8 dp2'
    """
    axes = ("tp", "tp2", "cp", "ep", "pp", "vpp", "dp")
    return " ".join(f"{axis}{plan[axis]}" for axis in axes if plan.get(axis, 1) != 1) or "one device"


def _common(estimates: Sequence[Result]) -> str:
    """Common properties of all results, as a title."""
    titles = {title_of(each) for each in estimates}
    return titles.pop() if len(titles) == 1 else ""


def _rolled(terms: Mapping[str, float]) -> dict[str, float]:
    """Terms by the first part of their path.

    >>> _rolled({"compute/a": 1.0, "compute/b": 2.0, "bubble/c": 1.0})
    {'compute': 3.0, 'bubble': 1.0}
    """
    out: dict[str, float] = {}
    for path, value in terms.items():
        group = path.partition("/")[0]
        out[group] = out.get(group, 0.0) + value
    return out


def _bars(columns: Sequence[Mapping[str, float]], suffix: str = "", *, faint: bool = False) -> list[Series]:
    """One series per group, the largest first; groups beyond :data:`MOST_SERIES` are summed in one."""
    totals: dict[str, float] = {}
    for column in columns:
        for name, value in column.items():
            totals[name] = totals.get(name, 0.0) + value
    ranked = [name for name in sorted(totals, key=lambda name: -totals[name]) if totals[name] > 0]
    groups = {name: [name] for name in ranked[:MOST_SERIES]}
    if len(ranked) > MOST_SERIES:
        groups["other"] = ranked[MOST_SERIES:]
    places = tuple(float(i) for i in range(len(columns)))
    return [
        Series(
            name=name.replace("_", " ") + suffix,
            style="bar",
            x=places,
            y=tuple(sum(column.get(part, 0.0) for part in parts) for column in columns),
            faint=faint,
        )
        for name, parts in groups.items()
    ]


def scatter(results: Sequence[Result]) -> Chart:
    """Step time against memory of ranked plans, the front of both, and the capacity of the device."""
    series: list[Series] = []
    capacities: set[float] = set()
    for each in results:
        suffix = f", {each.name}" if len(results) > 1 else ""
        plans = [_point(each, "plans", i) for i in range(len(each.items("plans")))]
        front = sorted((*_point(each, "pareto", i), i) for i in range(len(each.items("pareto"))))
        if not plans and not front:
            raise UserError(f"{each.name}: no plan is feasible, there is nothing to draw")
        if plans:
            capacities.add(each.real("plans", 0, "memory_capacity_bytes"))
            series.append(_xy(f"ranked plans{suffix}", "points", plans, faint=True))
        if front:
            ends = (front[0][2], front[-1][2])
            labels = tuple(_plan_words(each.table("pareto", i, "plan")) if i in ends else "" for *_, i in front)
            points = [(time_s, size) for time_s, size, _ in front]
            series.append(_xy(f"Pareto front{suffix}", "step", points, labels=labels))
    memories = [y for one in series for y in one.y]
    times = [x for one in series for x in one.x]
    across = (min(times), max(times))
    series += [
        Series(name="capacity", style="rule", x=across, y=(size, size))
        for size in sorted(capacities)
        if size < 4 * max(memories)
    ]
    panel = Panel(
        x=Axis(label="time of a step", unit="s", log=True),
        y=Axis(label="memory of the fullest device", unit="B", log=True),
        series=tuple(series),
    )
    counts = [f"{each.real('candidates'):,.0f} candidates, {each.real('feasible'):,.0f} feasible" for each in results]
    return Chart(kind="scatter", title="", panels=(panel,), notes=tuple(dict.fromkeys(counts)))


def _point(found: Result, list_name: str, place: int) -> tuple[float, float]:
    return found.real(list_name, place, "step_time_s"), found.real(list_name, place, "peak_memory_bytes")


def _xy(
    name: str, style: str, points: Iterable[tuple[float, float]], *, labels: tuple[str, ...] = (), faint: bool = False
) -> Series:
    x, y = zip(*points, strict=True)
    return Series(name=name, style=style, x=x, y=y, labels=labels, faint=faint)


def rows_of(results: Sequence[Result]) -> list[Result]:
    """Rows of all results: the rows of a table, an estimate itself, the fastest plan of a search.

    Nested objects become columns with dotted names.
    """
    out: list[Result] = []
    for each in results:
        if each.kind == "rows":
            rows = each.items("rows")
            out += [Result(name=f"{each.name}, row {i + 1}", kind="rows", data=flat(row)) for i, row in enumerate(rows)]
        else:
            first = _estimates(each)[0]
            out.append(Result(name=each.name, kind="rows", data=flat(first.data)))
    if not out:
        raise UserError("there are no rows to draw")
    return out


def flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """An object with nested objects flattened under dotted names.

    >>> flat({"a": 1, "plan": {"tp": 8}})
    {'a': 1, 'plan.tp': 8}
    """
    out: dict[str, Any] = {}
    for key, value in data.items():
        nested = flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
        out.update(nested)
    return out


def _column(row: Result, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.has(name)), None)


def _needed(row: Result, names: Sequence[str]) -> float:
    found = _column(row, names)
    return row.real(names[0] if found is None else found)


def scaling(results: Sequence[Result]) -> Chart:
    r"""Strong scaling: step time, efficiency and days of training over the number of devices, a line per system.

    The efficiency of $n$ devices is $t_0 n_0 / (t n)$ with $t$ the step time (s) and $n_0$, $t_0$ those of the system's
    fewest devices; if rows have samples per second, their rates are compared, so that the batch may differ. Among
    rows with the same system and number of devices the fastest counts.
    """
    rows = rows_of(results)
    differ = [names for names in (MODEL, SYSTEM) if len({_text(row, names) for row in rows}) > 1]
    if _contested(rows):
        differ.append(STRATEGY)
    lines: dict[str, dict[float, Result]] = {}
    for row in rows:
        name = ", ".join(_text(row, names) for names in differ or (SYSTEM,))
        kept, gpus = lines.setdefault(name, {}), _needed(row, GPUS)
        if gpus < 1:
            raise UserError(f"{row.name}: {gpus:g} devices")
        if gpus not in kept or _rate(row) > _rate(kept[gpus]):
            kept[gpus] = row
    if len(lines) > MOST_LINES:
        hint = "select some rows first, as with steptime study query ... --json > rows.json"
        raise UserError(f"plot scaling: {len(lines)} lines cannot be told apart, {MOST_LINES} at most", hint=hint)
    shown = {name: [points[gpus] for gpus in sorted(points)] for name, points in lines.items()}
    panels = [_scaling("step time", "s", shown, partial(_needed, names=STEP)), _efficiency(shown)]
    if all(_column(row, DAYS) for points in shown.values() for row in points):
        panels.append(_scaling("training", "days", shown, partial(_needed, names=DAYS)))
    title = ", ".join(_text(rows[0], names) for names in (MODEL,) if names not in differ)
    return Chart(kind="scaling", title=title, panels=tuple(panels))


def _contested(rows: Sequence[Result]) -> bool:
    """True if there are several strategies for one job: a search that chooses one makes one line."""
    seen: dict[tuple[str, str, float], str] = {}
    for row in rows:
        strategy = _text(row, STRATEGY)
        if seen.setdefault((_text(row, MODEL), _text(row, SYSTEM), _needed(row, GPUS)), strategy) != strategy:
            return True
    return False


def _text(row: Result, names: Sequence[str]) -> str:
    found = _column(row, names)
    return "" if found is None else str(row.at(found))


def _rate(row: Result) -> float:
    """Samples per second, or steps per second if rows do not have samples."""
    rate = row.real("samples_per_s") if row.has("samples_per_s") else 1.0 / _positive(row, STEP)
    if rate <= 0:
        raise UserError(f"{row.name}: samples_per_s is {rate:g}")
    return rate


def _positive(row: Result, names: Sequence[str]) -> float:
    value = _needed(row, names)
    if value <= 0:
        raise UserError(f"{row.name}: {names[0]} is {value:g}; it must be above zero")
    return value


def _scaling(label: str, unit: str, lines: Mapping[str, Sequence[Result]], of: Callable[[Result], float]) -> Panel:
    series = tuple(
        Series(name=name, style="line", x=tuple(_needed(row, GPUS) for row in rows), y=tuple(of(row) for row in rows))
        for name, rows in lines.items()
    )
    return Panel(x=Axis(label="devices", log=True), y=Axis(label=label, unit=unit, log=True), series=series)


def _efficiency(lines: Mapping[str, Sequence[Result]]) -> Panel:
    series = []
    for name, rows in lines.items():
        per_device = [_rate(row) / _needed(row, GPUS) for row in rows]
        shares = tuple(rate / per_device[0] for rate in per_device)
        series.append(Series(name=name, style="line", x=tuple(_needed(row, GPUS) for row in rows), y=shares))
    return Panel(x=Axis(label="devices", log=True), y=Axis(label="efficiency"), series=tuple(series))


def heatmap(results: Sequence[Result], options: Options) -> Chart:
    """A value over two swept parameters; among rows with the same parameters the least value counts.

    Raises:
        UserError: a column is missing, or the two varying parameters are ambiguous.
    """
    rows = rows_of(results)
    value = options.value or next((name for name in STEP if rows[0].has(name)), STEP[0])
    x, y = _swept(rows, options)
    for name in (x, y, value):
        known = sorted({column for row in rows for column in row.data})
        if not any(row.has(name) for row in rows):
            raise UserError(f"plot heatmap: there is no column {name!r}", hint=did_you_mean(name, known))
    cells: dict[tuple[Any, Any], float] = {}
    for row in rows:
        if row.has(x) and row.has(y) and row.has(value):
            at, found = (_place(row, x), _place(row, y)), row.real(value)
            cells[at] = min(found, cells.get(at, found))
    if not cells:
        raise UserError(f"plot heatmap: no row has {x}, {y} and {value}")
    places = [sorted({at[i] for at in cells}, key=lambda v: (isinstance(v, str), v)) for i in (0, 1)]
    series = Series(
        name=value,
        style="cell",
        x=tuple(float(places[0].index(at[0])) for at in cells),
        y=tuple(float(places[1].index(at[1])) for at in cells),
        size=tuple(cells.values()),
    )
    ticks = [tuple(v if isinstance(v, str) else f"{v:g}" for v in values) for values in places]
    panel = Panel(
        x=Axis(label=x, ticks=ticks[0]),
        y=Axis(label=y, ticks=ticks[1]),
        series=(series,),
        value=Axis(label=_bare(value), unit=_unit(value)),
    )
    return Chart(kind="heatmap", title=_text(rows[0], MODEL), panels=(panel,))


def _place(row: Result, name: str) -> float | str:
    value = row.at(name)
    return value if isinstance(value, str) else row.real(name)


def _swept(rows: Sequence[Result], options: Options) -> tuple[str, str]:
    """The two columns of a heat map: the requested ones, else the two that vary and are no results."""
    if options.x and options.y:
        return options.x, options.y
    names = dict.fromkeys(name for row in rows for name in row.data)
    varying = [name for name in names if _varies(rows, name) and name not in (options.x, options.y)]
    asked = [name for name in (options.x, options.y) if name]
    if len(varying) + len(asked) != 2:
        found = f"{first_few(varying, 8)} vary" if varying else "nothing varies"
        raise UserError(f"plot heatmap: {found}; it needs two parameters", hint="give --x COLUMN --y COLUMN")
    first = options.x or varying.pop(0)
    return first, options.y or varying.pop(0)


RESULTS: Final = ("_s", "_bytes", "mfu", "hfu", "_per_s", "per_gpu", "_days", "_hours", "_fraction", "oom_probability")
"""Endings of names of results, over which no sweep runs."""


def _varies(rows: Sequence[Result], name: str) -> bool:
    values = {row.at(name) for row in rows if row.has(name) and isinstance(row.at(name), int | float | str)}
    return len(values) > 1 and not name.endswith(RESULTS)


def _unit(name: str) -> str:
    """SI unit of a column by the end of its name.

    >>> _unit("step_time_s"), _unit("peak_memory_bytes"), _unit("mfu")
    ('s', 'B', '')
    """
    ends = {"_per_s": "", "_s": "s", "_bytes": "B", "_days": "days", "_flops": "FLOP"}
    return next((unit for end, unit in ends.items() if name.endswith(end)), "")


def _bare(name: str) -> str:
    """A column's name without its unit, in words."""
    ends = ("_s", "_bytes", "_days", "_flops")
    end = next((end for end in ends if name.endswith(end) and not name.endswith("_per_s")), "")
    return name.removesuffix(end).replace("_", " ")


def _alone(build: Callable[[Sequence[Result]], Chart]) -> Callable[[Sequence[Result], Options], Chart]:
    return lambda results, options: build(results)


def _of_plan(build: Callable[[Sequence[Result]], Chart]) -> Callable[[Sequence[Result], Options], Chart]:
    return lambda results, options: build(_estimates(results[0]))


ESTIMATES: Final = ("estimate", "plan")
KINDS: Final[Mapping[str, Kind]] = {
    "scaling": Kind(
        build=_alone(scaling),
        takes=("rows", *ESTIMATES),
        several=True,
        text="step time, efficiency and days of training over devices, a line per system",
    ),
    "breakdown": Kind(
        build=_alone(breakdown), takes=ESTIMATES, several=True, text="step time by terms, exposed and overlapped"
    ),
    "memory": Kind(build=_alone(memory), takes=ESTIMATES, several=True, text="memory by terms against capacity"),
    "overview": Kind(build=_alone(overview), takes=ESTIMATES, several=True, text="breakdown and memory side by side"),
    "hierarchy": Kind(
        build=lambda results, _: hierarchical(results),
        takes=("tile",),
        several=False,
        text="a tiled product at every level of memory below the roofs of each",
    ),
    "roofline": Kind(
        build=_alone(roofline),
        takes=("profile", "estimate"),
        several=False,
        text="operators on the roofs of the device",
    ),
    "scatter": Kind(
        build=_alone(scatter),
        takes=("plan",),
        several=True,
        text="step time against memory of the plans, with the Pareto front",
    ),
    "heatmap": Kind(build=heatmap, takes=("rows", *ESTIMATES), several=True, text="a value over two parameters"),
    "timeline": Kind(build=_alone(timeline), takes=("simulate",), several=False, text="passes of a pipeline over time"),
    "mesh": Kind(
        build=_of_plan(mesh),
        takes=ESTIMATES,
        several=False,
        text="which rank sits on which device of which fast domain",
    ),
    "limits": Kind(
        build=_alone(utilisation),
        takes=("limits",),
        several=False,
        text="utilisation against training compute, by what overlaps",
    ),
}
"""Name of a kind of chart -> its function and the results that it takes."""
