"""``steptime score --stages``: times of passes of a pipeline's stages, measured against predicted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from fake_api import Run

from steptime.cli.main import EXIT_USER

HEAD = (
    "source,model,layers,heads,hidden,seq_len,gpu,pp,micro_batch,microbatches,framework,"
    "T_F_ms,T_B_ms,T_W_ms,T_comm_us\n"
)
ROW = "mine,GPT-x,30,32,4096,1024,A100-SXM-80GB,8,3,24,megatron,{}\n"


def written(folder: Path, *lines: str, head: str = HEAD) -> str:
    path = folder / "stages.csv"
    path.write_text(head + "".join(lines))
    return str(path)


def test_errors_by_time_and_residuals(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, ROW.format("30,29,20,500"), ROW.format("60,29,20,"), ROW.format("many,29,20,1"))
    document = json.loads(run("score", "--stages", file, "--json", "--out", str(tmp_path / "rows.csv")).stdout)
    assert (document["rows"], document["scored"]) == (3, 2)
    assert document["skipped"] == {"a measurement is no positive number with a known unit": 1}
    assert {name: document["stages"][name]["rows"] for name in ("T_F", "T_comm")} == {"T_F": 2, "T_comm": 1}
    assert document["passes"]["rows"] == 6 and document["stages"]["T_W"]["mape"] < 0.2
    with (tmp_path / "rows.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    forward = [row for row in rows if row["time"] == "T_F"]
    assert [row["measured_s"] for row in forward] == ["0.03", "0.06"]
    assert forward[0]["predicted_s"] == forward[1]["predicted_s"] and rows[-1]["detail"] == "T_F_ms: 'many'"
    assert next(row for row in rows if row["time"] == "T_comm")["measured_s"] == "0.0005"
    text = run("score", "--stages", file).stdout
    assert "2 of 3 rows scored" in text and "(line 4: T_F_ms: 'many')" in " ".join(text.split())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW.format("1,1,1,1").replace(",8,3,24,", ",1,3,24,"), "fewer than two pipeline stages"),
        (ROW.format("1,1,1,1").replace(",8,3,24,", ",8,3,,"), "fewer than two pipeline stages"),
        (ROW.format("1,1,1,1").replace(",8,3,24,", ",60,3,24,"), "more pipeline stages than layers"),
        (ROW.format(",,,"), "no time, rate or memory is given"),
        (ROW.format("1,1,1,1").replace("A100-SXM-80GB", "abacus"), "the accelerator is not in the catalogue"),
    ],
)
def test_rows_that_cannot_be_predicted_are_counted(run: Run, tmp_path: Path, row: str, reason: str) -> None:
    done = run("score", "--stages", written(tmp_path, row))
    assert done.exit_code == 0 and reason in " ".join(done.stdout.split())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "ZB-1p"])
def test_passes_are_told_apart_whatever_their_order(run: Run, tmp_path: Path, schedule: str) -> None:
    file = written(tmp_path, ROW.format("30,29,20,500").strip() + f",{schedule}\n", head=HEAD.strip() + ",schedule\n")
    found = json.loads(run("score", "--stages", file, "--json").stdout)["stages"]
    assert abs(found["T_W"]["bias"]) < 0.3 and abs(found["T_B"]["bias"]) < 0.3


def test_wrong_tables_are_answered_with_what_is_needed(run: Run, tmp_path: Path) -> None:
    without = run("score", "--stages", written(tmp_path, head="model,seq_len,gpu,pp,micro_batch,microbatches\n"))
    assert without.exit_code == EXIT_USER and "has no time of a stage" in without.stderr and "T_F_ms" in without.stderr
    lacking = run("score", "--stages", written(tmp_path, head="model,T_F_ms\n"))
    assert lacking.exit_code == EXIT_USER and "lacks the columns seq_len, gpu, pp" in lacking.stderr
    assert run("score", "--stages", "no.csv").exit_code == EXIT_USER
    assert run("score", "a.csv", "--stages", "b.csv").exit_code == EXIT_USER


def test_what_nobody_reads_is_named_and_doubts_are_listed(run: Run, tmp_path: Path) -> None:
    head = HEAD.replace("source,", "source,mood,recompute,")
    row = ROW.format("1,1,1,1").replace("mine,", "mine,happy,sometimes,")
    file = written(tmp_path, row, head=head)
    document = json.loads(run("score", "--stages", file, "--json").stdout)
    assert document["columns_not_read"] == ["mood"] and document["doubts"]["spelling of a setting unknown"] == 1
    text = " ".join(run("score", "--stages", file).stdout.split())
    assert "columns that are not read: mood" in text and "1 doubtful: spelling of a setting unknown" in text


def test_an_empty_file_is_told_nothing_of_other_tables(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    done = run("score", "--stages", str(tmp_path / "empty.csv"))
    assert done.exit_code == EXIT_USER and "is empty" in done.stderr and "metric" not in done.stderr


def test_columns_of_stages_and_layouts_are_listed(run: Run) -> None:
    document = json.loads(run("score", "--columns", "--json").stdout)
    assert "T_F_ms" in document["stages"]["one_of"] and document["outcomes"]["needed"] == ["outcome"]
    assert "T_W_us" in run("score", "--columns").stdout
