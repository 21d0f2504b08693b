"""Families of attention kernels over whole sequences, forward and backward.

The measured implementations are those that training uses: FlashAttention and cuDNN, whatever the framework
(:mod:`steptime.lab.calibrate.training_rows` leaves out all others).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from steptime.cost import attention as times
from steptime.hardware.records import Device
from steptime.lab.calibrate.family import Coefficient, KernelFamily
from steptime.lab.calibrate.table import Table
from steptime.num import Array

WINDOW: Final = re.compile(r"window=(\d+)")
FULL: Final = re.compile(r"non-causal|mask=no_mask")
EIGHT_BITS: Final = ("fp8", "mxfp8")


def _held(name: str, value: float) -> Coefficient:
    return Coefficient(name=name, start=value, low=value, high=value)


COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=1e-5, low=1e-6, high=1e-4),
    Coefficient(name="efficiency", start=0.7, low=0.05, high=1.0),
    Coefficient(name="softmax_flops", start=15.0, low=0.5, high=300.0),
    _held("memory_efficiency", 0.8),
    Coefficient(name="tail", start=0.5, low=0.01, high=1.0),
    Coefficient(name="overlap", start=2.0, low=1.0, high=6.0),
    Coefficient(name="fill_keys", start=50.0, low=1.0, high=1000.0),
    Coefficient(name="window_keys", start=100.0, low=1.0, high=2000.0),
    Coefficient(name="packing", start=0.5, low=0.02, high=1.0),
    Coefficient(name="serial_passes", start=0.5, low=0.01, high=10.0),
    _held("tile_rows", 128.0),
)


def device_arguments(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers of :func:`~steptime.cost.attention.tiled_attention_s`."""
    matrix = device.matrix_flops_per_s
    return {
        "matrix_flops_per_s": matrix.get(dtype, matrix.get("bf16", matrix.get("fp16", max(matrix.values())))),
        "vector_flops_per_s": device.peak_vector_flops_per_s,
        "memory_Bps": device.memory_Bps,
        "sm_count": float(device.sm_count or 1),
    }


def whole_sequences(table: Table) -> dict[str, Array]:
    """Shape arguments of :func:`~steptime.cost.attention.tiled_attention_s`, forward."""
    return _tiled(table, times.attention_pair_flops)


def gradients(table: Table) -> dict[str, Array]:
    """The same, backward: queries, outputs and their gradients; keys, values and theirs."""
    found = _tiled(table, times.attention_backward_pair_flops)
    return found | {"moved_bytes": np.asarray(times.attention_backward_bytes(found["moved_bytes"]))}


def _tiled(table: Table, pair_flops: Callable[[Array, Array], Array | float]) -> dict[str, Array]:
    number = table.dim
    batch, heads, kv_heads = number("b"), number("h_q"), number("h_kv")
    queries, keys = number("s_q"), number("s_kv")
    window = windows(table)
    size = np.array([1.0 if dtype in EIGHT_BITS else 2.0 for dtype in table.text("dtype")])
    width = number("d_qk") + number("d_v")
    seen = times.seen_keys(queries, keys, window)
    moved = times.attention_bytes(batch, heads, kv_heads, queries, seen, width, size)
    causal = np.array([not FULL.search(notes) for notes in table.text("notes")], np.float64)
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "causal": causal,
        "window": window, "pair_flops": np.asarray(pair_flops(number("d_qk"), number("d_v"))),
        "moved_bytes": np.asarray(moved),
    }  # fmt: skip


def windows(table: Table) -> Array:
    """Keys of the sliding window of each row; 0: none."""
    found = [WINDOW.search(notes) for notes in table.text("notes")]
    return np.array([float(m[1]) if m else 0.0 for m in found])


def _family(op: str, shape: Callable[[Table], Mapping[str, Array]]) -> KernelFamily:
    return KernelFamily(
        name=op, ops=frozenset({op}), formula=times.tiled_attention_s, shape=shape, device=device_arguments,
        coefficients=COEFFICIENTS,
    )  # fmt: skip


FAMILIES: Final = (_family("attention_fwd", whole_sequences), _family("attention_bwd", gradients))
