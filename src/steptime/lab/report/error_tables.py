"""Tables of errors of predictions: one row for each group of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import first_few, shorten
from steptime.report.text import change, grid, heading, indented, percent, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS: Final = {
    "mape": "mean", "median_ape": "median", "p90_ape": "p90", "bias": "bias", "coverage90": "in band",
}  # fmt: skip
"""Statistic -> its column."""
BY_SCALE: Final = "by_scale"


COLUMNS_NAMED: Final = 12
"""Columns of a table that a line names."""


def print_skipped(screen: Console, score: Mapping[str, Any]) -> None:
    """Rows without a prediction by reason with the first of each, and columns that nothing reads."""
    for reason, number in score["skipped"].items():
        where = f"{'' if number == 1 else 'first: '}{score['skipped_first'][reason]}"
        indented(screen, printable(f"{number} skipped: {reason} ({where})"), by=2)
    if unread := score.get("columns_not_read"):
        names = first_few([shorten(name, 40) for name in unread], COLUMNS_NAMED)
        indented(screen, f"columns that are not read: {names} (steptime score --columns lists those that are)", by=2)


def print_doubts(screen: Console, score: Mapping[str, Any]) -> None:
    """Rows with a prediction by what is doubtful about them."""
    for doubt, number in score.get("doubts", {}).items():
        indented(screen, f"{number} doubtful: {doubt}", by=2)


def error_head(names: Sequence[str]) -> list[str]:
    """Columns of a table of these statistics, behind the group's name.

    >>> error_head(("mape", "bias"))
    ['rows', 'mean', 'bias']
    """
    return ["rows", *(COLUMNS[name] for name in names)]


def error_figures(errors: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Errors in percent, the bias with its sign; a dash where there is none.

    >>> error_figures({"mape": 0.1, "bias": 0.02, "coverage90": None}, ("mape", "bias", "coverage90"))
    ['10.0 %', '+2.0 %', '-']
    """
    values = [(name, errors[name]) for name in names]
    return ["-" if v is None else change(v) if name == "bias" else percent(v) for name, v in values]


def error_cells(errors: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """One row of such a table: how many measurements there are, and :func:`error_figures`."""
    return [str(errors["rows"]), *error_figures(errors, names)]


def error_table(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Table:
    """A row for each group: its name and :func:`error_cells`."""
    table = grid(("", *error_head(names)))
    for name, errors in rows.items():
        table.add_row(printable(name), *error_cells(errors, names))
    return table


def largest_groups(
    grouping: str, groups: Mapping[str, Mapping[str, Any]], most: int | None = None
) -> dict[str, Mapping[str, Any]]:
    """The groups with the most rows, those first, by name where they are equal; scales by their number of GPUs.

    >>> list(largest_groups("by_gpu", {"a": {"rows": 1}, "b": {"rows": 3}, "c": {"rows": 2}}, 2))
    ['b', 'c']
    >>> list(largest_groups("by_scale", {"8-15": {"rows": 3}, "16-31": {"rows": 4}}))
    ['8-15', '16-31']
    """
    largest = sorted(groups.items(), key=lambda item: (-item[1]["rows"], item[0]))[:most]
    if grouping == BY_SCALE:
        largest.sort(key=lambda item: int(item[0].split("-")[0]))
    return dict(largest)


def print_groups(
    screen: Console, title: str, grouping: str, score: Mapping[str, Any], names: Sequence[str], most: int
) -> None:
    """The largest groups of a grouping with their errors under a title, and how many more there are; none: nothing."""
    groups = score.get(grouping, {})
    if not groups:
        return
    shown = largest_groups(grouping, groups, most)
    heading(screen, title)
    screen.print(error_table(shown, names))
    if len(groups) > len(shown):
        screen.print(f"and {len(groups) - len(shown)} more (--json lists all)")
