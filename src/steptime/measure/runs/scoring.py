"""Scores measured training runs: reads, predicts, summarises and writes them row by row."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.api.models import load_model
from steptime.errors import FieldError, InputFileError, UserError, did_you_mean, shorten
from steptime.measure.residuals import errors
from steptime.measure.runs.aggregate import ScoredRun, memory_columns, summary, timed
from steptime.measure.runs.predict import EACH, Scores, folds, score_left_out, score_packaged
from steptime.measure.runs.read import DOUBTS, TableRow, check_columns, named_cells, own_names, table
from steptime.measure.runs.reading import Reading, read_runs, runs_of
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import Modelled, Progress, modelled
from steptime.measure.table import read_table
from steptime.plan.framework_file import framework_table
from steptime.store.files import write_whole

REFUSED: Final = "no plausible setting of the run can be modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A row without a prediction."""

    line: int
    row_id: str = ""
    source_key: str = ""
    reason: str
    detail: str

    @property
    def place(self) -> str:
        """Line of the row and the problem there.

        >>> Missing(line=5, reason="no time", detail="n_gpus: 'eight'").place
        "line 5: n_gpus: 'eight'"
        """
        return f"line {self.line}: {self.detail}" if self.detail else f"line {self.line}"


def skipped_counts(missing: Sequence[Missing]) -> dict[str, Any]:
    """Number of rows by reason, the most frequent first, and the first row of each.

    >>> rows = [Missing(line=n, reason=why, detail="") for n, why in ((2, "no time"), (3, "no GPU"), (4, "no GPU"))]
    >>> skipped_counts(rows)["skipped"], skipped_counts(rows)["skipped_first"]
    ({'no GPU': 2, 'no time': 1}, {'no GPU': 'line 3', 'no time': 'line 2'})
    """
    found = Counter(row.reason for row in missing).most_common()
    first = {row.reason: row.place for row in reversed(missing)}
    return {"skipped": dict(found), "skipped_first": {reason: first[reason] for reason, _ in found}}


def write_table(
    path: Path, columns: Sequence[str], scored: Iterable[tuple[int, Mapping[str, object]]], missing: Iterable[Missing]
) -> None:
    """Writes rows in the order of the table.

    Args:
        path: CSV file.
        columns: its header.
        scored: line of the table -> cells of a row with a prediction; a line may have several.
        missing: rows without one.

    Raises:
        InputFileError: it cannot be written.
    """
    lines = [*scored]
    lines += [
        (
            m.line,
            {"line": m.line, "row_id": m.row_id, "source_key": m.source_key, "skipped": m.reason, "detail": m.detail},
        )
        for m in missing
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells for _, cells in sorted(lines, key=lambda pair: pair[0]))
    write_whole(path, out.getvalue())


SPLITS: Final = (EACH, "source_and_model", "model")
"""Values of ``--leave-out`` other than the key of a source."""
NOT_ASKED: Final = "not of the source that is left out"
FAR_OFF: Final = "predicted and measured time differ a hundredfold or more: a wrong unit?"
TOO_LARGE: Final = "predicted memory exceeds the device: is a setting misread?"
UNFIT: Final = 0.95
"""Predicted chance of not fitting above which the reading of a run that did fit is doubted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScore:
    """A table of measured runs and its predictions; every row is in ``scored`` or in ``missing``."""

    rows: int
    scored: tuple[ScoredRun, ...]
    missing: tuple[Missing, ...]
    how: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Counts, reasons, errors overall and by group; fractions, not percent."""
        found = summary(self.scored)
        by_definition = found.pop("memory")
        return {
            "rows": self.rows,
            "scored": len(self.scored),
            **skipped_counts(self.missing),
            **self.how,
            "time": found.pop("time"),
            "memory": memory_errors(self.scored) | {"by_definition": by_definition},
            **found,
        }


def score_runs(
    path: str | Path, *, leave_out: str | None = None, named: bool = True, progress: Progress | None = None
) -> RunScore:
    """Predicts every run of a table.

    Args:
        path: CSV, CSV.gz or Parquet with the columns of measured training runs.
        leave_out: None: the frameworks in use predict. ``each`` source, ``source_and_model`` or ``model``: fits to
            the table without the group of a row predict it. Else the key of a source, which alone is predicted.
        named: predict by the framework of each run; else by the common values.
        progress: called with parts done and all parts.

    Raises:
        InputFileError: the file is not such a table.
        FieldError: there is no source with the key.
    """
    return score_reading(read_any(path), leave_out=leave_out, named=named, progress=progress)


