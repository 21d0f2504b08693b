"""TeraPipe: slices of sequences pass the stages one after another, and how to cut a sequence best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime.cost.pipeline_schedules import sliced_bubble_s
from steptime.num import Array
from steptime.schedule.actions import ActionTable, Kind, Passes, arranged
from steptime.schedule.schedules import ONE_CHUNK, Pipeline, Schedule, registered


def _sliced(pipeline: Pipeline) -> ActionTable:
    """All slices forward, from the first token on, then all backward, from the last token on."""
    p, m, s = pipeline.ranks, pipeline.micro_batches, pipeline.slices
    rank, each = np.arange(p)[:, None], np.arange(m * s)
    number, piece = each // s, each % s
    passes = (
        Passes(kind=Kind.FORWARD, rank=rank, stage=rank, micro_batch=number, slice=piece, turn=each),
        Passes(kind=Kind.BACKWARD, rank=rank, stage=rank, micro_batch=number, slice=s - 1 - piece, turn=m * s + each),
    )
    return arranged(passes, ranks=p, stages=p, micro_batches=m, slices=s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Cut of a sequence into slices."""

    lengths: tuple[int, ...]
    """Units of each slice, from the first token on."""
    seconds: float
    """Time until the last slice leaves the last stage."""


def best_slicing(seconds: Array, stages: float) -> Slicing:
    r"""The slices with which a sequence passes a pipeline soonest.

    $$T = \min_{l_1 + \dots + l_s = L} \sum_i t(l_i, c_i) + (p - 1) \max_i t(l_i, c_i), \qquad c_i = \sum_{j<i} l_j$$

    where $p$ = `stages` and $t(l, c)$ is the time of a slice of $l$ units behind $c$ others in one stage. For each
    bound on the longest slice the least sum comes from shorter sequences; bounds are the times that slices can have.

    Source: Li et al. (TeraPipe), arXiv 2102.07988, section 3.3.

    Args:
        seconds: $t$ by length (row $l - 1$) and units before (column $c$), a square array; what would pass the end of
            the sequence is not read.
        stages: stages of the pipeline, $p$; for $m$ sequences that follow each other $1 + (p - 1) / m$, which makes
            $T$ the time of one of them.

    >>> flat = np.ones((4, 4)) * np.arange(1, 5)[:, None]     # a unit takes a second, wherever it is
    >>> best_slicing(flat, 4).lengths, best_slicing(flat, 4).seconds, best_slicing(flat + 3, 4).lengths
    ((1, 1, 1, 1), 7.0, (2, 2))
    """
    length, before = np.indices(seconds.shape)
    bounds = np.unique(seconds[length + before < len(seconds)])
    unbounded_s = float(_least_sums(seconds, bounds[-1:])[0][-1, 0])
    best = Slicing(lengths=(), seconds=np.inf)
    for block in np.split(bounds, range(AT_ONCE, len(bounds), AT_ONCE)):
        if unbounded_s + (stages - 1) * block[0] >= best.seconds:
            break
        least, last = _least_sums(seconds, block)
        total = least[-1] + (stages - 1) * block
        place = int(np.argmin(total))
        if total[place] < best.seconds:
            best = Slicing(lengths=_lengths(last[:, place]), seconds=float(total[place]))
    return best


AT_ONCE = 256
"""Bounds that are tried together; longer ones are not tried once they cannot pay."""


def _least_sums(seconds: Array, bounds: Array) -> tuple[Array, Array]:
    """Least sum of the times of slices, none longer than a bound, by units and bound; and the length of the last."""
    units = len(seconds)
    least = np.full((units + 1, len(bounds)), np.inf)
    least[0] = 0.0
    last = np.zeros((units + 1, len(bounds)), np.int64)
    for end in range(1, units + 1):
        sizes = np.arange(1, end + 1)
        each = seconds[sizes - 1, end - sizes][:, None]
        sums = np.where(each <= bounds, each + least[end - sizes], np.inf)
        last[end] = sums.argmin(axis=0) + 1
        least[end] = sums.min(axis=0)
    return least, last


def _lengths(last: Array) -> tuple[int, ...]:
    """Slices of all units, from the length of the last slice of each number of units."""
    lengths, end = list[int](), len(last) - 1
    while end:
        lengths.append(int(last[end]))
        end -= lengths[-1]
    return tuple(reversed(lengths))


registered(
    Schedule(
        name="terapipe",
        parameter="usual_slices",
        source="Li et al., arXiv 2102.07988, section 3",
        order=_sliced,
        rules=(ONE_CHUNK,),
        bubble=sliced_bubble_s,
        held=lambda p, rank: p.micro_batches,
        held_behind_head=lambda p: p.micro_batches,
        any_graph=False,
        usual_slices=4,
        note="a token may look at tokens before it only",
    )
)
