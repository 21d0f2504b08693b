"""Products whose operands have a narrow format of their own: quantisation passes, and narrow inputs that are kept.

Before a product its input is read and written in the narrow format (with a transposed copy where the product that
makes the weights' gradient needs one); in backward so is the gradient of its output. Weights are quantised once per
step and cached, which no row charges. The head and the router stay in the dtype of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from steptime.plan.job import Precision
from steptime.plan.rows import Row, move

NARROW = ("matmul", "grouped_matmul", "frozen_matmul", "frozen_grouped_matmul")
"""Products that take operands in a narrow format."""
NARROW_DTYPES = frozenset({"fp8", "fp4"})
"""Formats of matrix units narrower than 16 bits."""


def quantised(rows: Iterable[Row], precision: Precision) -> list[Row]:
    """The rows of a layer with quantisation beside each product."""
    narrow = precision.quantised_bytes
    if narrow is None:
        return list(rows)
    out: list[Row] = []
    for row in rows:
        if row.operator in NARROW:
            out += _passes(row, precision, narrow)
            kept = row.kept_bytes * (narrow / precision.element_bytes)
            row = replace(row, kept_bytes=kept)
        out.append(row)
    return out


def _passes(row: Row, precision: Precision, narrow: float) -> list[Row]:
    m, n, k = row.shape["m"], row.shape["n"], row.shape["k"]
    element = precision.element_bytes
    copies = 2 if precision.transposed_copy else 1
    forward = move(f"{row.name}_quantise", row.block, m * k * element, m * k * narrow * copies,
                   operator="move_forward", share=row.share)  # fmt: skip
    backward = move(f"{row.name}_quantise_gradient", row.block, m * n * element, m * n * narrow * copies,
                    operator="move_backward", share=row.share)  # fmt: skip
    return [forward, backward]


def wide(rows: Iterable[Row], precision: Precision) -> list[Row]:
    """The rows of the ends of a model: their products stay in the dtype of attention."""
    if precision.quantised_bytes is None:
        return list(rows)
    return [replace(row, operator="wide_matmul") if row.operator == "matmul" else row for row in rows]