def score_reading(
    reading: Reading,
    *,
    leave_out: str | None = None,
    named: bool = True,
    progress: Progress | None = None,
    found: Modelled | None = None,
) -> RunScore:
    """Predicts every run of a reading; ``found`` has the runs evaluated already, for fits without a group."""
    asked, unasked = _asked(reading, leave_out)
    fit = fit_provenance()  # before the work, so that an unusable file of frameworks is reported at once
    scores = _scores(reading.runs, leave_out, named, progress, found)
    refused = {run.row_id: reason for run, reason in scores.refused}
    missing = [unscored(run, REFUSED, refused[run.row_id]) for run in asked if run.row_id in refused]
    missing += [unscored(run, NOT_ASKED) for run in unasked]
    missing += unread(reading)
    how: dict[str, Any] = {
        "predicted_by": "frameworks in use" if leave_out is None else f"fits without {_words(leave_out)}",
        "framework": "named" if named else "not named",
        "fit": fit,
        "seen_by_the_fit": 0 if leave_out is not None else seen(scores.scored),
        "reading": {name: reading.to_json()[name] for name in ("runs", "timed", "with_memory", "supporting_claims")},
    }
    how |= {"columns_not_read": list(reading.columns_not_read)}
    how |= {"doubts": doubts(scores.scored), **_unfitted(reading.runs, leave_out)}
    ordered = sorted(missing, key=lambda row: row.line)
    return RunScore(rows=reading.rows, scored=scores.scored, missing=tuple(ordered), how=how)


def unread(reading: Reading) -> list[Missing]:
    """Rows of a table that are no runs, and why."""
    return [
        Missing(line=s.line, row_id=s.row_id, source_key=s.source_key, reason=str(s.reason), detail=s.detail)
        for s in reading.skipped
    ]


def doubts(scored: Sequence[ScoredRun]) -> dict[str, int]:
    """Number of predicted runs by doubt, the most frequent doubt first."""
    found = doubted(s.run for s in scored)
    return dict((found + Counter(text for s in scored for text in _against_prediction(s))).most_common())


def doubted(runs: Iterable[MeasuredRun]) -> Counter[str]:
    """Number of runs by doubt about how they were read."""
    return Counter(str(flag) for run in runs for flag in sorted(run.flags & DOUBTS))


def _against_prediction(s: ScoredRun) -> list[str]:
    """Doubts about the reading of a run that its prediction raises."""
    far = bool(timed([s])) and abs(math.log10(s.step_time_s / (s.run.step_time_s or 1.0))) >= 2
    return [text for text, said in ((FAR_OFF, far), (TOO_LARGE, s.oom_probability > UNFIT)) if said]


def _unfitted(runs: Sequence[MeasuredRun], leave_out: str | None) -> dict[str, str]:
    """A note where the group that is left out is the whole table, so that nothing remains to fit to."""
    fitted = [run for run in runs if run.time is not None and run.supports_claim]
    if leave_out is None or not runs:
        return {}
    if leave_out in SPLITS:
        by = "source" if leave_out == EACH else leave_out
        rest = len(fitted) if len(folds(runs, by)) > 1 else 0
        kind = by.replace("_", " ")
        what = f"all rows are of one {kind}" if len(folds(runs, by)) == 1 else "no row supports a claim"
    else:
        rest, what = sum(run.source_key != leave_out for run in fitted), "the table has no other source"
    band = ", and have no band" if len({run.source_key for run in runs}) == 1 else ""
    text = f"{what}, so nothing remains to fit to: the predictions rest on no measurement{band}."
    return {} if rest else {"note": text}


def _asked(reading: Reading, leave_out: str | None) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """Runs to predict, and runs that only take part in the fit."""
    if leave_out is None or leave_out in SPLITS:
        return list(reading.runs), []
    keys = sorted({run.source_key for run in reading.runs})
    if leave_out not in keys:
        raise FieldError(
            "",
            "--leave-out",
            f"there is no source {shorten(leave_out)!r} with runs to predict",
            hint=did_you_mean(leave_out, [*SPLITS, *keys]),
        )
    return (
        [run for run in reading.runs if run.source_key == leave_out],
        [run for run in reading.runs if run.source_key != leave_out],
    )


def _scores(
    runs: Sequence[MeasuredRun], leave_out: str | None, named: bool, progress: Progress | None, found: Modelled | None
) -> Scores:
    if not runs:
        return Scores(scored=(), refused=(), how="")
    if leave_out is not None:
        return score_left_out(found or modelled(runs), leave_out, named=named, progress=progress)
    try:
        return score_packaged(runs, progress, named=named)
    except UserError as error:  # none of the runs can be modelled
        return Scores(scored=(), refused=tuple((run, str(error)) for run in runs), how="")


