"""Cost of batches of unequal lengths: each way to make them, estimated at the lengths that it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from typing import Any, Final

import numpy as np

from steptime.api.calls import estimate
from steptime.cost.lengths import (
    Shares,
    attended_length,
    largest_normal,
    longest_of,
    mean_of,
    slowest_over_mean,
)
from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.jobs.batches.spread import Lengths, context_load, lengths_of, packed
from steptime.options import CHOICES
from steptime.plan.plans import NAMES

PARTS: Final = 8
"""Number of lengths at which a distribution of micro-batches is estimated."""
DRAWN: Final = 4096
"""Number of documents packed to find the fill of sequences."""
SEQUENCES: Final = 64
"""Number of packed sequences for which the load of context ranks is computed."""
BUCKETS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make batches."""

    name: str
    what: str
    useful_share: float
    """Tokens of documents over computed tokens."""
    attended: float
    """Length of equal documents with the same number of attention pairs per token."""
    slowest: float
    """Step time over the step time of replicas with equal work."""
    step_time_s: float
    useful_tokens_per_s: float
    context_load: float
    """Attention of the fullest context rank over the mean."""
    tops: tuple[int, ...]
    """Lengths to which sequences are padded."""
    peak_memory_bytes: float
    """Peak of a device, at the longest sequence."""
    reasons: tuple[str, ...]
    """Reasons why estimates at some lengths are not feasible."""

    @property
    def feasible(self) -> bool:
        """True if every length fits and is legal."""
        return not self.reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Ways to make batches of one distribution of lengths: feasible ways first, the fastest first."""

    lengths: Lengths
    ways: tuple[Way, ...]
    plan: Mapping[str, Any]
    memory_capacity_bytes: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        own = self.lengths
        names = ("name", "what", "useful_share", "attended", "slowest", "step_time_s", "useful_tokens_per_s")
        more = ("context_load", "peak_memory_bytes", "feasible")
        return {
            "schema_version": SCHEMA_VERSION,
            "lengths": {
                "name": own.name,
                "mean": mean_of(own.shares),
                "longest": own.shares[-1][0],
                "attended": attended_length(own.shares),
                "cut_share": own.cut_share,
            },
            "ways": [
                {
                    **{name: getattr(way, name) for name in (*names, *more)},
                    "reasons": list(way.reasons),
                    "tops": list(way.tops),
                }
                for way in self.ways
            ],
            "plan": dict(self.plan),
            "memory_capacity_bytes": self.memory_capacity_bytes,
            "notes": list(self.notes),
        }


def batches(
    model: str,
    cluster: str,
    *,
    lengths: str,
    buckets: int = BUCKETS,
    plan: Mapping[str, Any] | None = None,
    seq: int | None = None,
    **settings: Any,
) -> Batches:
    """Compare padding, bucketing and packing of sequences of unequal lengths, each by estimates of its lengths.

    Args:
        model: catalogue name, ``config.json`` or TOML file.
        cluster: name or file.
        lengths: distribution of the documents: ``lognormal:MEAN,SIGMA``, ``LENGTH=SHARE,...`` or a file.
        buckets: number of lengths to which ``bucket`` pads sequences.
        plan: plan of an estimate.
        seq: tokens of the longest sequence, at which documents are cut.
        settings: settings of an estimate: ``gpus``, ``global_batch`` (sequences of a step), ``framework``, ...

    Raises:
        UserError: the distribution or the job is wrong.
    """
    if not 1 <= buckets <= 64:
        raise UserError(f"{buckets} buckets: 1 to 64", hint="give --buckets 4")

    @lru_cache(maxsize=256)
    def at(tokens: int, document: float | None = None) -> Estimate:
        more = {} if document is None or document >= tokens else {"document_length": document}
        return estimate(model, cluster, plan={**taken, **more}, seq=tokens, **settings)

    whole = estimate(model, cluster, plan=plan, seq=seq, **settings)
    taken = plan if plan and set(plan) - set(CHOICES) else whole.plan
    longest = int(whole.workload["seq_len"])
    given = lengths_of(lengths, longest)
    job = _Job(
        micro_batch=int(whole.plan["micro_batch"]),
        micro_batches=int(whole.plan["micro_batches"]),
        replicas=int(whole.plan["dp"]),
        cp=int(whole.plan.get("cp", 1)),
        sequences=int(whole.workload["global_batch"]),
    )
    ways = (*_padded(given, job, at, buckets), *_packed(given, job, at))
    ranked = sorted(ways, key=lambda way: (not way.feasible, -way.useful_tokens_per_s))
    return Batches(
        lengths=given,
        ways=tuple(ranked),
        plan=whole.plan,
        memory_capacity_bytes=whole.memory_capacity_bytes,
        notes=tuple(_notes(given)),
    )


def _notes(given: Lengths) -> list[str]:
    out = []
    if given.cut_share:
        out.append(f"{given.cut_share:.1%} of the tokens are beyond the longest sequence and cut")
    if abs(given.written - 1) > 1e-6:
        out.append(f"the shares add up to {given.written:.6g}: they are scaled to 1")
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    micro_batch: int
    micro_batches: int
    replicas: int
    cp: int
    sequences: int


At = Callable[..., Estimate]


def _padded(given: Lengths, job: _Job, at: At, buckets: int) -> list[Way]:
    """Ways that pad to the longest sequence, to the longest of a micro-batch, or to the top of a bucket."""
    from steptime.rewrite.buckets import best_buckets

    by_length: dict[int, float] = {}
    parts = _coarse(given.shares, 64)
    for length, share in [*parts[:-1], (given.shares[-1][0], parts[-1][1])]:  # the last top holds the longest
        by_length[int(length)] = by_length.get(int(length), 0.0) + share
    ways = best_buckets(by_length, buckets, lambda n: at(_round(n, given.longest)).step_time_s, steps=1, compile_s=0.0)
    tops = sorted({_round(top, given.longest) for top in ways[-1].tops})
    bucketed = _to_tops(given.shares, tops)
    longest = _coarse(longest_of(given.shares, job.micro_batch), PARTS)
    rows: tuple[tuple[str, str, Shares], ...] = (
        ("pad", "to the longest sequence", [(float(given.longest), 1.0)]),
        (
            "pad micro-batch",
            f"to the longest of {job.micro_batch}",
            [(_round(n, given.longest), s) for n, s in longest],
        ),
        ("bucket", f"micro-batches of {_lengths_in_words(len(tops))}", bucketed),
    )
    return [_way(name, what, given, job, at, shares) for name, what, shares in rows]


def _lengths_in_words(count: int) -> str:
    return "one length" if count == 1 else f"one of {count} lengths"


def _way(name: str, what: str, given: Lengths, job: _Job, at: At, computed: Shares) -> Way:
    longest = max(int(computed[-1][0]), _round(given.shares[-1][0], given.longest))
    peak_bytes, reasons = _needs([at(longest), *(at(int(tokens)) for tokens, _ in computed)])
    times = [(at(int(tokens)).step_time_s, share) for tokens, share in computed]
    slowest = slowest_over_mean(sorted(times), job.micro_batches, job.replicas)
    step_s, useful = mean_of(times) * slowest, mean_of(given.shares)
    return Way(
        name=name,
        what=what,
        useful_share=useful / mean_of(computed),
        attended=attended_length(computed),
        slowest=slowest,
        step_time_s=step_s,
        useful_tokens_per_s=job.sequences * useful / step_s,
        context_load=1.0,
        tops=tuple(int(tokens) for tokens, _ in computed),
        peak_memory_bytes=peak_bytes,
        reasons=reasons,
    )


def _needs(estimates: Sequence[Estimate]) -> tuple[float, tuple[str, ...]]:
    """Largest peak memory of the estimates, and all reasons why one is not feasible."""
    found = {name for one in estimates for name in one.reasons}
    return max(one.peak_memory_bytes for one in estimates), tuple(name for name in NAMES if name in found)


def _packed(given: Lengths, job: _Job, at: At) -> list[Way]:
    """Ways that pack several documents into a sequence, with attention between documents or without."""
    bins = packed(given.drawn(DRAWN), given.longest)
    bins = bins[:-1] or bins  # the last one waits for documents that were not drawn
    fill = sum(map(sum, bins)) / (len(bins) * given.longest)
    alone = attended_length(given.shares)
    own = [sum(each**2 for each in one) / sum(one) for one in bins]
    ends = at(given.longest, alone), at(given.longest)
    apart, together = (one.step_time_s for one in ends)
    slope = (together - apart) / max(given.longest - alone, 1.0)
    spread_s = slope * float(np.std(own)) * largest_normal(job.replicas)
    waits_s = spread_s / sqrt(job.micro_batch * job.micro_batches)
    loads = [context_load(one, job.cp) for one in bins[:: max(len(bins) // SEQUENCES, 1)]] if job.cp > 1 else [1.0]
    rows = (
        ("pack", "documents apart", ends[0], apart + waits_s, (apart + waits_s) / apart, alone, float(np.mean(loads))),
        ("pack mixed", "documents that see each other", ends[1], together, 1.0, float(given.longest), 1.0),
    )
    return [
        Way(
            name=name,
            what=what,
            useful_share=fill,
            attended=attended,
            slowest=slowest,
            step_time_s=step_s,
            useful_tokens_per_s=job.sequences * given.longest * fill / step_s,
            context_load=load,
            tops=(given.longest,),
            peak_memory_bytes=peak_bytes,
            reasons=reasons,
        )
        for name, what, one, step_s, slowest, attended, load in rows
        for peak_bytes, reasons in [_needs([one])]
    ]


def _round(length: float, longest: int) -> int:
    """A length that tensor and context ranks can divide: the next multiple of 128, at most the longest."""
    return min(max(ceil(length / 128) * 128, 128), longest)


def _to_tops(shares: Shares, tops: Sequence[int]) -> list[tuple[float, float]]:
    out = dict.fromkeys(tops, 0.0)
    for length, share in shares:
        out[next(top for top in tops if top >= length)] += share
    return [(float(top), share) for top, share in out.items() if share]


def _coarse(shares: Shares, parts: int) -> list[tuple[float, float]]:
    """The distribution in parts of equal share, each at its mean."""
    out: list[tuple[float, float]] = []
    weight = total = 0.0
    for n, (length, share) in enumerate(shares):
        weight, total = weight + share, total + share * length
        if weight >= 1 / parts or n == len(shares) - 1:
            if weight > 0:
                out.append((ceil(total / weight - 1e-9), weight))
            weight = total = 0.0
    return out
