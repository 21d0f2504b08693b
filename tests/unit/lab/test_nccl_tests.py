"""Collectives are read however they are spelt, and from what nccl-tests prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import InputFileError
from steptime_lab.calibrate.collectives import KINDS, NO_FORMULA, kind_of
from steptime_lab.scoring import kernels as scoring
from steptime_lab.scoring.tables import is_nccl_tests, read_nccl_tests

RANKS = "".join(
    f"#  Rank {r:2} Group  0 Pid {500 + r} on  node-{r // 2} device {r % 2:2} [0x18] NVIDIA H100 80GB HBM3\n"
    for r in range(4)
)
HEAD = """#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
LINES = """    33554432     8388608   float   sum   -1    402.1   83.45  146.03    0    401.0   83.68  146.44    0
   268435456    67108864   float   sum   -1   2145.3  125.13  218.97    0      N/A    0.00    0.00  N/A
"""
START = "# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20\n#\n"
END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 182.644\n#\n"
TEXT = START + "# Collective test starting: all_reduce_perf\n" + RANKS + HEAD + LINES + END


def write(tmp_path: Path, text: str, name: str = "log.txt") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.each(
    ("name", "kind"),
    [("all_reduce", "all_reduce"), ("AllReduce", "all_reduce"), ("all-reduce", "all_reduce"),
     ("REDUCE SCATTER", "reduce_scatter"), ("ncclAllGather", "all_gather"), ("alltoall_perf", "all_to_all"),
     ("all2all", "all_to_all"), ("send_recv", "p2p"), ("bcast", "broadcast"), ("allreduce", "all_reduce"),
     ("gossip", ""), ("", ""), ("perf", "")],
)  # fmt: skip
def test_spellings(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_spelling_of_a_table_is_predicted_alike(tmp_path: Path) -> None:
    names = ("allreduce", "all_reduce", "AllReduce", "all-reduce", "gossip")
    rows = "".join(f"H100-SXM5-80GB,8,8,{name},268435456,1200\n" for name in names)
    path = write(tmp_path, "gpu,n_gpus,gpus_per_node,collective,bytes,time_us\n" + rows, "c.csv")
    found = scoring.score_collectives(path)
    assert len(set(found.score.predicted.seconds[:4])) == 1 and found.score.predicted.reason[0] == ""
    hint = found.to_json()["hints"][NO_FORMULA]
    assert "gossip" in hint and all(kind in hint for kind in KINDS.values())


def test_the_output_of_one_run(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    assert is_nccl_tests(path)
    table = read_nccl_tests(path, {})
    assert list(table["bytes"]) == [33554432, 33554432, 268435456]
    assert list(table["time_us"]) == [402.1, 401.0, 2145.3], "a time that was not taken is no row"
    assert set(table["n_gpus"]) == {4} and set(table["gpus_per_node"]) == {2}
    assert set(table.text("gpu")) == {"h100-sxm"} and set(table.text("collective")) == {"all_reduce"}
    assert list(table.text("method")) == ["nccl-tests out-of-place", "nccl-tests in-place", "nccl-tests out-of-place"]
    score = scoring.score_collectives(path).score
    assert list(score.predicted.reason) == [""] * 3 and score.measured_s[0] == pytest.approx(402.1e-6)


def test_options_win_over_the_output(tmp_path: Path) -> None:
    given = {"gpu": "a100", "n_gpus": 16, "gpus_per_node": 8, "collective": "AllGather"}
    table = read_nccl_tests(write(tmp_path, TEXT), given)
    assert {name: table[name][0] for name in given} == given


def test_runs_one_after_another_and_tags_of_mpirun(tmp_path: Path) -> None:
    two = "".join(RANKS.splitlines(keepends=True)[:2])
    other = TEXT.replace("all_reduce", "all_gather").replace(RANKS, two)
    tagged = "".join(f"[1,0]<stdout>: {line}\n" for line in (TEXT + other).splitlines())
    table = read_nccl_tests(write(tmp_path, tagged), {})
    assert list(table.text("collective")) == ["all_reduce"] * 3 + ["all_gather"] * 3
    assert list(table["n_gpus"]) == [4, 4, 4, 2, 2, 2] and set(table["gpus_per_node"]) == {2}


def test_layout_of_an_old_version(tmp_path: Path) -> None:
    old = "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
    lines = (
        "     1048576        262144   float     sum    54.24   19.33   28.99  2e-07    53.10   19.75   29.62  2e-07\n"
    )
    table = read_nccl_tests(write(tmp_path, START + RANKS + old + lines), {"collective": "all_reduce"})
    assert list(table["time_us"]) == [54.24, 53.10] and set(table.text("dtype")) == {"float"}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (START + RANKS + HEAD + LINES, "does not say the collective", "--collective"),
        (TEXT.replace(RANKS, ""), "does not say the device", "--gpu"),
        (START + RANKS + HEAD, "has no rows", ""),
    ],
)
def test_what_nothing_says_is_asked_for(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(InputFileError, match=message) as caught:
        scoring.score_collectives(write(tmp_path, text))
    assert hint in str(caught.value)


def test_the_name_of_the_file_says_the_collective(tmp_path: Path) -> None:
    table = read_nccl_tests(write(tmp_path, START + RANKS + HEAD + LINES, "reduce_scatter_perf-4.out"), {})
    assert set(table.text("collective")) == {"reducescatter"}


def test_a_table_is_no_output(tmp_path: Path) -> None:
    assert not is_nccl_tests(write(tmp_path, "gpu,algbw\nh100,3\n", "t.csv"))
    assert not is_nccl_tests(tmp_path / "missing.txt") and not is_nccl_tests(tmp_path)


def test_options_fill_columns_of_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, "collective,size,time_ms\nall_reduce,268435456,1.2\n", "c.csv")
    with pytest.raises(InputFileError, match="lacks the column 'gpu'"):
        scoring.score_collectives(path)
    found = scoring.score_collectives(path, {"gpu": "h100", "n_gpus": 8, "gpus_per_node": 8}).score
    assert found.predicted.reason[0] == "" and found.measured_s[0] == pytest.approx(1.2e-3)
