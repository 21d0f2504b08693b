"""Properties of the collective times on any sane fabric."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.cost.collective_algorithms import ALGORITHMS, Fabric, collective_s
from steptime.cost.collective_schedules import double_tree_path, log2_ceil, short_chains
from suites import examples

latency = st.floats(1e-7, 1e-4)
rate = st.floats(1e8, 1e12)
latencies = st.tuples(latency, latency, latency)
rates = st.tuples(rate, rate, rate)
fabrics = st.builds(
    Fabric,
    domain=st.just(8),
    nics=st.sampled_from((1.0, 4.0, 8.0)),
    start_s=latencies,
    hop_s=latencies,
    Bps=rates,
    own_steps=st.floats(0, 2),
    ramp_s=st.floats(0, 1e-4),
    ramp_bytes=st.floats(1e5, 1e9),
    overlap=st.floats(1, 4),
    byte_reduction=st.floats(1, 1.5),
    direct_start_s=latencies,
    direct_hop_s=latencies,
    direct_share=st.tuples(*[st.floats(0.1, 2)] * 3),
    switch_start_s=latency,
    switch_Bps=st.one_of(st.just(0.0), rate),
    outer_start_s=latencies,
    outer_hop_s=latencies,
    outer_Bps=rates,
    single_share=st.floats(0.5, 1),
    tree_hop_s=latencies,
    tree_share=st.floats(0.3, 1),
    short_chains=st.booleans(),
)
sizes = st.floats(1.0, 1e11)
groups = st.sampled_from([(2, 2), (8, 8), (4, 1), (16, 8), (64, 8), (6, 2), (512, 4)])
kinds = st.sampled_from(sorted(set(ALGORITHMS) - {"p2p"}))
elements = st.sampled_from([1, 2, 4])


@given(kinds, sizes, st.floats(1, 10), groups, fabrics, elements)
@settings(max_examples=examples(150))
def test_more_bytes_never_take_less_time(
    kind: str, size: float, more: float, group: tuple[int, int], fabric: Fabric, element: int
) -> None:
    small = collective_s(kind, size, *group, fabric, element_bytes=element)[0]
    assert collective_s(kind, size * more, *group, fabric, element_bytes=element)[0] >= small * (1 - 1e-9)


@given(kinds, sizes, st.floats(1, 10), groups, fabrics)
@settings(max_examples=examples(150))
def test_more_bandwidth_never_takes_more_time(
    kind: str, size: float, more: float, group: tuple[int, int], fabric: Fabric
) -> None:
    slow = collective_s(kind, size, *group, fabric)[0]
    for name in ("Bps", "outer_Bps"):
        rates = tuple(more * value for value in getattr(fabric, name))
        faster = collective_s(kind, size, *group, replace(fabric, **{name: rates}))[0]
        assert faster <= slow * (1 + 1e-9)
    assert collective_s(kind, size, *group, fabric, oversubscription=more)[0] >= slow * (1 - 1e-9)
    assert collective_s(kind, size, *group, fabric, groups=more)[0] >= slow * (1 - 1e-9)


@given(sizes, groups, fabrics, elements)
@settings(max_examples=examples(150))
def test_all_reduce_is_no_slower_than_its_two_phases(
    size: float, group: tuple[int, int], fabric: Fabric, element: int
) -> None:
    parts = [
        collective_s(kind, size, *group, fabric, element_bytes=element)[0] for kind in ("reduce_scatter", "all_gather")
    ]
    assert collective_s("all_reduce", size, *group, fabric, element_bytes=element)[0] <= sum(parts) * (1 + 1e-9)


@given(st.sampled_from(sorted(ALGORITHMS)), st.lists(sizes, min_size=1, max_size=5), fabrics, elements)
@settings(max_examples=examples(100))
def test_numbers_and_arrays_agree(kind: str, size: list[float], fabric: Fabric, element: int) -> None:
    pairs = [(2, 2), (2, 1)] if kind == "p2p" else [(2, 2), (16, 8), (512, 4)]
    everything = tuple(ALGORITHMS[kind])
    for ranks, inside in pairs:
        columns = np.array(size), np.full(len(size), float(ranks)), np.full(len(size), float(inside))
        many = collective_s(kind, *columns, fabric, element_bytes=element, algorithms=everything)
        for i, one in enumerate(size):
            alone = collective_s(kind, one, ranks, inside, fabric, element_bytes=element, algorithms=everything)
            assert many[0][i] == pytest.approx(alone[0], rel=1e-12)
            assert (many[1][i], many[2][i]) == alone[1:]


@given(st.sampled_from([2, 4, 8, 24, 64, 72]), st.sampled_from([1, 4, 32]), fabrics)
@settings(max_examples=examples(150))
def test_short_chains_are_the_best_powers_of_two(inside: int, domains: int, fabric: Fabric) -> None:
    fabric = replace(fabric, short_chains=True)
    hop_s, level_s, ranks = fabric.hop_s[2], fabric.tree_hop_s[2], inside * domains
    path = short_chains(double_tree_path(1.0, ranks, inside), ranks, inside, 2 * level_s / hop_s)
    chains = [2**k for k in range(7) if 2**k <= inside]
    best = min(2 * (c - 1) * hop_s + 2 * log2_ceil(ranks / c) * level_s for c in chains)
    assert path.inner_hops * hop_s + path.outer_hops * level_s == pytest.approx(best)


@given(kinds, fabrics)
@settings(max_examples=examples(30))
def test_nothing_costs_nothing(kind: str, fabric: Fabric) -> None:
    assert collective_s(kind, 0.0, 8, 8, fabric)[0] == 0.0
    assert collective_s(kind, 1e9, 1, 1, fabric)[0] == 0.0
