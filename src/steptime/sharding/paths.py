"""The cheapest way of a value through views, from the sharding in which it is made to that in which it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from steptime.captured.graph import TensorType
from steptime.captured.ops.placement import Sharding
from steptime.sharding.flow import Look
from steptime.sharding.mesh import Mesh
from steptime.sharding.options import Strategy, strategies
from steptime.sharding.reshard import Route, costs, route


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Resharding of one tensor on the way, then a view of it; the last leg has no view."""

    type: TensorType
    route: Route
    look: Look | None = None
    strategy: Strategy | None = None
    """Strategy of the view."""


@lru_cache(maxsize=1 << 14)
def legs_of(
    type: TensorType, looks: tuple[Look, ...], source: Sharding, target: Sharding, mesh: Mesh
) -> tuple[Leg, ...]:
    """The fastest sequence of legs.

    With $s_i(b)$ the least seconds to sharding $b$ after view $i$ and $D_i$ the seconds of resharding before it,
    $s_i(b) = \\min_{a \\to b} \\min_c s_{i-1}(c) + D_i(c, a)$ over the shardings $a$ that the view maps to $b$.

    >>> from steptime.hardware import load_cluster
    >>> from steptime.sharding.mesh import mesh_on
    >>> from steptime.captured.ops.placement import R, shard
    >>> mesh = mesh_on(load_cluster("dgx-h100"), {"data": 2})
    >>> [str(leg.route.steps[0].kind) for leg in legs_of(TensorType((8, 8), "fp32"), (), (shard(0),), (R,), mesh)]
    ['all_gather']
    """
    reached: dict[Sharding, tuple[float, tuple[Leg, ...]]] = {source: (0.0, ())}
    for look in looks:
        here, found = list(reached), strategies(look.node, mesh.sizes)
        inputs = list(dict.fromkeys(each.inputs[0] for each in found))
        seconds = costs(type.shape, type.element_bytes, here, inputs, mesh)
        following: dict[Sharding, tuple[float, Sharding, Strategy]] = {}
        for each in found:
            column = seconds[:, inputs.index(each.inputs[0])]
            total_s, start = min((reached[a][0] + float(column[n]), n) for n, a in enumerate(here))
            output = each.outputs[look.output]
            if total_s < following.get(output, (inf,))[0]:
                following[output] = total_s, here[start], each
        reached = {
            output: (total_s, (*reached[start][1], _leg(type, start, each, look, mesh)))
            for output, (total_s, start, each) in following.items()
        }
        type = look.node.outputs[look.output]
    last = costs(type.shape, type.element_bytes, list(reached), [target], mesh)[:, 0]
    best = min(zip(reached, last, strict=True), key=lambda pair: reached[pair[0]][0] + float(pair[1]))[0]
    end = route(type.shape, type.element_bytes, best, target, mesh)
    return (*reached[best][1], Leg(type=type, route=end))


def _leg(type: TensorType, source: Sharding, strategy: Strategy, look: Look, mesh: Mesh) -> Leg:
    found = route(type.shape, type.element_bytes, source, strategy.inputs[0], mesh)
    return Leg(type=type, route=found, look=look, strategy=strategy)
