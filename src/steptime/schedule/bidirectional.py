"""Schedules that feed the ranks from both ends: DualPipe, its half on V-shaped stages, and Chimera in two variants."""

from __future__ import annotations

import numpy as np

from steptime.cost.pipeline import (
    dual_pipe_bubble_s,
    dual_pipe_in_flight,
    dual_pipe_in_flight_at_ends,
    paired_messages,
)
from steptime.cost.pipeline_schedules import (
    chimera_bubble_s,
    chimera_doubled_bubble_s,
    chimera_doubled_in_flight,
    chimera_in_flight,
)
from steptime.num import floor_div, maximum
from steptime.schedule.actions import ActionTable, Kind, Passes, arranged
from steptime.schedule.schedules import (
    EVEN_MICRO_BATCHES,
    EVEN_RANKS,
    GROUPS,
    ONE_CHUNK,
    TWICE_THE_RANKS,
    TWO_CHUNKS,
    WHOLE_SEQUENCES,
    Pipeline,
    Rule,
    Schedule,
    registered,
)
from steptime.schedule.words import LATE, PAIR, B, F, I, spelled


def _dual_words(outward: int, inward: int, m: int) -> list[int]:
    """Passes of a rank of DualPipe with ranks nearer to its end and nearer to the middle; `m` micro-batches each way.

    Letters of the direction that enters at the nearer end, plus 1: of the other.
    """
    near, far = (F, B, I), (F + 1, B + 1, I + 1)
    warm = [near[0]] * (2 * inward) + [near[0], far[0]] * (outward + 1) + [far[2], LATE, far[0]] * inward
    pairs = [near[0] + PAIR, far[1], far[0] + PAIR, near[1]] * (m - 2 * inward - outward - 1)
    if not inward:
        pairs[:1] = [near[0]] * bool(pairs)
    ending = [far[1], far[0] + PAIR, near[1]] * inward
    turns = [far[1], near[1]] * (outward + 1)
    late = [far[2], near[2]] * (outward + 1)
    drained = turns[: outward + 1] + late[outward + 1 :]
    return warm + pairs + ending + drained + [LATE, near[2]] * inward + [LATE] * (outward + 1)


