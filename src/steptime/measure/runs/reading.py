"""Reads a whole file: the runs that can be used, and every other row with its reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.measure.runs.aggregate import job_key, plan_key
from steptime.measure.runs.architecture import ModelFile
from steptime.measure.runs.meaning import framework_of
from steptime.measure.runs.metrics import TimeOrigin
from steptime.measure.runs.read import (
    METRICS,
    Flag,
    Reason,
    RowProblem,
    Skipped,
    TableRow,
    not_read,
    read_rows,
    reason_counts,
    table,
)
from steptime.measure.runs.run import MeasuredRun, run_of, source_key

LEAST_POINTS: Final = 3
"""Numbers of micro-batches that a line needs; fewer always lie on one."""
EXACT: Final = 1e-5
"""Largest relative distance from the line; repeated measurements differ by 1e-3 and more."""
DIGITS: Final = 5
"""Significant digits that the times need: rounding to fewer can put measured times on a line."""


def computed_rows(runs: Sequence[MeasuredRun]) -> frozenset[int]:
    r"""Positions in ``runs`` of those whose step time was computed from parts, not measured.

    $$\max_i \left|\frac{a + b\,m_i}{t_i} - 1\right| < \epsilon$$

    where $t_i$ are the step times (s) of at least :data:`LEAST_POINTS` runs that are equal but for their number of
    micro-batches $m_i$, $a + b\,m$ is the line of least squares through them, and $\epsilon$ = :data:`EXACT`.

    Source: repeated measurements of one step differ by about 1 %; of the published runs with such groups, those of
    all sources but one miss their lines by 0.1 to 3 %.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        if run.time and run.time.origin is TimeOrigin.PRINTED and run.degrees and run.micro_batch:
            groups[(job_key(run), plan_key(replace(run, accumulation=None)), run.notes)].append(place)
    found: set[int] = set()
    for places in groups.values():
        # sequences are proportional to micro-batches, as these runs have the same plan
        if on_one_line((runs[i].global_batch, runs[i].step_time_s or 0.0) for i in places):
            found.update(places)
    return frozenset(found)


def on_one_line(steps: Iterable[tuple[float, float]]) -> bool:
    """True if step times (s) over numbers of micro-batches are too regular to have been measured.

    >>> on_one_line([(2, 0.089176), (4, 0.176234), (8, 0.350348), (16, 0.698578)])   # 2.1 ms + 43.5 ms each
    True
    >>> on_one_line([(2, 0.089176), (4, 0.176834), (8, 0.350348)])   # one of them 0.3 % off
    False
    >>> on_one_line([(2, 0.2), (4, 0.4), (8, 0.8)])   # so few digits may come from rounding
    False
    """
    counts, times = (np.array(column, float) for column in zip(*sorted(set(steps)), strict=True))
    if len(set(counts)) < LEAST_POINTS or all(float(f"{t:.{DIGITS - 1}g}") == t for t in times):
        return False
    line = np.stack([counts, np.ones_like(counts)], axis=1) / times[:, None]
    solution = np.linalg.lstsq(line, np.ones_like(times), rcond=None)[0]
    return bool(np.abs(line @ solution - 1).max() < EXACT)


MEANT = ("framework", "fill", "instead")
"""Keys of an entry that are no condition on a column."""


def with_recipe(row: TableRow) -> TableRow:
    """The row with cells from the recipes that match it; of several for a cell the first counts.

    A recipe matches a row of its framework in whose columns all of its patterns are found. It fills empty cells, and
    replaces those that the scripts contradict or narrow down.

    >>> row = TableRow(1, {"source_key": "mlperf", "model": "Llama2-70B LoRA (MLPerf)", "gpu": "MI300X"})
    >>> with_recipe(row).text("recompute"), with_recipe(TableRow(1, {"model": "GPT-3"})).text("recompute")
    ('full, every 4th layer', '')
    """
    filled: dict[str, str] = {}
    framework = framework_of(row)
    for recipe in table("recipes")["recipe"]:
        if _holds(recipe, row, framework):
            missing = {column: text for column, text in recipe.get("fill", {}).items() if not row.text(column)}
            filled = {**recipe.get("instead", {}), **missing, **filled}
    return replace(row, cells={**row.cells, **filled}) if filled else row


def _holds(recipe: Mapping[str, Any], row: TableRow, framework: str) -> bool:
    if recipe.get("framework", framework) != framework:
        return False
    conditions = ((column, pattern) for column, pattern in recipe.items() if column not in MEANT)
    return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in conditions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Runs and skipped rows of a file of measured runs; every row is in one of the two."""

    runs: tuple[MeasuredRun, ...]
    skipped: tuple[Skipped, ...]
    columns_not_read: tuple[str, ...] = ()
    """Columns of the file that have text and that nothing reads."""

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
            "rows": self.rows,
            "runs": len(self.runs),
            "timed": len(self.timed),
            "with_memory": sum(run.memory is not None for run in self.runs),
            "supporting_claims": sum(run.supports_claim for run in self.runs),
            "measured_but_skipped": sum(row.measured for row in self.skipped),
            "skipped": reason_counts(self.skipped),
            "flags": dict(Counter(str(flag) for run in self.runs for flag in sorted(run.flags)).most_common()),
            "by_source": self._by_source(),
        }

    def _by_source(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, tuple[list[MeasuredRun], list[Skipped]]] = defaultdict(lambda: ([], []))
        for run in self.runs:
            rows[run.source_key][0].append(run)
        for row in self.skipped:
            rows[row.source_key][1].append(row)
        return {
            key: {
                "rows": len(runs) + len(skipped),
                "runs": len(runs),
                "timed": sum(run.time is not None for run in runs),
                "skipped": reason_counts(skipped),
            }
            for key, (runs, skipped) in sorted(rows.items())
        }


def read_runs(path: str | Path, load: ModelFile | None = None) -> Reading:
    """All measured runs of a CSV or CSV.gz file.

    Args:
        path: the file.
        load: as for :func:`~steptime.measure.runs.architecture.architecture`.

    Raises:
        InputFileError: the file is missing, is no CSV, lacks a needed column, or has no rows.
    """
    return runs_of(read_rows(path), load)


def runs_of(rows: list[TableRow], load: ModelFile | None = None, *, scripts: bool = True) -> Reading:
    """The runs of rows; of identical lines the first counts.

    ``scripts``: with the settings of the scripts behind published results (:func:`with_recipe`).
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
            completed = with_recipe(row) if scripts else row
            run = run_of(completed, load)
            run = run if completed is row else replace(run, flags=run.flags | {Flag.SCRIPT})
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
    """Runs with the flag of computed times, which only all of them together show."""
    computed = computed_rows(runs)
    return tuple(
        replace(run, flags=run.flags | {Flag.COMPUTED}) if place in computed else run for place, run in enumerate(runs)
    )


def _skipped(row: TableRow, reason: Reason, detail: str) -> Skipped:
    shape = all(row.text(name) for name in ("layers", "hidden", "global_batch_sequences", "seq_len"))
    timed = any(row.text(name) for name in METRICS if name != "metric_peak_mem_gb")
    return Skipped(
        line=row.line,
        row_id=row.text("row_id") or f"line-{row.line}",
        source_key=source_key(row),
        reason=reason,
        detail=detail,
        measured=shape and timed,
    )
