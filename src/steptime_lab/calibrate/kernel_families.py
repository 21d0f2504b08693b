"""All families of kernels but the matrix products, in the order in which a row is matched to its model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from steptime.cost import attention as times
from steptime.cost import elementwise
from steptime.cost.convolution import convolution_s, implicit_product, output_size
from steptime.cost.memory_bound import memory_bound_s
from steptime.cost.recurrent import recurrent_s
from steptime.estimate.kernels import ONE_BLOCK, SOFTMAX_FLOPS, device_numbers
from steptime.hardware.records import Curve, Device
from steptime.measure.table import Table
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Array
from steptime_lab.calibrate.family import Coefficient, KernelFamily, dtype_of, rows_like
from steptime_lab.calibrate.kernel_curves import Cell, cells, curves_of

WINDOW: Final = re.compile(r"window=(\d+)")
FULL: Final = re.compile(r"non-causal|mask=no_mask")
EIGHT_BITS: Final = ("fp8", "mxfp8")


def _held(name: str, value: float) -> Coefficient:
    return Coefficient(name=name, start=value, low=value, high=value)


ATTENTION_COEFFICIENTS: Final = (
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


def attention_device(device: Device, dtype: str) -> dict[str, float]:
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
    """Shape arguments of the backward pass, which moves queries, keys, values, outputs and all their gradients."""
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
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "queries": queries,
        "keys": keys,
        "causal": causal,
        "window": window,
        "pair_flops": np.asarray(pair_flops(number("d_qk"), number("d_v"))),
        "moved_bytes": np.asarray(moved),
    }


def windows(table: Table) -> Array:
    """Keys of the sliding window of each row; 0: none."""
    found = [WINDOW.search(notes) for notes in table.text("notes")]
    return np.array([float(m[1]) if m else 0.0 for m in found])


def _attention(op: str, shape: Callable[[Table], Mapping[str, Array]]) -> KernelFamily:
    return KernelFamily(
        name=op,
        ops=frozenset({op}),
        formula=times.tiled_attention_s,
        shape=shape,
        device=attention_device,
        coefficients=ATTENTION_COEFFICIENTS,
    )


ATTENTION: Final = (_attention("attention_fwd", whole_sequences), _attention("attention_bwd", gradients))


ARGUMENTS: Final = ("moved_bytes", "rows", "reread_bytes", "vector_flops")
BINARY: Final = re.compile(r"opname=(add|mul|sub|div|pow);|target=<built-in function (add|sub)>")
COSTLY: Final = {"div": 4.0, "pow": 16.0, "tanh": 12.0, "gelu": 12.0, "truediv": 4.0}
"""Vector operations per element, 1 for sums and products (a count of instructions, not measured)."""

MEMORY_BOUND_COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=3e-6, low=3e-7, high=1e-4),
    Coefficient(name="floor_s", start=4e-6, low=3e-7, high=2e-4),
    Coefficient(name="efficiency", start=0.8, low=0.02, high=1.0),
    Coefficient(name="cache_gain", start=1.5, low=0.1, high=8.0),
    Coefficient(name="cache_share", start=0.5, low=0.05, high=4.0),
    Coefficient(name="row_bytes", start=10.0, low=0.1, high=5000.0),
    Coefficient(name="reread", start=0.1, low=0.01, high=10.0),
    Coefficient(name="vector_cost", start=1.0, low=0.01, high=100.0),
)
GENERIC: Final = tuple(
    c if c.name in ("launch_s", "efficiency", "reread") else Coefficient(name=c.name, start=v, low=v, high=v)
    for c, v in zip(MEMORY_BOUND_COEFFICIENTS, (0, 3e-7, 0, 1.0, 1e-4, 0.1, 0, 0.01), strict=True)
)
"""Coefficients of operators with a few rows each: launch, share of the bandwidth, passes of many kernels.

