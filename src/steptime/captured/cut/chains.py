"""A recorded step without equal blocks as a chain of parts: cut where few activations pass on in its forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from steptime.captured.cost import work_of
from steptime.captured.graph import BEFORE, Program
from steptime.num import Array

MOST_PARTS: Final = 16
MOST_CROSSING: Final = 4
"""Activations that pass a cut at most; more than one only inside of a part that is heavy."""
HEAVY: Final = 4 / MOST_PARTS
"""Share of computation and share of parameters, added up, from which a part is cut where several activations pass."""
LEAST: Final = 1 / (4 * MOST_PARTS)
"""The same below which a part joins a neighbour: activation functions, pools, dropouts."""


@dataclass(kw_only=True)
class _Pass:
    """Calls of the forward pass and where each storage is made, written and read in it, by place in the pass."""

    calls: Sequence[int]
    made: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)

    def crossing(self, place: int) -> list[int]:
        """Storages that are made before a place and read from it on."""
        return [n for n, made in self.made.items() if made < place <= self.read.get(n, -1)]


def chain_of(program: Program) -> tuple[list[int], list[str]]:
    """Part of each call, from 0, and the names of the parts; -1: the optimiser.

    A cut lies between two modules, where one activation passes on, apart from parameters and inputs, and where the
    backward pass has left the modules behind the cut before it comes to those before it. Parts without a share worth
    mention of computation or parameters, and the lightest while there are more than 16, join the neighbour from which
    or to which more bytes pass. A part is named after its first module; there is one, ``whole``, without a cut.
    """
    forward = _pass_of(program)
    backward = [n for n, call in enumerate(program.calls) if call.phase == "backward"]
    turns = {place: _turn(program, forward, backward, place) for place in _candidates(program, forward)}
    cuts = _chosen(program, forward, [place for place, turn in turns.items() if turn is not None])
    out = [-1] * len(program.calls)
    for part, (low, high) in enumerate(pairwise([0, *cuts, len(forward.calls)])):
        for place in range(low, high):
            out[forward.calls[place]] = part
    for place, number in enumerate(backward):
        out[number] = sum(place < (turns[cut] or 0) for cut in cuts)
    return out, _names(program, forward, cuts)


def _pass_of(program: Program) -> _Pass:
    out = _Pass(calls=[n for n, call in enumerate(program.calls) if call.phase == "forward"])
    for place, number in enumerate(out.calls):
        call = program.calls[number]
        out.read.update(dict.fromkeys(call.reads, place))
        for storage in call.writes:
            if program.storages[storage].born != BEFORE:
                out.made.setdefault(storage, place)
                if not call.view:
                    out.written[storage] = place
    return out


def _candidates(program: Program, forward: _Pass) -> Iterable[int]:
    """Places between two modules over which nothing is written in place: what a part keeps, it has made."""
    modules = [program.calls[number].module for number in forward.calls]
    inside = np.zeros(len(modules) + 1, bool)
    for storage, end in forward.written.items():
        inside[forward.made[storage] + 1 : end + 1] = True
    return [place for place in range(1, len(modules)) if modules[place - 1] != modules[place] and not inside[place]]


def _turn(program: Program, forward: _Pass, backward: Sequence[int], place: int) -> int | None:
    """Where the backward pass comes to the modules before a place; None: it does not leave those behind it first.

    Calls of modules on both sides of the place belong to the side that runs.
    """
    before, behind = (
        {program.calls[number].module for number in part} for part in (forward.calls[:place], forward.calls[place:])
    )
    both = before & behind
    sides = [
        0 if module in both else (module in before) - (module in behind)
        for module in (program.calls[number].module for number in backward)
    ]
    first = next((n for n, side in enumerate(sides) if side > 0), len(sides))
    return None if -1 in sides[first:] else first


def _chosen(program: Program, forward: _Pass, places: Iterable[int]) -> list[int]:
    """Cuts where one activation passes, more of them in heavy parts; then light parts join a neighbour."""
    weight = np.concatenate([[0.0], np.cumsum(_weights(program, forward))])
    crossing = {place: forward.crossing(place) for place in places}
    size = {place: sum(program.storages[n].size_bytes for n in each) for place, each in crossing.items()}
    ends = [0, len(forward.calls)]
    for most in range(1, MOST_CROSSING + 1):
        heavy = [(low, high) for low, high in pairwise(ends) if most == 1 or weight[high] - weight[low] > HEAVY]
        found = {at for at, each in crossing.items() if len(each) <= most and any(a < at < b for a, b in heavy)}
        ends = sorted({*ends, *found})
    while len(ends) > 2:
        shares = np.diff(weight[ends])
        part = int(shares.argmin())
        if len(shares) <= MOST_PARTS and shares[part] >= LEAST:
            break
        ends.remove(max((at for at in ends[part : part + 2] if at in size), key=lambda at: (size[at], -at)))
    return ends[1:-1]


def _weights(program: Program, forward: _Pass) -> Array:
    """Share of computation plus share of parameters of each call; a parameter is of the first that reads it."""
    left = {each.storage: each.elements for each in program.parameters}
    computed, read = np.zeros(len(forward.calls)), np.zeros(len(forward.calls))
    for place, number in enumerate(forward.calls):
        call = program.calls[number]
        if not call.view:
            work = work_of(call.node, inplace=call.inplace)
            computed[place] = float(work.matrix_flops + work.vector_flops)
        read[place] = sum(left.pop(storage, 0) for storage in call.reads)
    out: Array = computed / max(computed.sum(), 1.0) + read / max(read.sum(), 1.0)
    return out


def _names(program: Program, forward: _Pass, cuts: Sequence[int]) -> list[str]:
    """The first module of each part; numbered where several parts begin in one."""
    if not cuts:
        return ["whole"]
    out: list[str] = []
    for low, high in pairwise([0, *cuts, len(forward.calls)]):
        modules = (program.calls[number].module for number in forward.calls[low:high])
        name = next(filter(None, modules), "outside")
        count = sum(each.split(" ")[0] == name for each in out)
        out.append(name if not count else f"{name} ({count + 1})")
    return out
