"""Geometries that can be and cannot; caches of machines; what is missing without numba."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import UnknownNameError, UserError
from steptime.hardware import load_device
from steptime_lab.hierarchy import compiled
from steptime_lab.hierarchy.answers import cache_report, chosen_caches
from steptime_lab.hierarchy.caches import chip_memories, machine_caches, processor, processors
from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.hierarchy.tiles import caches_of
from steptime_lab.hierarchy.traces import Shape, trace


@pytest.mark.each(
    "text, line, words",
    [
        ("48KiB:7", 64, "no multiple of 64 bytes a line times 7 ways"),
        ("100:1", 64, "is not SIZE:WAYS"),
        ("32KiB", 64, "is not SIZE:WAYS"),
        ("32KiB:0", 64, "0 ways"),
        ("32KiB:-8", 64, "-8 ways"),
        ("32KiB:x", 64, "is not SIZE:WAYS"),
        ("32KiB:8", 48, "power of two"),
        ("32KiB:8", 0, "power of two"),
        ("", 64, "is not SIZE:WAYS"),
        (",".join(["1KiB:1"] * 7), 64, "7 levels"),
        ("1TiB:8", 64, "larger than any cache"),
        ("32B:1", 64, "no multiple"),
    ],
)
def test_impossible_geometries_are_named(text: str, line: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        hierarchy(text, line_bytes=line)


def test_sets_need_not_be_a_power_of_two() -> None:
    assert hierarchy("48KiB:12,1.25MiB:20,38.5MiB:11").sets == (64, 1024, 57344)


def test_every_processor_of_the_catalogue_can_be_simulated() -> None:
    for name in processors():
        found = processor(name)
        assert caches_of(found).line_bytes == 64 and found.source and len(found.levels) == 3
    with pytest.raises(UnknownNameError, match="zen5"):
        processor("zen5")
    with pytest.raises(UserError, match="both"):
        chosen_caches("1KiB:1", "zen4", line_bytes=64, inclusive=False)


def test_memories_of_gpus_by_architecture() -> None:
    h100 = chip_memories(load_device("h100-sxm"))
    assert h100 is not None and (h100.registers_bytes, h100.shared_bytes) == (2**18, 228 * 2**10)
    assert chip_memories(load_device("tpu-v4")) is None


def test_caches_of_a_machine_are_read_as_linux_lists_them(tmp_path: Path) -> None:
    rows = [
        ("Data", 1, "48K", 12),
        ("Instruction", 1, "32K", 8),
        ("Unified", 2, "2048K", 16),
        ("Unified", 3, "30720K", 15),
    ]
    for i, (kind, level, size, ways) in enumerate(rows):
        (folder := tmp_path / f"index{i}").mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size), ("ways_of_associativity", ways),
                           ("coherency_line_size", 64)):  # fmt: skip
            (folder / name).write_text(f"{text}\n")
    found = machine_caches(tmp_path)
    assert [(c.size_bytes, c.ways) for c in found.levels] == [(49152, 12), (2**21, 16), (30 * 2**20, 15)]
    (tmp_path / "index0" / "size").unlink()
    with pytest.raises(UserError, match="not listed"):
        machine_caches(tmp_path)


def test_traces_that_are_too_long_without_numba_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED", False)
    monkeypatch.setattr(compiled, "MOST_INTERPRETED", 100)
    with pytest.raises(UserError, match=r"300 accesses need numba.*\n.*steptime\[hierarchy\]"):
        cache_report("stream", Shape(n=100, passes=1), hierarchy("1KiB:1"), "one")


@pytest.mark.each(
    "pattern, shape, words",
    [
        ("strem", Shape(), "stream"),
        ("matmul", Shape(n=2), "2 x 2"),
        ("matmul", Shape(n=64, leading=60), "fewer than their 64"),
    ],
)
def test_patterns_that_cannot_be_are_named(pattern: str, shape: Shape, words: str) -> None:
    with pytest.raises(UserError, match=words):
        trace(pattern, shape)


def test_rows_of_a_power_of_two_are_named_as_the_cause_of_conflicts() -> None:
    report = cache_report("matmul", Shape(n=64, packed=False), hierarchy("8KiB:2"), "one")
    assert report.conflict is not None and "512 bytes apart fall onto 8 of 64 sets" in report.conflict
    assert report.causes["conflict"] > report.causes["capacity"]
    packed = cache_report("matmul", Shape(n=64, tile=8), hierarchy("8KiB:2"), "one")
    assert packed.conflict is None and sum(packed.causes.values()) == packed.levels[0]["misses"]
