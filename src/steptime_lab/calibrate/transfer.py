"""Curves for devices without measurements, from the curves of the most similar measured devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from steptime.cost.gemm import LARGE, held_efficiency, share_of_peak
from steptime.errors import UserError
from steptime.estimate.kernels import FEW_UNITS, OPERAND_BYTES, most_rows
from steptime.hardware.profiles import distance
from steptime.hardware.records import Curve, Device
from steptime.num import Num, weighted_quantiles
from steptime_lab.calibrate.family import KernelFamily, in_six_digits
from steptime_lab.calibrate.gemm import COEFFICIENTS, FAMILY, STRIDE, gemm_device

#: Operations per clock of a multiprocessor with 128 lanes that multiply and add; those with half of them come next.
LANES_FLOPS: Final = (256.0, 128.0)
#: Clock below which a multiprocessor has fewer lanes than assumed (Hz).
LEAST_CLOCK_HZ: Final = 1e9
#: Family -> coefficient -> trait -> exponent with which the coefficient scales with the trait (see :func:`carried`).
#: Where a timer is named before the trait, only curves of that timer scale: a launch from the host does not depend on
#: the clock of the device.
#:
#: Latencies inside the chip are a number of clocks, and newer chips, which have more bandwidth, need fewer. Wider
#: matrix units take more of $k$ at a time. The last-level cache serves each multiprocessor a number of bytes per
#: clock, so that its byte costs the more of one from memory the faster the memory is. Parts with many operations
#: per joule on their datasheet lower their clock under load, and the more so the more energy their process needs for
#: one: power grows about as the cube of the clock.
EXPONENTS: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "gemm": {
        "latency_s": {"kernel clock": -1.0, "bandwidth": -0.15},
        "step_s": {"clock": -1.0, "width": -0.5},
        "cached_cost": {"drain": 1.0},
        "compute_efficiency": {"per_watt": -0.2, "process": -0.3},
    }
}
#: Architecture to the power that its process needs against 16 nm, at the same speed: 28 nm, 16 and 14, 12, Samsung's
#: 8LPP, N7, N5 and N3. N6 counts as N7, 4N and 4NP as N5, 14 nm of Samsung and GlobalFoundries as TSMC's 16FF+, and 12
#: nm as 12FFC; `vega` is Vega 10.
#:
#: Source: the makers on each process against the one before it. TSMC: 16FF+ 70 % less than 28HPM, 12FFC 25 %
#: less than 16FFC, N7 60 % less than 16FF+, N5 30 % less than N7, N3 30 % less than N5; Samsung: 10LPE 40 % less than
#: 14LPE, 10LPP 15 % less than that, 8LPP 10 % less than that, 14LPP 15 % less than 14LPE.
PROCESS_POWER: Final = {
    "maxwell": 3.3, "pascal": 1.0, "pascal-gp102": 1.0, "vega": 1.0, "volta": 0.75, "turing": 0.75,
    "ampere-rtx": 0.54, "ampere": 0.4, "cdna1": 0.4, "cdna2": 0.4, "ada": 0.28, "hopper": 0.28, "blackwell": 0.28,
    "blackwell-rtx": 0.28, "cdna3": 0.28, "cdna4": 0.2,
}  # fmt: skip
#: Dtypes whose products do not run on the units of 16 bits.
WIDE: Final = frozenset(["fp32", "fp64"])
_BOUNDS: Final = {"gemm": {c.name: (c.low, c.high) for c in (*COEFFICIENTS, STRIDE)}}


def carried(curve: Curve, source: Device, target: Device) -> dict[str, float]:
    r"""Coefficients of `source`, scaled to `target` by the traits of the datasheets.

    $$c' = c \prod_i \left(\frac{x_i'}{x_i}\right)^{e_i}$$

    where $x_i$ are the traits of :func:`traits` and $e_i$ their :data:`EXPONENTS`; a trait that one of the devices
    lacks is left out. The result is held within the bounds of the fit. Families without exponents carry over as
    they are.

    Source: :data:`EXPONENTS` gives the physics; the values were chosen by leaving architectures out
    (benchmarks/gemm.md).
    """
    exponents = EXPONENTS.get(curve.family)
    if exponents is None:
        return dict(curve.coefficients)
    here, there = traits(source, curve.dtype), traits(target, curve.dtype)
    out = {}
    for name, value in curve.coefficients.items():
        low, high = _BOUNDS[curve.family].get(name, (-math.inf, math.inf))
        for key, exponent in exponents.get(name, {}).items():
            trait = key.removeprefix(f"{curve.timer} ")
            if trait in here and trait in there:
                value *= (there[trait] / here[trait]) ** exponent
        out[name] = min(max(value, low), high)
    return out


def large_share(values: Mapping[str, float], device: Device, dtype: str) -> float:
    """Share of the datasheet's peak that a large product reaches.

    :func:`steptime.cost.gemm.share_of_peak` of the modelled time (s), without casts, of one with 16384 rows, columns
    and terms of a sum.

    Raises:
        UserError: the device has no peak for the dtype.

    Source: definition of an efficiency.
    """
    numbers = gemm_device(device, dtype)
    sizes = dict(zip(("a_bytes", "b_bytes", "out_bytes"), OPERAND_BYTES[dtype], strict=True))
    shape = {"m": LARGE, "n": LARGE, "k": LARGE, "batch": 1.0, **sizes}
    seconds = float(FAMILY.predict(shape, numbers, {**values, "quantise_s": 0.0}))
    return float(share_of_peak(LARGE, seconds, numbers["peak_flops_per_s"]))


def within_peak(values: Mapping[str, float], device: Device, dtype: str, share: float = 1.0) -> dict[str, float]:
    """Coefficients of products under which a large one reaches at most a share of the peak of a device.

    Where it would reach more (:func:`large_share`), the share of the peak inside a tile is lowered until it does not.
    A part whose matrix units were slowed down, but neither its clock nor its memory, loses less around the products
    than those that it descends from.

    A device without a peak for the dtype keeps the values.

    Source: definition of a peak.
    """
    out = dict(values)
    if _peak(device, dtype) is None:
        return out
    out["compute_efficiency"] = held_efficiency(
        out["compute_efficiency"],
        lambda inside: large_share({**out, "compute_efficiency": inside}, device, dtype),
        share,
    )
    return out


def traits(device: Device, dtype: str) -> dict[str, float]:
    """Traits of a chip that follow from its datasheet.

    ``clock`` (Hz); ``bandwidth`` of the memory (bytes/s); ``drain``, bytes of memory traffic per clock and
    multiprocessor; ``width``, operations per clock of the matrix unit of one multiprocessor; ``per_watt``, peak
    operations per joule; ``process``, the power that the process needs (:data:`PROCESS_POWER`), of dtypes
    on matrix units: single precision draws too little to bring most cards to their limit. Traits that the datasheet
    does not give are missing.
    """
    clock, units, peak = clock_Hz(device), device.sm_count, _peak(device, dtype)
    out = {"bandwidth": device.memory_Bps}
    if clock and units:
        out |= {"clock": clock, "drain": device.memory_Bps / (units * clock)}
    if peak and device.power_W:
        out["per_watt"] = peak / device.power_W
    if dtype not in WIDE and device.architecture in PROCESS_POWER:
        out["process"] = PROCESS_POWER[device.architecture]
    if peak and clock and units:
        out["width"] = peak / (units * clock)
    return out


def _peak(device: Device, dtype: str) -> float | None:
    try:
        return gemm_device(device, dtype)["peak_flops_per_s"]
    except UserError:
        return None


def clock_Hz(device: Device) -> float | None:
    """Boost clock (Hz); where the datasheet has none, the clock at which the vector units reach their peak.

    None for devices without multiprocessors.

    Source: 128 or 64 lanes per multiprocessor, NVIDIA architecture white papers; AMD CDNA white papers.
    """
    rate, units = device.vector_flops_per_s.get("fp32"), device.sm_count or 0
    if units < FEW_UNITS:
        return None
    if device.clock_Hz or not rate:
        return device.clock_Hz
    clocks = [rate / units / flops for flops in LANES_FLOPS]
    return next((clock for clock in clocks if clock >= LEAST_CLOCK_HZ), clocks[-1])


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value in the middle of the weight, linear between the middles of neighbouring weights.

    >>> weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]), weighted_median([1.0, 3.0], [1.0, 1.0])
    (2.0, 2.0)
    """
    return float(weighted_quantiles(values, weights, 0.5))


