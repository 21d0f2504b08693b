"""Regressions find known coefficients; a calibration survives what happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.cost.regression import SENT
from steptime.errors import InputFileError, UserError
from steptime.estimate.measured import CPU, OWN
from steptime.hardware import device_within, load_cluster
from steptime.measure.cli.machine import Device, machine
from steptime.measure.machine import cluster_file, collectives, profile, ranks, runner, session, torch_ops, work
from steptime.measure.machine.collectives import Mesh, RankDiedError, Timed
from steptime.measure.machine.linear import MODELS, cross_validated_s, nonnegative
from steptime.measure.machine.runner import Host, Measured, Settings
from steptime.measure.machine.torch_ops import CpuTimer, summary
from steptime.measure.machine.work import Task
from steptime.measure.residuals import errors_of
from steptime.registry import needed
from steptime.store.journal import Journal, read_journal

HOST = Host(
    host="h", processor='A "quoted" CPU\x7f', cores=2, memory_bytes=16e9, cache_bytes=32e6, device="cpu", gpus=0,
    torch="2.13.0", threads=1,
)  # fmt: skip
DTYPES = ("fp32", "bf16")
TODO = work.tasks(work.extent_of("cpu", True, 16e9), DTYPES, DTYPES)
#: What a profile needs at least, and one operator more.
FEW = [task for task in TODO if task.kind in ("matmul", "copy", "softmax") and task.dtype == "fp32"]


def seconds_of(task: Task) -> float:
    """A made-up machine: 100 GFLOP/s, 40 GB/s, 2 us, fast vector units; half the rate at m = 20."""
    done = work.work_of(task)
    penalty = 1 + 20 / task.shape["m"] if task.kind == "matmul" else 1.0
    return 2e-6 + done.matrix_flops * penalty / 1e11 + done.vector_flops / 1e12 + done.moved_bytes / 4e10


KINDS = {"matmul", "attention_forward", "attention_backward", *OWN, *work.MAPS}


def measured(tasks: list[Task], noise: float = 0.0) -> list[Measured]:
    draw = np.random.default_rng(1)
    return [
        Measured(task=t, seconds=seconds_of(t) * (1 + noise * draw.standard_normal()), noise=0.01, visits=3, rejected=0)
        for t in [*work.launches(), *tasks]
    ]


def timed(mesh: Mesh) -> list[Timed]:
    """Rings at 1 GB/s with 100 us per hop."""
    out = []
    for axis, n in mesh.groups():
        for kind in collectives.KINDS:
            for size in collectives.sizes_bytes("cpu", True):
                hops = profile.HOPS.get(kind, 1.0) * (n - 1)
                s = 1e-4 * hops + size * SENT[kind](n) / 1e9
                out.append(Timed(kind=kind, axis=axis, ranks=n, size_bytes=size, seconds=s))
    return out


# --- what is measured


def test_tasks_are_distinct_and_repeatable() -> None:
    again = work.tasks(work.extent_of("cpu", True, 16e9), DTYPES, DTYPES)
    assert [t.key for t in TODO] == [t.key for t in again]
    assert len({t.key for t in TODO}) == len(TODO)
    other = work.tasks(work.extent_of("cpu", True, 16e9), DTYPES, DTYPES, seed=2)
    for kind in ("matmul", "conv_fwd"):
        unseen = {t.key for t in other if t.kind == kind}
        assert len(unseen & {t.key for t in TODO}) < 0.05 * len(unseen)
    assert {t.kind for t in TODO} == KINDS - {*CPU}
    assert {t.kind for t in work.cpu_tasks(quick=True)} == {*CPU}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tasks_fit_in_a_small_memory(device: str) -> None:
    extent = work.extent_of(device, False, 4e9)
    assert all(work.work_of(t).moved_bytes <= extent.largest_bytes for t in work.tasks(extent, ("fp32",), ("fp32",))
               if not t.kind.startswith("attention"))  # fmt: skip


# --- clocks


def test_samples_that_are_no_times_are_left_out() -> None:
    found = summary([1.0, 2.0, 0.0, -1.0, float("nan"), 3.0])
    assert (found.samples, found.rejected) == (3, 3)
    with pytest.raises(UserError, match="positive"):
        summary([0.0, -1.0])
    with pytest.raises(UserError, match="positive"):
        summary([])


def test_cpu_timer_counts_the_calls_of_a_sample() -> None:
    seen: list[int] = []
    samples = CpuTimer().samples_s(seen.append, 0.0)
    assert len(samples) == 5 and all(s > 0 for s in samples)
    assert seen == list(range(len(seen))) and len(seen) > 200


# --- regressions


def test_regression_finds_latency_and_rates_among_outliers() -> None:
    draw = np.random.default_rng(0)
    work_ = np.exp(draw.uniform(5, 15, (40, 2)))
    seconds = 3e-3 + work_ @ np.array([1e-6, 0.0])
    seconds[:4] *= 3
    x = nonnegative(np.column_stack([np.ones(40), work_]), seconds)
    np.testing.assert_allclose(x[:2], [3e-3, 1e-6], rtol=0.02)
    assert x[2] * work_[:, 1].max() < 1e-3


def test_too_few_or_bad_points_are_refused() -> None:
    ones = np.ones((9, 2))
    with pytest.raises(UserError, match="too few"):
        nonnegative(ones, np.ones(9))  # nine times the same
    with pytest.raises(UserError, match="zero, negative"):
        nonnegative(np.column_stack([np.ones(9), np.arange(9.0)]), np.arange(9.0))


@pytest.mark.slow
def test_models_recover_what_made_the_times() -> None:
    found = [m for m in measured(TODO) if m.task.kind == "matmul" and m.task.dtype == "fp32"]
    rows = [profile.arguments_of(m.task) for m in found]
    shape = {name: np.array([row[name] for row in rows], float) for name in rows[0]}
    seconds = np.array([m.seconds - work.work_of(m.task).moved_bytes / 4e10 for m in found])
    values = MODELS["half_size_matmul"].fit(shape, seconds)
    assert values["flops_per_s"] == pytest.approx(1e11, rel=1e-3)
    assert values["m_half"] == pytest.approx(20, rel=1e-2)
    predicted = cross_validated_s(MODELS["half_size_matmul"], shape, seconds, [str(m.task.shape) for m in found])
    assert errors_of(predicted, seconds).median_ape < 1e-3


def test_roofline_model_splits_the_points() -> None:
    draw = np.random.default_rng(3)
    shape = {"matrix_flops": np.exp(draw.uniform(10, 20, 60)), "moved_bytes": np.exp(draw.uniform(8, 18, 60))}
    seconds = np.maximum(1e-6 + shape["matrix_flops"] / 1e9, 2e-6 + shape["moved_bytes"] / 1e8)
    values = MODELS["linear_roofline"].fit(shape, seconds)
    assert values["flops_per_s"] == pytest.approx(1e9, rel=0.02)
    assert values["memory_Bps"] == pytest.approx(1e8, rel=0.02)


# --- the files


@pytest.mark.slow
def test_profile_is_a_cluster_of_every_command(tmp_path: Path) -> None:
    mesh = Mesh(nodes=1, local=4)
    fitted = profile.fit(HOST, measured(TODO, 0.02), timed(mesh), mesh, "2026-01-01")
    path = tmp_path / "m.toml"
    cluster_file.write(path, fitted)
    cluster = load_cluster(path)
    device = cluster.device
    assert device_within(path) == device, "of commands that want one device too"
    assert device.matrix_flops_per_s["fp32"] * device.matrix_efficiency == pytest.approx(9e10, rel=0.2)
    assert device.memory_Bps * device.memory_efficiency == pytest.approx(4e10, rel=0.1)
    assert device.memory_bytes == pytest.approx(4e9)
    level = cluster.levels[0]
    assert level.devices == 4
    assert level.link_Bps * level.efficiency == pytest.approx(1e9, rel=0.02)
    assert level.latency_s == pytest.approx(1e-4, rel=0.02)
    assert device.sources["matrix_efficiency"].kind == "fitted" and "2.13.0" in device.sources["memory_Bps"].text
    curves = cluster_file.read_curves(path).curves
    assert device.curves == cluster_file.read_curves(path), "the cluster file names its companion"
    assert [c.family for c in sorted(curves, key=str)] == [c.family for c in sorted(fitted.curves, key=str)]
    predictor = profile.Predictor(curves)
    unseen = Task(kind="matmul", dtype="bf16", shape={"m": 333, "n": 777, "k": 555})
    assert predictor.seconds(unseen) == pytest.approx(seconds_of(unseen), rel=0.1)
    with pytest.raises(UserError, match="no curve for matmul in fp8"):
        predictor.seconds(replace(unseen, dtype="fp8"))


@pytest.mark.quick("cuda-2.13.0+rocm7.0-unknown")
@pytest.mark.parametrize(
    ("device", "torch", "vendor"),
    [("cpu", "2.13.0", "unknown"), ("cuda", "2.13.0+cu130", "NVIDIA"), ("cuda", "2.13.0+rocm7.0", "unknown")],
)
def test_a_measured_device_says_what_it_is(tmp_path: Path, device: str, torch: str, vendor: str) -> None:
    """A capture for it has the kernels and the allocator of CUDA only if the vendor is known."""
    host = replace(HOST, device=device, torch=torch)
    cluster_file.write(tmp_path / "m.toml", profile.fit(host, measured(FEW), [], None, "2026-01-01"))
    found = device_within(tmp_path / "m.toml")
    assert found.vendor == vendor and found.is_host == (device == "cpu")


@pytest.mark.slow
def test_two_nodes_give_two_levels() -> None:
    mesh = Mesh(nodes=2, local=2)
    fitted = profile.fit(HOST, measured(FEW), timed(mesh), mesh, "2026-01-01")
    assert [(level.name, level.devices) for level in fitted.levels] == [("local", 2), ("node", None)]


@pytest.mark.slow
def test_one_process_says_that_its_level_is_assumed() -> None:
    fitted = profile.fit(HOST, measured(FEW), [], None, "2026-01-01")
    assert fitted.levels[0].points == 0
    assert 'kind = "assumed"' in cluster_file.cluster_text(fitted)


@pytest.mark.slow
def test_too_few_measurements_name_what_is_missing() -> None:
    with pytest.raises(UserError, match="no matrix product"):
        profile.fit(HOST, measured(FEW)[:3], [], None, "2026-01-01")
    softmaxes = [task for task in FEW if task.kind == "softmax"]
    fitted = profile.fit(HOST, [m for m in measured(FEW) if m.task not in softmaxes[3:]], [], None, "2026-01-01")
    assert any(note.startswith("softmax fp32") and "too few" in note for note in fitted.skipped)


@pytest.mark.slow
def test_somebody_elses_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('title = "mine"\n')
    with pytest.raises(InputFileError, match="not written by a calibration"):
        cluster_file.write(path, profile.fit(HOST, measured(FEW), [], None, "2026-01-01"))
    assert path.read_text() == 'title = "mine"\n'


def record_of(task: Task, round_: int, seconds: list[float]) -> dict[str, Any]:
    return {
        "key": runner.visit_key(task, round_), "of": "operator", "kind": task.kind, "dtype": task.dtype,
        "shape": dict(task.shape), "layout": task.layout, "round": round_, "clock": "thread", "seconds": seconds,
    }  # fmt: skip


def test_results_drop_duplicates_errors_and_bad_times() -> None:
    first, second, third = TODO[:3]
    records = [
        record_of(first, 0, [9.0]), record_of(first, 0, [1.0]), record_of(first, 1, [1.0, 0.0]),
        {**record_of(second, 0, []), "error": "out of memory"}, record_of(third, 0, [0.0, -1.0]), {"key": "dtypes"},
    ]  # fmt: skip
    found = runner.results(records)
    assert [(m.task.key, m.seconds, m.visits, m.rejected) for m in found] == [(first.key, 1.0, 2, 1)]
    assert runner.visit_key(second, 0) not in runner.done_keys(records)


# --- with torch

torch_needed = pytest.mark.skipif(not __import__("importlib.util").util.find_spec("torch"), reason="needs torch")


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"steptime\[torch\]"):
        session.calibrate(session.Request(out=tmp_path / "m.toml"), lambda done, total: None)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be written"):
        session.calibrate(session.Request(out=tmp_path / "none" / "m.toml"), lambda done, total: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration of seconds."""
    monkeypatch.setattr(Settings, "of", classmethod(lambda cls, quick: cls(quick=True, rounds=1, visit_s=0.0)))
    extent = replace(
        work.extent_of("cpu", True, 1e9), products=8, maps=4, attentions=0, convolutions=12, flops=(3e5, 1e7),
        elements=(1e3, 1e6),
    )  # fmt: skip
    monkeypatch.setattr(runner, "extent_of", lambda *given: extent)
    monkeypatch.setattr(runner.Bench, "dtypes", lambda self, probes: ("fp32",))
    monkeypatch.setattr(session, "this_host", lambda torch, threads, device: replace(HOST, cache_bytes=1e5))
    monkeypatch.setattr(collectives, "sizes_bytes", lambda device, quick: [4096, 65536, 262144, 1048576])


