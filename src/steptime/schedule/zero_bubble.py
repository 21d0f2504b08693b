"""Zero-bubble schedules: gradients of weights are made apart, where a rank would wait (H1, H2, 1P, 2P, V)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import numpy as np

from steptime.cost.pipeline import zero_bubble_in_flight, zero_bubble_s
from steptime.cost.pipeline_schedules import v_shaped_bubble_s, v_shaped_in_flight
from steptime.num import maximum
from steptime.schedule.actions import ActionTable, Kind, Passes, arranged
from steptime.schedule.schedules import (
    ONE_CHUNK,
    ROUNDS,
    TWO_CHUNKS,
    WHOLE_SEQUENCES,
    Pipeline,
    Rule,
    Schedule,
    Times,
    registered,
)
from steptime.schedule.search import by_search
from steptime.schedule.synchronous import rounds
from steptime.schedule.words import F, I, W, spelled


def _handmade(pipeline: Pipeline, depth: int) -> ActionTable:
    """A rank makes as many forward passes ahead as ranks are behind it, times the depth, and puts off as many gradients
    of weights as ranks are before it, times the depth."""
    p, v = pipeline.ranks, pipeline.chunks
    chunk, micro_batch = rounds(pipeline)
    rank, place = np.arange(p)[:, None], np.arange(len(chunk))
    warm = np.minimum(depth * (p - 1 - rank) + (v - 1) * p, len(chunk))
    back = (v - 1 - chunk) * p + rank
    passes = (
        Passes(kind=Kind.FORWARD, rank=rank, stage=chunk * p + rank, micro_batch=micro_batch, turn=3 * (place - warm)),
        Passes(kind=Kind.INPUT_GRADIENT, rank=rank, stage=back, micro_batch=micro_batch, turn=3 * place + 1),
        Passes(
            kind=Kind.WEIGHT_GRADIENT,
            rank=rank,
            stage=back,
            micro_batch=micro_batch,
            turn=3 * (place + depth * rank) + 2,
        ),
    )
    return arranged(passes, ranks=p, stages=v * p, micro_batches=pipeline.micro_batches)


def _v_shaped(pipeline: Pipeline) -> ActionTable:
    """Each micro-batch goes down the ranks and up again: rank $r$ of $p$ has stages $r$ and $2p - 1 - r$."""
    p, m = pipeline.ranks, pipeline.micro_batches
    enough = max(m, 2 * p - 1)
    words = [_v_words(p - 1 - rank, rank, enough) for rank in range(p)]
    stages = np.stack((np.arange(p), 2 * p - 1 - np.arange(p)), axis=1)
    table = spelled(words, stages, np.zeros(2, int), Pipeline(ranks=p, chunks=2, micro_batches=enough))
    return replace(table.taken(table.micro_batch < m), micro_batches=m)


def _v_words(behind: int, before: int, m: int) -> list[int]:
    """Passes of a rank with ranks before and behind it: letter plus chunk."""
    down, up = [F, I, W], [F + 1, I + 1, W + 1]
    warm = [F] * (2 * behind + 1) + [F + 1, F] * before + up * (behind + 1)
    made = 2 * behind + 1 + before
    steady = (down + up) * (m - made) + (down[1:] + up) * behind
    return warm + steady + [I, I + 1] * before + [I, W] * (behind + 1) + [W + 1] * before + [W] * before


def _handmade_is_exact(pipeline: Pipeline, depth: int) -> bool:
    p, m, each = pipeline.ranks, pipeline.micro_batches, pipeline.times
    return not (depth > 1 and m < 2 * p - 1 and each.input_gradient_s < min(each.forward_s, each.weight_gradient_s))


def _alike(times: Times) -> bool:
    """True if forward passes and both parts of backward passes take the same time."""
    return isclose(times.forward_s, times.input_gradient_s) and isclose(times.forward_s, times.weight_gradient_s)


def _v_is_exact(pipeline: Pipeline) -> bool:
    p, m, times = pipeline.ranks, pipeline.micro_batches, pipeline.times
    rising = times.weight_gradient_s <= times.forward_s <= times.input_gradient_s
    return _alike(times) or (rising and m >= 2 * p - 1)


def _handmade_row(name: str, depth: int, **further: Any) -> Schedule:
    """A schedule with the closed forms of ZB-H1 (depth 1) or ZB-H2 (2)."""
    return Schedule(
        name=name,
        splits=True,
        fills=float(depth),
        bubble=zero_bubble_s,
        held=lambda p, _: zero_bubble_in_flight(p.ranks, p.micro_batches, depth),
        held_behind_head=lambda p: zero_bubble_in_flight(p.ranks, p.micro_batches, depth),
        to_host=True,
        **further,
    )


def _searched_row(name: str, depth: int, like: str, memory: str, **further: Any) -> Schedule:
    """A schedule whose order is searched, in the memory of a handmade one."""
    return _handmade_row(
        name,
        depth,
        source="Qi et al., arXiv 2401.10241, section 3.1",
        order=partial(by_search, limit_per_rank=depth),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES, _LIMIT),
        exact=lambda _: False,
        held_is_exact=False,
        bound=f"an approximation: its order is searched; bubble and activations are those of {like}",
        note=f"searched for the times and the memory that are given; by default {memory} the memory of 1F1B; "
        f"an estimate takes the closed forms of {like}",
        **further,
    )


_LIMIT = Rule(text="memory for the activations of one micro-batch at least", holds=lambda p: p.memory_limit >= 1)

registered(
    _handmade_row(
        "zb-h1",
        1,
        source="Qi et al., arXiv 2401.10241, section 2.2",
        order=partial(_handmade, depth=1),
        rules=(ROUNDS, WHOLE_SEQUENCES),
    )
)
registered(
    _handmade_row(
        "zb-h2",
        2,
        source="Qi et al., arXiv 2401.10241, section 2.3",
        order=partial(_handmade, depth=2),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        exact=partial(_handmade_is_exact, depth=2),
        bubble_free=True,
        note="no bubble where T_F + T_I = 2 T_W, and no barrier between steps",
    )
)
registered(_searched_row("zb-1p", 1, "zb-h1", "once"))
registered(_searched_row("zb-2p", 2, "zb-h2", "twice", bubble_free=True))
registered(
    Schedule(
        name="zb-v",
        source="Qi et al., arXiv 2401.10241, section 6",
        usual_chunks=2,
        order=_v_shaped,
        rules=(TWO_CHUNKS, WHOLE_SEQUENCES),
        splits=True,
        folded=True,
        bubble=v_shaped_bubble_s,
        exact=_v_is_exact,
        held=lambda p, rank: v_shaped_in_flight(p.ranks, p.micro_batches, rank),
        fullest=lambda ranks: maximum(ranks - 2, 0),
        bubble_free=True,
        note="no bubble where T_F = T_I = T_W, and no barrier between steps",
    )
)
