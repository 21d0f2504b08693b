"""PyTorch's pipelining CSV: there and back, refused where it is wrong, and run by PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pipelines import SERVED, table_of

import steptime
from steptime.errors import InputFileError, UserError
from steptime.schedule import SCHEDULES, Kind, Pipeline
from steptime.schedule.actions import COLUMNS
from steptime.simulation.messages import with_messages
from steptime.simulation.pytorch_csv import csv_text, read_csv, table_of_csv

WORKER = Path(__file__).with_name("pipeline_worker.py")
WRITTEN = [name for name, each in SCHEDULES.items() if each.synchronous]


@pytest.mark.parametrize("name", WRITTEN)
def test_there_and_back(name: str) -> None:
    for pipeline in SERVED[name][:: max(len(SERVED[name]) // 4, 1)]:
        if pipeline.slices == 1:
            for table in (table_of(name, pipeline), with_messages(table_of(name, pipeline), gathered=1, reduces=True)):
                again = table_of_csv(csv_text(table))
                assert all((getattr(table, each) == getattr(again, each)).all() for each in COLUMNS)
                assert (again.ranks, again.stages) == (table.ranks, table.stages)


def test_how_it_looks() -> None:
    text = csv_text(SCHEDULES["dualpipev"].actions(2, 2, 4))
    assert text.splitlines()[1] == (
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3"
    )
    assert table_of_csv("0F0, 0B0 ,,\n\n").micro_batches == 1
    assert csv_text(with_messages(SCHEDULES["1f1b"].actions(1, 1, 1), updates=True)) == "0F0,0B0\n"


@pytest.mark.parametrize(("text", "message"), [
    ("0F0,0X0", "rank 0, cell 2: '0X0': unknown action\n  cells are like 2F0, 2B0"),
    ("0F0,0B0\n1F0,0F0junk", "rank 1, cell 2: '0F0junk': unknown action"),
    ("0F0,(0F1;0Q0)OVERLAP_F_B", "rank 0, cell 2: '(0F1;0Q0)OVERLAP_F_B': unknown action"),
    ("0F0,0UPDATE", "rank 0, cell 2: '0UPDATE': unknown action"),
    ("0F0,0B", "rank 0, cell 2: '0B': B has a micro-batch"),
    ("0F0,0UNSHARD1", "rank 0, cell 2: '0UNSHARD1': UNSHARD has no micro-batch"),
    ("", "a schedule without actions"),
    ("0F0,0B0\n1F0", "rank 1: 1B0 is missing: each stage needs a pass B (or I and W) for micro-batch 0"),
    ("0F0,0I0", "rank 0: 0W0 is missing: each stage needs a pass W for micro-batch 0"),
    ("0F0,0F2,0B0,0B2", "rank 0: 0F1 is missing: each stage needs a pass F for micro-batch 1"),
    ("999999999F999999999", "no rank: 0F0 is missing"),
    ("0F0,0B0\n0F0", "rank 0: 0F0: is in the schedule twice"),
    ("0F0\n0B0", "rank 1: 0B0: its forward pass is on rank 0"),
    ("0B0,0F0", "rank 0: 0B0: stands before 0F0, which it needs"),
    ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0",
     "rank 0: 0B0: ranks wait for each other in a circle: rank 0 at 0B0 for 1B0; rank 1 at 1F1 for 0F1"),
    ("(0F0;0B0)OVERLAP_F_B", "rank 0: 0B0: runs together with 0F0, which it needs"),
    ("0F0,0SEND_F0,0B0\n1F0,1B0", "rank 1: 1F0: no receive of its input in the schedule"),
    ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "rank 1: 1RECV_F0: what it needs is not in the schedule"),
    ("0F0,0SEND_F0,0RECV_B0,0B0,1RECV_F0\n1F0,1B0,1SEND_B0", "rank 0: 1RECV_F0: its pass is on rank 1"),
    ("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0", "rank 0: 0SEND_F0: a message that no other rank needs"),
    ("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "rank 0: 0RECV_B0: ranks wait for each other in a circle"),
    ("0F0,0B0,0RESHARD", "rank 0: 0RESHARD: frees weights that were not gathered"),
    ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "rank 0: 0REDUCE_GRAD: sums gradients twice"),
    ("0UNSHARD,0F0,0RESHARD,0B0", "rank 0: 0B0: its weights are not gathered"),
])  # fmt: skip
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        table_of_csv(text)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be read"):
        read_csv(tmp_path / "none.csv")
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(InputFileError, match="cannot be read"):
        read_csv(path)
    path.write_text("0F0,0X0", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(f"{path}: rank 0, cell 2: '0X0': unknown action")):
        read_csv(path)
    path.write_text(csv_text(SCHEDULES["zb-v"].actions(2, 2, 4)), encoding="utf-8")
    assert read_csv(path).stages == 4


def test_what_the_notation_cannot_say() -> None:
    with pytest.raises(UserError, match="CSV has no slices of sequences"):
        csv_text(SCHEDULES["terapipe"].actions(2, 1, 2, slices=2))
    with pytest.raises(UserError, match="CSV has no updates of weights within a step"):
        csv_text(SCHEDULES["pipedream"].actions(2, 1, 2))


def test_pytorch_reads_what_it_would_write() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    table = with_messages(SCHEDULES["dualpipev"].actions(4, 2, 8), gathered=3, reduces=True)
    for line in csv_text(table).splitlines():
        assert [str(schedules._Action.from_str(cell)) for cell in line.split(",")] == line.split(",")
    assert (table.kind == Kind.SEND_FORWARD).any() and np.diff(table.rank).min() >= 0


@pytest.mark.slow
def test_pytorch_runs_them(tmp_path: Path) -> None:
    """Two processes on CPU load the files, and have the gradients of a run without a pipeline."""
    pytest.importorskip("torch")
    runs = {"1f1b": 1, "interleaved": 2, "zb-v": 2, "dualpipev": 2, "zb-h2": 1}
    for name, chunks in runs.items():
        table = table_of(name, Pipeline(ranks=2, chunks=chunks, micro_batches=4))
        (tmp_path / f"{name}.csv").write_text(csv_text(table), encoding="utf-8")
        whole = with_messages(table, gathered=3, reduces=True)
        (tmp_path / f"{name}.comms.csv").write_text(csv_text(whole), encoding="utf-8")
    source = str(Path(steptime.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), "2", str(tmp_path), "4"], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]  # fmt: skip
    for worker in workers:
        said, _ = worker.communicate(timeout=240)
        assert not worker.returncode, said
        lines = [line.split() for line in said.splitlines() if ".csv " in line]
        assert sorted(name for name, _ in lines) == sorted(path.name for path in tmp_path.glob("*.csv"))
        assert all(float(difference) < 1e-6 for _, difference in lines)
