"""Problems of shardings with the structure of a transformer's step, made of a few rules of placement.

Each operator of a block, forward and backward, has an option for each pair of rules along the two axes of an 8 x 8
mesh; edges cost what resharding costs with a latency and a bandwidth per axis. A block may stand for several equal
ones. The costs are plausible, not calibrated: what matters is the shape of the problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from steptime.sharding.problem import Edge, Moment, Node, Problem

R, S0, S1, S2, P = range(5)
SIZES = (8, 8)
LATENCY_S, BANDWIDTH_BPS = (10e-6, 3e-6), (50e9, 400e9)
FLOPS, MEMORY_BPS = 400e12, 2e12
TOKENS, HIDDEN, WIDE = 8 * 2048 * 8, 4096, 14336

Rows = tuple[tuple[tuple[int, ...], int, bool], ...]
"""Along one axis: placements of the inputs, placement of the output, whether the work is divided."""
LINEAR: Rows = (
    ((S0, R), S0, True),
    ((S1, R), S1, True),
    ((R, S1), S2, True),
    ((S2, S0), P, True),
    ((R, R), R, False),
    ((P, R), P, False),
)
D_INPUT: Rows = (
    ((S0, R), S0, True),
    ((S1, R), S1, True),
    ((S2, S1), P, True),
    ((R, S0), S2, True),
    ((R, R), R, False),
    ((P, R), P, False),
)
D_WEIGHT: Rows = (
    ((S0, S0), P, True),
    ((S1, S1), P, True),
    ((R, S2), S1, True),
    ((S2, R), S0, True),
    ((R, R), R, False),
)
NORM: Rows = (((S0, R), S0, True), ((S1, R), S1, True), ((R, R), R, False))
NORM_BACK: Rows = (((S0, S0, R), S0, True), ((S1, S1, R), S1, True), ((R, R, R), R, False))
NORM_WEIGHT: Rows = (((S0, S0), P, True), ((S1, S1), P, True), ((R, R), R, False))
ATTENTION: Rows = (((S0, S0, S0), S0, True), ((S1, R, R), S1, True), ((S2, S2, S2), S2, True), ((R, R, R), R, False))
ATTENTION_BACK: Rows = tuple(((*row, out), out, cut) for row, out, cut in ATTENTION if out != S1)
PARAMETER: Rows = (((), R, False), ((), S0, True), ((), S1, True))


def same(inputs: int, *placements: int) -> Rows:
    return tuple(((each,) * inputs, each, each not in (R, P)) for each in placements)


@cache
def resharding_s(size_bytes: float) -> np.ndarray:
    """Seconds from one pair of placements to another, [5 x 5 before, 5 x 5 after]."""
    out = np.zeros((25, 25))
    for before, after in itertools.product(range(25), repeat=2):
        for axis in range(2):
            a, b = (divmod(each, 5)[axis] for each in (before, after))
            others = [divmod(each, 5)[1 - axis] for each in (before, after)]
            share = 1 / SIZES[1 - axis] if all(each in (S0, S1, S2) for each in others) else 1.0
            out[before, after] += _step_s(a, b, size_bytes * share, axis)
    return out


def _step_s(a: int, b: int, size_bytes: float, axis: int) -> float:
    n, moved = SIZES[axis], size_bytes / BANDWIDTH_BPS[axis] * (SIZES[axis] - 1) / SIZES[axis]
    if a == b or (a == R and b != P):
        return 0.0
    if b == P:
        return math.inf
    factor = {(P, R): 2.0}.get((a, b), 1.0 if a == P or b == R else 1 / n)
    return (n - 1) * LATENCY_S[axis] * (2 if factor == 2 else 1) + factor * moved


class Graph:
    """Nodes and edges as they are added."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.nodes, self.edges = rng, [], {}
        self.outputs: list[np.ndarray] = []
        self.inputs: list[np.ndarray] = []
        self.sizes: list[float] = []

    def add(
        self,
        name: str,
        rows: Rows,
        sources: Sequence[int],
        size: float,
        work_s: float,
        weight: float,
        batch: tuple[bool, bool] = (True, True),
    ) -> int:
        """A node with its edges; returns its place. `size` is the bytes of its output.

        `batch`: whether dim 0 of its first input, of its output, is the batch, which only one axis can divide.
        """
        pairs = list(itertools.product(rows, repeat=2))
        twice = [(batch[0] and a[0][:1] == b[0][:1] == (S0,)) or (batch[1] and a[1] == b[1] == S0) for a, b in pairs]
        pairs = [pair for pair, each in zip(pairs, twice, strict=True) if not each]
        share = np.array([1 / (SIZES[0] if a[2] else 1) / (SIZES[1] if b[2] else 1) for a, b in pairs])
        tags = np.array([[rows.index(a), rows.index(b)] for a, b in pairs])
        replicated = next((i for i, row in enumerate(rows) if not row[2]), 0)
        tags = np.where(tags == replicated, 0, np.where(tags < replicated, tags + 1, tags))
        noise = 1 + 0.01 * self.rng.random(len(pairs))
        self.nodes.append(Node(name=name, cost_s=weight * noise * np.maximum(work_s * share, 3e-6), tags=tags))
        self.outputs.append(np.array([5 * a[1] + b[1] for a, b in pairs]))
        self.inputs.append(np.array([[5 * x + y for x, y in zip(a[0], b[0], strict=True)] for a, b in pairs]))
        self.sizes.append(size)
        node = len(self.nodes) - 1
        for at, source in enumerate(sources):
            self.link(source, node, at, weight)
        return node

    def link(self, source: int, node: int, at: int, weight: float) -> None:
        """Joins the output of a node to an input of another."""
        matrix = weight * resharding_s(self.sizes[source])[np.ix_(self.outputs[source], self.inputs[node][:, at])]
        if source == node:
            raise ValueError("a node cannot feed itself")
        self.edges.setdefault((source, node), []).append(matrix)

    def local_bytes(self, node: int) -> np.ndarray:
        """Bytes of the output on one device, option by option."""
        axes = np.stack(np.divmod(self.outputs[node], 5))
        return self.sizes[node] / np.where((axes > 0) & (axes < 4), np.array(SIZES)[:, None], 1).prod(axis=0)


