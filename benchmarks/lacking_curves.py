"""Curves that an estimate of a training step asks for, transferred to the devices of the catalogue that lack them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from steptime.hardware.library import device_names, load_device
from steptime.hardware.profiles import distance, load_profile, profile_names
from steptime.hardware.records import ALIKE, Curve, Device, Profile
from steptime_lab.calibrate.family import in_six_digits
from steptime_lab.calibrate.transfer import DTYPES, EXPONENTS, large_share, transferred_curve, unlike_units, within_peak

Key = tuple[str, str, str]
#: Family, dtype and timer of what :mod:`steptime.estimate` looks for.
WANTED: Final[tuple[Key, ...]] = (
    *(("gemm", dtype, "kernel") for dtype in ("bf16", "fp16", "fp8", "fp4", "tf32")),
    *(("attention_fwd", dtype, "kernel") for dtype in ("bf16", "fp8")),
    *(("attention_bwd", dtype, "kernel") for dtype in ("bf16", "fp8")),
    *((family, "any", "kernel") for family in ("elementwise", "activation", "rope")),
    *((family, "any", "eager") for family in ("layernorm", "layernorm_bwd", "softmax", "softmax_bwd", "dropout")),
    ("embedding", "any", "eager"),
)
FARTHEST: Final = 3.0
"""Distance (:func:`steptime.hardware.profiles.distance`) beyond which an architecture says nothing about another.

Devices of two vendors are at least so far apart. Where one is nearer, products of 16 bits take all of the vendor: they
scale with the datasheet, and far ones count little (benchmarks/gemm.md)."""
NOT_REAL: Final = "published-"
"""Devices of papers that are reproduced: nothing is known about them but what the paper assumes."""


def lacking_curves(devices: Iterable[str] | None = None) -> Iterator[tuple[str, list[Curve]]]:
    """Transferred curves of each device that lacks some, from devices of its vendor; fitted ones are kept.

    Args:
        devices: catalogue names; default all.
    """
    profiles = {name: p for name in profile_names() if (p := load_profile(name)) is not None}
    records = {name: load_device(name) for name in profiles}
    for name in device_names() if devices is None else devices:
        if name.startswith(NOT_REAL):
            continue
        device = load_device(name)
        kin = {n: p for n, p in profiles.items() if n != name and records[n].vendor == device.vendor}
        known = profiles.get(name)
        keys = [key for key in _lacking(device, known) if not _outdone(device, key, kin, records)]
        found = [_transferred(device, key, known, kin, records) for key in keys]
        curves = [curve for curve in found if curve is not None]
        if curves:
            yield name, curves


def _lacking(device: Device, own: Profile | None) -> Iterator[Key]:
    for family, dtype, timer in WANTED:
        if dtype in DTYPES and dtype not in device.matrix_flops_per_s:
            continue
        if not any(_fitted(own, (family, same, timer)) for same in (dtype, ALIKE.get(dtype, dtype))):
            yield family, dtype, timer


def _outdone(device: Device, key: Key, kin: Mapping[str, Profile], records: Mapping[str, Device]) -> bool:
    """Whether the other format of 16 bits, which stands for this one, was measured on a device that is more alike."""
    family, dtype, timer = key
    other = ALIKE.get(dtype)
    if other is None or other not in device.matrix_flops_per_s:
        return False
    mine, others = (
        nearest_at(device, _donors(device, (family, d, timer), kin, records), records) for d in (dtype, other)
    )
    return others < mine


def nearest_at(device: Device, curves: Iterable[str], records: Mapping[str, Device]) -> float:
    """Distance of the most alike of some devices; infinite if there are none."""
    return min((distance(device, records[name]) for name in curves), default=math.inf)


def _fitted(profile: Profile | None, key: Key) -> Curve | None:
    """The curve of a profile, if it was fitted to measurements of that device."""
    curve = None if profile is None else profile.curve(*key)
    return curve if curve is not None and curve.kind == "fitted" else None


def _transferred(
    device: Device, key: Key, own: Profile | None, kin: Mapping[str, Profile], records: Mapping[str, Device]
) -> Curve | None:
    curves = _donors(device, key, kin, records)
    if not curves:
        return None
    curve = transferred_curve(device, curves, records)
    family, dtype, timer = key
    if family != "gemm" or dtype in ALIKE:
        return curve
    for known in ALIKE:
        wide = _donors(device, (family, known, timer), kin, records)
        mine = _fitted(own, (family, known, timer)) or (transferred_curve(device, wide, records) if wide else None)
        unlike = {name: unlike_units(device, records[name], dtype) for name in curves if name in wide}
        donors = [(records[name], curves[name], wide[name]) for name in unlike if unlike[name] == min(unlike.values())]
        if mine is not None and donors:
            return beside_sixteen_bits(curve, device, mine, donors)
    return curve


def _donors(device: Device, key: Key, kin: Mapping[str, Profile], records: Mapping[str, Device]) -> dict[str, Curve]:
    """Fitted curves of devices that are alike; of 16-bit products those of all, if one is alike."""
    family, dtype, _ = key
    fitted = {name: curve for name, profile in kin.items() if (curve := _fitted(profile, key)) is not None}
    alike = {name: curve for name, curve in fitted.items() if distance(device, records[name]) <= FARTHEST}
    return fitted if alike and family in EXPONENTS and dtype in ALIKE else alike


def beside_sixteen_bits(
    curve: Curve, device: Device, own: Curve, donors: Iterable[tuple[Device, Curve, Curve]]
) -> Curve:
    r"""A transferred curve of products that gains no more over 16 bits than it does on its donors.

    $$u' = \min\left(u,\; u_{16} \operatorname{median}_d \frac{v_d}{v_{d,16}}\right)$$

    where $u$ is the share of the peak that a large product reaches on the device
    (:func:`steptime_lab.calibrate.transfer.large_share`), $v_d$ the share on a donor, and the index 16 marks the
    measured shares of 16 bits. What keeps a device from its peak, power above all, does so in every dtype.

    Args:
        curve: of the dtype that nobody measured on `device`.
        device: whose curve it is.
        own: its curve of 16 bits.
        donors: device, curve of the dtype, curve of 16 bits.

    Source: choice of this program. Where a dtype of a measured device is left out, the mean error of products falls
    from 15 to 13 %; without the minimum it is 15 %.
    """
    gains = [
        large_share(narrow.coefficients, other, narrow.dtype) / large_share(wide.coefficients, other, wide.dtype)
        for other, narrow, wide in donors
    ]
    share = large_share(own.coefficients, device, own.dtype) * statistics.median(gains)
    held = within_peak(curve.coefficients, device, curve.dtype, share)
    return replace(curve, coefficients=in_six_digits(held))
