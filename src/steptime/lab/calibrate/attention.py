"""Families of attention kernels: whole sequences forward and backward, decode, and both in one launch.

Implementations differ by a third on the same shape, so each has a family of its own; the families without a suffix
hold the implementations that training uses (FlashAttention and cuDNN, whatever the framework).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from steptime.cost import attention_time as times
from steptime.estimate.kernels import L2_BYTES
from steptime.hardware.records import Device
from steptime.lab.calibrate.family import Coefficient, KernelFamily
from steptime.lab.calibrate.table import Table
from steptime.num import Array

WINDOW: Final = re.compile(r"window=(\d+)")
STORED: Final = re.compile(r"kv_dtype=(\w+)")
FULL: Final = re.compile(r"non-causal|mask=no_mask")
MIXED: Final = re.compile(r"n_decode=(\d+);kv_decode=(\d+)")
FRAMEWORK: Final = re.compile(r"fw=([^;]*)")
EIGHT_BITS: Final = ("fp8", "mxfp8")


def _held(name: str, value: float) -> Coefficient:
    return Coefficient(name=name, start=value, low=value, high=value)


def tiled_coefficients(tile_rows: float = 128.0) -> tuple[Coefficient, ...]:
    """Coefficients of :func:`~steptime.cost.attention_time.tiled_attention_s`."""
    return (
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
        _held("tile_rows", tile_rows),
    )


def decode_coefficients(group_limit: float = 1e9) -> tuple[Coefficient, ...]:
    """Coefficients of :func:`~steptime.cost.attention_time.attention_decode_s`."""
    shared = group_limit > 1e6
    return (
        Coefficient(name="launch_s", start=1e-5, low=1e-6, high=1e-4),
        Coefficient(name="efficiency", start=0.8, low=0.05, high=1.0),
        Coefficient(name="cache_gain", start=1.0, low=0.1, high=8.0),
        Coefficient(name="fill_keys", start=50.0, low=1.0, high=1000.0),
        Coefficient(name="window_keys", start=50.0, low=1.0, high=2000.0),
        Coefficient(name="tail", start=0.5, low=0.01, high=1.0),
        Coefficient(name="pad_heads", start=16.0, low=1.0, high=64.0),
        Coefficient(name="matrix_efficiency", start=0.3, low=0.01, high=1.0),
        Coefficient(name="overlap", start=2.0, low=1.0, high=6.0),
        _held("group_limit", group_limit),
        _held("unshared", 1e-6) if shared else Coefficient(name="unshared", start=0.3, low=0.001, high=1.0),
        _held("chunk_keys", 128.0),
    )


def device_arguments(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers of the attention models."""
    matrix = device.matrix_flops_per_s
    return {
        "matrix_flops_per_s": matrix.get(dtype, matrix.get("bf16", matrix.get("fp16", max(matrix.values())))),
        "vector_flops_per_s": device.peak_vector_flops_per_s,
        "memory_Bps": device.memory_Bps,
        "l2_bytes": float(device.l2_bytes or L2_BYTES),
        "sm_count": float(device.sm_count or 1),
    }


def implementation(source: str, kernel: str, notes: str, dtype: str) -> str:
    """Name of the implementation behind a row; "" for one that is not told apart: it has the common curves.

    >>> implementation("aiconfigurator_attention", "vllm_flash_attn_fa3", "fw=vllm;kv_dtype=fp8;window=0", "bfloat16")
    'vllm_kv8'
    """
    if source != "aiconfigurator_attention":
        short = {"cudnn_frontend": "cudnn", "simumax": "sdpa", "llmservingsim": "served"}.get(source, "")
        return "served_v0" if short == "served" and notes.startswith("v0") else short
    stored = STORED.search(notes)
    eight = "_kv8" if stored and stored[1] == "fp8" and dtype not in EIGHT_BITS else ""
    named = FRAMEWORK.match(notes)
    framework = named[1] if named else ""
    if "decode" in kernel and "step=0" in notes:
        return f"one_query{eight}"
    if "triton" in kernel:
        return f"triton{eight}"
    if "non-causal" in notes:
        return f"{framework}_encoder" if framework else ""
    if kernel in ("flashinfer", "torch_flow_flashinfer"):
        return f"flashinfer{eight}"
    return f"{framework}{eight}" if framework else ""


def whole_sequences(table: Table) -> dict[str, Array]:
    """Shape arguments of :func:`~steptime.cost.attention_time.tiled_attention_s`, forward."""
    return _tiled(table, times.attention_pair_flops)


def gradients(table: Table) -> dict[str, Array]:
    """The same, backward: queries, outputs and their gradients; keys, values and theirs."""
    found = _tiled(table, times.attention_backward_pair_flops)
    return found | {"moved_bytes": np.asarray(times.attention_backward_bytes(found["moved_bytes"]))}


