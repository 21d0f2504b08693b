"""Machine of one device for one element type, with time models of operators that appear in no strategy table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from steptime.cost.convolution import channelwise_s, convolution_s, either_convolution_s
from steptime.cost.recurrent import recurrent_s
from steptime.errors import UserError
from steptime.estimate.kernels import DEPTHWISE, GEMM, KernelModel, gemm_numbers, profile_of
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.measured import CONVOLVED, own_curves_of
from steptime.estimate.operators import Formula
from steptime.estimate.stated_device import as_measured, restated
from steptime.hardware.library import load_device
from steptime.hardware.records import ALIKE, CUDA_MAKER, Cluster, Curve, Device, Level, Profile
from steptime.model.spec import ELEMENT_BYTES
from steptime.plan.job import PRECISIONS, Precision

#: Element type -> types whose rate stands for its own on a device that gives none, the best first.
INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    "bf16": ("fp32", "fp16"), "fp16": ("fp32", "bf16"), "tf32": ("fp32", "bf16", "fp16"),
    "fp32": ("tf32", "bf16", "fp16"), "fp64": ("fp32", "bf16"), "fp8_e5m2": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
}  # fmt: skip

CONVOLUTION, RECURRENT, CHANNELWISE = Formula(convolution_s), Formula(recurrent_s), Formula(channelwise_s)
EITHER: Final = Formula(either_convolution_s)
#: Operator -> formula, and curves that can time it, the best first.
CURVES: Final[Mapping[str, tuple[Formula, tuple[str, ...]]]] = {
    "conv_fwd": (CONVOLUTION, ("conv_fwd",)),
    "conv_bwd_data": (CONVOLUTION, ("conv_bwd_data", "conv_fwd")),
    "conv_bwd_weight": (CONVOLUTION, ("conv_bwd_weight", "conv_fwd")),
    "rnn_fwd": (RECURRENT, ("rnn_fwd",)),
    "rnn_bwd_data": (RECURRENT, ("rnn_bwd_data", "rnn_fwd")),
    "rnn_bwd_weight": (RECURRENT, ("rnn_bwd_weight", "rnn_fwd")),
}

#: A convolution of 32 images of 28 x 28 pixels, 256 channels in and out, three by three.
USUAL: Final[Mapping[str, float]] = {
    "rows": 32.0 * 28**2, "columns": 256.0, "depth": 9 * 256.0, "moved_bytes": 8 * 32.0 * 28**2 * 256,
    "tensor_bytes": 8 * 32.0 * 28**2 * 256, "winograd_taps": 1.0, "channelwise": 0.0,
}  # fmt: skip
SIXTEEN_BITS: Final = ("fp16", "bf16", "tf32")
#: Vendor and kind of unit -> device and element type whose convolution curves stand in on devices without curves.
SIMILAR: Final = {(CUDA_MAKER, "fp32"): ("v100-sxm2-16gb", "fp32"), (CUDA_MAKER, "matrix"): ("v100-sxm2-16gb", "fp16")}
SLOWER: Final = 1.8
"""Slowdown of convolutions against carried-over coefficients on multiprocessors that multiply more bytes of operands
per clock than those of the measured device, because they load no more; fitted to VGG-16 with 12 images on an A100
(twice the bytes of a V100), in TF32 and fp16, inference and training."""
AS_WIDE: Final = 1.25
"""Ratio of two widths up to which multiprocessors count as equally wide."""
CARRIED_BAND: Final = (0.5, 2.0)
"""Band of a curve on a device that it was not fitted to, as a factor; assumed."""


def rate_dtype(device: Device, dtype: str) -> str:
    """Element type at whose rate products of ``dtype`` run on a device.

    Raises:
        UserError: the device has no rate that could stand for it.
    """
    for candidate in (dtype, *INSTEAD.get(dtype, ())):
        if candidate in device.matrix_flops_per_s:
            return candidate
    known = ", ".join(device.matrix_flops_per_s)
    raise UserError(f"{device.name} has no matrix rate for {dtype}", hint=f"it has {known}")


def alone(device: Device) -> Cluster:
    """Cluster of a single device, without communication."""
    level = Level(name="alone", devices=1, link_Bps=1.0, efficiency=1.0, latency_s=0.0)
    return Cluster(name=device.name, title=device.title, device=device, levels=(level,), sources={})


def machine_for(device: Device, dtype: str, *, calibrated: bool) -> Machine:
    """One device with the rates and the fitted models of an element type."""
    precision = PRECISIONS[rate_dtype(device, dtype)]
    machine = machine_of(alone(device), 1, precision, lone_rank_has_all_links=True, calibrated=calibrated)
    return with_further_models(machine, device, precision) if calibrated else machine


def with_further_models(machine: Machine, device: Device, precision: Precision) -> Machine:
    """The machine with models of operators of no strategy table, and of products with only a host-timed curve."""
    return replace(machine, models={**_further_models(device, precision), **machine.models})


def with_usual_convolutions(machine: Machine, device: Device, precision: Precision) -> Machine:
    """The machine with convolutions in the element type of PyTorch's default (:func:`convolved_in`).

    Args:
        machine: result of :func:`with_further_models`.
        device: its device.
        precision: precision of its models.
    """
    if not _may_run_in_tf32(device, precision.matrix_dtype):
        return machine
    found = _further_models(device, PRECISIONS["tf32"])
    if _faster_in(found, machine.models) == "fp32":
        return machine
    return replace(machine, models={**machine.models, **{n: found[n] for n in (*CONVOLVED, DEPTHWISE) if n in found}})


def convolved_in(device: Device, dtype: str) -> str:
    """Element type in which convolutions run: PyTorch allows TF32 for those of fp32, and cuDNN takes the faster one.

    A convolution of a usual size (:data:`USUAL`) decides which one is faster.
    """
    if not _may_run_in_tf32(device, dtype):
        return dtype
    return _faster_in(*(_further_models(device, PRECISIONS[name]) for name in ("tf32", "fp32")))


def _may_run_in_tf32(device: Device, dtype: str) -> bool:
    return dtype == "fp32" and "tf32" in device.matrix_flops_per_s


def _faster_in(tf32: Mapping[str, KernelModel], fp32: Mapping[str, KernelModel]) -> str:
    """The type whose models give the usual convolution the shorter time; TF32 if a model is missing."""
    models = {"tf32": tf32.get("conv_fwd"), "fp32": fp32.get("conv_fwd")}
    times_s = {name: model.seconds(USUAL) for name, model in models.items() if model is not None}
    return "fp32" if len(times_s) == 2 and bool(times_s["fp32"] < times_s["tf32"]) else "tf32"


def _further_models(device: Device, precision: Precision) -> Mapping[str, KernelModel]:
    if device.curves is not None:
        own = own_curves_of(device.curves, precision)
        return {name: KernelModel(formula=f, fixed=c.coefficients, curve=c) for name, (f, c) in own.items()}
    profile = profile_of(device.measured_as)
    if profile is None:
        return {}
    known = as_measured(device)
    products = _host_timed_products(known, profile, precision)
    return restated(device, {**products, **further_models(known, profile, precision.matrix_dtype)})


def _host_timed_products(device: Device, profile: Profile, precision: Precision) -> dict[str, KernelModel]:
    """Models of products by host-timed curves (launch included), for devices without another curve."""
    curve = profile.curve("gemm", precision.matrix_dtype, "eager")
    if curve is None or precision.matrix_dtype not in device.matrix_flops_per_s:
        return {}
    fixed = gemm_numbers(device, precision, curve)
    fixed["latency_s"] = min(fixed["latency_s"], device.kernel_latency_s)
    return {"matmul": KernelModel(formula=GEMM, fixed=fixed, curve=curve)}


def further_models(device: Device, profile: Profile, dtype: str) -> dict[str, KernelModel]:
    """Models of operators of no strategy table: convolutions and recurrent layers.

    Their curves include the launch from the host, which a step issues ahead. A carried-over curve of a narrow type is
    combined with that of fp32 (:func:`steptime.cost.convolution.either_convolution_s`).
    """
    out = {}
    for operator, (formula, families) in CURVES.items():
        curve = _curve_of(device, profile, families, dtype)
        if curve is None:
            continue
        fixed = _fixed(device, curve, dtype)
        wide = _curve_of(device, profile, families, "fp32") if curve.points == 0 and dtype != "fp32" else None
        if wide is not None and formula is CONVOLUTION and "fp32" in device.matrix_flops_per_s:
            other = {**wide.coefficients, "flops_per_s": device.matrix_flops_per_s["fp32"]}
            other_launch_s = min(other.pop("launch_s"), fixed["launch_s"])
            formula, fixed = EITHER, {**fixed, "launch_s": other_launch_s, **{f"wide_{n}": other[n] for n in other}}
        out[operator] = KernelModel(formula=formula, fixed=fixed, curve=curve)
    if "conv_fwd" in out:
        out[DEPTHWISE] = _depthwise(device, dtype)
    return out


def _fixed(device: Device, curve: Curve, dtype: str) -> dict[str, float]:
    """Arguments of the formula of a curve, without the shape."""
    return {
        "matrix_flops_per_s": device.matrix_flops_per_s.get(dtype, 0.0),
        "memory_Bps": device.memory_Bps,
        "sm_count": float(device.sm_count or 1),
        **curve.coefficients,
        "launch_s": min(curve.coefficients["launch_s"], device.kernel_latency_s),
    }


def _curve_of(device: Device, profile: Profile, families: tuple[str, ...], dtype: str) -> Curve | None:
    """The best of the device's own curves, else a carried-over one."""
    found = (_curve(profile, family, dtype) for family in families)
    return next((c for c in found if c is not None), None) or _carried(device, families[0], dtype)


