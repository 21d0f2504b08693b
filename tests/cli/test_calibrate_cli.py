from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from fake_api import Run

from steptime.cli.main import EXIT_INTERRUPTED, EXIT_USER
from steptime.errors import InputFileError
from steptime.hardware import Kind, load_cluster, load_device
from steptime.hardware.profiles import read_profile, save_curves
from steptime.store.files import one_writer
from steptime.store.journal import Journal
from steptime_lab.cli import calibrate_fit


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
        "import sys\nfrom steptime.cli.main import main\n"
        "main(['calibrate', '--help'])\n"
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
    assert (done.exit_code, "1 device and 0 fabrics fitted" in done.stderr) == (EXIT_INTERRUPTED, True)
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["a100-sxm-80gb.toml"]


def test_a_fit_that_cannot_write_names_what_it_kept(
    run: Run, softmaxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(device: str, curves: Any, folder: Path) -> Path:
        if device == "h100-sxm":
            raise InputFileError("h100-sxm.toml", "cannot be written: No space left on device")
        return save_curves(device, curves, folder)

    monkeypatch.setattr("steptime.hardware.profiles.save_curves", save)
    done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(tmp_path / "p"))
    assert (done.exit_code, "1 device and 0 fabrics fitted" in done.stderr) == (EXIT_USER, True), done.stderr
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["a100-sxm-80gb.toml"]


def test_a_damaged_profile_is_refused_before_the_work(
    run: Run, softmaxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_fit, "_alone", lambda cell: pytest.fail("it fits"))
    (tmp_path / "h100-sxm.toml").write_text("garbage")
    done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(tmp_path))
    assert (done.exit_code, "h100-sxm.toml: is not valid TOML" in done.stderr) == (EXIT_USER, True), done.stderr


def test_two_fits_do_not_write_to_one_folder_at_once(run: Run, softmaxes: Path, tmp_path: Path) -> None:
    """The curves of the one that ended last replaced those of the other, and both said that theirs were written."""
    out = tmp_path / "p"
    out.mkdir()
    with one_writer(out):
        done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(out))
    assert (done.exit_code, list(out.iterdir())) == (EXIT_USER, []), done.stderr
    assert "is being written by another process" in done.stderr and "another folder" in done.stderr
    assert run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(out)).exit_code == 0


def test_a_calibration_that_runs_is_no_leftover(run: Run, tmp_path: Path) -> None:
    """The advice was to delete the journal, or to resume it."""
    with Journal(tmp_path / "m.journal.jsonl", {}) as journal:
        journal.append({"key": "x", "of": "operator"})
        for more in ((), ("--resume",)):
            done = run("calibrate", "machine", "--device", "cpu", "--quick", "--out", str(tmp_path / "m.toml"), *more)
            assert (done.exit_code, "is being written by another process" in done.stderr) == (EXIT_USER, True)
            assert "delete" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to fit"),
        (("--kernels", "none.csv"), "the file does not exist"),
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
    monkeypatch.setitem(sys.modules, "scipy", None)
    done = run("calibrate", "fit", "--kernels", str(softmaxes))
    assert (done.exit_code, "steptime[calibrate]" in done.stderr) == (EXIT_USER, True)


@pytest.mark.each(
    ("arguments", "message"),
    [
        (("--compare-to", "h1oo-sxm"), "did you mean h100-sxm"),
        (("--compare-to", "rtx-2080"), "there is no published profile"),
        (("--compare-to", "../h100-sxm.toml"), "there is no published profile"),
        (("--compare-to", "h100", "--out", "none/m.toml"), "cannot be written"),
        (("--device", "tpu"), "'tpu' is not one of"),
        (("--processes", "0"), "is not a whole number from 1"),
        (("--threads", "many"), "is not a whole number from 1"),
        (("--out", "m.json"), "does not end in .toml"),
        (("--table", "none/t.csv"), "none/t.csv: cannot be written"),
        (("--table", "t.txt"), "t.txt is not a table"),
        (("--plot", "none/p.png"), "none/p.png: cannot be written"),
        (("--plot", "p.doc"), "matplotlib cannot write such a file"),
    ],
)
def test_machine_refuses_before_it_measures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steptime.measure.machine.session._measure", lambda *_: pytest.fail("it measures"))
    done = run("calibrate", "machine", *arguments)
    assert (done.exit_code, done.stdout) == (EXIT_USER, ""), done.stderr
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 2])
def test_an_interrupted_calibration_names_only_what_it_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    def stopped(request: Any, torch: Any, host: Any, mesh: Any, journal: Any, progress: Any) -> None:
        for n in range(kept):
            journal.append({"key": f"x/{n}", "of": "operator"})
        raise KeyboardInterrupt

    monkeypatch.setattr("steptime.measure.machine.session._measure", stopped)
    done = run("calibrate", "machine", "--device", "cpu", "--out", str(tmp_path / "m.toml"))
    assert done.exit_code == EXIT_INTERRUPTED
    assert ("m.journal.jsonl; --resume goes on" in done.stderr) == bool(kept)
    assert ("Nothing was measured." in done.stderr) == (not kept)