def unscored(run: MeasuredRun, reason: str, detail: str = "") -> Missing:
    """A run that is read and has no prediction."""
    return Missing(line=run.line, row_id=run.row_id, source_key=run.source_key, reason=reason, detail=detail)


def _words(leave_out: str) -> str:
    return {
        EACH: "the source of the row",
        "source_and_model": "the rows of its source and model",
        "model": "the model of the row",
    }.get(leave_out, f"the source {leave_out}")


def fit_key(source_key: str) -> str:
    """The key of a source as the provenance of a fit has it: without characters that separate keys or end a string.

    >>> fit_key('a, "b"')
    'a___b_'
    """
    return re.sub(r"[^\w.:/+-]", "_", source_key)


def fit_provenance() -> dict[str, Any]:
    """Provenance of the frameworks in use: rows, sources, date."""
    provenance = framework_table()["provenance"]
    return {name: provenance[name] for name in ("source", "rows", "sources", "fitted") if name in provenance}


def seen(scored: Sequence[ScoredRun]) -> int | None:
    """Predicted runs of sources that the frameworks in use were fitted to; None if the fit does not say which."""
    keys = framework_table()["provenance"].get("keys")
    if keys is None:
        return None
    known = set(str(keys).split(", "))
    return sum(fit_key(s.run.source_key) in known for s in timed(scored))


def memory_errors(scored: Sequence[ScoredRun]) -> dict[str, Any]:
    """Errors of the peak memory over all definitions of it."""
    measured, predicted, low, high = memory_columns([s for s in scored if s.memory_bytes > 0])
    return {"rows": len(measured), **errors(measured, predicted, low, high)}


def read_any(path: str | Path) -> Reading:
    """Runs of a CSV, CSV.gz or Parquet file.

    Raises:
        InputFileError: the file is missing, is not such a table, lacks a needed column, or has no rows.
    """
    if not str(path).lower().endswith(".parquet"):
        return read_runs(path, cache(load_model))
    return runs_of(rows_of_parquet(path, check_columns), cache(load_model))


def rows_of_parquet(path: str | Path, check: Callable[[str, list[str]], None]) -> list[TableRow]:
    """Rows of a Parquet file, numbered from 1; ``check`` refuses it by its columns.

    Raises:
        InputFileError: the file is missing, is not such a table, or has no rows.
    """
    table = read_table(path)
    texts = {name: [_cell(value) for value in column.tolist()] for name, column in table.items()}
    named = own_names(list(texts))
    check(str(path), [name for name, _ in named])
    rows = [named_cells(named, cells) for cells in zip(*texts.values(), strict=True)]
    if not rows:
        raise InputFileError(str(path), "has no rows")
    return [TableRow(line, cells) for line, cells in enumerate(rows, 1)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.17g}"
    return str(value)


COLUMNS: Final[Sequence[str]] = table("columns")["columns"]["runs"]


def write_rows(score: RunScore, path: Path) -> None:
    """Writes one line per row in the order of the table: measured and predicted, or why not.

    Raises:
        InputFileError: it cannot be written.
    """
    write_table(path, COLUMNS, [(s.run.line, _scored_cells(s)) for s in score.scored], score.missing)


def _scored_cells(s: ScoredRun) -> dict[str, object]:
    run, time, memory = s.run, s.run.step_time_s, s.run.memory
    cells: dict[str, object] = {
        "line": run.line,
        "row_id": run.row_id,
        "source_key": run.source_key,
        "model": run.model_name,
        "gpu": run.device,
        "gpus": run.gpus,
        "framework": run.framework,
        "memory_predicted_bytes": f"{s.memory_bytes:.6g}",
        "flags": "; ".join([*sorted(str(flag) for flag in run.flags), *_against_prediction(s)]),
    }
    if run.time is not None and time is not None:
        cells |= {
            "measured_s": f"{time:.6g}",
            "predicted_s": f"{s.step_time_s:.6g}",
            "low_s": f"{s.low_s:.6g}",
            "high_s": f"{s.high_s:.6g}",
            "ratio": f"{s.step_time_s / time:.4f}",
            "time_origin": run.time.origin.name.lower(),
        }
    if memory is not None:
        cells |= {
            "memory_measured_bytes": f"{memory.memory_bytes:.6g}",
            "memory_ratio": f"{s.memory_bytes / memory.memory_bytes:.4f}",
            "memory_definition": memory.definition.name.lower(),
            "memory_low_bytes": f"{s.memory_low_bytes:.6g}",
            "memory_high_bytes": f"{s.memory_high_bytes:.6g}",
            "oom_probability": f"{s.oom_probability:.4g}",
        }
    return cells
