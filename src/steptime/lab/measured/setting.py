"""One setting of a measured run in the terms of the engine: its job, its plan, its memory habits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from steptime.lab.measured.candidate import Candidate
from steptime.lab.measured.canonical import catalogue_device
from steptime.lab.measured.meaning import SCHEDULE_OF, modelled_optimizer, precision_called, recomputed_parts
from steptime.lab.measured.run import MeasuredRun
from steptime.plan.framework import piped_stage
from steptime.plan.job import (
    OFFLOADS,
    OPTIMIZERS,
    QLORA_BYTES,
    Adapter,
    Job,
    Precision,
    dispatched_by,
    with_habits,
)
from steptime.plan.memory_profile import MemoryProfile, memory_profile_of
from steptime.plan.plans import RECOMPUTE_CODES, Plans

#: Frameworks that read encoders' sequences in bins of like lengths, and the width of a bin in tokens.
BINNED: Final = frozenset({"ddp"})
BIN: Final = 64
#: Longest sequence -> share of its tokens that are not padding, in Wikipedia.
FILLED: Final = {128: 1 / 1.21, 384: 1 / 1.742, 512: 1 / 2.001}
_DATED: Final = re.compile(r"(20\d\d)[-_]?(0[1-9]|1[0-2])")
_NO_OVERLAP: Final = re.compile(r"\bno ((?:[a-z]{2}/)*[a-z]{2}) overlap", re.IGNORECASE)
_OVERLAP_OF: Final = {
    "dp": r"overlap[-_ ]?(?:grad|param|comm\b|dp)\w*"
    r"|(?:grad\w*|param\w*|dp)(?: (?:and|&) \w+)?[-_ ](?:\w+[-_ ])?overlap",
    "tp": r"tp[-_ ]comm[-_ ]overlap|(?<![a-z])tp[-_ ]overlap|overlap[-_ ]tp",
    "ep": r"overlap[-_ ]moe\w*|moe[-_ ]a2a[-_ ]overlap|ep[-_ ]overlap|overlap[-_ ]ep",
}
"""Words of notes by which traffic of an axis runs beside computation, in the flags of Megatron and DeepSpeed."""
_OFF: Final = re.compile(r"\s*(?:[=:]\s*|is |are |turned |switched )?(?:off|false|no|none|disabled|0)\b", re.IGNORECASE)
_NOT: Final = re.compile(r"(?:\bno|\bnot|\bwithout|--no)[-_ ]$", re.IGNORECASE)
_ASYNCHRONOUS: Final = re.compile(r"\basync tp\b", re.IGNORECASE)
_NORM_KERNEL: Final = re.compile(r"\b(?:rms|rmsnorm|norm) kernel|fused (?:rms)?norm", re.IGNORECASE)
_SOFTMAX_KERNEL: Final = re.compile(r"kernel=fused|fused (?:scaled |masked )*softmax", re.IGNORECASE)
_MEAN_LENGTH: Final = re.compile(r"\bmean (\d{1,7}) tokens", re.IGNORECASE)
LOSS_COMPILED: Final = 202502
"""Year and month from which torchtitan compiles the loss with the model, which then makes no fp32 copies of logits."""


def profile_of(run: MeasuredRun) -> MemoryProfile:
    """Memory habits of a run's framework, of the version that its source dates."""
    found = memory_profile_of(run.framework)
    on_host = "weights" in run.offload
    found = replace(
        found, narrow_weights=run.narrow_weights, updates_in_backward=paged_optimizer(run), offloads_weights=on_host,
        offloads_gradients=found.offloads_gradients or on_host,
    )  # fmt: skip
    if run.framework == "scaling":
        return _with_kernels(found, run.notes)
    dated = _DATED.search(run.source)
    month = int(dated.group(1) + dated.group(2)) if dated else 0
    if run.framework == "torchtitan" and month >= LOSS_COMPILED and "compile" in run.notes:
        return replace(found, logit_peak_bytes=found.logit_kept_bytes, loss_forward_bytes=4.0, loss_backward_bytes=4.0,
                       loss_conversion_bytes=0.0)  # fmt: skip
    return found


def paged_optimizer(run: MeasuredRun) -> bool:
    """Whether a run has torchtune's optimiser of all weights on one device: its 8-bit states leave a full device.

    Source: torchtune, recipes/configs/*/*_full_single_device.yaml (`PagedAdamW8bit`, `optimizer_in_bwd`).
    """
    return run.framework == "torchtune" and run.workload == "sft" and run.gpus == 1 and run.optimizer == "adam"


def _with_kernels(profile: MemoryProfile, notes: str) -> MemoryProfile:
    """A profile with the kernels that notes name in place of operators: of norms, and of the masked softmax."""
    if _NORM_KERNEL.search(notes):
        profile = replace(profile, norm_bytes=0.0)
    return replace(profile, score_bytes=0.0) if _SOFTMAX_KERNEL.search(notes) else profile


def evaluated_share(run: MeasuredRun) -> float:
    """Mean tokens of a sequence over the longest that is fed, where the row states a mean, at most 1.

    >>> from types import SimpleNamespace
    >>> evaluated_share(SimpleNamespace(notes="samples (mean 2048 tokens)", seq_len=4096))
    0.5
    """
    found = _MEAN_LENGTH.search(run.notes)
    return min(1.0, float(found.group(1)) / run.seq_len) if found else 1.0


