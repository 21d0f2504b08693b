"""What a report calls the devices of a job."""

from __future__ import annotations

from typing import Final

from steptime.errors import UserError
from steptime.hardware.library import load_device

GPU_MAKERS: Final = ("NVIDIA", "AMD")


def device_noun(device: str) -> str:
    """``GPU``, or ``device`` where the catalogue knows that it is another accelerator.

    >>> device_noun("h100-sxm"), device_noun("tpu-v5p"), device_noun("gaudi2"), device_noun("my own")
    ('GPU', 'device', 'device', 'GPU')
    """
    try:
        return "GPU" if load_device(device).vendor in GPU_MAKERS else "device"
    except UserError:
        return "GPU"
