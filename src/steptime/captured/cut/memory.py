"""Memory of a recorded step by part: what each part keeps, what is alive beside it, what blocks hand on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from steptime.captured.cut.sections import Sections, kept_storages
from steptime.captured.graph import BEFORE
from steptime.num import Array

CLASSES = ("whole", "tokens", "cut")
"""Kinds of storages: all of it on every tensor rank; shared out by tokens under sequence parallelism; cut."""
_ALIVE = ("activation", "temporary")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes by class (last axis in the order of `CLASSES`)."""

    kept: Mapping[int, Array]
    """Of a part: -1 the head, a number a block, the number of blocks the tail."""
    born: Mapping[int, Array]
    """Of the storages that a call makes and that are kept."""
    alive: Array
    """At each call: activations and temporaries, one row a call."""
    handed: Array
    """What a block makes and the next one reads."""


def holdings_of(sections: Sections, classes: Mapping[int, int]) -> Holdings:
    """Sums over the storages of a program; ``classes``: storage -> position in `CLASSES`, else whole."""
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
    """Storages that wait to be added to a gradient of a weight that is used twice: they count as that gradient."""
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