def fed_length(run: MeasuredRun) -> int:
    r"""Tokens per sequence that the devices work on: all, or with bins of like lengths the mean with its padding.

    $$s' = \min(s, \bar s + b / 2)$$

    for the mean length $\bar s$ = :data:`FILLED` $\cdot s$ of Wikipedia's articles cut to $s$ tokens, and bins $b$ =
    :data:`BIN` wide, in which a sequence is padded by half a bin on average.

    Source: arXiv 2107.02027, figure 1 (lengths); DeepLearningExamples, PyTorch BERT, `bin_size_64` (bins). That a run
    of the framework was fed so is assumed: rows do not say it.
    """
    share = FILLED.get(run.seq_len) if run.model_kind == "encoder" and run.framework in BINNED else None
    return run.seq_len if share is None else min(run.seq_len, round(share * run.seq_len) + BIN // 2)


def said_to_overlap(notes: str) -> dict[str, bool]:
    """Axis -> whether its traffic runs beside computation, of those axes of which remarks on a run say so.

    >>> said_to_overlap("no TP/DP overlap"), said_to_overlap("overlap-grad-reduce, overlap-param-gather on; async TP")
    ({'tp': False, 'dp': False}, {'tp': True, 'dp': True})
    >>> said_to_overlap("overlap_comm: false"), said_to_overlap("tuned batch")
    ({'dp': False}, {})
    """
    none = _NO_OVERLAP.search(notes)
    found = {axis: False for axis in (none.group(1).lower().split("/") if none else ()) if axis in _OVERLAP_OF}
    if _ASYNCHRONOUS.search(notes):
        found.setdefault("tp", True)
    for axis, words in _OVERLAP_OF.items():
        said = re.search(words, notes, re.IGNORECASE)
        if said is not None and axis not in found:
            off = _OFF.match(notes, said.end()) or _NOT.search(notes[: said.start()])
            found[axis] = off is None
    return found


def overlap_of(run: MeasuredRun, habitual: frozenset[str]) -> frozenset[str]:
    """Axes whose traffic hides: those that the framework hides, but for those of which the run says otherwise."""
    said = said_to_overlap(run.notes)
    usable = {axis for axis, on in said.items() if on and (axis != "ep" or run.model.experts is not None)}
    return (habitual | usable) - {axis for axis, on in said.items() if not on}


def precision_of(run: MeasuredRun, found: Candidate) -> Precision:
    """The precision of a run under one setting, whatever its device; only fused attention has a format of its own."""
    own = run.attention_dtype if found.attention == "fused" else None
    return precision_called(found.precision, run.framework, own)


def job_of(run: MeasuredRun, found: Candidate, precision: Precision) -> Job:
    """The job of a run under one setting, in the precision that its device makes of it."""
    interleaved = (found.degrees.vpp or 1) > 1
    adapter = None
    if run.adapter is not None:
        targets = "attention" if run.adapter.targets in ("qkv", "attention") else "linear"
        weight_bytes = QLORA_BYTES if run.quantised_base else None
        adapter = Adapter(rank=run.adapter.rank, targets=targets, weight_bytes=weight_bytes)
    job = Job(
        model=run.model, gpus=run.gpus, global_batch=run.global_batch, seq_len=fed_length(run),
        precision=precision.on(catalogue_device(run.device)), graphs=run.graphs,
        evaluated_share=evaluated_share(run), document_length=run.document_length, expert_capacity=run.expert_capacity,
        optimizer=OPTIMIZERS["adam8bit" if paged_optimizer(run) else modelled_optimizer(run.optimizer)],
        attention=found.attention,
        schedule="1f1b" if interleaved else SCHEDULE_OF.get(run.schedule or "", "1f1b"),
        adapter=adapter, offload=(run.offload | found.offload) & frozenset(OFFLOADS),
    )  # fmt: skip
    job = with_habits(job, run.framework)
    habitual = job.overlap if found.hides_data else job.overlap - {"dp"}
    overlap = overlap_of(run, habitual | ({"pp"} if interleaved else set()))
    job = dispatched_by(job, run.dispatcher) if run.dispatcher else job
    return replace(
        job, overlap=overlap, memory=profile_of(run),
        plain_norms=run.plain_norms, separate_kernels=job.separate_kernels or run.separate_kernels,
        triangular_softmax=job.triangular_softmax and not run.separate_kernels,
        context=run.context or job.context, gradient_dtype=run.gradient_dtype or job.gradient_dtype,
    )  # fmt: skip


def plans_of(found: Candidate, domain: int) -> Plans:
    """The plan of a setting, placed in fast domains of so many devices."""
    d = found.degrees
    zero = piped_stage(found.zero, d.pp)
    shards = found.shard_ranks if zero and found.shard_ranks < d.dp * d.cp else 0
    return Plans(
        tp=d.tp, pp=d.pp, cp=d.cp, dp=d.dp, vpp=d.vpp or 1, ep=d.ep or 1, micro_batch=found.micro_batch,
        recompute=sum(RECOMPUTE_CODES[name] for name in recomputed_parts(found.recompute.kind)),
        recompute_every=max(1, round(1 / found.recompute.share)) if found.recompute.kind == "full" else 1,
        zero=zero, shard=shards, sp=int(found.sequence_parallel or d.tp == 1),
    ).in_order(domain)  # fmt: skip
