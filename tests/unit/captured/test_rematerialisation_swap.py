"""Waits and bytes of swapping are those drawn by hand; the choice of places equals the best of all on small chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime.captured.fit.layout import schedule_of
from steptime.captured.graph.segments import Checkpoint
from steptime.captured.rematerialisation.chain import Chain, Infeasible, Segment, keep_all, simulate
from steptime.captured.rematerialisation.swap import (
    HostLink,
    Place,
    SwapSolution,
    bound_s,
    choose_places,
    least_bytes,
    try_all,
    weigh_places,
)
from steptime.errors import FieldError

K, R, S, I = Place.KEEP, Place.RECOMPUTE, Place.SWAP, Place.SWAP_INPUT  # noqa: E741
ONE = Segment(forward_s=1, backward_s=2, input_bytes=1, saved_bytes=10)
FOUR = Chain(segments=(ONE,) * 4, output_bytes=1)


def uneven(count: int, seed: int, *, same: bool = False) -> Chain:
    draw = np.random.default_rng(seed).integers
    segments = [
        Segment(
            forward_s=int(draw(1, 6)), backward_s=int(draw(1, 9)), input_bytes=int(draw(0, 5)),
            saved_bytes=int(draw(0, 9)), gradient_bytes=int(draw(0, 4)), forward_transient_bytes=int(draw(0, 5)),
            saving_transient_bytes=int(draw(0, 4)), backward_transient_bytes=int(draw(0, 5)),
            output_in_backward=bool(draw(2)),
        )
        for _ in range(count)
    ]  # fmt: skip
    if same:
        segments = segments[:1] * count
    return Chain(segments=tuple(segments), output_bytes=int(draw(0, 4)), output_gradient_bytes=int(draw(0, 4)))


def test_what_goes_out_behind_compute_is_free():
    # Segment 0 sends 10 bytes from 1 s on and is back before 4 + 6 s; segment 1 sends 11 bytes after it.
    found = weigh_places(FOUR, (S, S, K, K), HostLink(out_Bps=10, in_Bps=10))
    assert (found.time_s, found.stall_s, found.moved_bytes) == (12, 0, 21)


def test_compute_waits_for_what_is_not_back():
    # Out 1 s to 11 s at 1 B/s, in 11 s to 13.5 s at 4 B/s; its backward could begin at 4 + 6 = 10 s.
    found = weigh_places(FOUR, (S, K, K, K), HostLink(out_Bps=1, in_Bps=4))
    assert (found.time_s, found.stall_s) == (15.5, 3.5)


def test_compute_waits_for_room():
    # Forward 3 needs 1 + 10 + 11 + 11 + 1 + 11 = 45 bytes, 35 without segment 0, which leaves from 1 s to 6 s: a wait
    # of 3 s. Backward 1 could begin at 11 s; its 11 bytes leave from 6 s to 11.5 s and are back 0.011 s later.
    found = weigh_places(FOUR, (S, S, K, K), HostLink(out_Bps=2, in_Bps=1000), limit_bytes=35)
    assert found.fits
    assert found.peak_bytes <= 35
    assert found.stall_s == pytest.approx(3 + 0.511)
    alone = weigh_places(FOUR, (S, K, K, K), HostLink(out_Bps=2, in_Bps=1000), limit_bytes=35)
    assert (alone.time_s, alone.stall_s) == (15, 3)
    assert not weigh_places(FOUR, (K, K, K, K), HostLink(out_Bps=2, in_Bps=1000), limit_bytes=35).fits
    assert not weigh_places(FOUR, (S, S, K, K), HostLink(out_Bps=2, in_Bps=1000), limit_bytes=23).fits


def test_what_comes_back_early_must_fit_beside_every_later_peak():
    # With 23 bytes, one saved segment fits beside the running one; each is back only after the one before it is done.
    link = HostLink(out_Bps=1e9, in_Bps=10)
    tight = weigh_places(FOUR, (S, S, S, K), link, limit_bytes=13)
    roomy = weigh_places(FOUR, (S, S, S, K), link)
    assert tight.fits
    assert roomy.stall_s == pytest.approx(0, abs=1e-6)
    assert tight.stall_s == pytest.approx(1.1 + 1.1 + 1.0)


def test_an_input_can_leave_where_the_segment_runs_again():
    link = HostLink(out_Bps=1e9, in_Bps=1e9)
    found = weigh_places(FOUR, (R, I, I, K), link)
    assert found.moved_bytes == 2
    assert found.recomputed_s == 3
    assert found.time_s == pytest.approx(15)


@pytest.mark.each("seed", range(20))
def test_without_transfers_the_bytes_and_seconds_are_those_of_the_simulator(seed):
    chain = uneven(5, seed)
    again = np.random.default_rng(seed).integers(2, size=5).astype(bool)
    ours = weigh_places(chain, [R if one else K for one in again], HostLink(out_Bps=1, in_Bps=1))
    tree = tuple(Checkpoint((i,)) if one else i for i, one in enumerate(again))
    theirs = simulate(chain, schedule_of(tree))
    assert (ours.peak_bytes, ours.time_s) == (theirs.peak_bytes, theirs.time_s)
    assert ours.stall_s == 0


@pytest.mark.each("same", [True, False])
@pytest.mark.each("seed", range(6))
def test_the_choice_is_that_of_trying_all(seed, same, monkeypatch):
    monkeypatch.setattr("steptime.captured.rematerialisation.swap.ALWAYS_TRIED", 0)
    chain = uneven(3 + seed % 4, seed, same=same)
    most, least = simulate(chain, keep_all(len(chain))).peak_bytes, least_bytes(chain)
    link = HostLink(out_Bps=1 + seed % 4, in_Bps=1 + seed % 3)
    for limit in (least, (2 * least + most) / 3, (least + 2 * most) / 3):
        ours, best = choose_places(chain, limit, link), try_all(chain, limit, link)
        assert isinstance(ours, SwapSolution)
        assert isinstance(best, SwapSolution)
        assert ours.best.peak_bytes <= limit * (1 + 1e-9)
        assert ours.best.time_s == pytest.approx(best.best.time_s)
        assert bound_s(chain, link, limit) <= best.best.time_s * (1 + 1e-12)
    found = choose_places(chain, least - 1, link)
    assert isinstance(found, Infeasible)
    assert found.least_bytes == least


@pytest.mark.slow
def test_the_choice_on_a_long_chain_is_proved_good():
    segment = replace(ONE, input_bytes=2, saved_bytes=30, gradient_bytes=2, backward_transient_bytes=8)
    chain = Chain(segments=(segment,) * 48)
    limit = 0.4 * simulate(chain, keep_all(48)).peak_bytes
    slow, fast = (choose_places(chain, limit, HostLink(out_Bps=rate, in_Bps=rate)) for rate in (4, 40))
    assert isinstance(slow, SwapSolution)
    assert isinstance(fast, SwapSolution)
    assert slow.gap < 0.02
    assert fast.gap < 1e-9
    assert fast.best.time_s == chain.base_s
    assert {Place.SWAP, Place.RECOMPUTE, Place.KEEP} == set(slow.best.places)


def test_the_bound_takes_the_cheaper_of_waiting_and_computing_again():
    # 44 bytes live when the last backward begins, less 3 s of transfers; 0.1 s per byte to compute again.
    assert bound_s(FOUR, HostLink(out_Bps=2, in_Bps=2), 35) == pytest.approx(12 + (44 - 35 - 6) * 0.1)
    assert bound_s(FOUR, HostLink(out_Bps=11, in_Bps=11), 5) == pytest.approx(12 + (44 - 5 - 33) / 11)


def test_input_that_cannot_be_is_refused():
    link = HostLink(out_Bps=1, in_Bps=1)
    with pytest.raises(FieldError, match="in_Bps"):
        HostLink(out_Bps=1, in_Bps=0)
    with pytest.raises(FieldError, match="places"):
        weigh_places(FOUR, (K,), link)
    with pytest.raises(FieldError, match="no swap"):
        choose_places(FOUR, 20, link, allowed=(K, R))
    with pytest.raises(FieldError, match="at most 10"):
        try_all(Chain(segments=(ONE,) * 11), 20, link)