class StopError(Exception):
    """Stands for Ctrl-C, which pytest itself would catch."""


@pytest.mark.slow
@torch_needed
def test_interrupt_and_resume(small: None, tmp_path: Path) -> None:
    request = session.Request(out=tmp_path / "m.toml")

    def stop(done: int, total: int) -> None:
        if done == 7:
            raise StopError

    with pytest.raises(StopError):
        session.calibrate(request, stop)
    journal = cluster_file.journal_path(request.out)
    before = len(read_journal(journal).records)
    assert before == 2 + 7 and not request.out.exists()
    with pytest.raises(InputFileError, match="not finished"):
        session.calibrate(request, lambda done, total: None)
    progress: list[tuple[int, int]] = []
    fitted = session.calibrate(replace(request, resume=True), lambda done, total: progress.append((done, total)))
    assert fitted is not None and load_cluster(request.out).device.name == "a-quoted-cpu"
    assert progress[-1][0] == progress[-1][1]
    keys = [r["key"] for r in read_journal(journal).records]
    assert len(keys) == len(set(keys)) == 3 + progress[-1][1]
    session.calibrate(replace(request, resume=True), lambda done, total: None)  # nothing left to measure
    assert [r["key"] for r in read_journal(journal).records] == keys
    journal.write_text(journal.read_text().replace('"dtypes":["fp32"]', '"dtypes":"x"', 1))
    session.calibrate(replace(request, resume=True), lambda done, total: None)  # found again
    assert [r["key"] for r in read_journal(journal).records] == [*keys, "dtypes"]


