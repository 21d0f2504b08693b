"""Fabrics whose mesh is known, and measurements of them with noise, gaps and faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steptime.measure.mesh.links import Links, Quantity
from steptime.num import Array

#: Range of the factor between the links of adjacent levels in a random fabric.
RATIOS = (1.6, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A fabric as it is: the mesh that should be found, and the true latency and bandwidth of every pair."""

    kind: str
    shape: tuple[int, ...]
    """Devices along each axis, the fastest first; a rank's coordinates count the first axis fastest."""
    latency_s: Array
    Bps: Array

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)


def coordinates(shape: Sequence[int]) -> Array:
    """Coordinates of every rank, first axis fastest: shape ``(devices, axes)``.

    >>> coordinates((2, 2)).tolist()
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    ranks = np.arange(math.prod(shape))
    strides = np.cumprod([1, *shape[:-1]])
    return np.stack([ranks // stride % size for stride, size in zip(strides, shape, strict=True)], axis=1)


def nested(kind: str, shape: Sequence[int], latency_s: Sequence[float], Bps: Sequence[float]) -> Fabric:
    """Nested groups: the outermost axis in which two devices differ sets their link."""
    places = coordinates(shape)
    level = np.zeros((len(places), len(places)), dtype=np.int64)
    for axis in range(len(shape)):
        differ = places[:, None, axis] != places[None, :, axis]
        level[differ] = axis
    return Fabric(kind=kind, shape=tuple(shape), latency_s=np.array(latency_s)[level], Bps=np.array(Bps)[level])


def flat_switch(devices: int) -> Fabric:
    """All devices on one switch."""
    return nested("flat switch", [devices], [5e-6], [50e9])


def nvlink_islands(nodes: int, per_node: int = 8) -> Fabric:
    """Nodes with a fast domain each, one network between them."""
    return nested("NVLink islands", [per_node, nodes], [3e-6, 12e-6], [400e9, 45e9])


def pcie_numa(nodes: int, sockets: int = 2, switches: int = 2) -> Fabric:
    """Pairs of devices on a PCIe switch, switches on a socket, sockets in a node, nodes on a network."""
    return nested("PCIe and NUMA", [2, switches, sockets, nodes], [4e-6, 7e-6, 12e-6, 22e-6], [26e9, 15e9, 8e9, 4.5e9])


def nvl72(racks: int) -> Fabric:
    """Racks of 72 devices in one NVLink domain."""
    return nested("NVL72", [72, racks], [3e-6, 11e-6], [700e9, 46e9])


def fat_tree(per_node: int, nodes: int, pods: int, oversubscription: float = 2.0) -> Fabric:
    """Nodes under leaf switches; links between pods share what oversubscription leaves them."""
    return nested(
        "fat tree", [per_node, nodes, pods], [3e-6, 10e-6, 17e-6], [400e9, 48e9, 48e9 / max(oversubscription, 1.0)]
    )


def rails(nodes: int, per_node: int = 8, cross: float = 1.8) -> Fabric:
    """Device i of every node on rail i; a pair on different rails is slower by the factor ``cross``."""
    places = coordinates([per_node, nodes])
    same_node = places[:, None, 1] == places[None, :, 1]
    same_rail = places[:, None, 0] == places[None, :, 0]
    link = np.where(same_node, 0, np.where(same_rail, 1, 2))
    latency_s, Bps = np.array([3e-6, 9e-6, 9e-6 * cross]), np.array([400e9, 48e9, 48e9 / cross])
    return Fabric(kind="rails", shape=(per_node, nodes), latency_s=latency_s[link], Bps=Bps[link])


def torus(shape: Sequence[int], growth: float = 1.0) -> Fabric:
    r"""Rings along every axis; a pair $h$ hops apart costs $h^p$ of a neighbour, $p$ = ``growth``."""
    places = coordinates(shape)
    hops = np.zeros((len(places), len(places)))
    for axis, size in enumerate(shape):
        apart = np.abs(places[:, None, axis] - places[None, :, axis])
        hops += np.minimum(apart, size - apart)
    factor = np.maximum(hops, 1.0) ** growth
    return Fabric(kind=f"{len(shape)}D torus", shape=tuple(shape), latency_s=1e-6 * factor, Bps=90e9 / factor)


def measured(
    fabric: Fabric,
    seed: int,
    *,
    sizes_bytes: Sequence[float] = (2.0**24,),
    sigma: float = 0.15,
    both_ways: bool = False,
    missing: float = 0.0,
    broken: Sequence[tuple[int, int, float]] = (),
    shuffled: bool = True,
) -> tuple[Links, Array]:
    """Times of messages between all pairs, with log-normal noise on each link.

    Args:
        fabric: what is measured.
        seed: seed of all random numbers.
        sizes_bytes: sizes of the messages.
        sigma: standard deviation of the logarithm of the noise.
        both_ways: true: each direction of a link has its own noise; false: both share it.
        missing: share of the pairs that was not measured.
        broken: links (two ranks of the fabric), each with the factor by which it is slower in both directions.
        shuffled: put the devices in random order.

    Returns:
        The measurements, and the fabric's rank of each of their devices.
    """
    random = np.random.default_rng(seed)
    devices = fabric.devices
    order = random.permutation(devices) if shuffled else np.arange(devices)
    fault = np.ones((devices, devices))
    for a, b, factor in broken:
        fault[a, b] = fault[b, a] = factor
    gone = _symmetric(random.random((devices, devices))) < missing
    gone |= np.eye(devices, dtype=bool)
    quantities = []
    for size in sizes_bytes:
        noise = random.normal(size=(devices, devices)) * sigma
        seconds = (fabric.latency_s + size / fabric.Bps) * fault * np.exp(noise if both_ways else _symmetric(noise))
        seconds[gone] = np.nan
        quantities.append(Quantity(kind="seconds", size_bytes=float(size), values=seconds[np.ix_(order, order)]))
    names = tuple(f"gpu{rank}" for rank in range(devices))
    return Links(names=names, quantities=tuple(quantities)), order


def write_pairs(links: Links, path: Path) -> None:
    """Writes measured times as a CSV file of pairs with the columns source, target, bytes, seconds."""
    with path.open("w", encoding="utf-8") as file:
        file.write("source,target,bytes,seconds\n")
        for quantity in links.quantities:
            for a, b in np.argwhere(np.isfinite(quantity.values)).tolist():
                size, seconds = int(quantity.size_bytes or 0), quantity.values[a, b]
                file.write(f"{links.names[a]},{links.names[b]},{size},{seconds:.6g}\n")


def _symmetric(matrix: Array) -> Array:
    upper = np.triu(matrix, 1)
    return upper + upper.T


def _levels(random: np.random.Generator, count: int) -> Array:
    """Cost of the links of each level; adjacent ones differ by a factor within RATIOS."""
    steps = np.exp(random.uniform(math.log(RATIOS[0]), math.log(RATIOS[1]), size=count - 1))
    return np.cumprod([1.0, *steps])


def _random_nested(random: np.random.Generator, kind: str, shape: Sequence[int]) -> Fabric:
    cost = _levels(random, len(shape))
    return nested(kind, shape, list(2e-6 * cost), list(400e9 / cost))


def _random_torus(random: np.random.Generator, largest: int, axes: int) -> Fabric:
    while True:
        shape = tuple(int(n) for n in random.integers(4, 17 if axes == 2 else 8, size=axes))
        if math.prod(shape) <= largest:
            return torus(sorted(shape), growth=float(random.uniform(0.7, 1.0)))


def _random_rails(random: np.random.Generator, largest: int) -> Fabric:
    per_node = int(random.choice([4, 6, 8]))
    nodes = int(random.integers(3, max(largest // per_node, 3) + 1))
    cost = _levels(random, 3)
    base = rails(nodes, per_node)
    link = np.searchsorted(np.unique(base.latency_s), base.latency_s)
    return Fabric(kind="rails", shape=base.shape, latency_s=2e-6 * cost[link], Bps=400e9 / cost[link])


def _random_groups(random: np.random.Generator, largest: int) -> Fabric:
    """Any nested shape of two to four axes."""
    while True:
        shape = tuple(int(n) for n in random.integers(2, 13, size=int(random.integers(2, 5))))
        if 6 <= math.prod(shape) <= largest:
            return _random_nested(random, "nested groups", shape)


def _within(random: np.random.Generator, largest: int, *inner: int) -> list[int]:
    """Inner axes and a random outermost one of at least two that stays within the limit."""
    return [*inner, int(random.integers(2, max(largest // math.prod(inner), 2) + 1))]


#: Kind -> random fabric of at most the given number of devices.
KINDS: dict[str, Callable[[np.random.Generator, int], Fabric]] = {
    "flat switch": lambda r, n: _random_nested(r, "flat switch", [int(r.integers(2, n + 1))]),
    "NVLink islands": lambda r, n: _random_nested(r, "NVLink islands", _within(r, n, int(r.choice([4, 6, 8, 16])))),
    "PCIe and NUMA": lambda r, n: _random_nested(
        r, "PCIe and NUMA", _within(r, n, 2, int(r.choice([2, 4])), int(r.choice([2, 4])))
    ),
    "rails": _random_rails,
    "fat tree": lambda r, n: _random_nested(
        r, "fat tree", _within(r, n, int(r.choice([4, 8])), int(r.choice([2, 4, 5, 8])))
    ),
    "NVL72": lambda r, n: _random_nested(r, "NVL72", _within(r, n, 72)),
    "2D torus": lambda r, n: _random_torus(r, n, 2),
    "3D torus": lambda r, n: _random_torus(r, n, 3),
    "nested groups": _random_groups,
}


def random_fabric(kind: str, seed: int, largest: int = 256) -> Fabric:
    """A fabric of a kind of :data:`KINDS` with random sizes and speeds, of at most ``largest`` devices."""
    return KINDS[kind](np.random.default_rng(seed), largest)
