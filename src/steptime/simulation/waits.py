"""Dependencies of the actions of a table, and their ticks if every rank keeps its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Array
from steptime.schedule.actions import MESSAGES, ActionTable, Kind

NONE = -1
"""Placeholder row: the action is not in the table, or there is none to wait for."""


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of a table by the identity of their actions."""

    table: ActionTable
    rows: Array
    """Row by :meth:`~steptime.schedule.actions.ActionTable.number`; :data:`NONE` where the table has none."""

    @staticmethod
    def of(table: ActionTable) -> Places:
        """Rows of the actions of a table."""
        rows = np.full(table.numbers, NONE, np.int64)
        rows[table.identity] = np.arange(len(table))
        return Places(table, rows)

    def at(self, kind: Kind, stage: Array, micro_batch: Array, slice_: Array) -> Array:
        """Rows of actions; :data:`NONE` if there is none, also for a stage or a slice out of range."""
        table = self.table
        inside = (stage >= 0) & (stage < table.stages) & (slice_ >= 0) & (slice_ < table.slices)
        number: Any = table.number(kind, np.where(inside, stage, 0), micro_batch, np.where(inside, slice_, 0))
        return np.where(inside, self.rows[number], NONE)

    def backward(self, stage: Array, micro_batch: Array, slice_: Array) -> Array:
        """Rows of the passes that compute the gradients of inputs."""
        whole = self.at(Kind.BACKWARD, stage, micro_batch, slice_)
        return np.where(whole == NONE, self.at(Kind.INPUT_GRADIENT, stage, micro_batch, slice_), whole)


def needed(table: ActionTable, places: Places | None = None) -> Array:
    """Up to three rows whose results each action needs; :data:`NONE`: fewer.

    The first has the result of another stage: a pass needs the message that brings it, or else the pass that produces
    it; a receive its send, a send its pass. The second is of the same stage and slice: a backward pass needs its
    forward pass, or the copy that brings its activations back, which needs the copy to the host, which needs the
    forward pass; a weight-gradient pass its input-gradient pass. The third is of the previous slice (next in backward).
    """
    places = places or Places.of(table)
    found = np.full((len(table), 3), NONE, np.int64)

    def of(kind: Kind) -> tuple[Array, Array, Array, Array]:
        rows = np.flatnonzero(table.kind == kind)
        return rows, table.stage[rows], table.micro_batch[rows], table.slice[rows]

    def first_there(one: Array, other: Array) -> Array:
        return np.where(one == NONE, other, one)

    rows, stage, number, piece = of(Kind.FORWARD)
    received = places.at(Kind.RECEIVE_FORWARD, stage, number, piece)
    found[rows, 0] = first_there(received, places.at(Kind.FORWARD, stage - 1, number, piece))
    found[rows, 2] = places.at(Kind.FORWARD, stage, number, piece - 1)
    for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        rows, stage, number, piece = of(kind)
        received = places.at(Kind.RECEIVE_BACKWARD, stage, number, piece)
        found[rows, 0] = first_there(received, places.backward(stage + 1, number, piece))
        found[rows, 1] = first_there(
            places.at(Kind.RELOAD, stage, number, piece), places.at(Kind.FORWARD, stage, number, piece)
        )
        found[rows, 2] = places.backward(stage, number, piece + 1)
    for kind, before in ((Kind.OFFLOAD, Kind.FORWARD), (Kind.RELOAD, Kind.OFFLOAD)):
        rows, stage, number, piece = of(kind)
        found[rows, 1] = places.at(before, stage, number, piece)
    rows, stage, number, piece = of(Kind.WEIGHT_GRADIENT)
    found[rows, 1] = places.at(Kind.INPUT_GRADIENT, stage, number, piece)
    rows, stage, number, piece = of(Kind.SEND_FORWARD)
    found[rows, 0] = places.at(Kind.FORWARD, stage, number, piece)
    rows, stage, number, piece = of(Kind.RECEIVE_FORWARD)
    found[rows, 0] = places.at(Kind.SEND_FORWARD, stage - 1, number, piece)
    rows, stage, number, piece = of(Kind.SEND_BACKWARD)
    found[rows, 0] = places.backward(stage, number, piece)
    rows, stage, number, piece = of(Kind.RECEIVE_BACKWARD)
    found[rows, 0] = places.at(Kind.SEND_BACKWARD, stage + 1, number, piece)
    return found


def first_of_groups(table: ActionTable) -> Array:
    """Row of the first action of the group that runs together with each action; its own row if it runs alone."""
    rows = np.arange(len(table))
    if not len(rows):
        return rows
    begins = np.ones(len(rows), bool)
    begins[1:] = (table.together[1:] < 0) | np.diff(table.together).astype(bool) | np.diff(table.rank).astype(bool)
    return np.maximum.accumulate(np.where(begins, rows, 0))


def longest_of_groups(first: Array, values: Array) -> Array:
    """Largest value in the group that runs together with each action; `first`: first row of the group."""
    begins = np.flatnonzero(first == np.arange(len(first)))
    if not len(begins):
        return values
    longest = np.maximum.reduceat(values, begins)
    found: Array = np.repeat(longest, np.diff(np.append(begins, len(first))))
    return found


#: Time of an action by its :class:`Kind`, in ticks: a backward pass in two parts is as long as a whole one.
TICKS = np.array([1, 2, 1, 1] + [0] * (len(Kind) - 4))


def played(table: ActionTable, awaited: Array) -> tuple[Array, Array]:
    """Ticks at which the actions of a table end, and rows at which ranks are stuck.

    Each rank runs its actions in order, as soon as it can; passes take :data:`TICKS`, other actions no time.

    Args:
        table: the actions.
        awaited: row of another rank that each action waits for; :data:`NONE`: none.

    Returns:
        The tick of each action, -1 for one that never runs, and one row for each rank that cannot go on.
    """
    first, starts, takes = first_of_groups(table), table.starts.tolist(), TICKS[table.kind]
    ends_group = np.append(first[1:] != first[:-1], True)[: len(table)].tolist()
    waits, begun, ticks = awaited.tolist(), first.tolist(), longest_of_groups(first, takes).tolist()
    ended, waiting, queued = [-1] * (len(table) + 1), dict[int, int](), [NONE] * table.ranks
    ended[NONE] = 0
    place, clock, ready = starts[:-1], [0] * table.ranks, list(range(table.ranks))
    while ready:
        rank = ready.pop()
        row, now, end = place[rank], clock[rank], starts[rank + 1]
        while row < end:
            tick = ended[waits[row]]
            if tick > now:
                now = tick
            elif tick < 0:
                queued[rank] = waiting.get(waits[row], NONE)
                waiting[waits[row]] = rank
                break
            if ends_group[row]:
                now += ticks[row]
                for each in range(begun[row], row + 1):
                    ended[each] = now
                    other = waiting.pop(each, NONE)
                    while other >= 0:
                        ready.append(other)
                        other = queued[other]
            row += 1
        place[rank], clock[rank] = row, now
    stuck = [row for row, end in zip(place, starts[1:], strict=True) if row < end]
    return np.array(ended[:-1], np.int64), np.array(stuck, np.int64)


def awaited_of_others(table: ActionTable, rows: Array) -> Array:
    """The row of another rank that each action needs (from :func:`needed`); :data:`NONE`: none."""
    other = rows[:, 0]
    elsewhere = (other != NONE) & (table.rank[other] != table.rank)
    return np.where(elsewhere, other, NONE)


def is_message(table: ActionTable) -> Array:
    """Mask of the actions that send or receive."""
    return (table.kind >= MESSAGES[0]) & (table.kind <= MESSAGES[-1])
