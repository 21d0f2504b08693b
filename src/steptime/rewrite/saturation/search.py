"""Equality saturation as a search: rules and passes fill an e-graph, the cheapest graph is taken out of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.saturation.bridge import Bridge, Lowering
from steptime.rewrite.saturation.egraph import ENode
from steptime.rewrite.saturation.extraction import Extracted, cheapest_trees, choices_of, extract
from steptime.rewrite.saturation.language import NO_KERNEL
from steptime.rewrite.saturation.matching import Way
from steptime.rewrite.saturation.moves import RuleFinder, shipped_ways
from steptime.rewrite.saturation.pricing import NodePrices
from steptime.rewrite.saturation.saturating import NODES, Saturation
from steptime.rewrite.search.problem import Found, Problem

ROUNDS: Final = 4
"""Times that passes are tried on the graph that was taken out."""
SHARE: Final = 0.5
"""Part of the time that is left which rules may take; the rest is for the integer program."""
FIRST: Final = 0.15
"""Part of the time that is left which the first program may take, before siblings are merged."""
GROWTH: Final = 8
"""Times that rules which add operators may enlarge an e-graph."""
MERGES: Final = frozenset({"merge siblings", "merged siblings"})


@dataclass(frozen=True, kw_only=True)
class Saturated:
    """An e-graph with what was found in it."""

    found: Found
    extracted: Extracted
    applied: Mapping[str, int]
    """Rule or pass -> how often it made two classes one."""
    nodes: int
    classes: int
    seconds: Mapping[str, float]


def saturate(problem: Problem, seconds: float = 20.0) -> Found:
    """The cheapest graph of the e-graph that the moves of a problem fill.

    The bound is that of the integer program: no graph of the e-graph costs less. ``stop`` says whether the e-graph is
    saturated, so that it is a bound of every graph that these rules reach.
    """
    return saturated(problem, seconds).found


def saturated(problem: Problem, seconds: float = 20.0, nodes: int = NODES) -> Saturated:
    """As :func:`saturate`, with how it came about."""
    return _Search(problem, seconds, nodes).run()


@dataclass(slots=True)
class _Clock:
    """Seconds by what they were spent on. Changed in place."""

    spent: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, what: str) -> None:
        """Book the time since the last call."""
        now = time.perf_counter()
        self.spent[what] = self.spent.get(what, 0.0) + now - self.last
        self.last = now


class _Search:
    def __init__(self, problem: Problem, seconds: float, nodes: int) -> None:
        self.problem, self.most, self.seconds = problem, nodes, seconds
        self.end, self.clock = time.perf_counter() + seconds, _Clock()
        self.bridge = Bridge(flow=problem.flow)
        self.prices = NodePrices(bridge=self.bridge, model=problem.cost, flow=problem.flow)
        finders = [each.find for each in problem.moves if isinstance(each.find, RuleFinder)]
        ways = [way for finder in finders for way in finder.ways] or shipped_ways()
        ways = [Way(way.rule, number) for number, way in enumerate(ways)]
        self.keeping = Saturation(self.bridge.terms, [way for way in ways if way.growth <= 0])
        self.growing = Saturation(self.bridge.terms, [way for way in ways if way.growth > 0 and way.expands_products])
        self.passes = [each for each in problem.moves if not isinstance(each.find, RuleFinder)]
        self.applied: Counter[str] = Counter()
        self.flow, self.cost = problem.flow, problem.start
        self.graphs, self.partly = 1, any(way.growth > 0 for way in ways)

    def run(self) -> Saturated:
        """Fill, take out, and fill again from what was taken out."""
        self.bridge.add(self.problem.flow)
        self.bridge.graph.rebuild()
        self.clock.lap("bridge")
        now, stop, extracted = self.problem.flow, "", None
        for number in range(ROUNDS):
            # Merges take away what other passes match, so they come in the second round, on the first graph too.
            fresh = self._passes(now, merges=number > 0)
            fresh |= number == 1 and self._passes(self.problem.flow, merges=True)
            if number > 1 and not fresh:
                break
            stop = self._rules()
            extracted = self._extracted(FIRST if number == 0 else 0.8)
            made = self._made(extracted)
            self.clock.lap("graph")
            if made is not None:
                now = made
                self._priced(made)
            elif number:
                stop = stop or "no choice within the limits can be made"
                break
            if time.perf_counter() > self.end - 0.25 * self.seconds:
                stop = stop or "the limit of time"
                break
        else:
            stop = stop or "the limit of rounds"
        assert extracted is not None
        return self._result(stop, extracted)

    def _result(self, stop: str, extracted: Extracted) -> Saturated:
        why = _stop(stop, self.partly, extracted, self.cost)
        bound = min(extracted.bound, self.cost)
        return Saturated(
            found=Found(flow=self.flow, cost=self.cost, bound=bound, graphs=self.graphs, stop=why),
            extracted=extracted,
            applied=self.applied + self.keeping.applied + self.growing.applied,
            nodes=len(self.bridge.graph),
            classes=len(self.bridge.graph.classes),
            seconds=self.clock.spent,
        )

    def _priced(self, flow: Flow) -> None:
        cost = self.problem.cost.of_graph(flow)
        self.graphs += 1
        if cost < self.cost:
            self.flow, self.cost = flow, cost

    def _rules(self) -> str:
        """Rules until nothing is new, with one round of those that expand products in between; why it ended."""
        left = max(self.end - time.perf_counter(), 0.0) * SHARE
        stop = self.keeping.run(left / 2, self.most).stop
        if not stop:
            size = len(self.bridge.graph)
            most = min(self.most, GROWTH * size)
            self.growing.run(left / 4, most, rounds=1)
            stop = self.keeping.run(left / 4, self.most).stop
        self.clock.lap("rules")
        return stop

    def _passes(self, flow: Flow, merges: bool) -> bool:
        """What passes find in a graph, as equalities; whether any is new."""
        scene = self.problem.scene(flow)
        graph, new = self.bridge.graph, False
        for row in self.passes:
            if row.name in MERGES and not merges:
                continue
            for match in row.find(scene):
                definitions = {**flow.definitions, **self.problem.folds.definitions}
                for old, value in match.replace.items():
                    a, b = (self.bridge.of(each, definitions) for each in (old, value))
                    if graph.classes[a].sort == graph.classes[b].sort and graph.union(a, b):
                        new = True
                        self.applied[row.name] += 1
            graph.rebuild()
        self.clock.lap("passes")
        return new

    def _roots(self) -> list[int]:
        flow = self.problem.flow
        values = [*flow.outputs, *(node.value(0 if len(node.outputs) == 1 else -1) for node in flow.kept)]
        return [self.bridge.graph.find(self.bridge.classes[value]) for value in values]

    def _extracted(self, share: float) -> Extracted:
        self.steady = self._steady()
        choices = choices_of(self.bridge.graph, self._roots(), self.prices, self.steady)
        left = max(self.end - time.perf_counter(), 0.1 * self.seconds)
        limits = [self.problem.cost.limits[each] for each in self.prices.limited]
        found = extract(choices, left * share, limits)
        self.clock.lap("program")
        return found

    def _steady(self) -> dict[int, ENode]:
        """E-nodes of classes that are constant in every run: looks at weights where they are some."""
        graph = self.bridge.graph
        steady = [number for number, found in graph.classes.items() if found.steady]
        return cheapest_trees(graph, steady, lambda node: 1e-3 if node[0] in NO_KERNEL else 1.0)

    def _made(self, extracted: Extracted) -> Flow | None:
        """The graph of a choice; None where it cannot be made."""
        flow, folds = self.problem.flow, self.problem.folds
        lowering = Lowering(bridge=self.bridge, choice=extracted.choice, folds=folds, steady=self.steady)
        wanted = [*flow.outputs, *(value for node in flow.kept for value in node.inputs)]
        try:
            ends = {value: lowering.value(self.bridge.of(value)) for value in dict.fromkeys(wanted)}
            between = {
                value: made[0]
                for node in flow.order
                for value in (node.value(at) for at in range(len(node.outputs)))
                if (made := lowering.made.get(self.bridge.of(value))) and value.type.shape == made[0].type.shape
            }
        except (RefusedError, ValueError, KeyError):
            return None
        for replaced in (between | ends, ends):
            changed = {old: new for old, new in replaced.items() if old != new}
            try:
                return substituted(flow, changed, folds.definitions)
            except RefusedError:
                continue
        return None


def _stop(why: str, partly: bool, extracted: Extracted, cost: float) -> str:
    """In words: whether the e-graph is saturated, and whether the program was solved."""
    gap = 1 - extracted.bound / cost if cost > 0 else 0.0
    end = "the best" if gap < SAME else f"within {gap:.1%} of the best"
    if why:
        return f"{why}; the graph is {end} of its e-graph, which is not saturated"
    rules = "rules that add no operator reach" if partly else "the rules reach"
    return f"saturated; the graph is {end} of all that {rules} from the graphs that were met"


SAME: Final = 1e-6
"""Gap that is none."""
