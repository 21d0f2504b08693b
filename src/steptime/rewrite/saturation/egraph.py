"""An e-graph of typed tensor terms: classes of equal terms, closed under congruence.

It is our own rather than egglog's. Exact extraction needs every e-node of every class with its type and its price, and
the guards of rules need the sizes, the element type and the constancy of a class; egglog gives neither back without
writing the whole graph as text. Proofs of rules stay with egglog (:mod:`steptime.rewrite.rules.verify_egraph`).

An e-node is (operator, attributes, numbers of the classes of its arguments). Apart from the operators of
:mod:`steptime.rewrite.rules.operators` there are leaves (values of a graph), calls (an operator of the graph that no
rule looks into, with all its results together) and results (one result of a call).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Attribute: TypeAlias = int | float | str
ENode: TypeAlias = tuple[str, tuple[Attribute, ...], tuple[int, ...]]
LEAF: Final = "leaf"
CALL: Final = "call"
RESULT: Final = "result"


@dataclass(frozen=True, slots=True)
class Sort:
    """What all terms of a class have: shape and element type; a call with several results has the type ``tuple``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class EClass:
    """Equal terms. Internal to :class:`EGraph`, which alone changes it."""

    sort: Sort
    steady: bool
    """It is the same in every run: weights, and what is computed from weights alone."""
    nodes: dict[str, dict[ENode, None]] = field(default_factory=dict)
    """Its e-nodes by operator, in the order in which they came."""
    parents: dict[ENode, int] = field(default_factory=dict)

    def all(self) -> Iterator[ENode]:
        """Every e-node."""
        for nodes in self.nodes.values():
            yield from nodes


class EGraph:
    """Classes of equal terms; see the module.

    >>> graph = EGraph()
    >>> row = Sort((4,), "fp32")
    >>> x, y = (graph.add((LEAF, (name,), ()), row) for name in "xy")
    >>> f, g = (graph.add(("relu", (), (each,)), row) for each in (x, y))
    >>> graph.union(x, y)
    True
    >>> graph.rebuild(), graph.find(f) == graph.find(g)
    (None, True)
    """

    def __init__(self) -> None:
        self._above: list[int] = []
        self._known: dict[ENode, int] = {}
        self._dirty: list[int] = []
        self.classes: dict[int, EClass] = {}
        self.by_op: dict[str, dict[int, None]] = {}
        """Operator -> classes that have an e-node of it; some may be merged into others since."""
        self._watchers: list[set[int]] = []

    def __len__(self) -> int:
        """The number of e-nodes."""
        return len(self._known)

    def find(self, number: int) -> int:
        """The number under which a class is now."""
        above = self._above
        root = number
        while above[root] != root:
            root = above[root]
        while above[number] != root:
            above[number], number = root, above[number]
        return root

    def canonical(self, node: ENode) -> ENode:
        """An e-node on the classes as they are numbered now."""
        return node[0], node[1], tuple(map(self.find, node[2]))

    def lookup(self, node: ENode) -> int | None:
        """The class of an e-node, None where it is new."""
        found = self._known.get(self.canonical(node))
        return None if found is None else self.find(found)

    def add(self, node: ENode, sort: Sort, steady: bool = False) -> int:
        """The class of an e-node; a new one where the e-node is new."""
        node = self.canonical(node)
        found = self._known.get(node)
        if found is not None:
            return self.find(found)
        number = len(self._above)
        self._above.append(number)
        self._known[node] = number
        self.classes[number] = EClass(sort, steady, {node[0]: {node: None}})
        for child in node[2]:
            self.classes[child].parents[node] = number
        self.by_op.setdefault(node[0], {})[number] = None
        self._touch(number)
        return number

    def _touch(self, number: int) -> None:
        for each in self._watchers:
            each.add(number)

    def watch(self) -> set[int]:
        """A set to which classes are added when they change, with all that are there now."""
        self._watchers.append(set(self.classes))
        return self._watchers[-1]

    def union(self, a: int, b: int) -> bool:
        """Make two classes one; whether they were two.

        Raises:
            ValueError: their types differ.
        """
        a, b = self.find(a), self.find(b)
        if a == b:
            return False
        one, two = self.classes[a], self.classes[b]
        if one.sort != two.sort:
            raise ValueError(f"{one.sort} and {two.sort} cannot be equal")
        if len(one.parents) < len(two.parents):
            a, b, one, two = b, a, two, one
        self._above[b] = a
        del self.classes[b]
        for op, nodes in two.nodes.items():
            one.nodes.setdefault(op, {}).update(nodes)
            self.by_op[op][a] = None
        one.parents.update(two.parents)
        if one.steady != two.steady:
            one.steady = True
        self._dirty.append(a)
        return True

    def rebuild(self) -> None:
        """Close under congruence, and tell all classes above steady ones."""
        while self._dirty:
            waiting = {self.find(each) for each in self._dirty}
            self._dirty = []
            for number in waiting:
                self._repair(self.find(number))

    def _repair(self, number: int) -> None:
        self._touch(number)
        old = self.classes[number].parents
        parents: dict[ENode, int] = {}
        for node, owner in list(old.items()):
            owner = self.find(owner)
            new = self.canonical(node)
            if new != node:
                self._known.pop(node, None)
                nodes = self.classes[owner].nodes.get(node[0], {})
                nodes.pop(node, None)
                nodes[new] = None
                known = self._known.get(new)
                if known is not None and self.find(known) != owner:
                    self.union(known, owner)
                self._known[new] = owner = self.find(owner)
                for child in new[2]:
                    if child != number:
                        others = self.classes[self.find(child)].parents
                        others.pop(node, None)
                        others[new] = owner
                self._touch(owner)
            parents[new] = owner
            self._spread(new, owner)
        number = self.find(number)
        kept = self.classes[number].parents
        for node in list(old):
            if node not in parents:
                kept.pop(node, None)
        kept.update(parents)

    def _spread(self, node: ENode, owner: int) -> None:
        """A term of steady arguments is steady, unless it is a call, which may draw random numbers."""
        found = self.classes[self.find(owner)]
        if not found.steady and node[0] != CALL and all(self.classes[self.find(c)].steady for c in node[2]):
            found.steady = True
            self._dirty.append(self.find(owner))

    def nodes(self, number: int, op: str) -> Iterable[ENode]:
        """The e-nodes of a class with an operator."""
        return self.classes[number].nodes.get(op, ())

    def having(self, op: str) -> list[int]:
        """All classes with an e-node of an operator."""
        found = dict.fromkeys(map(self.find, self.by_op.get(op, ())))
        self.by_op[op] = found
        return list(found)

    def above(self, numbers: Iterable[int], depth: int) -> set[int]:
        """Classes as they are numbered now, and those above them within a number of levels."""
        level = {self.find(each) for each in numbers}
        out = set(level)
        for _ in range(depth):
            level = {self.find(p) for each in level for p in self.classes[each].parents.values()} - out
            out |= level
        return out
