"""Orders written as words: letters for passes of two directions or chunks, whose micro-batches count up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.schedule.actions import ActionTable, Kind
from steptime.schedule.schedules import Pipeline

F: Final = 0
"""Forward pass of the first of two chunks (or directions); plus 1: of the second."""
B: Final = 2
"""Whole backward pass; plus 1: of the second."""
I: Final = 4  # noqa: E741
"""Input-gradient pass; plus 1: of the second."""
W: Final = 6
"""Weight-gradient pass; plus 1: of the second."""
LATE: Final = 8
"""Weight-gradient pass of the oldest input-gradient pass, of either, that has none yet."""
PAIR: Final = 16
"""Added to a letter: runs at the same time as the letter behind it."""
_KINDS: Final = np.array([Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.WEIGHT_GRADIENT])


def spelled(words: Sequence[Sequence[int]], stages: Array, first: Array, pipeline: Pipeline) -> ActionTable:
    """The table of the letters of each rank.

    The passes of a chunk are of micro-batches that count up, forward and backward and for gradients of weights.

    Args:
        words: letters of each rank.
        stages: stage by rank and chunk.
        first: first micro-batch by chunk.
        pipeline: its ranks, chunks and micro-batches.
    """
    letters = np.concatenate([np.array(word, np.int64) for word in words])
    rank = np.repeat(np.arange(len(words)), [len(word) for word in words])
    pairs = letters >= PAIR
    letters = letters % PAIR
    chunk, number = letters % 2, np.zeros(len(letters), np.int64)
    for way in (0, 1):
        for sort in ((F,), (B, I), (W,)):
            rows = np.flatnonzero(np.isin(letters, [each + way for each in sort]))
            # letters are in order of ranks: the number of a letter counts from the first one of its rank
            number[rows] = first[way] + np.arange(len(rows)) - np.searchsorted(rank[rows], rank[rows])
    late, split = np.flatnonzero(letters == LATE), np.flatnonzero((letters == I) | (letters == I + 1))
    if len(late):
        chunk[late], number[late] = chunk[split], number[split]
    return ActionTable(
        ranks=pipeline.ranks,
        stages=int(stages.max()) + 1,
        micro_batches=pipeline.micro_batches,
        rank=rank,
        kind=_KINDS[letters // 2],
        stage=stages[rank, chunk],
        micro_batch=number,
        slice=np.zeros_like(letters),
        together=np.where(pairs | np.roll(pairs, 1), np.cumsum(pairs) - 1, -1),
    )
