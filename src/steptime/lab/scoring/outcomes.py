"""Layouts that ran and layouts that ran out of memory scored: read, predicted, summed up, and written row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.api.models import load_model
from steptime.errors import FieldError, InputFileError, UserError, did_you_mean, shorten
from steptime.lab.measured import MeasuredRun, ScoredRun, runs_of
from steptime.lab.measured.columns import FURTHER, OTHER_NAMES, not_read, own_names
from steptime.lab.measured.outcomes import RAN, RAN_OUT, Tried, outcome_of, outcome_statistics
from steptime.lab.measured.predict import score_packaged
from steptime.lab.measured.read import TableRow, check_columns, read_rows
from steptime.lab.measured.reasons import RowProblem
from steptime.lab.measured.samples import Progress
from steptime.lab.scoring.rows import REFUSED, Missing, counted, write_table
from steptime.lab.scoring.runs import doubted, unread, unscored
from steptime.store.files import refuse_unwritable

COLUMNS: Final = (
    "line", "model", "gpu", "gpus", "framework", "outcome", "oom_probability", "memory_predicted_bytes", "predicted_s",
    "measured_s", "skipped", "detail",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeScore:
    """A table of layouts and its predictions; every row is in ``tried`` or in ``missing``."""

    rows: int
    tried: tuple[Tried, ...]
    missing: tuple[Missing, ...]
    columns_not_read: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Counts, reasons, and what the chances of running out are worth; shares, not percent."""
        return {
            "rows": self.rows, "scored": len(self.tried), **counted(self.missing),
            "columns_not_read": list(self.columns_not_read),
            "doubts": dict(doubted(each.scored.run for each in self.tried).most_common()),
            **outcome_statistics(self.tried),
        }  # fmt: skip


def given_cells(texts: Sequence[str]) -> dict[str, str]:
    """Column -> text of its empty cells, from ``COLUMN=TEXT``.

    Raises:
        FieldError: a text is no such pair, there is no such column, or it is given twice.

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
            raise FieldError("", "--set", f"there is no column {shorten(name)!r}",
                             hint=did_you_mean(name, [*OTHER_NAMES, *FURTHER]))  # fmt: skip
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
        InputFileError: the file is no such table.
    """
    return score_layouts(read_rows(path, _check, given), progress=progress)


def _check(where: str, names: list[str]) -> None:
    """Refuses a table that does not say what ran."""
    if not {"outcome", "metric_step_time_s"} & set(names):
        raise InputFileError(where, "lacks the column outcome", hint="what became of each layout: ok, or OOM")
    check_columns(where, names)


def score_layouts(rows: list[TableRow], *, progress: Progress | None = None) -> OutcomeScore:
    """As :func:`score_outcomes`, of rows that are read already."""
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


def check_figure(path: Path) -> None:
    """Refuses a file for a diagram before the work, not after it.

    Raises:
        FieldError: it does not end in .svg.
        InputFileError: it cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise FieldError("", "--figure", f"{shorten(str(path))!r} does not end in .svg",
                         hint="for example --figure reliability.svg")  # fmt: skip
    refuse_unwritable(path)


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
        "line": run.line, "model": run.model_name, "gpu": run.device, "gpus": run.gpus, "framework": run.framework,
        "outcome": RAN if each.ran else RAN_OUT, "oom_probability": f"{s.oom_probability:.4g}",
        "memory_predicted_bytes": f"{s.memory_bytes:.6g}", "predicted_s": predicted, "measured_s": measured,
    }  # fmt: skip
