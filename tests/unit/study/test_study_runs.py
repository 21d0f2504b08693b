"""Runs of studies: what is computed once is kept, whatever happens to the process, the disk or another run."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
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


def driver(*arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(DRIVER), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """1,000 points, eight SIGKILLs of the process that commits; its workers die with it."""
    path = tmp_path / "killed.toml"
    path.write_text(toml(5, 100))
    found = study.read_study(path)
    assert len(found.points) == 1000
    driver(path, tmp_path / "killed", "random", 7, 8, 0.6)
    study.run(found, tmp_path / "whole", workers=1)
    assert tables(found, tmp_path / "killed") == tables(found, tmp_path / "whole")


@pytest.mark.slow
def test_killed_within_a_commit(small: tuple[Path, Study], whole: Tables, tmp_path: Path) -> None:
    path, found = small
    driver(path, tmp_path / "s", "steps")
    for number, step in enumerate(study_driver.STEPS):
        store = tmp_path / f"s-{number}"
        kept = len(study.results(found, store).have)
        assert kept == (study_driver.AT - 1) * run_module.CHUNK, step
        outcome = study.run(found, store, workers=1)
        assert (outcome.found, outcome.computed) == (kept, 100 - kept), step
        assert tables(found, store) == whole, step


@pytest.mark.slow
def test_runs_at_once_all_end_with_everything(small: tuple[Path, Study], whole: Tables, tmp_path: Path) -> None:
    path, found = small
    computed: list[int] = []
    others = [
        threading.Thread(target=lambda: computed.append(int(driver(path, tmp_path / "s", "run")))) for _ in range(2)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert tables(found, tmp_path / "s") == whole
    assert sum(computed) == 100  # nothing twice


def test_a_run_waits_for_what_another_computes(
    small: tuple[Path, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = small
    shared = store_module.Store(tmp_path / "s")
    ended = threading.Event()

    def later() -> None:
        shared.prepare()
        with shared.claiming() as claims:
            chunks = run_module.chunks_of({point.key: point for point in found.points})
            assert claims.take(chunks[0].name)
            begun.set()
            ended.wait(20)
            shared.commit(solve(list(chunks[0].points.values())))

    begun = threading.Event()
    other = threading.Thread(target=later)
    other.start()
    begun.wait(20)
    monkeypatch.setattr(run_module.time, "sleep", lambda _: ended.set())
    outcome = study.run(found, tmp_path / "s", workers=1)
    other.join()
    assert (outcome.found, outcome.computed) == (run_module.CHUNK, 100 - run_module.CHUNK)


def changed(store: Path, sql: str) -> None:
    with closing(sqlite3.connect(store / store_module.FILE)) as database, database:
        database.execute(sql)


@pytest.mark.quick("5")
@pytest.mark.each("rows", ["substr(rows, 1, 100)", "cast(substr(rows, 1, 200) || 'x' || substr(rows, 202) as blob)", 5])
def test_damaged_rows_are_found_reported_and_computed_again(
    rows: object, small: tuple[Path, Study], whole: Tables, tmp_path: Path
) -> None:
    _, found = small
    study.run(found, tmp_path / "s", workers=1)
    damaged = tuple(sorted(point.key for point in found.points[:2]))
    changed(tmp_path / "s", f"update results set rows = {rows} where point in {damaged}")
    changed(tmp_path / "s", f"delete from results where point = '{found.points[2].key}'")
    partial = study.results(found, tmp_path / "s")
    assert (partial.damaged, partial.missing) == (damaged, 3)
    outcome = study.run(found, tmp_path / "s", workers=1)
    assert (outcome.damaged, outcome.computed) == (damaged, 3)
    assert tables(found, tmp_path / "s") == whole


@pytest.mark.slow
def test_a_damaged_file_is_said_to_be_damaged(small: tuple[Path, Study], whole: Tables, tmp_path: Path) -> None:
    _, found = small
    store = tmp_path / "it's a store?#%20"
    study.run(found, store, workers=1)
    file = store / store_module.FILE
    data = file.read_bytes()
    for wrong in (b"x" * 5000, data[:5000], data[:100] + bytes(8000) + data[8100:]):
        file.write_bytes(wrong)
        for use in (study.run, study.results):
            with pytest.raises(UserError, match="is damaged\n  delete it, and run again"):
                use(found, store)
    file.unlink()
    assert study.run(found, store, workers=1).computed == 100
    assert tables(found, store) == whole


def full_file(_: pytest.MonkeyPatch, size: int) -> None:
    resource = pytest.importorskip("resource")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_disk(patch: pytest.MonkeyPatch, size: int) -> None:
    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database = open_(*arguments, **options)
        database.execute(f"pragma max_page_count = {size // 4096}")
        return database

    open_ = sqlite3.connect
    patch.setattr(store_module.sqlite3, "connect", connect)


@pytest.mark.quick("full_file")
@pytest.mark.each("fill", [full_file, full_disk])
def test_a_full_disk_loses_nothing(
    fill: Any, small: tuple[Path, Study], whole: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    _, found = small
    study.run(found, tmp_path / "whole", workers=1)
    size, limits = (tmp_path / "whole" / store_module.FILE).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            fill(patch, int(0.7 * size))
            with pytest.raises(UserError, match="make room"):
                study.run(found, tmp_path / "s", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = len(study.results(found, tmp_path / "s").have)
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


@pytest.mark.slow
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
    assert not study.results(found, tmp_path / "s").have


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
    changed(tmp_path / "s", "create table notes (text)")
    for use in (study.run, study.results):
        with pytest.raises(UserError, match="is no store of studies"):
            use(found, tmp_path / "s")
    (tmp_path / "s" / "journal-0.jsonl").write_text('{"journal":1,"of":"results of studies","store":1}\n')
    for use in (study.run, study.results):
        with pytest.raises(UserError, match="older steptime\n  give another --store, or delete it, and run again"):
            use(found, tmp_path / "s")