def _depthwise(device: Device, dtype: str) -> KernelModel:
    """Model of depthwise convolutions by the sustained rates of the device, as no curve was fitted to them."""
    fixed = {
        "vector_flops_per_s": device.peak_vector_flops_per_s * device.vector_efficiency,
        "memory_Bps": device.memory_Bps * device.memory_efficiency,
        "launch_s": device.kernel_latency_s,
    }
    curve = Curve(
        family=DEPTHWISE, dtype=dtype, coefficients={}, points=0, median_ape=0.0, mean_ape=0.0, bias=0.0,
        band=CARRIED_BAND, kind="assumed", source="assumed",
    )  # fmt: skip
    return KernelModel(formula=CHANNELWISE, fixed=fixed, curve=curve)


@cache
def _measured_device(name: str) -> Device:
    """A device of :data:`SIMILAR`, read once."""
    return load_device(name)


def _width(device: Device, dtype: str) -> float:
    """Bytes of operands that a multiprocessor multiplies per clock; infinite where the datasheet has no clock."""
    if not device.clock_Hz or not device.sm_count:
        return math.inf
    return device.matrix_flops_per_s.get(dtype, 0.0) * ELEMENT_BYTES[dtype] / (device.clock_Hz * device.sm_count)


def _carried(device: Device, family: str, dtype: str) -> Curve | None:
    """The curve of a similar device: its coefficients are shares of the rates of the device that uses them.

    Two of them change. Multiprocessors that are wider than the measured ones reach a smaller share of their peak
    (:data:`SLOWER`). Winograd's algorithm takes a device of another architecture to its peak at most, because it is
    not known which kernels its library has.
    """
    key = (device.vendor, "fp32" if dtype == "fp32" else "matrix")
    if key not in SIMILAR or (key[1] == "matrix" and dtype not in SIXTEEN_BITS):
        return None
    name, like = SIMILAR[key]
    profile, source = profile_of(name), _measured_device(name)
    curve = None if profile is None else profile.curve(family, like, "eager")
    if curve is None:
        return None
    low, high = curve.band
    coefficients = dict(curve.coefficients)
    if _width(device, dtype) > AS_WIDE * _width(source, like):
        coefficients["efficiency"] /= SLOWER
    if "winograd" in coefficients and device.architecture != source.architecture:
        coefficients["winograd"] = max(1.0, min(coefficients["winograd"], 1.0 / coefficients["efficiency"]))
    return replace(
        curve, coefficients=coefficients, points=0, kind="assumed", source=f"carried over from {name}", dtype=dtype,
        band=(min(low, CARRIED_BAND[0]), max(high, CARRIED_BAND[1])),
    )  # fmt: skip


def _curve(profile: Profile, family: str, dtype: str) -> Curve | None:
    """The first curve of a family in the dtype, or in the other 16-bit format; kernel times before host times."""
    alike = ALIKE.get(dtype, dtype)
    found = (profile.curve(family, name, timer) for name in (dtype, alike) for timer in ("kernel", "eager"))
    return next((curve for curve in found if curve is not None), None)
