"""Fitted time models in place of the roofline, for the operators and devices that have been measured.

A row of an operator becomes calls of a model of :mod:`steptime.cost`; a profile of the catalogue gives the model's
coefficients. Operators without a curve keep the roofline. Tables map each memory-bound operator to its curve and
shape, in the form of the measured rows. A curve timed with the host's launch is used without the launch: in a step the
host runs ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np

from steptime.cost.attention import (
    attention_backward_bytes,
    attention_backward_pair_flops,
    attention_pair_flops,
    tiled_attention_s,
)
from steptime.cost.gemm import LARGE, NAMES, gemm_residual, gemm_s, held_efficiency, residual_table, share_of_peak
from steptime.cost.matmul import LOOSE_BYTES, ODD_BYTES, off_boundary
from steptime.cost.memory_bound import memory_bound_s
from steptime.cost.quantisation import nvfp4_element_bytes
from steptime.estimate.measured import CONVOLVED, LOOPED, OWN, curves_of, measured_name, work_of
from steptime.estimate.operators import OPERATORS, Formula
from steptime.hardware.profiles import load_profile
from steptime.hardware.records import ALIKE, Curve, Device, Profile
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Array, Num, per_distinct, where
from steptime.plan.job import Precision
from steptime.terms import note

GEMM, ATTENTION = Formula(gemm_s), Formula(tiled_attention_s)
NVFP4_BYTES = nvfp4_element_bytes()
OPERAND_BYTES = {
    "fp4": (NVFP4_BYTES, NVFP4_BYTES, 2.0), "fp8": (1.0, 1.0, 2.0), "bf16": (2.0, 2.0, 2.0), "fp16": (2.0, 2.0, 2.0),
    "tf32": (4.0, 4.0, 4.0), "fp32": (4.0, 4.0, 4.0),
}  # fmt: skip
"""Bytes per element of both operands and of the result of a product."""
OTHER_PRODUCTS: Final = (
    "wide_matmul", "frozen_matmul", "frozen_wide_matmul", "grouped_matmul", "frozen_grouped_matmul",
)  # fmt: skip
"""Products other than plain and blocked ones: in the dtype of attention, of frozen weights, one per expert."""
RECURRENT: Final = ("rnn_fwd", "rnn_bwd_data", "rnn_bwd_weight")
"""Kernels of recurrent layers (:func:`called_once`)."""
NAMED: Final = frozenset((*OWN, *RECURRENT))
"""Kernels of captured modules whose model has the kernel's own name and takes its shape unchanged."""
DEPTHWISE: Final = "depthwise"
"""Model of convolutions with a single channel per group."""
FEW_UNITS, SPREAD_UNITS = 10, 64
"""Units below which a device has no multiprocessors, and the number over which its work then counts as spread."""

