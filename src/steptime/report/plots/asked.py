"""The option ``--plot`` of commands: checked before the work, drawn after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def drawing(kind: str, path: Path | None) -> Callable[[Mapping[str, Any]], None] | None:
    """Function that draws the JSON result of a command; None: no picture is requested.

    Raises:
        UserError: matplotlib is not installed, or cannot write the file.
    """
    if path is None:
        return None
    from steptime.report.figure import refuse_plot
    from steptime.report.plots.draw import write_chart
    from steptime.report.plots.results import result
    from steptime.report.plots.series import chart

    refuse_plot(path)
    return lambda found: write_chart(chart(kind, [result("this result", found)]), path)
