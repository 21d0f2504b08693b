"""One plan or a block of plans: a struct whose columns are Python numbers or arrays.

Rules that make a plan impossible have named reasons, each a row of a table, combined to a bitmask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import numpy as np

from steptime.model.spec import LayerKind
from steptime.num import Num, divisors, floor_div, greatest_common_divisor, joined, maximum, minimum, taken, where
from steptime.plan.job import (
    Job,
    equal_but_for_ends,
    replica_micro_batches,
    replica_sequences,
    virtual_stage,
)
from steptime.schedule.schedules import EVEN_RANKS, NAMED, ROUNDS, SEVERAL_RANKS, TWICE_THE_RANKS
from steptime.schedule.schedules import Rule as ScheduleRule

RECOMPUTE_CODES = {
    "none": 0,
    "attention": 1,
    "full": 2,
    "norm": 4,
    "activation": 8,
    "up_projection": 16,
    "mlp": 32,
    "experts": 64,
    "outputs": 128,
    "attention_out": 256,
}
"""Bits of the column ``recompute``: whole layers, or parts of them (see :mod:`steptime.plan.recompute`)."""
ATTENTION_RECOMPUTE, FULL_RECOMPUTE = RECOMPUTE_CODES["attention"], RECOMPUTE_CODES["full"]
AXES = ("tp", "tp2", "cp", "dp", "pp")
"""Axes of the device mesh as launchers number ranks, innermost first; no dimensions of a tensor."""
FOLDED_AXES = ("etp", "ep", "edp")
"""Axes of the experts, innermost first: they divide the same ranks as ``tp`` x ``cp`` x ``dp`` another way."""


def is_set(codes: Num, bit: int) -> Any:
    """True if a bit of the column ``recompute`` is set (boolean or array of booleans).

    >>> bool(is_set(5, RECOMPUTE_CODES["norm"])), bool(is_set(2, RECOMPUTE_CODES["norm"]))
    (True, False)
    """
    if isinstance(codes, np.ndarray):
        return (codes.astype(np.int64) & bit) != 0
    return np.bool_(int(codes) & bit)


def launch_order(degrees: Mapping[str, Any], ranks: int, domain: int, order: Sequence[str] = AXES) -> dict[str, Any]:
    r"""Ranks of each axis that share a fast domain if launchers number ranks along the axes, innermost first.

    $$i_a = \gcd(d_a,\, r_a), \qquad r_{a+1} = r_a / i_a, \qquad r_1 = \max \{ u \le D : u \mid n \}$$

    where $d_a$ is the degree of the $a$-th of :data:`AXES`, $n$ = `ranks` and $D$ = `domain` are devices: the used
    devices of a domain divide those of the plan.

    Args:
        degrees: axis -> ranks, or an array of them.
        ranks: devices of the plan.
        domain: devices of a fast domain.
        order: axes, innermost first.

    Source: definition; the order is Megatron-Core's `tp-cp-ep-dp-pp` and torchtitan's mesh (`tp` innermost).

    >>> launch_order({"tp": 4, "dp": 4, "pp": 2}, 32, 8)
    {'tp': 4, 'dp': 2, 'pp': 1}
    """
    inside, room = {}, max(used for used in divisors(ranks) if used <= domain)
    for axis in order:
        if axis in degrees:
            inside[axis] = np.gcd(degrees[axis], room)
            room = room // inside[axis]
    return {axis: each if isinstance(each, np.ndarray) else int(each) for axis, each in inside.items()}


SHARED_FROM: Mapping[str, int] = {"optimizer": 1, "gradients": 2, "weights": 3}
"""State -> first stage of ZeRO that shards it (Rajbhandari et al., arXiv 1910.02054, section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Degrees, micro-batch and placement; every column one number or one array of equal length."""

    tp: Num = 1
    """Tensor-parallel ranks (heads, hidden)."""
    tp2: Num = 1
    """Second tensor axis of SUMMA (sequence rows of activations, rows of weights)."""
    cp: Num = 1
    """Context-parallel ranks (sequence)."""
    pp: Num = 1
    """Pipeline stages."""
    dp: Num = 1
    """Data-parallel replicas."""
    vpp: Num = 1
    """Virtual stages per rank."""
    micro_batch: Num = 1
    """Sequences per micro-batch and replica."""
    panels: Num = 1
    """Panels of a SUMMA product."""
    recompute: Num = 0
    """Sum of :data:`RECOMPUTE_CODES`."""
    recompute_every: Num = 1
    """Full recomputation of every n-th layer."""
    zero: Num = 1
    """ZeRO stage: 1: the data-parallel ranks shard optimiser states, 2: gradients too, 3: weights too."""
    shard: Num = 0
    """Ranks over which ZeRO shards; groups of this many ranks are replicas. 0: all data-parallel ranks."""
    sp: Num = 1
    """1: between products the ranks of ``tp`` shard the sequence (sequence parallelism); 0: each has all of it."""
    ep: Num = 1
    """Expert-parallel ranks: each has some of the experts."""
    etp: Num = 1
    """Tensor-parallel ranks of one expert."""
    in_tp: Num = 1
    """Ranks of a tensor-parallel group that share a fast domain."""
    in_tp2: Num = 1
    in_cp: Num = 1
    in_dp: Num = 1
    in_pp: Num = 1
    at_tp: Num = 1
    """Fast domains from one member of a tensor-parallel group to the next (:mod:`steptime.plan.placements`)."""
    at_tp2: Num = 1
    at_cp: Num = 1
    at_dp: Num = 1
    at_pp: Num = 1

    def take(self, index: Any) -> Plans:
        """The rows at ``index``; a column that is one number stays one."""
        return Plans(**{n: taken(c, index) for n, c in self.columns().items()})

    def columns(self) -> dict[str, Num]:
        """Column by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def row(self, index: int) -> Plans:
        """One row as Python numbers."""
        picked = {n: int(taken(c, index)) for n, c in self.columns().items()}
        return Plans(**picked)

    def is_alone(self, axis: str) -> bool:
        """True if an axis has one rank in every plan, and so no traffic."""
        ranks: Num = getattr(self, axis)
        return not isinstance(ranks, np.ndarray) and ranks == 1

    def inside(self, axis: str) -> Num:
        """Ranks of an axis that share a fast domain; a folded axis has the room that the axes inside it leave."""
        if axis in FOLDED_AXES:
            return self._folded_inside(axis)
        column: Num = getattr(self, f"in_{axis}")
        return column

    def is_near(self, axis: str) -> Any:
        """True if all ranks of an axis share a fast domain, plan by plan."""
        return self.inside(axis) >= getattr(self, axis)

    def _folded_inside(self, axis: str) -> Num:
        room: Num = self.in_tp * self.in_cp * self.in_dp
        for each in FOLDED_AXES:
            degree: Num = getattr(self, each)
            inside = greatest_common_divisor(degree, room)
            if each == axis:
                return inside
            room = room // inside
        raise AssertionError(axis)

    def in_order(self, domain: int, order: Sequence[str] = AXES) -> Plans:
        """One plan placed as launchers number ranks (:func:`launch_order`).

        >>> Plans(tp=4, dp=4, pp=2).in_order(8).in_dp, Plans(tp=8, dp=8).in_order(72).in_dp
        (2, 8)
        """
        inside = launch_order({axis: int(getattr(self, axis)) for axis in AXES}, int(self.ranks), domain, order)
        return self.with_columns({f"in_{axis}": ranks for axis, ranks in inside.items()})

    def gathers(self, micro_batches: Num, updates: Num = 1.0) -> Num:
        """Number of times that a step gathers weights: with ZeRO-3 for each of ``micro_batches``, else once for each of
        the step's ``updates``."""
        return where(self.shares("weights"), micro_batches, updates)

    def reductions(self, micro_batches: Num, updates: Num = 1.0) -> Num:
        """Number of times that a step reduces gradients: from ZeRO-2 on after each of ``micro_batches``, else once for
        each of the step's ``updates``."""
        return where(self.shares("gradients"), micro_batches, updates)

    @property
    def recomputed(self) -> Num:
        """Share of the layers that are recomputed in full.

        >>> Plans(recompute=FULL_RECOMPUTE, recompute_every=4).recomputed
        0.25
        """
        return where(is_set(self.recompute, FULL_RECOMPUTE), 1.0, 0.0) / self.recompute_every

    @property
    def has_shards(self) -> bool:
        """True if any of the plans may shard over fewer ranks than a group has; single plans without have 0."""
        return isinstance(self.shard, np.ndarray) or bool(self.shard)

    def shares(self, what: str) -> Any:
        """True if ZeRO shards ``optimizer`` states, ``gradients`` or ``weights``, plan by plan.

        >>> [Plans(zero=stage).shares("gradients") for stage in range(4)]
        [False, False, True, True]
        """
        return self.zero >= SHARED_FROM[what]

    def shards(self, what: str, ranks: Num) -> Num:
        """Shards of ``optimizer`` states, ``gradients`` or ``weights`` over ``ranks``: 1 if each rank has all.

        >>> Plans(zero=1, dp=8).shards("optimizer", 8), Plans(zero=1, dp=8).shards("weights", 8)
        (8, 1)
        """
        return where(self.shares(what), self.sharing_ranks(ranks), 1)

    def sharing_ranks(self, ranks: Num) -> Num:
        """Ranks of a group of ``ranks`` over which ZeRO shards: all, or one replica of the shards.

        >>> Plans(dp=64).sharing_ranks(64), Plans(dp=64, shard=8).sharing_ranks(64)
        (64, 8)
        """
        if not self.has_shards:
            return ranks
        return where(self.shard > 0, minimum(self.shard, ranks), ranks)

    def shared_out(self, *, experts: bool) -> Num:
        """1 if ZeRO shards weights over several ranks, else 0; ``experts``: those of routed experts, else the rest."""
        ranks = self.sharing_ranks(self.edp if experts else self.dp * self.cp)
        return where(ranks > 1, 1.0, 0.0)

    @property
    def edp(self) -> Num:
        """Ranks that hold the same experts: ``tp`` x ``cp`` x ``dp`` over ``ep`` x ``etp``, but at least one."""
        ranks: Num = self.tp * self.cp * self.dp
        return maximum(floor_div(ranks, self.ep * self.etp), 1)

    @property
    def ranks(self) -> Num:
        """Devices that the plan uses."""
        return self.tp * self.tp2 * self.cp * self.pp * self.dp

    @property
    def domain_ranks(self) -> Num:
        """Devices that the placement puts into one fast domain."""
        return self.in_tp * self.in_tp2 * self.in_cp * self.in_dp * self.in_pp

    def with_columns(self, columns: Mapping[str, Num]) -> Plans:
        """The plans with some columns replaced."""
        return replace(self, **dict(columns))


COLUMNS = tuple(field.name for field in fields(Plans))


def rows_of(plans: Plans) -> int:
    """Rows of a block."""
    return max((len(c) for c in plans.columns().values() if isinstance(c, np.ndarray)), default=1)


def as_float(plans: Plans) -> Plans:
    """Columns as float64, in which products are exact to 2^53 and do not overflow."""
    return Plans(**{n: c.astype(np.float64) if isinstance(c, np.ndarray) else c for n, c in plans.columns().items()})


def concatenate(blocks: Sequence[Plans], lengths: Sequence[int]) -> Plans:
    """All rows of several blocks, in order; ``lengths`` are their numbers of rows. One number for all stays one."""
    return Plans(**{name: joined([getattr(block, name) for block in blocks], lengths) for name in COLUMNS})


Broken = Callable[[Job, Plans], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason why plans do not work."""

    name: str
    meaning: str
    broken: Broken
    """Function that is True for plans that break the rule (boolean or array of booleans)."""
    always: bool = False
    """True if the rule holds for captured modules too."""
    of_mesh: bool = True
    """True if degrees that break it with a micro-batch and virtual stages of 1 break it with all others too."""


def _indivisible_heads(job: Job, p: Plans) -> Any:
    """True if the tensor ranks do not divide heads, of all kinds of layers, attention and mixers included."""
    model, ranks = job.model, _tensor_ranks(job, p)
    heads = {each for kind in model.kinds for each in cut_heads(kind)} or {model.heads}
    return reduce(or_, (each % ranks != 0 for each in sorted(heads)))


def cut_heads(kind: LayerKind) -> list[int]:
    """Counts of a layer of a kind that the tensor ranks have to divide."""
    found = [kind.block.heads] if kind.attention or any(op.form in ("core", "cross") for op in kind.operators) else []
    for op in kind.operators:
        found += [int(value) for name, value in op.sizes if name in ("heads", "blocks") and op.form != "index_scores"]
    return found


def _indivisible_kv(job: Job, p: Plans) -> Any:
    kv_heads, ranks = job.model.kv_heads, _tensor_ranks(job, p)
    return (kv_heads % ranks != 0) & (ranks % kv_heads != 0)


def _tensor_ranks(job: Job, p: Plans) -> Any:
    """Number of ranks that cut the heads: tensor ranks, with Ulysses times the context ranks."""
    return p.tp * p.cp if job.context == "ulysses" else p.tp


def _wrong_experts(job: Job, p: Plans) -> Any:
    experts = job.model.experts
    return p.ep * p.etp > 1 if experts is None else experts.experts % p.ep != 0


def _uneven_expert(job: Job, p: Plans) -> Any:
    experts = job.model.experts
    return experts is not None and experts.expert_ffn_hidden % p.etp != 0


def _empty_ends(job: Job) -> int:
    """Virtual stages that may have only embedding or head, as their rank has layers in its other virtual stages.

    Source: Llama 3 (arXiv 2407.21783, section 3.3.2), 126 layers in 128 virtual stages; torchtitan,
    `pipeline_parallel_first_stage_less_layers`; Megatron-Core, `--account-for-embedding-in-pipeline-split`.
    """
    return 0 if job.pipeline.folded or job.captured is not None else 2


def _unequal(job: Job, p: Plans) -> Any:
    return np.logical_not(equal_but_for_ends(*virtual_stage(job.model.layers, p.pp, p.vpp)))


def _unshared_on_host(job: Job, p: Plans) -> Any:
    if "parameters" not in job.offload:
        return False
    alone = p.shared_out(experts=False) == 0
    if job.model.experts is not None:
        alone = alone | (p.shared_out(experts=True) == 0)
    return alone | np.logical_not(p.shares("weights"))


def _not_interleaved(job: Job, p: Plans) -> Any:
    return (p.vpp > 1) & (_unequal(job, p) | (p.pp < 2)) | _unserved(job, p, ROUNDS.name)


def _unserved(job: Job, p: Plans, name: str) -> Any:
    """True if a plan breaks a rule of its pipeline schedule that is counted under a name."""
    row = job.pipeline
    rules = [rule for rule in row.rules if rule.name == name]
    if not rules:
        return False
    micro_batches = replica_micro_batches(job.global_batch, p.dp, p.micro_batch)
    block = job.counts(p, micro_batches)
    return np.logical_not(reduce(and_, (rule.holds(block) for rule in rules)))


def _served(rule: ScheduleRule) -> Rule:
    """A rule of schedules as a rule of plans."""
    return Rule(
        name=rule.name,
        always=True,
        meaning=f"the schedule requires {rule.text}",
        broken=partial(_unserved, name=rule.name),
        of_mesh=rule in (EVEN_RANKS, TWICE_THE_RANKS),
    )


def _beyond_replica(job: Job, p: Plans) -> Any:
    return (p.micro_batch > replica_sequences(job.global_batch, p.dp)) & (p.dp <= job.global_batch)


MEMORY = "memory"
"""Reason of plans that do not fit in memory, found by the estimate and not by a rule."""
RISK = "oom_probability"
"""Reason of plans that fit but that a search leaves out, because they may run out of memory."""

RULES: tuple[Rule, ...] = (
    Rule(
        name="heads",
        meaning="tp (with Ulysses tp x cp) does not divide the attention heads",
        broken=_indivisible_heads,
    ),
    Rule(name="kv_heads", meaning="tp and the key-value heads do not divide each other", broken=_indivisible_kv),
    Rule(
        name="sequence",
        meaning="fewer tokens in a sequence than ranks that share it",
        broken=lambda job, p: job.seq_len < p.tp * p.tp2 * p.cp,
    ),
    Rule(
        name="stages",
        always=True,
        meaning="more (virtual) stages than layers, embedding and head",
        broken=lambda job, p: p.pp * p.vpp > job.model.layers + where(p.vpp > 1, _empty_ends(job), 0),
    ),
    Rule(
        name="batch",
        always=True,
        meaning="more data-parallel replicas than sequences (or samples) in the global batch",
        broken=lambda job, p: p.dp > job.global_batch,
    ),
    Rule(
        name="micro_batch",
        always=True,
        meaning="the micro-batch is larger than a replica's share of the batch",
        broken=_beyond_replica,
    ),
    Rule(
        name="interleaving",
        always=True,
        meaning="virtual stages are unequal within the ends, or pp does not divide the micro-batches",
        broken=_not_interleaved,
    ),
    Rule(
        name="panels",
        meaning="more SUMMA panels than columns of the hidden dimension",
        broken=lambda job, p: p.panels > job.model.hidden,
    ),
    Rule(
        name="zero_pipeline",
        always=True,
        meaning="ZeRO-2 and ZeRO-3 move gradients or weights for every micro-batch: no pipeline",
        broken=lambda job, p: p.shares("gradients") & (p.pp > 1),
    ),
    Rule(
        name="host_weights",
        meaning="weights on the host are those that ZeRO-3 shards over several ranks",
        broken=_unshared_on_host,
        of_mesh=False,
    ),
    Rule(name="experts", meaning="ep does not divide the experts, or there are none", broken=_wrong_experts),
    Rule(name="expert_width", meaning="etp does not divide the width of an expert", broken=_uneven_expert),
    Rule(
        name="expert_mesh",
        meaning="ep x etp does not divide tp x cp x dp",
        broken=lambda job, p: (p.tp * p.cp * p.dp) % (p.ep * p.etp) != 0,
    ),
    Rule(
        name="expert_sequence",
        meaning="experts with tp need sequence parallelism",
        broken=lambda job, p: (job.model.experts is not None) & (p.tp > 1) & (p.sp == 0),
    ),
    Rule(
        name="summa_model",
        meaning="SUMMA is not modelled for experts, latent attention and kinds of layers",
        broken=lambda job, p: (
            (job.model.experts is not None or job.model.latent is not None or bool(job.model.kinds)) & (p.tp2 > 1)
        ),
    ),
    Rule(
        name="shard",
        always=True,
        meaning="the ranks over which ZeRO shards do not divide dp",
        broken=lambda job, p: p.dp % where(p.shard > 0, p.shard, 1) != 0,
    ),
    Rule(
        name="recompute_every",
        always=True,
        meaning="recomputing every n-th layer needs full recomputation",
        broken=lambda job, p: (p.recompute_every > 1) & ~is_set(p.recompute, FULL_RECOMPUTE),
    ),
    Rule(
        name=SEVERAL_RANKS.name,
        always=True,
        meaning=f"the schedule requires {SEVERAL_RANKS.text} (pp)",
        broken=lambda job, p: False if job.pipeline.one_rank else p.pp < 2,
    ),
    *map(_served, NAMED),
    Rule(
        name="schedule",
        always=True,
        meaning="the schedule requires something else (steptime schedules NAME)",
        broken=partial(_unserved, name="schedule"),
        of_mesh=False,
    ),
    Rule(
        name="causal_slices",
        always=True,
        meaning="slices of sequences need causal layers of a catalogue's kind, and a token each",
        broken=lambda job, p: not job.is_cut,
        of_mesh=False,
    ),
    Rule(
        name="schedule_offload",
        always=True,
        meaning="the schedule is not modelled with activations on the host",
        broken=lambda job, p: not job.pipeline.to_host and "activations" in job.offload,
    ),
)


def _whole(job: Job) -> bool:
    return job.captured is not None and not job.captured.repeats


def _pairless(job: Job, p: Plans) -> Any:
    return (p.tp > 1) & (job.captured is not None and len(job.captured.ranks) < 2)


def _uncut(job: Job, p: Plans) -> Any:
    ranks = () if job.captured is None else job.captured.ranks
    known = np.isin(p.tp, ranks) if isinstance(p.tp, np.ndarray) else p.tp in ranks
    return (p.tp > 1) & ~np.asarray(known) & (len(ranks) > 1)


CAPTURED_RULES: tuple[Rule, ...] = (
    Rule(
        name="no_blocks",
        meaning="a pipeline needs a run of equal blocks, which the module has not",
        broken=lambda job, p: (p.pp > 1) & _whole(job),
    ),
    Rule(
        name="no_pairs",
        meaning="tensor ranks need pairs of products with weights, which the module has not",
        broken=_pairless,
    ),
    Rule(name="tensor_width", meaning="tp does not divide the heads or widths that tensor ranks cut", broken=_uncut),
    Rule(
        name="token_shares",
        meaning="fewer tokens in a sequence than tensor ranks that share it",
        broken=lambda job, p: (
            (p.tp > 1)
            & (p.sp > 0)
            & (p.micro_batch * job.seq_len < p.tp)
            & (job.captured is not None and job.captured.sequence_parallel and job.seq_len > 1)
        ),
    ),
    Rule(
        name="recompute_blocks",
        meaning="recomputing layers needs a run of equal blocks, which the module has not",
        broken=lambda job, p: is_set(p.recompute, FULL_RECOMPUTE) & _whole(job),
    ),
    Rule(
        name="recompute_parts",
        meaning="a captured module recomputes whole blocks or nothing",
        broken=lambda job, p: (p.recompute != 0) & ~is_set(p.recompute, FULL_RECOMPUTE),
    ),
    Rule(
        name="uncaptured_axes",
        meaning="context, second tensor and expert axes are unknown to a captured module",
        broken=lambda job, p: p.cp * p.tp2 * p.ep * p.etp > 1,
    ),
)
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
