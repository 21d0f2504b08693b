from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from steptime.errors import FieldError, InputFileError
from steptime.hardware import load_device
from steptime.hardware.library import NO_DEVICE
from steptime.hardware.profiles import load_profile
from steptime.measure.table import Table
from steptime.store.files import refuse_output
from steptime_lab.calibrate.family import NOT_LAUNCHED
from steptime_lab.calibrate.gemm import FAMILY, gemm_shape
from steptime_lab.data_root import require_data
from steptime_lab.scoring import kernels as scoring

GEMM = {"gpu": "h100", "op": "gemm", "dtype": "bf16", "m": "4096", "n": "4096", "k": "4096", "latency_us": "250"}
RING = {"gpu": "H100-SXM5-80GB", "collective": "allreduce", "n_gpus": "8", "bytes": "1e8", "time_us": "500"}


def table(path: Path, rows: Sequence[Mapping[str, str]], name: str = "t.csv") -> Path:
    columns = list({key: None for row in rows for key in row})
    with (path / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path / name


def test_a_product_is_predicted_by_the_curve_of_its_device(tmp_path: Path) -> None:
    profile = load_profile("h100-sxm")
    assert profile is not None
    curve = profile.curve("gemm", "bf16")
    assert curve is not None
    columns = {n: np.array([4096.0]) for n in "mnk"} | {"dtype": np.array(["bf16"], object)}
    shape = gemm_shape(Table(columns))
    expected = float(np.ravel(FAMILY.predict(shape, FAMILY.device(load_device("h100"), "bf16"), curve.coefficients))[0])
    got = scoring.score_kernels(table(tmp_path, [GEMM]))
    assert got.score.predicted.seconds[0] == pytest.approx(expected, rel=1e-12)
    summary = got.score.to_json()
    assert summary["time"]["bias"] == pytest.approx(expected / 250e-6 - 1, rel=1e-9)
    assert summary["by_op"]["gemm"]["rows"] == summary["by_gpu"]["h100"]["rows"] == 1
    assert summary["by_curve"]["own"]["rows"] == 1


REASONS: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"latency_us": "-1"}, scoring.NO_TIME),
    ({"latency_us": "0"}, scoring.NO_TIME),
    ({"latency_us": ""}, scoring.NO_TIME),
    ({"latency_us": "inf"}, scoring.NO_TIME),
    ({"latency_us": "fast"}, scoring.NO_TIME),
    ({"gpu": "abacus"}, NO_DEVICE),
    ({"gpu": "/etc/passwd"}, NO_DEVICE),
    ({"gpu": "x.toml"}, NO_DEVICE),
    ({"gpu": ""}, NO_DEVICE),
    ({"op": "sort"}, NOT_LAUNCHED),
    ({"m": "-5"}, scoring.NO_SHAPE),
    ({"m": "wide"}, scoring.NO_SHAPE),
    ({"dtype": "float7"}, scoring.NO_SHAPE),
    ({"notes": "SUSPECT"}, scoring.SUSPECT),
)


def test_rows_without_a_prediction_are_counted_with_their_reasons(tmp_path: Path) -> None:
    """All in one table: the profiles of the catalogue are read once."""
    got = scoring.score_kernels(table(tmp_path, [GEMM, *({**GEMM, **change} for change, _ in REASONS)])).score
    found = zip(["", *(reason for _, reason in REASONS)], got.predicted.reason, strict=True)
    assert [(wanted, said) for wanted, said in found if wanted != said] == []
    summary = got.to_json()
    assert (summary["rows"], summary["scored"]) == (len(REASONS) + 1, 1)
    assert summary["skipped"] == Counter(reason for _, reason in REASONS)


def test_a_device_that_nobody_measured_takes_a_wider_band(tmp_path: Path) -> None:
    profile = load_profile("h20")
    assert profile is None or all(curve.kind == "assumed" for curve in profile.curves)
    got = scoring.score_kernels(table(tmp_path, [GEMM, {**GEMM, "gpu": "h20"}])).score
    width = got.predicted.high_s / got.predicted.low_s
    assert list(got.groups["by_curve"]) == ["own", "transferred"]
    assert width[1] > width[0]


def test_what_no_estimate_times_takes_a_stand_in(tmp_path: Path) -> None:
    row = {"gpu": "h100", "op": "softmax", "dtype": "fp8", "rows": "4096", "cols": "4096", "latency_us": "40"}
    got = scoring.score_kernels(table(tmp_path, [{**row, "source": "mine"}, {**row, "source": "neusight"}])).score
    assert list(got.groups["by_curve"]) == ["own, other timer, stand-in", "own, other timer"]
    assert got.predicted.seconds[0] == got.predicted.seconds[1]
    assert got.predicted.high_s[0] > got.predicted.high_s[1]


