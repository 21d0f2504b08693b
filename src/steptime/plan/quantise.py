"""Products whose operands have a narrow format of their own: quantisation passes, and narrow inputs that are kept.

Before a product its input is read and written in the narrow format (with a transposed copy where the product that
makes the weights' gradient needs one); in backward so is the gradient of its output. What tensor ranks gather, each
quantises its shard of before, so that it travels in the narrow format; a transposed copy of a tensor with one scale
is then made of the whole. Formats with a scale per block are quantised along rows and along columns: of the gradient
of an output both travel. An input that is not kept, or whose product runs again, is quantised again in the backward
pass. Trained weights are quantised once per step, but each time that ZeRO-3 gathers them. The head and the router
stay in the dtype of attention.

Source: Transformer Engine, `gather_along_first_dim` (`pytorch/distributed.py`) and `pytorch/module/linear.py`; torchao,
`float8_tensor_parallel.py`, which also gathers in FP8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from steptime.num import Num, maximum, where
from steptime.plan.job import Job, Precision, replica_micro_batches
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, Transfer, move

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
            out += _passes(row, precision, narrow, plans)
            if row.trained:
                out += _weight_passes(row, precision, narrow, plans, micro_batches)
            kept = row.kept_bytes * (narrow / precision.element_bytes)
            row = _gathering(replace(row, kept_bytes=kept), precision, narrow)
        out.append(row)
    return out


def _passes(row: Row, precision: Precision, narrow: float, plans: Plans) -> list[Row]:
    """Those of a product's input and, in backward, of its output's gradient."""
    m, n, k = row.shape["m"], row.shape["n"], row.shape["k"]
    shards = where(plans.sp > 0, plans.tp, 1)
    of_input = _operand(row, "quantise", m * k, shards if _enters(row) else 1, precision, narrow)
    of_gradient = _operand(row, "quantise_gradient", m * n, shards if _leaves(row) else 1, precision, narrow)
    forward = replace(of_input[0], operator="move_forward", recomputed=_again(row))
    return [forward, *of_input[1:], *of_gradient]


def _operand(row: Row, name: str, elements: Num, shards: Num, precision: Precision, narrow: float) -> list[Row]:
    """Passes in backward over an operand, each rank's over its shard of it before all gather the whole."""
    each, sharded = elements / shards, where(shards > 1, 1.0, 0.0)
    copies: Num = _copies(precision, row)
    turned_later = copies > 1 and not precision.block_scaled
    if turned_later:
        copies = copies - sharded
    made = [move(f"{row.name}_{name}", row.block, each * _read_bytes(precision), each * narrow * copies,
                 operator="move_backward", share=row.share)]  # fmt: skip
    if turned_later and np.any(sharded):
        made.append(move(f"{row.name}_{name}_transpose", row.block, elements * narrow, elements * narrow,
                         operator="move_backward", share=row.share * sharded))  # fmt: skip
    return made


def _gathers(transfers: Iterable[Transfer]) -> bool:
    return any(_is_gathering(transfer) for transfer in transfers)


def _is_gathering(transfer: Transfer) -> bool:
    return transfer.collective == "all_gather" and transfer.axis == "tp"


def _enters(row: Row) -> bool:
    """Whether tensor ranks gather a product's input."""
    return _gathers(row.forward)


def _leaves(row: Row) -> bool:
    """Whether they gather the gradient of its output."""
    return _gathers(row.backward) and not _enters(row)


def _gathering(row: Row, precision: Precision, narrow: float) -> Row:
    """The product with what tensor ranks gather for it in the narrow format."""
    of_gradient = _copies(precision, row) if _leaves(row) and precision.block_scaled else 1
    ratio = narrow / precision.element_bytes

    def narrowed(transfers: tuple[Transfer, ...], copies: int = 1) -> tuple[Transfer, ...]:
        return tuple(
            replace(each, size_bytes=each.size_bytes * ratio * copies) if _is_gathering(each) else each
            for each in transfers
        )

    return replace(row, forward=narrowed(row.forward), backward=narrowed(row.backward, of_gradient))


def _weight_passes(row: Row, precision: Precision, narrow: float, plans: Plans, micro_batches: Num) -> list[Row]:
    """Those of its weights: with the first micro-batch of a step; after each gathering of ZeRO-3, one copy each."""
    gathered = where(plans.zero >= 3, 1.0, 0.0) * plans.shared_out(experts=row.expert)
    once = move(f"{row.name}_quantise_weights", row.block, row.weights * _read_bytes(precision),
                row.weights * narrow * _copies(precision, row), operator="move_forward",
                share=row.share * (1 - gathered) / (micro_batches * (1 + plans.recomputed)))  # fmt: skip
    each = move(f"{row.name}_quantise_gathered", row.block, row.weights * precision.element_bytes,
                row.weights * narrow, share=row.share * gathered)  # fmt: skip
    return [made for made in (once, each) if np.any(made.share)]


def _read_bytes(precision: Precision) -> float:
    """Bytes read of an element that is quantised: twice where its tensor's largest magnitude is sought first."""
    return precision.element_bytes * (2 if precision.scaled_now else 1)


def _copies(precision: Precision, row: Row) -> int:
    """Copies of an operand that are written: one, or also the transposed one for the gradient of trained weights."""
    return 2 if precision.transposed_copy and row.trained else 1


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
