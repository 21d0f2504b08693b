"""Writes a mesh as a cluster file that every command reads: a level per axis."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from steptime.errors import InputFileError
from steptime.hardware.library import load_device
from steptime.hardware.records import AxisKind, Level, Mesh, MeshAxis
from steptime.hardware.search_path import is_path
from steptime.measure.toml_file import quantity_of, refuse_foreign, text_of
from steptime.store.files import write_whole

ALIKE: Final = 1.25
"""Largest factor between the bandwidths of the axes of a torus."""
#: First line of every file that is written here; a file without it is not overwritten.
MARK: Final = "# Written by `steptime calibrate mesh`; a later run overwrites it."


def refuse(path: str | Path, device: str) -> None:
    """Checks that the cluster file can be written, before the mesh is sought.

    Raises:
        UserError: the device is neither in the catalogue nor a file.
        InputFileError: ``--cluster`` would not take the file for a path, or it exists and was not written here.
    """
    if not is_path(str(path)):
        raise InputFileError(str(path), "is not the name of a TOML file", hint=f"for example {path}.toml")
    load_device(device)
    refuse_foreign(path, MARK)


def write(path: str | Path, mesh: Mesh, device: str, origin: str) -> None:
    """Write the file, whole or not at all.

    Args:
        path: the file.
        mesh: what was found.
        device: catalogue name or file of the devices, which measured links do not tell.
        origin: file of the measured links.

    Raises:
        UserError: the latency or bandwidth of an axis is unknown, or the device is.
        InputFileError: it cannot be written, or was not written here.
    """
    refuse(path, device)
    write_whole(path, cluster_text(mesh, device_text(device, Path(path)), origin))


def device_text(device: str, path: Path) -> str:
    """Name of a device in a cluster file: its name, or its path relative to that file.

    >>> device_text("h100-sxm", Path("out/c.toml")), device_text("out/chips/a.toml", Path("out/c.toml"))
    ('h100-sxm', './chips/a.toml')
    """
    if not is_path(device):
        return device
    return f"./{Path(os.path.relpath(Path(device).expanduser(), path.parent)).as_posix()}"


def cluster_text(mesh: Mesh, device: str, origin: str) -> str:
    """The cluster file.

    Raises:
        InputFileError: the latency or bandwidth of an axis is unknown.
    """
    levels = mesh.levels()
    if not levels:
        number, axis = next((i, a) for i, a in enumerate(mesh.axes) if a.Bps is None or a.latency_s is None)
        missing = "bandwidth" if axis.Bps is None else "latency"
        raise InputFileError(
            origin,
            f"the {missing} of axis {number} is unknown, so the mesh makes no cluster file",
            hint="measure one small message (up to 4 KiB) and one large (1 MiB or more) per pair",
        )
    shape = " x ".join(str(size) for size in mesh.shape)
    made = f"mesh {shape} found in {Path(origin).name}, confidence {mesh.confidence:.1%}"
    rows = [
        MARK,
        f"title = {text_of(f'measured mesh of {len(mesh.devices)} devices: {shape}')}",
        f"device = {text_of(device)}",
        f"source = {text_of(made)}",
        'kind = "measured"',
        "# The outermost level joins the devices that were measured; without its `devices` it joins any number.",
    ]
    if is_torus(mesh):
        return "\n".join([*rows, "", *_torus(mesh, made)]) + "\n"
    for level, axis in zip(levels, mesh.axes, strict=True):
        rows += ["", *_level(level, axis, made)]
    return "\n".join([*rows, *_topology(mesh)]) + "\n"


def is_torus(mesh: Mesh) -> bool:
    """True if all axes are rings of similar links, so that a device sends along all of them at once."""
    rates = [axis.Bps or 0.0 for axis in mesh.axes]
    rings = [axis.kind == AxisKind.RING or axis.growth is not None for axis in mesh.axes]
    return all(rings) and max(rates) <= ALIKE * min(rates)


def _torus(mesh: Mesh, made: str) -> list[str]:
    """Lines of one level with all links of a device together, and of the shape of the torus."""
    rate = min(axis.Bps or 0.0 for axis in mesh.axes)
    latency = max(axis.latency_s or 0.0 for axis in mesh.axes)
    return [
        "[levels.torus]",
        f"devices = {len(mesh.devices)}",
        f"bandwidth = {quantity_of(2 * len(mesh.axes) * rate, 'B/s')}",
        "efficiency = 1",
        f"latency = {quantity_of(latency, 's')}",
        f"source = {text_of(f'{made}; {2 * len(mesh.axes)} links of a device together')}",
        'kind = "measured"',
        "",
        "[topology]",
        'kind = "torus"',
        f"shape = [{', '.join(str(size) for size in mesh.shape)}]",
    ]


def _topology(mesh: Mesh) -> list[str]:
    """Lines of the topology where there are several levels."""
    if len(mesh.axes) < 2:
        return []
    if mesh.axes[1].kind == AxisKind.RAIL:
        return ["", "[topology]", 'kind = "rail"', f"rails = {mesh.shape[0]}"]
    return ["", "[topology]", 'kind = "fat-tree"']


def _level(level: Level, axis: MeshAxis, made: str) -> list[str]:
    """Lines of one axis. A level is a switch, so its source says what only rings and rails have."""
    further = {
        AxisKind.SWITCH: "",
        AxisKind.RING: "; a ring: links between neighbours, charged as a switch",
        AxisKind.RAIL: "; rails: links along a rail, charged for all",
    }[axis.kind]
    return [
        f"[levels.{level.name}]",
        f"devices = {level.devices}",
        f"bandwidth = {quantity_of(level.link_Bps, 'B/s')}",
        f"efficiency = {level.efficiency:g}",
        f"latency = {quantity_of(level.latency_s, 's')}",
        f"source = {text_of(made + further)}",
        'kind = "measured"',
    ]
