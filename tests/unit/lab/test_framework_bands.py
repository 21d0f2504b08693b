"""Bands of residuals: what share of runs they hold, and whose residuals set them."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.measure.runs.bands import (
    Predicted,
    band_of,
    honest_coverage,
    slower_of,
    source_weights,
    with_slowdown,
)


def test_quantiles_hold_nine_of_ten() -> None:
    scaled = np.random.default_rng(0).normal(size=4000)
    source = np.repeat(np.arange(40), 100).astype(str)
    band = band_of(scaled, source_weights(source))
    assert (band.low, band.high) == pytest.approx((-1.645, 1.645), abs=0.1)
    assert ((scaled >= band.low) & (scaled <= band.high)).mean() == pytest.approx(0.9, abs=0.01)
    assert honest_coverage(scaled, source).mean() == pytest.approx(0.9, abs=0.02)


def test_all_sources_count_alike() -> None:
    assert source_weights(np.array(["a", "b", "a", "a", "a"])).tolist() == [0.25, 1, 0.25, 0.25, 0.25]


def test_a_source_of_many_runs_does_not_set_the_band() -> None:
    scaled = np.concatenate([np.full(5000, 9.0), np.random.default_rng(0).normal(size=2000)])
    source = np.array(["flood"] * 5000 + [f"s{i // 20}" for i in range(2000)])
    assert band_of(scaled, source_weights(source)).high < 3 < band_of(scaled, np.ones(7000)).high


def test_unknown_frameworks_are_as_much_slower_as_those_of_other_sources() -> None:
    """Three sources are predicted too fast by 10, 20 and 30 %, of which half moves with the factor."""
    source = np.repeat(["a", "b", "c"], 4)
    residual = -np.repeat([0.1, 0.2, 0.3], 4)
    predicted = Predicted(residual, np.ones(12), np.full(12, 0.5))
    everything = np.ones(12, dtype=bool)
    assert slower_of(predicted, source, everything) == pytest.approx(0.4)
    moved = with_slowdown(predicted, predicted, source, everything).residual
    assert moved[:4] == pytest.approx(-0.1 + 0.5 * np.mean([0.4, 0.6])), "the middle of the others, not of its own"
    assert moved[4:8] == pytest.approx(-0.2 + 0.5 * np.mean([0.2, 0.6]))
    told = Predicted(residual, np.ones(12), np.zeros(12))
    assert (
        slower_of(told, source, everything) == 0
        and (with_slowdown(told, predicted, source, everything).residual == residual).all()
    )
