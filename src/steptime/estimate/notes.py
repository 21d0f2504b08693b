"""Notes that a reader should know before using the numbers of an estimate."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from steptime.cost.attention import fits_matrix_units
from steptime.errors import counted
from steptime.estimate.evaluate import kept_choices
from steptime.hardware.load import RATES
from steptime.hardware.records import Device
from steptime.plan.framework import MODEL_AXES
from steptime.plan.framework_file import habits_of
from steptime.plan.job import Job, Precision, replica_micro_batches
from steptime.plan.overlap import RULES
from steptime.plan.plans import Plans
from steptime.plan.strategies import Strategy
from steptime.terms import Terms
from steptime.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from steptime.estimate.learned import Correction

DTYPES = RATES["matrix"][1]
HOST = "host"
"""Group of terms in which the device waits for the host."""
OVERHEAD = "overhead"
"""Group of terms with the fixed time of a step."""


def uneven_batch(job: Job, plans: Plans) -> tuple[str, ...]:
    r"""A note if the step takes as long as one with a larger batch: :math:`d \cdot m \lceil \lceil B/d \rceil / m
    \rceil > B`.

    :math:`B` are the sequences of the global batch, :math:`d` the replicas, :math:`m` the sequences of a micro-batch.

    >>> from types import SimpleNamespace as Some
    >>> uneven_batch(Some(global_batch=96, sample="image"), Plans(dp=32))
    ()
    >>> "dp 32 x 4 x 1 = 128 images" in uneven_batch(Some(global_batch=100, sample="image"), Plans(dp=32))[0]
    True
    """
    batch, dp, size = job.global_batch, int(plans.dp), int(plans.micro_batch)
    micro_batches = int(replica_micro_batches(batch, dp, size))
    charged = dp * micro_batches * size
    if charged == batch or dp > batch:
        return ()
    noun = f"{job.sample}s"
    return (
        f"{batch} {noun} are no multiple of dp {dp} x micro_batch {size}: the step takes as long as one of "
        f"dp {dp} x {micro_batches} x {size} = {charged} {noun}; rates and MFU count the {batch}",
    )


def stood_in_schedule(job: Job) -> tuple[str, ...]:
    """A note if a schedule without closed forms uses those of another one, or bounds."""
    return (f"schedule {job.schedule}: {job.pipeline.bound}",) if job.pipeline.bound else ()


def updates_in_step(job: Job, updates: float) -> tuple[str, ...]:
    """A note if the schedule updates the weights within a step.

    >>> from types import SimpleNamespace as Some
    >>> updates_in_step(Some(schedule="1f1b", pipeline=Some(synchronous=True)), 1.0)
    ()
    >>> updates_in_step(Some(schedule="pipedream", pipeline=Some(synchronous=False)), 64.0)[0].partition(":")[0]
    'schedule pipedream updates the weights 64 times a step'
    """
    if job.pipeline.synchronous:
        return ()
    return (
        f"schedule {job.schedule} updates the weights {updates:g} times a step: each update sums the gradients over "
        f"the replicas and runs the optimiser; {job.schedule.partition(':')[0]}:N has N micro-batches per update",
    )


def dropped_choices(job: Job) -> tuple[str, ...]:
    """A note if experts have fewer slots than there are choices of them.

    >>> from types import SimpleNamespace as Some
    >>> job = Some(model=Some(experts=True), expert_capacity=0.1, expert_load=None)
    >>> "at least 90.0 % of the choices" in dropped_choices(job)[0]
    True
    >>> dropped_choices(Some(model=Some(experts=True), expert_capacity=1.25, expert_load=None))
    ()
    """
    dropped = 1.0 - kept_choices(job.expert_capacity, job.expert_load)
    if job.model.experts is None or not dropped:
        return ()
    least = "" if job.expert_load else "at least "
    return (
        f"expert_capacity {job.expert_capacity:g} drops {least}{dropped * 100:.1f} % of the choices of experts: "
        "model FLOPs, MFU and HFU count the others; tokens/s counts every token",
    )


def unaligned_heads(job: Job) -> tuple[str, ...]:
    """A note if unfused attention runs on the vector units (:func:`~steptime.cost.attention.fits_matrix_units`).

    >>> from types import SimpleNamespace as Some
    >>> job = Some(attention="unfused", model=Some(head_dim=108), precision=Some(element_bytes=2))
    >>> "heads of 108 elements" in unaligned_heads(job)[0]
    True
    """
    width = job.model.head_dim
    if job.attention != "unfused" or fits_matrix_units(width, job.precision.element_bytes):
        return ()
    return (
        f"heads of {width} elements are no multiple of 16 bytes: unfused attention runs on the vector units, not the "
        "matrix units; widths that are a multiple of 8, or fused attention, avoid it",
    )


def winograd_note(saved_flops: float, flops: float) -> tuple[str, ...]:
    """A note on the FLOPs of a step that Winograd's algorithm saves; none if it saves nothing.

    >>> winograd_note(0.0, 2.0), winograd_note(1.0, 2.0)
    ((), ("Winograd's algorithm saves 50 % of the model's FLOPs: MFU and HFU do not count these",))
    """
    if not saved_flops:
        return ()
    return (
        f"Winograd's algorithm saves {100 * saved_flops / flops:.0f} % of the model's FLOPs: "
        "MFU and HFU do not count these",
    )


def idle_overlap(word: str) -> str:
    """A note on a word of ``overlap`` that does not change the step time.

    >>> idle_overlap("pp").partition(" (")[0]
    'overlap pp changes nothing in this plan: it hides messages between stages, with pp above 1'
    """
    rule = next(rule for rule in RULES if rule.word == word)
    return (
        f"overlap {word} changes nothing in this plan: it hides {rule.traffic}, with {rule.wants} "
        "(all rules: steptime frameworks --overlap)"
    )


def changed_device(device: Device) -> tuple[str, ...]:
    """Notes on numbers of a device that a file changes without the effect that a reader may expect."""
    known, out = device.catalogue, []
    kept = all(device.matrix_flops_per_s.get(dtype) == known.get(f"matrix_flops_per_s.{dtype}") for dtype in DTYPES)
    units = known.get("sm_count")
    if kept and units is not None and device.sm_count != units:
        out.append(
            f"sm_count {device.sm_count} for {units:g}: work spreads over so many units, but their peak rates stay "
            "as they are; state [matrix] and [vector] too for a smaller or larger chip"
        )
    if device.like is not None and device.clock_Hz is not None and "clock_Hz" not in known:
        out.append("clock changes nothing: the catalogue has no clock of this device that its peak rates belong to")
    if device.without_curves:
        out.append(
            "numbers of a measured machine are changed: its measured curves are left out, and times come from rates "
            "and efficiencies alone; they do not compare with those of the machine as it was measured"
        )
    return tuple(out)


def global_batch_taken(batch: int, noun: str) -> str:
    """A note if no batch was given; ``noun``: the unit of the batch.

    >>> global_batch_taken(16, "sequence")
    'global_batch was not given: one micro-batch per stage and replica was taken, 16 sequences'
    """
    return f"global_batch was not given: one micro-batch per stage and replica was taken, {counted(batch, noun)}"


def micro_batch_taken(time: Terms, share: int, noun: str) -> tuple[str, ...]:
    """A note if no micro-batch was given and a replica has more than one sequence; ``noun``: the unit of the batch.

    >>> micro_batch_taken(Terms({"compute/x_s": 3.0, "host/y_s": 1.0}), 8, "sequence")
    ('micro_batch was not given: 1 was taken; a replica has 8 sequences',)
    """
    if share <= 1:
        return ()
    groups = time.rollup(1)
    paced = max(groups, key=lambda group: groups[group]) == HOST
    larger = "; the host paces the step, so a larger one would help" if paced else ""
    return (f"micro_batch was not given: 1 was taken; a replica has {counted(share, noun)}{larger}",)


def mostly_overhead(time: Terms, framework: str) -> tuple[str, ...]:
    """A note if more than half of a step is the fixed time of a step.

    >>> mostly_overhead(Terms({"compute/x_s": 1.0, "overhead/y_s": 3.0}), "generic")[0].partition(":")[0]
    '75 % of the step is the fixed time of generic'
    >>> mostly_overhead(Terms({"compute/x_s": 3.0, "overhead/y_s": 1.0}), "generic")
    ()
    """
    share = time.rollup(1).get(OVERHEAD, 0.0) / time.total
    if share <= 0.5:
        return ()
    return (
        f"{share * 100:.0f} % of the step is the fixed time of {framework}: it was fitted to runs of large models, and "
        "a small one may do without most of it (framework ideal has none)",
    )


def beyond_framework(framework: str, plans: Plans) -> tuple[str, ...]:
    """Notes if a plan has an axis or a ZeRO stage that its framework lacks.

    >>> beyond_framework("ddp", Plans(dp=8, tp=2, zero=0))
    ('ddp has no tp, so no run of it stands behind a plan with tp 2',)
    >>> beyond_framework("torchtitan", Plans(dp=8, zero=1))
    ('torchtitan has no ZeRO-1 without a pipeline: it has ZeRO-0, 2, 3',)
    >>> beyond_framework("torchtitan", Plans(dp=8, pp=2, zero=1)), beyond_framework("generic", Plans(dp=8, cp=2))
    ((), ())
    """
    habits = habits_of(framework)
    lacking = [axis for axis in MODEL_AXES if axis not in habits.axes and getattr(plans, axis) > 1]
    out = []
    if lacking:
        degrees = " ".join(f"{axis} {int(getattr(plans, axis))}" for axis in lacking)
        out.append(f"{framework} has no {', '.join(lacking)}, so no run of it stands behind a plan with {degrees}")
    stages = habits.stages_with(int(plans.pp))
    if plans.dp * plans.cp > 1 and int(plans.zero) not in stages:
        where = "without a pipeline" if plans.pp == 1 else "with a pipeline"
        had = ", ".join(map(str, sorted(stages)))
        out.append(f"{framework} has no ZeRO-{int(plans.zero)} {where}: it has ZeRO-{had}")
    return tuple(out)


def rate_stood_in(device: Device, precision: Precision) -> tuple[str, ...]:
    """A note if the matrix units lack the format of the products and the rate of another format stands in."""
    dtype, taken = precision.matrix_dtype, device.matrix_dtype(precision.matrix_dtype)
    wanted = f"dtype {precision.name}: {device.name} has no"
    if taken != dtype:
        return (f"{wanted} {dtype} products; its {taken} rate stands in",)
    if precision.block_scaled and not device.scales_blocks:
        return (f"{wanted} products with a scale per block; its {taken} rate stands in, without the work of scaling",)
    return ()


def plain_operands(strategy: Strategy, precision: Precision) -> tuple[str, ...]:
    """A note if the products of a strategy take their operands as stored, without the quantisation of a recipe.

    >>> from types import SimpleNamespace as Some
    >>> plain_operands(Some(name="2d"), Some(quantised_bytes=1.0, name="fp8-te", matrix_dtype="fp8"))[0]
    'dtype fp8-te: strategy 2d has no quantisation; products run at the fp8 rate, and nothing else changes'
    >>> plain_operands(Some(name="2d"), Some(quantised_bytes=None)), plain_operands(Some(name="1d"), Some())
    ((), ())
    """
    if strategy.name != "2d" or precision.quantised_bytes is None:
        return ()
    rate = f"products run at the {precision.matrix_dtype} rate, and nothing else changes"
    return (f"dtype {precision.name}: strategy {strategy.name} has no quantisation; {rate}",)


def stage_taken(framework: str, stage: int, shard: int = 0) -> tuple[str, ...]:
    """A note if no ZeRO stage was given and the framework's default differs from that of a generic framework.

    ``shard``: ranks of one group of shards, if not all.

    >>> stage_taken("torchtitan", 3), stage_taken("generic", 1)
    (('zero was not given: 3 was taken, as torchtitan does',), ())
    >>> "within nodes of 8 (HSDP)" in stage_taken("fms-fsdp", 3, 8)[0]
    True
    """
    if shard:
        taken = f"zero and shard were not given: ZeRO-{stage} within nodes of {shard} (HSDP) was taken"
        return (f"{taken}, as {framework} does; zero {stage} without shard is over all ranks",)
    usual = habits_of("").zero
    return () if stage == usual else (f"zero was not given: {stage} was taken, as {framework} does",)


def recompute_taken(framework: str, usual: str) -> str:
    """A note if recomputation was not given and the framework recomputes something by default.

    >>> recompute_taken("trl", "full")
    'recompute was not given: full was taken, as trl does'
    """
    return f"recompute was not given: {usual} was taken, as {framework} does"


def saved_copies(without_s: float, full_s: float, shown_s: float, full_shown_s: float) -> str:
    """A note on the reason why full recomputation is faster than none while activations are offloaded.

    Args:
        without_s: step without recomputation (s).
        full_s: step with full recomputation (s).
        shown_s: waits for copies of activations without recomputation (s).
        full_shown_s: waits with full recomputation, of which only the inputs of layers are copied (s).

    >>> saved_copies(27.3, 25.2, 6.8, 0.0)
    'recompute full takes 25.2 s, none 27.3 s: it saves copies to the host, which show for 0 s and 6.8 s of the step'
    """
    return (
        f"recompute full takes {full_s:.4g} s, none {without_s:.4g} s: it saves copies to the host, which show for "
        f"{full_shown_s:.4g} s and {shown_s:.4g} s of the step"
    )


def scattered(pool: int, mean_s: float, worst_s: float) -> str:
    """A note on a job whose nodes may lie anywhere.

    >>> scattered(4096, 2.0, 2.5)  # doctest: +ELLIPSIS
    'nodes lie anywhere among 4,096 devices: 2 s are the mean of neighbours drawn at random, ...'
    """
    return (
        f"nodes lie anywhere among {pool:,} devices: {mean_s:.4g} s are the mean of neighbours drawn at random, "
        f"{worst_s:.4g} s if no two share a leaf"
    )


def corrected(correction: Correction, before_s: float, after_s: float, operators: Collection[str]) -> str:
    """A note on the effect of a learned correction on a step, with the operators outside its fit."""
    strange = sorted(name for name in operators if not correction.knows(name))
    unseen = f"; never seen, corrected by size alone: {', '.join(strange)}" if strange else ""
    return (
        f"learned factors ({correction.name}): {format_seconds(before_s)} x {after_s / before_s:.3f}; --explain has "
        f"the factor of every term{unseen}; the framework's own factors, fitted without it, stay"
    )


def before_the_first_step(needed_bytes: float, peak_bytes: float, capacity_bytes: float) -> tuple[str, ...]:
    """A note if software needs more memory before the first step than in a step, with the reason.

    >>> before_the_first_step(32e9, 20e9, 80e9)
    ('before the first step DeepSpeed copies the weights to one buffer: 29.8 GiB with both, more than a step needs',)
    >>> before_the_first_step(90e9, 20e9, 80e9)[0].partition(", ")[2]
    'which does not fit: unless it copies through the host it runs out; ZeRO-3 has no such copy'
    """
    if needed_bytes <= peak_bytes:
        return ()
    what = f"before the first step DeepSpeed copies the weights to one buffer: {format_bytes(needed_bytes)} with both"
    if needed_bytes > capacity_bytes:
        return (f"{what}, which does not fit: unless it copies through the host it runs out; ZeRO-3 has no such copy",)
    return (f"{what}, more than a step needs",)
