"""Graphs in their chosen layouts, with copies inserted and removed as nodes, so that they can be run and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from steptime.captured.graph import Node, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import making
from steptime.rewrite.flow import Flow, Place
from steptime.rewrite.layout.model import Choice, Layouts
from steptime.rewrite.layout.rows import Variant, Wanted, row_of, turned_product, view
from steptime.rewrite.layout.strides import CHANNELS_LAST, Layout, dense, layout_of, name_of, order_of, rows, typed
from steptime.rewrite.retype import looked
from steptime.rewrite.search.problem import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A copy of a value into another layout."""

    type: TensorType
    of: str
    """Operator that makes the value."""
    layout: str
    module: str
    cost: float
    constant: bool
    """The value is a weight, which is stored in the layout before the run."""
    by: str = ""
    """Operator that copies it internally or reads it across its order; empty: the copy is an operator."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A graph in its best layouts."""

    before: Flow
    flow: Flow
    cost: float
    bound: float
    """Lower bound of the cost of all choices of layouts."""
    fixed: float
    """Cost with recorded layouts."""
    conversions: tuple[Conversion, ...]
    removed: Counter[str]
    """Module with ``*`` for numbers of blocks -> number of copies left out."""
    layouts: Mapping[str, Counter[str]]
    """Module with ``*`` for numbers of blocks -> number of results in each layout other than row-major."""

    @property
    def gain(self) -> float:
        """Cost that the layouts save."""
        return self.fixed - self.cost

    @property
    def gap(self) -> float:
        """Excess of the cost over the bound, as a share of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost > 0 else 0.0

    def copies(self) -> list[Conversion]:
        """Copies that every run makes."""
        return [each for each in self.conversions if not each.constant]

    def to_json(self) -> dict[str, object]:
        """Plain values; costs in the unit of the cost model."""
        return {
            "recorded_cost": self.fixed,
            "cost": self.cost,
            "bound": self.bound,
            "layouts": {module: dict(names) for module, names in self.layouts.items()},
            "copies": [{**asdict(each), "type": str(each.type)} for each in self.copies()],
            "weights_stored": dict(Counter(each.layout for each in self.conversions if each.constant)),
            "copies_left_out": dict(self.removed),
        }


def with_layouts(flow: Flow, cost_model: CostModel) -> Laid:
    """A graph in its best layouts.

    Args:
        flow: the graph.
        cost_model: prices and weights.

    Raises:
        UserError: SciPy is missing, or a region was not solved in time.
    """
    owner = Layouts.under(cost_model)
    choice = owner.choose(flow)
    fixed = owner.cost(flow, fixed=True)
    if choice.cost >= fixed * (1 - 1e-12):
        choice = owner.choose(flow, fixed=True)
        return _described(owner, choice, flow, fixed)
    return _described(owner, choice, _Builder(choice).flow(), fixed)


def _described(owner: Layouts, choice: Choice, made: Flow, fixed: float) -> Laid:
    flow = choice.flow
    layouts: dict[str, Counter[str]] = {}
    removed = Counter[str]()
    for node, variant in choice.variants.items():
        module = flow.block(node)
        removed[module] += variant.nothing
        if node.op in SOURCES or row_of(flow, node) is view or node in flow.constant:
            continue
        for type, layout in zip(node.outputs, variant.gives, strict=True):
            if layout != rows(type.shape):
                layouts.setdefault(module, Counter())[name_of(type, layout)] += 1
    return Laid(
        before=flow,
        flow=made,
        cost=choice.cost,
        bound=choice.bound,
        fixed=fixed,
        conversions=(*_copied(owner, choice), *_inside(choice)),
        removed=+removed,
        layouts=layouts,
    )


def _copied(owner: Layouts, choice: Choice) -> Iterator[Conversion]:
    for value, layouts in choice.conversions.items():
        constant = value.node in choice.flow.constant
        for layout in layouts:
            yield Conversion(
                type=value.type,
                of=value.node.op,
                layout=name_of(value.type, layout),
                module=choice.flow.block(value.node),
                cost=0.0 if constant else owner.tariff.conversion(value.type),
                constant=constant,
            )


def _inside(choice: Choice) -> Iterator[Conversion]:
    for node, at in choice.inside:
        value, wanted = node.inputs[at], choice.variants[node].needs[at]
        if wanted is not None:
            yield Conversion(
                type=value.type,
                of=value.node.op,
                layout=name_of(value.type, min(wanted.allowed)),
                module=choice.flow.block(node),
                cost=wanted.otherwise,
                constant=False,
                by=node.op,
            )


class _Builder:
    """Builder of a graph's nodes in the layouts of a choice."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._old = choice, choice.flow
        self._nodes = choice.flow.nodes
        self._made: dict[Value, Value] = {}
        self._copies: dict[tuple[Value, Layout], Value] = {}
        self._places: dict[Node, Place] = {}
        self._over: dict[Node, tuple[int | None, ...]] = {}
        self._definitions: dict[str, Value] = {}

    def flow(self) -> Flow:
        """The graph in the chosen layouts."""
        for node in self._old.order:
            self._node(node, self._choice.variants[node])
        outputs = tuple(self._read(v, Wanted(frozenset({layout_of(v.type)}))) for v in self._old.outputs)
        kept = tuple(self._made[node.value()].node if node.outputs else node for node in self._old.kept)
        return replace(
            self._old,
            outputs=outputs,
            kept=kept,
            places=self._places,
            over=self._over,
            definitions={**self._old.definitions, **self._definitions},
        )

    def _node(self, node: Node, variant: Variant) -> None:
        inputs = tuple(
            self._made[value] if wanted is None else self._read(value, wanted)
            for value, wanted in zip(node.inputs, variant.needs, strict=True)
        )
        if variant.nothing:
            made: tuple[Value, ...] = inputs[:1]
        elif variant.turned:
            made = (turned_product(self._nodes, node, inputs),)
        elif row_of(self._old, node) is view:
            made = looked(self._nodes, node, inputs[0])
        else:
            types = tuple(typed(type, layout) for type, layout in zip(node.outputs, variant.gives, strict=True))
            fresh = self._nodes.node(node.op, inputs, node.names, node.attributes, types)
            made = tuple(fresh.value(index) for index in range(len(types)))
            if node in self._old.over:
                self._over[fresh] = self._old.over[node]
        for index, value in enumerate(made):
            self._made[node.value(index)] = value
            self._place(value, self._old.places.get(node))

    def _place(self, value: Value, place: Place | None) -> None:
        """Give a value and the new nodes below it the position of the old node."""
        stack = [value.node]
        while stack and place is not None:
            node = stack.pop()
            if node not in self._places and node.op not in SOURCES:
                self._places[node] = place
                stack += [each.node for each in node.inputs]

    def _read(self, value: Value, wanted: Wanted) -> Value:
        made = self._made[value]
        if layout_of(made.type) in wanted.allowed:
            return made
        target = next((each for each in self._choice.conversions.get(value, ()) if each in wanted.allowed), None)
        return made if target is None else self._converted(value, target)

    def _converted(self, value: Value, layout: Layout) -> Value:
        known = self._copies.get((value, layout))
        if known is None:
            made = self._made[value]
            known = convert(self._old, made, layout)
            if value.node in self._old.constant:
                known = self._stored(known)
            self._place(known, self._old.places.get(value.node))
            self._copies[value, layout] = known
        return known

    def _stored(self, value: Value) -> Value:
        """A constant that holds a copied weight."""
        name = f"laid.{len(self._definitions)}"
        while name in self._old.definitions:
            name += "'"
        self._definitions[name] = value
        type = value.type
        return self._nodes.source("constant", name, TensorType(type.shape, type.dtype, type.strides))


def convert(flow: Flow, value: Value, layout: Layout) -> Value:
    """A copy of a value in a gapless layout: a ``clone`` in row-major or channels-last order, else of a permutation."""
    nodes, type = flow.nodes, value.type
    last = CHANNELS_LAST.get(type.rank)
    if layout == rows(type.shape):
        return making.clone(nodes, value)
    if last is not None and layout == dense(type.shape, last):
        form = "torch.channels_last" if type.rank == 4 else "torch.channels_last_3d"
        attributes = {"memory_format": form}
        return nodes.apply("clone", {"self": value}, attributes, outputs=[typed(type, layout)]).value()
    order = order_of(layout)
    back = tuple(order.index(dim) for dim in range(type.rank))
    return making.permute(nodes, making.clone(nodes, making.permute(nodes, value, order)), back)
