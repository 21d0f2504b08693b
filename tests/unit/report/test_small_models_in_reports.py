"""Reports of models that take megabytes, of modules without a sequence, and of fronts with one telling point."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime import api
from steptime.report.estimate import print_difference, print_estimate
from steptime.report.plan import print_plan_result
from steptime.search.accumulators import pareto_front, telling_points

JOB: dict[str, Any] = {"gpus": 2, "global_batch": 16}


def small(folder: Path, seq_len: int) -> str:
    path = folder / "small.toml"
    path.write_text(f"layers = 2\nhidden = 128\nheads = 2\nseq_len = {seq_len}\n")
    return str(path)


def test_a_plan_of_megabytes_is_not_shown_as_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every plan and every point of the front took 0.0 GiB."""
    result = api.plan(small(tmp_path, 128), "rtx4090-8", top=3, **JOB)
    print_plan_result(result, {"model": "small", "cluster": "rtx4090-8", **JOB}, long=True)
    text = capsys.readouterr().out
    assert "MiB" in text and "0.0 GiB" not in text and "MFU  GiB" not in text
    peak = f"{result.plans[0].peak_memory_bytes / 2**20:.1f}"
    assert peak in text.partition("less memory")[0] and f"{peak} MiB" in text.partition("less memory")[2]
    assert not peak.startswith("0.0")


def test_samples_that_are_no_sequences_are_called_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A convolutional network was said to train on sequences of 1 token."""
    result = api.plan(small(tmp_path, 1), "rtx4090-8", top=1, **JOB)
    print_plan_result(result, {"model": "images", "cluster": "rtx4090-8", **JOB})
    print_estimate(result.plans[0])
    text = capsys.readouterr().out
    assert "global batch 16 samples, mode" in " ".join(text.split())
    assert "1 token" not in text and "seq len" not in text
    assert "samples/s/GPU" in text and "tokens/s" not in text


def test_the_front_shows_the_point_that_saves_most() -> None:
    """A point that halved the memory for nothing was passed over, as points were taken at equal distances."""
    time_s = np.array([4.497, 4.504, 4.84, 5.03, 5.36, 5.4, 5.74, 5.79, 8.9])
    memory = np.array([176.0, 51.7, 50.3, 47.9, 46.5, 46.0, 44.6, 39.1, 28.0])
    assert telling_points(time_s, memory, 3) == [0, 1, 8]
    assert 1 in telling_points(time_s, memory, 5) and 7 in telling_points(time_s, memory, 5)
    assert telling_points(time_s, memory, 20) == list(range(9))


POINTS = st.lists(st.tuples(st.floats(1.0, 9.0), st.floats(1.0, 9.0)), min_size=2, max_size=12)


@given(POINTS, st.integers(2, 5))
def test_no_other_choice_of_points_tells_more(points: list[tuple[float, float]], most: int) -> None:
    raw = np.array(points)
    front = pareto_front(raw[:, 0], raw[:, 1])
    time_s, memory = raw[front, 0], raw[front, 1]
    x, y = np.log(time_s), np.log(memory)

    def untold(chosen: tuple[int, ...]) -> float:
        shown = y[[max(c for c in chosen if c <= i) for i in range(len(x))]]
        return float(((shown - y)[:-1] * np.diff(x)).sum())

    found = telling_points(time_s, memory, most)
    last = len(x) - 1
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] == last and len(found) == min(most, len(x))
    if len(x) > most:
        every = [(0, *middle, last) for middle in combinations(range(1, last), most - 2)]
        assert untold(tuple(found)) == pytest.approx(min(map(untold, every)), abs=1e-12)


def test_a_set_of_names_is_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    """What runs behind computation was written as ``dp to tp``."""
    a = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8, plan={"tp": 2, "overlap": ["dp", "tp"]})
    b = replace(a, plan={**a.plan, "overlap": []})
    print_difference(api.diff(a, b), "a", "b")
    text = capsys.readouterr().out
    assert "dp to tp" not in text
    row = next(line.split() for line in text.splitlines() if line.startswith("overlap"))
    assert row == ["overlap", "dp+tp", "none"]
    assert " s to " in text or " ms to " in text


def test_a_difference_names_what_differs_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    a = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8, plan={"tp": 8})
    b = api.estimate("llama3-8b", "dgx-b200", gpus=8, global_batch=8, plan={"tp": 8}, dtype="fp8-te")
    found = api.diff(a, b)
    assert found.plan == {"cluster": ["dgx-h100", "dgx-b200"], "dtype": ["bf16", "fp8-te"]}
    print_difference(found, "a", "b")
    assert "equal" not in capsys.readouterr().out


def test_rounding_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """It was written as ``-3.55271e-15 s``."""
    a = api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=8)
    b = replace(a, step_time_s=a.step_time_s * (1 - 2e-16))
    assert b.step_time_s != a.step_time_s
    print_difference(api.diff(a, b), "a", "b")
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step_time_s"))
    assert row[-3:] == ["0", "s", "1.000"]


@pytest.mark.parametrize("columns", [60, 80])
def test_the_last_tables_of_a_plan_stand_below_each_other_where_they_have_no_room(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 60 columns their names were folded within words."""
    monkeypatch.setenv("COLUMNS", str(columns))
    job: dict[str, Any] = {"gpus": 8, "global_batch": 16}
    result = api.plan("llama3-8b", "dgx-h100", top=1, **job)
    print_plan_result(result, {"model": "llama3-8b", "cluster": "dgx-h100", **job}, long=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    changes = next(line for line in lines if "what would change it" in line)
    assert changes.startswith("what") == (columns == 60)
    assert any(line.startswith("memory_bound ") for line in lines)
