"""Memory of a recorded step by part, as lines over the micro-batch for each way of sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.captured.cut.sections import Sections, kept_storages
from steptime.captured.graph import BEFORE
from steptime.model.captured import NOTHING, Line, Way, line
from steptime.num import Array

CLASSES = ("whole", "tokens", "cut")
"""Storages: replicated; divided by tokens under sequence parallelism, else replicated; sharded over ranks."""
_ALIVE = ("activation", "temporary")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes by class (last axis in the order of `CLASSES`)."""

    kept: Mapping[int, Array]
    """Part (-1 the head, a number a block, the number of blocks the tail) -> bytes that it keeps."""
    born: Mapping[int, Array]
    """Call -> bytes of the kept storages that it allocates."""
    alive: Array
    """Bytes of activations and temporaries at each call, one row per call."""
    handed: Array
    """Bytes that a block allocates and the next block reads."""


def holdings_of(sections: Sections, classes: Mapping[int, int]) -> Holdings:
    """Sums over the storages of a program; ``classes``: storage -> index in `CLASSES`, by default whole."""
    program = sections.program
    born: dict[int, Array] = {}
    kept = {part: np.zeros(len(CLASSES)) for part in range(-1, len(sections.each) + 1)}
    for part, storages in kept_storages(sections).items():
        for number in storages:
            storage, kind = program.storages[number], classes.get(number, 0)
            kept[part][kind] += storage.size_bytes
            born.setdefault(storage.born, np.zeros(len(CLASSES)))[kind] += storage.size_bytes
    return Holdings(kept=kept, born=born, alive=_alive(sections, classes), handed=_handed(sections, classes))


def _alive(sections: Sections, classes: Mapping[int, int]) -> Array:
    program = sections.program
    last, added = len(program.calls), _added_gradients(sections)
    change = np.zeros((last + 1, len(CLASSES)))
    for number, storage in enumerate(program.storages):
        if storage.category not in _ALIVE or storage.born == BEFORE or number in added:
            continue
        end = last - 1 if storage.freed is None else storage.freed
        change[storage.born, classes.get(number, 0)] += storage.size_bytes
        change[end + 1, classes.get(number, 0)] -= storage.size_bytes
    total: Array = np.cumsum(change, axis=0)[:last]
    total[:, 0] += [call.scratch_bytes for call in program.calls]
    return total


def _added_gradients(sections: Sections) -> set[int]:
    """Storages that are later added to the gradient of a weight with two uses: they count as this gradient."""
    program = sections.program
    gradients = {n for n, storage in enumerate(program.storages) if storage.category == "gradient"}
    out: set[int] = set()
    for call in program.calls:
        if call.node.op == "add" and any(s in gradients for s in call.writes):
            sizes = {program.storages[s].size_bytes for s in call.writes}
            out |= {s for s in call.reads if program.storages[s].size_bytes in sizes}
    return out


def _handed(sections: Sections, classes: Mapping[int, int]) -> Array:
    out = np.zeros(len(CLASSES))
    if len(sections.each) < 2:
        return out
    program = sections.program
    at = min(sections.typical, len(sections.each) - 2)
    made = {s for n in _forward(sections, at) for s in program.calls[n].writes if not program.calls[n].view}
    read = {s for n in _forward(sections, at + 1) for s in program.calls[n].reads}
    for number in made & read:
        out[classes.get(number, 0)] += program.storages[number].size_bytes
    return out


def _forward(sections: Sections, block: int) -> Iterable[int]:
    return [n for n in sections.each[block] if sections.program.calls[n].phase == "forward"]


SAMPLED: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256, 1024)
"""Micro-batches at which the largest of several lines is determined."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Lines of the bytes that are kept, of those alive beyond them (`working`: backward; `loss`: tail)."""

    _born: Mapping[int, Line]
    boundary: Line
    working: tuple[Line, ...]
    loss: tuple[Line, ...]

    def born(self, call: int) -> Line:
        """Bytes of the kept storages that a call allocates."""
        return self._born.get(call, NOTHING)


class _Lines:
    """Converts bytes by class at two micro-batches to lines by way."""

    def __init__(self, batches: Sequence[int], ways: Sequence[Way]) -> None:
        self.low, self.high = batches[:2]
        self.parts = np.array([[1.0, tp if sp else 1.0, tp] for tp, sp in ways])

    def of(self, low: Array, high: Array) -> Line:
        """The line through bytes by class at both micro-batches."""
        at_low, at_high = (low / self.parts).sum(axis=1), (high / self.parts).sum(axis=1)
        slope = (at_high - at_low) / (self.high - self.low)
        return line(at_low - slope * self.low, slope)

    def largest(self, low: Array, high: Array) -> tuple[Line, ...]:
        """Lines of the rows (moments) whose bytes are the largest at some sampled micro-batch for some way."""
        if not len(low):
            return (NOTHING,)
        slope = (high - low) / (self.high - self.low)
        constant = low - slope * self.low
        chosen: dict[int, None] = {}
        for batch in SAMPLED:
            level = constant + slope * batch
            for parts in self.parts:
                chosen[int(np.argmax((level / parts).sum(axis=1)))] = None
        return tuple(dict.fromkeys(self.of(low[n], high[n]) for n in chosen))


def levels_of(
    recorded: Sequence[Sections], batches: Sequence[int], classes: Mapping[int, int], ways: Sequence[Way]
) -> Levels:
    """Lines through the first two recordings; ``classes`` of storages as in :func:`holdings_of`."""
    sections, make = recorded[0], _Lines(batches, ways)
    low, high = (holdings_of(each, classes) for each in recorded[:2])
    born = {call: make.of(kept, high.born[call]) for call, kept in low.born.items()}
    count = len(sections.each)
    if not count:
        whole = sections.head
        alive = [_alive_beyond(h, whole, h.kept[-1]) for h in (low, high)]
        return Levels(born, NOTHING, make.largest(*alive), (NOTHING,))
    moments = []
    for holdings in (low, high):
        rows = [_alive_beyond(holdings, _backward(sections, block), _kept(holdings, sections, block + 1))
                for block in dict.fromkeys((sections.typical, count - 1))]  # fmt: skip
        moments.append(np.concatenate(rows))
    loss = [_alive_beyond(h, sections.tail, _kept(h, sections, count) + h.kept[count]) for h in (low, high)]
    return Levels(born, make.of(low.handed, high.handed), make.largest(*moments), make.largest(*loss))


def _kept(holdings: Holdings, sections: Sections, blocks: int) -> Array:
    """Bytes that the head and some blocks keep."""
    total: Array = holdings.kept[-1] + blocks * holdings.kept[sections.typical]
    return total


def _alive_beyond(holdings: Holdings, calls: Sequence[int], kept: Array) -> Array:
    rows: Array = holdings.alive[list(calls)] - kept
    return rows


def _backward(sections: Sections, block: int) -> list[int]:
    return [n for n in sections.each[block] if sections.program.calls[n].phase == "backward"]