#: Most devices whose curves count; and the same for families that scale with the datasheet.
NEIGHBOURS: Final = 5
SCALED_NEIGHBOURS: Final = 7
#: Distance over which the weight of a device falls by e.
REACH: Final = 1.0
#: Distance below which devices hardly differ, for families that scale with the datasheet.
CLOSE: Final = 0.05
#: Distance up to which devices are one chip with the same memory, clock and power: only their links differ.
SAME: Final = 1e-3
#: Log of a ratio of two rates up to which datasheets may differ by rounding.
ROUNDED: Final = 0.05
#: Shapes from which the coefficients of a device count in full.
ENOUGH_SHAPES: Final = 500
#: Family -> coefficients that depend on the kernels of a library, which are the same for all cards of an architecture:
#: cards of the device's own architecture decide; without one, each architecture has one vote.
OF_THE_LIBRARY: Final[Mapping[str, tuple[str, ...]]] = {"gemm": ("batched_tile",)}
#: Families whose kernels are written for one architecture each: where one is measured, no other counts.
OF_ONE_ARCHITECTURE: Final = frozenset(["attention_fwd", "attention_bwd"])
#: Log error (standard deviation) that a transfer adds; and that of families that scale with the datasheet.
TRANSFER_ERROR: Final = 0.2
SCALED_ERROR: Final = 0.15
#: Dtype of products -> 5th and 95th percentile of the log of measured over transferred time, pooled over architectures
#: that were left out, each with the same weight, and at least the usual error (benchmarks/gemm.md).
TRANSFER_BANDS: Final = {
    "fp32": (-0.25, 0.82), "tf32": (-0.25, 0.36), "fp16": (-0.25, 0.25), "bf16": (-0.25, 0.25), "fp8": (-0.33, 0.62),
}  # fmt: skip
#: The same for products of all others, which have kernels of their own for conversions and scales.
NARROW_BAND: Final = TRANSFER_BANDS["fp8"]
#: Dtype of products -> 5th and 95th percentile of the log of measured over modelled time where the curve was fitted to
#: another implementation than was measured, pooled over devices and implementations; with each device left out in turn
#: they cover 72 to 100 % of its rows in fp4 and 79 to 100 % in fp8 (benchmarks/narrow.md).
OTHER_IMPLEMENTATION: Final = {"fp4": (-0.40, 0.59), "fp8": (-0.70, 0.78)}
#: Factor on this where no device of the same vendor has a curve.
OTHER_VENDOR: Final = 3.0
#: Standard deviations of a 90 % band.
Z90: Final = 1.645
#: Dtypes that a device has if its datasheet gives a rate; curves of other kinds carry over to any device.
DTYPES: Final = frozenset(["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"])
#: Distance between matrix units that fetch their operands themselves and those that wait for registers.
OTHER_INSTRUCTIONS: Final = 1.0
#: Log error that each factor of e outside the measured range adds.
EXTRAPOLATION_ERROR: Final = 0.1


