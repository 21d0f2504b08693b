"""One pipeline over several groups: each group has some of the stages, with layers to match its devices' speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.api.calls import asked_plan
from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.jobs.mixed.parties import Parties, Party
from steptime.num import Array, divisors
from steptime.schedule import SCHEDULES
from steptime.schedule.schedules import Pipeline
from steptime.simulation.graph import Transport, graph_of
from steptime.simulation.partition import Items, Ranks, SplitTask, best_split, even_counts, task_of
from steptime.simulation.simulate import Durations
from steptime.simulation.simulate import simulate as play
from steptime.simulation.stages import ModelItems, items_of
from steptime.simulation.times import once_of

DEEPEST: Final = 64
"""Largest number of stages of a pipeline."""
WIDEST: Final = 8
PLAYED: Final = 12
"""Number of plans whose step is simulated: the best by their slowest stage."""
MICRO_BATCHES: Final = (1, 2, 4, 8)
RECOMPUTE: Final = ("none", "full")
MOST_MICRO_BATCHES: Final = 1024
"""Largest number of micro-batches that are simulated; each further one takes as long as the last of them."""


class Cut(NamedTuple):
    """Division of the devices of a pipeline; groups in the order of the pipeline."""

    groups: tuple[int, ...]
    tp: tuple[int, ...]
    """Tensor-parallel ranks in each group."""
    stages: tuple[int, ...]
    dp: int
    micro_batch: int
    recompute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A pipeline with its layers split, its times and its memory."""

    cut: Cut
    counts: tuple[int, ...]
    """Items (embedding, layers, head) of each stage."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    step_s: float
    pipeline_s: float
    link_s: float
    """Seconds of a message between two groups."""
    stage_s: tuple[float, ...]
    """Seconds of the passes of one micro-batch, by stage."""
    busy_s: tuple[float, ...]
    """Seconds of the passes of a step, by group."""
    fits: bool
    memory_bytes: tuple[float, ...]
    """Memory of a device, by stage."""


class Job(NamedTuple):
    """The trained job, as :func:`steptime.api.calls.asked_plan` takes it."""

    model: str
    global_batch: int
    options: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def _evaluated(
    job: Job, party: Party, tp: int, dp: int, stages: int, micro_batch: int, recompute: str
) -> tuple[Evaluation, ModelItems] | None:
    """Evaluation of a group as if it had the whole model, and the model's items on it; None if a rule forbids it."""
    plan = {"tp": tp, "dp": dp, "pp": stages, "micro_batch": micro_batch, "recompute": recompute}
    try:
        asked = asked_plan(
            job.model,
            party.cluster,
            gpus=party.gpus,
            global_batch=job.global_batch,
            plan=plan,
            strategy="1d",
            **dict(job.options),
        )
    except UserError:
        return None
    setting = asked.setting
    e = evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)
    return e, items_of(e)


