"""A mesh of devices as it was found by measuring: axes, their links, where each device lies, and what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from steptime.hardware.records import Kind, Level, Source


class AxisKind(StrEnum):
    """What joins the devices along one axis."""

    SWITCH = "switch"
    """All pairs are alike."""
    RAIL = "rail"
    """A switch per place inside the group: pairs with the same inner coordinates are faster than others."""
    RING = "ring"
    """Neighbours are joined; cost grows with the hops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh and its links: of a ring, those between neighbours; of rails, those along a rail."""

    size: int
    kind: AxisKind
    links: int
    """Pairs of devices whose link belongs to this axis."""
    latency_s: float | None
    """Time of an empty message; None if nothing measured tells it from the bandwidth."""
    latency_error_s: float | None = None
    """Standard error of the latency."""
    Bps: float | None
    """Bandwidth of a link, one direction; None if nothing measured tells it from the latency."""
    Bps_error: float | None = None
    step: float | None = None
    """Cost of these links over those of the axis before."""
    separation: float | None = None
    """Logarithm of ``step`` in units of the noise of one link (taken as 0.02 at least)."""
    growth: float | None = None
    """Rings: cost of two hops over one."""
    cross_latency_s: float | None = None
    """Rails: latency of pairs on different rails."""
    cross_Bps: float | None = None
    cross_step: float | None = None
    """Rails: cost of pairs on different rails over that of pairs on one rail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddLink:
    """A link that is slower than its kind, or slower one way than the other."""

    source: str
    target: str
    factor: float
    """Cost over what links of its kind cost; of an asymmetric link, over that of the way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices on an N-dimensional mesh; pairs that differ along one axis have similar links."""

    axes: tuple[MeshAxis, ...]
    """Innermost (fastest) first."""
    devices: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]
    """Place of each device along every axis; which place is called 0 is arbitrary."""
    confidence: float
    """Probability that this is the shape, judged against merging, splitting and re-wiring its axes."""
    noise: float
    """Spread of the logarithm of the cost of alike links (standard deviation)."""
    broken_links: tuple[OddLink, ...] = ()
    asymmetric_links: tuple[OddLink, ...] = ()
    slow_devices: tuple[str, ...] = ()
    """Devices most of whose links are broken."""
    missing_pairs: int = 0
    """Pairs that were not measured in either direction."""
    notes: tuple[str, ...] = ()
    """What the reader should know before trusting it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each axis, innermost first."""
        return tuple(axis.size for axis in self.axes)

    def levels(self) -> tuple[Level, ...]:
        """The axes as levels of a fabric, innermost first; empty if a latency or bandwidth is unknown.

        A level holds all devices of its axis and of those before it. The bandwidth is what was measured, so nothing
        is taken off it.
        """
        out, devices = [], 1
        source = Source(text=f"measured between {math.prod(self.shape)} devices", kind=Kind.MEASURED)
        for number, axis in enumerate(self.axes):
            devices *= axis.size
            if axis.Bps is None or axis.latency_s is None:
                return ()
            out.append(
                Level(
                    name=f"axis{number}",
                    devices=devices,
                    link_Bps=axis.Bps,
                    efficiency=1.0,
                    latency_s=axis.latency_s,
                    sources={"link_Bps": source, "latency_s": source},
                )
            )
        return tuple(out)