def blended(curves: Sequence[Curve], weights: Sequence[float], *, median: bool = False) -> dict[str, float]:
    """Averaged coefficients: weighted geometric means, or weighted medians.

    Medians tolerate a device whose coefficients are far off, like the throttled clock of a card with a low power limit.
    Coefficients that begin with ``residual_`` are left out: the residual of a model on one device says little about
    another (benchmarks/gemm.md).

    >>> one = Curve(family="gemm", dtype="bf16", coefficients={"a": 1.0}, points=1, median_ape=0, mean_ape=0,
    ...     bias=0, band=(1, 1), source="")
    >>> two = replace(one, coefficients={"a": 4.0})
    >>> blended([one, two], [1.0, 1.0])
    {'a': 2.0}
    """
    shared = [n for n in curves[0].coefficients if all(n in c.coefficients for c in curves)]
    middle = weighted_median if median else _mean
    return {
        name: math.exp(middle([math.log(c.coefficients[name]) for c in curves], weights))
        for name in shared
        if not name.startswith("residual_")
    }


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * v for v, w in zip(values, weights, strict=True)) / sum(weights)


def transferred_curve(device: Device, curves: Mapping[str, Curve], devices: Mapping[str, Device]) -> Curve:
    r"""A curve for `device` from those of other devices.

    Families that scale with the datasheet (:func:`steptime_lab.calibrate.transfer.carried`) take medians with weights
    $s / (0.05 + d)$, others geometric means with weights $s\,e^{-d}$, where $d$ is the distance of the devices
    (:func:`steptime.hardware.profiles.distance`, and 1 more for products between matrix units that fetch their
    operands themselves and those that do not) and $s$ the share of 500 shapes that were measured, at most 1. Where a
    coefficient says which kernels a library has, only devices of the same architecture count, or, if there are none,
    the weights of every architecture are divided by its devices. Where a device is measured that is the same but for
    its links (a distance of 0), no other counts. Kernels of :data:`OF_ONE_ARCHITECTURE` come from devices of the same
    architecture alone, if there are any.

    Args:
        device: the device without measurements.
        curves: device name to its curve, all of one family, dtype and timer.
        devices: the records of these devices.

    Raises:
        UserError: there is no curve.
    """
    scaled = any(curve.family in EXPONENTS for curve in curves.values())
    weights = {name: _weight(device, devices[name], c, scaled) for name, c in curves.items() if name != device.name}
    if any(curve.family in OF_ONE_ARCHITECTURE for curve in curves.values()):
        weights = _own_architecture(device, weights, devices) or weights
    order = sorted(weights, key=lambda name: (-weights[name], name))[: SCALED_NEIGHBOURS if scaled else NEIGHBOURS]
    if not order:
        raise UserError(f"{device.name}: no curve of another device to transfer")
    if same := [name for name in order if distance(device, devices[name]) <= SAME]:
        return replace(curves[same[0]], bias=0.0, points=0, source=f"transferred from {same[0]}", kind="assumed")
    best, error = curves[order[0]], SCALED_ERROR if scaled else TRANSFER_ERROR
    near = {name: replace(curves[name], coefficients=carried(curves[name], devices[name], device)) for name in order}
    middle = blended(list(near.values()), [weights[name] for name in order], median=scaled)
    if library := OF_THE_LIBRARY.get(best.family, ()):
        votes = _votes(device, {name: weights[name] for name in order}, devices)
        voted = blended([near[name] for name in votes], list(votes.values()), median=scaled)
        middle |= {name: voted[name] for name in library if name in middle}
    middle = within_peak(middle, device, best.dtype) if best.family == FAMILY.name else middle
    related = any(devices[name].vendor == device.vendor for name in order)
    return replace(
        best,
        coefficients=in_six_digits(middle),
        band=_band(best, 1.0 if related else OTHER_VENDOR),
        median_ape=round(math.hypot(best.median_ape, 0.67 * error), 5),
        mean_ape=round(math.hypot(best.mean_ape, 0.8 * error), 5),
        bias=0.0,
        points=0,
        source=f"transferred from {', '.join(order)}",
        kind="assumed",
    )


