"""Products of a layer beside which their own transfers over ``tp`` run, piece by piece or whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from steptime.cost.collective import ring_behind_share
from steptime.num import where
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Row

SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that sum."""
DENSE_BLOCKS = frozenset({"attention", "mlp"})
"""Blocks whose products do so; those of experts, shared ones included, and the head wait for their transfers."""


def beside_transfers(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer, where ``tp`` overlaps with products that hide what their input or output travels.

    An input that is gathered, or an output that is scattered, goes round the ring of the ``tp`` ranks one shard of the
    sequence at a time (:func:`~steptime.cost.collective.ring_behind_share`), which takes sequence parallelism; without
    it the sum of whole outputs waits for all of them. The ranks write to each other's memory, so that all of them
    share a fast domain.

    Source: `--tp-comm-overlap` of Megatron-Core, which requires `--sequence-parallel` and leaves out experts
    (user buffers of Transformer Engine, which connect the GPUs of one NVLink domain); MegaScale, arXiv 2402.15627,
    section 3.2.
    """
    rows = beside_gradients(rows, job, plans)
    if "tp" not in job.overlap:
        return rows
    behind = where(plans.sp > 0, ring_behind_share(plans.tp), 0.0)
    return [replace(row, overlaps=behind, overlaps_near=True) if _waits(row) else row for row in rows]


def beside_gradients(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer, where a product's backward transfers run beside the two products of its gradients.

    Its input, that sequence parallelism gathers again for the gradient of the weights, travels beside the product that
    makes the gradient of the input; that gradient is summed, scattered or not, beside the product that makes the
    gradient of the weights. Each of the two products is half of the work. A backward pass in two parts has no other
    product at hand, and frozen weights have none.

    Source: Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` (`megatron/core/tensor_parallel/layers.py`).
    """
    if not job.asynchronous_tp or job.splits_backward or job.adapter is not None:
        return list(rows)
    beside = where(plans.sp > 0, 1.0, 0.5)
    return [replace(row, overlaps_backward=beside) if _sums_gradient(row) else row for row in rows]


def _sums_gradient(row: Row) -> bool:
    """Whether it is a product of a dense block whose ranks sum the gradient of its input."""
    return _waits(row) and any(each.collective in SUMS for each in row.backward)


def _waits(row: Row) -> bool:
    """Whether it is a product of a dense block whose input or output travels."""
    return row.operator == "matmul" and row.block in DENSE_BLOCKS and bool(row.forward or row.backward)
