"""Commands as processes: what becomes of them when nobody reads what they print, and of files that are no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from fake_api import Run

from steptime.cli.main import EXIT_PIPE, EXIT_USER

STEPTIME: Final = (sys.executable, "-m", "steptime")
JOB: Final = ("gpt2", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8")
RUNS: Final = (
    "model,gpu,n_gpus,dtype,global_batch_sequences,seq_len,metric_step_time_s\ngpt2,h100-sxm,8,bf16,64,1024,0.2\n"
)
COMMANDS: Final = {
    "plan": ("plan", *JOB), "limits": ("limits", "--device", "h100-sxm"), "score": ("score", "runs.csv"),
    "diff": ("diff", "a.json", "a.json"), "devices": ("devices",), "estimate": ("estimate", *JOB),
    "json": ("estimate", *JOB, "--json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    (path / "runs.csv").write_text(RUNS, encoding="utf-8")
    with (path / "a.json").open("wb") as file:
        subprocess.run([*STEPTIME, "estimate", *JOB, "--json"], stdout=file, check=True)
    return path


def steptime(folder: Path, *args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """The command in the folder, stopped where it hangs."""
    given = {"stdout": subprocess.PIPE} | how
    return subprocess.run([*STEPTIME, *args], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
                          **given)  # fmt: skip


@pytest.mark.quick("devices", "json", "plan")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_went_away_is_no_defect(folder: Path, name: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = steptime(folder, *COMMANDS[name], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (EXIT_PIPE, "")


@pytest.mark.quick("devices", "json", "plan")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_output_is_an_error(folder: Path, name: str) -> None:
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *STEPTIME, *COMMANDS[name]]
    done = subprocess.run(closed, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_USER
    assert done.stderr == "Error: the output cannot be written: standard output is closed\n"


def test_errors_do_not_turn_up_in_the_output_where_nobody_reads_them(folder: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *STEPTIME, "devices", "h1oo"]
    done = subprocess.run(closed, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (EXIT_USER, "")


PIPES: Final = (
    ("estimate", "pipe.toml"), ("diff", "pipe.json", "a.json"), ("estimate", *JOB, "--plan", "pipe.json"),
    ("estimate", "gpt2", "--cluster", "pipe.toml", "--gpus", "8", "--global-batch", "8"), ("score", "pipe.csv"),
    ("score", "--kernels", "pipe.parquet"), ("models", "pipe.json"), ("doctor", "pipe.log"),
    ("profile", "pipe.onnx", "--device", "h100-sxm"), ("calibrate", "mesh", "pipe.csv"),
    ("calibrate", "frameworks", "pipe.csv"),
)  # fmt: skip


@pytest.fixture
def patience() -> Iterator[None]:
    """A test that waits for a minute fails."""

    def fail(*_: object) -> None:
        raise TimeoutError("the command waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.each("args", PIPES, ids=" ".join)
def test_a_named_pipe_that_nobody_writes_is_refused(
    run: Run, patience: None, folder: Path, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(arg for arg in args if arg.startswith("pipe."))
    if not (folder / name).exists():
        os.mkfifo(folder / name)
    monkeypatch.chdir(folder)
    done = run(*args)
    assert done.exit_code == EXIT_USER
    assert done.stderr.startswith(f"Error: {name}: is no")


def test_what_the_shell_opened_is_read(folder: Path) -> None:
    """A process substitution: the descriptor of a pipe that somebody writes."""
    read, write = os.pipe()
    os.write(write, b'model = "gpt2"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 8\n')
    os.close(write)
    done = steptime(folder, "diff", "a.json", f"/dev/fd/{read}", pass_fds=(read,))
    os.close(read)
    assert done.returncode == 0, done.stderr
    assert "job and plan are equal" in done.stdout
