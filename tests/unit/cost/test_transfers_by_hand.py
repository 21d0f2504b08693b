"""Textbook collectives against hand numbers, with latencies, in one domain and across domains."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.cost.collective import all_to_all_s, ring_all_gather_s, ring_broadcast_s, ring_exchange_s, ring_transfer_s
from steptime.num import Num

US = 1e-6
RATES: dict[str, Num] = {"fast_Bps": 2e9, "slow_Bps": 1e9, "fast_latency_s": US, "slow_latency_s": 10 * US}


@pytest.mark.parametrize(
    ("ranks", "inside", "rates", "expected_us"),
    [
        (8, 4, {}, 500 + 10 + 6),  # 1 MB at 2 GB/s inside, at 4 x 1 GB/s between; one border, six links inside
        (8, 2, {"slow_Bps": 0.1e9}, 5000 + 3 * 10 + 4),  # the borders set the pace
        (4, 1, {"fast_Bps": 1.0}, 1000 + 3 * 10),  # nobody has a neighbour inside
        (4, 4, {"slow_Bps": 1.0}, 500 + 3),  # nor here between
    ],
)
def test_a_trip_around_the_ring(ranks: int, inside: int, rates: dict[str, Any], expected_us: float) -> None:
    assert ring_transfer_s(1e6, ranks, inside, **RATES | rates) == pytest.approx(expected_us * US, rel=1e-12)
    assert ring_transfer_s(0.0, ranks, inside, **RATES | rates) == 0


def test_what_goes_around_is_the_whole_or_all_but_ones_own() -> None:
    assert ring_broadcast_s(1e6, 8, 4, **RATES) == pytest.approx(516 * US)
    assert ring_all_gather_s(1e6, 8, 4, **RATES) == pytest.approx((7 / 8 * 500 + 16) * US)
    assert ring_broadcast_s(1e6, 1, 1, **RATES) == ring_all_gather_s(1e6, 1, 1, **RATES) == 0


@pytest.mark.parametrize(
    ("ranks", "inside", "slow_Bps", "expected_us"),
    [(8, 4, 1e9, 500 + 3 + 40), (8, 4, 2e9, 250 + 43), (8, 8, 1.0, 437.5 + 7), (8, 1, 1e9, 875 + 70)],
)
def test_every_rank_sends_a_part_to_each_other(ranks: int, inside: int, slow_Bps: float, expected_us: float) -> None:
    """Parts of 125 kB: to three others inside, 187.5 us; to four in the other domain; a latency for each of seven."""
    times = all_to_all_s(1e6, ranks, inside, **RATES | {"slow_Bps": slow_Bps})
    assert times == pytest.approx(expected_us * US, rel=1e-12)
    assert all_to_all_s(0.0, ranks, inside, **RATES) == 0


@pytest.mark.parametrize(
    ("inside", "rates", "expected_us"),
    [
        (2, {}, 3 * 1010),
        (2, {"fast_Bps": 0.5e9}, 3 * 2001),
        (4, {"slow_Bps": 1.0}, 3 * 501),
        (1, {"fast_Bps": 1.0}, 3030),
    ],
)
def test_blocks_visit_all_ranks_at_the_pace_of_the_slowest_link(
    inside: int, rates: dict[str, Any], expected_us: float
) -> None:
    assert ring_exchange_s(1e6, 4, inside, **RATES | rates) == pytest.approx(expected_us * US, rel=1e-12)
    assert ring_exchange_s(0.0, 4, inside, **RATES | rates) == 0
