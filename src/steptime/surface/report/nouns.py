"""What a report calls the devices of a job."""

from __future__ import annotations

from typing import Final

from steptime.errors import UserError
from steptime.hardware.library import load_cluster, load_device
from steptime.surface.values import NameOrPath, name_or_path

GPU_MAKERS: Final = ("NVIDIA", "AMD")


def device_noun(device: str, vendor: str = "") -> str:
    """``GPU``, or ``device`` where nobody says that it is one; ``vendor``: who makes it, "": see the catalogue.

    >>> device_noun("h100-sxm"), device_noun("tpu-v5p"), device_noun("my own", "NVIDIA"), device_noun("my own")
    ('GPU', 'device', 'GPU', 'device')
    """
    try:
        return _noun(vendor or load_device(device).vendor)
    except UserError:
        return "device"


def cluster_noun(cluster: NameOrPath) -> str:
    """As :func:`device_noun`, for the devices of a cluster that is given by name or file.

    >>> cluster_noun("dgx-h100"), cluster_noun("tpu-v5p-pod"), cluster_noun("my own")
    ('GPU', 'device', 'GPU')
    """
    try:
        return _noun(load_cluster(name_or_path("cluster", cluster)).device.vendor)
    except UserError:
        return "GPU"


def _noun(vendor: str) -> str:
    return "GPU" if vendor in GPU_MAKERS else "device"
