"""``steptime calibrate fit --collectives`` on tables of one's own, and on tables with what no collective does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_api import Run

from steptime.cli.main import EXIT_USER
from steptime.hardware.profiles import read_fabric_profile
from steptime_lab.scoring.left_out import FEW_ROWS, NO_COLLECTIVE, UNEXPLAINED

HEAD = "source,gpu,n_gpus,gpus_per_node,collective,bytes,time_us"
SIZES = tuple(2**k for k in range(12, 30, 3))


def row(ranks: object = 8, size: object = 2**20, time_us: object = None, source: str = "mine") -> str:
    """All-reduces that start in 10 us and then take 300 GB/s."""
    if time_us is None:
        time_us = 10 + 2 * float(str(size)) * (1 - 1 / float(str(ranks))) / 300e3
    return f"{source},H100-SXM5-80GB,{ranks},8,allreduce,{size},{time_us}"


def rows(factor: float = 1.0, source: str = "mine") -> list[str]:
    """Of three groups in a node."""
    made = [row(ranks, size, source=source).rsplit(",", 1) for ranks in (2, 4, 8) for size in SIZES]
    return [f"{head},{float(time) * factor}" for head, time in made]


def write(folder: Path, lines: list[str]) -> str:
    path = folder / "c.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return str(path)


@pytest.mark.slow
def test_rows_that_nothing_measures_are_left_out(run: Run, tmp_path: Path) -> None:
    """And a table of a source of one's own is fitted as the machine that its device and library are."""
    wrong = [row(time_us=t) for t in ("inf", "-inf", "nan", "0", "-5", "1e300", "1e-300")]
    wrong += [row(size=size, time_us=5) for size in ("inf", "1e300", "nan", "-1", "0")]
    wrong += [row(ranks, time_us=5) for ranks in ("1", "0", "inf", "1e9")]
    wrong += [row(16, time_us=5000)]  # beyond the node, of a machine whose network is not fitted
    out = tmp_path / "out"
    done = run("calibrate", "fit", "--collectives", write(tmp_path, rows() + wrong), "--out", str(out))
    assert (done.exit_code, done.stderr) == (0, "")
    said = "time, size or group size missing or out of range for the fit of: h100-sxm-nccl"
    assert f"{len(wrong)} rows of collectives left out: {said}" in " ".join(done.stdout.split())
    profile = read_fabric_profile(out / "fabrics" / "h100-sxm-nccl.toml")
    assert (profile.points, profile.sources) == (18, ("mine",))
    assert profile.median_ape < 0.1 and np.isfinite(profile.band).all()


@pytest.mark.quick(
    without=[
        "lines2-times what its links explain-times far from what links or devices explain; are the units right?",
        "lines3-times what its links explain-times far from what links or devices explain; are the units right?",
    ]
)
@pytest.mark.parametrize(
    ("lines", "message", "reason"),
    [
        ([row(ranks) for ranks in (2, 4, 8)] * 5, "15 usable measurements of 1 size are too few", FEW_ROWS),
        (rows()[:6], "6 usable measurements of 6 sizes are too few", FEW_ROWS),
        (rows(1e6), "times what its links explain", UNEXPLAINED),
        (rows(1e-6, "aiconfigurator_nccl"), "times what its links explain", UNEXPLAINED),
        ([row(time_us=1e300)] * 20, "no curve could be fitted", NO_COLLECTIVE),
    ],
)
def test_a_table_that_cannot_be_fitted_writes_nothing_and_says_why(
    run: Run, tmp_path: Path, lines: list[str], message: str, reason: str
) -> None:
    out = tmp_path / "out"
    done = run("calibrate", "fit", "--collectives", write(tmp_path, lines), "--out", str(out))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr and "no curve could be fitted" in done.stderr
    assert f"{len(lines)} rows: {reason}: h100-sxm" in done.stderr and done.stderr.count(" rows: ") == 1
    assert list((out / "fabrics").iterdir()) == []


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_in_another_encoding_says_what_to_do(run: Run, tmp_path: Path, encoding: str) -> None:
    path = Path(write(tmp_path, []))
    path.write_text("\n".join([HEAD, row(source="größe")]) + "\n", encoding=encoding)
    done = run("score", "--collectives", str(path))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert done.stderr.startswith(f"Error: {path}: cannot be read as a table") and "save it as UTF-8" in done.stderr
