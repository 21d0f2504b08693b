from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_api import Run

from steptime.hardware.profiles import read_profile
from steptime.surface.cli import calibrate_fit
from steptime.surface.cli.main import EXIT_INTERRUPTED, EXIT_USER


@pytest.fixture
def softmaxes(tmp_path: Path) -> Path:
    """Times that follow a launch and a bandwidth exactly."""
    lines = ["source,gpu,op,dtype,rows,cols,latency_us,method"]
    for gpu in ("h100", "a100"):
        for rows in (64, 512, 4096, 32768):
            for columns in (256, 512, 1024, 2048):
                lines.append(
                    f"mine,{gpu},softmax,bf16,{rows},{columns},{3 + rows * columns * 4 / 1.5e6},cuda_graph_mean"
                )
    path = tmp_path / "kernels.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_group_lists_and_loads_its_commands(run: Run) -> None:
    text = run("calibrate", "--help").stdout
    assert "machine" in text and "fit" in text
    assert run("calibrate", "fit", "--help").exit_code == run("calibrate", "machine", "--help").exit_code == 0
    wrong = run("calibrate", "fitt")
    assert (wrong.exit_code, "did you mean fit?" in wrong.stderr) == (EXIT_USER, True)


def test_help_of_the_group_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom steptime.surface.cli.main import app\n"
        "try: app(['calibrate', '--help'], prog_name='steptime')\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'scipy', 'duckdb', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_fit_writes_profiles(run: Run, softmaxes: Path, tmp_path: Path) -> None:
    out = tmp_path / "profiles"
    done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(out), "--only", "softmax", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and sorted(document["profiles"]) == ["a100-sxm-80gb", "h100-sxm"]
    (curve,) = read_profile(out / "h100-sxm.toml").curves
    assert (curve.family, curve.source, curve.points) == ("softmax", "mine", 16)
    assert curve.median_ape < 0.05


def test_an_interrupted_fit_keeps_what_is_done(
    run: Run, softmaxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = calibrate_fit._alone

    def stop(cell: Any) -> Any:
        if cell.device.name == "h100-sxm":
            raise KeyboardInterrupt
        return alone(cell)

    monkeypatch.setattr(calibrate_fit, "_alone", stop)
    done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(tmp_path / "p"))
    assert (done.exit_code, "1 devices" in done.stderr) == (EXIT_INTERRUPTED, True)
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["a100-sxm-80gb.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to fit"),
        (("--kernels", "none.csv"), "does not exist"),
        (("--kernels", "K", "--only", "softmacks"), "did you mean softmax"),
        (("--kernels", "K", "--only", "gemm"), "no curve could be fitted"),
        (("--kernels", "K", "--out", "K"), "cannot be made a folder"),
    ],
)
def test_fit_refuses(
    run: Run, softmaxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("calibrate", "fit", *(str(softmaxes) if a == "K" else a for a in arguments))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr


def test_fit_names_the_extra(run: Run, softmaxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_fit, "find_spec", lambda name: None)
    done = run("calibrate", "fit", "--kernels", str(softmaxes))
    assert (done.exit_code, "steptime[calibrate]" in done.stderr) == (EXIT_USER, True)


def test_score_prints_json_and_a_report(run: Run, softmaxes: Path, tmp_path: Path) -> None:
    residuals = tmp_path / "r.csv"
    done = run("score", "--kernels", str(softmaxes), "--json", "--out", str(residuals))
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["rows"], document["memory"]) == (1, 32, None)
    assert set(document) >= {"scored", "skipped", "time", "by_source", "by_gpu", "by_op"}
    assert len(residuals.read_text().splitlines()) == 33
    text = run("score", "--kernels", str(softmaxes)).stdout
    assert "32 of 32 rows scored" in text and "By operator" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs.csv",), "not available in this version"),
        ((), "score needs one table"),
        (("--kernels", "K", "--collectives", "K"), "score needs one table"),
        (("--kernels", "K", "--out", "r.txt"), "does not end in .csv"),
        (("--collectives", "K"), "lacks the column 'collective'"),
        (("--kernels", "none.csv"), "does not exist"),
    ],
)
def test_score_refuses(run: Run, softmaxes: Path, arguments: Any, message: str) -> None:
    done = run("score", *(str(softmaxes) if a == "K" else a for a in arguments))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr
