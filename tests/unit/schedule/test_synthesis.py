"""The schedule search: the exact optimum of tiny pipelines, bounds that hold, named schedules that are no faster."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from exact_schedule import least_span_s as exact_s
from pipelines import UNEQUAL

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, Pipeline, Times
from steptime.simulation.least_span import least_span_s
from steptime.simulation.legality import check
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.shop import LEAST, PLACEMENTS, Habits, Shop, listed, shop_of
from steptime.simulation.simulate import Durations, simulate
from steptime.simulation.synthesis import (
    Exhausted,
    Interrupted,
    ProvedOptimal,
    Synthesis,
    TimeLimit,
    durations_of,
    named_tables,
    synthesised,
)

SIZES = ((2, 2), (2, 3), (2, 4), (3, 2), (3, 3))


def drawn(random: np.random.Generator, stages: int) -> Durations:
    forward, inputs, weights = random.choice([0.5, 0.8, 1.0, 1.3, 2.0], (3, stages))
    return Durations(
        forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights,
        message_s=float(random.choice([0.0, 0.1, 0.5])),
    )  # fmt: skip


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("case", range(32))
def test_the_least_span_of_tiny_pipelines(case: int) -> None:
    """Unequal stages, messages, little memory, one chunk and two: as short as the mixed-integer program says."""
    random = np.random.default_rng(case)
    chunks = int(random.choice([1, 1, 2]))
    ranks, m = SIZES[random.integers(len(SIZES))] if chunks == 1 else (2, 2)
    durations, limit = drawn(random, ranks * chunks), int(random.integers(1, m + 1))
    found = synthesised(Pipeline(ranks=ranks, chunks=chunks, micro_batches=m, memory_limit=limit), durations,
                        effort=300_000)  # fmt: skip
    seconds = dict(zip("FIW", (durations.forward_s, durations.input_gradient_s, durations.weight_gradient_s),
                       strict=True))  # fmt: skip
    least_s = min(
        exact_s(each.stages(ranks), m, seconds, durations.message_s, limit * chunks)
        for each in PLACEMENTS if each.chunks == chunks
    )  # fmt: skip
    assert found.span_s == pytest.approx(least_s, rel=1e-5)
    assert found.bound_s <= least_s * (1 + 1e-5)


def replayed(found: Synthesis, durations: Durations, chunks: int, deferred: float) -> None:
    """The table is legal, and its span and memory are those of the simulator."""
    check(found.table)
    played = simulate(found.table, durations)
    assert played.rank_span_s.max() == pytest.approx(found.span_s)
    held = memory_replay(played, Footprint(activation_bytes=1 / chunks, deferred_bytes=deferred / chunks)).peak_bytes
    assert held == pytest.approx(np.array(found.held))


@pytest.mark.quick("2-times0", "1-times4")
@pytest.mark.parametrize("times", [*UNEQUAL, Times(input_gradient_s=1.1, weight_gradient_s=0.6, message_s=0.2)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_no_named_schedule_that_fits_is_faster(times: Times, chunks: int) -> None:
    beaten = 0
    for (ranks, m), share in product(((2, 4), (4, 8), (3, 7), (6, 12)), (0.5, 1.0, 2.0, inf)):
        pipeline = Pipeline(
            ranks=ranks, chunks=chunks, micro_batches=m, times=times, memory_limit=max(1, share * ranks)
        )
        found, durations = synthesised(pipeline, effort=50_000), durations_of(pipeline)
        replayed(found, durations, chunks, 1.0)
        assert max(found.held) <= pipeline.memory_limit * (1 + 1e-9) and found.bound_s <= found.span_s
        for schedule, table in named_tables(pipeline, pipeline.memory_limit):
            played = simulate(table, durations)
            held = memory_replay(played, Footprint(activation_bytes=1 / chunks, deferred_bytes=1 / chunks)).peak_bytes
            if schedule.copies == 1 and held.max() <= pipeline.memory_limit * (1 + 1e-9):
                assert found.span_s <= played.rank_span_s.max() * (1 + 1e-9), schedule.name
                beaten += found.span_s < played.rank_span_s.max() * (1 - 1e-9)
    assert beaten > 20


def shop_for(random: np.random.Generator, limit: float, deferred: float) -> Shop:
    placement = PLACEMENTS[random.integers(len(PLACEMENTS))]
    ranks, m = int(random.integers(1, 7)), int(random.integers(1, 13))
    seconds = random.choice([0.0, 0.2, 1.0, 1.5, 3.0], (3, ranks * placement.chunks))
    seconds[0] += 0.1
    limits = np.maximum(limit * random.choice([0.5, 1.0, 1.5], ranks), 1.0).tolist()
    message_s = random.choice([0.0, 0.1, 1.0], (ranks, ranks))
    return shop_of(placement, m, seconds, message_s, limits, deferred)


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("deferred", [1.0, 0.5, 0.0])
def test_no_order_beats_the_bound(deferred: float) -> None:
    """Orders by rules of thumb of random pipelines; each keeps its memory, and some are as short as the bound."""
    random, reached = np.random.default_rng(7), 0
    for limit in (1, 1.5, 2, 3, 6, 20):
        for _ in range(15):
            shop = shop_for(random, limit, deferred)
            bound_s = least_span_s(shop)
            for lead, patience, backward, deep in product((0.5, 1, 99), (0, 1), (False, True), (False, True)):
                orders = listed(shop, Habits(lead, backward, deep, patience))
                ends = shop.ends_s(orders)
                assert ends is not None and all(shop.fits(order, rank) for rank, order in enumerate(orders))
                assert max(held / most for held, most in zip(shop.held(orders), shop.limit, strict=True)) <= 1 + 1e-6
                span_s = shop.span_s(orders, ends)
                assert bound_s <= span_s * (1 + LEAST)
                reached += span_s <= bound_s * (1 + LEAST)
    assert reached > 50


def test_bounds_by_hand() -> None:
    """Four ranks, eight micro-batches, F = I = W = 1: the bubble of ZB-H1 is 3, more memory has none, less has more."""

    def bound_s(limit: float, message_s: float = 0.0) -> float:
        return least_span_s(shop_of(PLACEMENTS[0], 8, np.ones((3, 4)), np.full((4, 4), message_s), [limit] * 4, 1.0))

    assert bound_s(4) == 24 + 3 and bound_s(7) == bound_s(20) == 24
    assert bound_s(1) == 8 * (4 + 4 + 1)
    # With messages of a half the first gradient comes at 4 + 3 + 3, six more forward passes fit before it; the last
    # forward pass comes back after 4 + 4 + 3, with W 12, in which four micro-batches take 1 + 8: 27 + 3 + 3.
    assert bound_s(4, 0.5) == 24 + (10 - 4) + (12 - 9)


def test_less_held_by_weight_gradients_and_memory_by_rank() -> None:
    pipeline = Pipeline(ranks=4, micro_batches=12, times=Times(weight_gradient_s=1.5, message_s=0.1))
    limits = np.array([4.0, 3.0, 2.0, 1.5])
    spans_s = []
    for deferred in (1.0, 0.5, 0.0):
        found = synthesised(pipeline, memory_limit=limits, deferred=deferred, effort=300_000)
        replayed(found, durations_of(pipeline), 1, deferred)
        assert (np.array(found.held) <= limits + 1e-6).all()
        spans_s.append(found.span_s)
    assert spans_s[0] > spans_s[1] > spans_s[2]


def test_why_it_stops() -> None:
    easy, hard = Pipeline(ranks=4, micro_batches=8), Pipeline(ranks=4, chunks=2, micro_batches=9, memory_limit=3)
    proved = synthesised(easy)
    assert isinstance(proved.stop, ProvedOptimal) and proved.gap <= 1e-9
    assert isinstance(synthesised(hard, effort=30_000).stop, Exhausted)
    limited = synthesised(hard, seconds=0.05)
    assert limited.stop == TimeLimit(0.05)

    def pressed(passes: int, span_s: float, bound_s: float) -> None:
        assert span_s >= bound_s
        if passes > 20_000:
            raise KeyboardInterrupt

    stopped = synthesised(hard, progress=pressed)
    assert isinstance(stopped.stop, Interrupted) and 20_000 < stopped.stop.passes < 100_000
    replayed(stopped, durations_of(hard), 2, 1.0)


def test_the_same_search_finds_the_same_and_more_effort_is_no_slower() -> None:
    hard = Pipeline(ranks=4, chunks=2, micro_batches=9, memory_limit=3)
    one, again, other = (synthesised(hard, effort=100_000, seed=seed) for seed in (1, 1, 2))
    assert [one.table.of_rank(rank) for rank in range(4)] == [again.table.of_rank(rank) for rank in range(4)]
    assert one.span_s == again.span_s and other.bound_s == one.bound_s
    harder = Pipeline(ranks=4, micro_batches=8, memory_limit=3, times=Times(weight_gradient_s=0.6, message_s=0.1))
    spans_s = [synthesised(harder, effort=effort).span_s for effort in (5_000, 1_000_000)]
    assert spans_s[1] < spans_s[0]


def test_the_row_of_the_registry() -> None:
    for limit in (2, 4, inf):
        times = Times(weight_gradient_s=0.5, message_s=0.1)
        table = SCHEDULES["searched"].actions(4, 1, 8, memory_limit=limit, times=times)
        durations = durations_of(Pipeline(ranks=4, micro_batches=8, times=times))
        other = SCHEDULES["zb-2p"].actions(4, 1, 8, memory_limit=limit, times=times)
        assert simulate(table, durations).rank_span_s.max() <= simulate(other, durations).rank_span_s.max() + 1e-9


@pytest.mark.parametrize(("given", "message"), [
    ({"memory_limit": 0.5}, "a memory limit of 0.5 micro-batches on rank 0"),
    ({"memory_limit": np.array([2.0, np.nan])}, "a memory limit of nan micro-batches on rank 1"),
    ({"memory_limit": np.ones(3)}, "memory limits of 3 ranks"),
    ({"durations": Durations(forward_s=-1.0)}, "forward_s is not a time: -1.0"),
    ({"durations": Durations(forward_s=1.0, weight_gradient_s=np.nan)}, "weight_gradient_s is not a time: nan"),
    ({"durations": Durations(forward_s=1.0, message_s=-0.5)}, "message_s is not a time: -0.5"),
    ({"durations": Durations(forward_s=np.ones(3))}, r"forward_s has the shape \(3,\)"),
    ({"durations": Durations(forward_s=0.0)}, "a forward pass of 0 s"),
    ({"deferred": 1.5}, "deferred is no share: 1.5"),
    ({"seconds": 0.0}, "a search of 0 seconds"),
])  # fmt: skip
def test_what_is_refused(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        synthesised(Pipeline(ranks=2, micro_batches=4), **given)


def test_more_chunks_are_refused() -> None:
    with pytest.raises(UserError, match="searched requires 1 or 2 chunks; got 2 ranks, 3 chunks"):
        synthesised(Pipeline(ranks=2, chunks=3, micro_batches=4))
    with pytest.raises(UserError, match="memory for the activations of one micro-batch"):
        SCHEDULES["searched"].actions(4, 1, 8, memory_limit=0.5)
