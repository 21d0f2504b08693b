"""Copies of per-parameter sharding: FSDP2 gathers the parameters of a layer in one buffer and copies each out of it.

Gradients are likewise copied, in the dtype in which they are reduced, into the buffer of the reduce-scatter. Both run
where the computation runs (``foreach_all_gather_copy_out`` and ``foreach_reduce_scatter_copy_in`` of PyTorch's
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``). Flat parameters (FSDP1) are gathered in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from steptime.num import Num, where
from steptime.plan.job import Job, replica_micro_batches
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, move

BLOCK = "fsdp"


def unsharded(rows: Iterable[Row], job: Job, plans: Plans, *, end: str = "") -> list[Row]:
    """The rows of a layer, or of an ``end`` of the model, with the copies of their weights and of their gradients.

    With ZeRO-3 each pass gathers and each micro-batch reduces, with ZeRO-2 each micro-batch reduces, else a step does
    either once. A forward pass that runs again in full finds its weights gathered for the backward pass.
    """
    out = list(rows)
    if not job.copied_parameters:
        return out
    element = job.precision.element_bytes
    shared = [(row, row.weights * row.share * plans.shared_out(experts=row.expert)) for row in out]
    trained: Num = sum(weights for row, weights in shared if row.trained)
    frozen_bytes: Num = sum(weights * row.weight_bytes for row, weights in shared if not row.trained)
    whole = trained * element + frozen_bytes
    micro_batches = replica_micro_batches(job.global_batch, plans.dp, plans.micro_batch)
    sharded = where(plans.shares("optimizer") & (whole > 0), 1.0, 0.0)
    recomputed = 0.0 if end else plans.recomputed
    name = f"{end}_copy" if end else "copy"
    made = [
        move(f"{name}_out", BLOCK, whole, whole, operator="move_forward",
             share=sharded * where(plans.shares("weights"), 1.0, 1.0 / (micro_batches * (1.0 + recomputed)))),
        move(f"{name}_out_again", BLOCK, whole, whole, operator="move_backward",
             share=where(plans.shares("weights"), sharded * (1.0 - recomputed), 0.0)),
        move(f"{name}_in", BLOCK, trained * element, trained * job.gradient_bytes, operator="move_backward",
             share=where(trained > 0, sharded * plans.reductions(micro_batches) / micro_batches, 0.0)),
    ]  # fmt: skip
    return [*out, *(row for row in made if np.any(row.share))]