def _weight(device: Device, other: Device, curve: Curve, scaled: bool) -> float:
    """Weight of the curve of another device: it falls with distance, and for few measurements."""
    away = distance(device, other) + unlike_units(device, other, curve.dtype)
    known = device.architecture is not None and other.architecture is not None
    if known and curve.family == FAMILY.name and curve.dtype not in WIDE:
        away += OTHER_INSTRUCTIONS * (device.fetches_operands != other.fetches_operands)
    share = min(max(curve.points, 1) / ENOUGH_SHAPES, 1.0)
    return share / (CLOSE + away) if scaled else share * math.exp(-away / REACH)


def unlike_units(device: Device, other: Device, dtype: str) -> float:
    """Log of the ratio between two datasheets of the gain of a dtype over 16 bits: a measure of unlike units.

    0 for wide dtypes, whose products do not run on the units of 16 bits.
    """
    if dtype in WIDE:
        return 0.0
    gains = [
        rates[dtype] / wide
        for rates in (device.matrix_flops_per_s, other.matrix_flops_per_s)
        if dtype in rates and (wide := rates.get("bf16", rates.get("fp16")))
    ]
    apart = abs(math.log(gains[0] / gains[1])) if len(gains) == len((device, other)) else 0.0
    return apart if apart > ROUNDED else 0.0


