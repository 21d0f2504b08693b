"""Slowdown and longer hops of a group of ranks in a network with separate levels, by the place of the group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from steptime.cost.network import (
    dragonfly_exchange_factor,
    dragonfly_ring_factor,
    exchange_uplink_slowdown,
    mean_hop_ratio,
    ring_uplink_slowdown,
    scattered_members,
    torus_exchange_s_per_byte,
    torus_ring_links,
)
from steptime.hardware.records import Cluster, Level
from steptime.hardware.topology import PACKED, RANDOM, Topology, refuse_beyond
from steptime.num import Num, maximum, minimum, where

EXCHANGES: Final = ("all_to_all",)
"""Collectives in which each rank sends to all others; the rest go round rings, or along trees of the same links."""
MESSAGE: Final = "p2p"


class Reach(NamedTuple):
    """Places of the members of a group, in fast domains."""

    nodes: Num
    """Fast domains that the group spans."""
    members: Callable[[float], Num]
    """Number of its domains that share a block of a given number of consecutive domains."""
    stride: Num = 1
    """Distance between its domains."""

    def shards(self, nodes: Num) -> tuple[Reach, Reach]:
        """Reach of its first ``nodes`` members, and of the group of copies of one of them."""
        whole = self.members
        first = Reach(nodes, lambda block: minimum(nodes, whole(block)), self.stride)
        copies = Reach(
            maximum(self.nodes / nodes, 1.0),
            lambda block: maximum(whole(block) / minimum(nodes, whole(block)), 1.0),
            self.stride * nodes,
        )
        return first, copies


def consecutive(nodes: Num) -> Reach:
    """Reach of a group of neighbouring domains."""
    return Reach(nodes, lambda block: minimum(maximum(0.0 * nodes + block, 1.0), nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier beyond the fast domains: the links that join its blocks."""

    name: str
    below: float
    """Fast domains in each of the blocks that it joins."""
    rate: float = 1.0
    """Bandwidth of a rank on it over that on the first tier, if all ranks communicate."""
    most: float = 1.0
    """The same ratio for a ring alone."""
    oversubscription: float = 1.0
    latency: float = 1.0
    """Latency of a hop across it over the latency of a hop across the first tier."""
    kept: float = 1.0
    """Share of the messages between members of one block that stay below the tier."""
    scattered: float = 0.0
    """Members of a ring that share a block; 0: by their numbers."""
    groups: int = 0
    """Groups of a dragonfly that it joins; 0: it is a tree."""
    dims: tuple[int, ...] = ()
    """Devices along each dim of a torus; empty: no torus."""
    closed: tuple[bool, ...] = ()
    """True for each dim of a torus that closes to a ring."""

    def members(self, reach: Reach) -> Num:
        """Members of a ring below each of its links."""
        together = reach.members(self.below)
        return minimum(together, self.scattered) if self.scattered else together

    def crossed(self, reach: Reach) -> Num:
        """True if traffic of a group crosses the tier."""
        return reach.nodes > (1 if self.scattered else reach.members(self.below))

    def ring(self, reach: Reach) -> Num:
        """Slowdown of a ring that crosses the tier."""
        factor = dragonfly_ring_factor(self.groups) if self.groups else 1
        return ring_uplink_slowdown(self.members(reach), self.oversubscription * factor, self.rate, self.most)

    def exchange(self, reach: Reach) -> Num:
        """Slowdown of an exchange between all pairs that crosses the tier."""
        together = self.members(reach)
        spanned = reach.nodes / together
        factor = dragonfly_exchange_factor(spanned, self.groups) if self.groups else 1.0
        over = self.oversubscription * factor
        return exchange_uplink_slowdown(reach.nodes, together, over, self.rate, self.most, self.kept)


