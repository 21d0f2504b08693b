"""Placement of the storages of a program in memory: by the caching allocator, or at fixed offsets of one arena.

The allocator gives the memory that a training process reserves, with its waste; inference engines use an arena.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from steptime.captured.graph.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    Event,
    OutOfMemoryError,
    Segment,
)
from steptime.captured.graph.program import BEFORE, Program
from steptime.errors import UserError
from steptime.num import Array, round_up

MAX_STEPS: Final = 16


def workspace(call: int) -> int:
    """Number that marks the scratch memory of a call as an owner; the owner of a storage is its own number."""
    return -2 - call


def call_of_workspace(owner: int) -> int | None:
    """The call whose scratch memory an owner number marks; None for a storage."""
    return -2 - owner if owner <= -2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The request that did not fit in memory."""

    step: int
    call: int
    owner: int
    requested_bytes: int
    free_bytes: int
    """Bytes that the driver still had, without free memory inside the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Result of running the allocator through some steps of a program.

    `reserved_bytes`, `allocated_bytes` and `requested_bytes` describe the last step: entry 0 before its first call,
    entry i + 1 while call i runs. The peaks are over all steps.
    """

    program: Program
    settings: AllocatorSettings
    steps: int
    events: tuple[Event, ...]
    """Events; their time is the number of calls since the start of the first step, -1 before it."""
    segments: tuple[Segment, ...]
    """Segments that are reserved at the end."""
    reserved_bytes: Array
    allocated_bytes: Array
    requested_bytes: Array
    peak_reserved_bytes: int
    """`torch.cuda.max_memory_reserved()`."""
    peak_allocated_bytes: int
    """`torch.cuda.max_memory_allocated()`: sizes of the blocks."""
    peak_requested_bytes: int
    """`torch.cuda.memory_stats()["requested_bytes.all.peak"]`: sizes of the tensors."""
    shortage: Shortage | None = None
    """The request that ended the run early; None if memory sufficed."""


