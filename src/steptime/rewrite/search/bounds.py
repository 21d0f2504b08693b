r"""How cheap a graph can be that the moves reach: a bound for every search.

**Islands.** A *barrier* is an operator that no move touches (:attr:`~steptime.rewrite.scene.Pass.touches`): none
removes it, or looks through it. Cut the graph at the results of barriers; nodes are in one island if one reads the
other across no barrier, if both read the same value that is not constant, or if both are products with the same weight.

1. A match is connected by data that pass no barrier, by a shared input, or by a shared weight; so it lies in one
   island, and what it makes reads only what the island reads.
2. Two nodes of different islands never become one. The first to do so would read the same values; these are constant or
   of the border, and islands share no value of the border.
3. What an output depends on by a path without a slice stays: moves keep the function.

Therefore every reachable graph is one choice of a reachable graph in each island, and

$$C(G) \ge \sum_i \min_{G_i} C(G_i)$$

over islands $i$ all of whose results are needed; the minimum is exact where the set of an island's graphs closes
(:func:`~steptime.rewrite.search.exhaustive.exhaustive`). Equal islands are closed once.

**Convolutions.** In an island that does not close, if no move lowers the operations of convolutions or the length of a
chain of them (:attr:`~steptime.rewrite.scene.Pass.keeps_convolutions`),

$$C \ge w_d \sum_k \frac{F_k}{s_k P} + w_f \sum_k F_k + (w_h h + w_l)\,L$$

with $F_k$ the operations of a needed convolution, $P$ the peak of the device, $s_k$ = 4 where Winograd's transform may
save as much (3 x 3, stride 1) and 1 else, $L$ the longest chain of them, $h$ the host's time for a launch, and $w$ the
weights. Convolutions with the same weight count once. Source: own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steptime.captured.graph import Node
from steptime.captured.ops import VIEWS
from steptime.rewrite.flow import CONV_RELU, Flow
from steptime.rewrite.scene import Folds
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.exhaustive import exhaustive
from steptime.rewrite.search.problem import Problem
from steptime.rewrite.search.region import Region, cut
from steptime.rewrite.search.space import Space
from steptime.rewrite.search.split import movable

GRAPHS: Final = 1024
"""Graphs of an island before it counts as one that does not close."""
LARGEST: Final = 64
"""Nodes of an island that is tried."""
NARROWING: Final = frozenset(
    {"slice", "select", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "as_strided"}
    | {"diagonal", "unfold", "index", "index_select", "gather", "embedding", "narrow", "where"}
)
"""Operators whose result may leave parts of an input out."""
PRODUCTS: Final = ("mm", "addmm", "bmm", "convolution", CONV_RELU)
WINOGRAD: Final = 4.0
"""Multiplications that F(4x4, 3x3) saves. Source: Lavin and Gray, arXiv 1509.09308."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What no reachable graph is below."""

    cost: float
    closed: int
    """Islands whose graphs were all priced."""
    islands: int


def lower_bound(problem: Problem, control: Control | None = None, unclosed: set[object] | None = None) -> Bound:
    """A cost below which the moves reach no graph; see the module for the proof. Limits are left out of it.

    Args:
        problem: graph, moves, cost.
        control: when to stop before, and whom to tell.
        unclosed: islands that are known not to close, which are not tried; those that are found are put in.
    """
    unclosed = set() if unclosed is None else unclosed
    control = control or Control()
    if not all(row.touches for row in problem.moves) or not _folds(problem):
        return Bound(cost=0.0, closed=0, islands=1)
    flow = Space(problem=problem).tidied(problem.flow)
    model = replace(problem.cost, limits={}, peak_limit_bytes=None, peak_weight=0.0)
    additive = replace(problem, cost=model)
    needed = _needed(flow)
    known: dict[object, float | None] = {}
    total, closed, groups = 0.0, 0, islands(problem, flow)
    for nodes in groups:
        region = cut(flow, nodes)
        if not all(value.node in needed for value in region.outputs):
            continue
        if region.key not in known:
            known[region.key] = None if region.key in unclosed else _least(additive, region, nodes, control)
            if known[region.key] is None:
                unclosed.add(region.key)
        found = known[region.key]
        closed += found is not None
        total += _convolutions(additive, flow, nodes, needed) if found is None else found
    return Bound(cost=total, closed=closed, islands=len(groups))


def _folds(problem: Problem) -> bool:
    """Constants that several islands read cost nothing once they are folded."""
    return problem.flow.training or any(row.name == "constant folding" for row in problem.moves)


def islands(problem: Problem, flow: Flow) -> list[list[Node]]:
    """Nodes of each island, in order."""
    touched = frozenset().union(*(row.touches for row in problem.moves)) | VIEWS
    nodes = movable(flow)
    inside = set(nodes)
    parent = {node: node for node in nodes}

    def top(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(group: Iterable[Node]) -> None:
        members = [node for node in group if node in inside]
        for node in members[1:]:
            parent[top(node)] = top(members[0])

    for value, users in flow.users.items():
        if value.node not in flow.constant:
            through = value.node in inside and value.node.op in touched
            join([value.node, *users] if through else users)
        else:
            join(user for user in users if user.op in PRODUCTS)
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        found[top(node)].append(node)
    return list(found.values())


def _needed(flow: Flow) -> set[Node]:
    """Nodes that an output depends on by a path that leaves nothing out."""
    seen: set[Node] = set()
    stack = [value.node for value in flow.outputs]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [] if node.op in NARROWING else [value.node for value in node.inputs]
    return seen


def _least(problem: Problem, region: Region, nodes: Sequence[Node], control: Control) -> float | None:
    """Least cost of an island; None where its graphs do not close."""
    if len(nodes) > LARGEST or control.why():
        return None
    found = exhaustive(replace(problem, flow=region.flow, folds=Folds()), GRAPHS, control)
    return found.bound if found.bound or not found.cost else None


def _convolutions(problem: Problem, flow: Flow, nodes: Sequence[Node], needed: set[Node]) -> float:
    """What the convolutions of an island need whatever is merged."""
    rows = [row for row in problem.moves if "convolution" in row.touches]
    if not all(row.keeps_convolutions for row in rows):
        return 0.0
    model, weights = problem.cost, problem.cost.weights
    length: dict[Node, int] = {}
    once: dict[object, tuple[float, float]] = {}
    for node in nodes:
        own = node.op in ("convolution", CONV_RELU) and node in needed
        length[node] = own + max((length.get(value.node, 0) for value in node.inputs), default=0)
        cost = model.prices.cost(flow, node) if own else None
        if cost is not None:
            kernel = node.inputs[1].type.shape[2:]
            rate = cost.peak_flops_per_s * (WINOGRAD if kernel == (3, 3) else 1.0)
            flops = float(cost.work.matrix_flops)
            once.setdefault((node.inputs[1], node.attributes), (flops, min(flops / rate, cost.seconds)))
    chain = max(length.values(), default=0)
    launch = weights.get("host_s", 0.0) * model.prices.timer.host_s + weights.get("launches", 0.0)
    flops, seconds = (sum(each[n] for each in once.values()) for n in (0, 1))
    return weights.get("device_s", 0.0) * seconds + weights.get("flops", 0.0) * flops + launch * chain
