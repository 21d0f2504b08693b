"""A static plan never gives two live storages the same bytes, and a chain needs two alternating buffers."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from steptime.captured.graph import Call, Nodes, Program, Storage, TensorType
from steptime.captured.graph.placement import arena_of

NODE = Nodes().source("input", "x", TensorType((1,), "fp32")).node


def program(lives: list[tuple[int, int, int]]) -> Program:
    """Storages of (born, freed, bytes) over as many calls as they need."""
    calls = tuple(Call(NODE, "forward", "", (), ()) for _ in range(max(freed for _, freed, _ in lives) + 1))
    return Program(name="p", calls=calls, storages=tuple(Storage(s, b, f, "temporary") for b, f, s in lives))


def test_a_chain_needs_two_buffers() -> None:
    chain = [(n, n + 1, 640) for n in range(50)]
    arena = arena_of(program(chain))
    assert arena.size_bytes == arena.least_bytes == 2 * 640
    assert set(arena.offsets.values()) == {0, 640}


def test_unequal_neighbours_set_the_size() -> None:
    arena = arena_of(program([(0, 1, 6400), (1, 2, 640), (2, 3, 3200)]))
    assert arena.least_bytes == 6400 + 640
    assert arena.size_bytes == arena.least_bytes


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 5000)), min_size=1, max_size=25))
def test_live_storages_never_overlap(given_lives: list[tuple[int, int, int]]) -> None:
    lives = [(born, born + length, size) for born, length, size in given_lives]
    arena = arena_of(program(lives))
    assert arena.least_bytes <= arena.size_bytes
    for a, b in combinations(range(len(lives)), 2):
        together = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
        apart = arena.offsets[a] + lives[a][2] <= arena.offsets[b] or arena.offsets[b] + lives[b][2] <= arena.offsets[a]
        assert apart or not together
