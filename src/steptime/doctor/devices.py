"""The accelerator that a log or a trace names, and whether it is that of the prediction."""

from __future__ import annotations

import re
from typing import Final

from steptime.doctor import words as w
from steptime.errors import UserError
from steptime.hardware.records import Device
from steptime.lab.measured.canonical import catalogue_device, device_name
from steptime.units import format_bytes

#: Places at which programs name a device: torchtitan, Lightning, ``nvidia-smi -L``, its table, properties as PyTorch
#: prints them, XLA, TensorFlow, and keys of configurations.
_NAMED: Final = (
    re.compile(r"\b(?:CUDA|HIP|XPU|GPU) capacity: (.{3,80}?) with [\d.]+\s?GiB"),
    re.compile(r"CUDA device \('([^']{3,80})'\)"),
    re.compile(r"\bGPU \d{1,3}: (.{3,80}?) \(UUID"),
    re.compile(r"^\|\s+\d{1,3}\s+((?:NVIDIA|Tesla|GeForce|Quadro|AMD|A100|H100)[^|]{2,60}?)\s+(?:On|Off|\|)"),
    re.compile(r"DeviceProperties\(name='([^']{3,80})'"),
    re.compile(r"StreamExecutor device \(\d{1,3}\): (.{3,80}?)(?:, Compute|$)"),
    re.compile(r"\bname: ([^,]{3,80}), pci bus id"),
    re.compile(r"\b(?:gpu|device|accelerator)[ _](?:name|type|model)[\"']?\s*[:=]\s*[\"']?([^\"',;|]{3,80})", re.I),
)  # fmt: skip
_WORDS: Final = ("apacity", "CUDA device", "GPU", "gpu", "|", "Properties", "StreamExec", "pci bus", "evice", "celer")
#: Where the memory of the whole device is printed: torchtitan, the table of nvidia-smi, PyTorch.
_MEMORY: Final = (
    (re.compile(r"\w+ capacity: .{0,120}? with " + w.NUMBER + r"\s?GiB memory"), 2.0**30),
    (re.compile(r"\d{1,7}MiB\s*/\s*(\d{3,7})MiB"), 2.0**20),
    (re.compile(r"DeviceProperties\(.{0,200}?total_memory=(\d{3,7})MB"), 2.0**20),
    (re.compile(r"total capacity of " + w.NUMBER + r" GiB"), 2.0**30),
)
#: Memory of a run's device over that of the prediction's, between which they may be one: drivers keep some.
_MEMORY_RATIOS: Final = (0.88, 1.04)
#: Peaks of matrix units that differ by less are those of one design.
_ALIKE: Final = 0.1
#: Memory in use beyond that of the device by so much is no rounding.
_BEYOND: Final = 1.02


class Devices:
    """Gathers what a log says of its devices."""

    def __init__(self) -> None:
        self.name = ""
        """As printed; empty: not named, or by a name that the catalogue does not know."""
        self.memory_bytes: float | None = None

    def feed(self, line: str) -> None:
        """Take one line; the first device counts."""
        if (self.name and self.memory_bytes) or not any(word in line for word in _WORDS):
            return
        if not self.name:
            found = (match[1].strip() for pattern in _NAMED if (match := pattern.search(line)))
            self.name = next((name for name in found if device_name(name).name), "")
        if self.memory_bytes is None:
            sizes = ((w.number(match[1]), unit) for pattern, unit in _MEMORY if (match := pattern.search(line)))
            self.memory_bytes = next((value * unit for value, unit in sizes if value and value * unit < 1e15), None)


def device_contradictions(
    predicted: Device, cluster: str, name: str, capacity_bytes: float | None, peak_bytes: float | None
) -> tuple[str, ...]:  # fmt: skip
    """What speaks against the run having had the device of the prediction.

    Args:
        predicted: the device of the cluster.
        cluster: what the user calls the cluster.
        name: device as the run prints it; empty: it does not.
        capacity_bytes: its memory as the run prints it.
        peak_bytes: memory that the run had in use.
    """
    whole = predicted.memory_bytes
    other = _another(predicted, name)
    if other is not None:
        return (f"{cluster} has {predicted.name}, but the run names {name} ({other})",)
    if capacity_bytes and not _MEMORY_RATIOS[0] <= capacity_bytes / whole <= _MEMORY_RATIOS[1]:
        sizes = f"{format_bytes(whole)} of memory, but the run has {format_bytes(capacity_bytes)}"
        return (f"{predicted.name} of {cluster} has {sizes}",)
    if peak_bytes and peak_bytes > _BEYOND * whole:
        sizes = f"{format_bytes(whole)} of memory, but the run used {format_bytes(peak_bytes)}"
        return (f"{predicted.name} of {cluster} has {sizes}",)
    return ()


def _another(predicted: Device, name: str) -> str | None:
    """Device of the catalogue that a name means, where it is another than that of the prediction."""
    found = device_name(name) if name else None
    if found is None or found.name is None or found.name in (predicted.name, predicted.like):
        return None
    seen = catalogue_device(found.name)
    exact = not found.assumed and _of_catalogue(predicted)
    return None if not exact and _alike(seen, predicted) else found.name


def _of_catalogue(device: Device) -> bool:
    """Whether a device is one of the catalogue, and not a user's own."""
    try:
        return catalogue_device(device.name) == device
    except UserError:
        return False


def _alike(one: Device, other: Device) -> bool:
    """Whether two devices differ in nothing that a name without its variant tells: peak and memory."""
    pairs = [(one.memory_bytes, other.memory_bytes)]
    pairs += [
        (one.matrix_flops_per_s[dtype], other.matrix_flops_per_s[dtype])
        for dtype in ("bf16", "fp16") if dtype in one.matrix_flops_per_s and dtype in other.matrix_flops_per_s
    ][:1]  # fmt: skip
    return all(abs(a / b - 1.0) <= _ALIKE for a, b in pairs)
