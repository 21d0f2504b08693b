"""``steptime score`` in the user's words: what tables may hold is listed, what is wrong is said with what to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from steptime.cli.main import EXIT_USER
from steptime.measure.runs.read import OTHER_NAMES
from steptime_lab.scoring.plain_kernels import PLAIN

NCCL = """# nThread 1 nGpus 8
# size count type redop root time algbw busbw #wrong time algbw busbw #wrong
268435456 67108864 float sum -1 1120.4 239.6 419.3 0 1119.0 239.9 419.8 0
"""


def test_columns_are_listed(run: Run) -> None:
    done = run("score", "--columns")
    assert (done.exit_code, done.stderr) == (0, "")
    for name in (*OTHER_NAMES, *PLAIN, "all_reduce", "step_time_ms", "peak_memory_bytes"):
        assert name in done.stdout
    document = json.loads(run("score", "--columns", "--json").stdout)
    assert [row["op"] for row in document["kernels"]["operators"]] == list(PLAIN)
    assert document["runs"]["other_names"]["gpu"][-1] == "cluster" and "all_reduce" in document["collectives"]["names"]


def test_unknown_operators_are_answered_with_those_that_there_are(run: Run, tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text("gpu,op,dtype,rows,cols,latency_us\nh100,sort,bf16,4096,4096,40\n")
    text = " ".join(run("score", "--kernels", str(tmp_path / "k.csv")).stdout.split())
    assert "1 skipped: no training step launches this kernel sort; scored are gemm, bmm, attention_fwd" in text


def test_output_of_nccl_tests_with_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(NCCL)
    asked = run("score", "--collectives", str(tmp_path / "log.txt"))
    assert asked.exit_code == EXIT_USER and "give --collective, one of all_gather" in asked.stderr
    given = ("--collective", "AllReduce", "--gpu", "h100", "--gpus", "8", "--gpus-per-node", "8")
    document = json.loads(run("score", "--collectives", str(tmp_path / "log.txt"), *given, "--json").stdout)
    assert document["scored"] == document["rows"] == 2 and document["by_gpu"]["h100"]["mape"] < 0.3


@pytest.mark.parametrize("option", [("--gpu", "h100"), ("--gpus", "8"), ("--collective", "all_reduce")])
def test_options_of_collectives_are_refused_elsewhere(run: Run, option: tuple[str, str]) -> None:
    done = run("score", "runs.csv", *option)
    assert done.exit_code == EXIT_USER and "are for collectives alone" in done.stderr


def test_doubts_and_a_fit_to_nothing_are_told(run: Run, tmp_path: Path) -> None:
    head = "model;cluster;gpus;global_batch;seq;step_time;tokens_per_s_per_gpu;framework\n"
    row = "llama2-7b;dgx-h100;8;64;4096;{};14247;NeMo\n"
    (tmp_path / "mine.csv").write_text(head + row.format("2.3 s") + row.format("2300"))
    text = run("score", str(tmp_path / "mine.csv"), "--leave-out", "each").stdout
    assert "1 doubtful: printed time and rate differ a hundredfold or more: a wrong unit?" in " ".join(text.split())
    assert "All rows are of one source, so nothing remains to fit to" in text


def test_columns_that_nothing_reads_are_told(run: Run, tmp_path: Path) -> None:
    """A column under a name that is not known is no silent loss; one without a cell, or of remarks, needs no line."""
    head = "model,cluster,gpus,global_batch,seq,step_time,framework,memory,Optimizer,remarks,notes\n"
    (tmp_path / "mine.csv").write_text(head + "llama2-7b,dgx-h100,8,64,4096,2.3 s,NeMo,61 GiB,lion,,first\n")
    text = " ".join(run("score", str(tmp_path / "mine.csv")).stdout.split())
    assert "columns that are not read: memory, Optimizer (steptime score --columns" in text
    assert json.loads(run("score", str(tmp_path / "mine.csv"), "--json").stdout)["columns_not_read"] == [
        "memory",
        "Optimizer",
    ]
    (tmp_path / "mine.csv").write_text(
        head.replace("memory", "peak_mem") + "llama2-7b,dgx-h100,8,64,4096,2.3 s,,9,,,\n"
    )
    assert "not read" not in run("score", str(tmp_path / "mine.csv")).stdout


def test_devices_may_have_the_names_of_their_drivers(run: Run, tmp_path: Path) -> None:
    head, shape = "gpu,op,dtype,m,n,k,latency_us\n", "gemm,bf16,8192,8192,8192,1740\n"
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100 80GB PCIe", "h100-sxm")
    (tmp_path / "k.csv").write_text(head + "".join(f"{name},{shape}" for name in names))
    document = json.loads(run("score", "--kernels", str(tmp_path / "k.csv"), "--json").stdout)
    assert document["scored"] == 3
    assert document["by_gpu"][names[0]]["bias"] == document["by_gpu"]["h100-sxm"]["bias"]
    head = "gpu,n_gpus,gpus_per_node,collective,bytes,time_us\n"
    (tmp_path / "c.csv").write_text(head + f"{names[0]},8,8,all_reduce,268435456,1200\n")
    assert json.loads(run("score", "--collectives", str(tmp_path / "c.csv"), "--json").stdout)["scored"] == 1


def test_devices_that_are_not_known_are_named_with_their_row(run: Run, tmp_path: Path) -> None:
    rows = [f"{gpu},gemm,bf16,4096,4096,4096,225" for gpu in ("h100", "abacus", "NVIDIA GH200 SXM", "abacus")]
    (tmp_path / "k.csv").write_text("\n".join(["gpu,op,dtype,m,n,k,latency_us", *rows, ""]))
    text = " ".join(run("score", "--kernels", str(tmp_path / "k.csv")).stdout.split())
    assert "2 of 4 rows scored 2 skipped: device not in the catalogue abacus (2 rows, the first is row 2)" in text
