"""Zero-bubble schedules: gradients of weights are made apart, where a rank would wait (H1, H2, 1P, 2P, V)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isclose

import numpy as np

from steptime.cost.pipeline import filling_passes, zero_bubble_in_flight
from steptime.cost.pipeline_schedules import split_backward_bubble_s, v_shaped_bubble_s, v_shaped_in_flight
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


def _bubble_s(pipeline: Pipeline, depth: int) -> float | None:
    p, m, v, each = pipeline.ranks, pipeline.micro_batches, pipeline.chunks, pipeline.times
    if depth > 1 and m < 2 * p - 1 and each.input_gradient_s < min(each.forward_s, each.weight_gradient_s):
        return None
    forward_s, inputs_s, weights_s = (
        seconds / v for seconds in (each.forward_s, each.input_gradient_s, each.weight_gradient_s)
    )
    return float(split_backward_bubble_s(p, forward_s, inputs_s, weights_s, filling_passes(depth, p, m)))


def _alike(times: Times) -> bool:
    """Whether forward passes and both parts of backward passes take the same time."""
    return isclose(times.forward_s, times.input_gradient_s) and isclose(times.forward_s, times.weight_gradient_s)


def _v_bubble_s(pipeline: Pipeline) -> float | None:
    p, m, times = pipeline.ranks, pipeline.micro_batches, pipeline.times
    forward_s, inputs_s, weights_s = times.forward_s, times.input_gradient_s, times.weight_gradient_s
    if not (_alike(times) or (weights_s <= forward_s <= inputs_s and m >= 2 * p - 1)):
        return None
    return float(v_shaped_bubble_s(p, m, forward_s, inputs_s, weights_s))


def _in_flight(pipeline: Pipeline, _: int, depth: int) -> float:
    return float(zero_bubble_in_flight(pipeline.ranks, pipeline.micro_batches, depth))


_LIMIT = Rule(text="memory for the activations of one micro-batch at least", holds=lambda p: p.memory_limit >= 1)

registered(
    Schedule(
        name="zb-h1",
        source="Qi et al., arXiv 2401.10241, section 2.2",
        order=partial(_handmade, depth=1),
        rules=(ROUNDS, WHOLE_SEQUENCES),
        bubble_s=partial(_bubble_s, depth=1),
        in_flight=partial(_in_flight, depth=1),
    )
)
registered(
    Schedule(
        name="zb-h2",
        source="Qi et al., arXiv 2401.10241, section 2.3",
        order=partial(_handmade, depth=2),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble_s=partial(_bubble_s, depth=2),
        in_flight=partial(_in_flight, depth=2),
        bubble_free=True,
        note="no bubble where T_F + T_I = 2 T_W, and no barrier between steps",
    )
)
registered(
    Schedule(
        name="zb-1p",
        source="Qi et al., arXiv 2401.10241, section 3.1",
        order=partial(by_search, limit_per_rank=1),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES, _LIMIT),
        note="searched for the times and the memory that are given; by default the memory of 1F1B",
    )
)
registered(
    Schedule(
        name="zb-2p",
        source="Qi et al., arXiv 2401.10241, section 3.1",
        order=partial(by_search, limit_per_rank=2),
        rules=(ONE_CHUNK, WHOLE_SEQUENCES, _LIMIT),
        bubble_free=True,
        note="searched for the times and the memory that are given; by default twice the memory of 1F1B",
    )
)
registered(
    Schedule(
        name="zb-v",
        source="Qi et al., arXiv 2401.10241, section 6",
        usual_chunks=2,
        order=_v_shaped,
        rules=(TWO_CHUNKS, WHOLE_SEQUENCES),
        bubble_s=_v_bubble_s,
        in_flight=lambda p, rank: float(v_shaped_in_flight(p.ranks, p.micro_batches, rank)),
        bubble_free=True,
        note="no bubble where T_F = T_I = T_W, and no barrier between steps",
    )
)
