"""Fitted time models under efficiencies and a kernel latency that the user gives in place of the catalogue's.

A fitted curve belongs to the device of the catalogue. A given efficiency speeds up or slows down its unit, and a given
latency shifts the latency of each kernel, as in :mod:`steptime.cost.roofline`. Peak rates and bandwidths need no
adjustment: they are arguments of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from steptime.cost.gemm import share_of_peak
from steptime.cost.roofline import stated_latency_s, stated_share_factor
from steptime.estimate.kernels import RATES, KernelModel
from steptime.hardware.records import Device

#: Efficiency of a device -> rates of a machine that are proportional to it.
SHARES: Final[Mapping[str, tuple[str, ...]]] = {
    "matrix_efficiency": ("matrix_flops_per_s", "attention_flops_per_s"),
    "vector_efficiency": ("vector_flops_per_s",),
    "memory_efficiency": ("memory_Bps",),
}
LATENCIES: Final = ("latency_s", "launch_s")
"""Arguments of the models for the latency of a kernel."""
LARGE: Final = (8192.0, 16384.0)
"""Edges of two square products, of which one reaches the largest share of the peak: full tiles and waves favour the
larger one, a clock that falls under load the smaller one."""


def as_measured(device: Device) -> Device:
    """The device with the kernel latency of the catalogue, to which its fitted curves belong."""
    return replace(device, kernel_latency_s=device.catalogue.get("kernel_latency_s", device.kernel_latency_s))


def restated(device: Device, models: Mapping[str, KernelModel]) -> dict[str, KernelModel]:
    """Models made for :func:`as_measured`, adjusted to the numbers that a file gives for the device."""
    known = {n: value for n, value in device.catalogue.items() if n in SHARES or n == "kernel_latency_s"}
    changed = {n: value for n, value in known.items() if getattr(device, n) != value}
    if not changed or device.curves is not None:
        return dict(models)
    return {name: _restated(device, model, changed) for name, model in models.items()}


def _restated(device: Device, model: KernelModel, known: Mapping[str, float]) -> KernelModel:
    factors: dict[str, float] = {}
    texts: list[str] = []
    fixed = dict(model.fixed)
    for name, value in known.items():
        stated = getattr(device, name)
        used = [r for r in SHARES.get(name, ()) if any(a in fixed for a in RATES[r])]
        late = [n for n in LATENCIES if n in fixed] if name == "kernel_latency_s" else []
        factors |= dict.fromkeys(
            used, stated_share_factor(stated, value, _reached(model, name, value)) if used else 1.0
        )
        fixed |= {n: stated_latency_s(fixed[n], stated, value) for n in late}
        if used or late:
            texts.append(f"{name} {stated:g} for {value:g}")
    text = f"with the stated {', '.join(texts)}" if texts else ""
    return replace(model, fixed=fixed, stated=text).faster(factors)


def _reached(model: KernelModel, name: str, known: float) -> float:
    """Largest share of a datasheet rate that a model reaches; ``known`` if it does not depend on the rate."""
    fixed = model.fixed
    if name == "matrix_efficiency" and "peak_flops_per_s" in fixed:
        times_s = {n: model.seconds({"m": n, "n": n, "k": n, "residual": 0.0}) for n in LARGE}
        return max(float(share_of_peak(n, t, fixed["peak_flops_per_s"])) for n, t in times_s.items())
    own = "memory_efficiency" in fixed or "matrix_flops_per_s" in fixed
    coefficient = "efficiency" if (name == "matrix_efficiency") == own else name
    return known if name == "vector_efficiency" else fixed.get(coefficient, known)
