"""Rows that copy: operands into a narrow format, and weights and gradients that ZeRO and FSDP gather and scatter.

Quantisation, where the operands of a product have a narrow format:

* A product's input is quantised before it; in backward so is the gradient of its output. Where the product that makes
  the gradient of trained weights takes a transposed copy of both, the pass writes two copies.
* What tensor ranks gather, each quantises its shard before gathering, and it travels in the narrow format. The
  transposed copy of a tensor with one scale is then made of the whole; formats with a scale per block are quantised
  along rows and along columns, and of the gradient of an output both travel.
* An input that is not kept, or whose product runs again, is quantised again in the backward pass.
* Trained weights are quantised once per step, but each time that ZeRO-3 gathers them; frozen weights stay quantised.
* The head and the router stay in the dtype in which weights and activations are stored.

Source: Transformer Engine, `gather_along_first_dim` (`pytorch/distributed.py`) and `pytorch/module/linear.py`; torchao,
`float8_tensor_parallel.py`, which also gathers in FP8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from steptime.num import Num, maximum, where
from steptime.plan.job import Job, Precision, replica_micro_batches
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, Transfer, move

NARROW = ("matmul", "grouped_matmul", "frozen_matmul", "frozen_grouped_matmul")
"""Products that take operands in a narrow format."""
WIDE = {"matmul": "wide_matmul", "frozen_matmul": "frozen_wide_matmul"}
"""Narrow product -> its form with operands as stored, for products that have one."""
NARROW_DTYPES = frozenset({"fp8", "fp4"})
"""Formats of matrix units narrower than 16 bits."""


def quantised(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer with the quantisation passes of each product."""
    precision = job.precision
    if precision.quantised_bytes is None:
        return list(rows)
    micro_batches = replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch)
    quantiser = _Quantiser(precision, precision.quantised_bytes, plans, micro_batches / job.updates(plans))
    return [made for row in rows for made in (quantiser.product(row) if row.operator in NARROW else [row])]


def wide(rows: Iterable[Row], precision: Precision) -> list[Row]:
    """Rows of the ends of a model, whose products take operands as stored."""
    if precision.quantised_bytes is None:
        return list(rows)
    return [replace(row, operator=WIDE.get(row.operator, row.operator)) for row in rows]


@dataclass(frozen=True, slots=True)
class _Quantiser:
    """Quantisation passes of a recipe around the products."""

    precision: Precision
    narrow_bytes: float
    """Bytes of an element of an operand, with its scales."""
    plans: Plans
    micro_batches: Num
    """Micro-batches per update of the weights."""

    def product(self, row: Row) -> list[Row]:
        """Rows of a product with narrow operands, and of the passes that make these."""
        made = [*self._input(row), *self._output_gradient(row)]
        if row.trained:
            made += self._weights(row)
        return [*made, self._narrowed(row)]

    def _input(self, row: Row) -> list[Row]:
        elements = row.shape["m"] * row.shape["k"]
        first, *later = self._operand(row, "quantise", elements, gathered=_gathers_input(row))
        return [replace(first, operator="move_forward", recomputed=_again(row)), *later]

    def _output_gradient(self, row: Row) -> list[Row]:
        elements = row.shape["m"] * row.shape["n"]
        return self._operand(row, "quantise_gradient", elements, gathered=_gathers_output_gradient(row))

    def _operand(self, row: Row, name: str, elements: Num, *, gathered: bool) -> list[Row]:
        """Backward passes over an operand of ``elements`` elements; if gathered, each tensor rank has a shard."""
        shards = where(self.plans.sp > 0, self.plans.tp, 1) if gathered else 1
        copies: Num = self._copies(row)
        transposed_later: Num = 0.0
        if copies == 2 and not self.precision.block_scaled:
            transposed_later = where(shards > 1, 1.0, 0.0)
            copies = copies - transposed_later
        each = elements / shards
        made = [
            move(
                f"{row.name}_{name}",
                row.block,
                each * self._read_bytes,
                each * self.narrow_bytes * copies,
                operator="move_backward",
                share=row.share,
            )
        ]
        if np.any(transposed_later):
            whole_bytes = elements * self.narrow_bytes
            made.append(
                move(
                    f"{row.name}_{name}_transpose",
                    row.block,
                    whole_bytes,
                    whole_bytes,
                    operator="move_backward",
                    share=row.share * transposed_later,
                )
            )
        return made

    def _weights(self, row: Row) -> list[Row]:
        """Passes over weights: at the first micro-batch after an update, or after each gathering of ZeRO-3."""
        gathered = where(self.plans.shares("weights"), 1.0, 0.0) * self.plans.shared_out(experts=row.expert)
        forwards = self.micro_batches * (1 + self.plans.recomputed)
        narrow_bytes = row.weights * self.narrow_bytes
        once = move(
            f"{row.name}_quantise_weights",
            row.block,
            row.weights * self._read_bytes,
            narrow_bytes * self._copies(row),
            operator="move_forward",
            share=row.share * (1 - gathered) / forwards,
        )
        each = move(
            f"{row.name}_quantise_gathered",
            row.block,
            row.weights * self.precision.element_bytes,
            narrow_bytes,
            share=row.share * gathered,
        )
        return [made for made in (once, each) if np.any(made.share)]

    def _narrowed(self, row: Row) -> Row:
        """The product with its kept input and its gathered operands in the narrow format."""
        ratio = self.narrow_bytes / self.precision.element_bytes
        both = _gathers_output_gradient(row) and self.precision.block_scaled
        return replace(
            row,
            kept_bytes=row.kept_bytes * ratio,
            forward=_gathering(row.forward, ratio),
            backward=_gathering(row.backward, ratio * (self._copies(row) if both else 1)),
        )

    @property
    def _read_bytes(self) -> float:
        """Bytes read per quantised element: twice its size if a first pass finds the tensor's largest magnitude."""
        return self.precision.element_bytes * (2 if self.precision.scaled_now else 1)

    def _copies(self, row: Row) -> int:
        """Copies of an operand: one, or two with the transposed one for the gradient of trained weights."""
        return 2 if self.precision.transposed_copy and row.trained else 1


