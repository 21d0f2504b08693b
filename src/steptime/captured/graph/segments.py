"""Blocks of a module: which of them checkpoints recompute, and the segments of a program that belong to each.

A tree is a sequence of block numbers and checkpoints in forward order; checkpoints can be nested. A block outside all
checkpoints saves the tensors that its backward reads. A checkpoint keeps only its input; before its backward, its items
run again, with the inner checkpoints in effect.

A run is a list of equal blocks of which only `KEPT` periods were recorded. A program has one segment for each of these
in each stretch of calls. Periods 1 and 2 are interior: if they are equal, they stand for every further period.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from steptime.captured.graph.program import BEFORE, Call, Program

Saves = Literal["all", "products", "8bit"]
"""Tensors that a block saves. `all`: all that autograd needs; `products`: in a checkpoint, only results of products and
attention; `8bit`: all, with activations in 8 bits."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Blocks and inner checkpoints of which only the first input is kept."""

    items: tuple[int | Checkpoint, ...]


Tree = tuple[int | Checkpoint, ...]


def leaves(tree: Tree) -> Iterator[int]:
    """Numbers of the blocks of a tree, in order.

    >>> list(leaves((Checkpoint((0, Checkpoint((1, 2)))), 3)))
    [0, 1, 2, 3]
    """
    for item in tree:
        if isinstance(item, Checkpoint):
            yield from leaves(item.items)
        else:
            yield item


def checkpoints(tree: Tree) -> Iterator[Checkpoint]:
    """All checkpoints of a tree, outer ones first.

    >>> len(list(checkpoints((Checkpoint((0, Checkpoint((1, 2)))), 3))))
    2
    """
    for item in tree:
        if isinstance(item, Checkpoint):
            yield item
            yield from checkpoints(item.items)


def plain(count: int) -> Tree:
    """Tree of blocks without a checkpoint.

    >>> plain(2)
    (0, 1)
    """
    return tuple(range(count))


def grouped(count: int, size: int) -> Tree:
    """Tree with a checkpoint around every group of ``size`` blocks.

    >>> [list(leaves(one.items)) for one in grouped(5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    return tuple(Checkpoint(tuple(range(i, min(i + size, count)))) for i in range(0, count, size))


def every(count: int, step: int) -> Tree:
    """Tree with a checkpoint around one block in every ``step``; the other blocks save.

    >>> text(every(4, 2))
    '[0] 1 [2] 3'
    """
    return tuple(Checkpoint((i,)) if i % step == 0 else i for i in range(count))


def text(tree: Tree) -> str:
    """A tree in one line, with brackets around checkpoints.

    >>> text((Checkpoint((0, Checkpoint((1, 2)))), 3))
    '[0 [1 2]] 3'
    """
    return " ".join(f"[{text(item.items)}]" if isinstance(item, Checkpoint) else str(item) for item in tree)


KEPT: Final = 4
"""Number of recorded periods of a run: both ends, and two in between that must be equal."""


def below(container: str) -> str:
    """Prefix of the paths below a container."""
    return f"{container}." if container else ""


@lru_cache(2**14)
def block_of(container: str, path: str) -> tuple[int, str] | None:
    """Index of the block of a container that a path lies in, and the rest of the path; None: in no block.

    >>> block_of("model.layers", "model.layers.12.mlp.up"), block_of("", "3"), block_of("model.layers", "model.norm")
    ((12, '.mlp.up'), (3, ''), None)
    """
    prefix = below(container)
    if not path.startswith(prefix):
        return None
    head, dot, rest = path[len(prefix) :].partition(".")
    return (int(head), dot + rest) if head.isdigit() else None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of equal blocks in one container: a pattern of `period` blocks that repeats."""

    container: str
    """Path of the list of blocks."""
    first: int
    """Index of its first block."""
    period: int
    """Blocks after which the pattern repeats."""
    count: int
    """Blocks of the whole run, a multiple of the period."""

    @property
    def missing(self) -> int:
        """Periods that were not recorded."""
        return self.count // self.period - KEPT

    def is_within(self, other: Run) -> bool:
        """True if its blocks are part of another run, with the period of that run or a multiple of it.

        >>> whole = Run("layers", 0, 1, 12)
        >>> Run("layers", 2, 2, 8).is_within(whole), Run("layers", 8, 1, 6).is_within(whole)
        (True, False)
        """
        inside = other.first <= self.first and self.first + self.count <= other.first + other.count
        return self.container == other.container and inside and self.period % other.period == 0

    def index_of(self, path: str) -> int | None:
        """Index of the block that a path lies in; None: in no block."""
        found = block_of(self.container, path)
        return None if found is None else found[0]

    def period_of(self, path: str) -> int | None:
        """Number of the recorded period that a path lies in; None outside the run."""
        index = self.index_of(path)
        if index is None or not self.first <= index < self.first + KEPT * self.period:
            return None
        return (index - self.first) // self.period

    def moved(self, path: str, periods: int) -> str:
        """The same path a number of periods later."""
        found = block_of(self.container, path)
        if found is None or not periods:
            return path
        index, rest = found
        return f"{below(self.container)}{index + periods * self.period}{rest}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive calls in which each recorded period has one segment."""

    starts: tuple[int, ...]
    """First call of each recorded period."""
    end: int
    backward: bool
    """True if later periods run first."""

    def segment(self, period: int) -> range:
        """Numbers of the calls of one period."""
        following = period - 1 if self.backward else period + 1
        end = self.starts[following] if 0 <= following < KEPT else self.end
        return range(self.starts[period], end)


