"""The scoreboard as Markdown, and its figures as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from first_plans import first_plans_part
from scoreboard import CLAIMS, SEEN, UNNAMED, UNSEEN, WAYS, Board, Reached
from steptime.errors import UserError
from steptime.measure.report.score import MEMORY, TIME, error_cells, error_figures, error_head, largest_groups
from steptime.measure.runs.aggregate import ScoredRun, coverage_interval, covered, timed
from steptime.measure.runs.read import Flag
from steptime.measure.runs.reading import EXACT
from steptime.report.text import percent

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
    head = (
        "predicted with",
        *error_head(TIME),
        "interval of in band",
        "mean over sources",
        "bias over sources",
        "without the largest",
        "rank",
    )
    rows = []
    for key, found in board.summaries.items():
        interval, macro, rest = (found[n] for n in ("coverage90_by_source_interval", "macro", "macro_without_dominant"))
        rows.append(
            [
                WAYS[key].title,
                *error_cells(found["time"], TIME),
                _ends(interval),
                *error_figures(macro, ("mape", "bias")),
                _cell(rest["mape"]) if rest else "-",
                _plain(found["rank"]["median_spearman"]),
            ]
        )
    return markdown(head, rows)


def _ends(interval: Sequence[float] | None) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}" if interval else "-"


def claims_line(board: Board) -> str:
    """The same on the rows that support claims."""
    cells = [
        f"{WAYS[key].title}: {_cell(found['time_supporting_claims']['mape'])} mean, "
        f"{_cell(found['time_supporting_claims']['median_ape'])} median, "
        f"{_cell(found['macro_supporting_claims']['mape'])} mean over sources"
        for key, found in board.summaries.items()
    ]
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
    rows = [
        [group, *error_cells(errors, TIME), _cell(seen[group]["mape"])]
        for group, errors in largest_groups(name, found).items()
    ]
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
    rows = [
        [name.replace("_", " "), *error_cells(errors, MEMORY)]
        for name, errors in board.summaries[SEEN]["memory"]["by_definition"].items()
    ]
    return markdown(("what was measured", *error_head(MEMORY)), rows)


def rank_table(board: Board) -> str:
    """Whether the order of plans is right."""
    rows = []
    for key, found in board.summaries.items():
        rank = found["rank"]
        rows.append(
            [WAYS[key].title, str(rank["groups"]), _plain(rank["median_spearman"]), _plain(rank["mean_spearman"])]
        )
    return markdown(("predicted with", "groups", "median correlation", "mean"), rows)


def choice_table(board: Board) -> str:
    """What it costs to take the plan that is predicted fastest."""
    rows = []
    for title, found in _ways_and_second(board):
        choice = found["choice"]
        errors = [_cell(choice[n]) for n in ("best_picked", "mean_regret", "median_regret", "p90_regret", "chance")]
        rows.append([title, str(choice["groups"]), *errors])
    head = ("predicted with", "groups", "best picked", "mean regret", "median", "p90", "regret of a plan at random")
    return markdown(head, rows)


def _ways_and_second(board: Board) -> list[tuple[str, Mapping[str, Any]]]:
    """Statistics of every way, then of those that say something of the second table, each with its title."""
    ways = [(WAYS[key].title, found) for key, found in board.summaries.items()]
    return ways + [(f"{title}, second table", found) for title, found in _second(board)]


def _second(board: Board) -> list[tuple[str, Mapping[str, Any]]]:
    return [(WAYS[key].title, board.second[key]) for key in (SEEN, UNSEEN, UNNAMED) if key in board.second]


def sources_table(board: Board) -> str:
    """Means over all sources, and what remains without rows that were computed."""
    rows = []
    for key, found in board.summaries.items():
        every, rest, over = found["macro_all_sources"], found["time_without_computed"], found["macro_without_computed"]
        rows.append(
            [
                WAYS[key].title,
                str(every["sources"]),
                *error_figures(every, ("mape", "median_ape", "bias", "coverage90")),
                *error_cells(rest, ("mape", "bias", "coverage90")),
                *error_figures(over, ("mape", "bias")),
            ]
        )
    head = (
        "predicted with",
        "sources",
        "mean",
        "median",
        "bias",
        "in band",
        "measured rows",
        "mean",
        "bias",
        "in band",
        "mean over sources",
        "bias",
    )
    return markdown(head, rows)


def second_tables(board: Board) -> list[str]:
    """Errors on the second table, overall and by source; nothing without one."""
    if not board.second:
        return []
    overall = [[title, *error_cells(found["time"], TIME)] for title, found in _second(board)]
    sources = board.second[UNSEEN]["by_source"]
    by_source = [
        [name, *error_cells(errors, TIME), _cell(board.second[SEEN]["by_source"][name]["mape"])]
        for name, errors in largest_groups("by_source", sources).items()
    ]
    memory = board.second[SEEN]["memory"]["by_definition"]
    peaks = [[name.replace("_", " "), *error_cells(errors, MEMORY)] for name, errors in memory.items()]
    return [
        "## Second table",
        "Runs of software and of a kind of job that the first table lacks; the figures before any fit had seen them "
        "are in [How accurate it is](accuracy.md#runs-of-software-that-no-fit-has-seen). No figure above counts them.",
        markdown(("predicted with", *error_head(TIME)), overall),
        markdown(("source, not known to the fit", *error_head(TIME), "mean, packaged"), by_source),
        markdown(("peak memory, by what was measured", *error_head(MEMORY)), peaks),
        *first_plans_part(),
    ]


def targets_table(found: Sequence[Reached]) -> str:
    """Errors that others publish on runs that are public, and ours."""
    rows = [
        [
            r.target.name,
            "largest" if r.target.statistic == "max_ape" else "mean",
            str(r.rows),
            _cell(r.target.wanted) if r.target.wanted is not None else "none published",
            *(_ours(r, key) for key in (SEEN, "source_and_model", "model", UNSEEN)),
            _verdict(r),
            r.target.by,
        ]
        for r in found
    ]
    head = (
        "runs",
        "error",
        "rows",
        "published",
        "packaged",
        "model not known (in its source)",
        "model not known",
        "source not known",
        "met",
        "published by",
    )
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


def step_time_part(board: Board) -> list[str]:
    """Errors of the step time over all rows, with the figures."""
    return [
        "## Step time",
        "Errors are of predicted against measured time, $p/t-1$; mean, median and p90 of its magnitude, bias its mean. "
        "In band: share of the measured times inside the predicted 90 % band; its interval (90 %) draws whole sources "
        "again, because rows of one source err together. Mean and bias over sources: of sources with ten rows or more, "
        "each counting once; without the largest: without the source that has most rows. Rank: median rank "
        "correlation over groups of five plans or more.",
        ways_table(board),
        claims_line(board),
        scripts_line(board),
        computed_line(board),
        "Over all sources, also those with fewer than ten rows, each counting once; and without the computed rows, of "
        "the rest and over sources with ten rows of it or more:",
        sources_table(board),
        *(f"![{text}](figures/{n}.svg)" for n, text in FIGURES.items()),
    ]


def groups_part(board: Board) -> list[str]:
    """Errors by source, GPU, scale, dtype, model and architecture."""
    return [
        "## By source, not known to the fit",
        group_table(board, "by_source", "source"),
        f"## By GPU with {LEAST_OF_A_GPU} rows or more, source not known to the fit",
        gpu_table(board),
        "## By number of GPUs, dtype and kind of model, source not known to the fit",
        group_table(board, "by_scale", "GPUs"),
        group_table(board, "by_dtype", "dtype"),
        group_table(board, "by_kind", "model"),
        "## By architecture of the GPU and by dense or experts, source not known to the fit",
        group_table(board, "by_experts", "layers"),
        group_table(board, "by_architecture", "architecture"),
        group_table(board, "by_architecture_and_experts", "architecture, layers"),
    ]


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
        *step_time_part(board),
        *groups_part(board),
        *second_tables(board),
        "## Order of plans",
        "Runs of one model on one machine that differ in their plan alone, in groups of five plans or more.",
        rank_table(board),
        "## What the best plan costs",
        "Regret: measured time of the plan predicted fastest over that of the fastest, less 1, in groups of three "
        "plans or more; at random: the mean over the plans of a group.",
        choice_table(board),
        "## Peak memory",
        "By what was measured. Nothing of the memory is refitted without the rows it predicts: the constants of "
        "frameworks and allocators may come from rows like these.",
        memory_table(board),
        "## Beside published accuracy, on the same runs",
        "Tools publish errors on runs that they could measure; where those runs are public, ours stand beside them.",
        targets_table(board.targets),
        "## What others publish",
        "In their own words, on their own runs; not comparable with each other.",
        claims_table(),
    ]
    return "\n\n".join(parts) + "\n"


SIZE: Final = (6.4, 4.2)
LEAST_ROWS: Final = 5
COLOUR, EDGE = "#2b6cb0", "#999999"


def write_figures(board: Board, folder: Path) -> list[Path]:
    """Writes every figure of :data:`FIGURES`; points are rasterised so that the files stay small.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install 'steptime[calibrate]'")
    folder.mkdir(parents=True, exist_ok=True)
    scored = timed(board.scores[UNSEEN].scored)
    draw: dict[str, Callable[[Any, Sequence[ScoredRun]], None]] = {
        "predicted-and-measured": _times,
        "residuals-by-scale": _residuals,
        "coverage-by-source": _coverage,
    }
    settings = {"svg.hashsalt": "steptime", "svg.fonttype": "none", "font.size": 9, "savefig.dpi": 110}
    with import_module("matplotlib").rc_context(settings):
        return [_written(folder / f"{name}.svg", title, draw[name], scored) for name, title in FIGURES.items()]


