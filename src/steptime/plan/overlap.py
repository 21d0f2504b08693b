"""Overlap of communication and computation: the rows of a layer whose transfers over ``tp`` overlap, and the rules.

:data:`RULES` has one row for each kind of traffic that can overlap: its stream, the computation that it overlaps with,
what it needs, what it shares, and the formula.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from steptime.cost.collective import ring_behind_share
from steptime.num import where
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Row

SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that sum."""
DENSE_BLOCKS = frozenset({"attention", "mlp"})
"""Blocks whose products overlap with transfers; products of experts, shared ones included, and the head wait."""


def with_overlapped_transfers(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer in which a product overlaps with ``tp`` transfers of its input or output.

    A gathered input, or a scattered output, goes round the ring of the ``tp`` ranks one shard of the sequence at a time
    (:func:`~steptime.cost.collective.ring_behind_share`), which needs sequence parallelism; without it the sum of whole
    outputs waits for all of them. The ranks write to each other's memory, so that all of them have to share a fast
    domain.

    Source: `--tp-comm-overlap` of Megatron-Core, which requires `--sequence-parallel` and leaves out experts
    (user buffers of Transformer Engine, which connect the GPUs of one NVLink domain); MegaScale, arXiv 2402.15627,
    section 3.2.
    """
    rows = with_overlapped_gradients(rows, job, plans)
    if "tp" not in job.overlap:
        return rows
    behind = where(plans.sp > 0, ring_behind_share(plans.tp), 0.0)
    return [replace(row, overlaps=behind, overlaps_near=True) if _waits(row) else row for row in rows]


def with_overlapped_gradients(rows: Iterable[Row], job: Job, plans: Plans) -> list[Row]:
    """The rows of a layer in which a product's backward transfers overlap with the two products of its gradients.

    Its input, which sequence parallelism gathers again for the gradient of the weights, is sent during the product that
    makes the gradient of the input; that gradient is summed, scattered or not, during the product that makes the
    gradient of the weights. Each of the two products is half of the work. A backward pass split in two parts has no
    second product to overlap with, nor have frozen weights.

    Source: Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` (`megatron/core/tensor_parallel/layers.py`).
    """
    if not job.asynchronous_tp or job.splits_backward or job.adapter is not None:
        return list(rows)
    share = where(plans.sp > 0, 1.0, 0.5)
    return [replace(row, overlaps_backward=share) if _sums_gradient(row) else row for row in rows]


def _sums_gradient(row: Row) -> bool:
    """True for a product of a dense block whose ranks sum the gradient of its input."""
    return _waits(row) and any(each.collective in SUMS for each in row.backward)


def _waits(row: Row) -> bool:
    """True for a product of a dense block whose input or output is sent."""
    return row.operator == "matmul" and row.block in DENSE_BLOCKS and bool(row.forward or row.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRule:
    """One kind of traffic that overlaps with computation."""

    word: str
    """Word of ``overlap`` without which all of the traffic is exposed; empty: it always overlaps."""
    traffic: str
    stream: str
    """Stream that carries the traffic; transfers of one stream follow each other."""
    beside: str
    """Computation with which it overlaps."""
    wants: str
    """Requirements on a plan for the overlap."""
    shares: str
    """Resources that it shares with other work, and the cost of sharing."""
    formula: str
    """Function of :mod:`steptime.cost` for its exposed time."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that have this traffic."""
    axis: str = ""
    """Axis other than ``dp`` that it runs over; empty: none."""
    habit: str = ""
    """Habit of a framework (:class:`steptime.plan.framework.Habits`) without which all of it is exposed."""


_DATA: Final = (
    "links: of a layer's pass the time that its own transfers over tp, cp and ep keep the same links busy is not there "
    "for it (free_links_s); units, links and host: the share data_exposed of what could overlap is exposed "
    "(partly_hidden_s)"
)

RULES: Final = (
    OverlapRule(
        word="dp",
        traffic="gradients, and weights after the update (ZeRO 0 to 2)",
        stream="data parallel",
        beside="passes of other layers (backward of the last micro-batch, of ZeRO-2 each; forward of the first)",
        wants="dp or cp above 1, more layers than one bucket holds",
        shares=_DATA,
        formula="data_parallel.exposed_buckets_s",
        zero=(0, 1, 2),
    ),
    OverlapRule(
        word="dp",
        traffic="weights gathered for the forward pass (ZeRO-3)",
        stream="data parallel",
        beside="the forward pass of the layer before",
        wants="dp or cp above 1",
        shares=_DATA,
        formula="data_parallel.exposed_gather_s",
        zero=(3,),
    ),
    OverlapRule(
        word="dp",
        traffic="weights gathered again, gradients (ZeRO-3); shards summed over replicas (HSDP)",
        stream="data parallel; replicas on one of their own",
        beside="the backward passes of other layers",
        wants="dp or cp above 1",
        shares=_DATA,
        formula="data_parallel.exposed_sharded_s",
        zero=(3,),
    ),
    OverlapRule(
        word="tp",
        traffic="what a product gathers or scatters over tp",
        stream="that product's",
        beside="the product itself, a shard of the sequence at a time, but for its own shard",
        wants="tp above 1 in one fast domain, sp on, attention or a dense MLP, strategy 1d or context, a model by "
        "dimensions, not mode published",
        shares="what its copies take of the product is in the factors of a framework",
        formula="collective.shown_beside_s",
        axis="tp",
    ),
    OverlapRule(
        word="",
        traffic="backward: an input that a product gathers again over tp, and the sum of its gradient",
        stream="tensor parallel",
        beside="the products of the gradients, each transfer with one of them",
        wants="a framework with asynchronous_tp, tp above 1, attention or a dense MLP, strategy 1d or context, a model "
        "by dimensions, trained weights, no zero-bubble schedule",
        shares="what its kernels take of the products is in the factors of a framework",
        formula="collective.shown_beside_s",
        axis="tp",
        habit="asynchronous_tp",
    ),
    OverlapRule(
        word="",
        traffic="keys and values that go round the ring of cp",
        stream="that of attention",
        beside="attention on the block before, but for the rank's own",
        wants="context ring",
        shares="nothing",
        formula="collective.shown_beside_s",
        axis="cp",
    ),
    OverlapRule(
        word="ep",
        traffic="exchange of experts",
        stream="expert parallel",
        beside="the opposite pass of another micro-batch, but for its exchange",
        wants="ep above 1; vpp above 1, or schedule dualpipe or dualpipev; no full recomputation",
        shares="links: the exchange of the opposite pass waits for it",
        formula="experts.hidden_exchange_s",
        axis="ep",
    ),
    OverlapRule(
        word="pp",
        traffic="messages between stages",
        stream="pipeline",
        beside="passes of other micro-batches",
        wants="pp above 1",
        shares="nothing; the crossing that fills and drains the pipeline shows",
        formula="pipeline.waited_messages",
        axis="pp",
    ),
    OverlapRule(
        word="offload",
        traffic="activations to the host and back",
        stream="copies, one each way",
        beside="one layer's pass",
        wants="offload activations",
        shares="nothing; what shows of it gives data-parallel traffic more time (lasting_s)",
        formula="host.exposed_copies_s",
    ),
    OverlapRule(
        word="",
        traffic="panels of a product over tp and tp2",
        stream="that product's",
        beside="the product of the panel before",
        wants="strategy 2d",
        shares="nothing; the first panel shows",
        formula="collective.shown_beside_s",
        axis="tp",
    ),
)
"""Every kind of traffic that may overlap; all other traffic is exposed."""