@pytest.mark.slow
@torch_needed
def test_command_prints_one_document_or_a_report(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.toml"
    machine(out=out, quick=True, json=True, table=tmp_path / "t.csv", plot=tmp_path / "p.png")
    document = json.loads(capsys.readouterr().out)
    assert document["files"]["profile"] == str(out) and document["device"]["matrix_efficiency"] > 0
    assert len(document["residuals"]) >= 8 and any("too few" in note for note in document["skipped"])
    assert (tmp_path / "t.csv").is_file() and (tmp_path / "p.png").is_file()
    machine(out=out, quick=True, resume=True, device=Device.CPU, compare_to="h100-sxm")
    text = capsys.readouterr().out
    assert "Sustained rates" in text and "The public profile of h100-sxm" in text
    assert (tmp_path / "m.residuals.csv").read_text().count("\n") > 8
    machine(out=out, quick=True, resume=True, compare_to="h100-sxm", json=True)
    assert json.loads(capsys.readouterr().out)["public"]["device"] == "h100-sxm"
    with pytest.raises(UserError, match=r"does not end in \.toml"):
        machine(out=tmp_path / "m.txt")


@torch_needed
def test_journal_of_another_machine_is_refused(small: None, tmp_path: Path) -> None:
    request = session.Request(out=tmp_path / "m.toml", resume=True)
    with Journal(cluster_file.journal_path(request.out), {"what": "machine", "host": "elsewhere"}) as journal:
        journal.append({"key": "x"})
    with pytest.raises(InputFileError, match='host: "elsewhere" there, "h" now'):
        session.calibrate(request, lambda done, total: None)


@pytest.mark.slow
@torch_needed
def test_a_rank_that_dies_loses_nothing(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = collectives._rank

    def remember(*given: Any) -> subprocess.Popen[bytes]:
        started.append(start(*given))
        return started[-1]

    monkeypatch.setattr(collectives, "_rank", remember)
    request = session.Request(out=tmp_path / "m.toml", processes=2)
    records = cluster_file.journal_path(request.out)

    def kill(done: int, total: int) -> None:
        if len(started) == 2 and sum(b'"collective"' in line for line in records.read_bytes().splitlines()) == 5:
            started[1].send_signal(signal.SIGKILL)

    with pytest.raises(RankDiedError, match=r"rank 1 of 2 was ended by SIGKILL[\s\S]*--resume"):
        session.calibrate(request, kill)
    assert all(p.poll() is not None for p in started)
    kept = [r for r in read_journal(records).records if r.get("of") == "collective"]
    assert len(kept) >= 5
    assert load_cluster(request.out).levels[0].name == "local"
    fitted = session.calibrate(replace(request, resume=True), lambda done, total: None)
    assert fitted is not None and fitted.levels[0].points == 4 * 4
    assert {c.kind for c in fitted.collectives} == set(collectives.KINDS)


@pytest.mark.slow
@torch_needed
def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    work_file = tmp_path / "work.json"
    work_file.write_text(json.dumps({"device": "cpu", "threads": 1, "store": str(tmp_path / "s"), "visits": []}))
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    rank = subprocess.Popen(
        [sys.executable, "-m", ranks.__name__, str(work_file)], stdin=subprocess.PIPE, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(0.1)
    assert rank.stdin is not None
    rank.stdin.close()
    assert rank.wait(timeout=60) != 0


@torch_needed
def test_every_operator_runs() -> None:
    torch = needed("torch", "a test")
    pool = torch_ops.Pool(torch, "cpu")
    seen = set()
    for task in [*work.launches(), *TODO, *work.cpu_tasks(quick=True)]:
        if (task.kind, task.dtype, task.layout) not in seen and work.work_of(task).moved_bytes < 2e7:
            seen.add((task.kind, task.dtype, task.layout))
            call = torch_ops.call_of(task, torch, pool, 2)
            for i in range(3):
                call(i)
            pool.reset()
    assert {kind for kind, _, _ in seen} == {*work.LAUNCHES, *KINDS}


def test_groups_cover_the_world_once() -> None:
    for axis, size in Mesh(nodes=3, local=4).groups():
        groups = ranks.groups_of(axis, size, 12, 4)
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        assert all(len(group) == size for group in groups)
