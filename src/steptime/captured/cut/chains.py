"""A recorded step without equal blocks as a chain of parts, cut where few activations cross in its forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from steptime.captured.cost import work_of
from steptime.captured.graph import BEFORE, Program
from steptime.num import Array

MOST_PARTS: Final = 16
MOST_CROSSING: Final = 4
"""Largest number of activations that cross a cut; more than one only inside a heavy part."""
HEAVY: Final = 4 / MOST_PARTS
"""Sum of the fractions of computation and parameters above which a part is cut where several activations cross."""
LEAST: Final = 1 / (4 * MOST_PARTS)
"""Sum of the fractions of computation and parameters below which a part joins a neighbour: activations, pools."""
LEAST_BRANCH: Final = 0.1
"""Least fraction of computation of a branch that may run in parallel to another one."""


class Chain(NamedTuple):
    """Parts of a recorded step."""

    of_call: list[int]
    """Part of each call, from 0; -1: the optimiser."""
    names: list[str]
    parallel: bool
    """True if some parts are branches: nothing passes between them, and each does at least a tenth of the forward."""


def chain_of(program: Program) -> Chain:
    """The parts of a recorded step.

    A cut lies between two modules, where one activation crosses (parameters and inputs do not count), and where the
    backward pass leaves the modules after the cut before it reaches those before the cut. Parts with negligible
    computation and parameters, and the lightest while there are more than 16, join the neighbour with which they
    exchange more bytes. A part has the name of its first module; without a cut there is one part, ``whole``.
    """
    forward = [n for n, call in enumerate(program.calls) if call.phase == "forward"]
    backward = [n for n, call in enumerate(program.calls) if call.phase == "backward"]
    turns = _turns(program, forward, backward)
    computed, weights = _weights(program, forward)
    storages = _storages(program, forward)
    crossing, size_bytes = _crossing(program, storages, len(forward))
    cuts = _candidates(weights, turns, crossing)
    fixed = _branches(storages, np.array([0, *cuts, len(forward)]), computed)
    cuts = _joined(cuts, fixed, weights, size_bytes)
    out = [-1] * len(program.calls)
    for part, (low, high) in enumerate(pairwise([0, *cuts, len(forward)])):
        for number in forward[low:high]:
            out[number] = part
    for place, number in enumerate(backward):
        out[number] = sum(place < turns[cut] for cut in cuts)
    return Chain(out, _names(program, forward, cuts), bool(fixed))


class _Storage(NamedTuple):
    """Places in a forward pass at which a storage is allocated, last written, and read."""

    made: int
    written: int
    read: tuple[int, ...]


def _storages(program: Program, forward: Sequence[int]) -> dict[int, _Storage]:
    """Storages that a forward pass allocates."""
    made, written, read = dict[int, int](), dict[int, int](), dict[int, list[int]]()
    for place, number in enumerate(forward):
        call = program.calls[number]
        for storage in call.reads:
            read.setdefault(storage, []).append(place)
        for storage in call.writes:
            if program.storages[storage].born != BEFORE:
                made.setdefault(storage, place)
                if not call.view:
                    written[storage] = place
    return {n: _Storage(place, written.get(n, place), tuple(read.get(n, (place,)))) for n, place in made.items()}


def _crossing(program: Program, storages: Mapping[int, _Storage], places: int) -> tuple[Array, Array]:
    """Activations that cross each place of the forward pass, infinite where no cut is allowed, and their bytes.

    No write in place crosses a cut, so that each part computes the tensors that it keeps.
    """
    count, size, inside = (np.zeros(places + 2) for _ in range(3))
    for storage, (made, written, read) in storages.items():
        size_bytes = program.storages[storage].size_bytes
        for out, last, each in ((count, read[-1], 1), (size, read[-1], size_bytes), (inside, written, 1)):
            if last > made:
                out[made + 1] += each
                out[last + 1] -= each
    return np.where(np.cumsum(inside) > 0, np.inf, np.cumsum(count)), np.cumsum(size)


def _turns(program: Program, forward: Sequence[int], backward: Sequence[int]) -> dict[int, int]:
    """Place between two modules -> place at which the backward pass reaches the modules before it.

    Only places count whose later modules the backward pass leaves first; sums of gradients of parameters are exempt,
    as they run where the last gradient is made. Calls of a module on both sides of a place belong to the running side.
    """

    def made(number: int) -> set[str]:
        return {program.storages[storage].category for storage in program.calls[number].writes}

    modules = [program.calls[number].module for number in forward]
    first, last = {m: n for n, m in reversed(list(enumerate(modules)))}, {m: n for n, m in enumerate(modules)}
    of_backward = [program.calls[number].module for number in backward]
    earliest = np.minimum.accumulate([*(last.get(m, len(forward)) for m in of_backward), -1])
    behind = [-1 if made(n) == {"gradient"} else first.get(m, -1) for n, m in zip(backward, of_backward, strict=True)]
    still = np.maximum.accumulate([-1, *reversed(behind)])[::-1]
    out = {}
    for place in range(1, len(modules)):
        if modules[place - 1] != modules[place]:
            turn = int(np.argmax(earliest < place))
            if still[turn] < place:
                out[place] = turn
    return out


def _candidates(weights: Array, places: Iterable[int], crossing: Array) -> list[int]:
    """Cuts where one activation crosses, or several in heavy parts."""
    weight, ends = np.concatenate([[0.0], np.cumsum(weights)]), [0, len(weights)]
    for most in range(1, MOST_CROSSING + 1):
        heavy = [(low, high) for low, high in pairwise(ends) if most == 1 or weight[high] - weight[low] > HEAVY]
        found = {at for at in places if crossing[at] <= most and any(low < at < high for low, high in heavy)}
        ends = sorted({*ends, *found})
    return ends[1:-1]


def _branches(storages: Mapping[int, _Storage], ends: Array, computed: Array) -> set[int]:
    """Places where branches begin, and where they meet.

    Parts from a place on are a branch if they read nothing of some parts right before it, which are the other branch.
    Their number is chosen so that the smaller of both branches does the most computation.
    """
    count, done = len(ends) - 1, np.concatenate([[0.0], np.cumsum(computed)])[ends]
    between = np.zeros((count, count), bool)
    for made, _, read in storages.values():
        of_part = np.searchsorted(ends, [made, *read], side="right") - 1
        between[of_part[0], of_part[1:]] = True
    out: set[int] = set()
    for start in (n for n in range(1, count) if not between[n - 1, n]):
        reads = between[start - 1 :: -1, start:]
        meets = np.minimum.accumulate(np.where(reads.any(axis=1), start + reads.argmax(axis=1), count))
        least = np.minimum(done[start] - done[start - 1 :: -1][:start], done[meets] - done[start])
        if least.max() >= LEAST_BRANCH:
            best = int(least.argmax())
            out |= {int(ends[at]) for at in (start - 1 - best, start, meets[best])}
    return out


def _joined(cuts: Sequence[int], fixed: Collection[int], weights: Array, size_bytes: Array) -> list[int]:
    """Cuts that remain after light parts have joined a neighbour; cuts between branches always remain."""
    weight, ends = np.concatenate([[0.0], np.cumsum(weights)]), [0, *cuts, len(weights)]
    while True:
        shares = np.diff(weight[ends])
        light = (part for part in np.argsort(shares) if shares[part] < LEAST or len(shares) > MOST_PARTS)
        free = ({*ends[part : part + 2]} - {0, len(weights), *fixed} for part in light)
        sides = next(filter(None, free), None)
        if sides is None:
            return ends[1:-1]
        ends.remove(max(sides, key=lambda at: (size_bytes[at], -at)))


def _weights(program: Program, forward: Sequence[int]) -> tuple[Array, Array]:
    """Fraction of operations of each call; and this plus the fraction of parameters that the call reads first."""
    left = {each.storage: each.elements for each in program.parameters}
    computed, read = np.zeros(len(forward)), np.zeros(len(forward))
    for place, number in enumerate(forward):
        call = program.calls[number]
        if not call.view:
            work = work_of(call.node, inplace=call.inplace)
            computed[place] = float(work.matrix_flops + work.vector_flops)
        read[place] = sum(left.pop(storage, 0) for storage in call.reads)
    computed /= max(computed.sum(), 1.0)
    return computed, computed + read / max(read.sum(), 1.0)


def _names(program: Program, forward: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Name of the first module of each part, numbered if several parts begin in one module."""
    if not cuts:
        return ["whole"]
    out: list[str] = []
    for low, high in pairwise([0, *cuts, len(forward)]):
        modules = (program.calls[number].module for number in forward[low:high])
        name = next(filter(None, modules), "tail" if high == len(forward) else "between")
        count = sum(each.split(" ")[0] == name for each in out)
        out.append(name if not count else f"{name} ({count + 1})")
    return out
