"""The parts of a recorded step: the head before a run of equal blocks, each block, and the tail after them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from steptime.captured.graph import BEFORE, Call, Program
from steptime.captured.graph.segments import block_of

LEAST_BLOCKS = 2
"""Least number of blocks of a run."""
LEAST_SHARE = 0.5
"""Least fraction of the calls of a forward pass in the blocks of a run."""
MOST_UNLIKE = 0.15
"""Largest fraction of calls by which blocks may differ: sums of gradients at the ends."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A run of `count` equal blocks in one list; `first` is the index of the first block."""

    container: str
    first: int
    count: int

    def index_of(self, path: str) -> int | None:
        """Number of the block, from 0, that a path lies in; None: in no block."""
        found = self._found(path)
        return None if found is None else found[0] - self.first

    def inside(self, path: str) -> str:
        """A path relative to its block."""
        found = self._found(path)
        return path if found is None else found[1].removeprefix(".")

    def _found(self, path: str) -> tuple[int, str] | None:
        found = block_of(self.container, path)
        return found if found is not None and 0 <= found[0] - self.first < self.count else None


@dataclass(frozen=True, slots=True)
class Sections:
    """Calls of a program by part; without blocks all calls are in the head."""

    program: Program
    blocks: Blocks | None
    head: tuple[int, ...]
    each: tuple[tuple[int, ...], ...]
    """Calls of each block."""
    tail: tuple[int, ...]

    @property
    def typical(self) -> int:
        """Number of a block in the middle, which stands for all blocks."""
        return len(self.each) // 2

    def of_calls(self) -> list[int]:
        """Part of each call: -1 the head, a number a block, the number of blocks the tail; -2 the optimiser."""
        out = [-2] * len(self.program.calls)
        for number, calls in ((-1, self.head), (len(self.each), self.tail), *enumerate(self.each)):
            for call in calls:
                out[call] = number
        return out


_MEMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def find_blocks(program: Program) -> Blocks | None:
    """The longest run of equal blocks, if it has most of the forward pass; else None."""
    # Checkpoints of PyTorch 2.9 make tensors without elements, outside of the blocks.
    made = [call for call in program.calls if sum(each.elements for each in call.node.outputs) or not call.node.outputs]
    calls = [call for call in made if call.phase == "forward" and not call.view]
    found: list[tuple[int, Blocks]] = []
    for container in _containers(call.module for call in calls):
        work: dict[int, list[str]] = {}
        probe = Blocks(container, 0, 1 << 30)
        for call in calls:
            number = probe.index_of(call.module)
            if number is not None:
                work.setdefault(number, []).append(_signature(call, probe))
        found += _runs(container, work)
    best = max(found, key=lambda each: each[0], default=None)
    if best is None or best[0] < LEAST_SHARE * len(calls):
        return None
    return best[1]


def _containers(paths: Iterable[str]) -> list[str]:
    seen: Counter[str] = Counter()
    for path in set(paths):
        for match in _MEMBER.finditer(path):
            seen[path[: match.start()]] += 1
    return sorted(seen, key=lambda path: path.count("."))


def _signature(call: Call, blocks: Blocks) -> str:
    types = (*(value.type for value in call.node.inputs), *call.node.outputs)
    return f"{blocks.inside(call.module)} {call.node.op} {', '.join(map(str, types))}"


def _runs(container: str, work: dict[int, list[str]]) -> list[tuple[int, Blocks]]:
    """Runs of equal neighbours, each with its number of calls."""
    out: list[tuple[int, Blocks]] = []
    numbers = sorted(work)
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and work[numbers[end]] == work[numbers[start]]:
            continue
        if end - start >= LEAST_BLOCKS:
            run = Blocks(container, numbers[start], end - start)
            out.append((len(work[numbers[start]]) * run.count, run))
        start = end
    return out


def sections_of(program: Program) -> Sections:
    """Divide a program into head, blocks and tail by time: a block lasts until the next one begins."""
    blocks = find_blocks(program)
    forward = [n for n, call in enumerate(program.calls) if call.phase == "forward"]
    backward = [n for n, call in enumerate(program.calls) if call.phase == "backward"]
    cut = None if blocks is None else _cut(program, blocks, forward, backward)
    if blocks is None or cut is None:
        return Sections(program, None, (*forward, *backward), (), ())
    return cut


def _cut(program: Program, blocks: Blocks, forward: Sequence[int], backward: Sequence[int]) -> Sections | None:
    ways = [_spans(program, blocks, forward, reverse=False)]
    if backward:
        ways.append(_spans(program, blocks, backward, reverse=True))
    head: list[int] = []
    tail: list[int] = []
    each: list[list[int]] = [[] for _ in range(blocks.count)]
    for way in ways:
        if way is None:
            return None
        head += way[0]
        tail += way[2]
        for number, calls in enumerate(way[1]):
            each[number] += calls
    lengths = [len(calls) for calls in each]
    if max(lengths) - min(lengths) > MOST_UNLIKE * max(lengths) or len({_heavy(program, calls) for calls in each}) > 1:
        return None
    return Sections(program, blocks, tuple(head), tuple(map(tuple, each)), tuple(tail))


def _heavy(program: Program, calls: Sequence[int]) -> tuple[str, ...]:
    """Products, convolutions and attention of the forward pass, with their shapes."""
    nodes = [program.calls[number].node for number in calls if program.calls[number].phase == "forward"]
    named = ("mm", "convolution", "attention", "linear")
    return tuple(sorted(
        f"{node.op} {', '.join(map(str, node.outputs))}" for node in nodes if any(word in node.op for word in named)
    ))  # fmt: skip


Spans = tuple[list[int], list[list[int]], list[int]]


def _spans(program: Program, blocks: Blocks, calls: Sequence[int], *, reverse: bool) -> Spans | None:
    """Head, blocks and tail of one phase; None if the blocks are not consecutive."""
    owner = [blocks.index_of(program.calls[number].module) for number in calls]
    order = list(reversed(range(blocks.count))) if reverse else list(range(blocks.count))
    starts: dict[int, int] = {}
    for place, number in enumerate(owner):
        if number is not None:
            starts.setdefault(number, place)
    if list(starts) != order:
        return None
    end = max(place for place, number in enumerate(owner) if number is not None) + 1
    bounds = [*(starts[number] for number in order), end]
    each: list[list[int]] = [[] for _ in order]
    for number, (low, high) in zip(order, pairwise(bounds), strict=True):
        if any(owner[place] not in (None, number) for place in range(low, high)):
            return None
        each[number] = list(calls[low:high])
    before, after = list(calls[: bounds[0]]), list(calls[end:])
    return (after, each, before) if reverse else (before, each, after)


def kept_storages(sections: Sections) -> dict[int, list[int]]:
    """Part -> storages that its forward pass allocates and that live into the backward pass."""
    part = sections.of_calls()
    out: dict[int, list[int]] = {}
    for number, storage in enumerate(sections.program.storages):
        if storage.category == "activation" and storage.born != BEFORE:
            out.setdefault(part[storage.born], []).append(number)
    return out