def test_a_fabric_folder_that_cannot_be_made_is_refused_before_the_work(
    run: Run, softmaxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_fit, "_fit_kernels", lambda *_: pytest.fail("it fits"))
    rows = tmp_path / "c.csv"
    rows.write_text("gpu,collective,n_gpus,gpus_per_node,bytes,latency_us\nh100,all_reduce,8,8,1024,20\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/fabrics").write_text("")
    done = run(
        "calibrate", "fit", "--kernels", str(softmaxes), "--collectives", str(rows), "--out", str(tmp_path / "out")
    )
    assert (done.exit_code, "cannot be made a folder" in done.stderr) == (EXIT_USER, True), done.stderr


def test_a_table_of_residuals_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.residuals.csv").mkdir()
    done = run("calibrate", "machine", "--compare-to", "h100", "--out", str(tmp_path / "m.toml"))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "") and "m.residuals.csv" in done.stderr
    assert len(list(tmp_path.iterdir())) == 1


def links(path: Path, rows: Iterable[str]) -> str:
    path.write_text("\n".join(["source,target,bytes,seconds", *rows]) + "\n")
    return str(path)


def pairs(devices: Iterable[int], slow: float = 4.0) -> list[str]:
    """Nodes of four devices; every ordered pair, a small and a large message."""
    out = []
    for a, b in permutations(devices, 2):
        factor = 1.0 if a // 4 == b // 4 else slow
        noise = 1 + 0.05 * ((7 * a + 3 * b) % 5 - 2)
        out += [f"gpu{a},gpu{b},{size},{factor * noise * (2e-6 + size / 1e11):.9g}" for size in (8, 2**24)]
    return out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["gpu0,gpu1,8,2e-6", "gpu0,gpu1,8,2e-6"], "line 3: 'gpu0' to 'gpu1' stands in line 2 already"),
        (["gpu0,gpu1,8,0"], "line 2, column 'seconds': 0 is not positive"),
        (["gpu0,gpu1,8,-2e-6"], "line 2, column 'seconds': -2e-6 is not positive"),
        (["gpu0,gpu1,8,2.5"], "8 bytes in 2.5 s is no link"),
        (["gpu0,gpu1,8 parsec,2e-6"], "line 2, column 'bytes'"),
        ([], "no measured link between two devices"),
        (["gpu0,gpu1,8,2e-6", "gpu2,gpu3,8,2e-6"], "no measured link joins 'gpu2'"),
    ],
)
def test_mesh_refuses(run: Run, tmp_path: Path, rows: list[str], message: str) -> None:
    done = run("calibrate", "mesh", links(tmp_path / "l.csv", rows))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


def test_a_mesh_becomes_a_cluster_of_other_commands(run: Run, tmp_path: Path) -> None:
    """Round trip: sizes, bandwidths and latencies of the axes come back as levels, and an estimate takes the file."""
    csv, out = links(tmp_path / "l.csv", pairs(range(16))), tmp_path / "c.toml"
    options = ("--out", str(out), "--device", "h100-sxm")
    done = run("calibrate", "mesh", csv, *options)
    assert done.exit_code == 0, done.stderr
    assert f"--cluster {out}" in " ".join(done.stdout.split())
    cluster = load_cluster(out)
    assert cluster.device == load_device("h100-sxm")
    axes = json.loads(run("calibrate", "mesh", csv, *options, "--json").stdout)["mesh"]["axes"]
    assert [level.devices for level in cluster.levels] == [4, 16]
    assert [level.rank_Bps for level in cluster.levels] == pytest.approx([axis["Bps"] for axis in axes], rel=1e-5)
    assert [level.latency_s for level in cluster.levels] == pytest.approx([a["latency_s"] for a in axes], rel=1e-5)
    assert cluster.levels[0].rank_Bps == pytest.approx(1e11, rel=0.1)
    assert {cluster.levels[1].sources[name].kind for name in ("link_Bps", "latency_s")} == {Kind.MEASURED}
    estimated = run("estimate", "gpt2", "--cluster", str(out), "--gpus", "16", "--global-batch", "16", "--json")
    assert estimated.exit_code == 0, estimated.stderr
    assert json.loads(estimated.stdout)["provenance"]["cluster"] == "c"


