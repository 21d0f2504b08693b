"""The layout problem of a graph: variants of every node, conversions of every value, and the best choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steptime.captured.graph import Node, Nodes, Value
from steptime.rewrite.flow import Flow
from steptime.rewrite.layout.copies import Tariff
from steptime.rewrite.layout.problem import Assignment, Need, Option, Slot
from steptime.rewrite.layout.rows import (
    Site,
    Variant,
    Wanted,
    convolution,
    copy,
    is_target,
    joined,
    pointwise,
    recorded,
    row_of,
    spatial,
    view,
)
from steptime.rewrite.layout.solver import TIME_LIMIT_S, Solved, solve
from steptime.rewrite.layout.strides import Layout, Order, layout_of
from steptime.rewrite.search.problem import CostModel

MOST: Final = 6
"""Largest number of layouts of one value that are considered."""
_CARRY: Final = (pointwise, spatial, joined, copy)
"""Rows whose inputs have the layout of their results."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best layouts of a graph."""

    flow: Flow
    variants: Mapping[Node, Variant]
    conversions: Mapping[Value, tuple[Layout, ...]]
    """Value -> layouts into which it is copied."""
    inside: tuple[tuple[Node, int], ...]
    """Nodes and numbers of inputs that they copy internally or read across their order."""
    cost: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Layouts of graphs under one cost model, with cached prices and variants."""

    model: CostModel
    limit_s: float = TIME_LIMIT_S
    tariff: Tariff = field(repr=False)
    _variants: dict[object, tuple[Variant, ...]] = field(default_factory=dict, repr=False)
    _costs: dict[object, float] = field(default_factory=dict, repr=False)
    _scratch: Nodes = field(default_factory=Nodes, repr=False)

    @classmethod
    def under(cls, model: CostModel, limit_s: float = TIME_LIMIT_S) -> Layouts:
        """Layouts under a cost model."""
        return cls(model=model, limit_s=limit_s, tariff=Tariff(model=model))

    def cost(self, flow: Flow, *, fixed: bool = False) -> float:
        """Cost of a graph in its best layouts.

        Args:
            flow: the graph.
            fixed: price recorded layouts instead; copies that operators make themselves are counted.
        """
        if (self.model.limits or self.model.peak_limit_bytes is not None) and math.isinf(self.model.of_graph(flow)):
            return math.inf
        key = (flow.outputs, flow.kept, fixed)
        if key not in self._costs:
            self._costs[key] = self._solved(flow, fixed)[1].cost
        return self._costs[key]

    def choose(self, flow: Flow, *, fixed: bool = False) -> Choice:
        """The best layouts of a graph."""
        built, found = self._solved(flow, fixed)
        problem = built.problem
        needs = problem.needs_of(found.choice)
        conversions: dict[Value, tuple[Layout, ...]] = {}
        for number, (value, slot) in enumerate(zip(built.values, problem.slots, strict=True)):
            given = problem.vertices[slot.vertex][found.choice[slot.vertex]].gives[slot.index]
            made = problem.conversions(number, given, needs[number])[1]
            if made:
                conversions[value] = tuple(built.layouts[value][t] for t in made)
        variants = {
            node: options[chosen] for (node, options), chosen in zip(built.variants.items(), found.choice, strict=False)
        }
        inside = tuple(
            (node, at)
            for node, variant in variants.items()
            for at, (value, wanted) in enumerate(zip(node.inputs, variant.needs, strict=True))
            if wanted is not None
            and wanted.allowed.isdisjoint((variants[value.node].gives[value.index], *conversions.get(value, ())))
        )
        return Choice(
            flow=flow, variants=variants, conversions=conversions, inside=inside, cost=found.cost, bound=found.bound
        )

    def _solved(self, flow: Flow, fixed: bool) -> tuple[_Built, Solved]:
        built = _Built.of(self, flow, fixed)
        return built, solve(built.problem, self.limit_s)

    def variants(
        self, flow: Flow, node: Node, given: tuple[tuple[Layout, ...], ...], liked: tuple[Order, ...], fixed: bool
    ) -> tuple[Variant, ...]:
        """Variants of a node, the recorded one first; some variant always gives the recorded layouts."""
        cost = self.tariff.of(flow, node)
        row = row_of(flow, node)
        key = (node, row, given, liked, fixed, cost)
        found = self._variants.get(key)
        if found is None:
            site = Site(
                flow=flow, node=node, given=given, liked=liked, tariff=self.tariff, cost=cost, scratch=self._scratch
            )
            made = dict.fromkeys(row(site))
            same = [each for each in made if each.gives == site.recorded and not each.turned]
            same = [each for each in same if not (fixed and each.nothing)] or list(recorded(site))
            found = tuple(dict.fromkeys(same if fixed else (*same, *made)))
            self._variants[key] = found
        return found


@dataclass(frozen=True, kw_only=True)
class _Built:
    """The problem of a graph, with the meaning of its numbers."""

    problem: Assignment
    variants: Mapping[Node, tuple[Variant, ...]]
    values: Sequence[Value]
    layouts: Mapping[Value, Sequence[Layout]]

    @classmethod
    def of(cls, owner: Layouts, flow: Flow, fixed: bool) -> _Built:
        """Build the variants in the order of the graph, then slots with the layouts that are given or needed."""
        liked = {} if fixed else _liked(owner, flow)
        layouts: dict[Value, dict[Layout, int]] = {}
        variants: dict[Node, tuple[Variant, ...]] = {}
        for node in flow.order:
            given = tuple(tuple(layouts[value]) for value in node.inputs)
            orders = tuple(liked.get(node.value(), ())) if node.outputs else ()
            found = owner.variants(flow, node, given, orders, fixed)
            found = _few(found)
            variants[node] = found
            for index in range(len(node.outputs)):
                names = dict.fromkeys(each.gives[index] for each in found)
                layouts[node.value(index)] = {layout: n for n, layout in enumerate(names)}
        if fixed:
            variants = {node: tuple(map(_as_it_ran, found)) for node, found in variants.items()}
        return cls._numbered(owner, flow, variants, layouts, fixed)

    @classmethod
    def _numbered(
        cls,
        owner: Layouts,
        flow: Flow,
        variants: Mapping[Node, tuple[Variant, ...]],
        layouts: dict[Value, dict[Layout, int]],
        fixed: bool,
    ) -> _Built:
        values = [node.value(index) for node in variants for index in range(len(node.outputs))]
        slot = {value: n for n, value in enumerate(values)}
        vertices = []
        for node, found in variants.items():
            options = []
            for each in found:
                gives = tuple(layouts[node.value(i)][layout] for i, layout in enumerate(each.gives))
                needs = tuple(
                    _need(slot, layouts, value, wanted)
                    for value, wanted in zip(node.inputs, each.needs, strict=True)
                    if wanted is not None
                )
                options.append(Option(each.cost, gives, needs))
            vertices.append(tuple(options))
        kept = [
            _need(slot, layouts, value, Wanted(frozenset({layout_of(value.type)})))
            for value in dict.fromkeys(flow.outputs)
        ]
        vertices.append((Option(0.0, (), tuple(kept)),))
        at = {node: n for n, node in enumerate(variants)}
        slots = []
        for value in values:
            copied = 0.0 if value.node in flow.constant else owner.tariff.conversion(value.type)
            copied = math.inf if fixed else copied
            prices = tuple(copied if is_target(value.type, layout) else math.inf for layout in layouts[value])
            slots.append(Slot(at[value.node], value.index, prices))
        problem = Assignment(vertices=tuple(vertices), slots=tuple(slots))
        return cls(problem=problem, variants=variants, values=values, layouts={v: tuple(n) for v, n in layouts.items()})


def _need(slot: Mapping[Value, int], layouts: Mapping[Value, dict[Layout, int]], value: Value, wanted: Wanted) -> Need:
    numbers = layouts[value]
    return Need(
        slot[value],
        frozenset(numbers.setdefault(each, len(numbers)) for each in sorted(wanted.allowed)),
        wanted.otherwise,
    )


def _as_it_ran(variant: Variant) -> Variant:
    """A variant that accepts its recorded inputs, at the cost of the operator's own copies."""
    needs = (None if each is None or math.isinf(each.otherwise) else each for each in variant.needs)
    return replace(variant, needs=tuple(needs))


def _few(found: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """The first variants, with at most :data:`MOST` layouts of the results."""
    if len(found) <= MOST:
        return found
    names = {gives: n for n, gives in enumerate(dict.fromkeys(each.gives for each in found))}
    return tuple(each for each in found if names[each.gives] < MOST)


def _liked(owner: Layouts, flow: Flow) -> dict[Value, dict[Order, None]]:
    """Orders of convolution kernels, propagated back to their inputs through operators that keep the order."""
    out: dict[Value, dict[Order, None]] = {}
    for node in reversed(flow.order):
        row = row_of(flow, node)
        rank = node.inputs[0].type.rank if node.inputs else 0
        orders: dict[Order, None] = {}
        if row is convolution and rank in (4, 5):
            native = owner.tariff.native(flow, node, rank)
            orders = {} if native is None else {native: None}
        elif row in _CARRY or row is view:
            orders = out.get(node.value(), {}) if node.outputs and node.outputs[0].rank == rank else {}
        for value in node.inputs if orders else ():
            if value.type.rank == rank:
                out.setdefault(value, {}).update(orders)
    return out
