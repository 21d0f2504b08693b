"""Time models of kernels against numbers that can be checked by hand, every coefficient at work."""

from __future__ import annotations

import pytest

from steptime.cost.attention import tiled_attention_s
from steptime.cost.experts import Exchange, exchange_s
from steptime.cost.memory_bound import memory_bound_s

US = 1e-6
TILED = {
    "batch": 3, "heads": 8, "kv_heads": 2, "queries": 24, "keys": 96, "causal": 0, "window": 0, "pair_flops": 512,
    "moved_bytes": 1e6, "matrix_flops_per_s": 1e12, "vector_flops_per_s": 1e11, "memory_Bps": 1e10, "sm_count": 4,
    "launch_s": US, "efficiency": 0.5, "softmax_flops": 20, "memory_efficiency": 0.5, "tail": 1.0, "overlap": 1,
    "fill_keys": 4, "window_keys": 0, "packing": 1, "serial_passes": 1, "tile_rows": 128,
}  # fmt: skip


def test_few_queries_of_a_group_share_a_tile() -> None:
    """4 heads of 24 queries fit one tile of 128: 6 tiles of 24 remain, 2 rounds of 4 processors for 1.5."""
    pair_s = 512 / 0.5e12 + 20 / 1e11
    compute_s = 6 * 128 * (96 + 4) * pair_s * 2 / 1.5
    memory_s = 1e6 / 5e9
    assert tiled_attention_s(**TILED) == pytest.approx(US + compute_s + 2 * memory_s)
    apart = compute_s * 24 / 6 * 1.5 / 2
    assert tiled_attention_s(**TILED | {"packing": 0, "serial_passes": 0}) == pytest.approx(US + apart + memory_s)


def test_an_operator_half_of_whose_bytes_are_in_the_cache() -> None:
    """Moved bytes as many as the cache's share holds: half at 0.8, half at 3 times the bandwidth."""
    moved = 4e6 + 100 * 1e3 + 2 * 5e5
    device_s = 5 * US + moved / (1e12 * (0.8 + 3.0) / 2) + 3 * 1e7 / 1e13
    seconds = memory_bound_s(4e6, 100, 5e5, 1e7, 1e12, 8e6, 1e13, 5 * US, 2 * US, 0.8, 3.0, 0.5, 1e3, 2, 3, 1e9)
    assert seconds == pytest.approx((device_s**4 + (2 * US) ** 4) ** 0.25)


@pytest.mark.parametrize(("way", "messages"), [("dispatch", 2), ("combine", 100 * 4 / 64)])
def test_exchange_between_domains_is_bound_by_the_slower_of_both(way: str, messages: float) -> None:
    """128 experts on 100 processors keep 64 of these busy, two experts each; half of the messages leave the domain."""
    one = Exchange(
        start_s=10 * US, expert_s=0.1 * US, Bps=1e11, message_s=US, message_Bps=1e10, blend=1.0, outer_start_s=5 * US,
        peer_s=2 * US, outer_Bps=1e12,
    )  # fmt: skip
    start_s, moved = (10 + 12.8 + 5 + 2) * US, 100 * 4 * 1e4
    inner_s = moved / 1e11 + messages * (US + 1e4 / 1e10)
    assert exchange_s(way, 100, 4, 128, 1e4, 16, 8, 100, one) == pytest.approx(start_s + inner_s)
    slow = Exchange(start_s=0.0, expert_s=0.0, Bps=1e11, message_s=0.0, message_Bps=1e12, outer_Bps=1e9)
    assert exchange_s(way, 100, 4, 128, 1e4, 16, 8, 100, slow) == pytest.approx(0.5 * moved / 1e9)
    near = exchange_s(way, 100, 4, 128, 1e4, 8, 8, 100, one)
    assert near == pytest.approx(start_s - 7 * US + inner_s)
