r"""Transfers from one sub-mesh to the next: each tensor goes from the sharding of its maker to that of its readers.

A tensor that is made as $a$ on one mesh and read as $d$ on another is resharded to $b$ on the first, crosses, arrives
as $c$, and is resharded to $d$ on the second; $b$ and $c$ minimise

$$\min_{b, c} D_1(a, b) + T(b, c) + D_2(c, d)$$

where $D_1$ and $D_2$ are the times of :mod:`steptime.sharding.reshard`, $T$ that of the crossing. One of these ways is
the local all-gather of Zheng et al., "Alpa", arXiv 2201.12023, section 6: pieces cross, and are gathered afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

import numpy as np

from steptime.captured.ops.placement import Sharding, local_shape, pieces, text_of
from steptime.num import Array, Num
from steptime.sharding.build import shardings_of
from steptime.sharding.flow import Link, root_of
from steptime.sharding.planner import ShardingPlan
from steptime.sharding.reshard import costs
from steptime.sharding.units import Units


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """One tensor that crosses a seam."""

    name: str
    made: Sharding
    sent: Sharding
    landed: Sharding
    read: tuple[Sharding, ...]
    """Shardings in which the readers of the next stage take it, after views; empty: a later stage reads it."""
    moved_bytes: float
    """Largest number of bytes that one device sends or receives."""
    messages: int
    """Largest number of devices that one device sends to or receives from."""
    around_s: float
    """Seconds of resharding before and after the crossing, less those that the next stage already counts."""

    def __str__(self) -> str:
        way = dict.fromkeys(map(text_of, (self.made, self.sent, self.landed, *self.read)))
        return f"{self.name}: {' -> '.join(way)}"


def crossing_bytes(
    shape: Sequence[int], element_bytes: float, source: Sharding, target: Sharding, sizes: Sequence[Sequence[int]]
) -> tuple[float, int]:
    r"""Largest numbers of bytes and of messages of a device in a transfer between two meshes without common devices.

    A device receives its piece $T$. The pieces of the target cover the tensor $r_T$ times, so that the $r_S$ holders
    of a piece $S$ send $r_T |S|$ together, in equal parts:

    $$B = \max(|T|, r_T |S| / r_S)$$

    The number of messages is the largest number of pieces of one sharding that overlap with a piece of the other.

    Args:
        shape: shape of the whole tensor.
        element_bytes: bytes of an element.
        source: sharding on the first mesh, without partial sums.
        target: sharding on the second mesh.
        sizes: sizes of the axes of both meshes.

    >>> from steptime.captured.ops.placement import R, shard
    >>> crossing_bytes((8, 8), 4, (shard(0),), (shard(0),), [(4,), (4,)])
    (64.0, 1)
    >>> crossing_bytes((8, 8), 4, (shard(0),), (shard(1),), [(4,), (4,)])
    (64.0, 4)
    >>> crossing_bytes((8, 8), 4, (R,), (R,), [(4,), (2,)])
    (256.0, 1)
    """
    ends = list(zip((source, target), sizes, strict=True))
    size = [element_bytes * prod(local_shape(shape, each, of)) for each, of in ends]
    counts = [pieces(each, of, len(shape)) for each, of in ends]
    copies = [prod(of) // prod(count) for (_, of), count in zip(ends, counts, strict=True)]
    met = [prod(_met(*row) for row in zip(shape, *order, strict=True)) for order in (counts, counts[::-1])]
    messages = max(ceil(met[0] * copies[1] / copies[0]), met[1])
    return float(max(size[1], size[0] * copies[1] / copies[0])), messages


@lru_cache(maxsize=1 << 12)
def _met(size: int, own: int, other: int) -> int:
    """Largest number of pieces of the other division of a dim that a piece of its own division overlaps with."""
    starts, ends = (
        [np.minimum(np.arange(count + 1) * ceil(size / count), size)[at] for count in (own, other)]
        for at in (slice(None, -1), slice(1, None))
    )
    common = np.minimum(ends[0][:, None], ends[1]) > np.maximum(starts[0][:, None], starts[1])
    return max(int(common.sum(axis=1).max()), 1)


@lru_cache(maxsize=1 << 10)
def _ways(
    shape: tuple[int, ...],
    element_bytes: float,
    sources: tuple[Sharding, ...],
    targets: tuple[Sharding, ...],
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Array, Array]:
    """Bytes and messages, [source, target] each."""
    found = np.array([[crossing_bytes(shape, element_bytes, a, b, sizes) for b in targets] for a in sources])
    return found[..., 0], found[..., 1]


def passing(
    units: Units,
    storage: int,
    plans: tuple[ShardingPlan, ShardingPlan],
    *,
    made: bool,
    read: range,
    message_s: Callable[[Num], Num],
) -> Passing:
    """The cheapest way of an activation from one stage to the next.

    Args:
        units: the chain.
        storage: storage of the activation.
        plans: shardings of the step on both sub-meshes.
        made: the first stage makes it; if False, it only passes through in any sharding.
        read: units of the next stage.
        message_s: time of a message of some bytes between the sub-meshes.
    """
    readers = _readers(units, storage, read)
    flow, (before, behind) = units.flow, plans
    maker = (readers[0].source, readers[0].output) if readers else flow.owners[storage]
    type, meshes = flow.items[maker[0]].node.outputs[maker[1]], (before.built.mesh, behind.built.mesh)
    sent, landed = (shardings_of(type, mesh.sizes) for mesh in meshes)
    first, last = before.sharding_of(*maker), behind.sharding_of(*maker)
    bytes_, messages = _ways(
        type.shape, type.element_bytes, sent, landed, (tuple(meshes[0].sizes), tuple(meshes[1].sizes))
    )
    total = messages * np.asarray(message_s(bytes_ / messages))
    around = np.zeros(total.shape)
    if made:
        around += costs(type.shape, type.element_bytes, [first], sent, meshes[0])[0][:, None]
    wanted = []
    for link in readers:
        way = behind.built.ways[link.target][int(behind.choice[link.target])]
        wanted.append(way.inputs[link.input])
        around += behind.built.walker.chain(link, landed, wanted[-1:])[:, 0] - behind.built.link_s(
            link, last, wanted[-1]
        )
    b, c = np.unravel_index(int((total + around).argmin()), total.shape)
    return Passing(
        name=flow.items[maker[0]].name,
        made=first if made else sent[b],
        sent=sent[b],
        landed=landed[c],
        read=tuple(wanted),
        moved_bytes=float(bytes_[b, c]),
        messages=int(messages[b, c]),
        around_s=float(around[b, c]),
    )


def _readers(units: Units, storage: int, read: range) -> list[Link]:
    """Links from the maker of an activation to its forward readers in a run of units."""
    flow, out = units.flow, dict[Link, None]()
    of_copy = {(each.call, each.place): copy.item for copy in flow.copies for each in copy.reads}
    for call, makers in flow.made_by.items():
        node = flow.program.calls[call]
        if node.phase == "forward" and int(units.of_call[call]) in read and storage in node.reads:
            for place in (n for n, each in enumerate(node.reads) if each == storage):
                copy, looks = of_copy.get((call, place)), root_of(node.node.inputs[place])[1]
                source, output = makers[place]
                target = (flow.of_call[call], place, looks) if copy is None else (copy, 0, ())
                out[Link(source=source, output=output, looks=target[2], target=target[0], input=target[1])] = None
    return list(out)