class Block:
    """One block of the transformer: its nodes, forward and backward, and what its neighbours join to."""

    def __init__(self, graph: Graph, name: str, weight: float) -> None:
        self.graph, self.name, self.weight = graph, name, weight
        self.parameters: list[int] = []
        self.update: dict[int, int] = {}
        self.saved: list[int] = []

    def op(self, name: str, rows: Rows, sources: Sequence[int], width: float, flops: float = 0.0) -> int:
        """An operator on activations; `width` is the last dim of its output."""
        size = 2.0 * TOKENS * width
        work = flops / FLOPS + size * (1 + len(sources)) / MEMORY_BPS
        return self.graph.add(f"{self.name}.{name}", rows, sources, size, work, self.weight)

    def forward_op(self, name: str, rows: Rows, sources: Sequence[int], width: float, flops: float = 0.0) -> int:
        """An operator whose output is saved for backward."""
        node = self.op(name, rows, sources, width, flops)
        self.saved.append(node)
        return node

    def parameter(self, name: str, size: float) -> int:
        """A parameter, updated where it lies; returns its cast to 16 bits, which the operators read."""
        graph, work_s, whole = self.graph, size / MEMORY_BPS, (False, False)
        node = graph.add(f"{self.name}.{name}.weight", PARAMETER, (), 2.0 * size, 4 * work_s, self.weight, whole)
        self.parameters.append(node)
        update = graph.add(
            f"{self.name}.{name}.update", WEIGHT_ACT, (node,), 2.0 * size, 8 * work_s, self.weight, whole
        )
        cast = graph.add(f"{self.name}.{name}.cast", WEIGHT_ACT, (node,), 2.0 * size, 3 * work_s, self.weight, whole)
        self.update[cast] = update
        return cast

    def linear(self, name: str, x: int, wide_in: int, wide_out: int) -> tuple[int, int, int]:
        """A product with a parameter: its place, that of the parameter's cast, its inner width."""
        weight = self.parameter(name, wide_in * wide_out)
        flops = 2.0 * TOKENS * wide_in * wide_out
        return self.forward_op(name, LINEAR, (x, weight), wide_out, flops), weight, wide_in

    def linear_back(self, name: str, made: tuple[int, int, int], x: int, dy: int) -> int:
        """Both products of the backward of a linear layer; returns the gradient of its input."""
        y, weight, wide_in = made
        graph, wide_out = self.graph, self.graph.sizes[y] / 2 / TOKENS
        flops = 2.0 * TOKENS * wide_in * wide_out
        dx = self.op(f"{name}.dx", D_INPUT, (dy, weight), wide_in, flops)
        size = graph.sizes[weight]
        dw = graph.add(f"{self.name}.{name}.dw", D_WEIGHT, (x, dy), size, flops / FLOPS, self.weight, (True, False))
        graph.link(dw, self.update[weight], 0, self.weight)
        return dx

    def view(self, name: str, x: int, width: float, forward: bool = True) -> int:
        """An operator that any placement passes through."""
        make = self.forward_op if forward else self.op
        return make(name, same(1, R, S0, S1, S2, P), (x,), width)


