"""The best choice of layouts with a proof: dominated options go, the rest is an integer program, solved by HiGHS.

Vertices with one option left cut the graph into regions. Equal regions (equal blocks, and regions that a rewrite did
not touch) are solved once: :class:`Memo` keeps their solutions by what they are made of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from steptime.errors import UserError
from steptime.registry import needed
from steptime.rewrite.layout.problem import Assignment, Need, Option

TIME_LIMIT_S: Final = 20.0
"""Most seconds of HiGHS for one region."""
EXACT: Final = 1e-9
"""Gap below which a solution counts as the optimum."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A choice, its cost, and a bound that no choice is below."""

    choice: tuple[int, ...]
    cost: float
    bound: float


@dataclass(slots=True)
class Memo:
    """Solutions of regions by their signature, and how often they were asked for."""

    regions: dict[object, tuple[tuple[int, ...], float, float]] = field(default_factory=dict)
    hits: int = 0
    programs: int = 0


def solve(problem: Assignment, memo: Memo | None = None, limit_s: float = TIME_LIMIT_S) -> Solved:
    """The cheapest choice.

    Args:
        problem: vertices, options and slots.
        memo: solutions of regions from before.
        limit_s: most seconds of each region.
    """
    memo = memo or Memo()
    alive = _undominated(problem)
    choice = [options[0] if len(options) == 1 else -1 for options in alive]
    bound = 0.0
    for region in _regions(problem, alive):
        local, back = _part(problem, alive, choice, region)
        signature = (local.vertices, local.slots)
        found = memo.regions.get(signature)
        if found is None:
            memo.programs += 1
            found = memo.regions[signature] = _by_program(local, limit_s)
        else:
            memo.hits += 1
        for vertex, chosen in zip(back, found[0], strict=False):
            choice[vertex] = alive[vertex][chosen]
        bound += found[2] - found[1]
    cost = problem.total(choice)
    return Solved(tuple(choice), cost, cost + bound)


def _undominated(problem: Assignment) -> list[list[int]]:
    """Options of each vertex that may be in a best choice: another may not be as cheap, as easy and as useful."""
    alive = [list(range(len(options))) for options in problem.vertices]
    results: list[list[int]] = [[] for _ in alive]
    for number, slot in enumerate(problem.slots):
        results[slot.vertex].append(number)
    waiting = list(reversed(range(len(alive))))
    while waiting:
        changed: set[int] = set()
        for vertex in waiting:
            if len(alive[vertex]) > 1 and _drop(problem, alive, vertex, results[vertex]):
                changed |= {problem.slots[n.slot].vertex for option in problem.vertices[vertex] for n in option.needs}
        waiting = sorted(changed, reverse=True)
    return alive


def _drop(problem: Assignment, alive: list[list[int]], vertex: int, slots: Sequence[int]) -> bool:
    options = problem.vertices[vertex]
    wanted = []
    for slot in slots:
        sets = {
            need.allowed
            for reader in problem.readers[slot]
            for number in alive[reader]
            for need in problem.vertices[reader][number].needs
            if need.slot == slot
        }
        wanted.append((problem.slots[slot].index, sets))
    kept: list[int] = []
    for number in sorted(alive[vertex], key=lambda n: (options[n].cost, n)):
        if not any(_beats(options[other], options[number], wanted) for other in kept):
            kept.append(number)
    fewer = len(kept) < len(alive[vertex])
    alive[vertex] = sorted(kept)
    return fewer


def _beats(a: Option, b: Option, wanted: Sequence[tuple[int, set[frozenset[int]]]]) -> bool:
    """Whether ``a``, which costs no more than ``b``, serves its readers and asks for no more."""
    for index, sets in wanted:
        if a.gives[index] != b.gives[index] and any(
            b.gives[index] in each and a.gives[index] not in each for each in sets
        ):
            return False
    if a.needs == b.needs:
        return True
    theirs: dict[int, list[Need]] = defaultdict(list)
    for need in b.needs:
        theirs[need.slot].append(need)
    for need in a.needs:
        match = next(
            (o for o in theirs[need.slot] if o.allowed <= need.allowed and o.otherwise >= need.otherwise), None
        )
        if match is None:
            return False
        theirs[need.slot].remove(match)
    return True


def _regions(problem: Assignment, alive: Sequence[Sequence[int]]) -> list[list[int]]:
    """Free vertices that slots join, in order."""
    parent = list(range(len(alive)))

    def root(vertex: int) -> int:
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    for slot, readers in zip(problem.slots, problem.readers, strict=True):
        free = [vertex for vertex in (slot.vertex, *readers) if len(alive[vertex]) > 1]
        for vertex in free[1:]:
            parent[root(vertex)] = root(free[0])
    found: dict[int, list[int]] = defaultdict(list)
    for vertex in range(len(alive)):
        if len(alive[vertex]) > 1:
            found[root(vertex)].append(vertex)
    return list(found.values())


