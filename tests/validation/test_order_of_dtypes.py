"""No carried-over curve is faster than the peak of its device, and no narrower type slower than a wider one.

Over every device of the catalogue and every type that it has. What was measured on the device itself is what it is: a
clock above that of the datasheet, or small products in fp8, whose operands are converted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

import numpy as np
import pytest

from steptime.estimate.further_kernels import machine_for
from steptime.estimate.kernels import memory_timed, timed
from steptime.estimate.machine import Machine
from steptime.hardware import device_names, load_device
from steptime.hardware.records import Device
from steptime.model.spec import ELEMENT_BYTES

TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
"""From wide to narrow; the two 16-bit formats run in the same units."""
CLOSE = 1.0 + 1e-6
PASSES = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
#: Shape of the images (1-d, 2-d, 3-d) and taps of the kernels that convolutions are tried with.
IMAGES = (((4096,), 3), ((56, 56), 9), ((14, 14), 9), ((112, 112), 1), ((16, 28, 28), 27))
CHANNELS = (3.0, 16.0, 64.0, 256.0, 1024.0)
PRODUCTS = tuple(product((1024.0, 4096.0, 16384.0), repeat=3))
LARGE = 4096.0
"""Edge from which the conversion of operands to fp8 does not matter."""
ATTENTION = ((1.0, 1024.0, 128.0), (8.0, 4096.0, 64.0), (1.0, 16384.0, 128.0))
ROWS = ((64.0, 768.0), (4096.0, 1024.0), (65536.0, 8192.0))
MAPS = ("layer_norm", "rms_norm", "activation", "gated_activation", "residual", "bias", "softmax")

Shape = Mapping[str, float]


def convolutions(element_bytes: float) -> Iterator[Shape]:
    """Passes of convolutions as implicit products."""
    for (sides, taps), images, inward, outward in product(IMAGES, (1.0, 64.0), CHANNELS, CHANNELS):
        pixels = images * float(np.prod(sides))
        moved = element_bytes * (pixels * (inward + outward) + inward * outward * taps)
        yield {
            "rows": pixels, "columns": outward, "depth": inward * taps, "moved_bytes": moved, "tensor_bytes": moved,
            "winograd_taps": float(taps == 9 and len(sides) == 2), "channelwise": 0.0,
        }  # fmt: skip


@cache
def machine(name: str, dtype: str) -> Machine:
    return machine_for(load_device(name), dtype, calibrated=True)


def types_of(device: Device) -> tuple[str, ...]:
    return tuple(dtype for dtype in TYPES if dtype in device.matrix_flops_per_s)


def ordered(device: Device) -> Iterator[tuple[str, str]]:
    """Wider and narrower type, where the narrower has at least the rate of the wider."""
    rates, known = device.matrix_flops_per_s, types_of(device)
    for place, wide in enumerate(known):
        yield from ((wide, narrow) for narrow in known[place + 1 :] if rates[narrow] >= rates[wide])


def is_own(machine: Machine, operator: str) -> bool:
    """Whether its curve was measured on the device itself."""
    return machine.models[operator].curve.points > 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", device_names())
def test_convolutions_are_within_the_peak_and_in_order(name: str) -> None:
    device = load_device(name)
    times = {}
    for dtype, operator in product(types_of(device), PASSES):
        known = machine(name, dtype)
        if operator not in known.models:
            continue
        model, element_bytes = known.models[operator], ELEMENT_BYTES[dtype]
        shapes = list(convolutions(element_bytes))
        found = np.array([float(model.seconds({k: v for k, v in s.items() if k in model.formula.arguments}))
                          for s in shapes])  # fmt: skip
        times[dtype, operator] = found
        flops = np.array([2.0 * s["rows"] * s["columns"] * s["depth"] for s in shapes])
        counted = flops / found / device.matrix_flops_per_s[dtype]
        saving = np.array([bool(s["winograd_taps"]) for s in shapes])
        # What was measured to save in fp32 (V100s with other memory are the same chip) also serves 16-bit types.
        measured = device.architecture == "volta" or any(is_own(machine(name, t), operator) for t in {dtype, "fp32"})
        most = np.where(saving & measured, 2.25, 1.0)
        assert (counted <= most * CLOSE).all(), (dtype, operator, counted.max())
    for wide, narrow in ordered(device):
        for operator in PASSES:
            if (
                (narrow, operator) in times
                and (wide, operator) in times
                and not is_own(machine(name, narrow), operator)
            ):
                ratio = times[narrow, operator] / times[wide, operator]
                assert (ratio <= CLOSE).all(), (wide, narrow, operator, ratio.max())


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", device_names())
def test_products_are_within_the_peak_and_in_order(name: str, backward: bool) -> None:
    """Plain and grouped ones, and attention; large ones, in which arithmetic takes longest."""
    device = load_device(name)
    times: dict[tuple[str, str, tuple[float, float, float]], float] = {}
    for dtype in types_of(device):
        models, peak = machine(name, dtype).models, device.matrix_flops_per_s[dtype]
        for operator, (m, n, k) in product(("matmul", "grouped_matmul"), PRODUCTS):
            shape = {"m": m * (8.0 if operator == "grouped_matmul" else 1.0), "n": n, "k": k, "groups": 8.0}
            found = timed(models, operator, shape, {}, backward=backward)
            if found is None:
                continue
            seconds = times[dtype, operator, (m, n, k)] = float(found.seconds)
            share = 2.0 * shape["m"] * n * k * (1.0 + backward) / seconds / peak
            assert share <= CLOSE or found.model.curve.points > 0, (dtype, operator, (m, n, k), share)
        for batch, queries, head_dim in ATTENTION:
            rows = batch * queries * 16.0
            shape = {
                "batch": batch, "heads": 16.0, "kv_heads": 16.0, "queries": queries, "seen_keys": queries,
                "causal": 0.0, "window": 0.0, "head_dim": head_dim, "rows": rows, "kv_rows": rows,
                "element_bytes": min(float(ELEMENT_BYTES[dtype]), 4.0),
            }  # fmt: skip
            found = timed(models, "fused_attention", shape, {}, backward=backward)
            if found is None:
                continue
            seconds = times[dtype, "fused_attention", (batch, queries, head_dim)] = float(found.seconds)
            fastest = max(device.matrix_flops_per_s.values())
            share = 4.0 * batch * 16.0 * queries**2 * head_dim * (2.5 if backward else 1.0) / seconds / fastest
            assert share <= CLOSE or found.model.curve.points > 0, (dtype, "attention", share)
    for wide, narrow in ordered(device):
        for (dtype, operator, size), wide_s in times.items():
            small = narrow == "fp8" and min(size) < LARGE
            if dtype == wide and (narrow, operator, size) in times and not small:
                ratio = times[narrow, operator, size] / wide_s
                assert ratio <= CLOSE, (wide, narrow, operator, size, ratio)


@pytest.mark.parametrize("name", device_names())
def test_what_moves_memory_is_in_order(name: str) -> None:
    device = load_device(name)
    for wide, narrow in ordered(device):
        for operator, (rows, width), backward in product(MAPS, ROWS, (False, True)):
            seconds = []
            for dtype in (wide, narrow):
                shape = {
                    "elements": rows * width, "rows": rows, "row": width, "columns": width, "hidden": width,
                    "tokens": rows, "width": width, "element_bytes": 4.0 if ELEMENT_BYTES[dtype] > 2 else 2.0,
                }  # fmt: skip
                found = memory_timed(machine(name, dtype).models, operator, shape, backward=backward)
                seconds += [] if found is None else [float(found.seconds)]
            assert len(seconds) < 2 or seconds[1] <= seconds[0] * CLOSE, (wide, narrow, operator, rows, seconds)
