"""The shardings of the analytic plan as options of the problem: data and tensor parallelism as in Megatron-LM.

:mod:`steptime.captured.cut` says how every value is sharded over tensor ranks: weights by columns, then by rows, heads,
classes. ``steptime estimate`` costs a plan with these shardings; the problem, fixed to them, must have the same cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steptime.captured.cut.cutting import Cutting, cutting_of, family
from steptime.captured.cut.rules import ADDITIONS
from steptime.captured.ops.placement import P, Placement, R, shard
from steptime.num import Array
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Item


def analytic(built: Built, *, data: int | None, tensor: int | None) -> Built:
    """The problem restricted to the shardings of a plan with data and tensor ranks.

    Along the tensor axis every operator that can have the plan's sharding is fixed to it. Along the data axis weights
    are replicated, inputs are split by samples, and operators are split by samples where they can be.

    Args:
        built: the problem on a mesh.
        data: index of the axis of data ranks; None: there is none.
        tensor: index of the axis of tensor ranks; None: there is none.
    """
    cutting, flow = cutting_of(built.flow.sections), built.flow
    # Equal blocks share the nodes of their operators, so that only one of them may be named.
    blocks = flow.sections.blocks
    cut = {family(name, blocks): dim for name, dim in cutting.weights.items()}
    named = {item: name for name, item in flow.of_parameter.items()}
    named |= {item: name for name, item in flow.update_of.items()}
    makers = {link.source: link.output for link in flow.links if link.gradient}
    inside = []
    for number, (item, ways, seconds) in enumerate(zip(flow.items, built.ways, built.seconds.inside, strict=True)):
        legal = np.ones(len(ways), bool)
        if number in named:
            dim = cut.get(family(named[number], blocks))
            legal &= _placed(ways, tensor, R if dim is None else shard(dim)) & _placed(ways, data, R)
        elif item.kind == "operator":
            legal = _narrowed(legal, _as_cut(item, ways, tensor, cutting))
            if number in makers:
                legal = _narrowed(legal, _placed(ways, data, P, makers[number]))
            legal = _narrowed(legal, _by_samples(ways, data))
        elif item.node.op == "input":
            legal = _narrowed(legal, _placed(ways, data, shard(0)) & _placed(ways, tensor, R))
        inside.append(np.where(legal, seconds, np.inf))
    return replace(built, seconds=replace(built.seconds, inside=tuple(inside)))


def _placed(ways: tuple[Way, ...], axis: int | None, placement: Placement, output: int = 0) -> Array:
    """Options whose output of an index has a placement along an axis."""
    return np.array([axis is None or way.outputs[output][axis] == placement for way in ways])


def _narrowed(legal: Array, further: Array) -> Array:
    """The options of both restrictions; of the first alone if none satisfies both."""
    both = legal & further
    return both if both.any() else legal


def _as_cut(item: Item, ways: tuple[Way, ...], axis: int | None, cutting: Cutting) -> Array:
    """Options whose outputs have the placements of the cut along the tensor axis; additions get complete sums."""
    layouts = cutting.layouts.get(item.node)
    if axis is None or layouts is None or not any(type.rank for type in item.types):
        return np.ones(len(ways), bool)
    wanted = [
        R
        if each.partial and item.node.op in ADDITIONS
        else P
        if each.partial
        else R
        if each.dim is None
        else shard(each.dim)
        for each in layouts
    ]
    return np.array([all(out[axis] == each for out, each in zip(way.outputs, wanted, strict=True)) for way in ways])


def _by_samples(ways: tuple[Way, ...], axis: int | None) -> Array:
    """Options that split the first dim of some input along the data axis."""
    return np.array([axis is None or any(each[axis] == shard(0) for each in way.inputs) for way in ways])
