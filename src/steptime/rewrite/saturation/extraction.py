"""The cheapest graph of an e-graph, exactly: an integer program over e-nodes with sharing (HiGHS)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

from steptime.rewrite.saturation.egraph import EGraph, ENode

Price = Callable[[ENode], Sequence[float]]
"""The cost of an e-node, then what else is limited; infinite where it has no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """An e-node for each class that is needed, and what is known of its cost."""

    choice: Mapping[int, ENode]
    cost: float
    """Sum of the prices of the chosen e-nodes, each once."""
    bound: float
    """No choice of this e-graph costs less."""
    nodes: int
    """E-nodes of the integer program."""
    proved: bool
    """The program was solved to the end."""

    @property
    def gap(self) -> float:
        """How far the cost is above the bound, as a part of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """An e-node that can be chosen."""

    node: ENode
    costs: Sequence[float]
    children: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What can be chosen for each class that the roots may need."""

    options: Mapping[int, tuple[Option, ...]]
    roots: frozenset[int]
    free: Mapping[int, ENode] = field(default_factory=dict)
    """Classes that cost nothing, with the e-node of each."""

    @property
    def size(self) -> int:
        """The number of e-nodes."""
        return sum(map(len, self.options.values()))


def cheapest_trees(graph: EGraph, numbers: Iterable[int], price: Callable[[ENode], float]) -> dict[int, ENode]:
    """For each class that has a finite term its e-node whose term is cheapest, shared parts counted each time."""
    classes = list(numbers)
    best: dict[int, tuple[float, ENode]] = {}
    users: dict[int, set[int]] = {}
    prices = {number: [(node, price(node)) for node in graph.classes[number].all()] for number in classes}
    for number in classes:
        for node, _ in prices[number]:
            for child in node[2]:
                users.setdefault(graph.find(child), set()).add(number)
    waiting = dict.fromkeys(classes)
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        known = best.get(number, (inf, ("", (), ())))[0]
        for node, own in prices[number]:
            total = own + sum(best[c][0] if (c := graph.find(child)) in best else inf for child in node[2])
            if total < known - 1e-15 * max(abs(known), 1e-300) or (number not in best and isfinite(total)):
                known = total
                best[number] = (total, node)
                waiting |= dict.fromkeys(users.get(number, ()))
    return {number: node for number, (_, node) in best.items()}


def choices_of(graph: EGraph, roots: Iterable[int], price: Price, steady: Mapping[int, ENode]) -> Choices:
    """What can be chosen below roots, without e-nodes that another of their class dominates.

    An e-node is dominated where another costs no more and needs no class that it does not need. ``steady``: e-nodes of
    classes that are constant in every run, which cost nothing.
    """
    wanted = frozenset(map(graph.find, roots))
    reached = _reached(graph, wanted, steady)
    free = _free(graph, reached, price) | {number: steady[number] for number in reached if number in steady}
    options: dict[int, tuple[Option, ...]] = {}
    for number in reached:
        if number in free:
            continue
        found = []
        for node in graph.classes[number].all():
            children = frozenset(c for each in node[2] if (c := graph.find(each)) not in free)
            costs = price(node)
            if number not in children and isfinite(costs[0]):
                found.append(Option(node, costs, children))
        options[number] = tuple(_undominated(found))
    options = _makeable(options)
    needed = _below(options, wanted - free.keys())
    return Choices(options={number: options[number] for number in needed}, roots=wanted - free.keys(), free=free)


def _reached(graph: EGraph, roots: Iterable[int], steady: Mapping[int, ENode]) -> list[int]:
    seen, stack = dict.fromkeys(roots), list(roots)
    while stack:
        number = stack.pop()
        if number in steady:
            continue
        for node in graph.classes[number].all():
            for child in map(graph.find, node[2]):
                if child not in seen:
                    seen[child] = None
                    stack.append(child)
    return list(seen)


def _free(graph: EGraph, numbers: Sequence[int], price: Price) -> dict[int, ENode]:
    """Classes with a term all of whose e-nodes cost nothing."""
    return cheapest_trees(graph, numbers, lambda node: 0.0 if not any(price(node)) else inf)


def _undominated(options: list[Option]) -> Iterator[Option]:
    options.sort(key=lambda each: (len(each.children), each.costs[0]))
    kept: list[Option] = []
    for each in options:
        if not any(
            one.children <= each.children and all(a <= b for a, b in zip(one.costs, each.costs, strict=True))
            for one in kept
        ):
            kept.append(each)
            yield each


def _makeable(options: dict[int, tuple[Option, ...]]) -> dict[int, tuple[Option, ...]]:
    """Without e-nodes that need a class for which there is none."""
    while True:
        known = {number for number, found in options.items() if found}
        left = {
            number: tuple(each for each in found if each.children <= known)
            for number, found in options.items()
            if found
        }
        if left == options:
            return left
        options = left


