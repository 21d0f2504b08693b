"""Families of convolutions: forward, gradient of the data, gradient of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from steptime.cost.convolution import convolution_s, implicit_product, output_size
from steptime.hardware.records import Device
from steptime.lab.calibrate.family import Coefficient, KernelFamily
from steptime.lab.calibrate.memory_bound import element_bytes
from steptime.lab.calibrate.table import Table
from steptime.num import Array

COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=2e-5, low=1e-6, high=5e-4),
    Coefficient(name="efficiency", start=0.6, low=0.02, high=1.0),
    Coefficient(name="memory_efficiency", start=0.5, low=0.02, high=1.0),
    Coefficient(name="tail", start=0.5, low=0.01, high=1.0),
    Coefficient(name="tile", start=64.0, low=64.0, high=64.0),
    Coefficient(name="start_depth", start=50.0, low=1.0, high=2000.0),
    Coefficient(name="winograd", start=1.3, low=1.0, high=2.25),
)


def device_arguments(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers; a dtype without matrix units runs at the rate of single precision."""
    matrix = device.matrix_flops_per_s
    return {
        "matrix_flops_per_s": matrix.get(dtype, matrix.get("fp32", min(matrix.values()))),
        "memory_Bps": device.memory_Bps,
        "sm_count": float(device.sm_count or 1),
    }


def geometry(table: Table) -> tuple[Array, Array, Array, Array, Array]:
    """Output pixels of all images, channels in and out, taps, and bytes moved."""
    number = table.dim
    sides = [
        np.asarray(
            output_size(number(f"conv_{s}"), number(f"conv_k{s}"), number("conv_stride"), table.number("conv_pad"))
        )
        for s in ("h", "w")
    ]
    images, inward, outward = number("batch"), number("conv_cin"), number("conv_cout")
    pixels = images * sides[0] * sides[1]
    taps = number("conv_kh") * number("conv_kw")
    moved = images * inward * number("conv_h") * number("conv_w") + pixels * outward + inward * outward * taps
    return pixels, inward, outward, taps, moved * element_bytes(table)


def _arguments(
    table: Table, pixels: Array, inward: Array, outward: Array, taps: Array, moved: Array
) -> dict[str, Array]:
    rows, columns, depth = map(np.asarray, implicit_product(pixels, inward, outward, taps, 1))
    small = (table.dim("conv_kh") == 3) & (table.dim("conv_kw") == 3) & (table.dim("conv_stride") == 1)
    return {
        "rows": rows, "columns": columns, "depth": depth, "moved_bytes": moved,
        "winograd_taps": small.astype(np.float64),
    }  # fmt: skip


def forward(table: Table) -> dict[str, Array]:
    """Pixels x outputs, over inputs and taps."""
    pixels, inward, outward, taps, moved = geometry(table)
    return _arguments(table, pixels, inward, outward, taps, moved)


def data_gradient(table: Table) -> dict[str, Array]:
    """Pixels x inputs, over outputs and taps."""
    pixels, inward, outward, taps, moved = geometry(table)
    return _arguments(table, pixels, outward, inward, taps, moved)


def weight_gradient(table: Table) -> dict[str, Array]:
    """Outputs x inputs and taps, over pixels (split over blocks as far as that helps: as if the pixels were rows)."""
    return forward(table)


def _family(name: str, shape: Callable[[Table], Mapping[str, Array]]) -> KernelFamily:
    return KernelFamily(
        name=name, ops=frozenset({name}), formula=convolution_s, shape=shape, device=device_arguments,
        coefficients=COEFFICIENTS,
    )  # fmt: skip


FAMILIES: Final = (
    _family("conv_fwd", forward),
    _family("conv_bwd_data", data_gradient),
    _family("conv_bwd_weight", weight_gradient),
)
