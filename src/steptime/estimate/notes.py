"""What a reader has to know about an estimate before using its numbers."""

from __future__ import annotations

from steptime.num import ceil_div
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.terms import Terms

HOST = "host"
"""The group of terms in which the device waits for the host."""


def uneven_batch(job: Job, plans: Plans) -> tuple[str, ...]:
    r"""A note where the step takes as long as that of a larger batch: :math:`d \cdot m \lceil \lceil B/d \rceil / m
    \rceil > B`.

    :math:`B` are the sequences of the global batch, :math:`d` the replicas, :math:`m` the sequences of a micro-batch.

    >>> from types import SimpleNamespace as Some
    >>> uneven_batch(Some(global_batch=96), Plans(dp=32))
    ()
    >>> "dp 32 x 4 x 1 = 128 sequences" in uneven_batch(Some(global_batch=100), Plans(dp=32))[0]
    True
    """
    batch, dp, size = job.global_batch, int(plans.dp), int(plans.micro_batch)
    micro_batches = int(ceil_div(ceil_div(batch, dp), size))
    charged = dp * micro_batches * size
    if charged == batch or dp > batch:
        return ()
    return (
        f"{batch} sequences are no multiple of dp {dp} x micro_batch {size}: the step takes as long as one of "
        f"dp {dp} x {micro_batches} x {size} = {charged} sequences; rates and MFU count the {batch}",
    )


def micro_batch_taken(time: Terms, share: int) -> tuple[str, ...]:
    """A note where no micro-batch was given and a replica has more than one sequence.

    >>> micro_batch_taken(Terms({"compute/x_s": 3.0, "host/y_s": 1.0}), 8)
    ('micro_batch was not given: 1 was taken; a replica has 8 sequences',)
    """
    if share <= 1:
        return ()
    groups = time.rollup(1)
    paced = max(groups, key=lambda group: groups[group]) == HOST
    larger = "; the host paces the step, so a larger one would help" if paced else ""
    return (f"micro_batch was not given: 1 was taken; a replica has {share} sequences{larger}",)
