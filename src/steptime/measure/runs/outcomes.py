"""Scores layouts that ran or ran out of memory: reads, predicts, summarises and reports them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.api.models import load_model
from steptime.errors import FieldError, InputFileError, UserError, counted, did_you_mean, shorten
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.measure.report.score import print_doubts, print_skipped
from steptime.measure.runs.aggregate import ScoredRun, plan_key, workload_key
from steptime.measure.runs.predict import score_packaged
from steptime.measure.runs.read import (
    FURTHER,
    OTHER_NAMES,
    Reason,
    RowProblem,
    TableRow,
    check_columns,
    not_read,
    own_names,
    read_rows,
    table,
)
from steptime.measure.runs.reading import runs_of
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import Progress
from steptime.measure.runs.scoring import REFUSED, Missing, doubted, skipped_counts, unread, unscored, write_table
from steptime.num import Array
from steptime.registry import needed
from steptime.report.text import console, grid, heading, percent

COLUMN: Final = "outcome"
RAN, RAN_OUT = "ran", "ran out of memory"
_WORDS: Final = (
    (r"\boom\b|out[- _]of[- _]memory|ran out", RAN_OUT),
    (r"^(?:ok|ran|yes|true|success\w*|complete\w*|finished|done|fits?)$", RAN),
)
_NUMBERS: Final = re.compile(r"\d+")
"""Numbers in notes, such as those of trials, in which notes on equal software may differ."""
EDGES: Final = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)
"""Ends of the bins of a reliability diagram."""
LEAST_CHANCE: Final = 1e-6
"""Chances are kept this far from 0 and 1 in the logarithmic score."""
LEAST_PLANS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A layout with its prediction and its outcome."""

    scored: ScoredRun
    ran: bool
    """True: it ran; false: it ran out of memory."""


def outcome_of(row: TableRow) -> bool:
    """True if the layout of a row ran; a row without an outcome ran if it has a step time.

    Raises:
        RowProblem: its outcome says nothing of memory.

    >>> [outcome_of(TableRow(1, {"outcome": text})) for text in ("ok", "OOM Error", "CUDA out of memory")]
    [True, False, False]
    """
    text = row.text(COLUMN)
    found = next((name for pattern, name in _WORDS if re.search(pattern, text.strip().lower())), None)
    if found is None and not text and row.number("metric_step_time_s"):
        return True
    if found is None:
        raise RowProblem(Reason.NO_OUTCOME, repr(text[:60]))
    return found == RAN


def outcome_statistics(tried: Sequence[Tried]) -> dict[str, Any]:
    r"""Quality of the predicted chances $P$ of running out of memory.

    ``above_half``: share of the layouts that ran out, and of those that ran, with $P > 1/2$; ``brier`` the mean of
    $(P - o)^2$ and ``log_loss`` of $-\ln P$ of what happened, for $o = 1$ where it ran out; ``reliability``: by bins of
    $P$ the mean and the share that ran out; ``picked``: of groups of three plans or more of one job, the plan that a
    search puts first: predicted fastest among those with $P \le$ :data:`LIKELY_FITS`, else that with the least $P$.
    """
    chance = np.array([each.scored.oom_probability for each in tried], np.float64)
    ran = np.array([each.ran for each in tried], bool)
    clipped = np.clip(chance, LEAST_CHANCE, 1 - LEAST_CHANCE)
    return {
        "ran_out": _above_half(chance[~ran]),
        "ran": _above_half(chance[ran]),
        "brier": _mean((chance - ~ran) ** 2),
        "log_loss": _mean(-np.log(np.where(ran, 1 - clipped, clipped))),
        "reliability": reliability_bins(chance, ran),
        "picked": _picked(tried),
    }


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _above_half(chance: Array) -> dict[str, Any]:
    return {"rows": len(chance), "above_half": _mean(chance > 0.5)}


def reliability_bins(chance: Array, ran: Array) -> list[dict[str, Any]]:
    """By bins of the predicted chance of running out: rows, mean chance, and the share that ran out.

    >>> bins = reliability_bins(np.array([0.0, 0.95, 1.0]), np.array([True, False, False]))
    >>> [(b["low"], b["rows"], b["ran_out"]) for b in bins if b["rows"]]
    [(0.0, 1, 0.0), (0.9, 1, 1.0), (0.98, 1, 1.0)]
    """
    place = np.clip(np.digitize(chance, EDGES) - 1, 0, len(EDGES) - 2)
    return [
        {
            "low": low,
            "high": high,
            "rows": int((place == i).sum()),
            "mean": _mean(chance[place == i]),
            "ran_out": _mean(~ran[place == i]),
        }
        for i, (low, high) in enumerate(pairwise(EDGES))
    ]


