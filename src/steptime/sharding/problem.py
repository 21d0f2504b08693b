r"""The sharding problem in abstract form: nodes with options, edges with matrices of seconds, memory.

A choice takes one option of every node. It costs

$$T(o) = \sum_v c_v[o_v] + \sum_{(u, v)} M_{uv}[o_u, o_v]$$

with $c_v$ the seconds of each option of node $v$ (operators with their collectives) and $M_{uv}$ the seconds between
two options (resharding of a tensor). An infinite entry is illegal. The entries of a block that represents several equal
blocks include their number as a factor. Memory at each of several points in time is a sum over nodes:

$$B_t(o) = f_t + \sum_{v \text{ live at } t} b_{tv}[o_v] \le L$$

with $f_t$ the bytes that no option changes and $L$ the limit.

Source: Zheng et al., "Alpa", arXiv 2201.12023, section 4; costs there are the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.num import Array

ROUNDING: Final = 1e-9
"""Share of the limit by which a sum of bytes may exceed it, because of floating-point rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One choice: an operator, a parameter, an input."""

    name: str
    cost_s: Array
    """Seconds of each option; infinite: the option is illegal."""
    tags: Array | None = None
    """A number for the placement of each option along each axis of the mesh, [option, axis]; 0: replicated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """Cost of a pair of choices."""

    u: int
    """Number of the first node."""
    v: int
    """Number of the second node, which differs from the first."""
    cost_s: Array
    """Seconds, [option of u, option of v]; infinite: the two options exclude each other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """A point in time at which memory is counted."""

    name: str
    entries: tuple[tuple[int, Array], ...]
    """Number of each live node, and the bytes of its options."""
    fixed_bytes: float = 0.0
    """Bytes that do not depend on the choice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """A problem as flat arrays, for evaluation without loops in Python."""

    node_start: Array
    node_s: Array
    edge_u: Array
    edge_v: Array
    edge_start: Array
    edge_width: Array
    edge_s: Array
    entry_moment: Array
    entry_node: Array
    entry_start: Array
    entry_bytes: Array
    fixed_bytes: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Nodes, edges, and points in time with a memory limit.

    >>> two = Problem(
    ...     nodes=(Node(name="a", cost_s=np.array([1.0, 2.0])), Node(name="b", cost_s=np.array([3.0, 1.0]))),
    ...     edges=(Edge(u=0, v=1, cost_s=np.array([[0.0, 5.0], [5.0, 0.0]])),),
    ... )
    >>> total_s(two, [0, 0]), total_s(two, [1, 1]), delta_s(two, [1, 1], 0, 0)
    (4.0, 3.0, 4.0)
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    moments: tuple[Moment, ...] = ()
    limit_bytes: float = math.inf
    """Largest memory at any point in time."""

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def tables(self) -> Tables:
        """The problem as flat arrays."""
        return _tables(self)

    @cached_property
    def incident(self) -> tuple[tuple[tuple[int, Array], ...], ...]:
        """Node -> its neighbours, each with the matrix [own option, option of the neighbour]."""
        out: list[list[tuple[int, Array]]] = [[] for _ in self.nodes]
        for edge in self.edges:
            out[edge.u].append((edge.v, edge.cost_s))
            out[edge.v].append((edge.u, edge.cost_s.T))
        return tuple(map(tuple, out))

    @cached_property
    def held(self) -> tuple[tuple[Array, Array], ...]:
        """Node -> moments at which it is live, and its bytes, [option, moment]."""
        return _held(self)

    @property
    def sizes(self) -> Array:
        """Options of each node."""
        return np.array([len(node.cost_s) for node in self.nodes], int)

    @property
    def limited(self) -> bool:
        """Memory can rule a choice out."""
        return bool(self.moments) and math.isfinite(self.limit_bytes)


def _check(problem: Problem) -> None:
    count = len(problem.nodes)
    for node in problem.nodes:
        if node.cost_s.ndim != 1 or not np.isfinite(node.cost_s).any():
            raise UserError(
                f"{node.name}: none of its {node.cost_s.size} options is legal", hint="loosen what was fixed for it"
            )
        _check_numbers(node.cost_s, node.name)
        if node.tags is not None and len(node.tags) != len(node.cost_s):
            raise UserError(f"{node.name}: {len(node.tags)} tags for {len(node.cost_s)} options")
    for edge in problem.edges:
        if edge.u == edge.v or not (0 <= edge.u < count and 0 <= edge.v < count):
            raise UserError(f"an edge joins node {edge.u} with node {edge.v}; there are {count} nodes, joined in pairs")
        names = f"{problem.nodes[edge.u].name} to {problem.nodes[edge.v].name}"
        shape = (len(problem.nodes[edge.u].cost_s), len(problem.nodes[edge.v].cost_s))
        if edge.cost_s.shape != shape:
            raise UserError(f"{names}: a matrix of {edge.cost_s.shape}; their options need {shape}")
        _check_numbers(edge.cost_s, names)
    for moment in problem.moments:
        for node_at, taken in moment.entries:
            if len(taken) != len(problem.nodes[node_at].cost_s) or not np.isfinite(taken).all():
                raise UserError(f"{moment.name}: {problem.nodes[node_at].name} needs finite bytes for each option")


def _check_numbers(values: Array, name: str) -> None:
    if np.isnan(values).any() or np.isneginf(values).any():
        raise UserError(
            f"{name}: a cost is no number or minus infinity", hint="costs are seconds, or infinite: illegal"
        )


