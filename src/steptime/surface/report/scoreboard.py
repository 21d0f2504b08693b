"""The scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from steptime.study.measured.aggregate import coverage_interval, covered
from steptime.study.measured.computed import EXACT
from steptime.study.measured.reasons import Flag
from steptime.study.measured.targets import CLAIMS, Reached
from steptime.surface.report.error_tables import error_cells, error_figures, error_head, largest_groups
from steptime.surface.report.score_runs import MEMORY, TIME
from steptime.surface.report.text import percent
from steptime.surface.scoreboard import SEEN, UNSEEN, WAYS, Board

LEAST_OF_A_GPU: Final = 30
FIGURES: Final = {
    "predicted-and-measured": "Predicted over measured step time, sources not known to the fit",
    "residuals-by-scale": "Error by number of GPUs, sources not known to the fit",
    "coverage-by-source": "Share of measured times inside the 90 % band, by source not known to the fit",
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first ``left`` columns are set left.

    >>> print(markdown(("a", "b"), [("x", "1")]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    rule = "|".join("---" if i < left else "--:" for i in range(len(head)))
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])


def ways_table(board: Board) -> str:
    """Every way of predicting in one line."""
    head = ("predicted with", *error_head(TIME), "interval of in band", "mean over sources", "bias over sources",
            "without the largest", "rank")  # fmt: skip
    rows = []
    for key, found in board.summaries.items():
        interval, macro, rest = (found[n] for n in (
            "coverage90_by_source_interval", "macro", "macro_without_dominant"))  # fmt: skip
        rows.append([
            WAYS[key].title, *error_cells(found["time"], TIME),
            _ends(interval), *error_figures(macro, ("mape", "bias")),
            _cell(rest["mape"]) if rest else "-", _plain(found["rank"]["median_spearman"]),
        ])  # fmt: skip
    return markdown(head, rows)


def _ends(interval: Sequence[float] | None) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}" if interval else "-"


def claims_line(board: Board) -> str:
    """The same on the rows that support claims."""
    cells = [f"{WAYS[key].title}: {_cell(found['time_supporting_claims']['mape'])} mean, "
             f"{_cell(found['time_supporting_claims']['median_ape'])} median, "
             f"{_cell(found['macro_supporting_claims']['mape'])} mean over sources"
             for key, found in board.summaries.items()]  # fmt: skip
    rows = board.summaries[SEEN]["time_supporting_claims"]["rows"]
    return f"On the {rows} rows that nothing speaks against: " + "; ".join(cells) + "."


def scripts_line(board: Board) -> str:
    """What the errors owe to settings that scripts state and tables do not."""
    rows = board.reading["flags"].get(str(Flag.SCRIPT), 0)
    errors = ", ".join(f"{WAYS[key].title}: {_cell(error)}" for key, error in board.as_printed.items())
    return (
        f"Settings of {rows} rows come from the scripts behind their sources ([Score](score.md#training-runs)). With "
        f"the tables as they are printed the mean over sources is: {errors}."
    )


def computed_line(board: Board) -> str:
    """Which step times nobody measured."""
    found: Mapping[str, int] = board.summaries[SEEN]["computed"]
    of = " and ".join(f"{rows} of {source}" for source, rows in sorted(found.items()))
    return (
        f"Step times that are too regular to have been measured ({EXACT:g} from one line in the number of "
        f"micro-batches): {of or 'none'}. They were computed, from measured parts it seems. They are read, fitted and "
        "scored as all others."
    )


def group_table(board: Board, name: str, title: str) -> str:
    """Groups under the hardest way with a named framework, with the packaged error beside."""
    found, seen = board.summaries[UNSEEN][name], board.summaries[SEEN][name]
    rows = [[group, *error_cells(errors, TIME), _cell(seen[group]["mape"])]
            for group, errors in largest_groups(name, found).items()]  # fmt: skip
    return markdown((title, *error_head(TIME), "mean, packaged"), rows)


def gpu_table(board: Board) -> str:
    """GPUs with enough rows, each with the interval of its coverage, which whole sources make."""
    found, seen = board.summaries[UNSEEN]["by_gpu"], board.summaries[SEEN]["by_gpu"]
    kept = {gpu: errors for gpu, errors in found.items() if errors["rows"] >= LEAST_OF_A_GPU}
    rows = []
    for gpu, errors in largest_groups("by_gpu", kept).items():
        own = [each for each in board.scores[UNSEEN].scored if each.run.device == gpu]
        ends, sources = _ends(coverage_interval(own)), str(len(covered(own)))
        rows.append([gpu, *error_cells(errors, TIME), ends, sources, _cell(seen[gpu]["mape"])])
    return markdown(("GPU", *error_head(TIME), "interval of in band", "sources", "mean, packaged"), rows)


def memory_table(board: Board) -> str:
    """Errors of peak memory, which no framework's parameters move."""
    rows = [[name.replace("_", " "), *error_cells(errors, MEMORY)]
            for name, errors in board.summaries[SEEN]["memory"]["by_definition"].items()]  # fmt: skip
    return markdown(("what was measured", *error_head(MEMORY)), rows)


