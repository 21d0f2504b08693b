"""Lifetime of each storage, and the memory in use at each call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steptime.captured.graph.program import BEFORE, PHASES, Category, Phase, Program, Storage
from steptime.num import Array, round_up


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that is alive at a peak."""

    number: int
    storage: Storage
    made_by: str
    """Operator and module that allocated it; for a storage from before the step, its name."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Largest memory in use at one time in a phase or in the step."""

    phase: Phase
    size_bytes: int
    call: int
    """Number of the call that runs at the peak; `BEFORE` if the peak is the memory at the start of the step."""
    operator: str
    module: str
    by_category: dict[Category, int]


class Liveness:
    r"""Memory in use at every call of a program.

    $$M_i = w_i + \sum_s b_s \,[\,\mathrm{born}_s \le i \le \mathrm{freed}_s\,]$$

    where $b_s$ = size of storage $s$ in bytes, $i$ = number of the call, $w_i$ = scratch of call $i$ in bytes. A
    storage counts while the call that allocates it runs and while the call during which its last reference goes runs.
    Views and in-place operators own no storage.

    Args:
        program: a recorded step.
        rounding: bytes to which an allocator rounds each storage up (1: none; 512 for CUDA's caching allocator).

    Source: definition; liveness as in register allocation.
    """

    def __init__(self, program: Program, rounding: int = 1) -> None:
        self.program = program
        sizes = [round_up(storage.size_bytes, rounding) for storage in program.storages]
        self.sizes: Array = np.array(sizes, dtype=np.int64)
        last = len(program.calls) - 1
        born = [storage.born for storage in program.storages]
        freed = [last if storage.freed is None else storage.freed for storage in program.storages]
        self._born: Array = np.array(born, dtype=np.int64)
        self._freed: Array = np.array(freed, dtype=np.int64)

    @cached_property
    def in_use_bytes(self) -> Array:
        """Bytes in use while each call runs; entry 0 is the state before the first call."""
        scratch = [0, *(call.scratch_bytes for call in self.program.calls)]
        total: Array = self._sum(np.ones(len(self.sizes), dtype=bool)) + np.array(scratch, dtype=np.int64)
        return total

    def _sum(self, chosen: Array) -> Array:
        length = len(self.program.calls) + 2
        change = np.zeros(length + 1, dtype=np.int64)
        np.add.at(change, self._born[chosen] + 1, self.sizes[chosen])
        np.add.at(change, self._freed[chosen] + 2, -self.sizes[chosen])
        total: Array = np.cumsum(change)[: length - 1]
        return total

    def by_category(self) -> dict[Category, Array]:
        """Bytes in use of each category; with the scratch of the calls they add up to `in_use_bytes`."""
        kinds = np.array([storage.category for storage in self.program.storages], dtype=object)
        order = dict.fromkeys(storage.category for storage in self.program.storages)
        return {category: self._sum(kinds == category) for category in order}

    def alive(self, call: int) -> list[Held]:
        """Storages in use while that call runs, largest first."""
        found = np.nonzero((self._born <= call) & (self._freed >= call))[0]
        order = found[np.argsort(-self.sizes[found], kind="stable")]
        return [Held(int(n), self.program.storages[n], self._maker(self.program.storages[n])) for n in order]

    def _maker(self, storage: Storage) -> str:
        if storage.born == BEFORE:
            return storage.name
        call = self.program.calls[storage.born]
        return f"{call.module}: {call.node.op}" if call.module else call.node.op

    def peak(self, phase: Phase | None = None) -> Peak:
        """Peak of a phase, or of the whole step, at the first call that reaches it."""
        use = self.in_use_bytes
        calls = self.program.calls
        if phase is None:
            at = int(np.argmax(use))
        else:
            inside = np.array([False, *(call.phase == phase for call in calls)])
            at = int(np.argmax(np.where(inside, use, -1))) if inside.any() else 0
        call = at - 1
        by_category: Counter[Category] = Counter()
        for held in self.alive(call):
            by_category[held.storage.category] += int(self.sizes[held.number])
        run = calls[call] if call >= 0 else None
        return Peak(
            phase or (run.phase if run else "forward"), int(use[at]), call, run.node.op if run else "",
            run.module if run else "", dict(by_category.most_common()),
        )  # fmt: skip

    def peaks(self) -> dict[Phase, Peak]:
        """The peak of each phase that the program has."""
        return {phase: self.peak(phase) for phase in self.peak_bytes()}

    def peak_bytes(self) -> dict[Phase, int]:
        """Size of the peak of each phase that the program has."""
        phases = np.array([call.phase for call in self.program.calls], dtype=object)
        use = {phase: self.in_use_bytes[1:][phases == phase] for phase in PHASES}
        return {phase: int(one.max()) for phase, one in use.items() if len(one)}
