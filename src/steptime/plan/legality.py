"""What makes a plan impossible: named reasons, each a row of a table, combined to a bitmask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Num, ceil_div
from steptime.plan.job import Job
from steptime.plan.plans import Plans

Broken = Callable[[Job, Plans], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason why plans do not work."""

    name: str
    meaning: str
    broken: Broken
    """Whether a plan breaks the rule (boolean or array of booleans)."""


def _indivisible_kv(job: Job, p: Plans) -> Any:
    kv_heads = job.model.kv_heads
    return (kv_heads % p.tp != 0) & (p.tp % kv_heads != 0)


def _share(job: Job, p: Plans) -> Num:
    return ceil_div(job.global_batch, p.dp)


MEMORY = "memory"
"""The reason that is found by the estimate, not by a rule."""

RULES: tuple[Rule, ...] = (
    Rule(name="heads", meaning="tp does not divide the attention heads",
         broken=lambda job, p: job.model.heads % p.tp != 0),
    Rule(name="kv_heads", meaning="tp and the key-value heads do not divide each other", broken=_indivisible_kv),
    Rule(name="sequence", meaning="fewer tokens in a sequence than ranks that share it",
         broken=lambda job, p: job.seq_len < p.tp * p.tp2 * p.cp),
    Rule(name="stages", meaning="more (virtual) stages than layers",
         broken=lambda job, p: p.pp * p.vpp > job.model.layers),
    Rule(name="batch", meaning="more data-parallel replicas than sequences in the global batch",
         broken=lambda job, p: p.dp > job.global_batch),
    Rule(name="micro_batch", meaning="the micro-batch is larger than a replica's share of the batch",
         broken=lambda job, p: (p.micro_batch > _share(job, p)) & (p.dp <= job.global_batch)),
    Rule(name="interleaving",
         meaning="interleaving needs equal virtual stages and micro-batches in multiples of the stages",
         broken=lambda job, p: (p.vpp > 1) & ((job.model.layers % (p.pp * p.vpp) != 0) | (p.pp < 2)
                                              | (ceil_div(_share(job, p), p.micro_batch) % p.pp != 0))),
    Rule(name="panels", meaning="more SUMMA panels than columns of the hidden dimension",
         broken=lambda job, p: p.panels > job.model.hidden),
    Rule(name="zero_pipeline", meaning="ZeRO-2 and ZeRO-3 move gradients or weights for every micro-batch: no pipeline",
         broken=lambda job, p: (p.zero >= 2) & (p.pp > 1)),
)  # fmt: skip

NAMES: tuple[str, ...] = (MEMORY, *(rule.name for rule in RULES))
MEANING: dict[str, str] = {MEMORY: "does not fit into device memory"} | {rule.name: rule.meaning for rule in RULES}
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