ADD = same(2, R, S0, S1, S2, P)
WEIGHT_ACT = same(1, R, S0, S1)
MUL = same(2, R, S0, S1, S2)
ACT = same(1, R, S0, S1, S2)
ACT_BACK = same(2, R, S0, S1, S2)


def block(graph: Graph, name: str, weight: float, x: int) -> tuple[Block, dict[str, int]]:
    """Forward of one block on the output of node x."""
    b = Block(graph, name, weight)
    made: dict[str, int] = {"x": x}
    linears: dict[str, tuple[int, int, int]] = {}

    def lin(key: str, source: str, wide_in: int, wide_out: int) -> None:
        linears[key] = b.linear(key, made[source], wide_in, wide_out)
        made[key] = linears[key][0]

    made["w1"] = b.parameter("norm1", HIDDEN)
    made["n1"] = b.forward_op("norm1", NORM, (x, made["w1"]), HIDDEN)
    for key in "qkv":
        lin(key, "n1", HIDDEN, HIDDEN)
        made[f"{key}.view"] = b.view(f"{key}.view", made[key], HIDDEN)
        made[f"{key}.rope"] = b.forward_op(f"{key}.rope", ACT, (made[f"{key}.view"],), HIDDEN)
        made[f"{key}.swap"] = b.view(f"{key}.swap", made[f"{key}.rope"], HIDDEN)
    sources = [made[f"{key}.swap"] for key in "qkv"]
    made["attention"] = b.forward_op("attention", ATTENTION, sources, HIDDEN, 4.0 * TOKENS * 2048 * HIDDEN)
    made["attention.view"] = b.view("attention.view", made["attention"], HIDDEN)
    lin("o", "attention.view", HIDDEN, HIDDEN)
    made["o.dropout"] = b.view("o.dropout", made["o"], HIDDEN)
    made["add1"] = b.forward_op("add1", ADD, (x, made["o.dropout"]), HIDDEN)
    made["w2"] = b.parameter("norm2", HIDDEN)
    made["n2"] = b.forward_op("norm2", NORM, (made["add1"], made["w2"]), HIDDEN)
    lin("gate", "n2", HIDDEN, WIDE)
    lin("up", "n2", HIDDEN, WIDE)
    made["silu"] = b.forward_op("silu", ACT, (made["gate"],), WIDE)
    made["mul"] = b.forward_op("mul", MUL, (made["silu"], made["up"]), WIDE)
    lin("down", "mul", WIDE, HIDDEN)
    made["down.dropout"] = b.view("down.dropout", made["down"], HIDDEN)
    made["y"] = b.forward_op("add2", ADD, (made["add1"], made["down.dropout"]), HIDDEN)
    made["linears"] = linears  # type: ignore[assignment]
    return b, made


