"""Products whose operands have a narrow format of their own: quantisation passes, and narrow inputs that are kept.

Before a product its input is read and written in the narrow format (with a transposed copy where the product that
makes the weights' gradient needs one); in backward so is the gradient of its output. An input that is not kept, or
whose product runs again, is quantised again in the backward pass. Trained weights are quantised once per step, but
each time that ZeRO-3 gathers them. The head and the router stay in the dtype of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from steptime.num import Num, maximum, where
from steptime.plan.job import Job, Precision, replica_micro_batches
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, move

NARROW = ("matmul", "grouped_matmul", "frozen_matmul", "frozen_grouped_matmul")
"""Products that take operands in a narrow format."""
WIDE = {"matmul": "wide_matmul", "frozen_matmul": "frozen_wide_matmul"}
"""Those of them that have a form in the dtype of attention."""
NARROW_DTYPES = frozenset({"fp8", "fp4"})
"""Formats of matrix units narrower than 16 bits."""


def quantised(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer with quantisation beside each product."""
    precision = job.precision
    narrow = precision.quantised_bytes
    if narrow is None:
        return list(rows)
    micro_batches = replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch)
    out: list[Row] = []
    for row in rows:
        if row.operator in NARROW:
            out += _passes(row, precision, narrow)
            if row.trained:
                out += _weight_passes(row, precision, narrow, plans, micro_batches)
            kept = row.kept_bytes * (narrow / precision.element_bytes)
            row = replace(row, kept_bytes=kept)
        out.append(row)
    return out


def _passes(row: Row, precision: Precision, narrow: float) -> list[Row]:
    """Those of a product's input and, in backward, of its output's gradient."""
    m, n, k = row.shape["m"], row.shape["n"], row.shape["k"]
    read, written = _read_bytes(precision), narrow * _copies(precision)
    forward = move(f"{row.name}_quantise", row.block, m * k * read, m * k * written,
                   operator="move_forward", share=row.share)  # fmt: skip
    backward = move(f"{row.name}_quantise_gradient", row.block, m * n * read, m * n * written,
                    operator="move_backward", share=row.share)  # fmt: skip
    return [replace(forward, recomputed=_again(row)), backward]


def _weight_passes(row: Row, precision: Precision, narrow: float, plans: Plans, micro_batches: Num) -> list[Row]:
    """Those of its weights: with the first micro-batch of a step; after each gathering of ZeRO-3, one copy each."""
    gathered = where(plans.zero >= 3, 1.0, 0.0) * plans.shared_out(experts=row.expert)
    once = move(f"{row.name}_quantise_weights", row.block, row.weights * _read_bytes(precision),
                row.weights * narrow * _copies(precision), operator="move_forward",
                share=row.share * (1 - gathered) / (micro_batches * plans.forwards))  # fmt: skip
    each = move(f"{row.name}_quantise_gathered", row.block, row.weights * precision.element_bytes,
                row.weights * narrow, share=row.share * gathered)  # fmt: skip
    return [made for made in (once, each) if np.any(made.share)]


def _read_bytes(precision: Precision) -> float:
    """Bytes read of an element that is quantised: twice where its tensor's largest magnitude is sought first."""
    return precision.element_bytes * (2 if precision.scaled_now else 1)


def _copies(precision: Precision) -> int:
    """Copies of an operand that are written: one, or also the transposed one."""
    return 2 if precision.transposed_copy else 1


def _again(row: Row) -> Num:
    """Share of a product's input that is quantised again in the backward pass: of what is made or runs again."""
    if not row.trained:
        return row.recomputed
    return maximum(row.recomputed, row.remade_bytes / maximum(row.kept_bytes + row.remade_bytes, 1.0))


def wide(rows: Iterable[Row], precision: Precision) -> list[Row]:
    """The rows of the ends of a model: their products stay in the dtype of attention."""
    if precision.quantised_bytes is None:
        return list(rows)
    return [replace(row, operator=WIDE.get(row.operator, row.operator)) for row in rows]
