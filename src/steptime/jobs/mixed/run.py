"""Plans for a job over several groups of devices: two ways to divide it, the slower group, and the waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, Final

from steptime.api.calls import asked_plan
from steptime.api.request import choice, whole
from steptime.api.searches import plan
from steptime.cost.collective import ring_all_reduce_s
from steptime.errors import PlanError, UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.estimate.single import Setting
from steptime.jobs.mixed.parties import Parties, Party, read_parties, record_of
from steptime.jobs.mixed.shares import best_shares
from steptime.jobs.mixed.stages import Job, Staged, best_staged, even_split
from steptime.model import parameter_terms

STAGES, DATA = "stages", "data"
WAYS: Final = {STAGES: "one pipeline over all groups", DATA: "whole replicas in each group"}
BOTH: Final = "both"
GRAIN: Final = 64
"""Number of parts into which the batch is divided between groups."""
FIXED: Final = ("tp", "dp", "pp", "micro_batch", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Plans of a job over several groups, fastest first."""

    parties: Parties
    plans: tuple[Mapping[str, Any], ...]
    """Plans with ``way``, ``step_time_s``, work and wait of each group, and the slower group."""
    alone: Mapping[str, float]
    """Step time of the best plan of each group by itself; infinite: it has none."""
    tried: int
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            **record_of(self.parties),
            "tried": self.tried,
            "plans": [dict(one) for one in self.plans],
            "alone": {name: None if time_s == inf else time_s for name, time_s in self.alone.items()},
            "notes": list(self.notes),
        }


def mixed(
    model: str,
    cluster: str,
    *,
    global_batch: int,
    way: str = BOTH,
    fix: Mapping[str, Any] | None = None,
    top: int = 3,
    **options: Any,
) -> Mixed:
    """Plans of a job over the groups of devices of a file.

    Args:
        model: catalogue name, ``config.json`` or TOML file.
        cluster: file of groups (:mod:`steptime.jobs.mixed.parties`).
        global_batch: sequences of a step.
        way: ``stages`` (one pipeline, unequal stages), ``data`` (unequal shares of the batch), or ``both``.
        fix: degrees common to all groups: ``tp dp pp micro_batch recompute``.
        top: pipelines to return, in addition to the best shares of the batch.
        options: ``seq dtype optimizer framework`` of the job.

    Raises:
        UserError: something in the input is wrong, or no way works; the message says why.
    """
    parties, fixed = read_parties(cluster), dict(fix or {})
    choice("way", way, (*WAYS, BOTH))
    for key in fixed:
        choice("key of fix", key, FIXED)
    whole("top", top, 1, 1000)
    job = Job(model, whole("global_batch", global_batch, len(parties.groups), 10**9), tuple(sorted(options.items())))
    found: list[dict[str, Any]] = []
    tried = 0
    if way in (STAGES, BOTH):
        pipelines, tried = best_staged(job, parties, fixed, top)
        found += [_of_stages(job, parties, one) for one in pipelines]
    if way in (DATA, BOTH):
        shares, more = _of_data(job, parties, fixed)
        found, tried = found + shares, tried + more
    if not found:
        raise PlanError(
            "no plan over all groups keeps the rules and fits",
            hint="give another --global-batch, more --gpus in the file, or drop --fix",
        )
    alone = {g.name: _searched(job, fixed, g, job.global_batch)[0] for g in parties.groups}
    ranked = sorted(found, key=lambda one: float(one["step_time_s"]))
    return Mixed(parties=parties, plans=tuple(ranked), alone=alone, tried=tried, notes=_notes(ranked, alone))


def _notes(ranked: Sequence[Mapping[str, Any]], alone: Mapping[str, float]) -> tuple[str, ...]:
    name = min(alone, key=lambda each: alone[each])
    if alone[name] > ranked[0]["step_time_s"]:
        return ()
    return (f"group {name} alone takes {alone[name]:.4g} s a step: the other groups do not pay",)


