"""Families of operators that the memory bounds: what each measured row moves, and what is fitted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from steptime.cost import elementwise
from steptime.cost.memory_bound import memory_bound_s
from steptime.estimate.kernels import ONE_BLOCK, SOFTMAX_FLOPS, device_numbers
from steptime.hardware.records import Device
from steptime.lab.calibrate.family import Coefficient, KernelFamily, dtype_of, rows_like
from steptime.lab.calibrate.table import Table
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Array

ARGUMENTS: Final = ("moved_bytes", "rows", "reread_bytes", "vector_flops")
BINARY: Final = re.compile(r"opname=(add|mul|sub|div|pow);|target=<built-in function (add|sub)>")
COSTLY: Final = {"div": 4.0, "pow": 16.0, "tanh": 12.0, "gelu": 12.0, "truediv": 4.0}
"""Vector operations per element beside 1 for sums and products (a count of instructions, not measured)."""

COEFFICIENTS: Final = (
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
    for c, v in zip(COEFFICIENTS, (0, 3e-7, 0, 1.0, 1e-4, 0.1, 0, 0.01), strict=True)
)
"""For operators with a few rows each: launch, share of the bandwidth, passes of an implementation in many kernels.

Their timers flush the cache, or the operators are large: no effect of the cache."""

BY_ROWS: Final = tuple(
    Coefficient(name=c.name, start=1000.0, low=0.1, high=1e5) if c.name == "row_bytes" else c for c in GENERIC
)
"""For kernels that take a row at a time: rows as narrow as a head cost as much as much wider ones. Where nothing but
the launch can say so, it comes out as long as that of the narrowest rows, and all others too slow."""


def device_arguments(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers of :func:`memory_bound_s`, whatever the dtype; a fit has measured all of its rows."""
    del dtype
    return {**device_numbers(device), "most_rows": math.inf}


def element_bytes(table: Table) -> Array:
    """Bytes of one element of each row, 4 where the table does not say."""
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
    """The shape, unreadable (NaN) on rows that do not match the expressions."""
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
    """Gated activation; `numel` counts what goes in, twice what comes out."""
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
    coefficients: tuple[Coefficient, ...] = COEFFICIENTS,
) -> KernelFamily:
    """A family of memory-bound rows of one value of ``op``."""
    return KernelFamily(
        name=name, ops=frozenset({op}), formula=memory_bound_s, shape=shape, device=device_arguments,
        coefficients=coefficients,
    )  # fmt: skip


TORCH: Final = "^neusight"
BY_ROW: Final = "pytorch"
"""Norms that take a row at a time, among those of one source."""
FAMILIES: Final = (
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