def block_back(b: Block, made: dict[str, int], dy: int) -> dict[str, int]:
    """Backward of one block from the gradient of its output."""
    linears = made["linears"]
    out: dict[str, int] = {}
    out["down.dropout"] = b.view("down.dropout.back", dy, HIDDEN, forward=False)
    dmul = b.linear_back("down", linears["down"], made["mul"], out["down.dropout"])
    dsilu = b.op("mul.d0", MUL, (dmul, made["up"]), WIDE)
    dup = b.op("mul.d1", MUL, (dmul, made["silu"]), WIDE)
    dgate = b.op("silu.back", ACT_BACK, (dsilu, made["gate"]), WIDE)
    dn2 = b.op(
        "n2.sum",
        ADD,
        (
            b.linear_back("gate", linears["gate"], made["n2"], dgate),
            b.linear_back("up", linears["up"], made["n2"], dup),
        ),
        HIDDEN,
    )
    dadd = b.op("norm2.back", NORM_BACK, (dn2, made["add1"], made["w2"]), HIDDEN)
    norm_weight(b, "norm2.dw", made["w2"], made["add1"], dn2)
    dadd1 = b.op("add1.sum", ADD, (dy, dadd), HIDDEN)
    ddrop = b.view("o.dropout.back", dadd1, HIDDEN, forward=False)
    dattn = b.linear_back("o", linears["o"], made["attention.view"], ddrop)
    dview = b.view("attention.view.back", dattn, HIDDEN, forward=False)
    dall = b.op(
        "attention.back",
        ATTENTION_BACK,
        (*(made[f"{key}.swap"] for key in "qkv"), dview),
        HIDDEN,
        8.0 * TOKENS * 2048 * HIDDEN,
    )
    parts = [_back_through(b, key, linears[key], made["n1"], dall) for key in "qkv"]
    first = b.op("n1.sum0", ADD, parts[:2], HIDDEN)
    dn1 = b.op("n1.sum1", ADD, (first, parts[2]), HIDDEN)
    dnorm = b.op("norm1.back", NORM_BACK, (dn1, made["x"], made["w1"]), HIDDEN)
    norm_weight(b, "norm1.dw", made["w1"], made["x"], dn1)
    out["dx"] = b.op("x.sum", ADD, (dadd1, dnorm), HIDDEN)
    out["dadd1"] = dadd1
    return out


def _back_through(b: Block, key: str, linear: tuple[int, int, int], x: int, dy: int) -> int:
    swap = b.view(f"{key}.swap.back", dy, HIDDEN, forward=False)
    rope = b.op(f"{key}.rope.back", ACT, (swap,), HIDDEN)
    return b.linear_back(key, linear, x, b.view(f"{key}.view.back", rope, HIDDEN, forward=False))


def norm_weight(b: Block, name: str, weight: int, x: int, dy: int) -> None:
    dw = b.graph.add(f"{b.name}.{name}", NORM_WEIGHT, (x, dy), b.graph.sizes[weight], 1e-5, b.weight, (True, False))
    b.graph.link(dw, b.update[weight], 0, b.weight)


def transformer(weights: Sequence[float], *, memory: float | None = None, seed: int = 0) -> Problem:
    """One block for each weight, which is the number of equal layers that it stands for.

    `memory`: limit as a share of what the step takes with everything replicated; None: no limit.
    """
    graph = Graph(np.random.default_rng(seed))
    x = graph.add("input", same(0, R, S0, S1), (), 2.0 * TOKENS * HIDDEN, 1e-5, 1.0)
    source, blocks = x, []
    for at, weight in enumerate(weights):
        b, made = block(graph, f"block{at}", weight, source)
        blocks.append((b, made))
        if weight > 1:
            _again(graph, made["y"], ("norm1", "add1"), b, weight)
        source = made["y"]
    dy = graph.add("loss", same(1, S0, S1, R), (source,), 2.0 * TOKENS * HIDDEN, 1e-4, 1.0)
    for b, made in reversed(blocks):
        out = block_back(b, made, dy)
        if b.weight > 1:
            _again(graph, out["dx"], ("down.dropout.back", "add1.sum"), b, b.weight)
        dy = out["dx"]
    edges = tuple(Edge(u=u, v=v, cost_s=sum(found)) for (u, v), found in graph.edges.items())
    moments = tuple(_moments(graph, [b for b, _ in blocks]))
    limit = math.inf
    if memory is not None:
        limit = memory * max(m.fixed_bytes + sum(float(taken.max()) for _, taken in m.entries) for m in moments)
    return Problem(nodes=tuple(graph.nodes), edges=edges, moments=moments, limit_bytes=limit)


def _again(graph: Graph, source: int, names: Sequence[str], b: Block, weight: float) -> None:
    """Joins a block that stands for several to itself: the output of one is the input of the next."""
    place = {node.name: at for at, node in enumerate(graph.nodes)}
    for name in names:
        graph.link(source, place[f"{b.name}.{name}"], 0, weight - 1)


def _moments(graph: Graph, blocks: Sequence[Block]) -> list[Moment]:
    """End of the forward of each block: states of all parameters, what the blocks so far saved."""
    states = [(node, 8 * b.weight * graph.local_bytes(node)) for b in blocks for node in b.parameters]
    out = []
    for at in range(len(blocks)):
        saved = [(node, b.weight * graph.local_bytes(node)) for b in blocks[: at + 1] for node in b.saved]
        out.append(Moment(name=f"after forward of block {at}", entries=(*states, *saved), fixed_bytes=1e9))
    return out
