"""Input and result of every search for cheaper graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from steptime.captured.graph import Node
from steptime.rewrite.flow import Flow
from steptime.rewrite.pricing import Prices
from steptime.rewrite.scene import Folds, Match, Pass, Scene

Metric = Literal["device_s", "host_s", "launches", "moved_bytes", "flops", "measured_s"]
METRICS: Final[tuple[Metric, ...]] = ("device_s", "host_s", "launches", "moved_bytes", "flops", "measured_s")
"""Metrics that are summed over the operators of a graph; ``measured_s``: on this machine, if there is a clock."""
STRICT: Final = 10.0
"""Penalty for exceeding a limit by its whole size, in costs of the graph, which leads a search back to the limit."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    r"""A weighted sum of metrics over operators, with limits on sums and on the peak of memory.

    $$C(G) = \sum_{n \in G} \sum_m w_m\, c_m(n), \qquad \sum_{n \in G} c_m(n) \le L_m$$

    with weight $w_m$ and limit $L_m$ of metric $m$, and $c_m(n)$ the metric of operator $n$; infinite where a limit is
    broken. Source: Jia et al., MetaFlow, SysML 2019, section 4.
    """

    prices: Prices = field(repr=False)
    weights: Mapping[Metric, float]
    limits: Mapping[Metric, float] = field(default_factory=dict)
    peak_limit_bytes: float | None = None
    clock: Callable[[Node], float] | None = field(default=None, repr=False)
    """Seconds of an operator on this machine."""
    peak_weight: float = 0.0
    """Cost of a byte at the peak of memory."""
    _sums: dict[tuple[Node, bool], float] = field(default_factory=dict, repr=False, compare=False)
    _known: dict[tuple[Node, bool], Mapping[Metric, float]] = field(default_factory=dict, repr=False, compare=False)

    def metrics(self, flow: Flow, node: Node) -> Mapping[Metric, float]:
        """Metrics of one operator, cached over all graphs."""
        key = (node, node in flow.over)
        found = self._known.get(key)
        if found is None:
            cost = self.prices.cost(flow, node)
            found = self._known[key] = (
                dict.fromkeys(METRICS, 0.0)
                if cost is None
                else {
                    "device_s": cost.seconds,
                    "host_s": cost.host_s,
                    "launches": float(cost.work.launches),
                    "moved_bytes": float(cost.work.moved_bytes),
                    "flops": float(cost.work.matrix_flops) + float(cost.work.vector_flops),
                    "measured_s": 0.0 if self.clock is None else self.clock(node),
                }
            )
        return found

    def of_node(self, flow: Flow, node: Node) -> float:
        """Weighted sum of the metrics of one operator."""
        key = (node, node in flow.over)
        known = self._sums.get(key)
        if known is None:
            found = self.metrics(flow, node)
            known = self._sums[key] = sum(weight * found[metric] for metric, weight in self.weights.items())
        return known

    @property
    def is_additive(self) -> bool:
        """True if the cost of a graph is the sum over its operators, without limits and peaks."""
        return not self.limits and self.peak_limit_bytes is None and not self.peak_weight

    def of_parts(self) -> CostModel:
        """The model without limits and peaks, which are no sums over operators, for parts of a graph."""
        return self if self.is_additive else replace(self, limits={}, peak_limit_bytes=None, peak_weight=0.0)

    def excess(self, flow: Flow) -> float:
        """Sum of relative excesses over the limits; 0 if a graph keeps them."""
        over = 0.0
        for metric, limit in self.limits.items():
            total = sum(self.metrics(flow, node)[metric] for node in flow.order)
            over += max(total - limit, 0.0) / limit if limit > 0 else float(total > limit)
        if self.peak_limit_bytes is not None:
            over += max(self.prices.peak_bytes(flow) / self.peak_limit_bytes - 1, 0.0)
        return over

    def _total(self, flow: Flow) -> float:
        peak = self.peak_weight * self.prices.peak_bytes(flow) if self.peak_weight else 0.0
        return sum(self.of_node(flow, node) for node in flow.order) + peak

    def guided(self, flow: Flow) -> float:
        """Cost that guides a search: a broken limit makes it larger in proportion to the excess, but not infinite."""
        total = self._total(flow)
        return total if self.is_additive else total * (1 + STRICT * self.excess(flow))

    def of_graph(self, flow: Flow) -> float:
        """Weighted sum over a graph; infinite if it breaks a limit."""
        return self._total(flow) if self.is_additive or not self.excess(flow) else float("inf")


def time_weights(prices: Prices, flow: Flow) -> Mapping[Metric, float]:
    r"""Weights of device and host seconds whose sum is a lower bound of the step time, exact at one graph.

    $$t(d, h) = (d^p + h^p)^{1/p} \ge (d_0/t_0)^{p-1} d + (h_0/t_0)^{p-1} h$$

    with $d$, $h$ the seconds of device and host, $p$ the sharpness with which they overlap, and $d_0$, $h_0$, $t_0$
    their values in the graph ``flow``. $t$ is convex and homogeneous, thus its tangent plane is below it. Source: own.
    """
    whole = prices.sums(flow, flow.order)
    device_s, host_s, p = whole.device_s, whole.host_s, prices.timer.sharpness
    if device_s <= 0 and host_s <= 0:
        return {"device_s": 1.0}
    step_s = (device_s**p + host_s**p) ** (1 / p)
    return {"device_s": (device_s / step_s) ** (p - 1), "host_s": (host_s / step_s) ** (p - 1)}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph, the rewrites that may change it, and the cost to minimise."""

    flow: Flow
    moves: tuple[Pass, ...] = field(repr=False)
    """Possible rewrites, including ones that do not pay by themselves."""
    cost: CostModel
    on_cuda: bool
    folds: Folds = field(default_factory=Folds, repr=False)

    def scene(self, flow: Flow) -> Scene:
        """The scene of a graph for a pass."""
        return Scene(flow=flow, folds=self.folds, on_cuda=self.on_cuda)

    @cached_property
    def start(self) -> float:
        """Cost of the given graph."""
        return self.cost.of_graph(self.flow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One rewrite on the way to a graph."""

    rewrite_pass: Pass
    flow: Flow = field(repr=False)
    """The graph, or the part of a graph, in which it was found."""
    match: Match
    count: int = 1
    """Number of equal parts in which it is made."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best graph of a search, with a bound if known."""

    flow: Flow
    cost: float
    bound: float | None
    """Lower bound of the cost of all reachable graphs; None: unknown."""
    graphs: int
    """Number of graphs that were priced."""
    stop: str
    """Text of the reason why the search ended."""
    path: tuple[Move, ...] = field(default=(), repr=False)
    """Rewrites from the given graph to this one."""
