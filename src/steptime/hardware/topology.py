"""Topology of the links of a cluster: trees of switches, rails, dragonflies, tori, shared bridges, nodes anywhere.

Without a topology the levels of a cluster beyond its fast domains are not told apart. With one each is a tier of its
own: a group pays for the tiers that it spans, and for the links that it shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from steptime.errors import FieldError, UserError, counted
from steptime.hardware.records import Level, Source

MOST_DIMS: Final = 6
LARGEST: Final = 10**7
RANDOM, WORST, PACKED = "random", "worst", "packed"
PLACEMENTS: Final[Mapping[str, str]] = {
    PACKED: "neighbours lie in one block as far as they fit",
    RANDOM: "nodes are drawn from the pool at random: the mean",
    WORST: "no two neighbours of a group share a block",
}


class Kind(NamedTuple):
    """One kind of network."""

    title: str
    needs: tuple[str, ...]
    """Required keys of a file."""
    takes: tuple[str, ...]
    """Optional keys of a file."""
    tiers: int
    """Smallest number of levels beyond the first."""


KINDS: Final[Mapping[str, Kind]] = {
    "fat-tree": Kind("tree of switches; a level's oversubscription is that of its uplinks", (), (), 1),
    "rail": Kind(
        "tree with a leaf switch per place in the node: ranks in the same place share it",
        ("rails",),
        ("forwarding",),
        1,
    ),
    "dragonfly": Kind("groups of switches, each joined with every other", ("groups",), (), 2),
    "torus": Kind("neighbours joined along two or three dims", ("shape",), ("wraps",), 0),
    "pcie": Kind("switches under a host bridge that their devices share, without NVLink", (), (), 1),
    "cloud": Kind("tree in which nobody guarantees where nodes lie", ("pool",), ("placement",), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Kind of a network, with numbers that the levels do not have."""

    kind: str
    """One of :data:`KINDS`."""
    shape: tuple[int, ...] = ()
    """Devices along each dim of a torus; the first level holds them all."""
    wraps: int = 0
    """A dim of a slice of the torus closes if it is a multiple of this; 0: only if it is a whole dim."""
    rails: int = 1
    """Leaf switches that a node has a link to each of."""
    forwarding: bool = True
    """Messages to another place in the node change it inside the node, and stay on their rail (NCCL's PXN)."""
    groups: int = 1
    """Groups of a dragonfly."""
    pool: int = 0
    """Devices from which the nodes of a job are drawn."""
    placement: str = PACKED
    """One of :data:`PLACEMENTS`."""
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The kind in words."""
        return KINDS[self.kind].title

    @property
    def is_torus(self) -> bool:
        """True if devices are joined one by one, so that there is no fast domain."""
        return bool(self.shape)


def topology_of(table: Mapping[str, Any], levels: Sequence[Level], source: Source, where: str) -> Topology:
    """The topology that a table of a cluster file describes.

    Args:
        table: a table that passed the gate.
        levels: of the cluster, innermost first.
        source: of the file.
        where: file that errors name.

    Raises:
        FieldError: an unused key, a missing key, too few levels, or a topology that does not
            hold the devices of its levels.
    """
    given = {key: value for key, value in table.items() if key not in ("source", "notes") and value is not None}
    kind = given["kind"]
    row = KINDS[kind]
    allowed = ("kind", *row.needs, *row.takes)
    for key in given:
        if key not in allowed:
            hint = f"{kind} has {', '.join(allowed)}"
            raise FieldError(where, f"topology.{key}", f"means nothing for kind {kind}", hint=hint)
    for key in row.needs:
        if key not in given:
            raise FieldError(where, f"topology.{key}", f"is missing; kind {kind} needs it", hint=EXAMPLES[key])
    if len(levels) <= row.tiers:
        raise FieldError(
            where,
            "levels",
            f"links are missing: {kind} needs {counted(row.tiers + 1, 'level')}, this cluster has {len(levels)}",
            hint='for example [levels.leaf] with devices = 256 and link = "infiniband-ndr"',
        )
    texts = {"source": source if "source" not in table else Source(text=table["source"], kind=source.kind)}
    if "shape" in given:
        given["shape"] = tuple(given["shape"])
    found = Topology(**given, sources=dict.fromkeys((key for key in given if key != "kind"), texts["source"]))
    _check_size(found, levels, where)
    return found


EXAMPLES: Final[Mapping[str, str]] = {
    "shape": "for example shape = [4, 4, 4]",
    "rails": "for example rails = 8, the NICs of a node",
    "groups": "for example groups = 74",
    "pool": "for example pool = 4096, the devices among which the provider chooses",
}


def _check_size(found: Topology, levels: Sequence[Level], where: str) -> None:
    inner, outermost = levels[0].group, levels[-1]
    held = math.prod(found.shape)
    if found.shape and held != inner:
        shape = " x ".join(map(str, found.shape))
        raise FieldError(
            where,
            "topology.shape",
            f"a torus of {shape} has {held} devices; level {levels[0].name!r} has {levels[0].devices or 'no limit'}",
            hint=f"give shape and devices that agree, as devices = {held}",
        )
    if found.rails > 1 and inner % found.rails:
        raise FieldError(
            where,
            "topology.rails",
            f"{found.rails} rails do not divide the {inner} devices of level {levels[0].name!r}",
        )
    if found.groups > 1 and outermost.devices is not None and levels[-2].group * found.groups < outermost.devices:
        raise FieldError(
            where,
            "topology.groups",
            f"{found.groups} groups of {levels[-2].group} devices do not hold the {outermost.devices} of level "
            f"{outermost.name!r}",
        )
    if found.pool and found.pool < inner:
        raise FieldError(where, "topology.pool", f"{found.pool} devices are fewer than the {inner} of one node")


def refuse_beyond(topology: Topology, levels: Sequence[Level], devices: int, cluster: str) -> None:
    """Refuses a job of more devices than a cluster with a topology has.

    Raises:
        UserError: says how many it has.
    """
    most = levels[-1].devices if levels[-1].devices is not None else LARGEST * LARGEST
    most = min(most, topology.pool) if topology.pool else most
    if topology.groups > 1 and len(levels) > 1:
        most = min(most, levels[-2].group * topology.groups)
    if devices > most:
        raise UserError(
            f"{cluster}: its {topology.kind} holds {most:,} devices, the job has {devices:,}",
            hint="give fewer --gpus, or a cluster whose outermost level has more devices (or no limit)",
        )
