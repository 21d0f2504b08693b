"""Rules applied in an e-graph until nothing is new, or a limit is reached."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.rewrite.rules.terms import VARIABLE, Term
from steptime.rewrite.saturation.bridge import Terms
from steptime.rewrite.saturation.egraph import EGraph
from steptime.rewrite.saturation.language import ADDMM
from steptime.rewrite.saturation.matching import Compiled, Found, Index, Way

NODES: Final = 50_000
"""E-nodes above which no rule is applied any more."""
ITERATIONS: Final = 15
MATCHES: Final = 400
"""Matches of one rule in one round after which it rests, doubled each time."""
MOST: Final = 100_000
"""Matches of one round."""
DEPTH: Final = 4
"""Operators of the deepest rule: what a change below may concern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How an e-graph grew."""

    rounds: int
    matches: int
    nodes: int
    stop: str
    """Empty where it is saturated: no rule finds anything new."""


@dataclass(slots=True)
class _Rest:
    """When a rule may be tried again; a rule with too many matches rests for some rounds (egg's back-off)."""

    until: int = 0
    times: int = 0


class Saturation:
    """Rules over one e-graph, which may be run again after the graph has more terms."""

    def __init__(self, terms: Terms, ways: Iterable[Way]) -> None:
        self.terms, self.graph = terms, terms.graph
        self.index = Index(ways)
        self._touched = self.graph.watch()
        self._rests: dict[int, _Rest] = {}
        self._left: dict[int, set[int]] = {}
        """Rule -> classes where it has not been tried while it rested."""
        self._done: set[tuple[object, ...]] = set()
        self.applied: Counter[str] = Counter()

    def run(self, seconds: float, nodes: int = NODES, rounds: int = ITERATIONS) -> Growth:
        """Apply rules until nothing is new or a limit is reached."""
        end, total, number = time.perf_counter() + seconds, 0, 0
        stop = "" if rounds else "the limit of rounds"
        while number < rounds:
            number += 1
            before = len(self.graph)
            found, stop = self._matched(number, end)
            total += len(found)
            changed = self._apply(found, nodes, end)
            changed |= _epilogues(self.terms) or len(self.graph) > before
            self.graph.rebuild()
            if len(self.graph) >= nodes:
                stop = f"the limit of {nodes:,} e-nodes"
            if stop or (not changed and not self._left):
                break
            stop = "the limit of rounds"
        return Growth(rounds=number, matches=total, nodes=len(self.graph), stop=stop)

    def _matched(self, number: int, end: float) -> tuple[list[tuple[Compiled, int, Found]], str]:
        """Matches of all rules where something changed."""
        graph, changed = self.graph, self.graph.above(self._touched, DEPTH)
        self._touched.clear()
        waiting = {rule: {graph.find(each) for each in left} for rule, left in self._left.items()}
        counts: dict[int, int] = {}
        found: list[tuple[Compiled, int, Found]] = []
        left: dict[int, set[int]] = {}
        every = changed.union(*waiting.values())
        for root in sorted(every):
            if time.perf_counter() > end or len(found) > MOST:
                self._touched |= every
                return found, "the limit of time" if len(found) <= MOST else "the limit of matches"
            for op in () if graph.classes[root].steady else list(graph.classes[root].nodes):
                for rule, node in self.index.at(graph, root, op):
                    if root not in changed and root not in waiting.get(rule.number, ()):
                        continue
                    rest = self._rests.setdefault(rule.number, _Rest())
                    limit = MATCHES << rest.times
                    late = time.perf_counter() > end
                    if late or rest.until > number or counts.get(rule.number, 0) >= limit:
                        left.setdefault(rule.number, set()).add(root)
                        continue
                    for match in rule.matches(graph, root, node):
                        key = (rule.number, root, *match.classes.values(), *match.numbers.values())
                        if key not in self._done:
                            self._done.add(key)
                            found.append((rule, root, match))
                            counts[rule.number] = counts.get(rule.number, 0) + 1
        for rule_number, count in counts.items():
            rest = self._rests[rule_number]
            if count >= MATCHES << rest.times:
                rest.times += 1
                rest.until = number + 1 + rest.times
        self._left = left
        return found, ""

    def _apply(self, found: Sequence[tuple[Compiled, int, Found]], nodes: int, end: float) -> bool:
        changed = False
        for count, (rule, root, match) in enumerate(found):
            if len(self.graph) >= nodes or (count % 64 == 0 and time.perf_counter() > end + 1.0):
                # What is left out is matched again, so that no graph counts as saturated without it.
                self._touched |= {left for _, left, _ in found[count:]}
                self._done.clear()
                break
            made = instance(self.terms, rule, match)
            if made is None or self.graph.classes[made].sort != self.graph.classes[self.graph.find(root)].sort:
                continue
            if self.graph.union(made, root):
                changed = True
                self.applied[rule.rule.name] += 1
        return changed


def instance(terms: Terms, rule: Compiled, match: Found) -> int | None:
    """The class of a rule's target for a match; None where it does not fit the types."""

    def made(term: Term) -> int | None:
        if term.op == VARIABLE:
            return terms.graph.find(match.classes[term.name])
        attributes = tuple(terms.plain(each(match.numbers)) for each in rule.targets[term])
        return terms.make(term.op, attributes, *map(made, term.children))

    return made(rule.target)


def _epilogues(terms: Terms) -> bool:
    """Sums of a matrix product and what broadcasts to it, as one operator; whether any is new."""
    graph: EGraph = terms.graph
    changed = False
    for number in graph.having("add"):
        for node in list(graph.nodes(number, "add")):
            for product, other in (node[2], node[2][::-1]):
                for inner in list(graph.nodes(graph.find(product), "matmul")):
                    made = terms.make(ADDMM, (), other, *inner[2])
                    if made is not None and graph.classes[made].sort == graph.classes[graph.find(number)].sort:
                        changed |= graph.union(made, number)
    return changed
