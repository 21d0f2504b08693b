"""Memory of a recorded module as lines over the micro-batch, by way of cutting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.captured.cut.memory import Holdings, holdings_of
from steptime.captured.cut.sections import Sections
from steptime.model.captured import NOTHING, Line, Way, line
from steptime.num import Array

SAMPLED: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256, 1024)
"""Micro-batches at which the largest of several lines is looked for."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What is kept, and what is alive beside it."""

    _born: Mapping[int, Line]
    boundary: Line
    working: tuple[Line, ...]
    loss: tuple[Line, ...]

    def born(self, call: int) -> Line:
        """Bytes that a call makes and that are kept."""
        return self._born.get(call, NOTHING)


class _Lines:
    """Turns bytes by class at two micro-batches into lines by way."""

    def __init__(self, batches: Sequence[int], ways: Sequence[Way]) -> None:
        self.low, self.high = batches[:2]
        self.parts = np.array([[1.0, tp if sp else 1.0, tp] for tp, sp in ways])

    def of(self, low: Array, high: Array) -> Line:
        """The line through bytes by class at both micro-batches."""
        at_low, at_high = (low / self.parts).sum(axis=1), (high / self.parts).sum(axis=1)
        slope = (at_high - at_low) / (self.high - self.low)
        return line(at_low - slope * self.low, slope)

    def largest(self, low: Array, high: Array) -> tuple[Line, ...]:
        """Lines of those moments (rows) that are the highest somewhere."""
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
        beside = [_beside(h, whole, h.kept[-1]) for h in (low, high)]
        return Levels(born, NOTHING, make.largest(*beside), (NOTHING,))
    moments = []
    for holdings in (low, high):
        rows = [_beside(holdings, _backward(sections, block), _kept(holdings, sections, block + 1))
                for block in dict.fromkeys((sections.typical, count - 1))]  # fmt: skip
        moments.append(np.concatenate(rows))
    loss = [_beside(h, sections.tail, _kept(h, sections, count) + h.kept[count]) for h in (low, high)]
    return Levels(born, make.of(low.handed, high.handed), make.largest(*moments), make.largest(*loss))


def _kept(holdings: Holdings, sections: Sections, blocks: int) -> Array:
    """Bytes that the head and so many blocks keep."""
    total: Array = holdings.kept[-1] + blocks * holdings.kept[sections.typical]
    return total


def _beside(holdings: Holdings, calls: Sequence[int], kept: Array) -> Array:
    rows: Array = holdings.alive[list(calls)] - kept
    return rows


def _backward(sections: Sections, block: int) -> list[int]:
    return [n for n in sections.each[block] if sections.program.calls[n].phase == "backward"]
