"""Predicted gain of a change of a graph on a device: seconds with their doubt, traffic, operations, launches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from steptime.captured.cost import CostTable, OperatorCost, cost_table
from steptime.captured.cost.timing import HOST_BAND
from steptime.captured.graph import Node
from steptime.captured.graph.liveness import Liveness
from steptime.captured.ops import VIEWS
from steptime.cost.host import issued_s
from steptime.hardware.records import Device
from steptime.rewrite.flow import Flow
from steptime.rewrite.fused import FusedTimer

KERNEL_DOUBT: Final = 0.05
"""Relative standard deviation of a kernel's time around its curve, independent of other kernels; assumed."""
NINETY: Final = 1.645
"""Standard deviations between the mean and the 5th percentile of a normal distribution."""


class Kernel(NamedTuple):
    """Time of one operator with its doubt."""

    kind: Hashable
    """Key that is equal for operators that do the same work, independent of the values that they read."""
    seconds: float
    doubt: float
    """Relative standard deviation of its time that is independent of other kernels of its curve."""


def _kind(node: Node) -> Hashable:
    """Key of an operator's work; an added bias makes no difference."""
    operands = tuple(value.type for value in node.inputs[:2])
    return node.op, operands, node.outputs, node.attributes


def _differing_squares(old: Iterable[Kernel], new: Iterable[Kernel]) -> float:
    r"""Sum of the squared doubts of removed and added kernels, in s^2.

    A kernel that both graphs have, with other weights, has the same error in both, so it counts with the difference of
    its times.
    """
    left: dict[Hashable, list[Kernel]] = defaultdict(list)
    for kernel in old:
        left[kernel.kind].append(kernel)
    squares = 0.0
    for kernel in new:
        before_s = left[kernel.kind].pop().seconds if left[kernel.kind] else 0.0
        squares += (kernel.doubt * (kernel.seconds - before_s)) ** 2
    return squares + sum((kernel.doubt * kernel.seconds) ** 2 for rest in left.values() for kernel in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over some nodes."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the device by the curve or formula on which they are based."""
    kernels: tuple[Kernel, ...] = ()
    host_s: float = 0.0
    launches: float = 0.0
    moved_bytes: float = 0.0
    flops: float = 0.0

    @property
    def device_s(self) -> float:
        """Seconds of the device."""
        return math.fsum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Changes by a rewrite; except for gains, negative is less."""

    gain_s: float
    """Seconds of the step that it saves."""
    band_s: tuple[float, float]
    """90 % band of the gain, from the errors of the curves."""
    device_s: float
    host_s: float
    launches: float
    moved_bytes: float
    flops: float
    peak_bytes: float = 0.0

    def times(self, count: float) -> Change:
        """The change of several equal rewrites."""
        low, high = self.band_s
        return Change(
            gain_s=self.gain_s * count,
            band_s=(low * count, high * count),
            device_s=self.device_s * count,
            host_s=self.host_s * count,
            launches=self.launches * count,
            moved_bytes=self.moved_bytes * count,
            flops=self.flops * count,
            peak_bytes=self.peak_bytes,
        )


def timer_for(flow: Flow, device: Device, **more: Any) -> FusedTimer:
    """A timer of operators as the module of a graph calls them.

    Without gradients the graph issues its operators itself, and its working set may stay in a cache.
    """
    working = math.inf if flow.training else float(Liveness(flow.program(), rounding=1).peak().size_bytes)
    return FusedTimer(device=device, recorded=flow.training, working_bytes=working, **more)


class Prices:
    """Prices of nodes, graphs and changes on one device, with cached times of operators."""

    def __init__(self, timer: FusedTimer, rounding: int = 1) -> None:
        self.timer = timer
        self._rounding = rounding
        self._bands: dict[str, tuple[float, float]] = {}

    def cost(self, flow: Flow, node: Node) -> OperatorCost | None:
        """Cost of a node; None: it costs nothing."""
        if node.op in VIEWS and node.inputs:
            look = self.timer.look(node.op)
            return look if look.host_s else None
        found = self.timer.cost(node, inplace=node in flow.over)
        self._bands[found.basis] = found.band
        return found if found.bound != "none" else None

    def sums(self, flow: Flow, nodes: Iterable[Node]) -> Sums:
        """Sums of costs over nodes."""
        seconds: dict[str, float] = defaultdict(float)
        kernels: list[Kernel] = []
        host_s = launches = moved = flops = 0.0
        for node in nodes:
            cost = self.cost(flow, node)
            if cost is None:
                continue
            seconds[cost.basis] += cost.seconds
            doubt = KERNEL_DOUBT if cost.scatter is None else cost.scatter
            kernels.append(Kernel(_kind(node), cost.seconds, doubt))
            host_s += cost.host_s
            launches += float(cost.work.launches)
            moved += float(cost.work.moved_bytes)
            flops += float(cost.work.matrix_flops) + float(cost.work.vector_flops)
        return Sums(
            seconds=dict(seconds),
            kernels=tuple(kernels),
            host_s=host_s,
            launches=launches,
            moved_bytes=moved,
            flops=flops,
        )

    def table(self, flow: Flow) -> CostTable:
        """The table of costs of a whole graph."""
        return cost_table(flow.program(), self.timer)

    def peak_bytes(self, flow: Flow) -> int:
        """Peak of memory in use, by liveness."""
        return Liveness(flow.program(), rounding=self._rounding).peak().size_bytes

    def change(self, whole: Sums, old: Sums, new: Sums) -> Change:
        r"""Change of the step if some nodes are run in place of others.

        $$g = t(d, h) - t(d + \delta, h + \eta), \qquad
          g_\pm = \sum_c \operatorname{ext}_{f \in B_c}(-\delta_c f)\,(d/t)^{p-1} + \ldots \pm 1.645
          \sqrt{\textstyle\sum_k (\epsilon_k t_k)^2}$$

        with $t$ the soft maximum of device $d$ and host $h$ (:func:`steptime.cost.host.issued_s`), $\delta_c$ the
        change on curve $c$ with band $B_c$ (kernels of one curve share their error), $\eta$ that of the host, and
        $\epsilon_k$ the doubt of removed or added kernels with times $t_k$ (if only the weights differ, $t_k$ is the
        difference): the calibrated scatter of their curve (:attr:`steptime.hardware.records.Curve.scatter`), or 0.05.
        Source: own.
        """
        sharpness = self.timer.sharpness
        device_s, host_s = whole.device_s, whole.host_s
        delta = {name: new.seconds.get(name, 0.0) - old.seconds.get(name, 0.0) for name in (*old.seconds, *new.seconds)}
        moved_s, eta = math.fsum(delta.values()), new.host_s - old.host_s
        before = float(issued_s(device_s, 1.0, host_s, sharpness))
        after = float(issued_s(max(device_s + moved_s, 0.0), 1.0, max(host_s + eta, 0.0), sharpness))
        gain = before - after
        slope = 1.0 if not moved_s + eta else gain / -(moved_s + eta) if sharpness == 1.0 else None
        steep = sharpness - 1
        slopes = (slope, slope) if slope is not None else ((device_s / before) ** steep, (host_s / before) ** steep)
        doubt = NINETY * math.sqrt(_differing_squares(old.kernels, new.kernels)) * slopes[0]
        ends = []
        for pick, sign in ((min, -1.0), (max, 1.0)):
            part = sum(pick(-d * f for f in self._bands.get(name, (1.0, 1.0))) for name, d in delta.items())
            part_h = pick(-eta * f for f in HOST_BAND)
            ends.append(part * slopes[0] + part_h * slopes[1] + sign * doubt)
        return Change(
            gain_s=gain,
            band_s=(min(ends[0], gain), max(ends[1], gain)),
            device_s=moved_s,
            host_s=eta,
            launches=new.launches - old.launches,
            moved_bytes=new.moved_bytes - old.moved_bytes,
            flops=new.flops - old.flops,
        )