def _below(options: Mapping[int, tuple[Option, ...]], roots: Iterable[int]) -> list[int]:
    seen, stack = dict.fromkeys(roots), list(roots)
    while stack:
        for option in options[stack.pop()]:
            for child in option.children:
                if child not in seen:
                    seen[child] = None
                    stack.append(child)
    return list(seen)


def greedy(choices: Choices, weigh: Callable[[int, Option], float] | None = None) -> dict[int, Option]:
    """The cheapest tree of each class: an incumbent that ignores sharing.

    ``weigh``: the cost of an option of a class, where it is not its price.
    """
    price = weigh or (lambda _, option: option.costs[0])
    best: dict[int, float] = {}
    chosen: dict[int, Option] = {}
    users: dict[int, set[int]] = {}
    for number, options in choices.options.items():
        for option in options:
            for child in option.children:
                users.setdefault(child, set()).add(number)
    waiting = dict.fromkeys(choices.options)
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        for option in choices.options[number]:
            whole = price(number, option) + sum(best.get(child, inf) for child in option.children)
            if whole < best.get(number, inf) * (1 - 1e-12):
                best[number], chosen[number] = whole, option
                waiting |= dict.fromkeys(users.get(number, ()))
    return chosen


def selected(choices: Choices, chosen: Mapping[int, Option]) -> dict[int, Option]:
    """The part of a choice that the roots need.

    Raises:
        ValueError: it needs a class for which nothing is chosen, or goes round in a circle.
    """
    out: dict[int, Option] = {}
    stack = [(number, False) for number in sorted(choices.roots)]
    open_: set[int] = set()
    while stack:
        number, leaving = stack.pop()
        if leaving:
            open_.discard(number)
            continue
        if number in open_:
            raise ValueError("a choice goes round in a circle")
        if number in out:
            continue
        if number not in chosen:
            raise ValueError("a class is needed for which nothing is chosen")
        out[number] = chosen[number]
        open_.add(number)
        stack.append((number, True))
        stack += [(child, False) for child in sorted(chosen[number].children) if child not in out or child in open_]
    return out


def total(chosen: Mapping[int, Option]) -> float:
    """The sum of costs of chosen e-nodes."""
    return float(sum(option.costs[0] for option in chosen.values()))


def extract(choices: Choices, seconds: float, limits: Sequence[float] = ()) -> Extracted:
    r"""The cheapest choice, by an integer program.

    $$\min \sum_n c_n x_n,\quad \sum_{n \in k} x_n \ge 1\ (k \text{ a root}),\quad
      \sum_{m \in k} x_m \ge x_n\ (k \text{ a child of } n),\quad
      \sum_{(k, j) \in C} \sum_{n \in k,\ n \to j} x_n \le |C| - 1\ (C \text{ a circle of classes})$$

    with $x_n$ whether e-node $n$ of cost $c_n$ is chosen. Circles of two classes are ruled out from the start, longer
    ones when a solution has one; after some of them an order of the classes of each strongly connected component $S$
    rules out all: $t_k - t_j \ge 1 - |S| (1 - x_n)$. Every program on the way is a relaxation, so its bound holds.
    Source: Yang et al., Tensat, MLSys 2021, section 5.1; circles as cuts: own.

    Args:
        choices: what can be chosen.
        seconds: time of the solver.
        limits: largest sums of what else e-nodes cost.
    """
    if not choices.options:
        return Extracted(choice=dict(choices.free), cost=0.0, bound=0.0, nodes=0, proved=True)
    start = _incumbent(choices) if not limits else None
    end, bound, found = time.perf_counter() + seconds, disjoint_bound(choices), None
    proved = start is not None and total(start) <= bound * (1 + ROUNDING)
    program = None if proved else _Program(choices, limits)
    for number in range(CUTS + 1) if program else ():
        assert program is not None
        if number == CUTS:
            program.order()
        picked, low, done = program.solve(max(end - time.perf_counter(), 0.1))
        bound = max(bound, low)
        circle = None if picked is None else _circle(choices, picked)
        if circle is None:
            found, proved = picked, done
            break
        assert picked is not None
        near = None if limits else _repaired(choices, picked)
        start = min((each for each in (start, near) if each is not None), key=total, default=None)
        program.rule_out(circle)
        if time.perf_counter() > end:
            break
    options = [each for each in (None if found is None else selected(choices, found), start) if each is not None]
    best = min(options, key=total, default={})
    cost = total(best) if best else inf
    chosen = dict(choices.free) | {number: option.node for number, option in best.items()}
    return Extracted(choice=chosen, cost=cost, bound=min(bound, cost), nodes=choices.size, proved=proved)


