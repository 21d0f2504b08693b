"""Formulas of tiles, each against loads counted in loops or traffic of the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steptime_lab.cost import cache, tiling, warps
from steptime_lab.hierarchy.geometry import Hierarchy, hierarchy
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import Shape, panel_matmul, tiled_matmul, trace
from steptime_lab.hierarchy.warp import counted_conflicts, counted_paths, counted_sectors, warp_request

N = 16


def global_loads(kernel: str, n: int, v: int, tile: int, depth: int) -> tuple[int, int]:
    """Words that the threads of a kernel of the notes read from device memory and from shared memory, in its loops."""
    far = near = 0
    for _ in range((n // v) ** 2 if kernel != "v1" else n * n):
        if kernel == "v1":
            far += sum(2 for _ in range(n))
        elif kernel == "v1.5":
            for _ in range(v):
                far += n + sum(n for _ in range(v))
        elif kernel == "v2":
            far += sum(2 * v for _ in range(n))
        else:
            for _ in range(0, n, depth):
                far += 2 * depth * tile // (tile // v) ** 2  # what this thread fetches for its block
                near += sum(2 * v for _ in range(depth))
    return far, near


def test_reads_of_the_gpu_kernels() -> None:
    for v, tile, depth in ((2, 8, 4), (4, 16, 8)):
        counts = {name: global_loads(name, N, v, tile, depth) for name in ("v1", "v1.5", "v2", "v3")}
        assert counts["v1"][0] == tiling.naive_reads_words(N)
        assert counts["v1.5"][0] == tiling.thread_tile_reads_words(N, v)
        assert counts["v2"][0] == tiling.outer_product_reads_words(N, v)
        assert counts["v3"] == (tiling.block_tile_reads_words(N, tile), tiling.block_shared_reads_words(N, v))
        assert tiling.cooperative_loads(tile, depth, v) == 2 * depth * tile / (tile / v) ** 2


def test_register_tiles_load_what_the_formula_says() -> None:
    for v1, v2 in ((2, 4), (4, 4), (8, 2)):
        made = panel_matmul(N, (8, 8), (v1, v2), 8)
        loads = sum(int((kinds & 1 == 0).sum()) for _, kinds in made.blocks())
        stores = sum(int((kinds & 1).sum()) for _, kinds in made.blocks())
        assert (loads, stores) == (tiling.register_reads_words(N, v1, v2), tiling.register_writes_words(N))
    assert tiling.register_words(2, 4, 1) == 2 + 4 + 8


@pytest.mark.each("n, b1, b2", [(64, 16, 8), (64, 8, 8), (48, 24, 8)])
def test_panels_in_the_cache_read_n2_and_n3_over_b(n: int, b1: int, b2: int) -> None:
    made = panel_matmul(n, (b1, b2), (8, 8), 8)
    room = (b1 * n + 2 * b2 * n + b1 * b2) * 8
    done = simulate(made, hierarchy(f"{-(-room // 64) * 64}B:full"))
    words = done.levels[0].misses * 8
    assert words - n * n == pytest.approx(tiling.panel_reads_words(n, b1), rel=0.01), "the result is fetched once too"
    assert tiling.panel_words(n, b1, b2) * 8 <= room


PACKED = [(64, 8, "2KiB:8"), (64, 16, "8KiB:8"), (96, 12, "8KiB:8"), (96, 24, "32KiB:8"), (80, 8, "2KiB:full")]


@pytest.mark.each("n, b, caches", PACKED)
def test_packed_tiles_that_fit_move_2n3_over_b_and_2n2(n: int, b: int, caches: str) -> None:
    assert 3 * b * b * 8 <= hierarchy(caches).caches[0].size_bytes
    done = simulate(tiled_matmul((n, n, n), (b, b, b), 8), hierarchy(caches))
    reads = done.levels[0].misses * 8
    assert reads == pytest.approx(tiling.square_tile_reads_words(n, b), rel=0.01)
    moved = done.traffic_bytes(0) / 8
    assert moved == pytest.approx(tiling.tile_traffic_words(n, n, n, b, b, 2), rel=0.02), "but for what is dirty still"


def test_rectangles_move_what_the_formula_says() -> None:
    done = simulate(tiled_matmul((48, 64, 40), (24, 8, 8), 8), hierarchy("8KiB:full"))
    assert done.levels[0].misses * 8 == tiling.tile_traffic_words(48, 64, 40, 24, 8, 1)


def test_no_tile_is_below_the_bound_and_the_best_square_is_near_it() -> None:
    n = 512
    for words in (100, 1000, 10_000):
        b = tiling.best_square_tile(words, 1)
        assert b * b + 2 * b == pytest.approx(words)
        moved, least = 2 * n**3 / b + n * n, tiling.least_traffic_words(n, n, n, words)
        assert least <= moved and 2 * n**3 / b < 1.11 * 2 * n**3 / math.sqrt(words)
        assert tiling.hong_kung_words(n, words) <= least
        sides = np.arange(1, n + 1)
        fits = np.add.outer(sides, sides) + np.outer(sides, sides) <= words
        every = np.where(fits, n**3 / sides[:, None] + n**3 / sides[None, :], np.inf)
        assert every.min() >= 2 * n**3 / b * (1 - 1e-12), "no whole tile reads fewer words than the real square"
    assert tiling.best_cube_tile(3 * 20 * 20) == 20 and tiling.best_panel_rows(64, 64 * 24, 8) == 16


def test_unpacked_rows_of_a_power_of_two_fall_onto_few_sets_and_padding_mends_it() -> None:
    caches: Hierarchy = hierarchy("8KiB:4")
    counts = {}
    for name, leading in (("power", 128), ("padded", 128 + cache.least_padding(1024, caches.sets[0], 64) // 8)):
        made = tiled_matmul((128, 128, 32), (16, 16, 16), 8, packed=False, leading=leading)
        counts[name] = simulate(made, caches).levels[0].misses
    packed = simulate(tiled_matmul((128, 128, 32), (16, 16, 16), 8), caches).levels[0].misses
    assert cache.sets_of_stride(1024, 32, 64) == 2 and cache.rows_that_stay(1024, 32, 4, 64) == 8 < 16
    assert counts["power"] > 2.5 * packed and counts["padded"] < 1.5 * packed


def test_patterns_fetch_the_lines_of_their_closed_forms() -> None:
    def misses(pattern: str, caches: str, **shape: int) -> int:
        return simulate(trace(pattern, Shape(**shape)), hierarchy(caches)).levels[0].misses

    assert misses("stream", "4KiB:4", n=2048, passes=2) == 2 * 3 * cache.stream_misses(2048, 8, 64)
    for stride, passes in ((2, 1), (8, 1), (24, 3)):
        once = cache.strided_misses(512, 8 * stride, 64)
        held = cache.repeated_misses(once, passes, 128)
        assert misses("strided", "8KiB:full", n=512, stride=stride, passes=passes) == held
    for caches, size in (("8KiB:full", 8192), ("2KiB:full", 2048)):
        found = misses("stencil", caches, n=128)
        assert found == pytest.approx(cache.stencil_misses(128, 128, 1, 8, 64, size), rel=0.04)
    for table, lines in ((1 << 12, 256), (1 << 9, 256)):
        found = misses("gather", f"{lines * 64}B:full", n=20_000, table=table) - 20_000 // 16  # without the index
        held = lines - 20  # the index has some 20 lines among those of the last 320 loads
        assert found == pytest.approx(cache.gather_misses(20_000, table // 8, held), rel=0.05)


def test_requests_of_a_warp_are_counted_as_the_formulas_have_them() -> None:
    threads = np.arange(32)
    for stride in (0, 4, 8, 12, 16, 32, 64, 96, 128, 4096):
        for offset in (0, 4, 28):
            counted = counted_sectors(offset + threads * stride, 4)
            assert counted == warps.warp_sectors(stride, 4, offset), (stride, offset)
        if stride % 4 == 0:
            assert counted_conflicts(threads * stride) == warps.bank_conflict_ways(stride // 4)
    for pad in range(3):
        assert counted_conflicts(threads * 4 * (32 + pad)) == warps.column_conflict_ways(32, pad)
    assert counted_paths(threads // 16) == warps.divergence_factor(2) == 2
    assert warps.warp_cost_factor(8, 4, 2, 1) == (2.0, 2, 1)
    assert warp_request(256, 16).sectors == 32 and warp_request(0, 4).coalescing == 4 / 32


def test_loads_that_shared_memory_saves_and_vectors() -> None:
    assert tiling.shared_reuse_loads(128, 3) == (130, 384) and tiling.vector_loads(256, 4) == 64


def test_hit_rates_of_boundaries_are_those_of_simulated_levels() -> None:
    done = simulate(tiled_matmul((64, 64, 64), (16, 16, 16), 8), hierarchy("8KiB:8,64KiB:16"))
    first, second = done.levels
    rate = cache.boundary_hit_rate(first.fetched * 64, second.fetched * 64)
    assert rate == pytest.approx(1 - second.misses / (first.misses + first.write_back_misses))
    assert rate == pytest.approx(second.hit_rate)