#: A rate of a machine -> arguments of the models that scale with it.
RATES = {
    "matrix_flops_per_s": (
        "peak_flops_per_s", "flops_per_s", "turned_flops_per_s", "loose_flops_per_s", "odd_flops_per_s",
    ),
    "attention_flops_per_s": ("matrix_flops_per_s", "wide_flops_per_s"),
    "vector_flops_per_s": ("vector_flops_per_s", "loops_per_s", "steps_per_s"),
    "memory_Bps": ("memory_Bps", "near_Bps", "far_Bps", "fresh_Bps", "rate_per_s", "turned_per_s"),
    "kernel_latency_s": ("latency_s", "launch_s", "split_s", "floor_s"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Residuals of a model of products by shape; equal by identity only, so that its values can be cached."""

    table: Array
    """Table of :func:`steptime.cost.gemm.residual_table`."""

    @per_distinct()
    def at(self, *, m: Num, n: Num, k: Num, batch: Num, sm_count: float) -> Num:
        """Logarithm of measured over modelled time of a product."""
        return gemm_residual(m, n, k, batch, sm_count, self.table)


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelModel:
    """A formula with all arguments bound but the shape; models with equal numbers are equal and share cached values."""

    formula: Formula
    fixed: Mapping[str, float]
    """Datasheet numbers of the device and fitted coefficients."""
    curve: Curve
    residual: Residual | None = None
    stated: str = ""
    """Phrase on given numbers that replace those of the device to which the curve belongs."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.formula.function, tuple(self.fixed.values())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, KernelModel)
            and self.formula.function is other.formula.function
            and self.fixed == other.fixed
        )

    def seconds(self, shape: Mapping[str, Num]) -> Num:
        """Time of one call."""
        return Timed(self, (shape,)).seconds

    @property
    def basis(self) -> str:
        """Basis of its times, for a report."""
        curve = self.curve
        how = f"{curve.kind} curve" if curve.points else f"curve {curve.source}:"
        error = f" (median error {100 * curve.median_ape:.1f} %)" if curve.median_ape else ""
        return f"{how} {curve.family} {curve.dtype}{error}{self.stated and f', {self.stated}'}"

    def faster(self, factors: Mapping[str, float]) -> KernelModel:
        """The same model on a device whose rates are multiplied."""
        fixed = dict(self.fixed)
        for rate, factor in factors.items():
            for name in RATES.get(rate, ()):
                if name in fixed:
                    fixed[name] *= factor
        return replace(self, fixed=fixed)


@per_distinct(follows=("residual",))
def _seconds(model: KernelModel, **shape: Num) -> Num:
    """Time of one call, cached because some formulas try many alternatives."""
    return model.formula.function(*model.formula.taken({**model.fixed, **shape}))


Models = Mapping[str, KernelModel]


@lru_cache(maxsize=64)
def profile_of(device: str) -> Profile | None:
    """The profile of a device of the catalogue, read once."""
    return load_profile(device)


def models_of(device: Device, precision: Precision) -> dict[str, KernelModel]:
    """Models by operator: ``matmul``, ``attention``, ``attention_backward``; empty for a device without a profile."""
    if device.curves is not None:
        found = curves_of(device.curves, precision)
        return {name: KernelModel(formula=f, fixed=c.coefficients, curve=c) for name, (f, c) in found.items()}
    profile = profile_of(device.measured_as)
    if profile is None:
        return {}
    out = {}
    gemm = _curve(profile, "gemm", precision.matrix_dtype)
    if gemm is not None and precision.matrix_dtype in device.matrix_flops_per_s:
        fixed, table = gemm_numbers(device, precision, gemm), residual_table(gemm.coefficients)
        residual = None if table is None else Residual(table)
        out["matmul"] = KernelModel(formula=GEMM, fixed=fixed, curve=gemm, residual=residual)
        if precision.wide_dtype != precision.matrix_dtype:
            unquantised = replace(precision, matrix_dtype=precision.wide_dtype, quantised_bytes=None)
            others = models_of(device, unquantised)
            out |= {"wide_matmul": others["matmul"]} if "matmul" in others else {}
    forward = _curve(profile, "attention_fwd", precision.attention_dtype)
    if forward is not None:
        numbers = _attention_numbers(device, precision)
        out["attention"] = KernelModel(formula=ATTENTION, fixed={**numbers, **forward.coefficients}, curve=forward)
        backward = _curve(profile, "attention_bwd", precision.attention_dtype) or forward
        fixed = {**numbers, **backward.coefficients}
        out["attention_backward"] = KernelModel(formula=ATTENTION, fixed=fixed, curve=backward)
    return out


#: Parameters of a framework -> the model of a product that they multiply, and the family of its curves.
OF_PRODUCTS: Mapping[str, tuple[str, str]] = {
    "matrix": ("matmul", "gemm"), "narrow": ("matmul", "gemm"), "attention": ("attention", "attention_fwd"),
}  # fmt: skip


def of_device(device: Device, models: Models) -> frozenset[str]:
    """Parameters of a framework that a device's own factors multiply, with the models of a precision.

    A device factor was fitted with the curves of the device, so that it does not apply to products in dtypes without a
    curve, which are timed by the datasheet. On a device without any curve it applies to all.
    """
    profile = profile_of(device.measured_as)
    fitted = set() if profile is None else {curve.family for curve in profile.curves if curve.timer == "kernel"}
    return frozenset(name for name, (model, family) in OF_PRODUCTS.items() if model in models or family not in fitted)


def _curve(profile: Profile, family: str, dtype: str) -> Curve | None:
    """The curve of the dtype; for the 16-bit formats, which run in the same units at one rate, the better of both.

    Two such curves differ in where and how they were measured, not in the format: the one fitted to more measurements
    stands for both, and among transferred ones that of bf16, in which most devices were measured.
    """
    alike = {**ALIKE, "fp4": "nvfp4"}.get(dtype, dtype)
    own, other = profile.curve(family, dtype), profile.curve(family, alike)
    if own is None or other is None or dtype not in ALIKE:
        return own or other
    return max(own, other, key=lambda curve: (curve.kind == "fitted", curve.points, curve.dtype == "bf16"))


def gemm_numbers(device: Device, precision: Precision, curve: Curve) -> dict[str, float]:
    """Arguments of :func:`gemm_s` on a device, without the shape: datasheet numbers and fitted coefficients."""
    units = device.sm_count or 0
    a_bytes, b_bytes, out_bytes = OPERAND_BYTES[precision.matrix_dtype]
    fitted = {name: value for name, value in curve.coefficients.items() if name not in NAMES}
    # The conversion that was measured is that of serving, a kernel of its own per row; training fuses its casts.
    fitted["quantise_s"] = 0.0
    dtype = precision.matrix_dtype
    peak = device.matrix_flops_per_s[dtype]
    numbers = {
        "batch": 1.0, "a_bytes": a_bytes, "b_bytes": b_bytes, "out_bytes": out_bytes,
        "peak_flops_per_s": peak, "memory_Bps": device.memory_Bps,
        "sm_count": float(units if units >= FEW_UNITS else SPREAD_UNITS), "l2_bytes": 0.0, "stride": 0.0,
        **fitted,
    }  # fmt: skip
    if peak < device.catalogue.get(f"matrix_flops_per_s.{dtype}", peak):
        numbers["compute_efficiency"] = _within_peak(numbers)
    if curve.kind == "assumed":
        cool = {**numbers, "throttle": 0.0}
        above = _large_share(cool)
        if above > 1.0:  # below the peak only where a long product throttles: short ones are held, long ones stay
            slowed = max((1.0 + numbers["throttle"]) / above - 1.0, 0.0)
            numbers |= {"compute_efficiency": _within_peak(cool), "throttle": slowed}
    return numbers


def _large_share(numbers: Mapping[str, float]) -> float:
    """Share of the peak that a large product reaches."""
    return float(
        share_of_peak(LARGE, gemm_s(LARGE, LARGE, LARGE, residual=0.0, **numbers), numbers["peak_flops_per_s"])
    )


def _within_peak(numbers: Mapping[str, float]) -> float:
    """Share of the peak inside a tile at which a large product just reaches the peak."""
    given = numbers["compute_efficiency"]
    return held_efficiency(given, lambda inside: _large_share({**numbers, "compute_efficiency": inside}), 1.0)


def _attention_numbers(device: Device, precision: Precision) -> dict[str, float]:
    matrix, dtype = device.matrix_flops_per_s, precision.attention_dtype
    return {
        "matrix_flops_per_s": matrix.get(dtype, max(matrix.values())),
        "vector_flops_per_s": device.peak_vector_flops_per_s, "memory_Bps": device.memory_Bps,
        "sm_count": float(device.sm_count or 1),
    }  # fmt: skip


class Timed(NamedTuple):
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
            seconds, formula = _seconds(self.model, **shape), self.model.formula
            given = dict(zip(formula.arguments, formula.taken({**self.model.fixed, **shape}), strict=True))
            note(formula.function, given, seconds, lambda: self.model.basis, calls=self.times)
            total = total + seconds
        return total * self.times


def winograd_saved_flops(call: Timed) -> float:
    """Operations that Winograd's algorithm saves in the convolutions of a call, in the faster of two types."""
    fixed, total = call.model.fixed, 0.0
    for shape in call.shapes:
        if not shape.get("winograd_taps") or "winograd" not in fixed:
            continue
        from steptime.cost.convolution import convolution_s  # language models have none

        wide = {n.removeprefix("wide_"): value for n, value in fixed.items() if n.startswith("wide_")}
        own = {**shape, **{n: value for n, value in fixed.items() if not n.startswith("wide_")}}
        other = own | wide | {"matrix_flops_per_s": wide.get("flops_per_s", own["matrix_flops_per_s"])}
        other.pop("flops_per_s", None)
        saved = min(own, other, key=lambda each: float(convolution_s(**each)))["winograd"]
        flops = 2 * shape["rows"] * shape["columns"] * shape["depth"]
        total += float(flops * (1 - 1 / saved) * call.times)
    return total


def product_shape(model: KernelModel, m: Num, n: Num, k: Num, turned: Num = 0.0, batch: Num = 1.0) -> dict[str, Num]:
    """Shape arguments of one product, or of a batch of equal ones; ``turned``: its left operand is transposed."""
    shape = {"m": m, "n": n, "k": k}
    if "turned" in model.formula.arguments:
        element_bytes = ELEMENT_BYTES[model.curve.dtype]
        dims = (m, n, k, turned, element_bytes)
        shape |= {"turned": turned, "loose": off_boundary(*dims, LOOSE_BYTES), "odd": off_boundary(*dims, ODD_BYTES)}
    if "batch" in model.formula.arguments and not (isinstance(batch, float) and batch == 1.0):
        shape["batch"] = batch
    if "residual" not in model.formula.arguments:
        return shape
    residual = model.residual
    shape["residual"] = (
        0.0 if residual is None else residual.at(m=m, n=n, k=k, batch=batch, sm_count=model.fixed["sm_count"])
    )
    return shape


def _grouped(model: KernelModel, shape: Mapping[str, Num], gradients: tuple[bool, bool]) -> Timed:
    """One product per expert as a batch of equal products; for a model without batches, one product of all rows."""
    groups = shape["groups"] if "batch" in model.formula.arguments else 1.0
    m, n, k = shape["m"] / groups, shape["n"], shape["k"]
    dims = _dimensions(m, n, k, gradients)
    return Timed(model=model, shapes=tuple([product_shape(model, *each, batch=groups) for each in dims]))


def _dimensions(
    m: Num, n: Num, k: Num, gradients: tuple[bool, bool], turned: Num = 0.0
) -> tuple[tuple[Num, Num, Num, Num], ...]:  # fmt: skip
    """Products of a phase: forward, or the gradient of the input and, unless they are frozen, of the weights.

    Each has its dims and a flag for a transposed left operand, which the gradient of weights has.
    """
    backward, frozen = gradients
    if not backward:
        return ((m, n, k, turned),)
    return ((m, k, n, 0.0),) if frozen else ((m, k, n, 0.0), (k, n, m, 1.0))


def _other_product(models: Models, operator: str, shape: Mapping[str, Num], backward: bool) -> Timed | None:
    if "matmul" not in models:
        return None
    frozen = operator.startswith("frozen")
    if "grouped" in operator:
        return _grouped(models["matmul"], shape, (backward, frozen))
    model = models.get(operator.removeprefix("frozen_"), models["matmul"])
    dims = _dimensions(shape["m"], shape["n"], shape["k"], (backward, frozen))
    return Timed(model=model, shapes=tuple([product_shape(model, *each) for each in dims]))


def _plain_product(models: Models, operator: str, shape: Mapping[str, Num], backward: bool) -> Timed | None:
    if "matmul" not in models:
        return None
    panels = shape["output_passes"] if operator == "blocked_matmul" else 1.0
    model = models["matmul"]
    dims = _dimensions(shape["m"], shape["n"], shape["k"] / panels, (backward, False), shape.get("turned", 0.0))
    return Timed(model=model, shapes=tuple([product_shape(model, *each) for each in dims]), times=panels)


def _attention(models: Models, operator: str, shape: Mapping[str, Num], backward: bool) -> Timed | None:
    name = "attention_backward" if backward else "attention"
    if name not in models or "queries" not in shape:
        return None
    q = shape["head_dim"]
    pair_flops = attention_backward_pair_flops(q, q) if backward else attention_pair_flops(q, q)
    moved = 2 * (shape["rows"] + shape["kv_rows"]) * q * shape["element_bytes"]
    moved = attention_backward_bytes(moved) if backward else moved
    call = {name: shape[name] for name in ("batch", "heads", "kv_heads", "queries", "causal", "window")}
    call |= {"keys": shape["seen_keys"], "pair_flops": pair_flops, "moved_bytes": moved}
    return Timed(model=models[name], shapes=(call,))


#: Operator -> the calls of fitted models that stand for it.
CALLS: Mapping[str, Callable[[Models, str, Mapping[str, Num], bool], Timed | None]] = {
    **dict.fromkeys(OTHER_PRODUCTS, _other_product),
    **dict.fromkeys(("matmul", "blocked_matmul"), _plain_product),
    "fused_attention": _attention,
}


def timed(
    models: Models, operator: str, shape: Mapping[str, Num], work: Mapping[str, Num], *, backward: bool
) -> Timed | None:
    """Model calls of a row; None if it has no fitted model and the roofline applies.

    ``work``: ``matrix_flops``, ``vector_flops`` and ``moved_bytes`` of the row.
    """
    if operator in NAMED and operator in models:
        # single-channel convolutions without a curve of their own
        single = DEPTHWISE in models and operator in CONVOLVED and bool(np.any(shape["channelwise"]))
        return _named(models[DEPTHWISE if single else operator], shape)
    measured = models.get(measured_name(operator, backward))
    if measured is not None:
        return Timed(model=measured, shapes=(work_of(measured.curve, {**shape, **work}),))
    calls = CALLS.get(operator)
    found = None if calls is None else calls(models, operator, shape, backward)
    return found or memory_timed(models, operator, shape, backward=backward)


def called_once(operator: str, *, on_host: bool) -> bool:
    """True if one call loops over the steps of a kernel, as on a processor; a GPU launches some at every step."""
    return on_host and operator in RECURRENT


def _named(model: KernelModel, shape: Mapping[str, Num]) -> Timed | None:
    """One call of a model under its own name; None where the shape lacks a size."""
    wanted = [name for name in model.formula.arguments if name not in model.fixed]
    if any(name not in shape for name in wanted):
        return None
    return Timed(model=model, shapes=({name: shape[name] for name in wanted},))


MEMORY_BOUND: Final = Formula(memory_bound_s)
L2_BYTES: Final = float(4 * 2**20)
"""Last-level cache of a device whose datasheet does not give it."""
ONE_BLOCK: Final = 1024
"""Longest row that a block of a softmax kernel keeps in registers; longer rows are read again."""
GELU_FLOPS, DROPOUT_FLOPS, SOFTMAX_FLOPS = 12, 10, 4
"""Vector instructions per element of a GELU, a dropout and a softmax, as the fitted curves count them (none of the
gradient of a softmax)."""

Shape = Mapping[str, Num]
KERNEL, EAGER = "kernel", "eager"
#: Role -> curves that can time it, the best first: training kernels of a framework, then serving kernels.
ROLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "stream": (("elementwise", KERNEL), ("elementwise", EAGER)),
    "gate": (("activation", KERNEL), ("elementwise", KERNEL), ("elementwise", EAGER)),
    "rope": (("rope", KERNEL), ("elementwise", KERNEL), ("elementwise", EAGER)),
    "norm": (
        ("layernorm_pytorch", KERNEL), ("layernorm", EAGER), ("layernorm_torch_compile", KERNEL), ("layernorm", KERNEL),
    ),
    "norm_backward": (
        ("layernorm_bwd_pytorch", KERNEL), ("layernorm_bwd", EAGER), ("layernorm_bwd_torch_compile", KERNEL),
    ),
    "softmax": (("softmax", EAGER),),
    "softmax_backward": (("softmax_bwd", EAGER),),
    "dropout": (("dropout", EAGER),),
    "embedding": (("embedding", EAGER), ("embedding", KERNEL)),
}  # fmt: skip