def _tables(problem: Problem) -> Tables:
    entries = [(t, v, taken) for t, moment in enumerate(problem.moments) for v, taken in moment.entries]
    edges = problem.edges
    return Tables(
        node_start=_starts([node.cost_s for node in problem.nodes]),
        node_s=_flat([node.cost_s for node in problem.nodes]),
        edge_u=np.array([edge.u for edge in edges], int),
        edge_v=np.array([edge.v for edge in edges], int),
        edge_start=_starts([edge.cost_s for edge in edges]),
        edge_width=np.array([edge.cost_s.shape[1] for edge in edges], int),
        edge_s=_flat([edge.cost_s for edge in edges]),
        entry_moment=np.array([t for t, _, _ in entries], int),
        entry_node=np.array([v for _, v, _ in entries], int),
        entry_start=_starts([taken for _, _, taken in entries]),
        entry_bytes=_flat([taken for _, _, taken in entries]),
        fixed_bytes=np.array([moment.fixed_bytes for moment in problem.moments], float),
    )


def _starts(arrays: Sequence[Array]) -> Array:
    return np.concatenate([[0], np.cumsum([each.size for each in arrays], dtype=int)])[: len(arrays)].astype(int)


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.ravel(each) for each in arrays]).astype(float) if arrays else np.zeros(0)


def _held(problem: Problem) -> tuple[tuple[Array, Array], ...]:
    out: list[dict[int, Array]] = [{} for _ in problem.nodes]
    for t, moment in enumerate(problem.moments):
        for node, taken in moment.entries:
            out[node][t] = out[node].get(t, 0) + np.asarray(taken, float)
    return tuple(
        (np.array(list(each), int), np.stack(list(each.values()), axis=1) if each else np.zeros((len(node.cost_s), 0)))
        for node, each in zip(problem.nodes, out, strict=True)
    )


def totals_s(problem: Problem, choices: Array) -> Array:
    """Seconds of many choices at once, one per row."""
    tables = problem.tables
    nodes = tables.node_s[tables.node_start + choices].sum(axis=1)
    at = tables.edge_start + choices[:, tables.edge_u] * tables.edge_width + choices[:, tables.edge_v]
    total: Array = nodes + tables.edge_s[at].sum(axis=1)
    return total


def total_s(problem: Problem, choice: Sequence[int] | Array) -> float:
    """Seconds of a choice: one option of every node, in the order of the nodes; infinite if it is illegal."""
    return float(totals_s(problem, np.asarray(choice, int).reshape(1, -1))[0])


def memories_bytes(problem: Problem, choices: Array) -> Array:
    """Bytes of many choices at once, [choice, point in time]."""
    tables = problem.tables
    taken = tables.entry_bytes[tables.entry_start + choices[:, tables.entry_node]]
    out = np.repeat(tables.fixed_bytes[None, :], len(choices), axis=0)
    np.add.at(out.T, tables.entry_moment, taken.T)
    return out


def memory_bytes(problem: Problem, choice: Sequence[int] | Array) -> dict[str, float]:
    """Bytes at each point in time, by its name."""
    row = memories_bytes(problem, np.asarray(choice, int).reshape(1, -1))[0]
    return {moment.name: float(each) for moment, each in zip(problem.moments, row, strict=True)}


def feasible(problem: Problem, choice: Sequence[int] | Array) -> bool:
    """True if a choice is legal and within the limit at every point in time."""
    row = np.asarray(choice, int).reshape(1, -1)
    fits = (memories_bytes(problem, row) <= problem.limit_bytes * (1 + ROUNDING)).all()
    return bool(fits) and math.isfinite(total_s(problem, choice))


def options_s(problem: Problem, choice: Sequence[int] | Array, node: int) -> Array:
    """Seconds of each option of one node with its edges, given the other nodes."""
    out: Array = problem.nodes[node].cost_s.astype(float)
    for other, matrix in problem.incident[node]:
        out = out + matrix[:, choice[other]]
    return out


def delta_s(problem: Problem, choice: Sequence[int] | Array, node: int, option: int) -> float:
    """Seconds by which the total changes if one node takes another option; not a number where both are illegal."""
    row = options_s(problem, choice, node)
    return float(row[option] - row[choice[node]])


def pinned(problem: Problem, options: Mapping[str, Iterable[int]]) -> Problem:
    """The problem in which the named nodes have only the given options; others become illegal.

    Raises:
        UserError: a name or an option is unknown, or none of a node's options is legal.
    """
    unknown = set(options) - {node.name for node in problem.nodes}
    if unknown:
        raise UserError(f"there is no node {sorted(unknown)[0]!r} to fix", hint="names are those of the operators")
    allowed = {name: np.array(sorted(which), int) for name, which in options.items()}
    for node in problem.nodes:
        if node.name in allowed and not np.isin(allowed[node.name], np.arange(len(node.cost_s))).all():
            raise UserError(f"{node.name}: fixed to option {allowed[node.name]}; it has {len(node.cost_s)}, from 0")
    nodes = tuple(only(node, allowed[node.name]) if node.name in allowed else node for node in problem.nodes)
    return replace(problem, nodes=nodes)


def only(node: Node, allowed: Array) -> Node:
    """The node with only the given options legal."""
    cost = np.full(len(node.cost_s), np.inf)
    cost[allowed] = node.cost_s[allowed]
    return replace(node, cost_s=cost)
