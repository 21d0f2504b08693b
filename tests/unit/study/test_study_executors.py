"""The engines that compute blocks: each gives the rows that this process gives, and survives lost workers.

Ray takes a dozen seconds to start; ``scripts/study_engines`` runs more of it, and Dask and MPI, for longer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from steptime import study
from steptime.errors import UserError
from steptime.study import executors
from steptime.study.executors import engine_of
from steptime.study.file import Study

JOB = {
    "model": "gpt2", "cluster": "dgx-h100", "gpus": [8, 16, 32, 64], "mode": "published",
    "global_batch": {"from": 64, "to": 64 * 48, "step": 64}, "strategy": "1d",
}  # fmt: skip
TABLES = ("points", "plans", "front", "terms")


@pytest.fixture(scope="module")
def found() -> Study:
    return study.study_of({"job": JOB, "keep": {"top": 2}})


@pytest.fixture(scope="module")
def rows(found: Study, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    store = tmp_path_factory.mktemp("here")
    assert study.run(found, store, workers=1).computed == 192
    return tables(found, store)


def tables(found: Study, store: Path) -> list[Any]:
    results = study.results(found, store)
    assert not results.missing
    return [results.rows(name) for name in TABLES]


@pytest.mark.slow
def test_local_processes(found: Study, rows: list[Any], tmp_path: Path) -> None:
    study.run(found, tmp_path, workers=2)
    assert tables(found, tmp_path) == rows


def slow(points: Any) -> list[Any]:
    """In place of the work of a block."""
    time.sleep(15)
    return []


def test_an_interrupt_does_not_wait_for_the_work_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "solve", slow)
    with pytest.raises(KeyboardInterrupt), engine_of("local", 2) as engine:
        under_way = engine.submit([])
        while not under_way.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(under_way.exception(), engine.lost)


def kill_a_worker(of: str, done: threading.Event) -> threading.Thread:
    """Kills the first process below this one whose command line has a word, once it is there."""

    def below(parent: int) -> list[int]:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        own = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        return own + [pid for child in own for pid in below(child)]

    def watch() -> None:
        while not done.is_set():
            for pid in below(os.getpid()):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if of in command:
                    os.kill(pid, signal.SIGKILL)
                    done.set()
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")
def test_ray_gives_the_same_rows_also_when_a_worker_is_killed(found: Study, rows: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    code = f"""
import sys, threading
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import test_study_executors as here
from steptime import study
found = study.study_of({{"job": here.JOB, "keep": {{"top": 2}}}})
done = threading.Event()
thread = here.kill_a_worker("ray::solve", done)
outcome = study.run(found, {str(tmp_path)!r}, executor="ray", workers=2)
killed = done.is_set()
done.set()
thread.join()
print(outcome.computed, killed)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200, env=environment
    )
    assert done.stdout.split()[-2:] == ["192", "True"], done.stderr[-3000:]
    assert tables(found, tmp_path) == rows


@pytest.mark.slow
def test_dask_gives_the_same_rows(found: Study, rows: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed")
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
if __name__ == "__main__":
    import test_study_executors as here
    from steptime import study
    found = study.study_of({{"job": here.JOB, "keep": {{"top": 2}}}})
    print(study.run(found, {str(tmp_path)!r}, executor="dask", workers=2).computed)
"""
    script = tmp_path.parent / "dask_run.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=200, env=environment
    )
    assert done.stdout.split()[-1:] == ["192"], done.stderr[-3000:]
    assert tables(found, tmp_path) == rows


def mpiexec() -> Path | None:
    path = Path(sys.executable).parent / "mpiexec"
    return path if path.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec next to this Python")
def test_mpi_gives_the_same_rows(found: Study, rows: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    file = tmp_path / "a.toml"
    job = "\n".join(f"{name} = {_toml(value)}" for name, value in JOB.items())
    file.write_text(f"[job]\n{job}\n[keep]\ntop = 2\n")
    command = [str(mpiexec()), "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "steptime", "study", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*command, str(file), "--store", str(tmp_path / "s"), "--executor", "mpi", "--workers", "2"],
        capture_output=True, text=True, check=False, timeout=200, env=environment,
    )  # fmt: skip
    assert "192 computed" in done.stdout, done.stderr[-3000:]
    assert tables(found, tmp_path / "s") == rows


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    return str(value) if isinstance(value, (int, list)) else f'"{value}"'


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "distributed", "mpi4py.futures"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("ray", "dask", "mpi"):
        with pytest.raises(UserError, match=rf"pip install 'steptime\[{name}\]'"):
            engine_of(name, 1)
    with pytest.raises(UserError, match="there is no executor"):
        engine_of("slurm", 1)
    for workers in (0, -1, 10**9, True):
        with pytest.raises(UserError, match="workers"):
            engine_of("local", workers)


def test_a_defect_in_a_worker_is_not_swallowed(found: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(points: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(executors, "solve", broken)
    with pytest.raises(ZeroDivisionError):
        study.run(found, tmp_path, workers=1)
