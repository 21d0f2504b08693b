"""A whole file: the runs that can be used, and every other row with its reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steptime.errors import UserError
from steptime.lab.measured.architecture import ModelFile
from steptime.lab.measured.columns import not_read
from steptime.lab.measured.computed import computed_rows
from steptime.lab.measured.read import METRICS, TableRow, read_rows
from steptime.lab.measured.reasons import Flag, Reason, RowProblem, Skipped, reason_counts
from steptime.lab.measured.recipes import with_recipe
from steptime.lab.measured.run import MeasuredRun, run_of, source_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file of measured runs gave; every row is in one of the two lists."""

    runs: tuple[MeasuredRun, ...]
    skipped: tuple[Skipped, ...]
    columns_not_read: tuple[str, ...] = ()
    """Columns of the file that have a cell and that no run is made of."""

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return len(self.runs) + len(self.skipped)

    @property
    def timed(self) -> tuple[MeasuredRun, ...]:
        """Runs with a step time."""
        return tuple(run for run in self.runs if run.time is not None)

    def to_json(self) -> dict[str, Any]:
        """Counts: rows, usable rows, reasons, flags, and the same per source."""
        return {
            "rows": self.rows, "runs": len(self.runs), "timed": len(self.timed),
            "with_memory": sum(run.memory is not None for run in self.runs),
            "supporting_claims": sum(run.supports_claim for run in self.runs),
            "measured_but_skipped": sum(row.measured for row in self.skipped),
            "skipped": reason_counts(self.skipped),
            "flags": dict(Counter(str(flag) for run in self.runs for flag in sorted(run.flags)).most_common()),
            "by_source": self._by_source(),
        }  # fmt: skip

    def _by_source(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, tuple[list[MeasuredRun], list[Skipped]]] = defaultdict(lambda: ([], []))
        for run in self.runs:
            rows[run.source_key][0].append(run)
        for row in self.skipped:
            rows[row.source_key][1].append(row)
        return {
            key: {
                "rows": len(runs) + len(skipped), "runs": len(runs), "timed": sum(run.time is not None for run in runs),
                "skipped": reason_counts(skipped),
            }
            for key, (runs, skipped) in sorted(rows.items())
        }  # fmt: skip


def read_runs(path: str | Path, load: ModelFile | None = None) -> Reading:
    """All measured runs of a CSV or CSV.gz file.

    Args:
        path: the file.
        load: as for :func:`~steptime.lab.measured.architecture.architecture`.

    Raises:
        InputFileError: the file is missing, is no CSV, lacks a needed column, or has no rows.
    """
    return runs_of(read_rows(path), load)


def runs_of(rows: list[TableRow], load: ModelFile | None = None, *, scripts: bool = True) -> Reading:
    """The runs of rows; a line that is repeated to the letter counts once.

    ``scripts``: with what the scripts behind published results set (:mod:`steptime.lab.measured.recipes`).
    """
    runs: list[MeasuredRun] = []
    skipped: list[Skipped] = []
    seen: set[tuple[tuple[str, str], ...]] = set()
    ids: Counter[str] = Counter()
    for row in rows:
        content = tuple(sorted(row.cells.items()))
        try:
            if content in seen:
                raise RowProblem(Reason.DUPLICATE)
            seen.add(content)
            told = with_recipe(row) if scripts else row
            run = run_of(told, load)
            run = run if told is row else replace(run, flags=run.flags | {Flag.SCRIPT})
        except RowProblem as problem:
            skipped.append(_skipped(row, problem.reason, problem.detail))
            continue
        except (UserError, ArithmeticError) as error:
            skipped.append(_skipped(row, Reason.INTERNAL, f"{type(error).__name__}: {error}"[:200]))
            continue
        ids[run.row_id] += 1
        if ids[run.row_id] > 1:
            name = f"{run.row_id}#{ids[run.row_id]}"
            run = replace(run, row_id=name, flags=run.flags | {Flag.ROW_ID_REPEATED})
        runs.append(run)
    unread = not_read(row.cells for row in rows)
    return Reading(runs=_marked(runs), skipped=tuple(skipped), columns_not_read=unread)


def _marked(runs: list[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """Runs with what only all of them together show."""
    computed = computed_rows(runs)
    return tuple(
        replace(run, flags=run.flags | {Flag.COMPUTED}) if place in computed else run for place, run in enumerate(runs)
    )


def _skipped(row: TableRow, reason: Reason, detail: str) -> Skipped:
    shape = all(row.text(name) for name in ("layers", "hidden", "global_batch_sequences", "seq_len"))
    timed = any(row.text(name) for name in METRICS if name != "metric_peak_mem_gb")
    return Skipped(
        line=row.line, row_id=row.text("row_id") or f"line-{row.line}", source_key=source_key(row), reason=reason,
        detail=detail, measured=shape and timed,
    )  # fmt: skip
