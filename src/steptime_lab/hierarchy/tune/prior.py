"""Cost of a schedule in closed form (cycles of the inner loop, traffic of each level, copies), and its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.num import Array
from steptime_lab.cost import register_tile, tiling
from steptime_lab.cost.cache import rows_that_stay
from steptime_lab.hierarchy.tiles import USABLE
from steptime_lab.hierarchy.tune.space import WORD, Core, Schedule, block_columns

PARTS: Final = ("steps", "tiles", "results", "L1 fills", "L2 fills", "L3 fills", "copies of a", "copies of b", "split")
"""Parts of the cycles of a product."""
WEIGHTS: Final = (1.0, 12.0, 1.0, 0.3, 0.3, 0.3, 1.0, 1.0, 0.3)
"""Share of each part that adds to the time; the rest overlaps with the inner loop. For tiles: cycles of one tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted cost of schedules of one product, one row each."""

    schedules: tuple[Schedule, ...]
    parts: Array
    """Cycles by part, unweighted."""
    features: Array
    traffic_bytes: Array
    """Bytes read into registers and into the first, second and third level."""
    cycles: Array

    def order(self) -> list[int]:
        """Indices of the schedules, the fastest first."""
        return [int(place) for place in np.argsort(self.cycles, kind="stable")]


def predicted(
    shape: tuple[int, int, int], core: Core, schedules: Sequence[Schedule], weights: Sequence[float] = WEIGHTS
) -> Predicted:
    """Predict the cost of schedules of a product on a core.

    >>> from steptime_lab.hierarchy.caches import processor
    >>> from steptime_lab.hierarchy.tune.space import core_of, space
    >>> found = predicted((512, 512, 512), core_of(processor("zen4")), space())
    >>> bool(found.cycles.min() > 512**3 / 16)
    True
    """
    m, n, k = shape
    rows, vectors, block_rows, depth = (
        np.array([getattr(s, name) for s in schedules], dtype=np.int64)
        for name in ("rows", "vectors", "block_rows", "block_depth")
    )
    packs_a = np.array([s.packing == "both" for s in schedules])
    packs_b = np.array([s.packing != "none" for s in schedules])
    panel = np.array([block_columns(s, n, core) for s in schedules], dtype=np.int64)
    depth, width = np.minimum(depth, k), vectors * core.lanes
    strips = _Strips(rows=rows, width=width, depth=depth, block_rows=np.minimum(block_rows, m))
    words = _traffic(shape, core, strips, panel, packs_a, packs_b)
    rates, rounds, tiles = core.rates, -(-k // depth), (-(-m // rows)) * (-(-n // width))
    step = register_tile.step_cycles(
        rows, vectors, core.processor.vector_registers, rates.fma_per_clock, rates.fma_latency, rates.loads_per_clock
    )
    fills = [moved * WORD / rate for moved, rate in zip(words[1:], rates.fill_bytes_per_clock, strict=False)]
    edges_a, edges_b = (m % rows) * k, (n % width) * k
    aligned = n * WORD % core.processor.levels[0].line_bytes == 0
    parts = np.stack(
        [
            register_tile.tile_steps(m, n, k, rows, width) * step,
            tiles * rounds,
            (2 * rounds - 1) * m * n / core.lanes / rates.loads_per_clock,
            *fills,
            np.where(packs_a, m * k, edges_a) * (-(-n // panel)),
            2 * np.where(packs_b, n * k, edges_b) / core.lanes / rates.loads_per_clock,
            np.where(packs_b | aligned, 0.0, tiles * k * vectors / rates.loads_per_clock),
        ],
        axis=1,
    ).astype(float)
    return Predicted(
        schedules=tuple(schedules),
        parts=parts,
        features=_features(shape, core, strips, parts, np.stack([packs_a, packs_b, vectors], axis=1)),
        traffic_bytes=np.stack(words, axis=1) * float(WORD),
        cycles=parts @ np.asarray(weights),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strips:
    rows: Array
    width: Array
    depth: Array
    block_rows: Array


def _traffic(
    shape: tuple[int, int, int], core: Core, s: _Strips, panel: Array, packs_a: Array, packs_b: Array
) -> list[Array]:
    """Words read into registers and into each cache; an evicted share is read as often as by the level inside."""
    m, n, k = shape
    levels = core.processor.levels
    inside = tiling.tile_reads_words(m, n, k, s.rows, s.width)
    out = [inside * np.ones(len(s.rows))]
    blocks = (s.block_rows, np.full_like(s.block_rows, min(m, 1 << 30)))
    kept = [
        (s.block_rows, s.width, (s.rows + s.width) * s.depth),
        (s.block_rows, panel, s.block_rows * s.depth + s.width * s.depth),
        (blocks[1], panel, panel * s.depth),
    ]
    for level, (rows, columns, held) in zip(levels, kept, strict=False):
        lost = register_tile.lost_share(held * WORD, USABLE * level.size_bytes)
        for stride, needed, packed in ((n * WORD, s.depth, packs_b), (k * WORD, s.rows, packs_a)):
            if stride % level.line_bytes == 0:
                sets = level.size_bytes // level.line_bytes // level.ways
                stay = rows_that_stay(stride, sets, level.ways, level.line_bytes)
                lost = np.maximum(lost, np.where(packed, 0.0, register_tile.lost_share(needed, stay)))
        best = tiling.tile_reads_words(m, n, k, np.minimum(rows, m), np.minimum(columns, n))
        out.append(best + lost * np.maximum(out[-1] - best, 0))
    return out


def _features(shape: tuple[int, int, int], core: Core, s: _Strips, parts: Array, choices: Array) -> Array:
    """Features for the learned part of the cost model: the shape in absolute sizes, other sizes as shares."""
    m, n, k = shape
    ones, first, second = np.ones(len(parts)), core.processor.levels[0].size_bytes, core.processor.levels[-1].size_bytes
    padded = [m / (-(-m // s.rows) * s.rows), n / (-(-n // s.width) * s.width)]
    tail = (k % s.depth) / s.depth
    room = [np.log2(s.depth * s.width * WORD / first), np.log2(s.depth * s.block_rows * WORD / second)]
    stride = [ones * np.log2(x & -x) for x in (n, k)]
    shares = np.log1p(parts / parts[:, :1] * 100)
    sizes = [ones * np.log2(x) for x in (m, n, k)]
    own = [s.rows, s.width, s.rows * choices[:, 2], s.depth, s.block_rows, -(-m // s.block_rows), -(-k // s.depth)]
    return np.column_stack([*own, *padded, tail, *room, *stride, *sizes, shares, choices]).astype(float)