ROUNDING: Final = 1e-9
"""Relative difference of two sums of the same costs."""
CUTS: Final = 30
"""Solutions with circles after which the classes are ordered."""


def disjoint_bound(choices: Choices) -> float:
    r"""A lower bound of the cheapest choice, exact where nothing can be shared.

    $$L(k) = \min_{n \in k} \Big( c_n + \sum_{G} \max_{j \in G} L(j) \Big)$$

    over groups $G$ of the children of $n$ that can need a common class; children of different groups share nothing, so
    that their costs add. Source: own.
    """
    reach = _reach(choices)
    users: dict[int, set[int]] = {}
    groups: dict[Option, list[list[int]]] = {}
    for number, options in choices.options.items():
        for option in options:
            groups[option] = _grouped(option.children, reach)
            for child in option.children:
                users.setdefault(child, set()).add(number)
    low: dict[int, float] = {}
    waiting = dict.fromkeys(choices.options)

    def least(parts: Iterable[Iterable[int]]) -> float:
        return sum(max(low.get(each, inf) for each in part) for part in parts)

    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        best = min((option.costs[0] + least(groups[option]) for option in choices.options[number]), default=inf)
        if best < low.get(number, inf):
            low[number] = best
            waiting |= dict.fromkeys(users.get(number, ()))
    found = least(_grouped(choices.roots, reach))
    return found if isfinite(found) else 0.0


def _reach(choices: Choices) -> dict[int, int]:
    """The classes that each class may need, itself among them, as bits."""
    out = {number: 1 << at for at, number in enumerate(choices.options)}
    users: dict[int, set[int]] = {}
    for number, options in choices.options.items():
        for child in (child for option in options for child in option.children):
            users.setdefault(child, set()).add(number)
    waiting = dict.fromkeys(reversed(out))
    while waiting:
        child = next(iter(waiting))
        del waiting[child]
        for user in users.get(child, ()):
            new = out[user] | out[child]
            if new != out[user]:
                out[user] = new
                waiting[user] = None
    return out


def _grouped(numbers: Iterable[int], reach: Mapping[int, int]) -> list[list[int]]:
    groups: list[tuple[int, list[int]]] = []
    for number in numbers:
        bits, members, rest = reach[number], [number], []
        for other, found in groups:
            if other & bits:
                bits, members = bits | other, members + found
            else:
                rest.append((other, found))
        groups = [*rest, (bits, members)]
    return [members for _, members in groups]


def _incumbent(choices: Choices) -> dict[int, Option] | None:
    """The best of some greedy choices: what many use is charged to each of them in part."""
    best: dict[int, Option] | None = None
    uses: Counter[int] = Counter()

    def shared(number: int, option: Option) -> float:
        return option.costs[0] / max(uses[number], 1)

    for _ in range(GREEDY):
        found = _acyclic(choices, shared)
        if found is None:
            break
        best = found if best is None else min(best, found, key=total)
        uses = Counter(child for option in found.values() for child in option.children)
    return best


GREEDY: Final = 8
"""Greedy choices that are tried."""


def _acyclic(choices: Choices, weigh: Callable[[int, Option], float]) -> dict[int, Option] | None:
    try:
        return selected(choices, greedy(choices, weigh))
    except ValueError:
        return None


def _repaired(choices: Choices, picked: Mapping[int, Option]) -> dict[int, Option] | None:
    """A choice without circles near one that has some: what it chose is nearly free."""
    return _acyclic(choices, lambda number, option: option.costs[0] * (1e-3 if picked.get(number) is option else 1.0))


def _circle(choices: Choices, chosen: Mapping[int, Option]) -> list[int] | None:
    """Classes of a choice that need each other in a circle; None where there is no circle below the roots."""
    done: set[int] = set()
    for root in sorted(choices.roots):
        path, at = [root], {root: 0}
        rest = [iter(sorted(chosen[root].children))]
        while path:
            child = next((each for each in rest[-1] if each not in done), None)
            if child is None:
                done.add(path.pop())
                at.popitem()
                rest.pop()
            elif child in at:
                return path[at[child] :]
            else:
                at[child] = len(path)
                path.append(child)
                rest.append(iter(sorted(chosen[child].children)))
    return None


@dataclass(slots=True)
class _Rows:
    """Constraints of a program as triplets. Filled in place."""

    at: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, entries: Iterable[tuple[int, float]], low: float, high: float = inf) -> None:
        """One row."""
        self.at += [(len(self.low), column, value) for column, value in entries]
        self.low.append(low)
        self.high.append(high)