def memory_models(device: Device, profile: Profile | None) -> dict[str, KernelModel]:
    """Models of the roles for which a profile has a curve."""
    out: dict[str, KernelModel] = {}
    if profile is None:
        return out
    for role, choices in ROLES.items():
        curve = next((c for c in (profile.curve(f, "any", t) for f, t in choices) if c is not None), None)
        if curve is not None:
            fixed = {**device_numbers(device), **curve.coefficients, "most_rows": most_rows(curve)}
            if curve.timer == EAGER:
                fixed |= {"floor_s": 0.0, "launch_s": min(fixed["launch_s"], device.kernel_latency_s)}
            out[role] = KernelModel(formula=MEMORY_BOUND, fixed=fixed, curve=curve)
    return out


def device_numbers(device: Device) -> dict[str, float]:
    """Datasheet numbers of :func:`steptime.cost.memory_bound.memory_bound_s`."""
    return {
        "memory_Bps": device.memory_Bps, "l2_bytes": float(device.l2_bytes or L2_BYTES),
        "vector_flops_per_s": device.peak_vector_flops_per_s,
    }  # fmt: skip


def most_rows(curve: Curve) -> float:
    """Rows up to which a curve was measured and has a cost per row; infinite if the curve gives no limit."""
    most = curve.ranges["rows"][1] if "rows" in curve.ranges else 0.0
    return most if most > 0 else math.inf


