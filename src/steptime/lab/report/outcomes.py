"""Report of layouts that ran and that ran out of memory: shares, a reliability table, and its diagram."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steptime.errors import UserError, counted
from steptime.lab.report.error_tables import print_doubts, print_skipped
from steptime.report.text import console, grid, heading, percent

SIZE: Final = (4.6, 4.2)
COLOUR: Final = "#2b6cb0"


def print_outcomes(score: Mapping[str, Any]) -> None:
    """Counts, reasons, shares and reliability."""
    screen = console()
    screen.print(f"{score['scored']} of {counted(score['rows'], 'row')} scored", soft_wrap=True)
    print_skipped(screen, score)
    print_doubts(screen, score)
    if not score["scored"]:
        return
    heading(screen, "Layouts whose predicted chance of running out of memory is above one half")
    for name, text in (("ran_out", "of those that ran out of memory"), ("ran", "of those that ran")):
        part = score[name]
        if part["rows"]:
            screen.print(f"{percent(part['above_half'])} {text} ({part['rows']})", soft_wrap=True)
    heading(screen, "Reliability: predicted chance and share that ran out")
    table = grid(("predicted", "layouts", "mean", "ran out"))
    for each in score["reliability"]:
        if each["rows"]:
            table.add_row(f"{each['low']:g} to {each['high']:g}", str(each["rows"]), percent(each["mean"]),
                          percent(each["ran_out"]))  # fmt: skip
    screen.print(table)
    picked = score["picked"]
    if picked["groups"]:
        cost = (
            "" if picked["mean_regret"] is None else f", and is {percent(picked['mean_regret'])} slower than the best"
        )
        screen.print(f"The plan predicted fastest among those that likely fit ran in {percent(picked['ran'])} of "
                     f"{counted(picked['groups'], 'group')}{cost}.", soft_wrap=True)  # fmt: skip


def reliability_table(score: Mapping[str, Any]) -> str:
    """The reliability as a Markdown table."""
    lines = ["| predicted chance | layouts | mean | share that ran out |", "|---|--:|--:|--:|"]
    lines += [
        f"| {each['low']:g} to {each['high']:g} | {each['rows']} | {percent(each['mean'])} "
        f"| {percent(each['ran_out'])} |"
        for each in score["reliability"] if each["rows"]
    ]  # fmt: skip
    return "\n".join(lines)


def write_reliability(score: Mapping[str, Any], path: Path) -> None:
    """Writes the reliability diagram as SVG.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install 'steptime[calibrate]'")
    bins = [each for each in score["reliability"] if each["rows"]]
    settings = {"svg.hashsalt": "steptime", "svg.fonttype": "none", "font.size": 9}
    with import_module("matplotlib").rc_context(settings):
        figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color="#999999", lw=0.8, ls="--")
        mean, share = [each["mean"] for each in bins], [each["ran_out"] for each in bins]
        axes.plot(mean, share, "o-", color=COLOUR, lw=1)
        for each in bins:
            axes.annotate(str(each["rows"]), (each["mean"], each["ran_out"]), textcoords="offset points",
                          xytext=(6, -9), fontsize=8)  # fmt: skip
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("predicted chance of running out of memory")
        axes.set_ylabel("share of the layouts that ran out")
        figure.savefig(path, metadata={"Date": None})
