"""Table of the layouts that each operator supports, and their cost in addition to its kernel.

A row gives the variants of a node: a layout for each result, and requirements on the inputs. The cost to read another
layout is that of the copy that a library makes inside the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from steptime.captured.graph import Node, Nodes, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import OPERATORS, VIEWS, making
from steptime.captured.ops.work import integers
from steptime.rewrite.flow import FUSED, Flow
from steptime.rewrite.layout.copies import Tariff
from steptime.rewrite.layout.strides import (
    CHANNELS_LAST,
    Layout,
    Order,
    dense,
    follows,
    is_gapless,
    is_matrix,
    layout_of,
    order_of,
    rows,
    turned,
    typed,
    within,
)
from steptime.rewrite.retype import looked
from steptime.rewrite.scene import number


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirement of a variant on one input: allowed layouts, and the cost of reading another one."""

    allowed: frozenset[Layout]
    otherwise: float = math.inf


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a node."""

    cost: float
    gives: tuple[Layout, ...]
    needs: tuple[Wanted | None, ...]
    """Requirement on each input; None: any layout at the same cost."""
    turned: bool = False
    """The product is computed as the transpose of the product of the transposed operands."""
    nothing: bool = False
    """The node is a copy that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node with the context that a row uses."""

    flow: Flow
    node: Node
    given: tuple[tuple[Layout, ...], ...]
    """Possible layouts of each input."""
    liked: tuple[Order, ...]
    """Preferred orders of the result's readers."""
    tariff: Tariff
    cost: float
    scratch: Nodes = field(repr=False)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Recorded types of the inputs."""
        return tuple(value.type for value in self.node.inputs)

    @property
    def recorded(self) -> tuple[Layout, ...]:
        """Recorded layouts of the results."""
        return tuple(map(layout_of, self.node.outputs))

    def follow(self, at: int, order: Order, otherwise: float = math.inf) -> Wanted | None:
        """Requirement that input ``at`` has its dims in an order, gaps allowed; None: all its layouts do."""
        type = self.types[at]
        own = within(order, type.rank)
        fitting = {layout for layout in self.given[at] if follows(layout, own)}
        if len(fitting) == len(self.given[at]):
            return None
        return Wanted(frozenset({*fitting, dense(type.shape, own)}), otherwise)

    def exactly(self, at: int, layout: Layout, otherwise: float = math.inf) -> Wanted | None:
        """Requirement that input ``at`` has one layout; None: it has no other."""
        return None if self.given[at] == (layout,) else Wanted(frozenset({layout}), otherwise)

    def orders(self, rank: int) -> list[Order]:
        """Possible orders of inputs of a rank, and preferred orders of readers."""
        found = {tuple(range(rank)): None}
        for type, layouts in zip(self.types, self.given, strict=True):
            if type.rank == rank:
                found |= dict.fromkeys(order_of(layout) for layout in layouts if 0 not in layout or any(layout))
        return list(found | dict.fromkeys(order for order in self.liked if len(order) == rank))


Row = Callable[[Site], Iterable[Variant]]


def recorded(site: Site) -> Iterable[Variant]:
    """Unknown behaviour: recorded layouts of inputs and results only."""
    needs = tuple(site.exactly(at, layout_of(type)) for at, type in enumerate(site.types))
    return [Variant(site.cost, site.recorded, needs)]


def pointwise(site: Site) -> Iterable[Variant]:
    """Element-wise: the first full-size input decides the order of the results; others may be read across it."""
    shape = site.node.outputs[0].shape
    if any(type.shape != shape for type in site.node.outputs):
        yield from recorded(site)
        return
    first = next((at for at, type in enumerate(site.types) if type.shape == shape), -1)
    for order in site.orders(len(shape)):
        needs = tuple(
            site.follow(at, order, math.inf if at == first else site.tariff.strided(type))
            for at, type in enumerate(site.types)
        )
        yield Variant(site.cost, (dense(shape, order),) * len(site.node.outputs), needs)


def view(site: Site) -> Iterable[Variant]:
    """A view: each layout of its input gives one layout of the result, or none."""
    node, type = site.node, site.types[0]
    for layout in dict.fromkeys((*site.given[0], rows(type.shape))):
        x = site.scratch.source("input", "x", typed(type, layout))
        made = looked(site.scratch, node, x)
        if any(value.node.op == "_unsafe_view" for value in made):
            continue
        gives = tuple(layout_of(value.type) for value in made)
        yield Variant(site.cost, gives, (site.exactly(0, layout), *(None,) * (len(site.types) - 1)))


def copy(site: Site) -> Iterable[Variant]:
    """A copy that only changes the layout: left out, or made as recorded."""
    for layout in site.given[0]:
        yield Variant(0.0, (layout,), (site.exactly(0, layout),), nothing=True)
    yield Variant(site.cost, site.recorded, (None,))


def _spatial(site: Site) -> Iterable[Order]:
    rank = max((type.rank for type in site.types), default=0)
    return [tuple(range(rank)), *([CHANNELS_LAST[rank]] if rank in CHANNELS_LAST else [])]


def _in_order(site: Site, order: Order) -> tuple[Layout, ...]:
    """Results with as many dims as the order in that order, others as recorded."""
    return tuple(dense(type.shape, order) if type.rank == len(order) else layout_of(type) for type in site.node.outputs)


def _followed(site: Site, order: Order) -> tuple[Wanted | None, ...]:
    """Requirements that inputs with as many dims as the order have it; the library copies others."""
    return tuple(
        site.follow(at, order, site.tariff.inside(type)) if type.rank == len(order) else None
        for at, type in enumerate(site.types)
    )


def convolution(site: Site) -> Iterable[Variant]:
    """Convolutions: NCHW or NHWC; the library converts images before and after if the kernel has the other order."""
    rank = site.types[0].rank
    if rank not in CHANNELS_LAST:
        yield Variant(site.cost, tuple(rows(type.shape) for type in site.node.outputs), _packed_inputs(site))
        return
    native = site.tariff.native(site.flow, site.node, rank)
    weight = site.node.input("weight")
    images = [value.type for value in site.node.inputs if value.type.rank == rank and value != weight]
    images += [
        type for type in site.node.outputs if type.rank == rank and (weight is None or type.shape != weight.type.shape)
    ]
    more = sum(map(site.tariff.inside, images))
    for order in _spatial(site):
        cost = site.cost + (0.0 if native in (None, order) else more)
        yield Variant(cost, _in_order(site, order), _followed(site, order))


def spatial(site: Site) -> Iterable[Variant]:
    """Pooling, batch norm and resampling: results in the order of the images, NCHW or NHWC."""
    for order in _spatial(site):
        yield Variant(site.cost, _in_order(site, order), _followed(site, order))


def _packed_inputs(site: Site) -> tuple[Wanted | None, ...]:
    return tuple(site.exactly(at, rows(type.shape), site.tariff.inside(type)) for at, type in enumerate(site.types))


def packed(site: Site) -> Iterable[Variant]:
    """Row-major results and inputs; the operator copies other inputs."""
    yield Variant(site.cost, tuple(rows(type.shape) for type in site.node.outputs), _packed_inputs(site))


def reduction(site: Site) -> Iterable[Variant]:
    """Reductions: any order of the input, which the remaining dims keep."""
    node, type = site.node, site.types[0]
    dims = {dim % max(type.rank, 1) for dim in integers(node, "dim")} or set(range(type.rank))
    if len(node.outputs) != 1 or len(node.inputs) != 1:
        yield from recorded(site)
        return
    rank = node.outputs[0].rank
    for order in site.orders(type.rank):
        left = order if rank == type.rank else tuple(dim for dim in order if dim not in dims)
        names = sorted(left)
        if len(left) != rank:
            yield from recorded(site)
            return
        gives = dense(node.outputs[0].shape, tuple(names.index(dim) for dim in left))
        yield Variant(site.cost, (gives,), (site.follow(0, order),))


def product(site: Site) -> Iterable[Variant]:
    """Products: operands may be transposed at no cost if one of the last two dims is dense; the result is row-major,
    or column-major as the transpose of the product of the transposed operands."""
    needs = []
    matrices = len(site.types) - 2
    for at, type in enumerate(site.types):
        fitting = {layout for layout in site.given[at] if is_matrix(type.shape, layout)}
        whole = at < matrices or len(fitting) == len(site.given[at])
        more = frozenset({*fitting, rows(type.shape)})
        needs.append(None if whole else Wanted(more, site.tariff.inside(type)))
    output = site.node.outputs[0]
    yield Variant(site.cost, (rows(output.shape),), tuple(needs))
    if can_turn(site.node):
        sources = (site.scratch.source("input", "x", TensorType(type.shape, type.dtype)) for type in site.types)
        cost = site.tariff.of(site.flow, turned_product(site.scratch, site.node, tuple(sources)).node.inputs[0].node)
        row = matrices and site.types[0].rank < output.rank
        yield Variant(cost + (site.tariff.inside(output) if row else 0.0), (turned(output.shape),), tuple(needs), True)


def can_turn(node: Node) -> bool:
    """True if a product can be computed as the transpose of the product of the transposed operands."""
    rank = node.outputs[0].rank
    added = node.inputs[0].type.rank if len(node.inputs) == 3 else rank
    whole = all(value.type.rank == rank for value in node.inputs[-2:])
    return OPERATORS[node.op].factors is not None and whole and (added == rank or (rank, added) == (2, 1))


def turned_product(nodes: Nodes, node: Node, inputs: tuple[Value, ...]) -> Value:
    r"""A product with its operands in the other order, transposed back: $A B + c = (B^T A^T + c^T)^T$."""
    rank, output = node.outputs[0].rank, node.outputs[0]

    def across(x: Value) -> Value:
        return making.unsqueeze(nodes, x, 1) if x.type.rank < rank else making.transpose(nodes, x, rank - 2, rank - 1)

    *added, left, right = inputs
    operands = (*map(across, added), across(right), across(left))
    shape = (*output.shape[:-2], output.shape[-1], output.shape[-2])
    made = nodes.node(node.op, operands, node.names, node.attributes, (TensorType(shape, output.dtype),))
    return across(made.value())


def joined(site: Site) -> Iterable[Variant]:
    """Concatenations: parts and result in one order; a row-major result may read parts across their order."""
    output = site.node.outputs[0]
    if any(type.rank != output.rank for type in site.types):
        yield from recorded(site)
        return
    last = CHANNELS_LAST.get(output.rank)
    for order in (tuple(range(output.rank)), *([last] if last else [])):
        plain = order != last
        needs = tuple(
            site.follow(at, order, site.tariff.strided(type) if plain else math.inf)
            for at, type in enumerate(site.types)
        )
        yield Variant(site.cost, (dense(output.shape, order),), needs)


def attention(site: Site) -> Iterable[Variant]:
    """Fused attention: the head width of queries, keys and values is dense, other strides are free."""
    needs: list[Wanted | None] = []
    for at, (name, type) in enumerate(zip(site.node.names, site.types, strict=True)):
        fitting = {layout for layout in site.given[at] if layout[-1:] in ((1,), (0,))}
        free = name not in ("query", "key", "value") or len(fitting) == len(site.given[at])
        more = frozenset({*fitting, rows(type.shape)})
        needs.append(None if free else Wanted(more, site.tariff.inside(type)))
    yield Variant(site.cost, site.recorded, tuple(needs))


class Entry(NamedTuple):
    """A row, with its description and its source."""

    row: Row
    says: str
    source: str


TABLE: Final[Mapping[str, Entry]] = {
    "kernel": Entry(
        convolution,
        "NCHW or NHWC; images are converted before and after where the kernel works in the other",
        "NVIDIA, Convolutional Layers User's Guide; measured on a CPU: Tariff.native in copies",
    ),
    "images": Entry(
        spatial,
        "NCHW or NHWC at the same traffic, results as images",
        "PyTorch, Channels Last Memory Format: operators that support it",
    ),
    "matrix": Entry(
        product,
        "operands by rows or columns for nothing where one of the last two dims is dense, else a copy; by columns: the"
        " operands change places, and a bias row is copied out",
        "BLAS gemm: TRANSA, TRANSB, leading dims",
    ),
    "rows": Entry(
        packed,
        "row-major; a copy is made of anything else",
        "PyTorch, SoftMax.cu host_softmax and layer_norm: input.contiguous()",
    ),
    "joined": Entry(
        joined,
        "parts and result in one order, NCHW or NHWC; by rows strided parts are read across",
        "PyTorch, TensorShape.cpp cat: memory format of its inputs; the cost is assumed",
    ),
    "reduction": Entry(reduction, "any order, kept by the dims that stay", "PyTorch, TensorIterator reductions"),
    "heads": Entry(
        attention,
        "the width of a head dense, other strides free",
        "PyTorch, sdp_utils.cpp: last dim of stride 1",
    ),
    "pointwise": Entry(
        pointwise,
        "inputs and results in one order; the first whole input decides, others are read across it",
        "PyTorch, TensorIterator; the cost of reading across is assumed",
    ),
    "view": Entry(view, "free: one layout shows as another, or as none", "strides"),
    "copy": Entry(copy, "left out where the layouts are equal", "definition"),
}
""":attr:`steptime.captured.ops.operator.Operator.layouts` -> entry; ``recorded`` has none."""


def row_of(flow: Flow, node: Node) -> Row:
    """The row of a node."""
    if node.op in SOURCES or not node.inputs or not node.outputs:
        return recorded
    if node.op == "_to_copy" and node.outputs[0].dtype == node.inputs[0].type.dtype:
        return copy
    handed = node.op in ("clone", "contiguous") and node.value() in flow.wanted and node.inputs[0].node.op in SOURCES
    if handed or (node.op in VIEWS and OPERATORS[node.op].layouts != "view") or number(node, "draw") is not None:
        return recorded
    found = OPERATORS.get(node.op)
    layouts = "pointwise" if node.op == FUSED else "recorded" if found is None else found.layouts
    return TABLE[layouts].row if layouts in TABLE else recorded


def is_target(type: TensorType, layout: Layout) -> bool:
    """True if a copy can make the layout."""
    return is_gapless(type.shape, layout)
