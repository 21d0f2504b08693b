"""Predicted peak memory against published training runs (needs the shared data)."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import pytest

from steptime.measure.runs.reading import read_runs
from steptime.measure.runs.samples import definition_of, predicted_bytes, settings_of
from steptime_lab.data_root import require_data

pytestmark = pytest.mark.shared


@cache
def errors() -> dict[tuple[str, str], list[float]]:
    out: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in read_runs(require_data("measured_training.csv.gz")).runs:
        if run.memory is None:
            continue
        logs = sum(s.weight * math.log(predicted_bytes(run, s.evaluate())) for s in settings_of(run))
        error = math.exp(logs) / run.memory.memory_bytes - 1
        out[run.source_key, run.schedule or ""].append(error)
        out[run.source_key, "all"].append(error)
        out[definition_of(run), "definition"].append(error)
    return out


@pytest.mark.quick(without=["simumax-all-22-0.003"])
@pytest.mark.parametrize(
    ("source", "schedule", "rows", "mean"),
    [
        ("simumax", "all", 22, 0.003),
        ("torchtitan", "all", 12, 0.03),
        ("zero-bubble", "1f1b", 21, 0.03),
        ("zero-bubble", "interleaved", 6, 0.03),
        ("ml-engineering", "all", 12, 0.08),
        ("bigscience", "all", 101, 0.065),
        ("bigscience-v100", "all", 5, 0.10),
    ],
)
def test_mean_error_of_a_source(source, schedule, rows, mean):
    own = errors()[source, schedule]
    assert len(own) == rows
    assert sum(map(abs, own)) / rows < mean


def test_no_run_of_a_fully_stated_source_is_far_off():
    assert max(map(abs, errors()["simumax", "all"])) < 0.01
    assert max(map(abs, errors()["torchtitan", "all"])) < 0.07
