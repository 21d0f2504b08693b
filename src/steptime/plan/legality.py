"""What makes a plan impossible: named reasons, each a row of a table, combined to a bitmask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import where
from steptime.plan.job import Job, replica_micro_batches, replica_sequences
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set
from steptime.plan.schedules import ZERO_BUBBLE, equal_but_for_ends, virtual_stage

Broken = Callable[[Job, Plans], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason why plans do not work."""

    name: str
    meaning: str
    broken: Broken
    """Whether a plan breaks the rule (boolean or array of booleans)."""


def _indivisible_kv(job: Job, p: Plans) -> Any:
    kv_heads, ranks = job.model.kv_heads, _tensor_ranks(job, p)
    return (kv_heads % ranks != 0) & (ranks % kv_heads != 0)


def _tensor_ranks(job: Job, p: Plans) -> Any:
    """Ranks that cut the heads: with Ulysses the context ranks too."""
    return p.tp * p.cp if job.context == "ulysses" else p.tp


def _wrong_experts(job: Job, p: Plans) -> Any:
    experts = job.model.experts
    return p.ep * p.etp > 1 if experts is None else experts.experts % p.ep != 0


def _uneven_expert(job: Job, p: Plans) -> Any:
    experts = job.model.experts
    return experts is not None and experts.expert_ffn_hidden % p.etp != 0


def _unequal(job: Job, p: Plans) -> Any:
    return np.logical_not(equal_but_for_ends(*virtual_stage(job.model.layers, p.pp, p.vpp)))


def _not_interleaved(job: Job, p: Plans) -> Any:
    micro_batches = replica_micro_batches(job.global_batch, p.dp, p.micro_batch)
    return (p.vpp > 1) & (_unequal(job, p) | (p.pp < 2) | (micro_batches % p.pp != 0))


def _not_mirrored(job: Job, p: Plans) -> Any:
    micro_batches = replica_micro_batches(job.global_batch, p.dp, p.micro_batch)
    uneven = (p.pp % 2 != 0) | (p.vpp > 1) | (micro_batches % 2 != 0)
    return (job.stages_held > 1) & (uneven | (micro_batches < 2 * p.pp))


def _beyond_replica(job: Job, p: Plans) -> Any:
    return (p.micro_batch > replica_sequences(job.global_batch, p.dp)) & (p.dp <= job.global_batch)


MEMORY = "memory"
"""The reason that is found by the estimate, not by a rule."""
RISK = "oom_probability"
"""The reason of plans that fit, and that a search leaves out because they may run out of memory all the same."""

RULES: tuple[Rule, ...] = (
    Rule(name="heads", meaning="tp (with Ulysses tp x cp) does not divide the attention heads",
         broken=lambda job, p: job.model.heads % _tensor_ranks(job, p) != 0),
    Rule(name="kv_heads", meaning="tp and the key-value heads do not divide each other", broken=_indivisible_kv),
    Rule(name="sequence", meaning="fewer tokens in a sequence than ranks that share it",
         broken=lambda job, p: job.seq_len < p.tp * p.tp2 * p.cp),
    Rule(name="stages", meaning="more (virtual) stages than layers",
         broken=lambda job, p: p.pp * p.vpp > job.model.layers),
    Rule(name="batch", meaning="more data-parallel replicas than sequences (or samples) in the global batch",
         broken=lambda job, p: p.dp > job.global_batch),
    Rule(name="micro_batch", meaning="the micro-batch is larger than a replica's share of the batch",
         broken=_beyond_replica),
    Rule(name="interleaving",
         meaning="virtual stages are unequal within the ends, or pp does not divide the micro-batches",
         broken=_not_interleaved),
    Rule(name="panels", meaning="more SUMMA panels than columns of the hidden dimension",
         broken=lambda job, p: p.panels > job.model.hidden),
    Rule(name="zero_pipeline", meaning="ZeRO-2 and ZeRO-3 move gradients or weights for every micro-batch: no pipeline",
         broken=lambda job, p: (p.zero >= 2) & (p.pp > 1)),
    Rule(name="experts", meaning="ep does not divide the experts, or there are none", broken=_wrong_experts),
    Rule(name="expert_width", meaning="etp does not divide the width of an expert", broken=_uneven_expert),
    Rule(name="expert_mesh", meaning="ep x etp does not divide tp x cp x dp",
         broken=lambda job, p: (p.tp * p.cp * p.dp) % (p.ep * p.etp) != 0),
    Rule(name="expert_sequence", meaning="experts with tp need sequence parallelism",
         broken=lambda job, p: (job.model.experts is not None) & (p.tp > 1) & (p.sp == 0)),
    Rule(name="summa_model", meaning="SUMMA is not modelled for experts and latent attention",
         broken=lambda job, p: (job.model.experts is not None or job.model.latent is not None) & (p.tp2 > 1)),
    Rule(name="shard", meaning="the ranks that ZeRO shares out over do not divide dp",
         broken=lambda job, p: p.dp % where(p.shard > 0, p.shard, 1) != 0),
    Rule(name="recompute_every", meaning="recomputing every so many-th layer needs full recomputation",
         broken=lambda job, p: (p.recompute_every > 1) & ~is_set(p.recompute, FULL_RECOMPUTE)),
    Rule(name="zero_bubble", meaning="a zero-bubble schedule without stages, or with virtual ones",
         broken=lambda job, p: (job.schedule in ZERO_BUBBLE) & ((p.vpp > 1) | (p.pp < 2))),
    Rule(name="dualpipe",
         meaning="DualPipe wants an even pp without virtual stages, and an even number of micro-batches, at least 2 pp",
         broken=_not_mirrored),
    Rule(name="dualpipe_offload", meaning="DualPipe is not modelled with activations on the host",
         broken=lambda job, p: job.stages_held > 1 and "activations" in job.offload),
)  # fmt: skip