class Use(NamedTuple):
    """Role that times an operator in one direction, with the arguments of its shape that the role's curve takes.

    Bytes are those of the operator's own formula.
    """

    role: str
    flops: float | None = None
    """Vector instructions per element; None: by the operator's own formula, if it has one."""
    rows: str = ""
    """Name of the number of its rows, if there is a cost per row."""
    reread: int = 0
    """Tensors that are read again if a block cannot hold a row."""


NOTHING: Final = "nothing"
"""Role of a direction in which an operator has no work; no model has it."""
_STREAM, _MOVED, _LOOKED_UP = Use("stream"), Use("stream", 0), Use("embedding", 0, "tokens")

#: Operator -> its use forward and backward.
USES: Final[Mapping[str, tuple[Use, Use]]] = {
    "layer_norm": (Use("norm", rows="rows"), Use("norm_backward", 0, "rows")),
    "one_pass_layer_norm": (Use("norm", rows="rows"), _STREAM),
    "rms_norm": (Use("norm", rows="rows"), Use("norm_backward", 0, "rows")),
    "plain_rms_norm": (_STREAM, Use("stream", 1)),
    "activation": (Use("stream", GELU_FLOPS), _STREAM),
    "gated_activation": (Use("gate"), _STREAM),
    "dropout": (Use("dropout", DROPOUT_FLOPS), _STREAM),
    "dropout_add": (Use("dropout", DROPOUT_FLOPS + 1), _STREAM),
    "residual": (_STREAM, _STREAM),
    "bias": (_STREAM, _STREAM),
    "rope": (Use("rope"), Use("rope")),
    "complex_rope": (_STREAM, _STREAM),
    "move": (_MOVED, _MOVED),
    "move_forward": (_MOVED, Use(NOTHING)),
    "move_backward": (Use(NOTHING), _MOVED),
    **dict.fromkeys(LOOPED, (_MOVED, _MOVED)),
    "top_k": (_MOVED, _MOVED),
    # A warp keeps its row, of any length that the kernel takes, so that all of a triangular softmax is one stream.
    "triangular_softmax": (Use("stream", SOFTMAX_FLOPS), _MOVED),
    "softmax": (Use("softmax", SOFTMAX_FLOPS, "rows", 1), Use("softmax_backward", 0, "rows", 2)),
    "cross_entropy": (_STREAM, _STREAM),
    "embedding": (_LOOKED_UP, _LOOKED_UP),
}


