"""What a stranger's software and fine-tuning show: memory by code alone, chances of running out, first plans.

Everything here is predicted with the source left out: nothing was fitted to the runs that it is held against. The
tables are part of ``docs/scoreboard.md``; ``python benchmarks/first_plans.py`` prints them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bench_memory import TABLES, left_out, point_of
from bench_outcomes import layouts
from memory_fit import MemoryPoint, predicted_bytes
from steptime.errors import UserError
from steptime.measure.runs.outcomes import OutcomeScore, reliability_table, score_layouts
from steptime.measure.runs.reading import read_runs
from steptime.measure.runs.run import MeasuredRun
from steptime.report.text import percent
from steptime_lab.data_root import require_data

TUNED = frozenset({"lora", "qlora", "sft"})


def by_code(run: MeasuredRun) -> MemoryPoint | None:
    """The peak of a run by what the code of its software allocates, without the terms that are fitted to such runs."""
    fitted = lambda setting: replace(setting, job=replace(setting.job, memory=replace(  # noqa: E731
        setting.job.memory, evaluated_logit_bytes=0.0)))  # fmt: skip
    return point_of(run, fitted)


def tuned_errors() -> Iterator[tuple[str, str, list[float]]]:
    """Source and kind of fine-tuning -> errors of its peaks, source left out."""
    runs = [run for name in TABLES for run in read_runs(require_data(name)).runs if run.memory is not None]
    without = left_out(runs)
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.workload in TUNED and (point := by_code(run)) is not None:
            error = predicted_bytes(point, without[run.source_key]) / point.measured_bytes - 1
            groups[run.source_key, run.workload].append(error)
    for (source, kind), errors in sorted(groups.items()):
        yield source, kind, errors


def tuned_table() -> str:
    """Errors of the memory of fine-tuning as a Markdown table, the last line of all rows."""
    lines = ["| source, not known to the fit | kind | rows | mean | median | bias |", "|---|---|--:|--:|--:|--:|"]
    every: list[float] = []
    for source, kind, errors in tuned_errors():
        every += errors
        lines.append(f"| {source} | {kind} | {_cells(errors)} |")
    return "\n".join([*lines, f"| all | | {_cells(every)} |"])


def _cells(errors: list[float]) -> str:
    size = np.abs(errors)
    return f"{len(errors)} | {percent(float(size.mean()))} | {percent(float(np.median(size)))} | {np.mean(errors):+.1%}"


def outcomes() -> OutcomeScore:
    """Every layout of the study with its chance of running out."""
    return score_layouts(layouts(require_data("plan_outcomes.csv"), require_data("measured_training_2.csv.gz")))


def first_plans_line(score: OutcomeScore) -> str:
    """What ran of the plans that a search puts first, what they cost, and what chances above one half warn of."""
    found = score.to_json()
    picked, cost = found["picked"], found["picked"]["mean_regret"]
    return (
        f"Of {found['scored']} layouts of a study {percent(found['ran_out']['above_half'])} of those that ran out and "
        f"{percent(found['ran']['above_half'])} of those that ran have a chance above one half. The plan that a search "
        f"puts first ran in {percent(picked['ran'])} of {picked['groups']} jobs and is "
        f"{percent(math.nan if cost is None else cost)} slower than the fastest that ran."
    )


def first_plans_part() -> list[str]:
    """The tables for the scoreboard; empty where the bulk measurements lack."""
    try:
        score = outcomes()
    except UserError:
        return []
    return [
        "### Memory of fine-tuning",
        "By what the code of the software allocates (`src/steptime/plan/frameworks`), with the slack of the "
        "allocator and the rest fitted without the source.",
        tuned_table(),
        "### Chance of running out, and first plans",
        first_plans_line(score),
        reliability_table(score.to_json()),
    ]


if __name__ == "__main__":
    print("\n\n".join(first_plans_part()))
