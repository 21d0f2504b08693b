"""``steptime plot``: a chart of saved results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, positional


def command(
    kind: Annotated[
        str,
        positional(
            metavar="KIND",
            help="scaling, breakdown, memory, overview, roofline, hierarchy, scatter, heatmap, timeline, mesh or "
            "limits.",
        ),
    ],
    results: Annotated[
        list[Path] | None, positional(metavar="RESULT...", help="What commands wrote with --json, or CSV rows.")
    ] = None,
    out: Annotated[Path | None, flag("-o", "--out", metavar="FILE", help="Picture to write: .svg, .png, .pdf.")] = None,
    x: Annotated[str | None, flag("--x", metavar="COLUMN", help="Along a heat map.")] = None,
    y: Annotated[str | None, flag("--y", metavar="COLUMN", help="Up a heat map.")] = None,
    value: Annotated[
        str | None, flag("--value", metavar="COLUMN", help="Drawn in a heat map; default step_time_s.")
    ] = None,
    title: Annotated[str | None, flag("--title", metavar="TEXT", help="Title of the picture.")] = None,
    json: o.Json = False,
) -> None:
    """Draw saved results: scaling, breakdowns, memory, rooflines, plans, sweeps, timelines, meshes.

    scaling, breakdown, memory, overview, scatter and heatmap take several results, side by side. With --json the chart
    is printed as data, and drawn only if there is -o.
    """
    from dataclasses import replace

    from steptime.errors import UserError
    from steptime.report.figure import refuse_plot
    from steptime.report.plots.results import read_result
    from steptime.report.plots.series import Options, chart

    if out is None and not json:
        raise UserError("plot: no picture to write", hint="give -o FILE.svg, or --json for the data")
    if out is not None:
        refuse_plot(out)
    found = chart(kind, [read_result(path) for path in results or ()], Options(x=x or "", y=y or "", value=value or ""))
    if title is not None:
        found = replace(found, title=title)
    _shown(found, out, json)


def _shown(found: Any, out: Path | None, json: bool) -> None:
    from steptime.cli.output import print_json
    from steptime.report import text as t
    from steptime.report.plots.draw import write_chart

    if out is not None:
        write_chart(found, out)
    if json:
        print_json(found.to_json())
    elif out is not None:
        t.console().print(t.printable(f"Drawn in {out}"), soft_wrap=True)
