"""Tiles of a product at every level: what fits, what is best, next to the bound."""

from __future__ import annotations

import itertools

import pytest

from steptime.errors import UserError
from steptime.hardware import load_device
from steptime_lab.compress import compressed, training
from steptime_lab.cost import tiling
from steptime_lab.hierarchy.tiles import (
    USABLE,
    Memory,
    gpu_levels,
    planned,
    product_hit_rates,
    tiles_on_device,
    tiles_on_processor,
)


def test_the_search_finds_the_fewest_words_of_all_tiles_that_fit() -> None:
    level = Memory(name="a", below="b", strip_words=300, depth=2)
    for shape in ((40, 60, 16), (7, 64, 9), (33, 33, 33)):
        (tile,) = planned(shape, [level], dtype="fp32", machine="one").levels
        every = [
            float(tiling.tile_traffic_words(*shape, rows, columns, 1)) * 4
            for rows, columns in itertools.product(range(1, shape[0] + 1), range(1, shape[1] + 1))
            if rows * columns + 2 * (rows + columns) <= 300
        ]
        assert tile.traffic_bytes == min(every)
        assert tile.rows * tile.columns + 2 * (tile.rows + tile.columns) <= 300


@pytest.mark.each("name", ["zen4", "cascade-lake", "sapphire-rapids"])
def test_tiles_of_a_core_fit_nest_and_stay_above_the_bound(name: str) -> None:
    plan = tiles_on_processor((2048, 2048, 2048), name, "fp32")
    for inner, outer in itertools.pairwise(plan.levels):
        assert outer.rows % inner.rows == 0 or outer.rows == 2048
        assert outer.traffic_bytes <= inner.traffic_bytes and outer.intensity >= inner.intensity
    assert all(tile.traffic_bytes >= tile.bound_bytes for tile in plan.levels)
    assert plan.naive_bytes > plan.levels[0].traffic_bytes
    assert list(product_hit_rates((2048, 2048, 2048), name)) == ["L1", "L2", "L3"]


def test_matrix_units_share_registers_and_blocks_keep_to_their_threads() -> None:
    h100, a100 = load_device("h100-sxm"), load_device("a100-sxm-80gb")
    assert gpu_levels(h100, "bf16")[0].strip_words == USABLE * 255 * 128, "four warps fetch operands together"
    assert gpu_levels(a100, "bf16")[0].strip_words == USABLE * 255 * 32
    assert gpu_levels(a100, "fp32")[0].strip_words == USABLE * 255
    thread, block, _ = tiles_on_device((4096, 4096, 4096), a100, "fp32").levels
    assert thread.rows * thread.columns + thread.rows + thread.columns <= USABLE * 255
    assert block.rows * block.columns / (thread.rows * thread.columns) <= 1024
    assert tiles_on_device((4096, 4096, 4096), h100, "bf16").limited_by == "compute"
    assert tiles_on_device((64, 64, 65536), h100, "bf16").limited_by in ("memory", "shared memory")


def test_narrow_weights_pay_while_weights_are_read_and_units_pay_while_computing() -> None:
    h100 = load_device("h100-sxm")
    one, many = ({row.scheme: row for row in compressed(tokens, 4096, 4096, h100)} for tokens in (1, 16384))
    assert one["int8 weights, per channel"].pays and not many["int8 weights, per channel"].pays
    assert many["int8 both, per channel and token"].speedup == pytest.approx(1.8, abs=0.2)
    assert one["int8 weights, per channel"].weight_bytes == 4096 * 4096 + 2 * 4096
    assert one["2:4 sparse, 16 bits"].weight_bytes == 4096 * 4096 * (2 + 0.25) / 2
    assert one["NF4, two levels of scales"].weight_bytes == pytest.approx(4096 * 4096 * 4.126953125 / 8)
    v100 = {row.scheme: row for row in compressed(64, 4096, 4096, load_device("v100-sxm2-16gb"))}
    assert v100["2:4 sparse, 16 bits"].time_s is None and v100["int8 both, scale per tensor"].why.startswith("no rate")
    with pytest.raises(UserError, match="tokens: 0"):
        compressed(0, 1, 1, h100)


def test_narrow_gradients_pay_below_the_break_even_bandwidth_alone() -> None:
    h100 = load_device("h100-sxm")
    even = training(64, 4096, 4096, h100, ranks=8, link_Bps=1e9).break_even_Bps
    for factor, pays in ((0.9, True), (1.1, False)):
        found = training(64, 4096, 4096, h100, ranks=8, link_Bps=factor * even)
        assert (found.gradient_narrow_s < found.gradient_wide_s) is pays