The cache has no effect: their timers flush it, or the operators are large."""

BY_ROWS: Final = tuple(
    Coefficient(name=c.name, start=1000.0, low=0.1, high=1e5) if c.name == "row_bytes" else c for c in GENERIC
)
"""Coefficients of kernels that take a row at a time: rows as narrow as a head cost as much as much wider ones. Without
``row_bytes`` the launch would come out as long as the narrowest rows, and all other rows too slow."""


def memory_bound_device(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers of :func:`memory_bound_s` for any dtype, without a limit of rows: fits measured all."""
    del dtype
    return {**device_numbers(device), "most_rows": math.inf}


def element_bytes(table: Table) -> Array:
    """Bytes of one element of each row; 4 where the dtype is unknown."""
    known = {name: ELEMENT_BYTES.get(dtype_of(name) or name, 4) for name in set(table.text("dtype"))}
    return np.array([known[name] for name in table.text("dtype")], np.float64)


def elements(table: Table) -> tuple[Array, Array, Array]:
    """Rows, columns and elements; a single column where a row has none."""
    rows = table.dim("rows")
    columns = np.where(np.isnan(table.number("cols")), 1.0, table.dim("cols"))
    numel = np.where(np.isnan(table.number("numel")), rows * columns, table.dim("numel"))
    return rows, columns, numel


def columns(moved: Array, rows: Array, reread: Array | float = 0.0, flops: Array | float = 0.0) -> dict[str, Array]:
    """The shape arguments of :func:`memory_bound_s`."""
    return {
        "moved_bytes": moved,
        "rows": rows,
        "reread_bytes": np.broadcast_to(np.asarray(reread, np.float64), moved.shape),
        "vector_flops": np.broadcast_to(np.asarray(flops, np.float64), moved.shape),
    }


Shape = Callable[[Table], dict[str, Array]]


def only(shape: Shape, source: str, notes: str = "", kernel: str = "") -> Callable[[Table], Mapping[str, Array]]:
    """A function that gives the shape, unreadable (NaN) on rows that do not match the expressions."""
    wanted = {"source": source, "notes": notes, "kernel": kernel}

    def masked(table: Table) -> dict[str, Array]:
        keep = rows_like(table, wanted)
        out = {name: np.full(table.rows, np.nan) for name in ARGUMENTS}
        for name, values in shape(table.take(keep)).items():
            out[name][keep] = values
        return out

    return masked


def maps(table: Table) -> dict[str, Array]:
    """One-to-one maps: two tensors, or three for a sum of two."""
    rows, _, numel = elements(table)
    size = element_bytes(table)
    notes = table.text("notes")
    tensors = np.array([3.0 if BINARY.search(n) or "op=add" in n else 2.0 for n in notes])
    names = (re.search(r"opname=(\w+?)u?;", n) for n in notes)
    costs = np.array([COSTLY.get(m[1], 1.0) if m else 1.0 for m in names])
    return columns(tensors * numel * size, rows, 0.0, costs * numel)


def norms(table: Table) -> dict[str, Array]:
    """LayerNorm and RMSNorm."""
    rows, width, numel = elements(table)
    moved = elementwise.layer_norm_bytes(numel, rows, width, element_bytes(table))
    return columns(np.asarray(moved), rows, 0.0, elementwise.layer_norm_flops(numel))


def gradients_of_norms(table: Table) -> dict[str, Array]:
    """Gradients of norms."""
    rows, width, numel = elements(table)
    moved = elementwise.layer_norm_backward_bytes(numel, width, element_bytes(table))
    return columns(np.asarray(moved), rows)


def softmaxes(table: Table) -> dict[str, Array]:
    """Softmax: rows that one block cannot hold are read again."""
    rows, width, numel = elements(table)
    size = element_bytes(table)
    return columns(2 * numel * size, rows, np.where(width > ONE_BLOCK, numel * size, 0.0), SOFTMAX_FLOPS * numel)


def gradients_of_softmax(table: Table) -> dict[str, Array]:
    """Gradient of softmax: read the output and its gradient, write."""
    rows, width, numel = elements(table)
    size = element_bytes(table)
    return columns(3 * numel * size, rows, np.where(width > ONE_BLOCK, 2 * numel * size, 0.0))


