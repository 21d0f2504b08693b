"""Step times on one exact line in the number of micro-batches are told from measured ones, and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from steptime.measure.runs.aggregate import ScoredRun, summary
from steptime.measure.runs.metrics import TimeOrigin
from steptime.measure.runs.read import Flag, read_rows
from steptime.measure.runs.reading import computed_rows, read_runs, runs_of
from steptime.measure.runs.run import MeasuredRun

PUBLISHED = Path(__file__).parents[2] / "data/published_runs.csv"
BATCHES = (64, 128, 256)


@pytest.fixture(scope="module")
def base() -> MeasuredRun:
    runs = read_runs(PUBLISHED).runs
    return next(run for run in runs if run.degrees and run.micro_batch and run.time and not run.accumulation
                and run.time.origin is TimeOrigin.PRINTED)  # fmt: skip


def line(base: MeasuredRun, *, off: float = 0.0, origin: TimeOrigin = TimeOrigin.PRINTED) -> list[MeasuredRun]:
    """Runs on a line; the last of them so far off."""
    assert base.time
    times = [0.002117 + 0.0435213 * batch for batch in BATCHES]
    times[-1] *= 1 + off
    return [replace(base, global_batch=batch, time=replace(base.time, step_time_s=t, origin=origin))
            for batch, t in zip(BATCHES, times, strict=True)]  # fmt: skip


@pytest.mark.slow
def test_exact_lines_are_found_and_nothing_else(base: MeasuredRun) -> None:
    assert computed_rows(line(base)) == {0, 1, 2}
    assert not computed_rows(line(base, off=0.003))
    assert not computed_rows(line(base, origin=TimeOrigin.TOKENS)), "one printed rate puts three batches on a line"
    assert not computed_rows(line(base)[:2]), "two points always lie on a line"
    others = [replace(run, gpus=2 * run.gpus) for run in line(base, off=0.01)]
    assert computed_rows([*others, *line(base)]) == {3, 4, 5}


def test_steps_of_accumulation_follow_the_batch(base: MeasuredRun) -> None:
    runs = [replace(run, accumulation=run.global_batch // 8) for run in line(base)]
    assert computed_rows(runs) == {0, 1, 2}


def test_no_published_row_of_the_repository_is_taken_for_computed() -> None:
    assert not any(Flag.COMPUTED in run.flags for run in read_runs(PUBLISHED).runs)


def test_rows_of_a_file_are_marked_and_counted(base: MeasuredRun) -> None:
    row = next(row for row in read_rows(PUBLISHED) if row.line == base.line)
    rows = [
        replace(row, line=2 + i, cells={**row.cells, "row_id": str(i), "global_batch_sequences": str(run.global_batch),
                                        "metric_step_time_s": f"{run.step_time_s:.6f}"})
        for i, run in enumerate(line(base))
    ]  # fmt: skip
    runs = runs_of(rows).runs
    assert [Flag.COMPUTED in run.flags for run in runs] == [True] * 3
    scored = [ScoredRun(run=run, step_time_s=run.step_time_s or 1.0, memory_bytes=1.0) for run in runs]
    assert summary(scored)["computed"] == {base.source_key: 3}
