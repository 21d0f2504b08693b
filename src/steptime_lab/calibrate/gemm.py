"""Matrix products: their rows, the meaning of their dtypes, and the fit of one curve per device and dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Final

import numpy as np

from steptime.cost.gemm import LIMIT, NAMES, gemm_backward_s, gemm_residual, gemm_s, residual_table
from steptime.errors import UserError
from steptime.estimate.kernels import FEW_UNITS, OPERAND_BYTES, SPREAD_UNITS
from steptime.hardware.library import device_named, load_device
from steptime.hardware.records import Curve, Device
from steptime.measure.table import Table
from steptime.num import Array
from steptime_lab.calibrate.family import Coefficient, KernelFamily, dtype_of, launched, readable, timed, timer_of
from steptime_lab.calibrate.fitting import About, Prior, fitted_curve, hashed

#: Fewest shapes of a residual table.
LEAST_RESIDUAL_SHAPES: Final = 500
#: Measurements of log 0 at its knot that pull each value of the table to zero.
PULL: Final = 2.0
#: Log error beyond which a measurement counts less.
OUTLIER: Final = 0.05
#: Rounds of reweighting.
ROUNDS: Final = 5
#: Values of the table that are smaller than this are left out.
LEAST: Final = 0.002


def fitted_residual(shape: Mapping[str, Array], device: Mapping[str, Any], log_error: Array) -> dict[str, float]:
    r"""Values of the residual table, by name.

    $$\min_c \sum_i w_i (B c - r)_i^2 + \lambda \lVert c \rVert^2, \quad
        w_i = \big(1 + (B c - r)_i^2 / 0.05^2\big)^{-1/2}$$

    where $r$ = `log_error` (log of measured over modelled time), $B$ the hat functions of
    :func:`steptime.cost.gemm.gemm_residual` and $\lambda = 2$. Nothing for fewer than 500 shapes.

    Source: ridge regression with iterative reweighting.
    """
    if len(log_error) < LEAST_RESIDUAL_SHAPES:
        return {}
    basis = hats(shape, device)
    weights: Array = np.ones(len(log_error))
    values: Array = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        weighted = basis * weights[:, None]
        values = np.linalg.solve(weighted.T @ basis + PULL * np.eye(len(NAMES)), weighted.T @ log_error)
        weights = 1 / np.sqrt(1 + ((basis @ values - log_error) / OUTLIER) ** 2)
    kept = zip(NAMES, np.clip(values, -LIMIT, LIMIT), strict=True)
    return {name: round(float(value), 4) for name, value in kept if abs(value) >= LEAST}


def hats(shape: Mapping[str, Array], device: Mapping[str, Any]) -> Array:
    """Value of each hat function (columns) for each row."""
    columns = [_of(shape, "m", "n", "k", device, residual_table({name: LIMIT})) for name in NAMES]
    return np.stack([np.asarray(column) for column in columns], axis=1) / LIMIT


def residual_of(shape: Mapping[str, Any], device: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The residual of products, an argument of the model."""
    table = residual_table(values)
    return {"residual": _of(shape, "m", "n", "k", device, table)}


