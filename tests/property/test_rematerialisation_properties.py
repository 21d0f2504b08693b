"""Properties of rematerialisation on any chain: limits hold, more memory never costs time, claims are what runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steptime.captured.fit.layout import schedule_of
from steptime.captured.graph.segments import every, grouped
from steptime.captured.rematerialisation.chain import (
    Action,
    Chain,
    Infeasible,
    Kind,
    Schedule,
    Segment,
    Solution,
    keep_all,
    pareto,
    simulate,
    solution,
)
from steptime.captured.rematerialisation.rotor import fill, front, solve, walk
from steptime.captured.rematerialisation.swap import (
    HostLink,
    Place,
    SwapSolution,
    choose_places,
    least_bytes,
    weigh_places,
)
from suites import examples

times = st.floats(0.01, 10)


def segments(sizes: st.SearchStrategy[float]) -> st.SearchStrategy[Segment]:
    named = {field.name: sizes for field in fields(Segment) if field.name.endswith("_bytes")}
    return st.builds(Segment, forward_s=times, backward_s=times, output_in_backward=st.booleans(), **named)


def chains(sizes: st.SearchStrategy[float], longest: int = 12) -> st.SearchStrategy[Chain]:
    some = st.lists(segments(sizes), min_size=1, max_size=longest).map(tuple)
    equal = st.builds(lambda one, count: (one,) * count, segments(sizes), st.integers(1, longest))
    return st.builds(Chain, segments=st.one_of(some, equal), output_bytes=sizes, output_gradient_bytes=sizes)


whole = st.integers(0, 9)
real = st.floats(0, 1e10, allow_subnormal=False)
any_chain = st.one_of(chains(whole), chains(real))
shares = st.floats(0, 1.1)


def ends(chain: Chain) -> tuple[float, float]:
    """Least memory, and that of keeping everything."""
    everything = simulate(chain, keep_all(len(chain))).peak_bytes
    least = solve(chain, 0)
    return (least.least_bytes if isinstance(least, Infeasible) else least.peak_bytes), everything


@given(any_chain, shares)
@settings(max_examples=examples(150))
def test_no_schedule_is_over_its_limit_and_whatever_can_fit_does(chain: Chain, share: float) -> None:
    least, most = ends(chain)
    limit = share * most
    found = solve(chain, limit)
    assert isinstance(found, Infeasible) == (limit < least)
    if isinstance(found, Solution):
        assert found.peak_bytes <= limit
        assert found.time_s >= chain.base_s * (1 - 1e-12)


@given(any_chain, shares)
@settings(max_examples=examples(100))
def test_a_solution_costs_what_its_schedule_costs(chain: Chain, share: float) -> None:
    found = solve(chain, share * ends(chain)[1])
    assume(isinstance(found, Solution))
    assert found.run == simulate(chain, found.schedule)
    extra_s = sum(one.forward_s * (n - 1) for one, n in zip(chain.segments, found.run.forward_runs, strict=True))
    assert found.run.recomputed_forward_s == pytest.approx(extra_s)
    assert found.time_s == pytest.approx(chain.base_s + extra_s)


@given(any_chain, shares, st.floats(1, 2))
@settings(max_examples=examples(100))
def test_more_memory_is_never_slower_within_a_table(chain: Chain, share: float, more: float) -> None:
    table = fill(chain)
    limit = max(share * table.ends[1].peak_bytes, table.ends[0].peak_bytes)
    less, greater = table.best(limit), table.best(limit * more)
    assert isinstance(less, Solution)
    assert isinstance(greater, Solution)
    assert greater.time_s <= less.time_s * (1 + 1e-12)


@given(chains(whole), shares, st.floats(1, 2))
@settings(max_examples=examples(100))
def test_more_memory_is_never_slower_where_nothing_is_rounded(chain: Chain, share: float, more: float) -> None:
    least, most = ends(chain)
    limit = max(share * most, least)
    less, greater = solve(chain, limit), solve(chain, limit * more)
    assert isinstance(less, Solution)
    assert isinstance(greater, Solution)
    assert greater.time_s <= less.time_s * (1 + 1e-12)


@given(any_chain)
@settings(max_examples=examples(100))
def test_unlimited_memory_recomputes_nothing(chain: Chain) -> None:
    found = solve(chain, float("inf"))
    assert isinstance(found, Solution)
    assert found.run.forward_runs == (1,) * len(chain)


@given(chains(whole), st.integers(1, 12))
@settings(max_examples=examples(150))
def test_the_solver_is_never_slower_than_a_recipe_at_its_memory(chain: Chain, k: int) -> None:
    count = len(chain)
    for tree in (grouped(count, min(k, count)), every(count, 2)):
        recipe = solution(chain, schedule_of(tree))
        found = solve(chain, recipe.peak_bytes)
        assert isinstance(found, Solution)
        assert found.time_s <= recipe.time_s * (1 + 1e-12)


@given(chains(real, longest=20))
@settings(max_examples=examples(60))
def test_rounding_gives_a_period_at_most_one_slot_per_boundary(chain: Chain) -> None:
    recipe = solution(chain, schedule_of(grouped(len(chain), math.isqrt(len(chain) - 1) + 1)))
    found = solve(chain, recipe.peak_bytes * (1 + 3 * len(chain) / 400))
    assert isinstance(found, Solution)
    assert found.time_s <= recipe.time_s * (1 + 1e-9)


@given(any_chain)
@settings(max_examples=examples(60))
def test_the_front_falls_and_ends_at_both_extremes(chain: Chain) -> None:
    points = front(chain)
    least, most = ends(chain)
    assert points[0].peak_bytes == pytest.approx(least)
    assert points[-1].time_s == pytest.approx(chain.base_s)
    assert points[-1].peak_bytes <= most * (1 + 1e-12)
    for a, b in itertools.pairwise(points):
        assert a.peak_bytes < b.peak_bytes
        assert a.time_s > b.time_s


tall = st.builds(
    lambda one, peak: replace(one, forward_transient_bytes=peak), segments(whole), st.sampled_from((0, 5, 20, 40))
)


@given(st.builds(Chain, segments=st.lists(tall, min_size=3, max_size=7).map(tuple), output_bytes=whole))
@settings(max_examples=examples(100))
def test_every_entry_of_an_exact_table_is_what_its_schedule_costs(chain: Chain) -> None:
    table = fill(chain)
    assert table.exact
    for slots, claimed_s in enumerate(table.costs.left[0, -1]):
        if claimed_s < float("inf"):
            run = simulate(chain, walk(len(chain), slots, table.costs.choose))
            assert run.time_s == pytest.approx(claimed_s)
            assert run.peak_bytes <= chain.boundary_bytes[0] + slots * table.unit_bytes


def persistent(s: int, t: int) -> Iterator[Schedule]:
    """Every schedule of segments s ... t that keeps a checkpoint until its backward."""
    if s == t:
        yield (Action(Kind.SAVE, s), Action(Kind.BACKWARD, s))
        return
    for rest in persistent(s + 1, t):
        yield (Action(Kind.SAVE, s), *rest, Action(Kind.BACKWARD, s))
    for cut in range(s + 1, t + 1):
        runs = tuple(Action(Kind.FORWARD if i > s else Kind.CHECKPOINT, i) for i in range(s, cut))
        for right, left in itertools.product(persistent(cut, t), persistent(s, cut - 1)):
            yield runs + right + left


@given(chains(whole, longest=5))
@settings(max_examples=examples(80))
def test_the_front_is_that_of_all_persistent_schedules(chain: Chain) -> None:
    every = pareto(solution(chain, schedule) for schedule in persistent(0, len(chain) - 1))
    assert [one.peak_bytes for one in front(chain)] == [one.peak_bytes for one in every]
    assert [one.time_s for one in front(chain)] == pytest.approx([one.time_s for one in every])


@given(chains(whole), st.floats(0.1, 100), st.floats(0.1, 100), shares)
@settings(max_examples=examples(60))
def test_units_do_not_matter(chain: Chain, bytes_by: float, seconds_by: float, share: float) -> None:
    scaled = Chain(
        segments=tuple(
            replace(one, **{
                field.name: getattr(one, field.name) * (bytes_by if field.name.endswith("_bytes") else seconds_by)
                for field in fields(Segment) if field.name != "output_in_backward"
            })
            for one in chain.segments
        ),
        output_bytes=chain.output_bytes * bytes_by, output_gradient_bytes=chain.output_gradient_bytes * bytes_by,
    )  # fmt: skip
    for one in front(chain):
        again = simulate(scaled, one.schedule)
        assert again.peak_bytes == pytest.approx(one.peak_bytes * bytes_by)
        assert again.time_s == pytest.approx(one.time_s * seconds_by)


@given(chains(whole, longest=8), shares, st.floats(0.5, 20), st.floats(0.5, 20))
@settings(max_examples=examples(60))
def test_places_fit_their_limit_and_keep_the_bound(chain: Chain, share: float, out: float, back: float) -> None:
    link, least = HostLink(out_Bps=out, in_Bps=back), least_bytes(chain)
    limit = max(least, share * ends(chain)[1])
    found = choose_places(chain, limit, link)
    assert isinstance(found, SwapSolution)
    assert found.best.fits
    assert found.best.peak_bytes <= limit * (1 + 1e-9)
    assert chain.base_s <= found.bound_s * (1 + 1e-12)
    assert 0 <= found.gap <= 1
    assert found.best.time_s == pytest.approx(chain.base_s + found.best.recomputed_s + found.best.stall_s)


@given(chains(whole, longest=8), st.data(), st.floats(0.5, 20), st.floats(1, 4))
@settings(max_examples=examples(100))
def test_a_faster_link_never_takes_longer_without_a_limit(
    chain: Chain, data: st.DataObject, rate: float, more: float
) -> None:
    places = data.draw(st.lists(st.sampled_from(list(Place)), min_size=len(chain), max_size=len(chain)))
    slow = weigh_places(chain, places, HostLink(out_Bps=rate, in_Bps=rate))
    fast = weigh_places(chain, places, HostLink(out_Bps=rate * more, in_Bps=rate * more))
    assert fast.time_s <= slow.time_s * (1 + 1e-12)