def test_the_cluster_file_of_a_mesh_finds_its_device_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    Path("chip.toml").write_text('base = "h100-sxm"\nmemory = "1 TB"\n')
    done = run("calibrate", "mesh", links(tmp_path / "l.csv", pairs(range(8))), "--out", "out/c.toml",
               "--device", "chip.toml")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert load_cluster("out/c.toml").device.memory_bytes == 1e12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "c.toml"), "--device: missing"),
        (("--device", "h100-sxm"), "--out: missing"),
        (("--out", "c.toml", "--device", "h1oo-sxm"), "did you mean h100-sxm"),
        (("--out", "c", "--device", "h100-sxm"), "for example c.toml"),
        (("--out", "mine.toml", "--device", "h100-sxm"), "not written by a calibration"),
        (("--out", "none/c.toml", "--device", "h100-sxm"), "cannot be written"),
    ],
)
def test_mesh_writes_nothing_when(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("# my own\n")
    done = run("calibrate", "mesh", links(tmp_path / "l.csv", pairs(range(8))), *options)
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in " ".join(done.stderr.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.csv", "mine.toml"]


def test_a_mesh_without_bandwidths_makes_no_cluster(run: Run, tmp_path: Path) -> None:
    small = [row for row in pairs(range(8)) if ",8," in row]
    done = run("calibrate", "mesh", links(tmp_path / "l.csv", small), "--out", str(tmp_path / "c.toml"),
               "--device", "h100-sxm")  # fmt: skip
    assert done.exit_code == EXIT_USER and "the bandwidth of axis 0 is unknown" in " ".join(done.stderr.split())
    assert not (tmp_path / "c.toml").exists()


def test_mesh_names_a_file_that_is_not_there(run: Run) -> None:
    done = run("calibrate", "mesh", "none.csv")
    assert (done.exit_code, done.stdout, "the file does not exist" in done.stderr) == (EXIT_USER, "", True)


def test_mesh_of_a_job_in_which_a_rank_died(run: Run, tmp_path: Path) -> None:
    """Half-way: the rest is enough. At once: the hole in the numbers is told, and no confidence claimed."""
    whole = pairs(range(16))
    sent = [row for row in whole if not row.startswith("gpu5,")]
    done = run("calibrate", "mesh", links(tmp_path / "l.csv", sent), "--json")
    assert json.loads(done.stdout)["shape"] == [4, 4]
    gone = [row for row in whole if "gpu5," not in row]
    found = json.loads(run("calibrate", "mesh", links(tmp_path / "l.csv", gone), "--json").stdout)["mesh"]
    assert len(found["devices"]) == 15 and found["confidence"] <= 0.5
    assert any("skip gpu5" in note for note in found["notes"])
    early = run("calibrate", "mesh", links(tmp_path / "l.csv", whole[: len(whole) // 3]), "--json")
    found = json.loads(early.stdout)["mesh"]
    assert found["confidence"] <= 0.5 and any("were not measured" in note for note in found["notes"])


def test_score_prints_json_and_a_report(run: Run, softmaxes: Path, tmp_path: Path) -> None:
    residuals = tmp_path / "r.csv"
    done = run("score", "--kernels", str(softmaxes), "--json", "--out", str(residuals))
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["rows"], document["memory"]) == (1, 32, None)
    assert set(document) >= {"scored", "skipped", "time", "by_source", "by_gpu", "by_op"}
    assert len(residuals.read_text().splitlines()) == 33
    text = run("score", "--kernels", str(softmaxes)).stdout
    assert "32 of 32 rows scored" in text and "By operator" in text


@pytest.mark.each(
    ("arguments", "message"),
    [
        ((), "score needs one table"),
        (("--kernels", "K", "--collectives", "K"), "score needs one table"),
        (("--kernels", "K", "--out", "r.txt"), "does not end in .csv"),
        (("--collectives", "K"), "lacks the column 'collective'"),
        (("--kernels", "none.csv"), "the file does not exist"),
        (("--kernels", "empty.csv"), "empty.csv: is empty"),
        (("--kernels", "empty.csv.gz"), "empty.csv.gz: is empty"),
        (("--collectives", "empty.csv"), "empty.csv: is empty"),
    ],
)
def test_score_refuses(
    run: Run, softmaxes: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(softmaxes.parent)
    Path("empty.csv").write_text("\n")
    Path("empty.csv.gz").write_bytes(gzip.compress(b""))
    done = run("score", *(str(softmaxes) if a == "K" else a for a in arguments))
    assert (done.exit_code, done.stdout) == (EXIT_USER, "")
    assert message in done.stderr


@pytest.mark.parametrize("gpu", ["A100/80GB", "../mine.toml"])
def test_a_table_cannot_name_files(run: Run, softmaxes: Path, tmp_path: Path, gpu: str) -> None:
    """A spelling that looks like a path is a GPU that is not known: its rows are left out, the others fitted."""
    head, *rows = softmaxes.read_text().splitlines()
    strange = [row.replace(",a100,", f",{gpu},") for row in rows]
    products = [f"mine,{gpu},gemm,bf16,,,90,cuda_graph_mean"]
    softmaxes.write_text("\n".join([head, *strange, *products]) + "\n")
    out = tmp_path / "profiles"
    done = run("calibrate", "fit", "--kernels", str(softmaxes), "--out", str(out), "--json")
    assert done.exit_code == 0, done.stderr
    assert list(json.loads(done.stdout)["profiles"]) == ["h100-sxm"]
