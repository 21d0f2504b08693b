"""Every curve of every profile over nine decades: monotone, near the roofline, alike on devices that are alike."""

from __future__ import annotations

from functools import cache

import pytest

from asymptotes import Sweep, against_alike, sweeps

MOST_OVER = 6.0
"""Times over the roofline of large sizes: narrow rows, attention backward on devices whose kernels are old."""
LEAST = 0.94
"""Boost clocks above those of the datasheet's peak (RTX 4090)."""
MOST_APART = 2.0
"""Between devices that are alike, in units of their datasheets."""
MOST_FALL = 0.05
"""What a residual of products, which ends where measurements end, may take off from one size to the next."""


@cache
def found() -> tuple[Sweep, ...]:
    return tuple(sweeps())


@pytest.mark.slow
def test_large_sizes_tend_to_the_roofline() -> None:
    far = [(s.device, s.what, s.over.max()) for s in found() if len(s.over) and s.over.max() > MOST_OVER]
    below = [(s.device, s.what, s.over.min()) for s in found() if len(s.over) and s.over.min() < LEAST]
    assert not far and not below and len(found()) > 1000


def test_times_grow_with_size() -> None:
    assert not [(s.device, s.what, s.falls) for s in found() if s.falls > (MOST_FALL if "product" in s.what else 1e-9)]


def test_devices_that_are_alike_take_alike_long() -> None:
    pairs = list(against_alike(found()))
    assert not [(ratio, one.device, other.device, one.what) for ratio, one, other in pairs if ratio > MOST_APART]
    assert len(pairs) > 300


@pytest.mark.quick(without=["alike"])
@pytest.mark.parametrize("limit", ["over", "alike"])
def test_rows_that_cost_without_end_would_be_found(limit: str) -> None:
    """What the same curves do where rows beyond the measured ones cost as much as each of those."""
    unbounded = [s for s in sweeps(bounded=False) if "norm_backward" in s.what]
    if limit == "over":
        assert max(s.over.max() for s in unbounded if len(s.over)) > 5 * MOST_OVER
    else:
        assert max(ratio for ratio, *_ in against_alike(unbounded)) > 5 * MOST_APART
