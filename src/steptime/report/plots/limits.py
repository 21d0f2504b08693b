"""The chart of the data-movement limits: utilisation against training compute, for each rule of overlap."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.errors import UserError
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.plots.results import Result


def utilisation(results: Sequence[Result]) -> Chart:
    """Utilisation of the best plan over the compute of a run, with 80 % of the most and the latency wall.

    Raises:
        UserError: the curve has no point.
    """
    found = results[0]
    curves = range(len(found.items("curve")))
    lines = []
    for i in curves:
        x, y = found.reals("curve", i, "compute_flops"), found.reals("curve", i, "utilization")
        if not x or len(x) != len(y):
            raise UserError(f"{found.name}: curve {i + 1} needs as many utilisations as runs, one at least")
        cliff = f": 80 % at {found.real('curve', i, 'cliff_flops'):.1e}" if found.has("curve", i, "cliff_flops") else ""
        kept = [(c, u) for c, u in zip(x, y, strict=True) if u > 0]
        lines.append(
            Series(
                name=f"{found.word('curve', i, 'overlap')}{cliff}",
                style="line",
                x=tuple(c for c, _ in kept),
                y=tuple(u for _, u in kept),
            )
        )
    wall, top = found.real("latency_wall_flops"), max((u for line in lines for u in line.y), default=0.0)
    if not top:
        raise UserError(f"{found.name}: no run of the curve is feasible")
    runs = [c for line in lines for c in line.x]
    rules = [
        Series(name="80 % of the most", style="rule", x=(min(runs), max(runs)), y=(0.8 * top, 0.8 * top)),
        Series(name=f"latency wall: {wall:.1e}", style="rule", x=(wall, wall), y=(0.0, top)),
    ]
    panel = Panel(
        x=Axis(label="training compute", unit="FLOP", log=True),
        y=Axis(label="utilisation of the peak"),
        series=(*lines, *rules),
    )
    title = f"{found.word('device', 'name')}, {found.real('run', 'duration_s') / 86400:.0f} days"
    return Chart(kind="limits", title=title, panels=(panel,))
