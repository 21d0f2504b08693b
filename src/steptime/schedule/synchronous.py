"""Schedules whose backward passes are whole and whose steps end together: naive, GPipe, 1F1B, interleaved, breadth."""

from __future__ import annotations

import numpy as np

from steptime.cost.pipeline import micro_batches_in_flight, pipeline_bubble_s, serial_messages
from steptime.cost.pipeline_schedules import breadth_first_bubble_s, naive_bubble_s
from steptime.num import Array, Num
from steptime.schedule.actions import ActionTable, Kind, Passes, arranged
from steptime.schedule.schedules import (
    ONE_CHUNK,
    ROUNDS,
    WHOLE_SEQUENCES,
    Counts,
    Pipeline,
    Schedule,
    registered,
)


def alternated(
    pipeline: Pipeline, warm: Array, forward: tuple[Array, Array], backward: tuple[Array, Array]
) -> ActionTable:
    """Each rank makes `warm` forward passes, then one forward and one backward pass in turn, then the other backward.

    `forward` and `backward` have the chunk and the micro-batch of each pass in the order of all ranks; chunk $c$ of
    rank $r$ is stage $c p + r$.
    """
    p = pipeline.ranks
    rank = np.arange(p)[:, None]
    place = np.arange(len(forward[0]))
    passes = (
        Passes(
            kind=Kind.FORWARD,
            rank=rank,
            stage=forward[0] * p + rank,
            micro_batch=forward[1],
            turn=2 * (place - warm[:, None]),
        ),
        Passes(
            kind=Kind.BACKWARD, rank=rank, stage=backward[0] * p + rank, micro_batch=backward[1], turn=2 * place + 1
        ),
    )
    return arranged(passes, ranks=p, stages=p * pipeline.chunks, micro_batches=pipeline.micro_batches)


def rounds(pipeline: Pipeline) -> tuple[Array, Array]:
    """Chunk and micro-batch of each forward pass of a rank: each round of as many micro-batches as ranks (one chunk:
    of all of them) passes all chunks, one after another, before the next round."""
    m, v = pipeline.micro_batches, pipeline.chunks
    size = pipeline.ranks if v > 1 else m
    first, chunk, within = np.meshgrid(np.arange(0, m, size), np.arange(v), np.arange(size), indexing="ij")
    return chunk.ravel(), (first + within).ravel()


def _one_after_another(pipeline: Pipeline) -> ActionTable:
    order = rounds(pipeline)
    return alternated(pipeline, np.zeros(pipeline.ranks, int), order, order)


def _all_forward_first(pipeline: Pipeline) -> ActionTable:
    order = rounds(pipeline)
    return alternated(pipeline, np.full(pipeline.ranks, pipeline.micro_batches), order, order)


def _one_forward_one_backward(pipeline: Pipeline) -> ActionTable:
    p, v = pipeline.ranks, pipeline.chunks
    chunk, micro_batch = rounds(pipeline)
    behind = np.arange(p)[::-1]
    warm = np.minimum(behind if v == 1 else 2 * behind + (v - 1) * p, len(chunk))
    return alternated(pipeline, warm, (chunk, micro_batch), (v - 1 - chunk, micro_batch))


def _breadth_first(pipeline: Pipeline) -> ActionTable:
    chunk, micro_batch = (each.ravel() for each in np.indices((pipeline.chunks, pipeline.micro_batches)))
    warm = np.full(pipeline.ranks, len(chunk))
    return alternated(pipeline, warm, (chunk, micro_batch), (chunk[::-1], micro_batch[::-1]))


def held(pipeline: Counts, rank: Num) -> Num:
    """Micro-batches that a rank holds under (interleaved) 1F1B."""
    return micro_batches_in_flight(pipeline.ranks, pipeline.micro_batches, pipeline.chunks, rank)


registered(
    Schedule(
        name="naive",
        source="model parallelism without a pipeline: arXiv 1811.06965, figure 2b",
        order=_one_after_another,
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=naive_bubble_s,
        held=lambda p, rank: 1.0,
        messages=serial_messages,
    )
)
registered(
    Schedule(
        name="gpipe",
        source="Huang et al., arXiv 1811.06965, section 2.3",
        order=_all_forward_first,
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=pipeline_bubble_s,
        held=lambda p, rank: p.micro_batches,
        held_behind_head=lambda p: p.micro_batches,
        one_rank=True,
        to_host=True,
    )
)
registered(
    Schedule(
        name="1f1b",
        interleaved_as="interleaved",
        source="Narayanan et al., arXiv 2104.04473, section 2.2",
        order=_one_forward_one_backward,
        rules=(ONE_CHUNK, WHOLE_SEQUENCES),
        bubble=pipeline_bubble_s,
        held=held,
        one_rank=True,
        to_host=True,
    )
)
registered(
    Schedule(
        name="interleaved",
        source="Narayanan et al., arXiv 2104.04473, section 2.2",
        usual_chunks=2,
        follows=True,
        order=_one_forward_one_backward,
        rules=(ROUNDS, WHOLE_SEQUENCES),
        bubble=pipeline_bubble_s,
        held=held,
        one_rank=True,
        to_host=True,
    )
)
registered(
    Schedule(
        name="looped-bfs",
        source="Lamy-Poirier, arXiv 2211.05953, section 4",
        usual_chunks=2,
        order=_breadth_first,
        rules=(WHOLE_SEQUENCES,),
        bubble=breadth_first_bubble_s,
        held=lambda p, rank: p.micro_batches,
        held_behind_head=lambda p: p.micro_batches,
    )
)
