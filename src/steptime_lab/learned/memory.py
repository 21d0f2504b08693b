r"""Workspace memory that kernels allocate while they run, which the simulated allocator cannot see.

$$\hat M = \max_i \big(m_i + a_{o(i)}\, r_i + b_{o(i)}\, w_i\big)$$

with $m_i$ the bytes in use while call $i$ runs in the recorded step, $r_i$ and $w_i$ the bytes that it reads and
writes, and $a_o, b_o \ge 0$ two numbers for each operator. Only the peaks of whole steps are measured. An operator
without evidence in any peak keeps 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.num import Array
from steptime_lab.learned.measuring import Graph
from steptime_lab.learned.sketch import Sketch

SMALLEST: Final = 0.02
"""Shares up to this one are ignored."""
QUANTILE: Final = 0.02
"""An operator's share is this quantile of the shares that its calls can have used at most."""
FEWEST: Final = 5
"""Fewest calls of an operator for which a share is fitted."""
GAIN: Final = 2e-5
"""Least decrease of the mean error for which an operator gets a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspaces:
    """Workspace of operators, as shares of the bytes that they read and write."""

    shares: Mapping[str, tuple[float, float]]
    """Operator -> share of the bytes read, share of the bytes written."""

    def extra_bytes(self, drawn: Sketch) -> Array:
        """Workspace of each call of a sketch, (calls,)."""
        nothing = (0.0, 0.0)
        own = [self.shares.get(piece.op, nothing) for piece in drawn.pieces]
        sizes = [
            a * piece.read_bytes + b * piece.written_bytes for (a, b), piece in zip(own, drawn.pieces, strict=True)
        ]
        return np.array(sizes)[np.array(drawn.calls, int)] if sizes else np.zeros(0)

    def peak_bytes(self, drawn: Sketch) -> float:
        """Peak of a step including the workspace of its kernels."""
        held = np.array(drawn.held_bytes, np.float64) + self.extra_bytes(drawn)
        return max(float(held.max(initial=0.0)), float(drawn.static_bytes), float(drawn.peak_bytes))


class Steps:
    """Calls of many steps as arrays."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        names = sorted({piece.op for graph in graphs for piece in graph.sketch.pieces})
        places = {name: number for number, name in enumerate(names)}
        parts = [
            [[places[p.op], p.read_bytes, p.written_bytes] for p in (g.sketch.pieces[at] for at in g.sketch.calls)]
            for g in graphs
        ]
        table = np.array([row for part in parts for row in part]).reshape(-1, 3)
        self.names, self.operator, self.sizes = names, table[:, 0].astype(np.int64), table[:, 1:]
        self.held = np.concatenate([np.array(g.sketch.held_bytes, np.float64) for g in graphs])
        self.starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        self.allocated = np.array([graph.allocated_bytes for graph in graphs], np.float64)
        self.floor = np.array([max(g.sketch.static_bytes, g.sketch.peak_bytes) for g in graphs], np.float64)
        self.owner = np.repeat(np.arange(len(graphs)), [len(part) for part in parts])

    def error(self, used: Array) -> float:
        """Mean absolute relative error of peaks where calls have `used` bytes in use."""
        peak = np.maximum(np.maximum.reduceat(used, self.starts), self.floor)
        return float(abs(peak / self.allocated - 1).mean())

    def share(self, operator: int, size: int) -> tuple[float, Array]:
        """Low quantile of the workspace that calls of an operator can have at most, as a share of a size; the calls."""
        mine = np.nonzero((self.operator == operator) & (self.sizes[:, size] > 0))[0]
        if len(mine) < FEWEST:
            return 0.0, mine
        spare = (self.allocated[self.owner[mine]] - self.held[mine]) / self.sizes[mine, size]
        return float(np.quantile(spare, QUANTILE)), mine


def fitted_workspaces(graphs: Sequence[Graph]) -> Workspaces:
    """Shares that explain measured peaks, selected greedily.

    A call's workspace is at most the step's allocated peak less the memory in use. The share of an operator is the low
    quantile of this limit over its calls; a share that lowers the mean error of peaks is added, the best one first.
    """
    steps = Steps([graph for graph in graphs if graph.sketch.calls])
    used, best = steps.held.copy(), steps.error(steps.held)
    shares: dict[str, tuple[float, float]] = {}
    options = [(o, size, *steps.share(o, size)) for o in range(len(steps.names)) for size in range(2)]
    options = [each for each in options if each[2] > SMALLEST]
    while options:
        tried = []
        for _, size, share, mine in options:
            more = used.copy()
            more[mine] += share * steps.sizes[mine, size]
            tried.append(steps.error(more))
        first = int(np.argmin(tried))
        if tried[first] > best - GAIN:
            break
        operator, size, share, mine = options[first]
        used[mine] += share * steps.sizes[mine, size]
        best = tried[first]
        shares[steps.names[operator]] = (0.0, round(share, 3)) if size else (round(share, 3), 0.0)
        options = [each for each in options if each[0] != operator]
    return Workspaces(shares=shares)


def errors(graphs: Sequence[Graph], workspaces: Workspaces | None = None) -> Array:
    """Relative errors of predicted peaks, (graphs,)."""
    known = workspaces or Workspaces(shares={})
    return np.array([known.peak_bytes(graph.sketch) / graph.allocated_bytes - 1 for graph in graphs])