def _tiled(table: Table, pair_flops: Callable[[Array, Array], Array | float]) -> dict[str, Array]:
    number = table.dim
    batch, heads, kv_heads = number("b"), number("h_q"), number("h_kv")
    queries, keys = number("s_q"), number("s_kv")
    window, size, stored = read_notes(table)
    width = number("d_qk") + number("d_v")
    seen = times.seen_keys(queries, keys, window)
    moved = times.attention_bytes(batch, heads, kv_heads, queries, seen, width, size, stored)
    causal = np.array([not FULL.search(notes) for notes in table.text("notes")], np.float64)
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "causal": causal,
        "window": window, "pair_flops": np.asarray(pair_flops(number("d_qk"), number("d_v"))),
        "moved_bytes": np.asarray(moved),
    }  # fmt: skip


def read_notes(table: Table) -> tuple[Array, Array, Array]:
    """Window (0: none), bytes of an element of the queries, bytes of an element of the cache."""
    texts = list(zip(table.text("notes"), table.text("dtype"), strict=True))
    windows = [WINDOW.search(notes) for notes, _ in texts]
    caches = [STORED.search(notes) for notes, _ in texts]
    size = np.array([1.0 if dtype in EIGHT_BITS else 2.0 for _, dtype in texts])
    stored = np.array([(1.0 if m[1] in EIGHT_BITS else 2.0) if m else s for m, s in zip(caches, size, strict=True)])
    return np.array([float(m[1]) if m else 0.0 for m in windows]), size, stored


def decode(table: Table) -> dict[str, Array]:
    """Shape arguments of :func:`~steptime.cost.attention_time.attention_decode_s`.

    Rows whose notes start with "v0;" give the keys of all sequences.
    """
    window, _, stored = read_notes(table)
    shared = np.array([notes.startswith("v0;") for notes in table.text("notes")])
    batch = np.where(shared, 1.0, table.dim("b"))
    return {
        "batch": batch, "heads": table.dim("h_q"), "kv_heads": table.dim("h_kv"),
        "keys": table.dim("s_kv"), "window": window, "width": table.dim("d_qk") + table.dim("d_v"),
        "kv_bytes": stored,
    }  # fmt: skip


def mixed(table: Table) -> dict[str, Array]:
    """One prefill and some decodes in one launch."""
    found = [MIXED.search(notes) for notes in table.text("notes")]
    pairs = np.array([(float(m[1]), float(m[2])) if m else (np.nan, np.nan) for m in found]).reshape(-1, 2)
    return whole_sequences(table) | {
        "decodes": pairs[:, 0], "decode_keys": pairs[:, 1], "width": table.dim("d_qk") + table.dim("d_v"),
    }  # fmt: skip


Shape = Callable[[Table], Mapping[str, Array]]


def of(shape: Shape, wanted: Callable[[str], bool]) -> Shape:
    """The shape, NaN on rows of other implementations."""

    def masked(table: Table) -> dict[str, Array]:
        texts = zip(table.text("source"), table.text("kernel"), table.text("notes"), table.text("dtype"), strict=True)
        keep = np.array([wanted(implementation(*row)) for row in texts], bool)
        return {name: np.where(keep, values, np.nan) for name, values in shape(table).items()}

    return masked


def _family(
    op: str, suffix: str, formula: Callable[..., Array | float], shape: Shape, fitted: tuple[Coefficient, ...]
) -> KernelFamily:
    wanted = (lambda name: name == suffix) if suffix else (lambda name: name in ("", *COMMON))
    return KernelFamily(
        name=f"{op}_{suffix}" if suffix else op, ops=frozenset({op}), formula=formula, shape=of(shape, wanted),
        device=device_arguments, coefficients=fitted,
    )  # fmt: skip


FRAMEWORKS: Final = ("vllm", "vllm_kv8", "sglang", "sglang_kv8", "trtllm", "trtllm_kv8")
PORTABLE: Final = ("triton", "triton_kv8", "flashinfer", "flashinfer_kv8")
ENCODERS: Final = ("vllm_encoder", "sglang_encoder", "trtllm_encoder")
OTHERS: Final = ("cudnn", "sdpa", "served", "served_v0")
ONE_QUERY: Final = ("one_query", "one_query_kv8")
COMMON: Final = ("vllm", "sglang", "vllm_encoder", "sglang_encoder", "cudnn", "sdpa", "served")
TRTLLM_GROUP: Final = 32
"""Query heads per key head up to which the decode kernel of TensorRT-LLM reads the cache once."""

FAMILIES: Final = (
    *(
        _family("attention_fwd", name, times.tiled_attention_s, whole_sequences, tiled_coefficients())
        for name in (*FRAMEWORKS, *PORTABLE, *ENCODERS, *OTHERS, "")
    ),
    *(_family("attention_fwd", name, times.attention_decode_s, decode, decode_coefficients()) for name in ONE_QUERY),
    *(
        _family("attention_bwd", name, times.tiled_attention_s, gradients, tiled_coefficients())
        for name in ("cudnn", "sdpa", "")
    ),
    *(
        _family(
            "attention_decode", name, times.attention_decode_s, decode,
            decode_coefficients(TRTLLM_GROUP if name.startswith("trtllm") else 1e9),
        )
        for name in (*FRAMEWORKS, *PORTABLE, "served", "served_v0", "")
    ),
    _family("attention_mixed", "", times.mixed_attention_s, mixed, tiled_coefficients()),
)  # fmt: skip
