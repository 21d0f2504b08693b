"""Measured times of stages read from CSV: units, micro-batches, equal stages, and files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.simulation.stage_times import StageTimes, read_stage_times

JOB = {"pp": 2, "microbatches": 3, "micro_batch": 1, "layers": 8, "hidden": 64, "heads": 4, "seq_len": 128}


def read(tmp_path: Path, text: str, stages: int = 2) -> StageTimes:
    path = tmp_path / "times.csv"
    path.write_text(text)
    return read_stage_times(path, stages=stages, ranks=2, job=JOB)


def test_a_row_for_each_stage(tmp_path: Path) -> None:
    found = read(
        tmp_path, "stage,forward_ms,input_gradient_us,weight_gradient_s,message_ms\n1,2,3000,4,5\n0,1,500,1,0\n"
    )
    assert found.forward_s.tolist() == [[1e-3], [2e-3]]
    assert found.backward_s.tolist() == [[1.0005], [4.003]] and found.weight_gradient_s is not None
    assert found.weight_gradient_s.tolist() == [[1.0], [4.0]]
    assert found.message_s is not None and found.message_s.tolist() == [0.0, 5e-3]


def test_rows_for_each_micro_batch(tmp_path: Path) -> None:
    rows = [f"{stage},{number},{10 * stage + number},1" for number in (2, 0, 1) for stage in (0, 1)]
    found = read(tmp_path, "\n".join(["stage,micro_batch,forward_s,backward_s", *rows]))
    assert found.forward_s.tolist() == [[0, 1, 2], [10, 11, 12]] and found.input_gradient_s is None
    with pytest.raises(UserError, match=r"stage 1 is missing for micro-batch 1.*micro-batches 0 to 2"):
        read(tmp_path, "\n".join(["stage,micro_batch,forward_s,backward_s", *rows[:-1]]))


def test_equal_stages_divide_the_times_of_their_rank(tmp_path: Path) -> None:
    head = "model,pp,microbatches,T_F_ms,T_B_ms,T_W_ms,T_comm_ms"
    found = read(tmp_path, f"{head}\nx,2,3,8,4,2,1\nx,2,6,1,1,1,1\n", stages=4)
    assert found.forward_s.tolist() == [[4e-3]] * 4 and found.backward_s.tolist() == [[3e-3]] * 4
    assert found.message_s is not None and found.message_s.tolist() == [1e-3] * 4
    with pytest.raises(UserError, match=r"no rows are of this job \(pp 2, microbatches 3\)"):
        read(tmp_path, f"{head}\nx,4,3,8,4,2,1\n")
    with pytest.raises(UserError, match="2 rows are of this job"):
        read(tmp_path, f"{head}\nx,2,3,8,4,2,1\ny,2,3,8,4,2,1\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage,forward_s,backward_s\n0,1,2\n", "stage 1 is missing: the schedule has stages 0 to 1"),
        ("stage,forward_s,backward_s\n0,1,2\n1,1,2\n2,1,2\n", "line 4: stage: 2: the schedule has stages 0 to 1"),
        ("stage,forward_s,backward_s\n0,1,2\n0,1,2\n1,1,2\n", "line 3: stage: 0 is there twice"),
        ("stage,forward_s,backward_s\n0,1,2\n1,-1,2\n", "line 3: forward_s: '-1' is not a time, 0 or more"),
        ("stage,forward_s,backward_s\n0,1,2\n1,1,nan\n", "line 3: backward_s: 'nan' is not a time"),
        ("stage,forward_s,backward_s\n0,1,2\n1,1\n", "line 3: backward_s: .* is not a time"),
        ("stage,forward_s,backward_s\n0,1,2\n1,1,2,3\n", "line 3: backward_s: has more cells behind it"),
        ("stage,forward_s,backward_s\nx,1,2\n", "line 2: stage: 'x' is not a whole number"),
        ("stage,forward_s,backward_s\n-1,1,2\n", "line 2: stage: '-1' is not a whole number"),
        ("stage,forwards_s,backward_s\n0,1,2\n", "line 1: there is no column 'forwards_s'"),
        ("stage,forward_s,forward_ms,backward_s\n0,1,1,2\n", "line 1: forward_ms: is there twice"),
        ("stage,forward_s\n0,1\n", "line 1: backward: is missing"),
        ("stage,backward_s\n0,1\n", "line 1: forward: is missing"),
        ("stage,forward_s,backward_s,weight_gradient_s\n0,1,2,1\n", "backward: is given whole and in parts"),
        (
            "stage,micro_batch,forward_s,backward_s\n0,3,1,2\n",
            "line 2: micro_batch: 3: a step has micro-batches 0 to 2",
        ),
        ("stage,forward_s,backward_s\n", "has no rows"),
        ("forward_s,backward_s\n1,2\n", "there is no column 'forward_s'"),
        ('stage,forward_s,backward_s\n"0,1,2\n', "cannot be read"),
        ("", "is missing"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_stage_times(tmp_path / "none.csv", stages=2, ranks=2, job=JOB)


def test_a_time_that_no_pass_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2: forward_s: '1e308' is no time of a pass: at most 1e\+09"):
        read(tmp_path, "stage,forward_s,backward_s\n0,1e308,1\n1,1,1\n")
