"""Curves that an estimate of a training step asks for, transferred to the devices of the catalogue that lack them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from steptime.calibrate.transfer import DTYPES, transferred_curve
from steptime.hardware.library import device_names, load_device
from steptime.hardware.profile import Curve, Profile
from steptime.hardware.profiles import distance, load_profile, profile_names
from steptime.hardware.records import Device

Key = tuple[str, str, str]
#: Family, dtype and timer of what :mod:`steptime.estimate` looks for.
WANTED: Final[tuple[Key, ...]] = (
    *(("gemm", dtype, "kernel") for dtype in ("bf16", "fp16", "fp8", "tf32")),
    *(("attention_fwd", dtype, "kernel") for dtype in ("bf16", "fp8")),
    ("attention_bwd", "bf16", "kernel"),
    *((family, "any", "kernel") for family in ("elementwise", "activation", "rope")),
    *((family, "any", "eager") for family in ("layernorm", "layernorm_bwd", "softmax", "softmax_bwd", "dropout")),
    ("embedding", "any", "eager"),
)
#: Either stands for the other, so neither is transferred where one was measured.
ALIKE: Final[Mapping[str, str]] = {"bf16": "fp16", "fp16": "bf16"}
FARTHEST: Final = 3.0
"""Distance (:func:`steptime.hardware.profiles.distance`) beyond which an architecture says nothing about another.

Devices of two vendors are at least so far apart."""
NOT_REAL: Final = "published-"
"""Devices of papers that are reproduced: nothing is known about them but what the paper assumes."""


def lacking_curves(devices: Iterable[str] | None = None) -> Iterator[tuple[str, list[Curve]]]:
    """Transferred curves of each device that lacks some, from devices that are alike; fitted ones are kept.

    Args:
        devices: catalogue names; default all.
    """
    profiles = {name: p for name in profile_names() if (p := load_profile(name)) is not None}
    records = {name: load_device(name) for name in profiles}
    for name in device_names() if devices is None else devices:
        if name.startswith(NOT_REAL):
            continue
        device = load_device(name)
        near = {n: p for n, p in profiles.items() if n != name and distance(device, records[n]) <= FARTHEST}
        found = [_transferred(device, key, near, records) for key in _lacking(device, profiles.get(name))]
        curves = [curve for curve in found if curve is not None]
        if curves:
            yield name, curves


def _lacking(device: Device, own: Profile | None) -> Iterator[Key]:
    for family, dtype, timer in WANTED:
        if dtype in DTYPES and dtype not in device.matrix_flops_per_s:
            continue
        if not any(_fitted(own, (family, same, timer)) for same in (dtype, ALIKE.get(dtype, dtype))):
            yield family, dtype, timer


def _fitted(profile: Profile | None, key: Key) -> Curve | None:
    """The curve of a profile, if it was fitted to measurements of that device."""
    curve = None if profile is None else profile.curve(*key)
    return curve if curve is not None and curve.kind == "fitted" else None


def _transferred(device: Device, key: Key, near: Mapping[str, Profile], records: Mapping[str, Device]) -> Curve | None:
    curves = {name: curve for name, profile in near.items() if (curve := _fitted(profile, key)) is not None}
    return transferred_curve(device, curves, records) if curves else None