def _again(row: Row) -> Num:
    """Share of a product's input that the backward pass quantises again, because it is recomputed."""
    if not row.trained:
        return row.recomputed
    return maximum(row.recomputed, row.remade_bytes / maximum(row.kept_bytes + row.remade_bytes, 1.0))


def _gathers_input(row: Row) -> bool:
    """True if tensor ranks gather a product's input."""
    return any(map(_is_tensor_gather, row.forward))


def _gathers_output_gradient(row: Row) -> bool:
    """True if tensor ranks gather the gradient of a product's output.

    A backward gathering of a product with a gathered input repeats the gathering of the input.
    """
    return any(map(_is_tensor_gather, row.backward)) and not _gathers_input(row)


def _gathering(transfers: Iterable[Transfer], factor: float) -> tuple[Transfer, ...]:
    """The transfers with ``factor`` times the bytes in those that gather over tensor ranks."""
    return tuple(
        replace(each, size_bytes=each.size_bytes * factor) if _is_tensor_gather(each) else each for each in transfers
    )


def _is_tensor_gather(transfer: Transfer) -> bool:
    return transfer.collective == "all_gather" and transfer.axis == "tp"


COPIES = "fsdp"


def unsharded(rows: Iterable[Row], job: Job, plans: Plans, *, end: str = "") -> list[Row]:
    """The rows of a layer, or of an ``end`` of the model, with the copies of their weights and of their gradients.

    With ZeRO-3 each pass gathers and each micro-batch reduces, with ZeRO-2 each micro-batch reduces, otherwise both
    happen once a step. A forward pass that runs again in full uses the weights gathered for the backward pass.
    """
    out = list(rows)
    if not job.copied_parameters:
        return out
    element = job.precision.element_bytes
    shared = [(row, row.weights * row.share * plans.shared_out(experts=row.expert)) for row in out]
    trained: Num = sum(weights for row, weights in shared if row.trained)
    frozen_bytes: Num = sum(weights * row.weight_bytes for row, weights in shared if not row.trained)
    whole = trained * element + frozen_bytes
    micro_batches, updates = replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch), job.updates(plans)
    sharded = where(plans.shares("optimizer") & (whole > 0), 1.0, 0.0)
    recomputed = 0.0 if end else plans.recomputed
    name = f"{end}_copy" if end else "copy"
    made = [
        move(
            f"{name}_out",
            COPIES,
            whole,
            whole,
            operator="move_forward",
            share=sharded * where(plans.shares("weights"), 1.0, updates / (micro_batches * (1.0 + recomputed))),
        ),
        move(
            f"{name}_out_again",
            COPIES,
            whole,
            whole,
            operator="move_backward",
            share=where(plans.shares("weights"), sharded * (1.0 - recomputed), 0.0),
        ),
        move(
            f"{name}_in",
            COPIES,
            trained * element,
            trained * job.gradient_bytes,
            operator="move_backward",
            share=where(trained > 0, sharded * plans.reductions(micro_batches, updates) / micro_batches, 0.0),
        ),
    ]
    return [*out, *(row for row in made if np.any(row.share))]


def boundary_element_bytes(job: Job) -> float:
    """Bytes on the device per element of the input that a recomputed layer keeps."""
    memory, quantised = job.memory, job.adapter is not None and job.adapter.weight_bytes is not None
    if memory.boundaries_on_host:
        return 0.0
    own = job.precision.element_bytes
    return own if memory.stream_bytes is None or not quantised else memory.stream_bytes