def _whole(job: Job) -> bool:
    return job.captured is not None and not job.captured.repeats


def _pairless(job: Job, p: Plans) -> Any:
    return (p.tp > 1) & (job.captured is not None and len(job.captured.ranks) < 2)


def _uncut(job: Job, p: Plans) -> Any:
    ranks = () if job.captured is None else job.captured.ranks
    known = np.isin(p.tp, ranks) if isinstance(p.tp, np.ndarray) else p.tp in ranks
    return (p.tp > 1) & ~np.asarray(known) & (len(ranks) > 1)


CAPTURED_RULES: tuple[Rule, ...] = (
    Rule(name="no_blocks", meaning="a pipeline needs a run of equal blocks, which the module has not",
         broken=lambda job, p: (p.pp > 1) & _whole(job)),
    Rule(name="no_pairs", meaning="tensor ranks need pairs of products with weights, which the module has not",
         broken=_pairless),
    Rule(name="tensor_width", meaning="tp does not divide the heads or widths that tensor ranks cut", broken=_uncut),
    Rule(name="token_shares", meaning="fewer tokens in a sequence than tensor ranks that share it",
         broken=lambda job, p: (p.tp > 1) & (p.sp > 0) & (p.micro_batch * job.seq_len < p.tp)
         & (job.captured is not None and job.captured.sequence_parallel and job.seq_len > 1)),
    Rule(name="recompute_blocks", meaning="recomputing layers needs a run of equal blocks, which the module has not",
         broken=lambda job, p: is_set(p.recompute, FULL_RECOMPUTE) & _whole(job)),
    Rule(name="uncaptured_axes", meaning="context, second tensor and expert axes are unknown to a captured module",
         broken=lambda job, p: p.cp * p.tp2 * p.ep * p.etp > 1),
)  # fmt: skip
"""Further rules for captured modules."""

NAMES: tuple[str, ...] = (MEMORY, *(rule.name for rule in (*RULES, *CAPTURED_RULES)))
MEANING: dict[str, str] = {
    MEMORY: "does not fit into device memory",
    RISK: "a larger chance of running out of memory than the limit asked for",
} | {rule.name: rule.meaning for rule in (*RULES, *CAPTURED_RULES)}
BIT: dict[str, int] = {name: 1 << i for i, name in enumerate(NAMES)}


def broken_rules(job: Job, plans: Plans, rules: tuple[Rule, ...] = RULES) -> Any:
    """Bitmask of the rules that each plan breaks (an integer, or an array of them)."""
    mask: Any = 0
    for rule in rules:
        broken = rule.broken(job, plans)
        bit = BIT[rule.name]
        mask = mask | (np.where(broken, bit, 0) if isinstance(broken, np.ndarray) else (bit if broken else 0))
    return mask


def names_of(mask: int) -> tuple[str, ...]:
    """Names of the bits that are set.

    >>> names_of(BIT["memory"] | BIT["heads"])
    ('memory', 'heads')
    """
    return tuple(name for name in NAMES if mask & BIT[name])
