r"""The published attention-based node-edge encoder (DNNPerf), as a baseline: a whole graph to one number.

In round $r$, with $h_u$ the vector of operator $u$ and $e_l$ that of tensor $l$ from $s$ to $u$:

$$\tilde h_u = \mathrm{LeakyReLU}(W_u h_u), \quad
  e_l \leftarrow \sigma\big(a^T(h_s \Vert h_u)\big)\, W_e e_l, \quad
  h_u \leftarrow \mathrm{LeakyReLU}\Big(\tilde h_u
  + \sum_{l = (s, u)} \mathrm{softmax}_l(W_m e_l) \odot \tilde h_s\Big)$$

then nodes and edges are pooled and two dense layers give the logarithm of the time. Departures from the publication:
an operator keeps its own vector in the sum, because operators without producers would otherwise have none, and pooling
is the sum and the mean. Features are operations and sizes, without analytic times, as in the publication.

Source: Y. Gao, X. Gu, H. Zhang, H. Lin, M. Yang, "Runtime Performance Prediction for Deep Learning Models with Graph
Neural Network", ICSE-SEIP 2023 (features and rounds as described there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from steptime.captured.graph import PHASES
from steptime.num import Array
from steptime_lab.learned.sketch import Sketch

ROUNDS, WIDTH, EPOCHS, BATCH, RATE = 3, 48, 40, 16, 2e-3
"""Rounds of messages, width of vectors, epochs, graphs of a batch, largest learning rate."""


class Encoded(NamedTuple):
    """A batch of graphs as one disconnected graph."""

    nodes: Tensor
    edges: Tensor
    source: Tensor
    target: Tensor
    owner: Tensor
    """Graph of each node."""
    edge_owner: Tensor
    graphs: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """Operators that have a feature of their own; all others share one."""

    names: tuple[str, ...]

    def nodes(self, drawn: Sketch) -> Array:
        """Features of the calls of a sketch."""
        places = {name: number for number, name in enumerate(self.names)}
        table = np.zeros((len(drawn.pieces), len(self.names) + 1 + 6))
        for number, piece in enumerate(drawn.pieces):
            work = piece.work
            table[number, places.get(piece.op, len(self.names))] = 1.0
            sizes = (
                work.matrix_flops,
                work.vector_flops,
                work.moved_bytes,
                work.launches,
                piece.read_bytes,
                piece.written_bytes,
            )
            table[number, -6:] = [np.log10(float(size) + 1.0) / 3 for size in sizes]
        phase = np.eye(len(PHASES))[np.array(drawn.phases, int)]
        return np.concatenate([table[np.array(drawn.calls, int)], phase], axis=1)


class Encoder(nn.Module):
    """Rounds of attention over edges, pooling, and a head."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.first_edge = nn.Linear(features, WIDTH), nn.Linear(1, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ROUNDS))
        self.edge = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ROUNDS))
        self.gate = nn.ModuleList(nn.Linear(2 * WIDTH, 1) for _ in range(ROUNDS))
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(ROUNDS))
        self.head = nn.Sequential(nn.Linear(4 * WIDTH, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))

    def forward(self, given: Encoded) -> Tensor:
        """Logarithm of the time of each graph."""
        nodes, edges = self.first(given.nodes), self.first_edge(given.edges)
        for own, edge, gate, mix in zip(self.own, self.edge, self.gate, self.mix, strict=True):
            passed = nn.functional.leaky_relu(own(nodes))
            both = torch.cat([nodes[given.source], nodes[given.target]], 1)
            edges = torch.sigmoid(gate(both)) * edge(edges)
            scores = mix(edges)[:, 0]
            raised = (scores - scores.max()).exp() if len(scores) else scores
            total = torch.zeros(len(nodes)).index_add(0, given.target, raised)
            shares = raised / total[given.target].clamp_min(1e-12)
            fed = torch.zeros_like(passed).index_add(0, given.target, shares[:, None] * passed[given.source])
            nodes = nn.functional.leaky_relu(fed + passed)
        pooled = [*_pooled(nodes, given.owner, given.graphs), *_pooled(edges, given.edge_owner, given.graphs)]
        return self.head(torch.cat(pooled, 1))[:, 0]  # type: ignore[no-any-return]


def _pooled(values: Tensor, owner: Tensor, graphs: int) -> tuple[Tensor, Tensor]:
    total = torch.zeros(graphs, values.shape[1]).index_add(0, owner, values)
    counts = torch.bincount(owner, minlength=graphs).clamp_min(1)[:, None]
    return total / counts, total.sign() * total.abs().log1p()


class Network:
    """The encoder and its vocabulary, fitted to sketches and their times."""

    def __init__(self, sketches: Sequence[Sketch], seconds: Array, seed: int = 0, epochs: int = EPOCHS) -> None:
        self.vocabulary = Vocabulary(names=tuple(sorted({p.op for drawn in sketches for p in drawn.pieces})))
        torch.manual_seed(seed)
        ready = [self._parts(drawn) for drawn in sketches]
        self.encoder = Encoder(ready[0][0].shape[1])
        goal = torch.tensor(np.log(seconds), dtype=torch.float32)
        self.shift = float(goal.mean())
        optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=RATE, weight_decay=1e-3)
        steps = epochs * -(-len(ready) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        draw = np.random.default_rng(seed)
        for _ in range(epochs):
            shuffled = draw.permutation(len(ready))
            for begin in range(0, len(ready), BATCH):
                chosen = shuffled[begin : begin + BATCH]
                found = self.encoder(_side_by_side([ready[number] for number in chosen])) + self.shift
                loss = nn.functional.smooth_l1_loss(found, goal[chosen], beta=0.05)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
                optimizer.step()
                schedule.step()

    def _parts(self, drawn: Sketch) -> tuple[Array, Array]:
        edges = np.array(drawn.edges, np.float64).reshape(-1, 3)
        return self.vocabulary.nodes(drawn).astype(np.float32), edges

    def seconds(self, sketches: Sequence[Sketch]) -> Array:
        """Predicted times (s)."""
        with torch.no_grad():
            found = [self.encoder(_side_by_side([self._parts(drawn)])) for drawn in sketches]
        return np.exp(torch.cat(found).numpy() + self.shift)


def _side_by_side(parts: Sequence[tuple[Array, Array]]) -> Encoded:
    starts = np.cumsum([0, *(len(nodes) for nodes, _ in parts)])
    nodes = np.concatenate([nodes for nodes, _ in parts])
    edges = np.concatenate(
        [edges + np.array([start, start, 0]) for (_, edges), start in zip(parts, starts, strict=False)]
    )
    owner = np.repeat(np.arange(len(parts)), [len(nodes) for nodes, _ in parts])
    source, target = edges[:, 0].astype(np.int64), edges[:, 1].astype(np.int64)
    return Encoded(
        nodes=torch.tensor(nodes),
        edges=torch.tensor(np.log10(edges[:, 2:] + 1.0) / 3, dtype=torch.float32),
        source=torch.tensor(source),
        target=torch.tensor(target),
        owner=torch.tensor(owner),
        edge_owner=torch.tensor(owner[target] if len(target) else target),
        graphs=len(parts),
    )