def owners(program: Program, run: Run) -> list[int | None]:
    """Period of each call; for the optimiser, of its named storages: None if several, the previous call's if none."""
    named = [run.period_of(storage.name) for storage in program.storages]
    out: list[int | None] = []
    for call in program.calls:
        if call.phase != "optimizer":
            out.append(run.period_of(call.module))
            continue
        touched = {named[s] for s in (*call.reads, *call.writes) if program.storages[s].name}
        out.append(next(iter(touched)) if len(touched) == 1 else None)
        if not touched and out[:-1]:
            out[-1] = out[-2]
    return out


def is_chained(program: Program, run: Run) -> bool:
    """True if nothing runs between the blocks of a run in the forward pass."""
    forward = [run.index_of(call.module) for call in program.calls if call.phase == "forward"]
    inside = [index is not None and run.first <= index < run.first + run.count for index in forward]
    return any(inside) and all(inside[inside.index(True) : len(inside) - inside[::-1].index(True)])


def is_wide(call: Call) -> bool:
    """True if a call works on lists of tensors, with one element for each parameter."""
    return call.phase == "optimizer" and len(set(call.node.names)) < len(call.node.names)


def stretches(program: Program, run: Run) -> list[Stretch] | None:
    """Stretches of a program; None if the blocks of the run are not consecutive.

    Blocks of one checkpoint run again one after the other, before the backward pass of the last: two stretches. A block
    that is itself a checkpoint runs again in the stretch of its backward pass.
    """
    owner = owners(program, run)
    found = _stretches(program, owner, _spans(program.calls, owner, apart=False))
    return found or _stretches(program, owner, _spans(program.calls, owner, apart=True), ends=True)


def _stretches(
    program: Program, owner: Sequence[int | None], spans: Sequence[tuple[int, int]], *, ends: bool = False
) -> list[Stretch] | None:
    """One stretch per span; ``ends``: none for a span whose run calls are only in the first or last period, or both."""
    out: list[Stretch] = []
    for start, end in spans:
        starts: dict[int, int] = {}
        for number in range(start, end):
            period = owner[number]
            if period is not None and not is_wide(program.calls[number]):
                starts.setdefault(period, number)
        if not starts or (ends and starts.keys() <= {0, KEPT - 1}):
            continue
        found = [starts.get(period, BEFORE) for period in range(KEPT)]
        if BEFORE in found:
            return None
        backward = found[0] > found[-1]
        if found != sorted(found, reverse=backward):
            return None
        last = max(number for number in range(start, end) if owner[number] is not None)
        stretch = Stretch(tuple(found), last + 1, backward)
        if not _ordered(owner, stretch):
            return None
        out.append(stretch)
    return out or None


def _ordered(owner: Sequence[int | None], stretch: Stretch) -> bool:
    """True if every call of a period lies in its segment, and both interior segments have equal lengths."""
    return all(owner[number] in (None, period) for period in range(KEPT) for number in stretch.segment(period)) and len(
        stretch.segment(1)
    ) == len(stretch.segment(2))


def _spans(calls: Sequence[Call], owner: Sequence[int | None], *, apart: bool) -> list[tuple[int, int]]:
    """Spans: forward, backward, and between optimiser calls on tensor lists each of its passes over single parameters.

    With ``apart``, recomputed calls are spans of their own.
    """
    spans: list[tuple[int, int]] = []
    start, last = 0, BEFORE
    for number in range(1, len(calls) + 1):
        edge = apart and number < len(calls) and calls[number].recomputed != calls[number - 1].recomputed
        if number < len(calls) and not edge and not _cut(calls[number - 1], calls[number], owner[number], last):
            last = last if owner[number] is None else owner[number] or 0
            continue
        spans.append((start, number))
        start = number
        last = BEFORE if number == len(calls) or owner[number] is None else owner[number] or 0
    return [(a, b) for a, b in spans if not is_wide(calls[a])]


def _cut(before: Call, after: Call, period: int | None, last: int) -> bool:
    """True if a new span begins: another phase, a change between lists and tensors, or a new pass of the optimiser."""
    if before.phase != after.phase:
        return True
    new_pass = period is not None and period < last
    return after.phase == "optimizer" and (new_pass or is_wide(before) != is_wide(after))