def memory_timed(models: Models, operator: str, shape: Shape, *, backward: bool) -> Timed | None:
    """Model call of a row; None if it has no fitted model and the roofline applies."""
    if operator not in USES:
        return None
    use = USES[operator][backward]
    if use.role not in models:
        return None
    own, moved = OPERATORS.get(operator), shape.get("moved_bytes", 0.0)
    flops: Num = use.flops * shape["elements"] if use.flops else 0.0
    if own is not None:
        phase = own.backward if backward else own.forward
        moved = phase.moved_bytes(shape) if phase.moved_bytes is not None else moved
        if use.flops is None and phase.vector_flops is not None:
            flops = phase.vector_flops(shape)
    call = {
        "moved_bytes": moved,
        "rows": shape[use.rows] if use.rows else 0.0,
        "reread_bytes": 0.0,
        "vector_flops": flops,
    }
    if use.reread:
        again = use.reread * shape["elements"] * shape["element_bytes"]
        call["reread_bytes"] = where(shape["elements"] > ONE_BLOCK * call["rows"], again, 0.0)
    return Timed(model=models[use.role], shapes=(call,))


def streamed(models: Models, moved_bytes: Num) -> Timed | None:
    """One pass over large tensors (the optimiser); None if it has no fitted model and the roofline applies."""
    call = {"moved_bytes": moved_bytes, "rows": 0.0, "reread_bytes": 0.0, "vector_flops": 0.0}
    return Timed(model=models["stream"], shapes=(call,)) if "stream" in models else None
