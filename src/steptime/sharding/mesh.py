"""Device meshes: the devices of a job as an array with named axes, and times of collectives along axes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import numpy as np

from steptime.errors import UnknownNameError, UserError, counted, first_few, shorten
from steptime.estimate import communication
from steptime.estimate.communication import collective_in, message_time_s
from steptime.estimate.machine import Machine
from steptime.estimate.network import Reach
from steptime.hardware.records import Cluster
from steptime.num import Num, divisors
from steptime.options import MAX_DEVICES
from steptime.simulation.collectives.times import machine_for_links

MAX_AXES: Final = 3
"""Largest number of axes of a mesh; the number of layouts of a tensor grows exponentially with the axes."""
_AXIS: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,9})\s*")
_SIZES: Final = re.compile(r"\s*[0-9]{1,9}(\s*x\s*[0-9]{1,9})*\s*")
UNNAMED: Final = (("data",), ("data", "model"), ("replica", "data", "model"))
"""Names of the axes of a mesh that is given by its sizes alone."""


class Group(NamedTuple):
    """The ranks of one collective."""

    ranks: int
    inside: int
    """Ranks of the group in each fast domain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """Devices in an array with named axes in row-major order: the last axis varies fastest and is the innermost.

    Meshes are compared by identity, because tables of costs are cached by mesh.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    machine: Machine

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(self.sizes)

    def axis(self, name: str) -> int:
        """Number of an axis, from 0.

        Raises:
            UnknownNameError: the mesh has no axis with this name.
        """
        if name not in self.names:
            raise UnknownNameError("axis of the mesh", name, self.names)
        return self.names.index(name)

    def group(self, axes: Iterable[int]) -> Group:
        """Ranks of each group along some axes together.

        If groups span different numbers of fast domains, all count as the one that spans the most.
        """
        return _group(self.sizes, self.machine.fast_domain, tuple(sorted(axes)))

    def collective_s(self, kind: str, axes: Iterable[int], size_bytes: Num) -> Num:
        """Seconds of a collective along some axes together, in all groups at once; sizes as in ``collective_in``."""
        group = self.placed(axes)
        return 0.0 * size_bytes if group.ranks == 1 else collective_in(kind, self.machine, size_bytes, group)

    def message_s(self, axes: Iterable[int], size_bytes: Num) -> Num:
        """Seconds in which each device sends ``size_bytes`` to another one of its group and receives as much."""
        group = self.placed(axes)
        near_s, far_s = message_time_s(self.machine, size_bytes, group)
        return 0.0 * size_bytes if group.ranks == 1 else near_s if group.ranks == group.inside else far_s

    def placed(self, axes: Iterable[int]) -> communication.Group:
        """Ranks of each group along some axes together, and the positions of its fast domains."""
        chosen, domain = tuple(sorted(axes)), self.machine.fast_domain
        ranks, inside = _group(self.sizes, domain, chosen)

        def members(block: float) -> int:
            return _group(self.sizes, domain * int(min(block, self.devices)), chosen).inside // inside

        return communication.Group(ranks, inside, lambda: Reach(ranks // inside, members))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@lru_cache(maxsize=1 << 10)
def _group(sizes: tuple[int, ...], fast_domain: int, axes: tuple[int, ...]) -> Group:
    ranks = prod(sizes[axis] for axis in axes)
    domains = np.arange(prod(sizes)).reshape(sizes) // fast_domain
    rows = np.moveaxis(domains, axes, range(len(sizes) - len(axes), len(sizes))).reshape(-1, ranks)
    spans = 1 + int((np.diff(np.sort(rows, axis=1), axis=1) != 0).sum(axis=1).max())
    return Group(ranks, max(n for n in divisors(ranks) if n * spans <= ranks))


def mesh_of(machine: Machine, axes: Mapping[str, int], devices: int | None = None) -> Mesh:
    """A mesh with named axes, outermost first.

    Args:
        machine: links and memory.
        axes: name and size of each axis.
        devices: devices of the job; None: those of the mesh.

    Raises:
        UserError: no axes or too many, a size below 1, or a mesh with another number of devices.

    >>> from steptime.hardware import load_cluster
    >>> mesh = mesh_of(machine_for_links(load_cluster("dgx-h100"), 16), {"data": 2, "model": 8}, devices=16)
    >>> mesh.group((0,)), mesh.group((1,)), mesh.group((0, 1))
    (Group(ranks=2, inside=1), Group(ranks=8, inside=8), Group(ranks=16, inside=8))
    """
    _check_axes(axes)
    mesh = Mesh(names=tuple(axes), sizes=tuple(axes.values()), machine=machine)
    if devices is not None and mesh.devices != devices:
        fitting = ["x".join(map(str, sizes)) for sizes in factorisations(devices, len(axes))]
        raise UserError(
            f"mesh {mesh} has {counted(mesh.devices, 'device')}, the job has {devices:,}",
            hint=f"of {devices:,} devices and {_axes(len(axes))}: {first_few(fitting, 12)}"
            if fitting
            else f"{devices:,} devices are no product of {len(axes)} sizes above 1",
        )
    return mesh


def _axes(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _check_axes(axes: Mapping[str, int]) -> None:
    """Check the number of axes, their sizes, and the number of devices."""
    if not 0 < len(axes) <= MAX_AXES:
        raise UserError(f"a mesh has 1 to {MAX_AXES} axes, not {len(axes)}", hint="write data=2,model=4")
    for name, size in axes.items():
        if not 1 <= size <= MAX_DEVICES:
            raise UserError(f"mesh: axis {shorten(name)} of {size:,} devices", hint=f"1 to {MAX_DEVICES:,} devices")
    if prod(axes.values()) > MAX_DEVICES:
        raise UserError(f"mesh: {prod(axes.values()):,} devices", hint=f"at most {MAX_DEVICES:,}")


def mesh_on(cluster: Cluster, axes: Mapping[str, int], devices: int | None = None) -> Mesh:
    """A mesh of the devices of a cluster; arguments as of :func:`mesh_of`.

    Raises:
        UserError: as :func:`mesh_of`, or the cluster does not join that many devices.
    """
    _check_axes(axes)
    outermost, count = cluster.levels[-1], prod(axes.values())
    mesh = mesh_of(machine_for_links(cluster, count), axes, devices)
    if outermost.devices is not None and count > outermost.devices:
        raise UserError(
            f"{cluster.name}: its outermost level {outermost.name} joins {counted(outermost.devices, 'device')}, not "
            f"{count:,}",
            hint="give a smaller mesh, or a cluster with a level that joins any number",
        )
    return mesh


def parse_axes(text: str) -> dict[str, int]:
    """Parse names and sizes of axes; sizes alone get the names of :data:`UNNAMED`.

    Raises:
        UserError: the text has another form.

    >>> parse_axes("data=2,model=4"), parse_axes("2x4") == parse_axes("data=2,model=4")
    ({'data': 2, 'model': 4}, True)
    """
    if _SIZES.fullmatch(text):
        sizes = [int(size) for size in text.split("x")]
        if len(sizes) <= len(UNNAMED):
            return dict(zip(UNNAMED[len(sizes) - 1], sizes, strict=True))
    found = [_AXIS.fullmatch(part) for part in text.split(",")]
    out = {each[1]: int(each[2]) for each in found if each is not None}
    if len(out) < len(found) or len(out) > MAX_AXES:
        raise UserError(
            f"{shorten(text)!r} is no mesh",
            hint=f"write data=2,model=4 or 2x4: at most {MAX_AXES} axes of different names, the innermost last",
        )
    return out


def factorisations(devices: int, axes: int) -> list[tuple[int, ...]]:
    """Sizes above 1 of n = `axes` axes whose product is the number of devices, in every order.

    >>> factorisations(8, 2), factorisations(1, 1), factorisations(7, 2)
    ([(2, 4), (4, 2)], [(1,)], [])
    """
    if axes == 1:
        return [(devices,)]
    rest = [(n, factorisations(devices // n, axes - 1)) for n in divisors(devices) if 1 < n < devices]
    return [(n, *sizes) for n, others in rest for sizes in others]


def logical_meshes(devices: int, axes: int = 2) -> list[tuple[int, ...]]:
    """Sizes of all meshes of n = `devices` devices with at most `axes` axes.

    >>> logical_meshes(8), len(logical_meshes(8, axes=3))
    ([(8,), (2, 4), (4, 2)], 4)
    """
    return [sizes for count in range(1, axes + 1) for sizes in factorisations(devices, count)]