def _picked(tried: Sequence[Tried]) -> dict[str, Any]:
    """Cost of choosing by the prediction: regret over the fastest plan that ran, and how often the choice ran.

    ``regret_of_ran`` is the regret of the plan predicted fastest among those that ran.
    """
    groups: dict[Hashable, dict[Hashable, Tried]] = defaultdict(dict)
    for each in tried:
        run = each.scored.run
        kernels = (run.kernel, _NUMBERS.sub("", run.notes))
        groups[workload_key(run), kernels].setdefault(plan_key(run), each)
    regrets, regrets_of_ran, count = [], [], 0
    for plans in groups.values():
        ran = [each for each in plans.values() if each.ran and each.scored.run.step_time_s]
        if len(plans) < LEAST_PLANS or not ran:
            continue
        count += 1
        first = first_of(plans.values())
        best = min(each.scored.run.step_time_s or math.inf for each in ran)
        regrets_of_ran.append((min(ran, key=_predicted_s).scored.run.step_time_s or math.nan) / best - 1)
        if first in ran:
            regrets.append((first.scored.run.step_time_s or math.nan) / best - 1)
    return {
        "groups": count,
        "ran": len(regrets) / count if count else None,
        "mean_regret": _mean(np.array(regrets)),
        "worst_regret": max(regrets, default=None),
        "regret_of_ran": _mean(np.array(regrets_of_ran)),
    }


def first_of(plans: Collection[Tried]) -> Tried:
    """The plan that a search puts first: the fastest that likely fits, else the one most likely to."""
    fits = [each for each in plans if each.scored.oom_probability <= LIKELY_FITS]
    return min(fits, key=_predicted_s) if fits else min(plans, key=lambda each: each.scored.oom_probability)


def _predicted_s(each: Tried) -> float:
    return each.scored.step_time_s