class Torus(Tier):
    """Devices joined along dims; each is a fast domain of its own."""

    __slots__ = ()

    def crossed(self, reach: Reach) -> Num:
        """True if a group has more than one device, and so needs links."""
        return reach.nodes > 1

    def _boxes(self, reach: Reach) -> list[tuple[Num, Num, Num]]:
        """Members, distance and 1 for a closed ring, by dim."""
        out: list[tuple[Num, Num, Num]] = []
        inner, before = 1, reach.members(1)
        for size, closed in zip(self.dims, self.closed, strict=True):
            here = reach.members(inner * size)
            members = here / before
            stride = minimum(maximum(reach.stride / inner, 1.0), size)
            whole = members * stride >= size
            out.append((members, stride, where(whole, 1.0, 0.0) if closed else 0.0 * members))
            inner, before = inner * size, here
        return out

    def ring(self, reach: Reach) -> Num:
        """Slowdown of a ring, or of several along several dims, against the use of all links of a device."""
        links: Num = 0.0
        for box in self._boxes(reach):
            links = links + torus_ring_links(*box)
        return 2 * len(self.dims) / maximum(links, 1e-9)

    def exchange(self, reach: Reach) -> Num:
        """Slowdown of an exchange between all pairs."""
        longest: Num = 0.0
        for box in self._boxes(reach):
            longest = maximum(longest, torus_exchange_s_per_byte(*box))
        return longest * 2 * len(self.dims) * reach.nodes / maximum(reach.nodes - 1, 1)

    def hops(self, reach: Reach) -> Num:
        """Mean number of links of a hop of a ring."""
        total: Num = 0.0
        for members, stride, _ in self._boxes(reach):
            total = total + (members - 1) * stride
        return maximum(total / maximum(reach.nodes - 1, 1), 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The tiers that a job spans, innermost first, with numbers relative to the first tier."""

    tiers: tuple[Tier, ...]
    rank_Bps: float
    """Sustained bandwidth of a rank into the first tier without other traffic."""
    link_Bps: float
    """Sustained bandwidth of one link into the first tier."""
    latency_s: float
    """Latency of a hop across the first tier."""
    unit: int
    """Devices of a fast domain."""
    text: str
    """Phrase on the topology for a report."""

    @property
    def farthest(self) -> int:
        """Fast domains in the largest block: beyond it no order of the axes makes a difference."""
        blocks = [tier.below for tier in self.tiers] + [float(math.prod(tier.dims)) for tier in self.tiers]
        return int(max(blocks, default=1.0))

    def slowdown(self, kind: str, reach: Reach) -> Num:
        """Factor on the transfer time of a collective between domains, against all links to itself."""
        worst: Num = 1.0
        for tier in self.tiers:
            worst = maximum(worst, self._of(tier, kind, reach))
        return worst

    def longer_hops(self, kind: str, reach: Reach) -> Num:
        """Mean latency of a hop between domains over the latency of a hop across the first tier."""
        first = self.tiers[0]
        ratio: Num = first.hops(reach) if isinstance(first, Torus) else first.latency
        known = first.latency
        for tier in self.tiers[1:]:
            latency = max(tier.latency, known)
            together = tier.members(reach)
            part = (reach.nodes - together) / maximum(reach.nodes - 1, 1)
            part = part if kind in EXCHANGES else mean_hop_ratio(reach.nodes, together)
            ratio = ratio + (latency - known) * where(tier.crossed(reach), part, 0.0)
            known = latency
        return ratio

    def message(self, reach: Reach) -> Num:
        """Mean slowdown of messages between neighbours in a group that lie in different domains."""
        total: Num = 0.0
        known: Num = 0.0
        for n, tier in enumerate(self.tiers):
            here = maximum(known, self._of(tier, MESSAGE, reach))
            part = mean_hop_ratio(reach.nodes, tier.members(reach)) if n else 1.0
            total = total + (here - known) * part
            known = here
        return maximum(total, 1.0)

    def binding(self, kind: str, reach: Reach) -> Tier | None:
        """The tier that slows down a group of a single plan; None: no tier does."""
        slow = [(float(self._of(tier, kind, reach)), -n, tier) for n, tier in enumerate(self.tiers)]
        worst, _, tier = max(slow, key=lambda one: one[:2])
        return tier if worst > 1 + 1e-12 else None

    def told(self, kind: str, reach: Reach) -> str:
        """Phrase for a report on the slowdown of a group of a single plan."""
        if reach.nodes <= 1:
            return ""
        tier = self.binding(kind, reach)
        if tier is None:
            return f"{self.text}: {float(reach.nodes):g} domains, no shared link slows them"
        together = "scattered" if tier.scattered else f"{float(tier.members(reach)):.4g} of {float(reach.nodes):g}"
        below = "" if isinstance(tier, Torus) else f" ({together} domains below each of its links)"
        return f"{self.text}: {float(self._of(tier, kind, reach)):.4g} times slower on {tier.name}{below}"

    def _of(self, tier: Tier, kind: str, reach: Reach) -> Num:
        slowed = tier.exchange(reach) if kind in EXCHANGES else tier.ring(reach)
        if isinstance(slowed, np.ndarray) or isinstance(reach.nodes, np.ndarray):
            return np.where(tier.crossed(reach), slowed, 0.0)
        return slowed if tier.crossed(reach) else 0.0


def network_of(cluster: Cluster, gpus: int) -> Network | None:
    """The part of the network of a cluster with a topology that a job of ``gpus`` devices spans.

    Raises:
        UserError: the topology holds fewer devices.
    """
    topology = cluster.topology
    if topology is None:
        return None
    refuse_beyond(topology, cluster.levels, gpus, cluster.name)
    if topology.is_torus:
        return _torus(cluster, topology, gpus)
    crossed = cluster.crossed_levels(cluster.beyond_domain(gpus))
    first, unit = crossed[0], cluster.fast_domain
    blocks = _blocks(cluster, unit)
    tiers = tuple(
        _tier(level, first, blocks[level.name], topology, unit, n == len(crossed) - 1 and n > 0)
        for n, level in enumerate(crossed)
    )
    return Network(
        tiers=tiers,
        rank_Bps=_alone_Bps(first),
        link_Bps=first.link_Bps * first.efficiency,
        latency_s=first.latency_s,
        unit=unit,
        text=topology.kind,
    )


def _blocks(cluster: Cluster, unit: int) -> Mapping[str, float]:
    """Fast domains in each block that a level joins."""
    pairs = zip(cluster.levels, cluster.levels[1:], strict=False)
    return {outer.name: inner.group / unit for inner, outer in pairs}


def _alone_Bps(level: Level) -> float:
    return level.rank_Bps * level.oversubscription


def _tier(level: Level, first: Level, below: float, topology: Topology, unit: int, outermost: bool) -> Tier:
    base = _alone_Bps(first)
    link_Bps = max(level.link_Bps * level.efficiency, _alone_Bps(level))
    random = topology.placement == RANDOM
    scattered = 0.0
    if topology.placement != PACKED and below > 1:
        scattered = float(scattered_members(below, topology.pool / unit)) if random else 1.0
    return Tier(
        name=level.name,
        below=below,
        rate=_alone_Bps(level) / base,
        most=max(min(link_Bps / base, 1.0), 1e-6) if level is not first else 1.0,
        oversubscription=level.oversubscription,
        latency=max(level.latency_s / first.latency_s, 1.0) if first.latency_s else 1.0,
        kept=1.0 if topology.forwarding else 1.0 / topology.rails,
        scattered=scattered,
        groups=topology.groups if outermost and topology.groups > 1 else 0,
    )


def slice_shape(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Dims of the most compact box of ``devices`` devices in a torus; a line if there is no box.

    >>> slice_shape((16, 16, 16), 64), slice_shape((16, 16), 32), slice_shape((4, 4), 7)
    ((4, 4, 4), (4, 8), (7, 1))
    """
    best: tuple[int, ...] | None = None

    def walk(rest: int, dims: tuple[int, ...]) -> None:
        nonlocal best
        if len(dims) == len(shape):
            if rest == 1 and (best is None or _spread(dims) < _spread(best)):
                best = dims
            return
        for size in range(1, shape[len(dims)] + 1):
            if rest % size == 0:
                walk(rest // size, (*dims, size))

    walk(devices, ())
    return best or (devices, *(1 for _ in shape[1:]))


def _spread(dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Key of a box, smallest for the most compact one."""
    return tuple(sorted(dims, reverse=True)), dims


def _torus(cluster: Cluster, topology: Topology, gpus: int) -> Network:
    inner, pod = cluster.levels[0], math.prod(topology.shape)
    dims = slice_shape(topology.shape, min(gpus, pod))
    closed = tuple(
        size == whole or bool(topology.wraps and size % topology.wraps == 0)
        for size, whole in zip(dims, topology.shape, strict=True)
    )
    torus = Torus(name=inner.name, below=1.0, dims=dims, closed=closed)
    base = _alone_Bps(inner)
    beyond = tuple(
        Tier(
            name=level.name,
            below=float(pod),
            rate=_alone_Bps(level) / base,
            most=max(min(level.link_Bps * level.efficiency, base), _alone_Bps(level)) / base,
            oversubscription=level.oversubscription,
            latency=max(level.latency_s / inner.latency_s, 1.0) if inner.latency_s else 1.0,
        )
        for level in cluster.crossed_levels(gpus)
        if gpus > pod
    )
    shape = " x ".join(map(str, dims))
    return Network(
        tiers=(torus, *beyond), rank_Bps=base, link_Bps=base, latency_s=inner.latency_s, unit=1, text=f"torus {shape}"
    )
