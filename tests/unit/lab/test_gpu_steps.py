"""Training steps measured on a GPU: how a trace is read, what is kept of it, and what of a case is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_cases import CASES, Case  # noqa: E402
from gpu_steps import done, missing, read_trace  # noqa: E402


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


TRACE = [
    event("user_annotation", "phase forward", 0, 100), event("user_annotation", "phase backward", 100, 100),
    event("user_annotation", "something else", 0, 500),
    event("cpu_op", "aten::mm", 10, 5, **{"External id": 1, "Input Dims": [[8, 4], [4, 2]],
                                         "Input type": ["c10::BFloat16", "c10::BFloat16"]}),
    event("cpu_op", "aten::add", 110, 5, **{"External id": 2}),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=7),
    event("cuda_runtime", "cudaLaunchKernel", 112, 1, correlation=8),
    event("kernel", "gemm", 150, 30, correlation=7, **{"External id": 1}),
    event("kernel", "map", 170, 20, correlation=8, **{"External id": 2}),
    event("gpu_memset", "Memset", 300, 5, correlation=9),
]  # fmt: skip


def test_kernels_belong_to_who_launched_them() -> None:
    """A kernel of the forward pass may run while the backward pass is issued; two may run at once."""
    found = read_trace(TRACE)
    assert found["kernels"] == 3
    assert found["kernel_sum_s"] == pytest.approx(55e-6) and found["busy_s"] == pytest.approx(45e-6)
    assert found["phases"]["forward"] == [1, pytest.approx(30e-6)]
    assert found["phases"]["backward"] == [1, pytest.approx(20e-6)]
    assert found["operators"][0] == ["aten::mm", "forward", "BFloat16[8, 4] BFloat16[4, 2]", 1, pytest.approx(30e-6)]


def test_cases_are_distinct_and_read_back() -> None:
    assert len({case.title for case in CASES}) == len(CASES)
    assert [Case.of(json.loads(json.dumps(case.to_json()))) for case in CASES] == list(CASES)


def test_a_case_that_ended_the_process_is_not_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({"facts": {}}) + "\n" + json.dumps({"case": CASES[1].to_json(), "begun": True}) + "\n")
    assert done(path) == {CASES[1].title}
    assert list(missing(CASES[:3], path)) == [CASES[0], CASES[2]]


def test_the_kept_measurements_are_of_these_cases() -> None:
    lines = (ROOT / "tests/data/machines/h100.steps.jsonl").read_text().splitlines()
    rows = [line for line in map(json.loads, lines) if "step_s" in line]
    known = {case.title for case in CASES}
    assert len(rows) == 43 and {Case.of(row["case"]).title for row in rows} <= known
    for row in rows:
        assert 0 < row["busy_s"] <= row["kernel_sum_s"] * 1.001 and min(row["step_s"]) > 0
        assert row["memory"]["start_allocated"] < row["memory"]["peak_allocated"] <= row["memory"]["peak_reserved"]
