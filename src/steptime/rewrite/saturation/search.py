"""Equality saturation as a search: rules and passes fill an e-graph, the cheapest graph is taken out of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from steptime.captured.graph import Value
from steptime.rewrite.flow import Flow, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.rules.rule import Rule
from steptime.rewrite.saturation.bridge import Bridge, Lowering
from steptime.rewrite.saturation.egraph import ENode
from steptime.rewrite.saturation.extraction import Extracted, cheapest_trees, choices_of, extract
from steptime.rewrite.saturation.language import NO_KERNEL
from steptime.rewrite.saturation.matching import Compiled
from steptime.rewrite.saturation.moves import RuleFinder, compiled_ways
from steptime.rewrite.saturation.pricing import NodePrices
from steptime.rewrite.saturation.saturating import NODES, Growth, Saturation
from steptime.rewrite.scene import Pass
from steptime.rewrite.search.problem import Found, Problem

ROUNDS: Final = 4
"""Times that passes are tried on the graph that was taken out."""
SHARE: Final = 0.4
"""Part of the time for rules; the rest is for the integer program."""


@dataclass(frozen=True, kw_only=True)
class Saturated:
    """An e-graph with what was found in it."""

    found: Found
    growth: Growth
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
        self.problem, self.most = problem, nodes
        self.end = time.perf_counter() + seconds
        self.seconds = seconds
        self.clock = _Clock()
        self.bridge = Bridge(flow=problem.flow)
        self.prices = NodePrices(bridge=self.bridge, model=problem.cost, flow=problem.flow)
        finders = [each.find for each in problem.moves if isinstance(each.find, RuleFinder)]
        rules: list[Compiled] = [rule for finder in finders for rule in finder.ways] or list(compiled_ways())
        self.passes = [each for each in problem.moves if not isinstance(each.find, RuleFinder)]
        small = [rule for rule in rules if _grows(rule) <= 0]
        self.grow = [rule for rule in rules if _grows(rule) > 0]
        self.saturation = Saturation(self.bridge.terms, small)
        self.applied: dict[str, int] = {}
        self.graphs = 1

    def run(self) -> Saturated:
        """Fill, take out, and fill again from what was taken out."""
        problem = self.problem
        best, cost = problem.flow, problem.start
        self.bridge.add(problem.flow)
        self.bridge.graph.rebuild()
        self.clock.lap("bridge")
        growth, extracted = Growth(rounds=0, matches=0, nodes=len(self.bridge.graph), stop=""), None
        now = problem.flow
        for number in range(ROUNDS):
            fresh = self._passes(now)
            if number and not fresh:
                break
            left = self.end - time.perf_counter()
            growth = self.saturation.run(max(left * SHARE, 0.0), self.most)
            self.clock.lap("rules")
            extracted = self._extracted(cost if number == 0 else inf)
            self.clock.lap("program")
            made = self._made(extracted)
            if made is None:
                break
            now = made
            price = problem.cost.of_graph(made)
            self.graphs += 1
            self.clock.lap("graph")
            if price < cost:
                best, cost = made, price
            if time.perf_counter() > self.end - 0.25 * self.seconds:
                break
        assert extracted is not None
        found = Found(
            flow=best,
            cost=cost,
            bound=min(extracted.bound, cost),
            graphs=self.graphs,
            stop=_stop(growth, extracted),
        )
        return Saturated(
            found=found,
            growth=growth,
            extracted=extracted,
            applied=self.applied | self.saturation.applied,
            nodes=len(self.bridge.graph),
            classes=len(self.bridge.graph.classes),
            seconds=self.clock.spent,
        )

    def _passes(self, flow: Flow) -> bool:
        """What passes find in a graph, as equalities; whether any is new."""
        scene = self.problem.scene(flow)
        graph, new = self.bridge.graph, False
        for row in self.passes:
            for match in row.find(scene):
                definitions = {**flow.definitions, **self.problem.folds.definitions}
                for old, value in match.replace.items():
                    a, b = (self.bridge.of(each, definitions) for each in (old, value))
                    if graph.classes[a].sort == graph.classes[b].sort and graph.union(a, b):
                        new = True
                        self.applied[row.name] = self.applied.get(row.name, 0) + 1
            graph.rebuild()
        self.clock.lap("passes")
        return new

    def _roots(self) -> list[int]:
        flow = self.problem.flow
        values = [*flow.outputs, *(node.value(0 if len(node.outputs) == 1 else -1) for node in flow.kept)]
        return [self.bridge.graph.find(self.bridge.classes[value]) for value in values]

    def _extracted(self, known: float) -> Extracted:
        self.steady = self._steady()
        choices = choices_of(self.bridge.graph, self._roots(), self.prices, self.steady)
        left = max(self.end - time.perf_counter(), 0.1 * self.seconds)
        limits = [self.problem.cost.limits[each] for each in self.prices.limited]
        return extract(choices, left * 0.8, limits, known)

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


def _grows(rule: Compiled) -> int:
    return rule.target.operators - rule.rule.sources[0].operators


def _stop(growth: Growth, extracted: Extracted) -> str:
    """In words: whether the e-graph is saturated, and whether the program was solved."""
    end = "is the best" if extracted.proved else f"is within {extracted.gap:.1%} of the best"
    if growth.stop:
        return f"{growth.stop}; the graph {end} of the e-graph"
    return f"saturated; the graph {end} of all that these rules reach"
