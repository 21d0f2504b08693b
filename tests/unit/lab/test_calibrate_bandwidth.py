"""The bandwidth of memory on described hosts: last caches of 0.5 MiB to 1 GiB, small and large memories."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.hardware import load_cluster
from steptime.measure.machine import cluster_file, profile, runner, work
from steptime.measure.machine.runner import Host, Measured

MIB = 2**20
TRUE_BPS, CACHED_BPS = 1e10, 4e10


def described(cache_bytes: float, memory_bytes: float) -> Host:
    return Host(
        host="h", processor="a CPU", cores=2, memory_bytes=memory_bytes, cache_bytes=cache_bytes, device="cpu", gpus=0,
        torch="2.13.0", threads=1,
    )  # fmt: skip


def measured(on: Host, quick: bool, **less: int) -> list[Measured]:
    """A cache that keeps as much of a sweep as it can hold, and 100 GFLOP/s."""
    extent = replace(work.extent_of("cpu", quick, on.memory_bytes, on.cache_bytes), **less)  # type: ignore[arg-type]
    out = []
    for task in [*work.launches(), *work.tasks(extent, ("fp32",), ())]:
        done = work.work_of(task)
        one = Measured(task=task, seconds=1.0, noise=0.01, visits=3, rejected=0)
        swept = profile.swept_bytes(on, one) if task.kind in profile.STREAMS else math.inf
        held = min(1.0, on.cache_bytes / swept) if swept < profile.PAST * on.cache_bytes else 0.0
        memory_s = done.moved_bytes * ((1 - held) / TRUE_BPS + held / CACHED_BPS)
        out.append(replace(one, seconds=2e-6 + done.matrix_flops / 1e11 + done.vector_flops / 1e12 + memory_s))
    return out


@pytest.mark.each("quick", [True, False])
@pytest.mark.each("cache_mib", [0.5, 8, 32, 64, 128, 260, 512, 1024])
@pytest.mark.each("memory_bytes", [5e8, 4e9, 1e12])
def test_sizes_follow_cache_and_memory(cache_mib: float, memory_bytes: float, quick: bool) -> None:
    """Past the cache where the memory has room for it, else an estimate whose factor covers the truth."""
    on = described(cache_mib * MIB, memory_bytes)
    operators = measured(on, quick, products=0, attentions=0)
    moved = [work.work_of(m.task).moved_bytes for m in operators]
    assert max(moved) <= min(max(4e8, 3.01 * on.cache_bytes), 0.17 * memory_bytes)
    found = profile.bandwidth_of(on, operators)
    assert TRUE_BPS * 0.97 <= found.best_Bps <= TRUE_BPS * found.factor * 1.001
    assert (found.factor == 1) is (found.note == "")
    if memory_bytes / 6 > 2 * on.cache_bytes:
        assert found.factor == 1 and found.best_Bps == pytest.approx(TRUE_BPS, rel=0.03)


def test_the_usual_sizes_stay_where_they_pass_the_cache() -> None:
    usual = work.extent_of("cpu", True, 16e9)
    assert work.extent_of("cpu", True, 16e9, 64 * MIB) == usual
    assert work.extent_of("cpu", True, 16e9, 128 * MIB).streams


@pytest.mark.slow
def test_an_unsure_bandwidth_is_assumed_and_widens_the_bands(tmp_path: Path) -> None:
    """A cache of 1 GiB in 2 GB of memory: no copy passes it."""
    on = described(1024 * MIB, 2e9)
    few = [one for one in measured(on, True) if one.task.kind in (*work.LAUNCHES, "copy", "matmul", "softmax")]
    fitted = profile.fit(on, few, [], None, "2026-01-01")
    cluster_file.write(tmp_path / "m.toml", fitted)
    source = load_cluster(tmp_path / "m.toml").device.sources["memory_Bps"]
    assert source.kind == "assumed" and "the last cache holds" in source.text
    assert any("times lower" in note for note in fitted.skipped)
    bands = {curve.family.partition("/")[2]: curve.band for curve in fitted.curves}
    assert bands["copy"][1] >= 3.5 and bands["softmax"][1] >= 3.5 and bands["matmul"][1] < 1.5
    sure = described(32 * MIB, 16e9)
    usual = profile.fit(sure, measured(sure, True), [], None, "2026-01-01")
    assert usual.memory_note == "" and all(curve.band[1] < 1.5 for curve in usual.curves)


def test_without_a_copy_there_is_no_bandwidth() -> None:
    on = described(32 * MIB, 16e9)
    with pytest.raises(UserError, match="no copy was measured"):
        profile.bandwidth_of(on, [m for m in measured(on, True) if m.task.kind != "copy"])


@pytest.mark.parametrize(("text", "wanted"), [("1000000", 1e6), ("max", None), ("0", None), ("x", None)])
def test_a_container_has_the_memory_that_it_may_use(
    text: str, wanted: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_LIMITS", (tmp_path / "none",))
    whole = runner._memory_bytes()
    (tmp_path / "memory.max").write_text(text + "\n")
    monkeypatch.setattr(runner, "_LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
    assert runner._memory_bytes() == (whole if wanted is None else wanted)
