"""Weighted list of the plausible settings of a run, for all that its row leaves open, in the terms of the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import Any, Final

import numpy as np

from steptime.estimate.memory import peak_bytes
from steptime.estimate.memory_definitions import communicators, exceeding, memory_constants
from steptime.estimate.result import planned_job
from steptime.estimate.sizes import sizes_of
from steptime.hardware.records import Device
from steptime.measure.runs.canonical import Recomputation, catalogue_device
from steptime.measure.runs.meaning import (
    SCHEDULE_OF,
    framework_default,
    modelled_optimizer,
    precision_called,
    recompute_default,
    recomputed_parts,
    shards_of,
)
from steptime.measure.runs.read import table
from steptime.measure.runs.run import Degrees, MeasuredRun, legal_micro_batches, possible_degrees, sharded_degrees
from steptime.num import Array, divisors
from steptime.options import choices_of
from steptime.plan.framework import Habits, piped_stage
from steptime.plan.framework_file import habits_of, memory_profile_of
from steptime.plan.job import QLORA_BYTES, Adapter, Job, Precision, dispatched_by, with_habits
from steptime.plan.memory_profile import MemoryProfile
from steptime.plan.optimizers import OPTIMIZERS
from steptime.plan.placements import numbered
from steptime.plan.plans import RECOMPUTE_CODES, Plans, concatenate
from steptime.plan.strategies import CORRECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting that agrees with the row."""

    weight: float
    """Share of belief; the weights of a run sum to 1."""
    precision: str
    degrees: Degrees
    """Degrees of all axes, ``vpp`` and ``ep`` included."""
    micro_batch: int
    recompute: Recomputation
    zero: int
    shard_ranks: int
    """Ranks over which the ZeRO stage shards; at most dp x cp."""
    sequence_parallel: bool
    attention: str
    """``fused`` or ``unfused``."""
    offload: frozenset[str] = frozenset()
    """Tensors that are kept on the host (``activations``, ``optimizer``) in addition to those that the row names."""
    overlaps_data: bool = True
    """True: traffic of gradients and weights overlaps with computation as in the framework; false: it does not."""
    fits: bool = True
    """The predicted memory is at most that of the device."""


#: Frameworks that read encoders' sequences in bins of similar lengths, and the width of a bin in tokens.
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
"""Words of notes by which traffic of an axis overlaps with computation, in the flags of Megatron and DeepSpeed."""
_OFF: Final = re.compile(r"\s*(?:[=:]\s*|is |are |turned |switched )?(?:off|false|no|none|disabled|0)\b", re.IGNORECASE)
_NOT: Final = re.compile(r"(?:\bno|\bnot|\bwithout|--no)[-_ ]$", re.IGNORECASE)
_ASYNCHRONOUS: Final = re.compile(r"\basync tp\b", re.IGNORECASE)
_NORM_KERNEL: Final = re.compile(r"\b(?:rms|rmsnorm|norm) kernel|fused (?:rms)?norm", re.IGNORECASE)
_SOFTMAX_KERNEL: Final = re.compile(r"kernel=fused|fused (?:scaled |masked )*softmax", re.IGNORECASE)
_MEAN_LENGTH: Final = re.compile(r"\bmean (\d{1,7}) tokens", re.IGNORECASE)
LOSS_COMPILED: Final = 202502
"""Year and month from which torchtitan compiles the loss with the model, which then makes no fp32 copies of logits."""


def profile_of(run: MeasuredRun) -> MemoryProfile:
    """Memory profile of a run's framework, in the version of the date that its source has."""
    found = memory_profile_of(run.framework)
    on_host = "weights" in run.offload
    found = replace(
        found,
        narrow_weights=run.narrow_weights,
        updates_in_backward=paged_optimizer(run),
        offloads_weights=on_host,
        offloads_gradients=found.offloads_gradients or on_host,
    )
    if run.framework == "scaling":
        return _with_kernels(found, run.notes)
    dated = _DATED.search(run.source)
    month = int(dated.group(1) + dated.group(2)) if dated else 0
    if run.framework == "torchtitan" and month >= LOSS_COMPILED and "compile" in run.notes:
        return replace(
            found,
            logit_peak_bytes=found.logit_kept_bytes,
            loss_forward_bytes=4.0,
            loss_backward_bytes=4.0,
            loss_conversion_bytes=0.0,
        )
    return found


