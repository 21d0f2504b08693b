"""Bytes and rounds of the less usual collective algorithms, by moving every chunk from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from steptime.cost.collective_algorithms import Fabric, collective_s
from steptime.cost.collective_schedules import (
    Path,
    bruck_all_to_all_path,
    doubling_path,
    hierarchical_all_to_all_path,
    hierarchical_path,
)
from steptime.cost.regression import SENT

Message = tuple[int, int, int]
"""Sender, receiver, chunks."""
SHAPES = ((8, 1), (8, 2), (8, 4), (8, 8), (16, 4))
FABRIC = Fabric(
    domain=8, nics=8, start_s=(1e-6, 2e-6, 4e-6), hop_s=(1e-6, 1e-6, 2e-6), Bps=(10e9, 50e9, 100e9),
    outer_hop_s=(5e-6, 6e-6, 10e-6), outer_Bps=(2e9, 8e9, 10e9), tree_hop_s=(8e-6, 9e-6, 15e-6),
)  # fmt: skip


def doubling(ranks: int) -> Iterator[list[Message]]:
    """All-gather: in round k partners at distance 2^k give each other all that they have."""
    held = [{rank} for rank in range(ranks)]
    distance = 1
    while distance < ranks:
        yield [(rank, rank ^ distance, len(held[rank])) for rank in range(ranks)]
        held = [held[rank] | held[rank ^ distance] for rank in range(ranks)]
        distance *= 2
    assert all(len(chunks) == ranks for chunks in held)


def by_rails(ranks: int, inside: int) -> Iterator[list[Message]]:
    """All-to-all: to the neighbour on the rail of the destination, then along the rail."""
    held = [[(source, to) for to in range(ranks)] for source in range(ranks)]
    for inner in (True, False):
        steps = inside if inner else ranks // inside
        for step in range(1, steps):
            sent: list[Message] = []
            moved: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
            for rank in range(ranks):
                domain, rail = divmod(rank, inside)
                if inner:
                    other = domain * inside + (rail + step) % inside
                    chunks = [c for c in held[rank] if c[1] % inside == other % inside]
                else:
                    other = (domain + step) % steps * inside + rail
                    chunks = [c for c in held[rank] if c[1] == other]
                held[rank] = [c for c in held[rank] if c not in chunks]
                moved[other] += chunks
                sent.append((rank, other, len(chunks)))
            held = [have + new for have, new in zip(held, moved, strict=True)]
            yield sent
    assert all(sorted(held[to]) == [(source, to) for source in range(ranks)] for to in range(ranks))


def bruck(ranks: int) -> Iterator[list[Message]]:
    """All-to-all: in round k the chunks whose distance has bit k go that far on."""
    distance = 1
    while distance < ranks:
        chunks = sum(1 for d in range(ranks) if d & distance)
        yield [(rank, (rank + distance) % ranks, chunks) for rank in range(ranks)]
        distance *= 2


def counted(rounds: Iterator[list[Message]], ranks: int, inside: int) -> tuple[float, float, float, float]:
    """Rounds inside and between domains, and the most that a rank sends inside and that leaves a domain."""
    hops, inner, outer = [0, 0], [0.0] * ranks, [0.0] * (ranks // inside)
    for messages in rounds:
        crossing = any(a // inside != b // inside for a, b, _ in messages)
        hops[crossing] += 1
        for a, b, chunks in messages:
            if a // inside == b // inside:
                inner[a] += chunks
            else:
                outer[a // inside] += chunks
    return hops[0], hops[1], max(inner), max(outer)


def told(path: Path) -> tuple[float, float, float, float]:
    return path.inner_hops, path.outer_hops, path.inner_bytes, path.outer_bytes


@pytest.mark.parametrize(("ranks", "inside"), SHAPES)
def test_doubling(ranks: int, inside: int) -> None:
    found = counted(doubling(ranks), ranks, inside)
    assert told(doubling_path(float(ranks), ranks, inside)) == pytest.approx(found)
    twice = told(doubling_path(float(ranks), ranks, inside, 2))
    assert twice == pytest.approx(tuple(2 * each for each in found)), "reduced and gathered again"


@pytest.mark.parametrize(("ranks", "inside"), SHAPES)
def test_all_to_all_by_rails(ranks: int, inside: int) -> None:
    path = hierarchical_all_to_all_path(float(ranks), ranks, inside)
    assert told(path) == pytest.approx(counted(by_rails(ranks, inside), ranks, inside))
    assert path.serial and hierarchical_path(1.0, ranks, inside).serial, "one level after the other"


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_bruck_in_one_domain_and_between_domains_of_one(ranks: int) -> None:
    for inside in (1, ranks):
        assert told(bruck_all_to_all_path(float(ranks), ranks, inside)) == counted(bruck(ranks), ranks, inside)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_that_a_rank_sends(ranks: int) -> None:
    """It has its own part already; an all-reduce adds up the parts first."""
    others = (ranks - 1) / ranks
    shares = {kind: float(share(ranks)) for kind, share in SENT.items()}
    assert shares == {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others,
                      "broadcast": 1, "point_to_point": 1}  # fmt: skip


def test_what_a_start_costs_more_is_added_once() -> None:
    """In the switch between domains as in a direct message."""
    switch = replace(FABRIC, switch_start_s=5e-6, switch_Bps=100e9)
    late = replace(switch, outer_start_s=(7e-6, 7e-6, 7e-6), direct_start_s=(3e-6, 3e-6, 3e-6))
    for kind, inside, more_s in (("all_reduce", 8, 7e-6), ("all_to_all", 8, 7e-6 + 3e-6), ("all_to_all", 16, 3e-6)):
        before, after = (collective_s(kind, 1e9, 16, inside, fabric) for fabric in (switch, late))
        assert after[1] == before[1] and after[0] - before[0] == pytest.approx(more_s, rel=1e-6), kind