COLUMNS: Final[Sequence[str]] = table("columns")["columns"]["outcomes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeScore:
    """A table of layouts and its predictions; every row is in ``tried`` or in ``missing``."""

    rows: int
    tried: tuple[Tried, ...]
    missing: tuple[Missing, ...]
    columns_not_read: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Counts, reasons, and the quality of the predicted chances; shares, not percent."""
        return {
            "rows": self.rows,
            "scored": len(self.tried),
            **skipped_counts(self.missing),
            "columns_not_read": list(self.columns_not_read),
            "doubts": dict(doubted(each.scored.run for each in self.tried).most_common()),
            **outcome_statistics(self.tried),
        }


def given_cells(texts: Sequence[str]) -> dict[str, str]:
    """Column -> text of its empty cells, from ``COLUMN=TEXT``.

    Raises:
        FieldError: a text has another form, the column is unknown, or it is given twice.

    >>> given_cells(["gpus=64", "gpu=a100-sxm-80gb"])
    {'n_gpus': '64', 'gpu': 'a100-sxm-80gb'}
    """
    out = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise FieldError("", "--set", f"{shorten(text)!r} is no COLUMN=TEXT", hint="for example --set gpu=h100-sxm")
        own = own_names([name])[0][0]
        if own not in OTHER_NAMES and own not in FURTHER:
            raise FieldError(
                "", "--set", f"there is no column {shorten(name)!r}", hint=did_you_mean(name, [*OTHER_NAMES, *FURTHER])
            )
        if own in out:
            raise FieldError(
                "", "--set", f"gives the column {own} twice", hint="one text for the empty cells of a column"
            )
        out[own] = value.strip()
    return out


def score_outcomes(
    path: str | Path, given: Mapping[str, str] | None = None, *, progress: Progress | None = None
) -> OutcomeScore:
    """Predicts the chance of running out of memory of every layout of a table.

    Args:
        path: CSV or CSV.gz with the columns of measured training runs and ``outcome``; rows that ran may have times.
        given: column -> text of its empty cells.
        progress: called with layouts done and all layouts.

    Raises:
        InputFileError: the file is not such a table.
    """
    return score_layouts(read_rows(path, _check, given), progress=progress)


def _check(where: str, names: list[str]) -> None:
    """Refuses a table without outcomes."""
    if not {"outcome", "metric_step_time_s"} & set(names):
        raise InputFileError(where, "lacks the column outcome", hint="what became of each layout: ok, or OOM")
    check_columns(where, names)


def score_layouts(rows: list[TableRow], *, progress: Progress | None = None) -> OutcomeScore:
    """Predicts the chance of running out of memory of every layout in rows that are already read."""
    ran: dict[int, bool] = {}
    missing: list[Missing] = []
    for row in rows:
        try:
            ran[row.line] = outcome_of(row)
        except RowProblem as problem:
            missing.append(Missing(line=row.line, reason=str(problem.reason), detail=problem.detail))
    reading = runs_of([row for row in rows if row.line in ran], cache(load_model))
    missing += unread(reading)
    scored: tuple[ScoredRun, ...] = ()
    refused: tuple[tuple[MeasuredRun, str], ...] = ()
    if reading.runs:
        try:
            found = score_packaged(reading.runs, progress)
            scored, refused = found.scored, found.refused
        except UserError as error:  # none of the layouts can be modelled
            refused = tuple((run, str(error)) for run in reading.runs)
    missing += [unscored(run, REFUSED, why) for run, why in refused]
    tried = tuple(Tried(scored=s, ran=ran[s.run.line]) for s in scored)
    ordered = tuple(sorted(missing, key=lambda row: row.line))
    unread_columns = not_read((row.cells for row in rows), {"outcome"}.__contains__)
    return OutcomeScore(rows=len(rows), tried=tried, missing=ordered, columns_not_read=unread_columns)


def write_outcomes(score: OutcomeScore, path: Path) -> None:
    """Writes one line per layout in the order of the table.

    Raises:
        InputFileError: it cannot be written.
    """
    write_table(path, COLUMNS, [(each.scored.run.line, _cells(each)) for each in score.tried], score.missing)


def _cells(each: Tried) -> dict[str, object]:
    s, run = each.scored, each.scored.run
    measured = "" if run.step_time_s is None else f"{run.step_time_s:.6g}"
    predicted = f"{s.step_time_s:.6g}" if s.step_time_s == s.step_time_s else ""
    return {
        "line": run.line,
        "model": run.model_name,
        "gpu": run.device,
        "gpus": run.gpus,
        "framework": run.framework,
        "outcome": RAN if each.ran else RAN_OUT,
        "oom_probability": f"{s.oom_probability:.4g}",
        "memory_predicted_bytes": f"{s.memory_bytes:.6g}",
        "predicted_s": predicted,
        "measured_s": measured,
    }


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
            table.add_row(
                f"{each['low']:g} to {each['high']:g}",
                str(each["rows"]),
                percent(each["mean"]),
                percent(each["ran_out"]),
            )
    screen.print(table)
    picked = score["picked"]
    if picked["groups"]:
        cost = (
            "" if picked["mean_regret"] is None else f", and is {percent(picked['mean_regret'])} slower than the best"
        )
        screen.print(
            f"The plan that a search puts first, of those that likely fit, ran in {percent(picked['ran'])} of "
            f"{counted(picked['groups'], 'group')}{cost}.",
            soft_wrap=True,
        )


def reliability_table(score: Mapping[str, Any]) -> str:
    """The reliability as a Markdown table."""
    lines = ["| predicted chance | layouts | mean | share that ran out |", "|---|--:|--:|--:|"]
    lines += [
        f"| {each['low']:g} to {each['high']:g} | {each['rows']} | {percent(each['mean'])} "
        f"| {percent(each['ran_out'])} |"
        for each in score["reliability"]
        if each["rows"]
    ]
    return "\n".join(lines)


def write_reliability(score: Mapping[str, Any], path: Path) -> None:
    """Writes the reliability diagram as SVG.

    Raises:
        UserError: matplotlib is not installed.
    """
    matplotlib = needed("matplotlib", "a figure")
    bins = [each for each in score["reliability"] if each["rows"]]
    settings = {"svg.hashsalt": "steptime", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = needed("matplotlib.figure", "a figure").Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color="#999999", lw=0.8, ls="--")
        mean, share = [each["mean"] for each in bins], [each["ran_out"] for each in bins]
        axes.plot(mean, share, "o-", color=COLOUR, lw=1)
        for each in bins:
            axes.annotate(
                str(each["rows"]),
                (each["mean"], each["ran_out"]),
                textcoords="offset points",
                xytext=(6, -9),
                fontsize=8,
            )
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("predicted chance of running out of memory")
        axes.set_ylabel("share of the layouts that ran out")
        figure.savefig(path, metadata={"Date": None})
