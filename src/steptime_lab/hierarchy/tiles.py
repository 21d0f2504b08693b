"""The best tile of a product at every level of a machine, and the fewest words that any order moves.

A level has words for strips of both operands and, where results lie elsewhere (registers of a GPU), words for results.
Its tile is found in closed form (a square, a real number) and by search over whole multiples of the tile inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.cost.matmul import attainable_flops_per_s, matmul_flops
from steptime.errors import UserError
from steptime.hardware.records import Device
from steptime.num import Array
from steptime_lab.cost import tiling
from steptime_lab.cost.cache import boundary_hit_rate
from steptime_lab.cost.warps import WARP
from steptime_lab.hierarchy.caches import Processor, chip_memories, processor, processors
from steptime_lab.hierarchy.geometry import Hierarchy, of_caches

USABLE: Final = 0.75
"""Share of a cache, or of registers, that a tile may fill: the rest is addresses, other data, lines in flight."""
CHOICES: Final = 512
"""Largest number of lengths of a tile that are tried in each dim."""
WARPS_OF_A_GROUP: Final = 4
"""Warps that issue one product together, on devices whose matrix units fetch their operands."""
STRIP_BYTES: Final = 128
"""Bytes of a row of a strip in shared memory: a line."""
MOST_THREADS: Final = 1024
"""Largest number of threads of a block of a GPU."""
LARGEST: Final = 1 << 24
"""Largest number of rows, columns or depth of a product."""
WORD_BYTES: Final = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A level that holds tiles, and the rate at which the level below it is read."""

    name: str
    below: str
    """Level that this one is filled from."""
    strip_words: float
    """Words for strips of the operands, and for results where `result_words` is None."""
    result_words: float | None = None
    depth: int = 1
    """Elements of a strip along k."""
    steps: tuple[int, int] = (1, 1)
    """Rows and columns of a tile are multiples of these, in tiles of the level inside."""
    most_inner: int | None = None
    """Largest number of tiles of the level inside in one tile (threads of a block)."""
    units: int = 1
    """Copies of the level, which process tiles in parallel."""
    below_Bps: float | None = None
    """Rate at which the level below fills all copies together."""

    @property
    def capacity_words(self) -> float:
        """All words of one copy."""
        return self.strip_words + (self.result_words or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of one level and the traffic across its boundary."""

    level: str
    below: str
    rows: int
    columns: int
    depth: int
    closed_form: float
    """Side of the square tile by formula."""
    traffic_bytes: float
    bound_bytes: float
    """Fewest bytes that any order moves into a memory of this size."""
    intensity: float
    """FLOP per byte that crosses the boundary."""
    below_Bps: float | None
    attainable_flops_per_s: float | None
    """Rate that this boundary alone allows; None where its bandwidth or the peak is unknown."""
    time_s: float | None
    tiles: int
    wave_efficiency: float
    """Share of the copies of the level that have a tile, on average."""

    @property
    def excess(self) -> float:
        """Traffic over the bound, less one."""
        return float(tiling.excess_over_bound(self.traffic_bytes, self.bound_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Tiles of a product, the innermost level first."""

    m: int
    n: int
    k: int
    dtype: str
    machine: str
    flops: float
    peak_flops_per_s: float | None
    levels: tuple[Tile, ...]
    naive_bytes: float
    """Traffic of a product without tiles: a row and a column for each output."""
    limited_by: str | None
    """Boundary that takes longest, or ``compute``; None where fewer than two times are known."""


def cpu_levels(registers_bytes: int, vector_bytes: int, caches: Hierarchy, word_bytes: int) -> tuple[Memory, ...]:
    """Registers and caches of one core; a row of a tile in registers is whole vectors."""
    line = max(1, caches.line_bytes // word_bytes)
    names = ("registers", *caches.names)
    registers = Memory(
        name=names[0],
        below=names[1],
        strip_words=USABLE * registers_bytes / word_bytes,
        steps=(1, vector_bytes // word_bytes),
    )
    levels = tuple(
        Memory(
            name=names[i],
            below=names[i + 1],
            strip_words=USABLE * cache.size_bytes / word_bytes,
            depth=line,
        )
        for i, cache in enumerate(caches.caches, 1)
    )
    return (registers, *levels)


def gpu_levels(device: Device, dtype: str) -> tuple[Memory, ...]:
    """Levels of a GPU: registers, shared memory, second level.

    Registers are those of a thread; of a warp, or four, where matrix units compute the dtype.

    Raises:
        UserError: the memories of its architecture, its clock or its second level are not in the catalogue.
    """
    chip, word_bytes = chip_memories(device), WORD_BYTES[dtype]
    units, clock, l2 = device.sm_count, device.clock_Hz, device.l2_bytes
    if chip is None or not (units and clock and l2):
        raise UserError(
            f"{device.name}: registers and shared memory of its architecture are not known",
            hint=f"an NVIDIA GPU from Volta on, or a processor: {', '.join(processors())}, machine",
        )
    threads = 1
    if (device.matrix_rate(dtype) or 0.0) > device.vector_flops_per_s.get(dtype, 0.0):
        threads = WARP * (WARPS_OF_A_GROUP if device.fetches_operands else 1)
    results = USABLE * chip.registers_bytes / 4  # sums have 4 bytes for operands of every dtype
    registers = Memory(
        name="registers",
        below="shared memory",
        strip_words=USABLE * chip.thread_registers * threads,
        steps=(4, 4) if threads == 1 else (16, 8),
        units=units * chip.registers_bytes // (4 * chip.thread_registers * threads),
        below_Bps=units * clock * chip.bytes_per_clock,
    )
    shared = Memory(
        name="shared memory",
        below="L2",
        strip_words=chip.shared_bytes / word_bytes / 2,  # two buffers: one is filled while the other is used
        result_words=results,
        depth=STRIP_BYTES // word_bytes,
        most_inner=MOST_THREADS // threads,
        units=units,
    )
    second = Memory(
        name="L2",
        below="memory",
        strip_words=USABLE * l2 / word_bytes,
        result_words=units * results,
        depth=STRIP_BYTES // word_bytes,
        below_Bps=device.memory_Bps,
    )
    return registers, shared, second


def planned(
    shape: tuple[int, int, int],
    levels: Sequence[Memory],
    *,
    dtype: str,
    machine: str,
    peak_flops_per_s: float | None = None,
) -> TilePlan:
    """Tiles of every level, each a multiple of the tile inside it.

    Raises:
        UserError: a size that is not possible.

    >>> from steptime_lab.hierarchy.geometry import hierarchy
    >>> levels = cpu_levels(2048, 64, hierarchy("32KiB:8"), 4)
    >>> [(t.rows, t.columns) for t in planned((512, 512, 512), levels, dtype="fp32", machine="one").levels]
    [(21, 16), (63, 64)]
    """
    for name, size in zip("mnk", shape, strict=True):
        if not 1 <= size <= LARGEST:
            raise UserError(f"{name}: {size} is not a size from 1 to {LARGEST:,}")
    flops = float(matmul_flops(*shape, 1))
    inside, out = (1, 1), []
    for memory in levels:
        sides = _searched(shape, memory, inside)
        out.append(_tile(shape, memory, sides, WORD_BYTES[dtype], flops, peak_flops_per_s))
        inside = sides
    times = {tile.below: tile.time_s for tile in out if tile.time_s is not None}
    if peak_flops_per_s is not None:
        times["compute"] = flops / peak_flops_per_s
    m, n, k = shape
    return TilePlan(
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        machine=machine,
        flops=flops,
        peak_flops_per_s=peak_flops_per_s,
        levels=tuple(out),
        naive_bytes=float(tiling.tile_traffic_words(m, n, k, 1, 1, 1)) * WORD_BYTES[dtype],
        limited_by=max(times, key=lambda name: times[name]) if len(times) > 1 else None,
    )


def check_dtype(dtype: str) -> None:
    """Raise UserError where tiles of a dtype are not known."""
    if dtype not in WORD_BYTES:
        raise UserError(f"there is no dtype {dtype!r} of tiles", hint=f"valid: {', '.join(WORD_BYTES)}")


def _sides(size: int, step: int) -> Array:
    """Multiples of a step up to the first that covers a dim; evenly spaced, at most `CHOICES`."""
    most = -(-size // step)
    counts = np.unique(np.linspace(1, most, min(most, CHOICES)).round().astype(np.int64))
    return counts * step


def _searched(shape: tuple[int, int, int], memory: Memory, inside: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the tile that moves the fewest words; among equal ones the smallest."""
    m, n, k = shape
    down, across = inside[0] * memory.steps[0], inside[1] * memory.steps[1]
    rows, columns = _sides(m, down)[:, None], _sides(n, across)[None, :]
    strips = (rows + columns) * min(memory.depth, k)
    results = rows * columns
    if memory.result_words is None:
        fits = strips + results <= memory.strip_words
    else:
        fits = (strips <= memory.strip_words) & (results <= memory.result_words)
    if memory.most_inner is not None:
        fits &= results <= memory.most_inner * inside[0] * inside[1]
    if not fits.any():
        return inside
    words = np.where(fits, tiling.tile_reads_words(m, n, k, rows, columns), np.inf)
    least = np.flatnonzero(words.ravel() <= words.min())
    best = least[np.argmin(np.broadcast_to(results, words.shape).ravel()[least])]
    row, column = np.unravel_index(best, words.shape)
    return int(rows[row, 0]), int(columns[0, column])


def _tile(
    shape: tuple[int, int, int],
    memory: Memory,
    sides: tuple[int, int],
    word_bytes: int,
    flops: float,
    peak_flops_per_s: float | None,
) -> Tile:
    m, n, k = shape
    moved = float(tiling.tile_traffic_words(m, n, k, *sides, 1)) * word_bytes
    bound = float(tiling.least_traffic_words(m, n, k, memory.capacity_words, memory.units)) * word_bytes
    intensity = float(tiling.intensity_flops_per_byte(flops, moved))
    square = memory.strip_words if memory.result_words is None else memory.result_words
    depth = min(memory.depth, k)
    closed = float(tiling.best_square_tile(square, depth)) if memory.result_words is None else square**0.5
    tiles = -(-m // sides[0]) * -(-n // sides[1])
    reached = None
    if memory.below_Bps is not None and peak_flops_per_s is not None:
        reached = float(attainable_flops_per_s(intensity, peak_flops_per_s, memory.below_Bps))
    return Tile(
        level=memory.name,
        below=memory.below,
        rows=min(sides[0], m),
        columns=min(sides[1], n),
        depth=depth,
        closed_form=closed,
        traffic_bytes=moved,
        bound_bytes=min(bound, moved),
        intensity=intensity,
        below_Bps=memory.below_Bps,
        attainable_flops_per_s=reached,
        time_s=moved / memory.below_Bps if memory.below_Bps else None,
        tiles=tiles,
        wave_efficiency=float(tiling.wave_efficiency(tiles, memory.units)),
    )


def tiles_on_device(shape: tuple[int, int, int], device: Device, dtype: str) -> TilePlan:
    """Tiles on a GPU of the catalogue: threads, blocks, and the blocks that run together.

    Raises:
        UserError: its memories are unknown, or the size or dtype is not possible.
    """
    check_dtype(dtype)
    peak = device.matrix_rate(dtype) or device.vector_flops_per_s.get(dtype)
    return planned(shape, gpu_levels(device, dtype), dtype=dtype, machine=device.title, peak_flops_per_s=peak)


def tiles_on_processor(shape: tuple[int, int, int], name: str, dtype: str) -> TilePlan:
    """Tiles on one core of a processor of the catalogue, or of this machine.

    Raises:
        UserError: an unknown processor, or a size or dtype that is not possible.

    >>> tiles_on_processor((256, 256, 256), "zen4", "fp32").levels[0].rows
    20
    """
    check_dtype(dtype)
    found: Processor = processor(name)
    caches = caches_of(found)
    levels = cpu_levels(found.register_bytes, found.vector_bytes, caches, WORD_BYTES[dtype])
    return planned(shape, levels, dtype=dtype, machine=found.title)


def product_hit_rates(shape: tuple[int, int, int], name: str, dtype: str = "fp32") -> dict[str, float]:
    """Hit rate of every cache of a processor in a product with the best tiles, in closed form.

    The first level is asked for vectors and fills lines, so that the further vectors of a line hit.

    Raises:
        UserError: an unknown processor, or a size or dtype that is not possible.

    >>> {level: round(rate, 3) for level, rate in product_hit_rates((1024, 1024, 1024), "zen4").items()}
    {'L1': 0.702, 'L2': 0.794, 'L3': 0.571}
    """
    plan, found = tiles_on_processor(shape, name, dtype), processor(name)
    vectors = found.levels[0].line_bytes / min(found.vector_bytes, found.levels[0].line_bytes)
    asked = [plan.levels[0].traffic_bytes * vectors, *(tile.traffic_bytes for tile in plan.levels[1:])]
    return {
        tile.level: float(boundary_hit_rate(above, tile.traffic_bytes))
        for above, tile in zip(asked, plan.levels[1:], strict=False)
    }


def caches_of(found: Processor) -> Hierarchy:
    """Caches of a processor for the simulator."""
    return of_caches([(level.size_bytes, level.ways, level.line_bytes) for level in found.levels])