def architecture(device: Device) -> str:
    """Architecture of a device; its own name where it declares none."""
    return device.architecture or device.name


def _own_architecture(device: Device, weights: Mapping[str, float], devices: Mapping[str, Device]) -> dict[str, float]:
    """The weights of devices of the same architecture."""
    return {name: w for name, w in weights.items() if architecture(devices[name]) == device.architecture}


def _votes(device: Device, weights: Mapping[str, float], devices: Mapping[str, Device]) -> dict[str, float]:
    """Weights of devices of the same architecture; without one, of all devices, with one vote per architecture."""
    if own := _own_architecture(device, weights, devices):
        return own
    kinds = {name: architecture(devices[name]) for name in weights}
    return {name: weight / list(kinds.values()).count(kinds[name]) for name, weight in weights.items()}


def _band(best: Curve, factor: float) -> tuple[float, float]:
    """90 % band of a transferred curve, never narrower than that of its nearest donor."""
    if best.family != FAMILY.name:
        return widened(best.band, TRANSFER_ERROR)
    pooled = TRANSFER_BANDS.get(best.dtype, NARROW_BAND)
    low, high = (round(math.exp(factor * log), 5) for log in pooled)
    return min(low, best.band[0]), max(high, best.band[1])


def of_others(curve: Curve) -> tuple[float, float]:
    """90 % band of a curve of products for implementations that it was not fitted to; of other curves their own band.

    >>> from steptime.hardware.profiles import load_profile
    >>> of_others(load_profile("h100-sxm").curve("gemm", "fp8"))[1] > 2
    True
    """
    if curve.family != FAMILY.name or curve.dtype not in OTHER_IMPLEMENTATION:
        return curve.band
    low, high = (math.exp(log) for log in OTHER_IMPLEMENTATION[curve.dtype])
    return min(low, curve.band[0]), max(high, curve.band[1])


def widened(band: tuple[float, float], log_error: float) -> tuple[float, float]:
    r"""A 90 % band with one more independent log-normal error.

    $$\ln h' = \sqrt{(\ln h)^2 + (1.645\, s)^2}$$

    and the same for the lower end.

    >>> low, high = widened((1.0, 1.0), 0.1)
    >>> round(low * high, 6), round(high, 4)
    (1.0, 1.1788)
    """
    extra = Z90 * log_error
    low, high = max(-math.log(band[0]), 0.0), max(math.log(band[1]), 0.0)
    return round(math.exp(-math.hypot(low, extra)), 5), round(math.exp(math.hypot(high, extra)), 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Times of one kernel or of an array of them."""

    seconds: Num
    low_s: Num
    """5th percentile."""
    high_s: Num
    """95th percentile."""


def predict(family: KernelFamily, curve: Curve, device: Device, shape: Mapping[str, Num]) -> Prediction:
    """Time of a kernel and its 90 % band.

    Outside the shapes that the curve was fitted to the band is wider: each factor of e beyond the range adds
    10 % of log error, and several dims add up.

    Args:
        family: the model that the curve belongs to.
        curve: measured or transferred coefficients.
        device: the device that it runs on.
        shape: shape arguments of the model.
    """
    numbers = dict(family.device(device, curve.dtype))
    if "most_rows" in numbers:
        numbers["most_rows"] = most_rows(curve)
    seconds = family.predict(shape, numbers, curve.coefficients)
    extra = Z90 * EXTRAPOLATION_ERROR * outside(curve, shape)
    low, high = max(-math.log(curve.band[0]), 0.0), max(math.log(curve.band[1]), 0.0)
    return Prediction(
        seconds=seconds, low_s=seconds * np.exp(-np.hypot(low, extra)), high_s=seconds * np.exp(np.hypot(high, extra))
    )


def outside(curve: Curve, shape: Mapping[str, Num]) -> Num:
    """Distance of a shape from those that the curve was fitted to: sum over dims of the log beyond the range."""
    total: Num = 0.0
    for name, value in shape.items():
        if name in curve.ranges and curve.ranges[name][0] > 0:
            low, high = curve.ranges[name]
            size = np.asarray(value, np.float64)
            total = total + np.maximum(np.maximum(np.log(low / size), np.log(size / high)), 0.0)
    return total