def _written(
    path: Path, title: str, draw: Callable[[Any, Sequence[ScoredRun]], None], scored: Sequence[ScoredRun]
) -> Path:
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw(axes, scored)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    return path


def _ratios(scored: Sequence[ScoredRun]) -> tuple[Any, Any]:
    measured = np.array([s.run.step_time_s for s in scored], np.float64)
    predicted = np.array([s.step_time_s for s in scored], np.float64)
    return measured, predicted


def _times(axes: Any, scored: Sequence[ScoredRun]) -> None:
    measured, predicted = _ratios(scored)
    axes.loglog(measured, predicted, ".", ms=3, alpha=0.4, color=COLOUR, rasterized=True)
    ends = np.array([measured.min(), measured.max()])
    axes.plot(ends, ends, color="black", lw=0.8)
    for factor in (0.8, 1.25):
        axes.plot(ends, factor * ends, color=EDGE, lw=0.8, ls="--")
    axes.set_xlabel("measured step time, s")
    axes.set_ylabel("predicted step time, s (dashed: a quarter off)")


def _residuals(axes: Any, scored: Sequence[ScoredRun]) -> None:
    measured, predicted = _ratios(scored)
    gpus = np.array([s.run.gpus for s in scored], np.float64)
    axes.plot(gpus, predicted / measured, ".", ms=3, alpha=0.4, color=COLOUR, rasterized=True)
    bands = np.floor(np.log2(gpus))
    for band in np.unique(bands):
        ratio = (predicted / measured)[bands == band]
        if len(ratio) >= LEAST_ROWS:
            low, middle, high = np.quantile(ratio, [0.05, 0.5, 0.95])
            axes.plot([2.0 ** (band + 0.5)] * 2, [low, high], color="black", lw=1)
            axes.plot(2.0 ** (band + 0.5), middle, "_", color="black", ms=9)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("predicted over measured (bars: 5 to 95 %)")


def _coverage(axes: Any, scored: Sequence[ScoredRun]) -> None:
    inside = covered(scored)
    kept = sorted((k for k, v in inside.items() if len(v) >= LEAST_ROWS), key=lambda k: float(np.mean(inside[k])))
    shares = [100 * float(np.mean(inside[k])) for k in kept]
    axes.barh([f"{k} ({len(inside[k])})" for k in kept], shares, color=COLOUR)
    axes.axvline(90, color="black", lw=0.8, ls="--")
    axes.set_xlim(0, 100)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("in band, % (dashed: 90 %)")