def dropouts(table: Table) -> dict[str, Array]:
    """Dropout with a mask of bytes; nothing at inference."""
    rows, _, numel = elements(table)
    idle = np.array(["-inf-" in n for n in table.text("notes")])
    moved = np.where(idle, 0.0, elementwise.dropout_bytes(numel, element_bytes(table), 1))
    return columns(moved, rows, 0.0, np.where(idle, 0.0, 10 * numel))


def lookups(table: Table) -> dict[str, Array]:
    """Embedding; a table split over devices is masked before and after."""
    rows, _, numel = elements(table)
    size = element_bytes(table)
    split = np.array([bool(re.search(r"tp=(?!1\b)\d", n)) for n in table.text("notes")])
    return columns(2 * numel * size, rows, np.where(split, numel * size, 0.0))


def gated(table: Table) -> dict[str, Array]:
    """Gated activation; `numel` counts the elements of the input, twice those of the output."""
    rows, _, numel = elements(table)
    return columns(1.5 * numel * element_bytes(table), rows, 0.0, elementwise.gated_flops(numel / 2))


def rotary(table: Table) -> dict[str, Array]:
    """Rotary embedding of queries and keys, in place."""
    rows, _, numel = elements(table)
    moved = elementwise.map_bytes(numel, element_bytes(table))
    return columns(np.asarray(moved), rows, 0.0, elementwise.rope_flops(numel))


def family(
    name: str,
    op: str,
    shape: Callable[[Table], Mapping[str, Array]],
    coefficients: tuple[Coefficient, ...] = MEMORY_BOUND_COEFFICIENTS,
) -> KernelFamily:
    """A family of memory-bound rows of one value of ``op``."""
    return KernelFamily(
        name=name,
        ops=frozenset({op}),
        formula=memory_bound_s,
        shape=shape,
        device=memory_bound_device,
        coefficients=coefficients,
    )


TORCH: Final = "^neusight"
BY_ROW: Final = "pytorch"
"""Norms that take a row at a time, among those of one source."""
MEMORY_BOUND: Final = (
    family("elementwise", "elementwise", only(maps, "^neusight|^vidur", r"^(?!.*(rope|mlp_act|function pow>))")),
    family("activation", "elementwise", only(gated, "^vidur", "op=mlp_act")),
    family("rope", "elementwise", only(rotary, "^vidur", "op=attn_rope")),
    family("layernorm", "layernorm", only(norms, "^neusight|^vidur")),
    *(
        family(f"{op}_{kernel}", op, only(shape, "^cudnn", "", f"^{kernel}$"), BY_ROWS if kernel == BY_ROW else GENERIC)
        for op, shape in (("layernorm", norms), ("layernorm_bwd", gradients_of_norms))
        for kernel in ("pytorch", "torch_compile")
    ),
    family("layernorm_bwd", "layernorm_bwd", only(gradients_of_norms, TORCH), GENERIC),
    family("softmax", "softmax", only(softmaxes, TORCH)),
    family("softmax_bwd", "softmax_bwd", only(gradients_of_softmax, TORCH), GENERIC),
    family("dropout", "dropout", only(dropouts, TORCH)),
    family("embedding", "embedding", only(lookups, "^neusight|^vidur")),
)


CONVOLUTION_COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=2e-5, low=1e-6, high=5e-4),
    Coefficient(name="efficiency", start=0.6, low=0.02, high=1.0),
    Coefficient(name="memory_efficiency", start=0.5, low=0.02, high=1.0),
    Coefficient(name="tail", start=0.5, low=0.01, high=1.0),
    Coefficient(name="tile", start=64.0, low=64.0, high=64.0),
    Coefficient(name="start_depth", start=50.0, low=1.0, high=2000.0),
    Coefficient(name="winograd", start=1.3, low=1.0, high=2.25),
)


def convolution_device(device: Device, dtype: str) -> dict[str, float]:
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
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "moved_bytes": moved,
        "winograd_taps": small.astype(np.float64),
    }


def forward(table: Table) -> dict[str, Array]:
    """Shape arguments of the forward pass: a product of pixels x outputs, summed over inputs and taps."""
    pixels, inward, outward, taps, moved = geometry(table)
    return _arguments(table, pixels, inward, outward, taps, moved)


