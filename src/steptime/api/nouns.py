"""What a report calls the devices of a job."""

from __future__ import annotations

from steptime.api.values import NameOrPath, name_or_path
from steptime.errors import UserError
from steptime.hardware.library import load_cluster, load_device


def device_noun(device: str, is_gpu: bool | None = None) -> str:
    """``GPU``, or ``device`` where nobody says that it is one; ``is_gpu``: whether it is, None: see the catalogue.

    >>> device_noun("h100-sxm"), device_noun("tpu-v5p"), device_noun("my own", True), device_noun("my own")
    ('GPU', 'device', 'GPU', 'device')
    """
    try:
        return _noun(load_device(device).is_gpu if is_gpu is None else is_gpu)
    except UserError:
        return "device"


def cluster_noun(cluster: NameOrPath) -> str:
    """As :func:`device_noun`, for the devices of a cluster that is given by name or file.

    >>> cluster_noun("dgx-h100"), cluster_noun("tpu-v5p-pod"), cluster_noun("my own")
    ('GPU', 'device', 'GPU')
    """
    try:
        return _noun(load_cluster(name_or_path("cluster", cluster)).device.is_gpu)
    except UserError:
        return "GPU"


def _noun(is_gpu: bool) -> str:
    return "GPU" if is_gpu else "device"
