"""Runs of studies: what is computed once is kept, whatever happens to the process, the disk or another run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import study_driver
from steptime import study
from steptime.errors import UserError
from steptime.study import executors
from steptime.study import running as run_module
from steptime.study import store as store_module
from steptime.study.evaluate import solve
from steptime.study.file import Study

DRIVER = Path(__file__).parents[2] / "study_driver.py"
Tables = dict[str, list[dict[str, Any]]]
TABLES = ("points", "plans", "front", "terms")


def toml(micro_batches: int = 5, batches: int = 10) -> str:
    """A study of cheap points: 2 x (micro_batches) x (batches) single plans."""
    sizes = [2**k for k in range(micro_batches)]
    return f"""
what = "estimate"
[job]
model = "gpt2"
cluster = "dgx-h100"
gpus = [8, 16]
mode = "published"
global_batch = {{ from = 512, to = {512 * batches}, step = 512 }}
[job.plan]
micro_batch = {sizes}
[training]
tokens = "10B"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Study]:
    path = tmp_path_factory.mktemp("study") / "small.toml"
    path.write_text(toml())
    return path, study.read_study(path)


@pytest.fixture(scope="module")
def whole(small: tuple[Path, Study], tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Tables of an uninterrupted run."""
    _, found = small
    store = tmp_path_factory.mktemp("study") / "whole"
    first = study.run(found, store, workers=1)
    assert (first.points, first.computed, first.found) == (100, 100, 0)
    return tables(found, store)


def tables(found: Study, store: Path) -> Tables:
    results = study.results(found, store)
    assert not results.missing and not results.damaged
    return {name: results.rows(name) for name in TABLES}


def driver(*arguments: object) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(DRIVER), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False, timeout=120).returncode


def test_a_second_run_computes_nothing_and_another_study_shares_points(
    small: tuple[Path, Study], tmp_path: Path
) -> None:
    _, found = small
    first = study.run(found, tmp_path / "s", workers=1)
    assert (first.points, first.computed, first.found) == (100, 100, 0)
    again = study.run(found, tmp_path / "s", workers=1)
    assert (again.computed, again.found) == (0, 100)
    wider = study.study_of(
        {
            "what": "estimate",
            "job": {
                "model": "gpt2", "cluster": "dgx-h100", "gpus": [8, 16, 32], "mode": "published",
                "global_batch": {"from": 512, "to": 5120, "step": 512},
                "plan": {"micro_batch": [1, 2, 4, 8, 16]},
            },
        }
    )  # fmt: skip
    more = study.run(wider, tmp_path / "s", workers=1)
    assert (more.points, more.computed, more.found) == (150, 50, 100)
    assert len(study.results(wider, tmp_path / "s").rows()) == 150


def test_rows_are_those_of_an_estimate(tmp_path: Path) -> None:
    from steptime import api

    job = {"model": "gpt2", "cluster": "dgx-h100", "gpus": [8, 16], "global_batch": 512, "plan": {"micro_batch": 4}}
    found = study.study_of({"what": "estimate", "job": job, "training": {"tokens": "10B"}})
    study.run(found, tmp_path / "s", workers=1)
    row = study.results(found, tmp_path / "s").query("select * from plans where gpus = 16")[0]
    e = api.estimate(
        "gpt2", "dgx-h100", gpus=16, global_batch=row["global_batch"], plan={"micro_batch": 4},
        training={"tokens": "10B"},
    )  # fmt: skip
    assert row["step_time_s"] == e.step_time_s and row["peak_memory_bytes"] == e.peak_memory_bytes
    assert row["training_days"] == e.training["training_days"] and row["gpu_hours"] == e.training["gpu_hours"]
    assert [row["training_band_low_days"], row["training_band_high_days"]] == e.training["training_band_days"]


def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """1,000 points, eight SIGKILLs of the process that commits; its workers die with it."""
    path = tmp_path / "killed.toml"
    path.write_text(toml(5, 100))
    found = study.read_study(path)
    assert len(found.points) == 1000
    assert driver(path, tmp_path / "killed", "random", 7, 8, 0.6) == 0
    study.run(found, tmp_path / "whole", workers=1)
    assert tables(found, tmp_path / "killed") == tables(found, tmp_path / "whole")


def test_killed_within_a_commit(small: tuple[Path, Study], whole: Tables, tmp_path: Path) -> None:
    path, found = small
    assert driver(path, tmp_path / "s", "steps") == 0
    for number, step in enumerate(study_driver.STEPS):
        store = tmp_path / f"s-{number}"
        kept = len(study.results(found, store).at)
        assert kept == (study_driver.AT - 1) * run_module.CHUNK, step
        outcome = study.run(found, store, workers=1)
        assert (outcome.found, outcome.computed) == (kept, 100 - kept), step
        assert tables(found, store) == whole, step


def test_runs_at_once_all_end_with_everything(small: tuple[Path, Study], whole: Tables, tmp_path: Path) -> None:
    path, found = small
    others = [threading.Thread(target=driver, args=(path, tmp_path / "s", "run")) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert tables(found, tmp_path / "s") == whole
    lines = sum(len(p.read_text().splitlines()) - 1 for p in (tmp_path / "s").glob("journal-*.jsonl"))
    assert lines == len(list((tmp_path / "s" / "blocks").iterdir())) == -(-100 // run_module.CHUNK)  # nothing twice


def test_a_run_waits_for_what_another_computes(
    small: tuple[Path, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = small
    shared = store_module.Store(tmp_path / "s")
    ended = threading.Event()

    def later() -> None:
        with shared.writing() as writer, writer.claiming() as claims:
            chunks = run_module.chunks_of({point.key: point for point in found.points})
            assert claims.take(chunks[0].name)
            begun.set()
            ended.wait(20)
            writer.commit(solve(list(chunks[0].points.values())), list(chunks[0].points))

    begun = threading.Event()
    other = threading.Thread(target=later)
    other.start()
    begun.wait(20)
    monkeypatch.setattr(run_module.time, "sleep", lambda _: ended.set())
    outcome = study.run(found, tmp_path / "s", workers=1)
    other.join()
    assert (outcome.found, outcome.computed) == (run_module.CHUNK, 100 - run_module.CHUNK)


@pytest.mark.each("damage", ["cut", "flipped", "gone"])
def test_a_damaged_block_is_found_reported_and_computed_again(
    damage: str, small: tuple[Path, Study], whole: Tables, tmp_path: Path
) -> None:
    _, found = small
    study.run(found, tmp_path / "s", workers=1)
    block = sorted((tmp_path / "s" / "blocks").iterdir())[0]
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 1
    {"cut": lambda: block.write_bytes(data[:100]), "flipped": lambda: block.write_bytes(data), "gone": block.unlink}[
        damage
    ]()
    partial = study.results(found, tmp_path / "s")
    assert partial.damaged == (block.stem,) and 0 < partial.missing <= run_module.CHUNK
    outcome = study.run(found, tmp_path / "s", workers=1)
    assert outcome.damaged == (block.stem,) and outcome.computed == partial.missing
    assert tables(found, tmp_path / "s") == whole


def test_a_damaged_block_whose_points_others_have_is_no_matter(small: tuple[Path, Study], tmp_path: Path) -> None:
    _, found = small
    points = found.points[:4]
    rows, keys = solve(points), [point.key for point in points]
    store = store_module.Store(tmp_path / "it's a store")
    with store.writing() as writer:
        first, second = writer.commit(rows, keys), writer.commit(rows[::-1], keys)
    store.path(first.checksum).write_bytes(b"damaged")
    results = study.results(found, store.folder)
    assert set(results.at.values()) == {second.checksum} and results.damaged == ()
    assert len(results.rows()) == 4
    store.path(second.checksum).unlink()
    assert set(study.results(found, store.folder).damaged) == {first.checksum, second.checksum}


@pytest.mark.each("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_nothing(
    number: int, small: tuple[Path, Study], whole: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = small
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 8:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="make room"):
            study.run(found, tmp_path / "s", workers=1)
    assert not list((tmp_path / "s" / "blocks").glob(".*"))  # no temporary file is left
    kept = len(study.results(found, tmp_path / "s").at)
    assert 0 < kept < 100
    assert study.run(found, tmp_path / "s", workers=1).found == kept
    assert tables(found, tmp_path / "s") == whole


def _dies_once(points: Any) -> Any:
    """As :func:`solve`, in a worker that is killed the first time."""
    flag = Path(os.environ["STUDY_FLAG"])
    if not flag.exists():
        flag.touch()
        os._exit(9)
    return solve(points)


def _dies(points: Any) -> Any:
    os._exit(9)


def test_a_lost_worker_loses_nothing(
    small: tuple[Path, Study], whole: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = small
    monkeypatch.setenv("STUDY_FLAG", str(tmp_path / "flag"))
    monkeypatch.setattr(executors, "solve", _dies_once)
    outcome = study.run(found, tmp_path / "s", workers=2)
    assert outcome.lost_workers == 1 and outcome.computed == 100
    assert tables(found, tmp_path / "s") == whole
    monkeypatch.setattr(executors, "solve", _dies)
    with pytest.raises(UserError, match="workers died"):
        study.run(found, tmp_path / "never", workers=2)


def test_a_worker_of_another_version_is_refused(
    small: tuple[Path, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = small
    other = [{"point": "x", "kind": "point"}]
    monkeypatch.setattr(executors, "solve", lambda points: other)
    with pytest.raises(UserError, match="another steptime"):
        study.run(found, tmp_path / "s", workers=1)
    assert not study.results(found, tmp_path / "s").at


def test_other_code_or_hardware_is_another_point(small: tuple[Path, Study], monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from steptime.study import points

    _, found = small
    point = found.points[0]
    keys = {point.key, replace(point, hardware={"memory": {"factor": 2.0}}).key}
    keys.add(replace(point, options={**point.options, "gpus": 24}).key)
    keys.add(replace(point, options={**point.options, "model": "gpt2-medium"}).key)
    monkeypatch.setattr(points, "code_version", lambda: "other")
    keys.add(point.key)
    assert len(keys) == 5


def test_a_folder_that_is_no_store(tmp_path: Path, small: tuple[Path, Study]) -> None:
    _, found = small
    with pytest.raises(UserError, match="there is no store"):
        study.results(found, tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="folder"):
        study.run(found, tmp_path / "file")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "journal-0.jsonl").write_text('{"journal":1,"of":"something else"}\n')
    with pytest.raises(UserError, match="another measurement"):
        study.run(found, tmp_path / "s")
