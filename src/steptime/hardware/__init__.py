"""Machines: devices, the levels of a fabric, clusters, and the catalogue of them.

:func:`load_device` and :func:`load_cluster` take a name of the catalogue or a TOML file. Every number of a record
has a :class:`Source` that says where it comes from and a :class:`Kind` that says how far to trust it.
"""

from __future__ import annotations

from steptime.hardware.library import cluster_names, device_names, device_within, load_cluster, load_device
from steptime.hardware.records import Cluster, Device, Kind, Level, Source

__all__ = [
    "Cluster",
    "Device",
    "Kind",
    "Level",
    "Source",
    "cluster_names",
    "device_names",
    "device_within",
    "load_cluster",
    "load_device",
]
