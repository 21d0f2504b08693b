"""A static plan: every temporary at a fixed place of one arena, as inference engines allocate."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.captured.graph.program import BEFORE, Program
from steptime.num import round_up

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Offsets of the storages that a step allocates."""

    size_bytes: int
    """Bytes of the arena."""
    least_bytes: int
    """Most bytes that are alive at one time: no plan needs less."""
    offsets: dict[int, int]
    """Storage -> place in the arena."""


def arena_of(program: Program) -> Arena:
    """Place storages, largest first, at the lowest offset that no storage alive at the same time uses.

    A chain of layers comes down to two alternating buffers: each layer reads one and writes the other, so the arena is
    the largest sum of two neighbours.

    Source: greedy by size; Pisarchyk and Lee 2020, arXiv 2001.03288, section 5.
    """
    last = len(program.calls) - 1
    lives = {
        number: (storage.born, last if storage.freed is None else storage.freed)
        for number, storage in enumerate(program.storages)
        if storage.born != BEFORE and storage.size_bytes
    }
    sizes = {n: round_up(program.storages[n].size_bytes, ALIGNMENT_BYTES) for n in lives}
    order = sorted(lives, key=lambda n: (-sizes[n], lives[n]))
    offsets: dict[int, int] = {}
    for number in order:
        born, freed = lives[number]
        beside = (n for n in offsets if lives[n][0] <= freed and born <= lives[n][1])
        offsets[number] = _lowest(sorted((offsets[n], offsets[n] + sizes[n]) for n in beside), sizes[number])
    size = max((offsets[n] + sizes[n] for n in offsets), default=0)
    return Arena(size_bytes=size, least_bytes=_least(lives, sizes), offsets=offsets)


def _lowest(taken: list[tuple[int, int]], size: int) -> int:
    """Lowest offset with room between the taken ranges."""
    at = 0
    for start, end in taken:
        if start - at >= size:
            return at
        at = max(at, end)
    return at


def _least(lives: dict[int, tuple[int, int]], sizes: dict[int, int]) -> int:
    changes: dict[int, int] = {}
    for number, (born, freed) in lives.items():
        changes[born] = changes.get(born, 0) + sizes[number]
        changes[freed + 1] = changes.get(freed + 1, 0) - sizes[number]
    highest = in_use = 0
    for call in sorted(changes):
        in_use += changes[call]
        highest = max(highest, in_use)
    return highest
