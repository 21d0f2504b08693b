"""Memories on the chip: caches of processors and of this machine, registers and shared memory of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import UnknownNameError, UserError
from steptime.hardware.load import read_toml
from steptime.hardware.records import Device
from steptime.hardware.search_path import CATALOGUE
from steptime.units import parse

SYSTEM: Final = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux lists the caches of the first processor."""
MACHINE: Final = "machine"
"""Name of the caches of the machine that runs this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLevel:
    """One cache of a processor as a core sees it."""

    size_bytes: int
    ways: int
    line_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Caches and vector registers of a processor, the first level first."""

    name: str
    title: str
    levels: tuple[CacheLevel, ...]
    vector_registers: int
    vector_bytes: int
    """Bytes of one vector register."""
    source: str

    @property
    def register_bytes(self) -> int:
        """Bytes of all vector registers of a thread."""
        return self.vector_registers * self.vector_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipMemories:
    """Registers, shared memory and first-level cache of one multiprocessor of a GPU."""

    registers_bytes: int
    thread_registers: int
    """Largest number of registers of one thread, of 4 bytes each."""
    shared_bytes: int
    """Largest shared memory of the blocks of the multiprocessor together."""
    l1_bytes: int
    """First level and shared memory together."""
    line_bytes: int
    bytes_per_clock: int
    """Bytes that shared memory delivers in a cycle."""
    source: str


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return read_toml(CATALOGUE / "caches.toml")


def processors() -> tuple[str, ...]:
    """Names of the processors whose caches are known.

    >>> "zen4" in processors()
    True
    """
    return tuple(_tables()["cpu"])


def processor(name: str) -> Processor:
    """A processor by name; ``machine``: this one, as Linux describes it.

    Raises:
        UnknownNameError: it is not in the catalogue.
        UserError: ``machine``, and the system does not list its caches.

    >>> [level.ways for level in processor("zen4").levels]
    [8, 8, 16]
    """
    if name == MACHINE:
        return machine_caches()
    rows = _tables()["cpu"]
    if name not in rows:
        raise UnknownNameError("processor", name, (*rows, MACHINE))
    row = rows[name]
    return Processor(
        name=name,
        title=row["title"],
        levels=tuple(_level(text, row["line_bytes"]) for text in row["levels"]),
        vector_registers=row["vector_registers"],
        vector_bytes=row["vector_bytes"],
        source=row["source"],
    )


def _level(text: str, line_bytes: int) -> CacheLevel:
    size, _, ways = text.partition(":")
    return CacheLevel(size_bytes=int(parse(size, "bytes")), ways=int(ways), line_bytes=line_bytes)


def chip_memories(device: Device) -> ChipMemories | None:
    """Memories of one multiprocessor of a GPU; None where the catalogue lacks its architecture.

    >>> from steptime.hardware import load_device
    >>> chip_memories(load_device("h100-sxm")).shared_bytes
    233472
    """
    row = _tables()["gpu"].get(device.architecture or "")
    if row is None:
        return None
    return ChipMemories(
        registers_bytes=int(parse(row["registers"], "bytes")),
        thread_registers=row["thread_registers"],
        shared_bytes=int(parse(row["shared"], "bytes")),
        l1_bytes=int(parse(row["l1"], "bytes")),
        line_bytes=row["line_bytes"],
        bytes_per_clock=row["bytes_per_clock"],
        source=row["source"],
    )


def machine_caches(root: Path = SYSTEM) -> Processor:
    """Caches of this machine: data and unified ones of the first processor, from Linux.

    In a virtual machine these are the caches that its host exposes.

    Raises:
        UserError: the system does not list them.
    """
    try:
        found = [row for row in map(_described, sorted(root.glob("index*"))) if row is not None]
        levels = tuple(level for _, level in sorted(found, key=lambda each: each[0]))
    except (OSError, ValueError):
        levels = ()
    if not levels:
        raise UserError(
            f"the caches of this machine are not listed in {root}", hint="give --cache, or the name of a processor"
        )
    flags = _flags()
    wide = "avx512f" in flags
    return Processor(
        name=MACHINE,
        title="this machine",
        levels=levels,
        vector_registers=32 if wide or not flags else 16,
        vector_bytes=64 if wide else 32 if "avx" in flags else 16,
        source=f"{root}, /proc/cpuinfo",
    )


def _described(folder: Path) -> tuple[int, CacheLevel] | None:
    """Level and geometry of one cache; None for instructions."""
    text = {name: (folder / name).read_text(encoding="utf-8").strip() for name in ("type", "level", "size")}
    if text["type"] == "Instruction":
        return None
    line, ways = (int((folder / name).read_text()) for name in ("coherency_line_size", "ways_of_associativity"))
    size = int(text["size"].removesuffix("K")) * 1024
    return int(text["level"]), CacheLevel(size_bytes=size, ways=ways or size // line, line_bytes=line)


def _flags() -> frozenset[str]:
    """Instruction sets of the first processor; empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