def rank_table(board: Board) -> str:
    """Whether the order of plans is right."""
    rows = []
    for key, found in board.summaries.items():
        rank = found["rank"]
        middle, mean = _plain(rank["median_spearman"]), _plain(rank["mean_spearman"])
        rows.append([WAYS[key].title, str(rank["groups"]), middle, mean, _cell(rank["best_picked"]),
                     _cell(rank["mean_regret"])])  # fmt: skip
    return markdown(("predicted with", "groups", "median correlation", "mean", "best picked", "mean regret"), rows)


def targets_table(found: Sequence[Reached]) -> str:
    """Errors that others publish on runs that are public, and ours."""
    rows = [
        [r.target.name, "largest" if r.target.statistic == "max_ape" else "mean", str(r.rows),
         _cell(r.target.wanted) if r.target.wanted is not None else "none published",
         *(_ours(r, key) for key in (SEEN, "source_and_model", "model", UNSEEN)), _verdict(r), r.target.by]
        for r in found
    ]  # fmt: skip
    head = ("runs", "error", "rows", "published", "packaged", "model not known (in its source)", "model not known",
            "source not known", "met", "published by")  # fmt: skip
    return markdown(head, rows)


def _ours(found: Reached, way: str) -> str:
    """No way of predicting refits memory, so that it has one column alone."""
    return _cell(found.errors[way]) if found.target.measure == "time" or way == SEEN else "-"


def _verdict(found: Reached) -> str:
    by, way = found.missed_by, WAYS[found.target.split].title
    way = way if found.target.measure == "time" else "rows may have been seen"
    if by is None:
        return "-"
    return f"{'met' if by <= 0 else 'missed'} by {abs(by) * 100:.1f} points ({way})"


def claims_table() -> str:
    """What peers publish."""
    return markdown(("tool", "claim", "on", "source"), [(c.tool, c.claim, c.scope, c.source) for c in CLAIMS], left=4)


def _cell(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def page(board: Board) -> str:
    """The whole page."""
    top = board.summaries[SEEN]
    fit, skipped = top["fit"], sum(top["skipped"].values())
    parts = [
        "# Scoreboard: predicted against measured training runs",
        "Made by `scripts/scoreboard`; edits are lost when it runs again. "
        f"Frameworks `{board.digest}`, fitted {fit.get('fitted', 'at an unknown date')} to {fit.get('rows', '?')} runs "
        f"of {fit.get('sources', '?')} sources.",
        f"{top['rows']} published rows; {top['scored']} can be read ({top['time']['rows']} step times, "
        f"{top['memory']['rows']} peak memories), {skipped} cannot:",
        markdown(("reason", "rows"), [(name, str(n)) for name, n in top["skipped"].items()]),
        "## Step time",
        "Errors are of predicted against measured time, $p/t-1$; mean, median and p90 of its magnitude, bias its mean. "
        "In band: share of the measured times inside the predicted 90 % band; its interval (90 %) draws whole sources "
        "again, because rows of one source err together. Mean and bias over sources: of sources with ten rows or more, "
        "each counting once; without the largest: without the source that has most rows. Rank: median rank "
        "correlation over groups of five plans or more.",
        ways_table(board), claims_line(board), scripts_line(board), computed_line(board),
        *(f"![{text}](figures/{n}.svg)" for n, text in FIGURES.items()),
        "## By source, not known to the fit", group_table(board, "by_source", "source"),
        f"## By GPU with {LEAST_OF_A_GPU} rows or more, source not known to the fit",
        gpu_table(board),
        "## By number of GPUs, dtype and kind of model, source not known to the fit",
        group_table(board, "by_scale", "GPUs"), group_table(board, "by_dtype", "dtype"),
        group_table(board, "by_kind", "model"),
        "## Order of plans",
        "Runs of one model on one machine that differ in their plan alone. Regret: how much slower the plan predicted "
        "fastest is than the fastest.",
        rank_table(board), "## Peak memory",
        "By what was measured. Nothing of the memory is refitted without the rows it predicts: the constants of "
        "frameworks and allocators may come from rows like these.",
        memory_table(board),
        "## Beside published accuracy, on the same runs",
        "Tools publish errors on runs that they could measure; where those runs are public, ours stand beside them.",
        targets_table(board.targets), "## What others publish",
        "In their own words, on their own runs; not comparable with each other.", claims_table(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"