def _dual_pipe(pipeline: Pipeline) -> ActionTable:
    p, m = pipeline.ranks, pipeline.micro_batches
    half, words = p // 2, []
    for rank in range(p):
        outward = min(rank, p - 1 - rank)
        word = _dual_words(outward, half - 1 - outward, m // 2)
        words.append(word if rank < half else [letter ^ (letter % PAIR != LATE) for letter in word])
    stages = np.stack((np.arange(p), p - 1 - np.arange(p)), axis=1)
    return spelled(words, stages, np.array([0, m // 2]), pipeline)


def _dual_pipe_v(pipeline: Pipeline) -> ActionTable:
    p, m = pipeline.ranks, pipeline.micro_batches
    words = [_dual_words(rank, p - 1 - rank, m) for rank in range(p)]
    stages = np.stack((np.arange(p), 2 * p - 1 - np.arange(p)), axis=1)
    return spelled(words, stages, np.zeros(2, int), pipeline)


def _chimera(pipeline: Pipeline) -> ActionTable:
    """Half of each group of micro-batches enters at the first rank, half at the last, two slots apart.

    The turn of a pass is its slot where forward and backward passes take one each. Slots of the two directions never
    meet, and the next group of micro-batches fits behind.
    """
    p, m = pipeline.ranks, pipeline.micro_batches
    rank, each = np.arange(p)[:, None], np.arange(m)
    up = each % p // (p // 2)
    stage = np.where(up, p - 1 - rank, rank)
    enters = 2 * p * (each // p) + 2 * (each % (p // 2))
    passes = (
        Passes(kind=Kind.FORWARD, rank=rank, stage=stage, micro_batch=each, turn=enters + stage),
        Passes(kind=Kind.BACKWARD, rank=rank, stage=stage, micro_batch=each, turn=enters + 2 * p - 1 - stage),
    )
    return arranged(passes, ranks=p, stages=p, micro_batches=m)


def _chimera_doubled(pipeline: Pipeline) -> ActionTable:
    """Groups of twice as many micro-batches as ranks, a half from each end; two forward passes at a time.

    The turn of a pass is its slot where a pair of forward passes and a backward pass take one each. Both enter their
    pipelines in even slots, of which a group takes each of $3 p$ once in either direction: so no two passes of a rank
    share a slot, and the next group fits behind.
    """
    p, m = pipeline.ranks, pipeline.micro_batches
    rank, each = np.arange(p)[:, None], np.arange(m)
    stage = np.where(each % (2 * p) // p, p - 1 - rank, rank)
    group, place = 3 * p * (each // (2 * p)), each % p
    passes = (
        Passes(kind=Kind.FORWARD, rank=rank, stage=stage, micro_batch=each, turn=group + 2 * (place // 2) + stage),
        Passes(
            kind=Kind.BACKWARD, rank=rank, stage=stage, micro_batch=each, turn=group + 2 * place + 2 * p - 1 - stage
        ),
    )
    return arranged(passes, ranks=p, stages=p, micro_batches=m)


_DOUBLE_GROUPS = Rule(
    text="a number of micro-batches that twice the number of ranks divides",
    holds=lambda p: p.micro_batches % (2 * p.ranks) == 0,
)

registered(
    Schedule(
        name="dualpipe",
        source="DeepSeek-V3, arXiv 2412.19437, section 3.2.1",
        order=_dual_pipe,
        rules=(EVEN_RANKS, EVEN_MICRO_BATCHES, TWICE_THE_RANKS, ONE_CHUNK, WHOLE_SEQUENCES),
        splits=True,
        pairs=True,
        bubble=dual_pipe_bubble_s,
        messages=paired_messages,
        held=lambda p, rank: dual_pipe_in_flight(p.ranks, p.micro_batches),
        held_at_ends=dual_pipe_in_flight_at_ends,
        copies=2,
        note="a forward and a backward pass run as a pair; the bubble is of pairs that take as long as both",
    )
)
registered(
    Schedule(
        name="dualpipev",
        source="https://github.com/deepseek-ai/DualPipe, README, DualPipeV",
        usual_chunks=2,
        order=_dual_pipe_v,
        rules=(TWICE_THE_RANKS, TWO_CHUNKS, WHOLE_SEQUENCES),
        splits=True,
        pairs=True,
        folded=True,
        bubble=dual_pipe_bubble_s,
        messages=paired_messages,
        held=lambda p, rank: p.ranks + 0.5,
        note="a forward and a backward pass run as a pair; the bubble is of pairs that take as long as both",
    )
)
registered(
    Schedule(
        name="chimera",
        source="Li and Hoefler, arXiv 2107.06925, section 3",
        order=_chimera,
        rules=(EVEN_RANKS, GROUPS, ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=chimera_bubble_s,
        held=lambda p, rank: chimera_in_flight(p.ranks, rank),
        fullest=lambda ranks: maximum(floor_div(ranks, 2) - 1, 0),
        copies=2,
        note="groups of as many micro-batches as ranks follow each other directly: with more of them than one, "
        "chimera-doubled waits less and holds more",
    )
)
registered(
    Schedule(
        name="chimera-doubled",
        source="Li and Hoefler, arXiv 2107.06925, section 3.5",
        order=_chimera_doubled,
        rules=(EVEN_RANKS, _DOUBLE_GROUPS, ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=chimera_doubled_bubble_s,
        held=lambda p, rank: chimera_doubled_in_flight(p.ranks, rank),
        fullest=lambda ranks: maximum(floor_div(ranks, 2) - 1, 0),
        copies=2,
        note="forward doubling: forward passes come in pairs; with half the micro-batch it holds what chimera holds",
    )
)