def _of_stages(job: Job, parties: Parties, one: Staged) -> dict[str, Any]:
    """A pipeline as plain data."""
    names = [parties.groups[n].name for n in one.cut.groups]
    even = even_split(job, parties, one.cut)
    waits = {name: one.step_s - busy for name, busy in zip(names, one.busy_s, strict=True)}
    starts = [sum(one.cut.stages[:n]) for n in range(len(names))]
    of_group = {
        name: {
            "tp": tp,
            "dp": one.cut.dp,
            "stages": stages,
            "layers": list(one.layers[at : at + stages]),
            "busy_s": busy,
            "waiting_s": waits[name],
            "memory_bytes": max(one.memory_bytes[at : at + stages]),
        }
        for name, tp, stages, busy, at in zip(names, one.cut.tp, one.cut.stages, one.busy_s, starts, strict=True)
    }
    return {
        "way": STAGES,
        "step_time_s": one.step_s,
        "micro_batch": one.cut.micro_batch,
        "recompute": one.cut.recompute,
        "order": names,
        "groups": of_group,
        "slower": min(waits, key=lambda name: waits[name]),
        "link_s": one.link_s,
        "even_step_time_s": None if even is None or not even.fits else even.step_s,
    }


@lru_cache(maxsize=1024)
def _best(job: Job, fixed: tuple[tuple[str, Any], ...], party: Party, batch: int) -> tuple[float, Any]:
    try:
        found = plan(
            job.model, party.cluster, gpus=party.gpus, global_batch=batch, fix=dict(fixed), top=1, **dict(job.options)
        )
    except UserError:
        return inf, None
    return (found.plans[0].step_time_s, found.plans[0].plan) if found.plans else (inf, None)


def _searched(job: Job, fixed: Mapping[str, Any], party: Party, batch: int) -> tuple[float, Any]:
    """Step time and fastest plan of a group for a share of the batch."""
    return _best(job, tuple(sorted(fixed.items())), party, batch)


def exchange_s(setting: Setting, parties: Parties) -> float:
    """Time of the all-reduce of gradients over the link between the groups, without overlap (s).

    Each group has summed its own gradients before; the sums travel once around the ring of groups and back.
    """
    size_bytes = parameter_terms(setting.job.model).total * setting.job.gradient_bytes
    ranks = len(parties.groups)
    return float(ring_all_reduce_s(size_bytes, ranks, 1, parties.link_Bps, parties.link_Bps, 0.0, parties.latency_s))


def _of_data(job: Job, parties: Parties, fixed: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The best shares of the batch as plain data, and the number of searches."""
    unit = max(job.global_batch // GRAIN, 1)
    while job.global_batch % unit:
        unit -= 1
    groups, before = parties.groups, _best.cache_info().misses
    times = [_time_of(job, fixed, party, unit) for party in groups]
    parts, slowest = best_shares(times, [unit] * len(groups), job.global_batch)
    if slowest == inf:
        return [], _best.cache_info().misses - before
    setting = asked_plan(job.model, groups[0].cluster, gpus=groups[0].gpus, **dict(job.options)).setting
    exchanged = exchange_s(setting, parties)
    of_group = {}
    for party, count in zip(groups, parts, strict=True):
        time_s, own = _searched(job, fixed, party, count * unit)
        of_group[party.name] = {
            "sequences": count * unit,
            "busy_s": time_s,
            "waiting_s": slowest - time_s,
            **{key: own[key] for key in ("tp", "cp", "dp", "pp", "micro_batch", "recompute", "zero")},
        }
    slower = min(of_group, key=lambda name: of_group[name]["waiting_s"])
    even = _even(job, fixed, groups, unit)
    record = {
        "way": DATA,
        "step_time_s": slowest + exchanged,
        "groups": of_group,
        "slower": slower,
        "link_s": exchanged,
        "even_step_time_s": None if even == inf else even + exchanged,
    }
    return [record], _best.cache_info().misses - before


def _time_of(job: Job, fixed: Mapping[str, Any], party: Party, unit: int) -> Any:
    return lambda parts: _searched(job, fixed, party, parts * unit)[0]


def _even(job: Job, fixed: Mapping[str, Any], groups: Sequence[Party], unit: int) -> float:
    """Step time of the slowest group if each device has the same number of sequences."""
    devices = sum(party.gpus for party in groups)
    shares = [max(round(job.global_batch * party.gpus / devices / unit), 1) * unit for party in groups[:-1]]
    shares.append(job.global_batch - sum(shares))
    if shares[-1] < 1:
        return inf
    return max(_searched(job, fixed, party, share)[0] for party, share in zip(groups, shares, strict=True))
