"""Fitted time models in place of the roofline, for the operators and devices that have been measured.

A row of an operator becomes calls of a model of :mod:`steptime.cost`; a profile of the catalogue gives the model's
coefficients. Operators without a curve keep the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from steptime.cost.attention_time import tiled_attention_s
from steptime.cost.gemm import gemm_s
from steptime.estimate.operators import Formula
from steptime.hardware.profile import Curve, Profile
from steptime.hardware.profiles import load_profile
from steptime.hardware.records import Device
from steptime.num import Num
from steptime.plan.job import Precision

GEMM, ATTENTION = Formula(gemm_s), Formula(tiled_attention_s)
OPERAND_BYTES = {"fp8": (1.0, 1.0, 2.0), "bf16": (2.0, 2.0, 2.0), "fp16": (2.0, 2.0, 2.0),
                 "tf32": (4.0, 4.0, 4.0), "fp32": (4.0, 4.0, 4.0)}  # fmt: skip
"""Bytes per element of both operands and of the result of a product."""
FEW_UNITS, SPREAD_UNITS = 10, 64
"""Devices with fewer units than this have no multiprocessors: their work spreads as over so many."""
BACKWARD_PAIRS, BACKWARD_TRAFFIC = 2.5, 2.0
"""Work and traffic of attention backward against forward, where only the forward has been measured."""

#: A rate of a machine -> arguments of the models that it stands for.
RATES = {
    "matrix_flops_per_s": ("peak_flops_per_s",), "attention_flops_per_s": ("matrix_flops_per_s",),
    "vector_flops_per_s": ("vector_flops_per_s",), "memory_Bps": ("memory_Bps",),
    "kernel_latency_s": ("latency_s", "launch_s", "split_s"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """A formula with everything put in but the shape."""

    formula: Formula
    fixed: Mapping[str, float]
    """Datasheet numbers of the device and fitted coefficients."""
    curve: Curve

    def seconds(self, shape: Mapping[str, Num]) -> Num:
        """Time of one call."""
        return self.formula({**self.fixed, **shape})

    def faster(self, factors: Mapping[str, float]) -> KernelModel:
        """The same model on a device whose rates are multiplied."""
        fixed = dict(self.fixed)
        for rate, factor in factors.items():
            for name in RATES.get(rate, ()):
                if name in fixed:
                    fixed[name] *= factor
        return replace(self, fixed=fixed)


Models = Mapping[str, KernelModel]


@lru_cache(maxsize=64)
def _profile(device: str) -> Profile | None:
    return load_profile(device)


def models_of(device: Device, precision: Precision) -> dict[str, KernelModel]:
    """Models by operator: ``matmul``, ``attention``, ``attention_backward``; empty for a device without a profile."""
    profile = _profile(device.name)
    if profile is None:
        return {}
    out = {}
    gemm = _curve(profile, "gemm", precision.matrix_dtype)
    if gemm is not None and precision.matrix_dtype in device.matrix_flops_per_s:
        out["matmul"] = KernelModel(formula=GEMM, fixed=_gemm_numbers(device, precision, gemm), curve=gemm)
    forward = _curve(profile, "attention_fwd", precision.attention_dtype)
    if forward is not None:
        numbers = _attention_numbers(device, precision)
        out["attention"] = KernelModel(formula=ATTENTION, fixed={**numbers, **forward.coefficients}, curve=forward)
        backward = _curve(profile, "attention_bwd", precision.attention_dtype) or forward
        fixed = {**numbers, **backward.coefficients}
        out["attention_backward"] = KernelModel(formula=ATTENTION, fixed=fixed, curve=backward)
    return out


def _curve(profile: Profile, family: str, dtype: str) -> Curve | None:
    """The curve of the dtype; the two 16-bit formats stand for each other."""
    alike = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
    return profile.curve(family, dtype) or profile.curve(family, alike)


def _gemm_numbers(device: Device, precision: Precision, curve: Curve) -> dict[str, float]:
    units = device.sm_count or 0
    a_bytes, b_bytes, out_bytes = OPERAND_BYTES[precision.matrix_dtype]
    return {
        "batch": 1.0, "a_bytes": a_bytes, "b_bytes": b_bytes, "out_bytes": out_bytes,
        "peak_flops_per_s": device.matrix_flops_per_s[precision.matrix_dtype], "memory_Bps": device.memory_Bps,
        "sm_count": float(units if units >= FEW_UNITS else SPREAD_UNITS), "l2_bytes": 0.0, **curve.coefficients,
    }  # fmt: skip


def _attention_numbers(device: Device, precision: Precision) -> dict[str, float]:
    matrix, vector = device.matrix_flops_per_s, device.vector_flops_per_s
    dtype = precision.attention_dtype
    return {
        "matrix_flops_per_s": matrix.get(dtype, max(matrix.values())),
        "vector_flops_per_s": vector.get("fp32", max(vector.values())), "memory_Bps": device.memory_Bps,
        "sm_count": float(device.sm_count or 1),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Calls of a model that one row makes in one phase."""

    model: KernelModel
    shapes: tuple[Mapping[str, Num], ...]
    times: Num = 1.0
    """How often each call is made."""

    @property
    def seconds(self) -> Num:
        """Time of all calls."""
        total: Num = 0.0
        for shape in self.shapes:
            total = total + self.model.seconds(shape)
        return total * self.times


def timed(models: Models, operator: str, shape: Mapping[str, Num], *, backward: bool) -> Timed | None:
    """The model calls of a row, or None where the roofline has to do."""
    if operator in ("matmul", "blocked_matmul") and "matmul" in models:
        m, n, k = shape["m"], shape["n"], shape["k"]
        panels = shape["output_passes"] if operator == "blocked_matmul" else 1.0
        forward = ({"m": m, "n": n, "k": k / panels},)
        gradients = ({"m": m, "n": k / panels, "k": n}, {"m": k / panels, "n": n, "k": m})
        return Timed(model=models["matmul"], shapes=gradients if backward else forward, times=panels)
    name = "attention_backward" if backward else "attention"
    if operator == "fused_attention" and name in models and "queries" in shape:
        work, traffic = (BACKWARD_PAIRS, BACKWARD_TRAFFIC) if backward else (1.0, 1.0)
        q, element = shape["head_dim"], shape["element_bytes"]
        moved = 2 * (shape["rows"] + shape["kv_rows"]) * q * element * traffic
        call = {name: shape[name] for name in ("batch", "heads", "kv_heads", "queries", "causal", "window")}
        call |= {"keys": shape["seen_keys"], "pair_flops": 4 * q * work, "moved_bytes": moved}
        return Timed(model=models[name], shapes=(call,))
    return None
