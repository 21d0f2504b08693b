"""Reports of scores and of fits: tables of errors, and the columns that tables of measurements may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import counted, first_few, shorten
from steptime.measure.kinds import KINDS
from steptime.measure.runs.read import METRICS, NEEDED, OTHER_NAMES, SCALED
from steptime.measure.runs.stages import NEEDED as STAGES_NEEDED
from steptime.measure.runs.stages import stage_columns
from steptime.report.text import change, console, grid, heading, indented, percent, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS: Final = {"mape": "mean", "median_ape": "median", "p90_ape": "p90", "bias": "bias", "coverage90": "in band"}
"""Statistic -> its column."""
BY_SCALE: Final = "by_scale"


COLUMNS_NAMED: Final = 12
"""Columns of a table that a line names."""


def print_skipped(screen: Console, score: Mapping[str, Any]) -> None:
    """Prints rows without a prediction by reason with the first of each, and columns that nothing reads."""
    for reason, number in score["skipped"].items():
        where = f"{'' if number == 1 else 'first: '}{score['skipped_first'][reason]}"
        indented(screen, printable(f"{number} skipped: {reason} ({where})"), by=2)
    if unread := score.get("columns_not_read"):
        names = first_few([shorten(name, 40) for name in unread], COLUMNS_NAMED)
        indented(screen, f"columns that are not read: {names} (steptime score --columns lists those that are)", by=2)


def print_doubts(screen: Console, score: Mapping[str, Any]) -> None:
    """Prints the number of rows with a prediction by doubt."""
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
    """Prints the largest groups of a grouping with their errors under a title, and the number of the others."""
    groups = score.get(grouping, {})
    if not groups:
        return
    shown = largest_groups(grouping, groups, most)
    heading(screen, title)
    screen.print(error_table(shown, names))
    if len(groups) > len(shown):
        screen.print(f"and {len(groups) - len(shown)} more (--json lists all)")


ERRORS: Final = ("median_ape", "mape", "p90_ape", "bias", "coverage90")
TITLES: Final = {
    "by_op": "By operator",
    "by_gpu": "By GPU",
    "by_source": "By source",
    "by_curve": "By origin of the curve",
}
MOST: Final = 20
"""Rows of a table, the groups with the most measurements; --json has all."""


def print_score(score: Mapping[str, Any]) -> None:
    """Prints counts, reasons and errors, overall and by group."""
    screen = console()
    screen.print(f"{score['scored']} of {counted(score['rows'], 'row')} scored")
    for reason, number in sorted(score["skipped"].items(), key=lambda item: (-item[1], item[0])):
        indented(screen, f"{number} skipped: {reason}", by=2)
        if reason in score.get("hints", {}):
            indented(screen, printable(score["hints"][reason]), by=6)
    if not score["scored"]:
        return
    heading(screen, "Errors of predicted against measured time")
    screen.print(error_table({"all": score["time"] | {"rows": score["scored"]}}, ERRORS))
    for grouping, title in TITLES.items():
        print_groups(screen, title, grouping, score, ERRORS, MOST)
    screen.print("\nIn band: share of the measurements inside the predicted 90 % band.", soft_wrap=True)


def print_stage_score(score: Mapping[str, Any]) -> None:
    """Prints counts, reasons and errors of each time of a stage."""
    screen = console()
    screen.print(f"{score['scored']} of {counted(score['rows'], 'row')} scored")
    print_skipped(screen, score)
    print_doubts(screen, score)
    stated = {name: errors for name, errors in score["stages"].items() if errors["rows"]}
    if stated:
        heading(screen, "Errors of predicted against measured times of stages")
        screen.print(error_table({**stated, "T_F, T_B, T_W": score["passes"]}, ERRORS[:-1]))


def columns_document() -> dict[str, Any]:
    """Columns of the tables with other names that they may have."""
    return {
        "runs": {"needed": list(NEEDED), "one_of": list(METRICS), "other_names": _other_names()},
        "stages": {"needed": list(STAGES_NEEDED), "one_of": stage_columns(), "others": "as runs"},
        "outcomes": {"needed": ["outcome"], "others": "as runs"},
        **{name: made for kind in KINDS.values() for name, made in kind.columns().items()},
    }


def _other_names() -> dict[str, list[str]]:
    found = {name: list(others) for name, others in OTHER_NAMES.items()}
    for other, (own, _) in SCALED.items():
        found[own].append(other)
    return found


def print_columns() -> None:
    """Prints the columns of training runs, of stages, of layouts and of the further kinds."""
    screen = console()
    heading(screen, "Training runs: a column may have one of these names instead")
    runs = grid(("column", "other names"), left=(0, 1))
    for name, others in _other_names().items():
        runs.add_row(f"{name} *" if name in NEEDED else name, ", ".join(others))
    screen.print(runs)
    screen.print(f"* must be there, and one of {', '.join(METRICS)}", soft_wrap=True)
    heading(screen, "Times of stages: columns of training runs, without a time of the step")
    screen.print(f"needed: {', '.join(STAGES_NEEDED)}, and one of {', '.join(stage_columns())}", soft_wrap=True)
    heading(screen, "Layouts that ran or ran out of memory: columns of training runs, with or without a time")
    screen.print("needed: outcome (ok, or OOM)", soft_wrap=True)
    for name in sorted(KINDS, reverse=True):  # kernels first: the last lines of collectives are about both
        KINDS[name].print_columns()


TIME: Final = ("mape", "median_ape", "bias", "p90_ape", "coverage90")
MEMORY: Final = ("mape", "median_ape", "bias", "p90_ape", "coverage90")
RUN_TITLES: Final = {
    "by_source": "By source",
    "by_gpu": "By GPU",
    BY_SCALE: "By number of GPUs",
    "by_dtype": "By dtype",
    "by_kind": "By kind of model",
}
MOST_RUNS: Final = 40
"""Rows of a table, the groups with the most runs; --json has all."""


def print_run_score(score: Mapping[str, Any]) -> None:
    """Prints counts, reasons, and errors."""
    screen = console()
    _counts(screen, score)
    if score["time"]["rows"]:
        heading(screen, "Errors of predicted against measured step time")
        _overall(screen, score)
        for name, title in RUN_TITLES.items():
            print_groups(screen, title, name, score, TIME, MOST_RUNS)
        _rank(screen, score["rank"])
    _memory(screen, score["memory"])
    if score["time"]["rows"]:
        screen.print("\nIn band: share of the measured times inside the predicted 90 % band.", soft_wrap=True)


def _counts(screen: Console, score: Mapping[str, Any]) -> None:
    rows, times, peaks = score["rows"], score["time"]["rows"], score["memory"]["rows"]
    memories = f"{peaks} peak {'memory' if peaks == 1 else 'memories'}"
    screen.print(
        f"{score['scored']} of {counted(rows, 'row')} scored: {counted(times, 'step time')}, {memories}", soft_wrap=True
    )
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
        text = (
            f"{seen} of {rows} step times are of sources that the fit has seen: their errors say how well it "
            "describes them. --leave-out each predicts every source unseen."
        )
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