def data_gradient(table: Table) -> dict[str, Array]:
    """Shape arguments of the data gradient: a product of pixels x inputs, summed over outputs and taps."""
    pixels, inward, outward, taps, moved = geometry(table)
    return _arguments(table, pixels, outward, inward, taps, moved)


def weight_gradient(table: Table) -> dict[str, Array]:
    """Shape arguments of the weight gradient: those of the forward pass, as blocks split the pixels."""
    return forward(table)


def _convolution(name: str, shape: Callable[[Table], Mapping[str, Array]]) -> KernelFamily:
    return KernelFamily(
        name=name,
        ops=frozenset({name}),
        formula=convolution_s,
        shape=shape,
        device=convolution_device,
        coefficients=CONVOLUTION_COEFFICIENTS,
    )


CONVOLUTION: Final = (
    _convolution("conv_fwd", forward),
    _convolution("conv_bwd_data", data_gradient),
    _convolution("conv_bwd_weight", weight_gradient),
)


STEPS: Final = {
    ("Vanilla", 1760): 50, ("Vanilla", 2048): 50, ("Vanilla", 2560): 50, ("LSTM", 512): 25, ("LSTM", 1024): 25,
    ("LSTM", 2048): 25, ("LSTM", 4096): 25, ("LSTM", 1536): 50, ("LSTM", 256): 150, ("GRU", 512): 1,
    ("GRU", 1024): 1500,
}  # fmt: skip
"""Time steps of the benchmark by cell and width; those of the other widths are not unique (DeepBench, problem list)."""
GATES: Final = {"Vanilla": 1.0, "GRU": 3.0, "LSTM": 4.0}
CELL: Final = re.compile(r"cell=(\w+);hidden=(\d+)")
RECURRENT_COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=5e-5, low=1e-6, high=1e-3),
    Coefficient(name="step_s", start=1e-5, low=1e-7, high=1e-3),
    Coefficient(name="efficiency", start=0.5, low=0.02, high=1.0),
    Coefficient(name="batch_half", start=20.0, low=0.1, high=300.0),
    Coefficient(name="weight_reuse", start=1.0, low=0.05, high=50.0),
)


def recurrent(table: Table) -> dict[str, Array]:
    """Arguments of :func:`recurrent_s`: one product per time step in each of the three passes."""
    cells = [CELL.search(notes) for notes in table.text("notes")]
    keys = [(m[1], int(m[2])) if m else ("", 0) for m in cells]
    batch = table.dim("b")
    return {
        "batch": batch,
        "hidden": np.array([float(h) for _, h in keys]),
        "gates": np.array([GATES.get(cell, np.nan) for cell, _ in keys]),
        "steps": np.array([float(STEPS.get(key, np.nan)) for key in keys]),
        "element_bytes": element_bytes(table),
        "products": np.ones(len(batch)),
    }


RECURRENT: Final = tuple(
    KernelFamily(
        name=op,
        ops=frozenset({op}),
        formula=recurrent_s,
        shape=recurrent,
        device=attention_device,
        coefficients=RECURRENT_COEFFICIENTS,
    )
    for op in ("rnn_fwd", "rnn_bwd_data", "rnn_bwd_weight")
)


BY_DTYPE: Final[tuple[KernelFamily, ...]] = (*ATTENTION, *CONVOLUTION, *RECURRENT)
"""One curve per dtype."""
BYTES_ONLY: Final[tuple[KernelFamily, ...]] = MEMORY_BOUND
"""One curve for all dtypes, kept as dtype ``any``: the shape arguments are in bytes."""
FAMILIES: Final[tuple[KernelFamily, ...]] = (*BY_DTYPE, *BYTES_ONLY)
"""A row belongs to the first family whose shape arguments are finite for it (see ``family.readable``)."""


def all_cells(table: Table) -> Iterator[Cell]:
    """Cells of all families in the table."""
    yield from cells(table, BY_DTYPE, by_dtype=True)
    yield from cells(table, BYTES_ONLY, by_dtype=False)


def kernel_curves(table: Table) -> dict[str, list[Curve]]:
    """Curves by device name, and under ``generic`` those for devices without measurements."""
    return curves_of(all_cells(table))
