"""Splits of a graph: by minimum cuts through few matches, and between equal blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.flow import Flow, removed_and_added
from steptime.rewrite.search.problem import Problem
from steptime.rewrite.search.region import cut, is_movable
from steptime.rewrite.search.space import Space

MOST: Final = 30
"""Largest number of operators of a part that is searched as a whole, from MetaFlow."""
WINDOW: Final = 12
"""Number of operators on each side of a border between blocks, within which it is the narrowest place."""
LONGEST: Final = 24
"""Largest number of segments of a block that repeats."""


def movable(flow: Flow) -> list[Node]:
    """Nodes that may be in a part (computed in every run, known and pure), in order."""
    return [node for node in flow.operators if node not in flow.constant and is_movable(node)]


def spans(problem: Problem, flow: Flow) -> Counter[Node]:
    """Number of matches that contain each node, which a cut there would lose."""
    count: Counter[Node] = Counter()
    space = Space(problem=problem)
    for rewrite_pass in space.passes:
        for match in rewrite_pass.find(problem.scene(flow)):
            old, _ = removed_and_added(flow, match.replace)
            count.update({*old, *(value.node for value in match.replace)})
    return count


def parts(flow: Flow, nodes: Sequence[Node], weights: Mapping[Node, int], most: int = MOST) -> list[list[Node]]:
    """Split nodes into parts of at most ``most`` by minimum cuts.

    Args:
        flow: the graph.
        nodes: nodes in the order of the graph.
        weights: number of matches that contain each node.
        most: most nodes of a part.
    """
    done, waiting = list[list[Node]](), [list(nodes)]
    while waiting:
        part = waiting.pop()
        if len(part) <= most:
            done.append(part)
            continue
        first = minimum_cut(part, weights)
        waiting += [[node for node in part if node not in first], [node for node in part if node in first]]
    return done


def minimum_cut(nodes: Sequence[Node], weights: Mapping[Node, int]) -> set[Node]:
    r"""The earlier of two parts that the fewest matches span; each part has at least a third of the nodes.

    Each node $v$ is two vertices, joined by an edge with capacity $1 + m_v$ ($m_v$ matches contain it); edges between
    nodes are unlimited, and none leads back, so the cut goes through nodes. Without SciPy it is in the middle.
    Source: Jia et al., MetaFlow, SysML 2019, section 4.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> table, row = Nodes(), TensorType((4,), "fp32")
    >>> at, made = table.source("input", "x", row), []
    >>> for op in ("exp", "log", "tanh", "relu", "neg", "abs"):
    ...     made.append(table.apply(op, {"self": at}, outputs=[row]))
    ...     at = made[-1].value()
    >>> early = minimum_cut(made, {made[1]: 2, made[2]: 0, made[3]: 2})
    >>> [node.op for node in made if node in early]
    ['exp', 'log', 'tanh']
    """
    import numpy as np

    try:
        from scipy.sparse import csr_array  # type: ignore[import-untyped,unused-ignore]
        from scipy.sparse.csgraph import (  # type: ignore[import-untyped,unused-ignore]
            breadth_first_order,
            maximum_flow,
        )
    except ImportError:
        return set(nodes[: len(nodes) // 2])
    number = {node: n for n, node in enumerate(nodes)}
    size, unlimited = len(nodes), 10**6
    source, sink = 2 * size, 2 * size + 1
    edges: dict[tuple[int, int], int] = {}
    for node, n in number.items():
        edges[2 * n, 2 * n + 1] = 1 + weights.get(node, 0)
        for value in node.inputs:
            m = number.get(value.node)
            if m is not None:
                edges[2 * m + 1, 2 * n] = edges[2 * n, 2 * m] = unlimited
    third = max(size // 3, 1)
    for n in range(third):
        edges[source, 2 * n] = edges[2 * (size - 1 - n) + 1, sink] = unlimited
    rows, columns = np.array(list(edges)).T
    capacity = csr_array((np.array(list(edges.values()), dtype=np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(capacity, source, sink).flow
    left = (capacity - flow).tocsr()
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    first = {node for node, n in number.items() if 2 * n in reached}
    return first if 0 < len(first) < size else set(nodes[: size // 2])


def narrow(flow: Flow, nodes: Sequence[Node]) -> list[list[Node]]:
    """Split nodes into segments at places that fewer values cross than places around them."""
    alive = _alive(flow, nodes)
    ends = [n for n in range(len(nodes) - 1) if alive[n] <= min(alive[max(n - WINDOW, 0) : n + WINDOW + 1], default=0)]
    starts = [0, *(n + 1 for n in ends)]
    return [list(nodes[a:b]) for a, b in zip(starts, [*starts[1:], len(nodes)], strict=True) if a < b]


def _alive(flow: Flow, nodes: Sequence[Node]) -> list[int]:
    """Number of values that are alive after each node."""
    number = {node: n for n, node in enumerate(nodes)}
    last: dict[Value, int] = {}
    for n, node in enumerate(nodes):
        for value in node.inputs:
            if value.node not in flow.constant:
                last[value] = n
    changes = [0] * (len(nodes) + 1)
    for value, end in last.items():
        changes[number.get(value.node, 0)] += 1
        changes[end] -= 1
    out, now = [], 0
    for change in changes[:-1]:
        now += change
        out.append(now)
    return out


def blocks(flow: Flow, nodes: Sequence[Node], most: int) -> list[list[Node]]:
    """Split nodes into blocks: equal blocks are cut at the same places; nodes between them form blocks up to ``most``.

    Args:
        flow: the graph.
        nodes: nodes in the order of the graph.
        most: most nodes of a block that does not repeat.
    """
    segments = narrow(flow, nodes)
    keys = [cut(flow, segment).key for segment in segments]
    out: list[list[Node]] = []
    loose: list[Node] = []
    at = 0
    while at < len(segments):
        period, times = _repeated(keys, at)
        if times < 2:
            if len(loose) + len(segments[at]) > most and loose:
                out.append(loose)
                loose = []
            loose = [*loose, *segments[at]]
            at += 1
            continue
        out += [loose] if loose else []
        loose = []
        for _ in range(times):
            out.append([node for segment in segments[at : at + period] for node in segment])
            at += period
    return [*out, loose] if loose else out


def _repeated(keys: Sequence[object], at: int) -> tuple[int, int]:
    """Length and number of equal runs from ``at`` that cover the most segments; the shortest length on ties."""
    best, found = 0, (1, 1)
    for period in range(1, min(LONGEST, (len(keys) - at) // 2) + 1):
        times = 1
        while keys[at : at + period] == keys[at + times * period : at + (times + 1) * period]:
            times += 1
        if times > 1 and times * period > best:
            best, found = times * period, (period, times)
    return found
