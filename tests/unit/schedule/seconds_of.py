"""Tables of actions played with times: each rank in its order, each pass once what it needs is there."""

from __future__ import annotations

import numpy as np

from steptime.num import Array
from steptime.schedule.actions import ActionTable, Kind
from steptime.schedule.schedules import Times
from steptime.simulation.waits import NONE, first_of_groups, needed

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


def ends_of(table: ActionTable, times: Times, share: float) -> tuple[Array, Array]:
    """Seconds at which each pass starts and ends; a stage is that share of a p-th part of the model."""
    lasting = dict(zip(PASSES, (times.forward_s, times.backward_s, times.input_gradient_s, times.weight_gradient_s),
                       strict=True))  # fmt: skip
    rows, first = needed(table), first_of_groups(table)
    starts, ends = np.full(len(table), np.nan), np.full(len(table), np.nan)
    place, clock = table.starts[:-1].copy(), np.zeros(table.ranks)
    left = len(table)
    while left:
        before = left
        for rank in range(table.ranks):
            while place[rank] < table.starts[rank + 1]:
                group = np.flatnonzero(first == place[rank])
                waits = rows[group][rows[group] != NONE]
                if np.isnan(ends[waits]).any():
                    break
                elsewhere = table.rank[waits] != rank
                ready = ends[waits] + times.message_s * elsewhere
                start = max(clock[rank], ready.max(initial=0.0))
                takes = sum(lasting.get(Kind(kind), 0.0) for kind in table.kind[group])
                starts[group], ends[group] = start, start + share / table.slices * takes
                clock[rank] = ends[group[0]]
                place[rank] += len(group)
                left -= len(group)
        assert left < before, "ranks wait for each other"
    return starts, ends


def longest_wait_s(table: ActionTable, times: Times, share: float) -> float:
    """Longest time that a rank waits from its first to its last pass."""
    starts, ends = ends_of(table, times, share)
    return max(
        float(ends[of].max() - starts[of].min() - (ends[of] - starts[of])[np.unique(first_of_groups(table)[of])
              - np.flatnonzero(of)[0]].sum())
        for of in (table.rank == rank for rank in range(table.ranks))
    )  # fmt: skip


def most_held(table: ActionTable, rank: int, share: float) -> float:
    """Most activations that a rank holds, in micro-batches of a p-th part of the model."""
    rows = np.flatnonzero(table.rank == rank)
    change = np.zeros(len(rows))
    change[table.kind[rows] == Kind.FORWARD] = 1
    ends = (table.kind[rows] == Kind.BACKWARD) | (table.kind[rows] == Kind.WEIGHT_GRADIENT)
    change[ends] = -1
    group = first_of_groups(table)[rows]
    change = np.where(change < 0, 0, change) + _at_ends(change, group)
    return float(np.cumsum(change).max()) * share / table.slices


def _at_ends(change: Array, group: Array) -> Array:
    """What is freed, freed by the row behind the group that frees it."""
    out = np.zeros(len(change) + 1)
    behind = np.searchsorted(group, group, side="right")
    np.add.at(out, behind, np.minimum(change, 0))
    return out[:-1]


def versions_and_staleness(table: ActionTable, rank: int) -> tuple[int, float]:
    """Most versions of weights that a rank needs at once if each backward pass reads what its forward pass read, and
    most updates from the weights that a forward pass reads to those that its gradient is applied to."""
    version, most, stale = 0, 1, 0
    read: dict[int, int] = {}
    waiting: list[int] = []
    for row in np.flatnonzero(table.rank == rank):
        number = int(table.micro_batch[row])
        match table.kind[row]:
            case Kind.FORWARD:
                read[number] = version
            case Kind.BACKWARD:
                waiting.append(read[number])
                del read[number]
            case Kind.UPDATE:
                stale = max(stale, *(version - each for each in waiting))
                waiting, version = [], version + 1
        most = max(most, len({*read.values(), *waiting, version}))
    return most, stale