def test_a_row_that_cannot_be_read_does_not_disturb_the_others(tmp_path: Path) -> None:
    row = {"gpu": "t4", "op": "rnn_fwd", "dtype": "fp32", "b": "16", "latency_us": "40"}
    good, bad = ({**row, "notes": f"cell=LSTM;hidden={hidden}"} for hidden in ("512", "1" + "0" * 400))
    got = scoring.score_kernels(table(tmp_path, [good, bad, good]))
    assert list(got.score.predicted.reason) == ["", scoring.NO_SHAPE, ""]


def test_rows_that_no_training_step_launches_are_counted_and_left_out(tmp_path: Path) -> None:
    """Serving, whatever it is called, in one reason; a row that says no more than its operator is scored."""
    rows = [
        {**GEMM, "op": "attention_decode"},
        {**GEMM, "op": "moe"},
        {**GEMM, "dtype": "int4_wo"},
        {**GEMM, "op": "layernorm", "rows": "4096", "cols": "4096", "source": "llmservingsim", "notes": "layer=x"},
        {**GEMM, "op": "layernorm", "rows": "4096", "cols": "4096"},
        {**GEMM, "dtype": "fp8_block"},
    ]
    found = scoring.score_kernels(table(tmp_path, rows)).to_json()
    assert (found["scored"], found["skipped"]) == (2, {NOT_LAUNCHED: 4})
    assert found["hints"][NOT_LAUNCHED].startswith("attention_decode, gemm, layernorm, moe; scored are gemm, bmm, ")
    assert all(f" {op}," in found["hints"][NOT_LAUNCHED] for op in ("grouped_gemm", "rnn_bwd_weight", "rmsnorm"))


def test_a_legible_row_that_no_family_reads_lacks_a_curve(tmp_path: Path) -> None:
    """Gradients of dropout that name their implementation, timed by the host: its shape is known."""
    row = {"gpu": "t4", "op": "dropout_bwd", "dtype": "fp32", "rows": "512", "source": "neusight_trace",
           "notes": "case=x;pass=bwd", "latency_us": "40"}  # fmt: skip
    got = scoring.score_kernels(table(tmp_path, [{**row, "cols": "1024"}, {**row, "cols": "wide"}])).score
    assert list(got.predicted.reason) == [scoring.NO_CURVE, scoring.NO_SHAPE]


def test_collectives(tmp_path: Path) -> None:
    rows = [RING, {**RING, "time_us": "-1"}, {**RING, "gpu": "abacus"}, {**RING, "collective": "gossip"}]
    got = scoring.score_collectives(table(tmp_path, rows)).score.to_json()
    assert (got["rows"], got["scored"], sum(got["skipped"].values())) == (4, 1, 3)
    assert got["skipped"][scoring.NO_TIME] == 1
    assert abs(got["time"]["bias"]) < 0.5


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("gpu,op,dtype\nh100,gemm,bf16\n", "t.csv", "lacks the column 'latency_us'"),
        ("gpu,op,dtype,latency_us\n", "t.csv", "has no rows"),
        ("x", "t.txt", "is not a table"),
        ("no parquet", "t.parquet", "cannot be read"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputFileError, match=message):
        scoring.score_kernels(tmp_path / name)


def test_residuals(tmp_path: Path) -> None:
    got = scoring.score_kernels(table(tmp_path, [GEMM, {**GEMM, "gpu": "abacus"}]))
    got.write(tmp_path / "r.csv")
    first, second = csv.DictReader((tmp_path / "r.csv").read_text().splitlines())
    assert float(first["error"]) == pytest.approx(
        float(first["predicted_s"]) / float(first["measured_s"]) - 1, abs=1e-4
    )
    assert (first["skipped"], second["predicted_s"], second["skipped"]) == ("", "", NO_DEVICE)
    with pytest.raises(FieldError, match=r"does not end in \.csv"):
        refuse_output(tmp_path / "r.txt", "--out", "residuals.csv")


@pytest.mark.quick(without=["score_kernels-kernels.parquet-0.09"])
@pytest.mark.shared
@pytest.mark.parametrize(
    ("score", "name", "most"),
    [(scoring.score_kernels, "kernels.parquet", 0.09), (scoring.score_collectives, "collectives.parquet", 0.05)],
)
def test_bulk_measurements(score: object, name: str, most: float) -> None:
    got = score(require_data(name)).score.to_json()  # type: ignore[operator]
    assert got["scored"] + sum(got["skipped"].values()) == got["rows"]
    assert got["scored"] > 0.9 * (got["rows"] - got["skipped"].get(NOT_LAUNCHED, 0))
    assert got["time"]["median_ape"] < most
    assert 0.8 < got["time"]["coverage90"] < 0.97
