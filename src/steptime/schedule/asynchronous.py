"""Schedules that update weights within a step and never wait for all ranks: AMPNet, PipeDream, 2BW, PipeMare."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import numpy as np

from steptime.cost.pipeline import micro_batches_in_flight
from steptime.cost.pipeline_schedules import continuous_bubble_s, mirrored_delay, stashed_versions
from steptime.num import Array, Num, minimum
from steptime.schedule.actions import ActionTable, Kind, Passes, arranged
from steptime.schedule.schedules import ONE_CHUNK, WHOLE_SEQUENCES, Counts, Pipeline, Rule, Schedule, registered


def _with_updates(pipeline: Pipeline, forward: Array, backward: Array, per_update: int) -> ActionTable:
    """Passes at their turns, by rank and micro-batch, and an update of a stage after each group of backward passes.

    Gradients of the last micro-batches, too few for an update, wait for the next step.
    """
    p, m = pipeline.ranks, pipeline.micro_batches
    rank, each = np.arange(p)[:, None], np.arange(m)
    last = np.arange(per_update - 1, m, per_update)
    passes = (
        Passes(kind=Kind.FORWARD, rank=rank, stage=rank, micro_batch=each, turn=2 * forward),
        Passes(kind=Kind.BACKWARD, rank=rank, stage=rank, micro_batch=each, turn=2 * backward),
        Passes(kind=Kind.UPDATE, rank=rank, stage=rank, micro_batch=last, turn=2 * backward[:, last] + 1),
    )
    return arranged(passes, ranks=p, stages=p, micro_batches=m)


def _in_turn(pipeline: Pipeline, warm: Array, per_update: int) -> ActionTable:
    """A number of forward passes ahead, then one forward and one backward pass in turn."""
    each = np.arange(pipeline.micro_batches)
    ahead = np.minimum(warm, pipeline.micro_batches)[:, None]
    return _with_updates(pipeline, 2 * (each - ahead), 2 * each + 1 + 0 * ahead, per_update)


def _stashing(pipeline: Pipeline, per_update: int) -> ActionTable:
    return _in_turn(pipeline, np.arange(pipeline.ranks)[::-1], per_update)


def _mirrored(pipeline: Pipeline) -> ActionTable:
    """Table with a forward and a backward pass of a rank per slot; the backward pass lags by the round trip to the last
    rank."""
    return _in_turn(pipeline, 2 * np.arange(pipeline.ranks)[::-1] + 1, pipeline.per_update or 1)


def _whenever_free(pipeline: Pipeline) -> ActionTable:
    """Table in which a free rank runs the backward pass that has waited longest, or else the next forward pass.

    The first rank lets a micro-batch in while fewer are in the pipeline than :attr:`Pipeline.memory_limit`, by default
    as many as ranks.
    """
    p, m, times = pipeline.ranks, pipeline.micro_batches, pipeline.times
    most = p if pipeline.memory_limit == inf else int(pipeline.memory_limit)
    turn = np.empty((2, p, m), np.int64)
    begun, free = [0] * p, [True] * p
    ready, made = [[0, 0] for _ in range(p)], [[0, 0] for _ in range(p)]
    ready[0][0] = min(most, m) - 1  # and the one that the first event lets in
    events: list[tuple[float, int, int, bool]] = [(0.0, 0, 0, False)]
    while events:
        now, changed = events[0][0], set[int]()
        while events and events[0][0] == now:
            _, place, way, ends = heappop(events)
            changed.add(place)
            if not ends:
                ready[place][way] += 1
                continue
            free[place] = True
            if way == 0 and place == p - 1:
                ready[place][1] += 1
            elif way and not place:
                ready[0][0] = min(ready[0][0] + 1, m)
            else:
                heappush(events, (now + times.message_s, place - 1 if way else place + 1, way, False))
        for place in sorted(changed):
            way = int(made[place][1] < ready[place][1])
            if free[place] and made[place][way] < ready[place][way]:
                turn[way, place, made[place][way]] = begun[place]
                begun[place] += 1
                made[place][way] += 1
                free[place] = False
                heappush(events, (now + (times.backward_s if way else times.forward_s), place, way, True))
    return _with_updates(pipeline, turn[0], turn[1], pipeline.per_update or 1)


def _ahead(pipeline: Counts, rank: Num) -> Num:
    return micro_batches_in_flight(pipeline.ranks, pipeline.micro_batches, 1, rank)


_LIMIT = Rule(text="memory for the activations of one micro-batch at least", holds=lambda p: p.memory_limit >= 1)
_GROUPS = Rule(
    text="at least as many micro-batches per update as ranks",
    holds=lambda p: p.per_update is None or p.per_update >= p.ranks,
)

registered(
    Schedule(
        name="ampnet",
        parameter="usual_per_update",
        updates=lambda p: p.micro_batches / (p.per_update or 1),
        source="Gaunt et al., arXiv 1705.09786, section 4",
        order=_whenever_free,
        rules=(ONE_CHUNK, WHOLE_SEQUENCES, _LIMIT),
        bubble=continuous_bubble_s,
        held=lambda p, rank: minimum(p.ranks, p.micro_batches),
        held_is_exact=False,
        bound="a bound: its order follows from the times; each rank holds as many micro-batches as ranks at most",
        staleness=lambda p, rank: None,
        bubble_free=True,
        synchronous=False,
        note="a backward pass may read newer weights than its forward pass; the order follows from the times",
    )
)
registered(
    Schedule(
        name="pipedream",
        parameter="usual_per_update",
        updates=lambda p: p.micro_batches / (p.per_update or 1),
        source="Harlap et al., arXiv 1806.03377, section 3",
        order=lambda p: _stashing(p, p.per_update or 1),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=continuous_bubble_s,
        held=_ahead,
        weight_versions=lambda p, rank: stashed_versions(p.ranks, p.per_update or 1, rank),
        staleness=lambda p, rank: (p.ranks - 1 - rank) / (p.per_update or 1),
        bubble_free=True,
        synchronous=False,
        note="weight stashing: a backward pass reads the weights of its forward pass",
    )
)
registered(
    Schedule(
        name="pipedream-2bw",
        parameter="usual_per_update",
        updates=lambda p: p.micro_batches / (p.per_update or p.ranks),
        source="Narayanan et al., arXiv 2006.09503, section 3.1",
        order=lambda p: _stashing(p, p.per_update or p.ranks),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES, _GROUPS),
        bubble=continuous_bubble_s,
        held=_ahead,
        weight_versions=lambda p, rank: 2,
        staleness=lambda p, rank: 1.0,
        bubble_free=True,
        synchronous=False,
        note="two versions of weights; all ranks read the version of the group of micro-batches before the last",
    )
)
registered(
    Schedule(
        name="pipemare",
        parameter="usual_per_update",
        updates=lambda p: p.micro_batches / (p.per_update or 1),
        source="Yang et al., arXiv 1910.05124, section 2",
        order=_mirrored,
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=continuous_bubble_s,
        held=lambda p, rank: minimum(2 * (p.ranks - rank), p.micro_batches),
        staleness=lambda p, rank: float(mirrored_delay(p.ranks, p.per_update or 1, rank)),
        bubble_free=True,
        synchronous=False,
        note="a backward pass reads newer weights than its forward pass; learning rates and weights are "
        "corrected for it",
    )
)