def residuals_of_gradients(
    shape: Mapping[str, Any], device: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The residuals of both gradients of products, arguments of the model."""
    table = residual_table(values)
    return {
        "input_residual": _of(shape, "m", "k", "n", device, table),
        "weight_residual": _of(shape, "k", "n", "m", device, table),
    }


def _of(shape: Mapping[str, Any], m: str, n: str, k: str, device: Mapping[str, Any], table: Array | None) -> Any:
    return gemm_residual(shape[m], shape[n], shape[k], shape["batch"], device["sm_count"], table)


#: Dtype of a curve -> dtypes of its peak, the best first; other dtypes have their own peak.
PEAKS: Final = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"), "tf32": ("tf32", "fp32")}
#: Formats of 16 bits.
SIXTEEN: Final = ("bf16", "fp16")
#: Dtypes that every framework leaves to the vendor's library.
PLAIN: Final = ("fp32", "tf32", "bf16", "fp16")
#: Sources in the order of trust; a curve is fitted to the first that has enough shapes.
SOURCES: Final = ("aiconfigurator_gemm", "vidur", "llmservingsim", "xla_perf_table", "simumax", "neusight", "deepbench")
#: Formats whose curves were fitted to linear layers of serving frameworks, which convert the left operand first.
NARROW: Final = ("fp8", "fp4")
#: Framework in the notes of a row: such a row is of a linear layer, all others are of the product alone.
_LAYER: Final = re.compile(r"fw=(\w+)")
#: Timer of single kernels -> excess of its times over those of kernels that are replayed one after the other (s): the
#: start and the end of a kernel, which overlap with its neighbours there. H100 and B200 in 16 bits, 345 shapes each.
ALONE_S: Final = {"derived_from_flops(median kernel time)": 2.3e-6}
#: Fewest shapes of a curve.
LEAST_SHAPES: Final = 60

COEFFICIENTS: Final = (
    Coefficient(name="compute_efficiency", start=0.8, low=0.2, high=1.3),
    Coefficient(name="memory_efficiency", start=0.8, low=0.2, high=1.5),
    Coefficient(name="latency_s", start=3e-6, low=3e-7, high=3e-4),
    Coefficient(name="overlap", start=2.0, low=1.0, high=20.0),
    Coefficient(name="overlap_per_s", start=1e4, low=1e2, high=1e6),
    Coefficient(name="split_s", start=2e-6, low=1e-8, high=3e-5),
    Coefficient(name="fill_k", start=100.0, low=1.0, high=1000.0),
    Coefficient(name="step_s", start=4e-9, low=3e-10, high=6e-8),
    Coefficient(name="operand_speed", start=5.0, low=0.5, high=100.0),
    Coefficient(name="output_cost", start=1.2, low=0.7, high=4.0),
    Coefficient(name="cached_cost", start=0.5, low=0.1, high=1.0),
    Coefficient(name="cache_copies", start=6.0, low=0.5, high=30.0),
    Coefficient(name="quantisation", start=0.3, low=0.02, high=1.0),
    Coefficient(name="throttle", start=0.1, low=1e-3, high=1.0),
    Coefficient(name="odd_tile", start=1.02, low=1.0, high=1.5),
    Coefficient(name="large_tile", start=1.05, low=1.0, high=2.0),
    Coefficient(name="batched_tile", start=1.1, low=1.0, high=10.0),
    Coefficient(name="epilogue", start=1.0, low=0.01, high=100.0),
    Coefficient(name="split_traffic", start=1.0, low=1e-3, high=10.0),
    Coefficient(name="quantise_s", start=2e-10, low=1e-13, high=1e-8),
    Coefficient(name="quantise_row", start=1000.0, low=1.0, high=2e4),
)
#: Cost of rows that lie far apart, for dtypes whose measured sums are long enough to determine it; 0 for all others.
STRIDE: Final = Coefficient(name="stride", start=0.03, low=1e-3, high=2.0)
STRIDED: Final = ("fp32",)


def gemm_dtype(name: str) -> str:
    """Dtype of a curve from that of a measured row; "" if unknown.

    >>> gemm_dtype("bfloat16"), gemm_dtype("fp8_block"), gemm_dtype("nvfp4"), gemm_dtype("int4_wo")
    ('bf16', 'fp8', 'fp4', '')
    """
    return name if name in OPERAND_BYTES else dtype_of(name)


def gemm_shape(table: Table) -> Mapping[str, Array]:
    """Dims and element sizes; NaN where a dim is missing or not positive, or the dtype is unknown.

    ``converted`` is 1 where the time includes the conversion of the left operand, else 0; ``alone_s`` is
    :data:`ALONE_S` of the timer.
    """
    dims = {name: table.number(name).astype(np.float64) for name in ("m", "n", "k")}
    batch = table.number("batch").astype(np.float64)
    dims["batch"] = np.where(np.isnan(batch), 1.0, batch)
    shape = {name: np.where(values > 0, values, np.nan) for name, values in dims.items()}
    unknown = (np.nan, np.nan, np.nan)
    sizes = {name: OPERAND_BYTES.get(gemm_dtype(name), unknown) for name in set(table.text("dtype"))}
    per_row = np.array([sizes[name] for name in table.text("dtype")], np.float64).reshape(-1, 3)
    shape |= {name: per_row[:, i] for i, name in enumerate(("a_bytes", "b_bytes", "out_bytes"))}
    kinds = [gemm_dtype(name) for name in table.text("dtype")]
    layers = [
        kind not in NARROW or bool(_LAYER.match(notes)) for kind, notes in zip(kinds, table.text("notes"), strict=True)
    ]
    alone = [
        ALONE_S.get(method, 0.0) if kind in SIXTEEN else 0.0
        for kind, method in zip(kinds, table.text("method"), strict=True)
    ]
    return shape | {"converted": np.array(layers, np.float64), "alone_s": np.array(alone, np.float64)}


def gemm_device(device: Device, dtype: str) -> Mapping[str, float]:
    """Datasheet of the device for one dtype.

    Raises:
        UserError: the device has no peak for it.
    """
    rates, units = device.matrix_flops_per_s, device.sm_count or 0
    peak = next((rates[d] for d in PEAKS.get(dtype, (dtype,)) if d in rates), None)
    if peak is None:
        raise UserError(f"{device.name}: no peak rate for {dtype}", hint=f"it has {', '.join(rates)}")
    return {
        "peak_flops_per_s": peak,
        "memory_Bps": device.memory_Bps,
        "sm_count": float(units if units >= FEW_UNITS else SPREAD_UNITS),
        "l2_bytes": float(device.l2_bytes or 0.0),
    }


Derived = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


def _with_stride(of: Derived) -> Derived:
    """Derived arguments, with the cost of a stride, which not all curves have.

    The conversion of the left operand counts where the time includes it, and a kernel alone takes longer.
    """

    def derived(shape: Mapping[str, Any], device: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        return of(shape, device, values) | {
            STRIDE.name: values.get(STRIDE.name, 0.0),
            "quantise_s": values["quantise_s"] * shape.get("converted", 1.0),
            "latency_s": values["latency_s"] + shape.get("alone_s", 0.0),
        }

    return derived


FAMILY: Final = KernelFamily(
    name="gemm",
    ops=frozenset({"gemm", "bmm", "grouped_gemm"}),
    formula=gemm_s,
    shape=gemm_shape,
    device=gemm_device,
    coefficients=COEFFICIENTS,
    derived=_with_stride(residual_of),
    left_over=fitted_residual,
)
#: The same for dtypes that :data:`STRIDED` names: one coefficient more is fitted.
STRIDED_FAMILY: Final = replace(FAMILY, coefficients=(*COEFFICIENTS, STRIDE))
#: Both gradients of a product, with the coefficients of :data:`FAMILY`: it has no curves of its own.
BACKWARD: Final = KernelFamily(
    name="gemm_backward",
    ops=frozenset({"gemm_bwd", "bmm_bwd"}),
    formula=gemm_backward_s,
    arguments=(
        *(name for name in signature(gemm_s).parameters if name != "residual"),
        "input_residual",
        "weight_residual",
    ),
    shape=gemm_shape,
    device=gemm_device,
    coefficients=COEFFICIENTS,
    derived=_with_stride(residuals_of_gradients),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Distinct shapes that one source measured on one device in one dtype."""

    device: Device
    dtype: str
    timer: str
    source: str
    shape: Mapping[str, Array]
    measured_s: Array
    """Median over repetitions and frameworks."""
    rows: Array
    """Positions of the measured rows in the table, repetitions included."""

    @property
    def groups(self) -> Array:
        """Numbers that are equal for equal (m, n, k, batch), in any dtype and of any source."""
        return hashed(self.shape[name] for name in ("m", "n", "k", "batch"))

    @property
    def arguments(self) -> Mapping[str, float]:
        """Device arguments of the formula."""
        return FAMILY.device(self.device, self.dtype)

    @property
    def datasheet_s(self) -> tuple[Array, Array]:
        """Time of the arithmetic, and of every operand once through memory, at the rates of the datasheet."""
        shape, device = self.shape, self.arguments
        m, n, k, batch = (shape[name] for name in ("m", "n", "k", "batch"))
        moved = batch * (m * k * shape["a_bytes"] + k * n * shape["b_bytes"] + m * n * shape["out_bytes"])
        return 2 * batch * m * n * k / device["peak_flops_per_s"], moved / device["memory_Bps"]


def implementation(source: str, dtype: str, notes: str) -> str:
    """Source of a row, with the framework of its layer where frameworks quantise in kernels of their own.

    >>> implementation("mine", "nvfp4", "fw=vllm;v=1"), implementation("mine", "bf16", "fw=vllm;v=1")
    ('mine/vllm', 'mine')
    """
    named = _LAYER.match(notes)
    return f"{source}/{named[1]}" if named and gemm_dtype(dtype) not in PLAIN else source


def truths(table: Table, ops: frozenset[str] = FAMILY.ops) -> Iterator[Truth]:
    """Measured shapes by source, device, dtype and timer; devices that the catalogue lacks are left out.

    Suspect rows and kernels that no training step launches are left out too. Serving frameworks quantise in kernels of
    their own, which differ by factors: quantised rows that name their framework are kept apart by it, and the source
    then reads ``source/framework``.
    """
    shape = gemm_shape(table)
    seconds = table.number("latency_us") * 1e-6
    known = {name: device_named(name) for name in set(table.text("gpu"))}
    usable = np.isin(table.text("op"), list(ops)) & readable(shape) & timed(seconds) & ~table.suspect & launched(table)
    keys: dict[tuple[str, str, str, str], list[int]] = {}
    columns = (table.text(name) for name in ("source", "gpu", "dtype", "method", "notes"))
    for i, (source, gpu, dtype, method, notes) in enumerate(zip(*columns, strict=True)):
        if usable[i] and (device := known[gpu]) is not None:
            source = implementation(source, dtype, notes)
            keys.setdefault((source, device.name, gemm_dtype(dtype), timer_of(method)), []).append(i)
    for (source, name, dtype, timer), rows in sorted(keys.items()):
        columns_of = {key: values[rows] for key, values in shape.items()}
        first, median = _by_shape(columns_of, seconds[rows])
        yield Truth(
            device=load_device(name),
            dtype=dtype,
            timer=timer,
            source=source,
            shape={key: values[first] for key, values in columns_of.items()},
            measured_s=median,
            rows=np.array(rows),
        )


#: Prior of every coefficient but the latency: its start value, within a factor of about e.
PRIORS: Final = {c.name: Prior(value=c.start, spread=1.0) for c in (*COEFFICIENTS, STRIDE) if c.name != "latency_s"}


def family_of(dtype: str) -> KernelFamily:
    """The family with the coefficients that are fitted for a dtype.

    >>> [family_of(dtype).coefficients[-1].name for dtype in ("fp32", "bf16")]
    ['stride', 'quantise_row']
    """
    return STRIDED_FAMILY if dtype in STRIDED else FAMILY


def gemm_curve(truth: Truth, folds: int = 5) -> Curve:
    """The curve of one truth, with errors cross-validated by shape."""
    return fitted_curve(
        family_of(truth.dtype),
        truth.shape,
        truth.arguments,
        truth.measured_s,
        truth.groups,
        about=About(dtype=truth.dtype, timer=truth.timer, source=truth.source),
        folds=folds,
        priors=PRIORS,
    )


def preferred(found: Iterable[Truth]) -> list[Truth]:
    """For each device, dtype and timer the most trusted source that has enough shapes.

    Of the frameworks of one source, the one with the median rate is taken.
    """
    order = {source: i for i, source in enumerate(SOURCES)}
    best: dict[tuple[str, str, str], list[Truth]] = {}
    usable = [t for t in found if _trust(t, order) < len(order) and len(t.measured_s) >= LEAST_SHAPES and _has_peak(t)]
    for truth in sorted(usable, key=lambda t: _trust(t, order)):
        same = best.setdefault((truth.device.name, truth.dtype, truth.timer), [])
        if not same or _trust(same[0], order) == _trust(truth, order):
            same.append(truth)
    return [sorted(same, key=_slowness)[(len(same) - 1) // 2] for same in best.values()]


def _trust(truth: Truth, order: Mapping[str, int]) -> int:
    return order.get(truth.source.split("/")[0], len(order))


def _slowness(truth: Truth) -> float:
    """Mean log of measured time over roofline."""
    compute_s, memory_s = truth.datasheet_s
    return float(np.mean(np.log(truth.measured_s / (compute_s + memory_s + 5e-6))))


def _by_shape(shape: Mapping[str, Array], seconds: Array) -> tuple[Array, Array]:
    """Index of the first row of each shape, and the median time of its rows."""
    group = hashed(shape.values())
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(seconds[order], np.cumsum(np.bincount(inverse))[:-1])
    return first, np.array([np.median(part) for part in parts])


def _has_peak(truth: Truth) -> bool:
    try:
        return bool(truth.arguments)
    except UserError:
        return False
