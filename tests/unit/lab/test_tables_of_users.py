"""Tables that users write by hand: a line that breaks the form is named, and no line is lost in silence."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from steptime.errors import InputFileError
from steptime.measure.runs.read import METRICS, NEEDED
from steptime.measure.runs.reading import read_runs
from steptime.measure.table import read_table
from steptime_lab.scoring.kernels import NO_SHAPE, score_kernels

RUNS = (*NEEDED, METRICS[0])
HEAD = "gpu,op,m\n"
GOOD = "h100,gemm,1\n" * 30


@pytest.mark.each(
    ("rows", "problem"),
    [
        (GOOD + "h100,gemm,1,234\n", "line 32 has 4 cells, the header 3"),
        ("h100,gemm,1,234\n" + GOOD, "line 2 has 4 cells, the header 3"),
        (GOOD + "h100\n", "line 32 has 1 cell, the header 3"),
        ("h100,gemm\n" * 5 + GOOD, "line 2 has 2 cells, the header 3"),
        (GOOD + '"h100,gemm,1\n', "line 32 has a quote that is not closed"),
        (GOOD * 1000 + "h100,gemm,1,2\n", "line 30002 has 4 cells, the header 3"),
    ],
)
@pytest.mark.each("packed", [False, True])
def test_a_line_that_breaks_the_form_is_named(tmp_path: Path, rows: str, problem: str, packed: bool) -> None:
    """All lines before it were skipped, header included, and the table then lacked its columns."""
    path, data = tmp_path / ("t.csv.gz" if packed else "t.csv"), (HEAD + rows).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(InputFileError) as caught:
        read_table(path)
    assert problem in str(caught.value) and "every line has the cells of the header" in str(caught.value)


@pytest.mark.each(
    "text",
    [
        HEAD + GOOD,
        "\n\n" + HEAD + GOOD + "\n\n",
        "# mine\n" + HEAD + GOOD,
        "\ufeff" + HEAD + GOOD,
        (HEAD + GOOD).replace("\n", "\r\n"),
        (HEAD + GOOD).replace(",", ";"),
        (HEAD + GOOD).replace(",", "\t"),
        (HEAD + GOOD).replace(",", "|"),
        HEAD + GOOD.replace("gemm", '"ge\nmm"', 1),
    ],
)
def test_forms_of_tables_that_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text, newline="")
    table = read_table(tmp_path / "t.csv")
    assert (list(table), table.rows, table["m"].sum()) == (["gpu", "op", "m"], 30, 30.0)


def test_a_word_among_many_numbers_is_one_cell_that_is_none(tmp_path: Path) -> None:
    """In a long table it was an error, in a short one a cell without a number."""
    (tmp_path / "t.csv").write_text(HEAD + GOOD * 1000 + "h100,gemm,many\n")
    table = read_table(tmp_path / "t.csv")
    assert (table.rows, table["m"][-1]) == (30001, "many")


@pytest.mark.quick("inf")
@pytest.mark.parametrize("size", ["0", "-4", "inf"])
def test_kernels_of_no_size_are_not_scored(tmp_path: Path, size: str) -> None:
    """Softmax over no rows had a time and an error."""
    sizes = {"rows": "4", "cols": "8", "b": "1", "h_q": "8", "h_kv": "8", "s_q": "64", "s_kv": "64", "d_qk": "64",
             "d_v": "64"}  # fmt: skip
    wrong = {"softmax": ("rows", "cols"), "layernorm": ("rows", "cols"), "embedding": ("rows", "cols"),
             "attention_fwd": ("b", "h_q", "h_kv", "s_q", "s_kv", "d_qk", "d_v")}  # fmt: skip
    rows = [
        ",".join(["h100", op, "bf16", "5", *(size if name == bad else value for name, value in sizes.items())])
        for op, names in wrong.items()
        for bad in names
    ]
    (tmp_path / "k.csv").write_text("\n".join([",".join(["gpu", "op", "dtype", "latency_us", *sizes]), *rows]) + "\n")
    found = score_kernels(tmp_path / "k.csv")
    assert found.to_json()["skipped"] == {NO_SHAPE: len(rows)}


def test_an_empty_table_with_a_byte_order_mark_is_empty(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf\r\n")
    with pytest.raises(InputFileError, match="is empty"):
        read_table(tmp_path / "t.csv")


def test_tables_between_tabs_have_an_ending_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text((HEAD + GOOD).replace(",", "\t"))
    assert read_table(tmp_path / "t.tsv").rows == 30


@pytest.mark.each("before", ["", "\n\n", "# of May\n", "\ufeff# of; May; one\n\n"])
@pytest.mark.each("newline", ["\n", "\r\n"])
def test_blank_lines_and_comments_before_a_header(tmp_path: Path, before: str, newline: str) -> None:
    """As in tables of kernels; the first line had to be the header."""
    text = before + ",".join(RUNS) + "\nllama2-7b,1024,h100,8,64,0.5\n"
    (tmp_path / "runs.csv").write_text(text.replace("\n", newline), encoding="utf-8", newline="")
    (run,) = read_runs(tmp_path / "runs.csv").runs
    assert (run.step_time_s, run.line) == (0.5, 2 + before.count("\n"))


def test_a_line_with_more_cells_than_the_header_is_named(tmp_path: Path) -> None:
    """A time of 1,670 ms without quotes was read as one of 1 ms."""
    head = ",".join([*NEEDED, "step_time_ms"])
    (tmp_path / "runs.csv").write_text(head + "\nllama2-7b,1024,h100,8,64,900,\nllama2-7b,1024,h100,8,64,1,670\n")
    with pytest.raises(InputFileError, match="line 3 has 7 cells, the header 6"):
        read_runs(tmp_path / "runs.csv")