def place(
    program: Program, settings: AllocatorSettings | None = None, *, steps: int = 2, logs: bool = True
) -> Placement:
    """Run the allocator through steps of a program.

    With one step, parameters, buffers, inputs and the states of the optimiser are allocated first, in this order. With
    more, the first step allocates the states when the optimiser first runs, as PyTorch does: they then lie in memory
    that activations have freed, and the second step may need further segments. Other storages that outlive a step are
    freed at the end of the forward pass of the next step, which replaces them.

    Args:
        program: a recorded step.
        settings: settings of the allocator, and the memory of the device.
        steps: number of steps to run, 1 to 16.
        logs: keep events and segments; False is faster.

    Raises:
        UserError: `steps` is out of range.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"steps {steps} is out of range", hint=f"1 to {MAX_STEPS}")
    return _Run(program, CachingAllocator(settings, logs=logs), steps).placement()


@dataclass(slots=True)
class _Plan:
    """Storages that each call allocates and frees, by the number of the call."""

    born: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    freed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class _Run:
    def __init__(self, program: Program, allocator: CachingAllocator, steps: int) -> None:
        self.program = program
        self.steps = steps
        self.allocator = allocator
        self.blocks: dict[int, Block | None] = {}
        self.counts: list[tuple[int, int, int]] = []
        self.at = (0, BEFORE, BEFORE)
        """Step, call and owner of the current request."""
        calls = program.calls
        self.first_update = next((n for n, call in enumerate(calls) if call.phase == "optimizer"), BEFORE)
        self.end_of_forward = next((n for n, call in enumerate(calls) if call.phase != "forward"), len(calls)) - 1
        self.plan = _Plan()
        for number, storage in enumerate(program.storages):
            self.plan.born[storage.born].append(number)
            if storage.freed is not None:
                self.plan.freed[storage.freed].append(number)

    def placement(self) -> Placement:
        shortage = None
        try:
            for step in range(self.steps):
                self._step(step)
        except OutOfMemoryError as error:
            step, call, owner = self.at
            shortage = Shortage(
                step=step, call=call, owner=owner, requested_bytes=error.requested_bytes, free_bytes=error.free_bytes
            )
        allocator = self.allocator
        reserved, allocated, requested = np.array(self.counts, dtype=np.int64).reshape(-1, 3).T
        return Placement(
            program=self.program, settings=allocator.settings, steps=self.steps, events=tuple(allocator.events),
            segments=allocator.segments() if allocator.logs else (), reserved_bytes=reserved, allocated_bytes=allocated,
            requested_bytes=requested, peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes, peak_requested_bytes=allocator.peak_requested_bytes,
            shortage=shortage,
        )  # fmt: skip

    def _step(self, step: int) -> None:
        calls = self.program.calls
        self.counts = []
        left = self._left_over() if step else []
        late = self._late() if step == 0 and self.steps > 1 else set()
        self.allocator.now = step * len(calls) - (step == 0)
        self._allocate(step, BEFORE, [n for n in self.plan.born[BEFORE] if n not in late])
        self._count()
        self._free(self.plan.freed[BEFORE])
        born, freed = self.plan.born, self.plan.freed
        for number, call in enumerate(calls):
            self.allocator.now = step * len(calls) + number
            if number == self.first_update and late:
                self._allocate(step, number, sorted(late))
            if number in born:
                self._allocate(step, number, born[number])
            scratch = self._malloc(step, number, workspace(number), call.scratch_bytes) if call.scratch_bytes else None
            self._count()
            self.allocator.free(scratch)
            if number in freed:
                self._free(freed[number])
            if number == self.end_of_forward:
                self._free(left)

    def _late(self) -> set[int]:
        """States that the first step of the optimiser allocates."""
        storages = self.program.storages
        late = {n for n in self.plan.born[BEFORE] if storages[n].category == "state" and storages[n].freed is None}
        return late if self.first_update >= 0 else set()

    def _left_over(self) -> list[int]:
        """Storages that the previous step allocated and did not free, under new numbers."""
        stays = {"parameter", "buffer", "state", "input"}
        storages = self.program.storages
        over = [n for n in self.blocks if storages[n].born != BEFORE or storages[n].category not in stays]
        moved = {-(10**12) - n: self.blocks.pop(n) for n in over}
        self.blocks |= moved
        return list(moved)

    def _allocate(self, step: int, call: int, storages: list[int]) -> None:
        for number in storages:
            if number not in self.blocks:
                self.blocks[number] = self._malloc(step, call, number, self.program.storages[number].size_bytes)

    def _malloc(self, step: int, call: int, owner: int, size_bytes: int) -> Block | None:
        self.at = (step, call, owner)
        return self.allocator.malloc(size_bytes, owner)

    def _free(self, storages: list[int]) -> None:
        for number in storages:
            self.allocator.free(self.blocks.pop(number, None))

    def _count(self) -> None:
        allocator = self.allocator
        self.counts.append((allocator.reserved_bytes, allocator.allocated_bytes, allocator.requested_bytes))


ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Offsets of the storages that a step allocates."""

    size_bytes: int
    """Bytes of the arena."""
    least_bytes: int
    """Largest number of bytes alive at one time: a lower bound on the size of any arena."""
    offsets: dict[int, int]
    """Storage -> offset in the arena."""


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
        alive = (n for n in offsets if lives[n][0] <= freed and born <= lives[n][1])
        offsets[number] = _lowest(sorted((offsets[n], offsets[n] + sizes[n]) for n in alive), sizes[number])
    size = max((offsets[n] + sizes[n] for n in offsets), default=0)
    return Arena(size_bytes=size, least_bytes=_least(lives, sizes), offsets=offsets)


def _lowest(taken: list[tuple[int, int]], size: int) -> int:
    """Lowest offset with room between the occupied ranges."""
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
