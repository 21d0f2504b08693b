"""Report of scored training runs: errors of step time and memory, overall and by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import counted
from steptime.lab.report.error_tables import (
    BY_SCALE,
    error_figures,
    error_table,
    print_doubts,
    print_groups,
    print_skipped,
)
from steptime.report.text import console, heading, percent, printable

if TYPE_CHECKING:
    from rich.console import Console

TIME: Final = ("mape", "median_ape", "bias", "p90_ape", "coverage90")
MEMORY: Final = ("mape", "median_ape", "bias", "p90_ape", "coverage90")
TITLES: Final = {
    "by_source": "By source", "by_gpu": "By GPU", BY_SCALE: "By number of GPUs", "by_dtype": "By dtype",
    "by_kind": "By kind of model",
}  # fmt: skip
MOST: Final = 40
"""Rows of a table, the groups with the most runs; --json has all."""


def print_run_score(score: Mapping[str, Any]) -> None:
    """Counts, reasons, and errors."""
    screen = console()
    _counts(screen, score)
    if score["time"]["rows"]:
        heading(screen, "Errors of predicted against measured step time")
        _overall(screen, score)
        for name, title in TITLES.items():
            print_groups(screen, title, name, score, TIME, MOST)
        _rank(screen, score["rank"])
    _memory(screen, score["memory"])
    if score["time"]["rows"]:
        screen.print("\nIn band: share of the measured times inside the predicted 90 % band.", soft_wrap=True)


def _counts(screen: Console, score: Mapping[str, Any]) -> None:
    rows, times, peaks = score["rows"], score["time"]["rows"], score["memory"]["rows"]
    memories = f"{peaks} peak {'memory' if peaks == 1 else 'memories'}"
    screen.print(f"{score['scored']} of {counted(rows, 'row')} scored: {counted(times, 'step time')}, {memories}",
                 soft_wrap=True)  # fmt: skip
    print_skipped(screen, score)
    screen.print(printable(f"Predicted by {score['predicted_by']}, framework {score['framework']}."), soft_wrap=True)
    if score.get("note"):
        screen.print(printable(score["note"][:1].upper() + score["note"][1:]), soft_wrap=True)
    print_doubts(screen, score)
    seen, rows = score["seen_by_the_fit"], score["time"]["rows"]
    if not rows or score["predicted_by"] != "frameworks in use":
        return
    if seen is None:
        text = "The fit does not say which sources it saw; the errors may be those of a fit, not of a prediction."
    elif seen:
        text = (f"{seen} of {rows} step times are of sources that the fit has seen: their errors say how well it "
                "describes them. --leave-out each predicts every source unseen.")  # fmt: skip
    else:
        text = "The fit has seen none of their sources."
    screen.print(text, soft_wrap=True)


def _overall(screen: Console, score: Mapping[str, Any]) -> None:
    rows = {"all": score["time"], "supporting claims": score["time_supporting_claims"]}
    top = score["dominant_source"]
    if top:
        rows[f"without {top}"] = score["time_without_dominant"]
    table = error_table(rows, TIME)
    means = {"mean over sources": score["macro"]}
    if top:
        means[f"mean over sources without {top}"] = score["macro_without_dominant"]
    for name, errors in means.items():
        if errors["sources"]:
            table.add_row(printable(name), counted(errors["sources"], "source"), *error_figures(errors, TIME))
    screen.print(table)
    interval = score["coverage90_by_source_interval"]
    if interval:
        screen.print(f"In band, when whole sources are drawn again: {percent(interval[0])} to {percent(interval[1])}")


def _rank(screen: Console, rank: Mapping[str, Any]) -> None:
    if not rank["groups"]:
        return
    heading(screen, "Order of plans")
    middle = "unknown" if rank["median_spearman"] is None else f"{rank['median_spearman']:.2f}"
    screen.print(
        f"{counted(rank['groups'], 'group')} of five plans or more: median rank correlation {middle}; the plan "
        f"predicted fastest is the fastest in {percent(rank['best_picked'])}, and {percent(rank['mean_regret'])} "
        "slower on average",
        soft_wrap=True,
    )


def _memory(screen: Console, memory: Mapping[str, Any]) -> None:
    if not memory["rows"]:
        return
    heading(screen, "Errors of peak memory, by what was measured")
    rows = {name.replace("_", " "): errors for name, errors in memory["by_definition"].items()}
    screen.print(error_table(rows, MEMORY))