class _Program:
    """The integer program of some choices. Rows are added between solutions."""

    def __init__(self, choices: Choices, limits: Sequence[float]) -> None:
        self.columns = [(number, option) for number, options in choices.options.items() for option in options]
        self.of: dict[int, list[int]] = {}
        for column, (number, _) in enumerate(self.columns):
            self.of.setdefault(number, []).append(column)
        self.components = _components(choices)
        self.position: dict[int, int] = {}
        self.rows = rows = _Rows()
        for number in choices.roots:
            rows.add([(column, 1.0) for column in self.of[number]], 1.0)
        for number, members in self.of.items():
            self._needs(number, members)
        self.scale = max((option.costs[0] for _, option in self.columns), default=1.0) or 1.0
        self.cost = [option.costs[0] / self.scale for _, option in self.columns]
        for at, limit in enumerate(limits, 1):
            largest = max((option.costs[at] for _, option in self.columns), default=0.0) or 1.0
            entries = ((n, option.costs[at] / largest) for n, (_, option) in enumerate(self.columns))
            rows.add(entries, -inf, limit / largest)
        pairs = {(n, c) for n, option in self.columns if n in self.components for c in option.children if c > n}
        for a, b in sorted(pairs):
            if any(a in self.columns[column][1].children for column in self.of[b]):
                self.rule_out([a, b])

    def _needs(self, number: int, members: Sequence[int]) -> None:
        """All e-nodes of a class that need another one, together: at most one of them is chosen in a best solution."""
        children: dict[int, list[int]] = {}
        for column in members:
            for child in self.columns[column][1].children:
                children.setdefault(child, []).append(column)
        for child, users in children.items():
            self.rows.add([*((each, 1.0) for each in self.of[child]), *((each, -1.0) for each in users)], 0.0)
        if len(members) > 1:
            self.rows.add([(column, 1.0) for column in members], 0.0, 1.0)

    def rule_out(self, circle: Sequence[int]) -> None:
        """No circle through these classes."""
        entries = [
            (column, 1.0)
            for at, number in enumerate(circle)
            for column in self.of[number]
            if circle[(at + 1) % len(circle)] in self.columns[column][1].children
        ]
        self.rows.add(entries, -inf, len(circle) - 1.0)

    def order(self) -> None:
        """Positions of the classes that can need themselves."""
        self.position = {number: len(self.columns) + at for at, number in enumerate(self.components)}
        sizes = Counter(self.components.values())
        for column, (number, option) in enumerate(self.columns):
            own = self.components.get(number)
            for child in option.children if own is not None else ():
                if own is not None and self.components.get(child) == own:
                    size = float(sizes[own])
                    entries = [(self.position[number], 1.0), (self.position[child], -1.0), (column, -size)]
                    self.rows.add(entries, 1.0 - size)

    def solve(self, seconds: float) -> tuple[dict[int, Option] | None, float, bool]:
        """The chosen options, the bound, and whether the program was solved to the end."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped,unused-ignore]
        from scipy.sparse import csr_array  # type: ignore[import-untyped,unused-ignore]

        rows, count = self.rows, len(self.columns)
        at, columns, values = zip(*rows.at, strict=True)
        extra = len(self.position)
        matrix = csr_array((values, (at, columns)), shape=(len(rows.low), count + extra))
        result = milp(
            np.array([*self.cost, *[0.0] * extra]),
            integrality=np.array([1.0] * count + [0.0] * extra),
            bounds=Bounds(0.0, np.array([1.0] * count + [float(extra)] * extra)),
            constraints=LinearConstraint(matrix, rows.low, rows.high),
            options={"time_limit": seconds, "mip_rel_gap": 1e-9},
        )
        dual = getattr(result, "mip_dual_bound", None)
        bound = float(dual) * self.scale if dual is not None and isfinite(dual) else 0.0
        if result.x is None:
            return None, bound, result.status == INFEASIBLE
        picked = {}
        for number, members in self.of.items():
            column = max(members, key=lambda each: result.x[each])
            if result.x[column] > 0.5:
                picked[number] = self.columns[column][1]
        return picked, bound, result.status == 0


INFEASIBLE: Final = 2
"""Status of a program that nothing solves: no choice is within the limits."""


def _components(choices: Choices) -> dict[int, int]:
    """Classes that can need themselves -> the number of their strongly connected component."""
    import numpy as np
    from scipy.sparse import csr_array  # type: ignore[import-untyped,unused-ignore]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped,unused-ignore]

    numbers = list(choices.options)
    place = {number: at for at, number in enumerate(numbers)}
    pairs = {(place[n], place[c]) for n, options in choices.options.items() for o in options for c in o.children}
    if not pairs:
        return {}
    a, b = zip(*pairs, strict=True)
    graph = csr_array((np.ones(len(pairs)), (a, b)), shape=(len(numbers), len(numbers)))
    _, labels = connected_components(graph, directed=True, connection="strong")
    sizes = np.bincount(labels)
    return {number: int(labels[at]) for number, at in place.items() if sizes[labels[at]] > 1}