def cuts_of(parties: Parties, global_batch: int, fixed: Mapping[str, Any]) -> Iterator[Cut]:
    """All cuts to try: they use all devices, with the same replicas in each group."""
    groups = parties.groups
    replicas = [dp for dp in divisors(int(np.gcd.reduce([g.gpus for g in groups]))) if dp <= global_batch]
    for dp in replicas:
        widths = [[tp for tp in divisors(g.gpus // dp) if tp <= min(WIDEST, g.cluster.levels[0].group)] for g in groups]
        for tp in product(*widths):
            stages = tuple(g.gpus // dp // width for g, width in zip(groups, tp, strict=True))
            if sum(stages) > DEEPEST:
                continue
            for micro_batch, recompute in product(MICRO_BATCHES, RECOMPUTE):
                if dp * micro_batch > global_batch:
                    continue
                for order in permutations(range(len(groups))):
                    cut = Cut(
                        order, tuple(tp[n] for n in order), tuple(stages[n] for n in order), dp, micro_batch, recompute
                    )
                    if _keeps(cut, fixed):
                        yield cut


def _keeps(cut: Cut, fixed: Mapping[str, Any]) -> bool:
    own = {
        "dp": {cut.dp},
        "micro_batch": {cut.micro_batch},
        "recompute": {cut.recompute},
        "tp": set(cut.tp),
        "pp": {sum(cut.stages)},
    }
    return all(own[key] == {value} for key, value in fixed.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    """A cut with the times and memory of each item on its ranks."""

    cut: Cut
    parties: tuple[Party, ...]
    """Group of each stage."""
    found: tuple[tuple[Evaluation, ModelItems], ...]
    """Evaluation and items of each stage."""
    items: Items
    ranks: Ranks
    task: SplitTask
    micro_batches: int


def _laid(job: Job, parties: Parties, cut: Cut) -> _Laid | None:
    own, of_stage = [], []
    for n, tp, stages in zip(cut.groups, cut.tp, cut.stages, strict=True):
        party = parties.groups[n]
        found = _evaluated(job, party, tp, cut.dp, stages, cut.micro_batch, cut.recompute)
        if found is None:
            return None
        own += [found] * stages
        of_stage += [party] * stages
    micro_batches = -(-job.global_batch // (cut.dp * cut.micro_batch))
    depth = len(own)
    names = ("forward_s", "input_gradient_s", "weight_gradient_s", "state_bytes", "activation_bytes")
    items = Items(
        letters=own[0][1].items.letters,
        **{name: np.stack([getattr(each.items, name) for _, each in own]) for name in names},
    )
    ranks = Ranks(
        speed=np.ones(depth),
        memory_bytes=np.array([float(e.machine.memory_bytes) for e, _ in own]),
        fixed_bytes=np.array([each.fixed_bytes for _, each in own]),
        in_flight=np.array([float(min(depth - rank, micro_batches)) for rank in range(depth)])[:, None],
    )
    if depth > len(items.letters):
        return None
    return _Laid(
        cut=cut,
        parties=tuple(of_stage),
        found=tuple(own),
        items=items,
        ranks=ranks,
        task=task_of(items, ranks, np.arange(depth)),
        micro_batches=micro_batches,
    )


def link_s(parties: Parties, e: Evaluation) -> float:
    """Seconds of a message of one micro-batch from all ranks of a stage to a stage of another group."""
    senders = float(e.plans.dp * (e.plans.tp if e.plans.sp else 1))
    return parties.latency_s + senders * float(e.sizes.boundary_bytes) / parties.link_Bps


def _message_s(parties: Parties, laid: _Laid) -> Array:
    """Seconds of messages by sender and receiver."""
    depth = len(laid.parties)
    out = np.zeros((depth, depth))
    for rank in range(depth - 1):
        e = laid.found[rank][0]
        same = laid.parties[rank] is laid.parties[rank + 1]
        seconds = float(e.inputs.stage_link_s) if same else link_s(parties, e)
        out[rank, rank + 1] = out[rank + 1, rank] = seconds
    return out


def staged(job: Job, parties: Parties, laid: _Laid, counts: Sequence[int]) -> Staged:
    """Simulated step of a cut with a split of its items, under 1F1B."""
    ends = np.cumsum(counts)
    starts, depth = ends - np.asarray(counts), len(counts)

    def by_stage(values: Array) -> Array:
        return np.array([values[rank, starts[rank] : ends[rank]].sum() for rank in range(depth)])

    items, first = laid.items, laid.found[0][0]
    forward_s, inputs_s, weights_s = map(by_stage, (items.forward_s, items.input_gradient_s, items.weight_gradient_s))
    durations = Durations(
        forward_s=forward_s,
        input_gradient_s=inputs_s,
        weight_gradient_s=weights_s,
        message_s=_message_s(parties, laid),
    )
    played_batches = min(laid.micro_batches, MOST_MICRO_BATCHES)
    span_s = _span_s(depth, played_batches, durations, overlap=bool(first.inputs.hides_stages))
    stage_s = forward_s + inputs_s + weights_s
    pipeline_s = span_s + (laid.micro_batches - played_batches) * float(stage_s.max())
    layers = tuple(int(sum(letter == "t" for letter in items.letters[a:b])) for a, b in zip(starts, ends, strict=True))
    held = laid.task.by_rank(tuple(counts))[1] + laid.ranks.fixed_bytes
    # what a step has once grows in proportion to the layers of a stage over the estimate's
    once_s = max(
        sum(once_of(e, pipeline_s).values()) * (layers[rank] / max(float(e.inputs.first_layers), 1.0))
        for rank, (e, _) in enumerate(laid.found)
    )
    names = [party.name for party in laid.parties]
    busy = {
        name: float(stage_s[[n == name for n in names]].max()) * laid.micro_batches for name in dict.fromkeys(names)
    }
    return Staged(
        cut=laid.cut,
        counts=tuple(int(n) for n in counts),
        layers=layers,
        step_s=pipeline_s + once_s,
        pipeline_s=pipeline_s,
        link_s=link_s(parties, first),
        stage_s=tuple(map(float, stage_s)),
        busy_s=tuple(busy[parties.groups[n].name] for n in laid.cut.groups),
        fits=laid.task.fits(tuple(counts)),
        memory_bytes=tuple(map(float, held)),
    )


def _span_s(depth: int, micro_batches: int, durations: Durations, *, overlap: bool) -> float:
    """Longest time of a rank from its first pass to its last."""
    if depth == 1:
        total = durations.forward_s + durations.input_gradient_s + durations.weight_gradient_s
        return float(np.asarray(total)[0]) * micro_batches
    row = SCHEDULES["1f1b"]
    table = row.order(Pipeline(ranks=depth, micro_batches=micro_batches))
    return float(play(graph_of(table, Transport(overlap=overlap)), durations).rank_span_s.max())


def even_split(job: Job, parties: Parties, cut: Cut) -> Staged | None:
    """A cut with equal numbers of items in all stages, whatever the devices."""
    laid = _laid(job, parties, cut)
    if laid is None:
        return None
    return staged(job, parties, laid, even_counts(laid.task.items, laid.task.stages))


def best_staged(job: Job, parties: Parties, fixed: Mapping[str, Any], top: int) -> tuple[list[Staged], int]:
    """Pipelines over all groups, fastest first, each with its exact best split; and the number of tried cuts."""
    rated: list[tuple[float, int, _Laid, tuple[int, ...]]] = []
    tried = 0
    for cut in cuts_of(parties, job.global_batch, fixed):
        tried += 1
        laid = _laid(job, parties, cut)
        if laid is None:
            continue
        try:
            counts = best_split(laid.task).counts
        except UserError:
            continue
        slowest = laid.task.slowest_s(counts)
        busy, _ = laid.task.by_rank(counts)
        rated.append((laid.micro_batches * slowest + float(busy.sum()) - slowest, tried, laid, counts))
    rated.sort(key=lambda one: one[:2])
    found = [staged(job, parties, laid, counts) for _, _, laid, counts in rated[: max(PLAYED, top)]]
    return sorted(found, key=lambda one: one.step_s)[:top], tried
