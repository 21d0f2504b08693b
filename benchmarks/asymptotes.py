"""Every curve of every profile over nine decades of size: how far it is from the roofline and from alike devices.

Beyond what was measured a curve has to tend to the roofline at rates that are alike on devices that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from steptime.cost.attention import (
    attention_backward_bytes,
    attention_backward_pair_flops,
    attention_pair_flops,
)
from steptime.cost.elementwise import layer_norm_bytes, layer_norm_flops
from steptime.estimate.kernels import OPERAND_BYTES, KernelModel, memory_models, models_of, product_shape
from steptime.hardware.library import load_device
from steptime.hardware.profiles import distance, load_profile, profile_names
from steptime.hardware.records import Device
from steptime.num import Array, Num
from steptime.plan.job import PRECISIONS

DECADES: Final = 9
SIZES: Final = np.logspace(0, DECADES, 4 * DECADES + 1).round()
"""Rows, columns, terms of a sum, sequences: what is varied."""
LARGE_S: Final = 1e-3
"""Time at the rates of the datasheet from which on a size counts as large: latencies and caches no longer matter."""
ALIKE: Final = 1.0
"""Distance (:func:`steptime.hardware.profiles.distance`) up to which devices are compared."""
WIDTHS: Final = (128.0, 1024.0, 8192.0)
ROW_ROLES: Final = ("norm", "norm_backward", "softmax", "softmax_backward", "embedding", "stream", "dropout")
DTYPES: Final = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One curve over all sizes of one kind."""

    device: str
    what: str
    """Operator and what is varied."""
    kind: str
    """Of the curve: ``fitted`` or ``assumed``."""
    seconds: Array
    roofline_s: Array
    """At the rates of the datasheet."""

    @property
    def over(self) -> Array:
        """Time over the roofline, of the large sizes; empty if none is large."""
        large = self.roofline_s > LARGE_S
        out: Array = self.seconds[large] / self.roofline_s[large]
        return out

    @property
    def falls(self) -> float:
        """Largest relative fall of the time from a size to the next larger one; 0 if none."""
        return max(0.0, 1.0 - float((self.seconds[1:] / self.seconds[:-1]).min()))


def sweeps(*, bounded: bool = True) -> Iterator[Sweep]:
    """Every curve of the catalogue that an estimate takes.

    Args:
        bounded: rows beyond those that were measured cost no more than their bytes; else as all others.
    """
    for name in profile_names():
        device, profile = load_device(name), load_profile(name)
        for role, model in memory_models(device, profile).items():
            used = model if bounded else replace(model, fixed={**model.fixed, "most_rows": math.inf})
            if role in ROW_ROLES:
                yield from _of_rows(device, role, used)
        for dtype in DTYPES:
            if dtype not in device.matrix_flops_per_s:
                continue
            models = models_of(device, PRECISIONS[dtype])
            if "matmul" in models:
                yield from _of_products(device, dtype, models["matmul"])
            for operator in ("attention", "attention_backward"):
                if operator in models and dtype == DTYPES[0]:
                    yield _of_attention(device, operator, models[operator])


def _sweep(device: Device, what: str, model: KernelModel, shape: Mapping[str, Num], roofline_s: Array) -> Sweep:
    seconds = np.broadcast_to(np.asarray(model.seconds(shape), np.float64), SIZES.shape)
    return Sweep(device=device.name, what=what, kind=model.curve.kind, seconds=seconds, roofline_s=roofline_s)


def _of_rows(device: Device, role: str, model: KernelModel) -> Iterator[Sweep]:
    for width in WIDTHS:
        elements = SIZES * width
        norm = role.startswith("norm")
        moved = np.asarray(layer_norm_bytes(elements, SIZES, width, 2.0) if norm else 4 * elements)
        flops = np.asarray(layer_norm_flops(elements)) if role == "norm" else elements
        rows = SIZES if norm or role in ("embedding", "softmax", "softmax_backward") else 0.0 * SIZES
        shape = {"moved_bytes": moved, "rows": rows, "reread_bytes": 0.0 * moved, "vector_flops": flops}
        yield _sweep(device, f"{role} of rows of {width:.0f}", model, shape, moved / device.memory_Bps)


def _of_products(device: Device, dtype: str, model: KernelModel) -> Iterator[Sweep]:
    held = np.full(SIZES.shape, 4096.0)
    for varied in ("m", "n", "k"):
        m, n, k = (SIZES if varied == dim else held for dim in ("m", "n", "k"))
        a, b, out = OPERAND_BYTES[dtype]
        roofline_s = np.maximum(
            2 * m * n * k / device.matrix_flops_per_s[dtype], (a * m * k + b * k * n + out * m * n) / device.memory_Bps
        )
        yield _sweep(device, f"product {dtype} over {varied}", model, product_shape(model, m, n, k), roofline_s)


def _of_attention(device: Device, operator: str, model: KernelModel) -> Sweep:
    """Sequences of 1024 tokens, causal; its length is varied by what a model of tiles knows (its tests)."""
    heads, width, tokens = 32.0, 128.0, 1024.0
    backward = operator.endswith("backward")
    pair_flops = attention_backward_pair_flops(width, width) if backward else attention_pair_flops(width, width)
    moved = 8 * SIZES * tokens * heads * width
    moved = np.asarray(attention_backward_bytes(moved)) if backward else moved
    shape: dict[str, Num] = {
        "batch": SIZES,
        "heads": heads,
        "kv_heads": heads,
        "queries": tokens,
        "keys": tokens,
        "causal": 1.0,
        "window": 0.0,
        "pair_flops": pair_flops,
        "moved_bytes": moved,
    }
    flops = SIZES * heads * tokens * (tokens + 1) / 2 * np.asarray(pair_flops)
    roofline_s = np.maximum(flops / model.fixed["matrix_flops_per_s"], moved / device.memory_Bps)
    return _sweep(device, f"{operator} over sequences", model, shape, roofline_s)


def against_alike(found: Iterable[Sweep]) -> Iterator[tuple[float, Sweep, Sweep]]:
    """Ratio of the times over the roofline of large sizes between each device and the most alike one, at least 1.

    The largest over the sizes; devices without one within :data:`ALIKE` are left out.
    """
    by_what: dict[str, dict[str, Sweep]] = {}
    for sweep in found:
        by_what.setdefault(sweep.what, {})[sweep.device] = sweep
    records = {name: load_device(name) for name in profile_names()}
    for of_device in by_what.values():
        for name, sweep in of_device.items():
            others = [(distance(records[name], records[other]), other) for other in of_device if other != name]
            away, nearest = min(others, default=(math.inf, ""))
            if away > ALIKE:
                continue
            other = of_device[nearest]
            large = (sweep.roofline_s > LARGE_S) & (other.roofline_s > LARGE_S)
            if large.any():
                ratio = (sweep.seconds / sweep.roofline_s / (other.seconds / other.roofline_s))[large]
                yield float(np.max(np.maximum(ratio, 1 / ratio))), sweep, other