def paged_optimizer(run: MeasuredRun) -> bool:
    """True if a run has torchtune's paged optimiser for one device, whose 8-bit states leave a full device.

    Source: torchtune, recipes/configs/*/*_full_single_device.yaml (`PagedAdamW8bit`, `optimizer_in_bwd`).
    """
    return run.framework == "torchtune" and run.workload == "sft" and run.gpus == 1 and run.optimizer == "adam"


def _with_kernels(profile: MemoryProfile, notes: str) -> MemoryProfile:
    """Profile with fused kernels of norms and of the masked softmax in place of operators, where notes name them."""
    if _NORM_KERNEL.search(notes):
        profile = replace(profile, norm_bytes=0.0)
    return replace(profile, score_bytes=0.0) if _SOFTMAX_KERNEL.search(notes) else profile


def evaluated_share(run: MeasuredRun) -> float:
    """Mean tokens of a sequence over the sequence length, at most 1; 1 where the notes give no mean.

    >>> from types import SimpleNamespace
    >>> evaluated_share(SimpleNamespace(notes="samples (mean 2048 tokens)", seq_len=4096))
    0.5
    """
    found = _MEAN_LENGTH.search(run.notes)
    return min(1.0, float(found.group(1)) / run.seq_len) if found else 1.0


def fed_length(run: MeasuredRun) -> int:
    r"""Tokens per sequence that the devices compute: all, or the padded mean where sequences are binned by length.

    $$s' = \min(s, \bar s + b / 2)$$

    for the mean length $\bar s$ = :data:`FILLED` $\cdot s$ of Wikipedia's articles cut to $s$ tokens, and bins $b$ =
    :data:`BIN` wide, in which a sequence is padded by half a bin on average.

    Source: arXiv 2107.02027, figure 1 (lengths); DeepLearningExamples, PyTorch BERT, `bin_size_64` (bins). Rows do not
    mention bins; they are assumed from the framework.
    """
    share = FILLED.get(run.seq_len) if run.model_kind == "encoder" and run.framework in BINNED else None
    return run.seq_len if share is None else min(run.seq_len, round(share * run.seq_len) + BIN // 2)


def said_to_overlap(notes: str) -> dict[str, bool]:
    """Axis -> true if its traffic overlaps with computation, for each axis that the notes of a run mention.

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


def overlap_of(run: MeasuredRun, default: frozenset[str]) -> frozenset[str]:
    """Axes whose traffic overlaps with computation: the default of the framework, unless the run says otherwise."""
    said = said_to_overlap(run.notes)
    usable = {axis for axis, on in said.items() if on and (axis != "ep" or run.model.experts is not None)}
    return (default | usable) - {axis for axis, on in said.items() if not on}


def precision_of(run: MeasuredRun, found: Candidate) -> Precision:
    """Precision of a run under one setting, not yet that of its device; only fused attention has its own format."""
    own = run.attention_dtype if found.attention == "fused" else None
    return precision_called(found.precision, run.framework, own)


def job_of(run: MeasuredRun, found: Candidate, precision: Precision) -> Job:
    """The job of a run under one setting, in ``precision`` as its device supports it."""
    interleaved = (found.degrees.vpp or 1) > 1
    adapter = None
    if run.adapter is not None:
        targets = "attention" if run.adapter.targets in ("qkv", "attention") else "linear"
        weight_bytes = QLORA_BYTES if run.quantised_base else None
        adapter = Adapter(rank=run.adapter.rank, targets=targets, weight_bytes=weight_bytes)
    job = Job(
        model=run.model,
        gpus=run.gpus,
        global_batch=run.global_batch,
        seq_len=fed_length(run),
        precision=precision.on(catalogue_device(run.device)),
        graphs=run.graphs,
        evaluated_share=evaluated_share(run),
        document_length=run.document_length,
        expert_capacity=run.expert_capacity,
        optimizer=OPTIMIZERS["adam8bit" if paged_optimizer(run) else modelled_optimizer(run.optimizer)],
        attention=found.attention,
        schedule="1f1b" if interleaved or run.schedule is None else SCHEDULE_OF.get(run.schedule, run.schedule),
        adapter=adapter,
        offload=(run.offload | found.offload) & frozenset(choices_of("offload")),
    )
    job = with_habits(job, run.framework)
    default = job.overlap if found.overlaps_data else job.overlap - {"dp"}
    overlap = overlap_of(run, default | ({"pp"} if interleaved else set()))
    job = dispatched_by(job, run.dispatcher) if run.dispatcher else job
    return replace(
        job,
        overlap=overlap,
        memory=profile_of(run),
        plain_norms=job.plain_norms if run.plain_norms is None else run.plain_norms,
        separate_kernels=job.separate_kernels or run.separate_kernels,
        triangular_softmax=job.triangular_softmax and not run.separate_kernels,
        context=run.context or job.context,
        gradient_dtype=run.gradient_dtype or job.gradient_dtype,
    )


def plans_of(found: Candidate, domain: int) -> Plans:
    """The plan of a setting, placed in fast domains of ``domain`` devices."""
    d = found.degrees
    zero = piped_stage(found.zero, d.pp)
    shards = found.shard_ranks if zero and found.shard_ranks < d.dp * d.cp else 0
    plans = Plans(
        tp=d.tp,
        pp=d.pp,
        cp=d.cp,
        dp=d.dp,
        vpp=d.vpp or 1,
        ep=d.ep or 1,
        micro_batch=found.micro_batch,
        recompute=sum(RECOMPUTE_CODES[name] for name in recomputed_parts(found.recompute.kind)),
        recompute_every=max(1, round(1 / found.recompute.share)) if found.recompute.kind == "full" else 1,
        zero=zero,
        shard=shards,
        sp=int(found.sequence_parallel or d.tp == 1),
    )
    return numbered(plans.in_order(domain))


UNFIT_WEIGHT: Final = 0.002
"""Least factor of a setting that does not fit: the estimate may be wrong, or the run unusual."""


def needed_bytes(run: MeasuredRun, settings: Sequence[Candidate]) -> Array:
    """Bytes in use on the device under each setting; those of equal precision, attention and offload in one go."""
    out = np.zeros(len(settings))
    strategy = CORRECTED.strategy("context")
    domain = run.gpus_per_node
    kinds = [(c.precision, c.attention, *sorted(c.offload)) for c in settings]
    for kind in sorted(set(kinds)):
        chosen = [i for i, each in enumerate(kinds) if each == kind]
        first = settings[chosen[0]]
        job = job_of(run, first, precision_of(run, first))
        plans = concatenate([plans_of(settings[i], domain) for i in chosen], [1] * len(chosen))
        planned = planned_job(
            CORRECTED, strategy, job, plans, sizes_of(strategy.block(job, plans), job.optimizer.matrices)
        )
        out[chosen] = memory_constants().defined(peak_bytes(planned), communicators(plans), job.memory.name)["device"]
    return out


def fit_weight(needed: float, capacity_bytes: float) -> float:
    """Chance that a setting fits, as a factor on its weight.

    Args:
        needed: predicted memory in bytes.
        capacity_bytes: memory of the device.

    >>> fit_weight(40e9, 80e9) > 0.999, fit_weight(80e9, 80e9), fit_weight(200e9, 80e9)
    (True, 0.5, 0.002)
    """
    return max(UNFIT_WEIGHT, 1.0 - exceeding(needed, capacity_bytes, memory_constants().deviation["device"]))


MOST: Final = 12
"""Largest number of settings of a run."""
LEAST_WEIGHT: Final = 0.02
"""Settings whose weight is below this share of the largest one are left out."""
_BEAM: Final = 200
_LAYOUTS: Final = 4
"""Largest number of layouts (degrees) in the list, so that it has room for other settings."""
#: Frameworks without gradient accumulation unless asked: one micro-batch per step and replica.
_WHOLE_BATCH: Final = frozenset({"maxtext", "paxml", "colossalai"})
#: Frameworks that recompute nothing unless asked, and then all layers or some (`--recompute-num-layers` of Megatron).
_BY_LAYER: Final = frozenset({"megatron-core", "megatron", "megascale"})
#: Frameworks whose runs recompute no more than memory requires.
_AS_NEEDED: Final = _BY_LAYER | {"maxtext", "paxml"}
#: Frameworks that may offload activations, where the row names neither offload nor recomputation.
_ON_HOST: Final = frozenset({"maxtext"})
PAGED: Final = 0.02
"""Chance that paged optimiser states are on the host although the device has room for them."""
#: Recomputation that is not full -> approximate share of the forward pass that it repeats.
_REPEATED: Final = {
    "none": 0.0, "norms": 0.02, "modules": 0.05, "attention": 0.1, "ops": 0.4,
    "beside_products": 0.15, "beside_attention": 0.6, "beside_projections": 0.7,
}  # fmt: skip
AVOIDED: Final = 0.7
"""Chance that a run leaves out recomputation that memory does not require."""
WHOLE_SHARDED: Final = 3
"""ZeRO stage whose sharding groups may be the nodes (HSDP)."""
PARTS: Final = (0.25, 0.5, 1.0)
"""Shares of the layers that a framework of ``_BY_LAYER`` may recompute where the row gives no number."""
#: Frameworks that shard over all devices where the row has no degrees.
_SHARDED: Final = frozenset({"maxtext", "paxml", "fms-fsdp", "composer-fsdp", "torchtitan", "torchtune", "automodel"})


def candidates(run: MeasuredRun) -> tuple[Candidate, ...]:
    """Settings of a run, the likeliest first; a single one where the row states everything.

    The weights come from the defaults of the framework and from what fits into the memory of the device, never from
    the measured time or memory.
    """
    device = catalogue_device(run.device)
    groups: dict[tuple[int, int, int], list[Candidate]] = {}
    layouts = (
        (weight * v_weight * e_weight, replace(degrees, vpp=vpp, ep=ep))
        for weight, degrees in _degrees(run)
        for vpp, v_weight in _virtual(run, degrees)
        for ep, e_weight in _expert_ranks(run, degrees)
    )
    for weight, degrees in layouts:
        own = sorted(_with_settings(run, device, weight, degrees), key=lambda c: -c.weight)[:_BEAM]
        groups.setdefault((degrees.tp, degrees.pp, degrees.cp), []).extend(own)
    weighed = iter(_weighed(run, device, [c for group in groups.values() for c in group]))  # one evaluation for all
    groups = {key: [next(weighed) for _ in group] for key, group in groups.items()}
    chosen = sorted(groups.values(), key=lambda group: -sum(c.weight for c in group))[:_LAYOUTS]
    top = max(c.weight for group in chosen for c in group)
    kept = [c for group in chosen for c in _likeliest(group, MOST // len(chosen)) if c.weight >= LEAST_WEIGHT * top]
    total = sum(c.weight for c in kept)
    return tuple(replace(c, weight=c.weight / total) for c in sorted(kept, key=lambda c: -c.weight))


def _likeliest(group: list[Candidate], most: int) -> list[Candidate]:
    """The ``most`` likeliest settings of one layout, scaled to the weight of all of its settings."""
    first = sorted(group, key=lambda c: -c.weight)[:most]
    scale = sum(c.weight for c in group) / sum(c.weight for c in first)
    return [replace(c, weight=c.weight * scale) for c in first]


def _with_settings(run: MeasuredRun, device: Device, weight: float, degrees: Degrees) -> list[Candidate]:
    """Every combination of the options of a layout."""
    options: dict[str, Sequence[tuple[Any, float]]] = {
        "precision": _precisions(run, device),
        "micro_batch": _micro_batches(run, degrees),
        "recompute": _recomputes(run),
        "zero": _zeros(run, degrees),
        "sequence_parallel": _sequence_parallel(run, degrees),
        "attention": _attentions(run),
        "offload": _offloads(run),
        "overlaps_data": _overlaps_data(run, degrees),
    }
    out = []
    for chosen in product(*options.values()):
        setting = dict(zip(options, (option for option, _ in chosen), strict=True))
        likely, ranks = prod((w for _, w in chosen), start=weight), _shard_ranks(run, degrees, setting["zero"])
        out.append(Candidate(weight=likely, degrees=degrees, shard_ranks=ranks, **setting))
    return out


def _weighed(run: MeasuredRun, device: Device, found: list[Candidate]) -> list[Candidate]:
    needed = needed_bytes(run, found) if found else ()
    weighed = [
        replace(
            c, weight=c.weight * fit_weight(float(size), device.memory_bytes), fits=bool(size <= device.memory_bytes)
        )
        for c, size in zip(found, needed, strict=True)
    ]
    return _as_needed(found, weighed) if run.recompute is None and run.framework in _AS_NEEDED else weighed


def _as_needed(before: list[Candidate], after: list[Candidate]) -> list[Candidate]:
    """Lowers the weight of a recomputation where less of it would fit on the device: runs recompute to save memory."""
    chance: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for one, other in zip(before, after, strict=True):
        chance.setdefault(_other_settings(one), []).append((_repeated(one), other.weight / one.weight))
    out = []
    for c in after:
        fitting = [] if c.offload else chance[_other_settings(c)]
        spare = max((p for again, p in fitting if again < _repeated(c)), default=0.0)
        out.append(replace(c, weight=c.weight * (1.0 - AVOIDED * spare)))
    return out


def _other_settings(c: Candidate) -> tuple[object, ...]:
    """All settings of a candidate except its recomputation."""
    return (c.precision, c.degrees, c.micro_batch, c.zero, c.sequence_parallel, c.attention, c.offload, c.overlaps_data)


def _repeated(c: Candidate) -> float:
    """Approximate share of the forward pass that runs again."""
    return c.recompute.share if c.recompute.kind == "full" else _REPEATED[c.recompute.kind]


def _degrees(run: MeasuredRun) -> list[tuple[float, Degrees]]:
    if run.degrees is not None:
        return [(1.0, run.degrees)]
    sharded = sharded_degrees(run.gpus, run.global_batch, run.sharding)
    if sharded is not None and (run.framework in _SHARDED or (run.sharding and 3 in run.sharding.stages)):
        return [(1.0, sharded)]
    model = run.model
    found = [
        d
        for d in possible_degrees(run.gpus, run.global_batch, model.heads, model.layers, run.gpus_per_node)
        if d.pp == 1 or run.framework not in _WHOLE_BATCH
    ]
    if not found:
        cp = run.gpus // gcd(run.gpus, run.global_batch)
        found = [Degrees(tp=1, pp=1, cp=cp, dp=run.gpus // cp, vpp=1, ep=None)]
    if run.adapter is not None:  # adapter runs that state degrees all cut the sequence, which frozen weights allow
        return [(1.0 / (d.tp**2 * d.pp**3 * d.cp**0.5), d) for d in found]
    return [(1.0 / (d.tp * d.pp**1.5 * d.cp) ** 2, d) for d in found]


def _virtual(run: MeasuredRun, degrees: Degrees) -> list[tuple[int, float]]:
    if degrees.vpp is not None:
        return [(degrees.vpp, 1.0)]
    if degrees.pp == 1:
        return [(1, 1.0)]
    per_stage = max(1, run.model.layers // degrees.pp)
    chunks = [v for v in range(2, min(per_stage, 12) + 1) if per_stage % v == 0] or [1]
    likely = sorted({chunks[0], chunks[-1]})
    interleaved = [(v, 1.0 / len(likely)) for v in likely]
    if run.schedule is not None or likely == [1]:
        return interleaved
    return [(1, 0.5), *((v, w / 2) for v, w in interleaved)]


def _expert_ranks(run: MeasuredRun, degrees: Degrees) -> list[tuple[int, float]]:
    """Sizes of ep, weighted by size: of 88 rows that state it 56 % have the largest, 27 % half of it and 15 % less."""
    if degrees.ep is not None:
        return [(degrees.ep, 1.0)]
    if run.model.experts is None:
        return [(1, 1.0)]
    most = min(64, gcd(run.model.experts.experts, run.gpus // degrees.pp))
    if run.framework in _WHOLE_BATCH:
        return [(1, 0.7), (min(8, most), 0.3)] if most > 1 else [(1, 1.0)]
    sizes = [size for size in divisors(most) if size >= min(8, most)]
    return [(size, size / sum(sizes)) for size in sizes]


def _normal(choices: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(choices.values())
    return [(name, weight / total) for name, weight in choices.items() if weight > 0]


def _precisions(run: MeasuredRun, device: Device) -> list[tuple[str, float]]:
    if run.precisions:
        return [(name, 1.0 / len(run.precisions)) for name in run.precisions]
    choices = table("defaults")["dtype_of_source"].get(run.source_key) or framework_default(run.framework, "dtype")
    able = {name: weight for name, weight in choices.items() if device.matrix_rate(name)}
    spare = next((name for name in ("bf16", "fp16", "fp32") if name in device.matrix_flops_per_s), "fp32")
    return _normal(able or {spare: 1.0})


def _micro_batches(run: MeasuredRun, degrees: Degrees) -> list[tuple[int, float]]:
    share = max(1, run.global_batch // degrees.dp)
    if run.micro_batch is not None and share % run.micro_batch == 0:
        return [(run.micro_batch, 1.0)]
    if run.accumulation and share % run.accumulation == 0:
        return [(share // run.accumulation, 1.0)]
    if run.framework in _WHOLE_BATCH and degrees.pp == 1:
        return [(share, 1.0)]
    weights = table("defaults")["micro_batch"]
    found = {size: float(weights[str(size)]) for size in legal_micro_batches(share)}
    total = sum(found.values())
    return [(size, weight / total) for size, weight in found.items()]


def _recomputes(run: MeasuredRun) -> list[tuple[Recomputation, float]]:
    if run.recompute is not None:
        return [(run.recompute, 1.0)]
    found = []
    for name, weight in _normal(recompute_default(run.framework, experts=run.model.experts is not None)):
        shares = PARTS if name == "full" and run.framework in _BY_LAYER else (1.0,)
        found += [(Recomputation(kind=name, share=share), weight / len(shares)) for share in shares]
    return found


def _zeros(run: MeasuredRun, degrees: Degrees) -> list[tuple[int, float]]:
    if run.sharding is not None:
        return [(stage, 1.0 / len(run.sharding.stages)) for stage in run.sharding.stages]
    if degrees.dp * degrees.cp == 1:
        return [(0, 1.0)]
    return [(int(name), weight) for name, weight in _normal(framework_default(run.framework, "zero"))]


def _shard_ranks(run: MeasuredRun, degrees: Degrees, zero: int) -> int:
    ranks = degrees.dp * degrees.cp
    if zero == 0:
        return 1
    within = habits_of(run.framework).within_node if run.sharding is None else run.sharding.within_node
    if within and zero == WHOLE_SHARDED:
        inside = run.gpus_per_node // gcd(run.gpus_per_node, degrees.tp)
        return inside if ranks % inside == 0 else ranks
    if run.sharding is None:
        return ranks
    own = shards_of(run.framework, run.sharding.ranks or 0, degrees.cp)
    stated = own or (ranks // run.sharding.replicas if run.sharding.replicas else ranks)
    return stated if 0 < stated <= ranks and ranks % stated == 0 else ranks


def _sequence_parallel(run: MeasuredRun, degrees: Degrees) -> list[tuple[bool, float]]:
    if degrees.tp == 1:
        return [(False, 1.0)]
    if run.sequence_parallel is not None:
        return [(run.sequence_parallel, 1.0)]
    return [(name == "true", weight) for name, weight in _normal(framework_default(run.framework, "sp"))]


def _attentions(run: MeasuredRun) -> list[tuple[str, float]]:
    if run.attention:
        return [(run.attention, 1.0)]
    own = table("defaults")["attention_of_source"].get(run.source_key)
    return _normal(own or framework_default(run.framework, "attention"))


def _overlaps_data(run: MeasuredRun, degrees: Degrees) -> list[tuple[bool, float]]:
    """Options of ``overlaps_data``: both are equally likely for software without known habits."""
    if habits_of(run.framework) != Habits() or degrees.dp * degrees.cp == 1 or "dp" in said_to_overlap(run.notes):
        return [(True, 1.0)]
    return [(True, 0.5), (False, 0.5)]


def _offloads(run: MeasuredRun) -> list[tuple[frozenset[str], float]]:
    if run.framework in _ON_HOST and run.recompute is None and not run.offload:
        return [(frozenset(), 0.5), (frozenset({"activations"}), 0.5)]
    if paged_optimizer(run):
        return [(frozenset(), 1.0 - PAGED), (frozenset({"optimizer"}), PAGED)]
    return [(frozenset(), 1.0)]