def _part(
    problem: Assignment, alive: Sequence[Sequence[int]], choice: Sequence[int], region: Sequence[int]
) -> tuple[Assignment, list[int]]:
    """A region as a problem of its own: free vertices first, then vertices with one option that share a slot."""
    inside = dict.fromkeys(region)
    slots = [
        number
        for number, slot in enumerate(problem.slots)
        if slot.vertex in inside or not inside.keys().isdisjoint(problem.readers[number])
    ]
    back = list(region)
    for number in slots:
        for vertex in (problem.slots[number].vertex, *problem.readers[number]):
            if vertex not in inside:
                inside[vertex] = None
                back.append(vertex)
    at = {vertex: n for n, vertex in enumerate(back)}
    name = {slot: n for n, slot in enumerate(slots)}
    vertices = []
    for vertex in back:
        numbers = alive[vertex] if len(alive[vertex]) > 1 else [choice[vertex]]
        options = []
        for number in numbers:
            option = problem.vertices[vertex][number]
            needs = tuple(Need(name[n.slot], n.allowed, n.otherwise) for n in option.needs if n.slot in name)
            options.append(Option(option.cost if len(numbers) > 1 else 0.0, option.gives, needs))
        vertices.append(tuple(options))
    made = tuple(
        type(problem.slots[n])(at[problem.slots[n].vertex], problem.slots[n].index, problem.slots[n].convert)
        for n in slots
    )
    return Assignment(vertices=tuple(vertices), slots=made), back


class _Program:
    """Columns and rows of the integer program of a region."""

    def __init__(self, local: Assignment) -> None:
        self.local = local
        self.cost: list[float] = []
        self.whole: list[int] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.low: list[float] = []
        self.high: list[float] = []
        self.x = [[self._column(o.cost, whole=True) for o in options] for options in local.vertices]
        for columns in self.x:
            self._row([(column, 1.0) for column in columns], 1.0, 1.0)
        for number in range(len(local.slots)):
            self._slot(number)

    def _column(self, cost: float, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def _row(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> None:
        at = len(self.low)
        for column, value in entries:
            self.entries[0].append(at)
            self.entries[1].append(column)
            self.entries[2].append(value)
        self.low.append(low)
        self.high.append(high)

    def _slot(self, number: int) -> None:
        local, slot = self.local, self.local.slots[number]
        groups: dict[tuple[int, frozenset[int], float, int], list[int]] = defaultdict(list)
        for reader in local.readers[number]:
            for option, column in zip(local.vertices[reader], self.x[reader], strict=True):
                seen: dict[tuple[frozenset[int], float], int] = defaultdict(int)
                for need in option.needs:
                    if need.slot == number:
                        key = (need.allowed, need.otherwise)
                        groups[reader, *key, seen[key]].append(column)
                        seen[key] += 1
        givers = list(zip(local.vertices[slot.vertex], self.x[slot.vertex], strict=True))
        made: dict[int, int] = {}
        for (_, allowed, otherwise, _), columns in groups.items():
            serving = [column for option, column in givers if option.gives[slot.index] in allowed]
            if len(serving) == len(givers):
                continue
            entries = [(column, 1.0) for column in columns] + [(column, -1.0) for column in serving]
            for target in sorted(allowed):
                if math.isfinite(slot.convert[target]):
                    if target not in made:
                        made[target] = self._column(slot.convert[target])
                    entries.append((made[target], -1.0))
            if math.isfinite(otherwise):
                entries.append((self._column(otherwise), -1.0))
            self._row(entries, -math.inf, 0.0)


def _by_program(local: Assignment, limit_s: float) -> tuple[tuple[int, ...], float, float]:
    optimize, sparse = (needed(name, "layouts", "rewrite") for name in ("scipy.optimize", "scipy.sparse"))
    import numpy as np

    program = _Program(local)
    rows, columns, values = program.entries
    shape = (len(program.low), len(program.cost))
    scale = max(program.cost) or 1.0
    found = optimize.milp(
        np.array(program.cost) / scale,
        integrality=np.array(program.whole),
        bounds=optimize.Bounds(0, np.where(np.array(program.whole) > 0, 1.0, np.inf)),
        constraints=optimize.LinearConstraint(
            sparse.csr_matrix((values, (rows, columns)), shape=shape), program.low, program.high
        ),
        options={"time_limit": limit_s, "mip_rel_gap": EXACT},
    )
    if found.x is None:
        raise UserError(f"no layouts were found in {limit_s:g} s", hint="take fewer blocks of the model")
    choice = tuple(max(range(len(each)), key=lambda n, each=each: found.x[each[n]]) for each in program.x)  # type: ignore[misc]
    cost = local.total(choice)
    bound = cost if found.status == 0 else float(found.mip_dual_bound) * scale
    return choice, cost, min(bound, cost)
