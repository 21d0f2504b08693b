"""The roofline chart: operators of a profile or of an explained estimate on the roofs of their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from steptime.cost.attention import causal_pairs
from steptime.cost.matmul import attainable_flops_per_s, matmul_flops
from steptime.errors import UserError
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.plots.results import Result
from steptime.report.text import short_operator

NAMED: Final = 12
"""Number of named operators, the longest ones."""
WORTH: Final = 0.01
"""Least share of the time for an operator to be named."""
MARGIN: Final = 4.0
"""Factor by which the axes go beyond the points."""
Arguments = Mapping[str, float]


def _gemm(a: Arguments) -> tuple[float, float]:
    moved = a["a_bytes"] * a["m"] * a["k"] + a["b_bytes"] * a["k"] * a["n"] + a["out_bytes"] * a["m"] * a["n"]
    return a["batch"] * float(matmul_flops(a["m"], a["n"], a["k"], 1)), a["batch"] * moved


def _attention(a: Arguments) -> tuple[float, float]:
    pairs = causal_pairs(a["queries"], a["keys"]) if a["causal"] else a["queries"] * a["keys"]
    return a["batch"] * a["heads"] * a["pair_flops"] * float(pairs), a["moved_bytes"]


def _vector(a: Arguments) -> tuple[float, float]:
    return a["vector_flops"], a["moved_bytes"]


WORK: Final[Mapping[str, Callable[[Arguments], tuple[float, float]]]] = {
    "gemm.gemm_s": _gemm,
    "attention.tiled_attention_s": _attention,
    "memory_bound.memory_bound_s": _vector,
}
"""Function that timed a term -> FLOPs and bytes of one call, from its arguments."""
Points = list[tuple[str, bool, float, float, float]]
"""Operators: name, True for matrix units, FLOPs, bytes, seconds."""


def roofline(results: Sequence[Result]) -> Chart:
    """Operators by their intensity and rate, the area by their share of the time, below the roofs of the device.

    Raises:
        UserError: the estimate does not have the work of its operators.
    """
    found = results[0]
    if found.kind == "profile":
        points, roofs = _profiled(found), found.numbers("roofs", "flops_per_s")
        memory_Bps = found.real("roofs", "memory_Bps")
        title = f"{found.word('model')} on {found.word('device')}"
    else:
        points, roofs, memory_Bps = _estimated(found)
        title = f"{found.word('provenance', 'model')} on {found.word('provenance', 'device')}"
    points = [point for point in points if min(point[2:]) > 0]
    if not points or not roofs or min(*roofs.values(), memory_Bps) <= 0:
        raise UserError(f"{found.name}: it has no operator with operations, traffic and time")
    panel = Panel(
        x=Axis(label="operations per byte of memory traffic", unit="FLOP/B", log=True),
        y=Axis(label="rate", unit="FLOP/s", log=True),
        series=(*_roofs(points, roofs, memory_Bps), *_series(points)),
    )
    return Chart(kind="roofline", title=title, panels=(panel,), notes=("the area of a point is its share of the time",))


def hierarchical(results: Sequence[Result]) -> Chart:
    """A tiled product at each boundary of memory: its intensity there, below the roof of the boundary.

    Raises:
        UserError: no boundary has a rate.
    """
    found = results[0]
    timed = [i for i in range(len(found.items("levels"))) if found.has("levels", i, "below_Bps")]
    if not timed or not found.has("peak_flops_per_s"):
        raise UserError(f"{found.name}: no rates are in it", hint="a tile plan of a GPU has them")
    peak = found.real("peak_flops_per_s")
    points: Points = []
    for i in timed:
        flops, moved = found.real("flops"), found.real("levels", i, "traffic_bytes")
        rate_Bps, name = found.real("levels", i, "below_Bps"), found.word("levels", i, "below")
        if min(peak, flops, moved, rate_Bps) <= 0:
            raise UserError(f"{found.name}: a rate or an amount of {name} is not above 0")
        points.append((name, True, flops, moved, max(flops / peak, moved / rate_Bps)))
    low = min(flops / moved for _, _, flops, moved, _ in points) / MARGIN
    high = max(flops / moved for _, _, flops, moved, _ in points) * MARGIN
    x = np.geomspace(low, high, 60)
    roofs = [
        Series(
            name=f"{name} roof",
            style="rule",
            x=tuple(x.tolist()),
            y=tuple(np.asarray(attainable_flops_per_s(x, peak, found.real("levels", i, "below_Bps"))).tolist()),
        )
        for i, (name, *_) in zip(timed, points, strict=True)
    ]
    tiles = Series(
        name="tiles",
        style="points",
        x=tuple(flops / moved for _, _, flops, moved, _ in points),
        y=tuple(flops / seconds for _, _, flops, _, seconds in points),
        size=tuple(1.0 / len(points) for _ in points),
        labels=tuple(f"from {name}" for name, *_ in points),
    )
    panel = Panel(
        x=Axis(label="operations per byte across the boundary", unit="FLOP/B", log=True),
        y=Axis(label="rate", unit="FLOP/s", log=True),
        series=(*roofs, tiles),
    )
    title = f"tiled product in {found.word('dtype')} on {found.word('machine')}"
    return Chart(kind="hierarchy", title=title, panels=(panel,), notes=("each point is limited by its own roof alone",))


def _profiled(found: Result) -> Points:
    out: Points = []
    for i in range(len(found.items("by_operator"))):
        flops, vector, moved, seconds = (
            found.real("by_operator", i, name) for name in ("flops", "vector_flops", "moved_bytes", "seconds")
        )
        out.append((found.word("by_operator", i, "name"), flops > 0, flops + vector, moved, seconds))
    return out


def _estimated(found: Result) -> tuple[Points, dict[str, float], float]:
    """Operators of an explained estimate, forward and backward together."""
    if not found.has("details"):
        raise UserError(f"{found.name}: the work of operators is not in it", hint="write it with --explain --json")
    sums: dict[str, list[float]] = {}
    matrix: dict[str, bool] = {}
    for i in range(len(found.items("details"))):
        work = WORK.get(found.word("details", i, "function"))
        if work is None:
            continue
        name, times = found.word("details", i, "path").split("/")[2:3], found.at("details", i, "factors")
        calls = [found.numbers("details", i, "arguments")]
        further = range(len(found.items("details", i, "further")))
        calls += [found.numbers("details", i, "further", j, "arguments") for j in further]
        count = times.get("times_per_step", 1.0) if isinstance(times, Mapping) else 1.0
        amounts = _amounts(found, work, calls)
        key = name[0] if name else found.word("details", i, "path")
        totals = sums.setdefault(key, [0.0, 0.0, 0.0])
        matrix[key] = matrix.get(key, False) or work is not _vector
        for place, value in enumerate((amounts[0] * count, amounts[1] * count, found.real("details", i, "value"))):
            totals[place] += value
    constants = found.numbers_of("provenance", "constants", key="value")
    roofs = {
        f"{name.partition('.')[2]} {name.partition('_')[0]}": value
        for name, value in constants.items()
        if name.startswith(("matrix_flops_per_s.", "vector_flops_per_s."))
    }
    if not roofs or "memory_Bps" not in constants:
        raise UserError(f"{found.name}: the peaks of the device are not in it")
    points: Points = [(name, matrix[name], *values) for name, values in sums.items()]  # type: ignore[misc]
    return points, roofs, constants["memory_Bps"]


def _amounts(
    found: Result, work: Callable[[Arguments], tuple[float, float]], calls: Sequence[Arguments]
) -> tuple[float, float]:
    try:
        each = [work(arguments) for arguments in calls]
    except KeyError as error:
        raise UserError(
            f"{found.name}: an operator lacks {error.args[0]}", hint="write it with --explain --json"
        ) from None
    return sum(flops for flops, _ in each), sum(moved for _, moved in each)


def _roofs(points: Points, roofs: Mapping[str, float], memory_Bps: float) -> list[Series]:
    intensities = [flops / moved for _, _, flops, moved, _ in points]
    ridge = max(roofs.values()) / memory_Bps
    x = np.geomspace(min(*intensities, 1.0) / MARGIN, max(*intensities, ridge) * MARGIN, 60)
    return [
        Series(
            name=f"{name} peak",
            style="rule",
            x=tuple(x.tolist()),
            y=tuple(np.asarray(attainable_flops_per_s(x, peak, memory_Bps)).tolist()),
        )
        for name, peak in sorted(roofs.items(), key=lambda roof: -roof[1])
    ]


def _series(points: Points) -> list[Series]:
    whole = sum(point[4] for point in points)
    ranked = sorted(points, key=lambda point: -point[4])
    named = {point[0] for point in ranked[:NAMED] if point[4] >= WORTH * whole}
    out = []
    for title, on_matrix in (("matrix units", True), ("vector units", False)):
        of = [point for point in ranked if point[1] is on_matrix]
        if of:
            out.append(
                Series(
                    name=title,
                    style="points",
                    x=tuple(flops / moved for _, _, flops, moved, _ in of),
                    y=tuple(flops / seconds for _, _, flops, _, seconds in of),
                    size=tuple(seconds / whole for *_, seconds in of),
                    labels=tuple(
                        f"{short_operator(n)} {100 * s / whole:.0f} %" if n in named else "" for n, _, _, _, s in of
                    ),
                )
            )
    return out
