"""``steptime calibrate fit`` accounts for the rows that it fits nothing to, and reads the usual names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

from steptime.hardware.profiles import read_profile

HEAD = "source,gpu,op,dtype,rows,cols,latency_us,method\n"


def rows_of(op: str, dtype: str = "bf16", gpu: str = "h100") -> str:
    sizes = [(rows, columns) for rows in (256, 1024, 4096, 16384) for columns in (512, 2048, 8192, 16384)]
    return "".join(
        f"mine,{gpu},{op},{dtype},{rows},{columns},{3 + rows * columns * 4 / 1.5e6},cuda_graph_mean\n"
        for rows, columns in sizes
    )


@pytest.fixture
def collectives(tmp_path: Path) -> Path:
    path = tmp_path / "collectives.csv"
    rows = "".join(f"mine,abacus,8,8,all_reduce,{2**power},{20 + 2**power / 4e5}\n" for power in range(10, 28))
    path.write_text("source,gpu,n_gpus,gpus_per_node,collective,bytes,time_us\n" + rows)
    return path


def test_rows_that_nothing_was_fitted_to_are_counted_by_reason(run: Run, tmp_path: Path, collectives: Path) -> None:
    few = "mine,h100,dropout,bf16,256,512,4,cuda_graph_mean\n"
    strange = "mine,abacus,softmax,bf16,256,512,4,cuda_graph_mean\n" + rows_of("sort")[: len(HEAD) + 20].split("\n")[0]
    (tmp_path / "k.csv").write_text(HEAD + rows_of("softmax") + few + strange + "\n")
    both = ("calibrate", "fit", "--kernels", str(tmp_path / "k.csv"), "--collectives", str(collectives))
    text = " ".join(run(*both, "--out", str(tmp_path / "p")).stdout.split())
    for said in (
        "1 row of kernels left out: too few different shapes: dropout on h100-sxm",
        "1 row of kernels left out: device not in the catalogue: abacus",
        "1 row of kernels left out: operator that no curve is fitted to: sort",
        "18 rows of collectives left out: not of the sources and GPUs that fabrics are fitted to: mine on abacus",
    ):
        assert said in text
    left_out = json.loads(run(*both, "--out", str(tmp_path / "q"), "--json").stdout)["left_out"]
    assert sum(left_out["kernels"].values()) == 3 and list(left_out["collectives"].values()) == [18]
    only = ("--only", "softmax", "--out", str(tmp_path / "r"), "--json")
    assert list(json.loads(run(*both[:4], *only).stdout)["left_out"]["kernels"].values()) == [1]


def test_a_fit_of_nothing_says_why(run: Run, tmp_path: Path, collectives: Path) -> None:
    done = run("calibrate", "fit", "--collectives", str(collectives), "--out", str(tmp_path / "p"))
    assert "18 rows: not of the sources and GPUs that fabrics are fitted to: mine on abacus" in " ".join(
        done.stderr.split()
    )


def test_operators_and_dtypes_may_have_their_usual_names(run: Run, tmp_path: Path) -> None:
    """What ``score`` reads, ``calibrate fit`` reads too."""
    (tmp_path / "k.csv").write_text(HEAD + rows_of("layer_norm", "torch.bfloat16"))
    done = run("calibrate", "fit", "--kernels", str(tmp_path / "k.csv"), "--out", str(tmp_path / "p"))
    assert done.exit_code == 0 and "left out" not in done.stdout, done.stderr
    (curve,) = read_profile(tmp_path / "p" / "h100-sxm.toml").curves
    assert (curve.family, curve.points) == ("layernorm", 16)


def test_rows_of_a_fitted_kernel_that_the_fit_did_not_take_are_counted(run: Run, tmp_path: Path) -> None:
    """Times and shapes that are none were silently left out where others of the kernel were fitted; inf was a crash."""
    bad = [("256", "512", cell) for cell in ("0", "-5", "nan", "inf", "")] + [("0", "512", "4"), ("", "512", "4")]
    rows = "".join(f"mine,h100,softmax,bf16,{m},{n},{time},cuda_graph_mean\n" for m, n, time in bad)
    (tmp_path / "k.csv").write_text(HEAD + rows_of("softmax") + rows)
    done = run("calibrate", "fit", "--kernels", str(tmp_path / "k.csv"), "--out", str(tmp_path / "p"), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["left_out"]["kernels"] == {
        "no positive measured time: softmax": 5, "shape or dtype unknown: softmax": 2,
    }  # fmt: skip
    assert read_profile(tmp_path / "p" / "h100-sxm.toml").curves[0].points == 16


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3, 1e6])
def test_times_in_other_units_are_no_curve(run: Run, tmp_path: Path, unit: float) -> None:
    """A curve with an error of 46 million percent was written, with exit code 0."""
    cells = [line.split(",") for line in rows_of("softmax").splitlines()]
    rows = "".join(",".join([*c[:6], str(float(c[6]) * unit), c[7]]) + "\n" for c in cells)
    (tmp_path / "k.csv").write_text(HEAD + rows)
    done = run("calibrate", "fit", "--kernels", str(tmp_path / "k.csv"), "--out", str(tmp_path / "p"))
    text = " ".join(done.stderr.split())
    assert (done.exit_code, list((tmp_path / "p").iterdir())) == (2, []), done.stdout
    assert "16 rows: times far from what links or devices explain; are the units right?: softmax on h100-sxm" in text
