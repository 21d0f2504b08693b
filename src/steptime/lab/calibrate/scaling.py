"""How coefficients of a time model change from one device to another, as far as the datasheets tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from steptime.cost.gemm import LARGE, held_efficiency, share_of_peak
from steptime.errors import UserError
from steptime.estimate.kernels import FEW_UNITS, OPERAND_BYTES
from steptime.hardware.records import Curve, Device
from steptime.lab.calibrate.gemm import COEFFICIENTS, FAMILY, STRIDE, gemm_device
from steptime.num import weighted_quantiles

#: Operations per clock of a multiprocessor with 128 lanes that multiply and add; those with half of them come next.
LANES_FLOPS: Final = (256.0, 128.0)
#: Clock below which a multiprocessor has fewer lanes than assumed (Hz).
LEAST_CLOCK_HZ: Final = 1e9
#: Family to coefficient to trait to the exponent with which the one follows the other (see :func:`carried`). Where a
#: timer is named before the trait, only curves of that timer follow it: a launch from the host does not know the
#: clock of the device.
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
#: Source: what the makers say of each process against the one before it. TSMC: 16FF+ 70 % less than 28HPM, 12FFC 25 %
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
    r"""Coefficients of `source`, as the datasheets say that they would be on `target`.

    $$c' = c \prod_i \left(\frac{x_i'}{x_i}\right)^{e_i}$$

    where $x_i$ are the traits of :func:`traits` and $e_i$ their :data:`EXPONENTS`; a trait that one of the devices
    lacks is left out. The result is held within the bounds of the fit. Families without exponents carry over as
    they are.

    Source: the physics is said at :data:`EXPONENTS`; the values were chosen by leaving architectures out
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
        lambda inside: large_share({**out, "compute_efficiency": inside}, device, dtype), share,
    )  # fmt: skip
    return out


def traits(device: Device, dtype: str) -> dict[str, float]:
    """What a datasheet says of the inside of a chip.

    ``clock`` (Hz); ``bandwidth`` of the memory (bytes/s); ``drain``, bytes of memory traffic per clock and
    multiprocessor; ``width``, operations per clock of the matrix unit of one multiprocessor; ``per_watt``, peak
    operations per joule; ``process``, the power that the process needs (:data:`PROCESS_POWER`), of dtypes
    on matrix units: single precision draws too little to bring most cards to their limit. Those that it does not say
    are missing.
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
    """Boost clock; where the datasheet does not say it, that at which the vector units reach their peak.

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
