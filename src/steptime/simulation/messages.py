"""Actions added to the passes of a schedule: messages, gathers of weights, reductions of gradients, updates, copies of
activations to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime.schedule.actions import COLUMNS, COPIES, PASSES, ActionTable, Kind
from steptime.simulation.waits import (
    NONE,
    TICKS,
    Places,
    awaited_of_others,
    first_of_groups,
    is_message,
    longest_of_groups,
    needed,
    played,
)


def with_messages(
    table: ActionTable, *, gathered: int = 0, reduces: bool = False, updates: bool = False
) -> ActionTable:
    """The table with a send and a receive for each result that another rank needs.

    Both ranks have a message at the tick at which the pass that produces the result ends if all passes take
    :data:`TICKS`; this gives all ranks one common order of messages. So no ranks wait in a circle, even if every send
    waits for its receive.

    Args:
        table: passes; existing messages are replaced.
        gathered: most stages whose weights a rank holds gathered (FSDP); 0: all of them, always.
        reduces: sum the gradients of each stage over replicas after its last weight gradient.
        updates: update the weights of all stages of a rank at the end of its order, unless the table has updates.

    Raises:
        UserError: ranks wait in a circle, so that there is no order of messages.
    """
    table = table.taken(~is_message(table))
    if gathered:
        table = _gathered(table, gathered)
    if reduces:
        table = _reduced(table)
    if updates and not (table.kind == Kind.UPDATE).any():
        table = _updated(table)
    awaited = awaited_of_others(table, needed(table))
    ended, stuck = played(table, awaited)
    if len(stuck):
        row = int(stuck[0])
        raise UserError(
            f"rank {table.rank[row]}: {table.named(row)} waits for {table.named(int(awaited[row]))} of rank "
            f"{table.rank[awaited[row]]}, which waits for it in a circle"
        )
    return _merged(table, ended, awaited)


def with_copies(table: ActionTable, *, ahead: int = 1) -> ActionTable:
    """The table with the activations of each micro-batch copied to the host after its forward pass, and back.

    The copy out starts when the forward pass has ended, the copy back `ahead` passes before the backward pass that
    waits for it. A micro-batch stays on the device if its backward pass follows too soon for each copy to run during
    `ahead` passes, as do all of them on the last rank of 1F1B.

    Args:
        table: passes, with or without messages and other actions; existing copies are replaced.
        ahead: passes of the rank during which a copy back may run; 0: none, the rank computes nothing meanwhile.

    >>> from steptime.schedule import SCHEDULES
    >>> print(*with_copies(SCHEDULES["gpipe"].actions(1, 1, 3)).of_rank(0))
    0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0B0 0RELOAD2 0B1 0B2
    """
    table = table.taken(table.kind < COPIES[0])
    first = first_of_groups(table)
    passes = np.flatnonzero(table.kind <= PASSES[-1])
    turn = np.full(len(table), NONE)
    begins = np.unique(first[passes])
    turn[passes] = np.searchsorted(begins, first[passes])
    forward = np.flatnonzero(table.kind == Kind.FORWARD)
    places = Places.of(table)
    backward = places.backward(table.stage[forward], table.micro_batch[forward], table.slice[forward])
    between = turn[backward] - turn[forward] - 1
    kept = (backward != NONE) & (between >= max(2 * ahead, 1))
    forward, backward = forward[kept], backward[kept]
    behind = np.searchsorted(first, first[forward], side="right")
    before = begins[turn[backward] - ahead]
    made = {name: np.tile(getattr(table, name)[forward], 2) for name in COLUMNS}
    made["kind"] = np.repeat(np.array(COPIES, np.int64), len(forward))
    made["together"][:] = -1
    return _in_order(table, made, np.concatenate((2 * np.arange(len(table)) + 1, 2 * behind, 2 * before)))


def _merged(table: ActionTable, ended: Array, awaited: Array) -> ActionTable:
    """The table with sends and receives at the ticks at which the passes that produce their contents end."""
    receives = np.flatnonzero(awaited >= 0)
    sends = awaited[receives]
    forward = table.kind[receives] == Kind.FORWARD
    made = {name: np.empty(2 * len(sends), np.int64) for name in COLUMNS}
    for offset, rows in ((0, sends), (1, receives)):
        for name in COLUMNS:
            made[name][offset::2] = getattr(table, name)[rows]
    made["together"][:] = -1
    made["kind"][0::2] = np.where(forward, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    made["kind"][1::2] = np.where(forward, Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
    turns = 2 * np.repeat(ended[sends], 2)
    first = first_of_groups(table)
    begins = ended - longest_of_groups(first, TICKS[table.kind])
    return _in_order(table, made, np.concatenate((2 * begins + 1, turns)))


def _in_order(table: ActionTable, made: dict[str, Array], turns: Array) -> ActionTable:
    """The table with the actions `made` appended, and each rank's actions sorted by turn."""
    columns: dict[str, Any] = {name: np.concatenate((getattr(table, name), made[name])) for name in COLUMNS}
    order = np.argsort(columns["rank"] * (turns.max(initial=0) + 1) + turns, kind="stable")
    return replace(table, **{name: column[order] for name, column in columns.items()})


def _inserted(table: ActionTable, made: list[tuple[int, Kind, int, int]]) -> ActionTable:
    """The table with actions of no micro-batch inserted; each is (rank, kind, stage, row that it comes before)."""
    rank, kind, stage, before = np.array(made, np.int64).reshape(-1, 4).T
    columns = {"rank": rank, "kind": kind, "stage": stage, "slice": 0 * rank}
    columns |= {"micro_batch": 0 * rank - 1, "together": 0 * rank - 1}
    return _in_order(table, columns, np.concatenate((2 * np.arange(len(table)) + 1, 2 * before)))


def _reduced(table: ActionTable) -> ActionTable:
    """The table with a reduction of each stage's gradients after its last weight-gradient pass on a rank."""
    rows = np.flatnonzero((table.kind == Kind.BACKWARD) | (table.kind == Kind.WEIGHT_GRADIENT))
    last = {(int(table.rank[row]), int(table.stage[row])): int(row) for row in rows}
    first = first_of_groups(table)
    behind = np.searchsorted(first, first, side="right")
    return _inserted(table, [(rank, Kind.REDUCE, stage, int(behind[row])) for (rank, stage), row in last.items()])


def _updated(table: ActionTable) -> ActionTable:
    """The table with an update of the weights of each rank's stages at the end."""
    pairs = np.unique(np.stack((table.rank, table.stage), axis=1), axis=0).tolist()
    ends = table.starts[1:].tolist()
    return _inserted(table, [(rank, Kind.UPDATE, stage, ends[rank]) for rank, stage in pairs])


def _gathered(table: ActionTable, most: int) -> ActionTable:
    """The table with weights gathered before a rank computes their stages, and other weights freed."""
    made = [
        (rank, kind, stage, row)
        for rank, (first, end) in enumerate(zip(table.starts[:-1].tolist(), table.starts[1:].tolist(), strict=True))
        for kind, stage, row in _gathered_on(table, first, end, most)
    ]
    return _inserted(table, made)


def _gathered_on(table: ActionTable, first: int, end: int, most: int) -> Iterator[tuple[Kind, int, int]]:
    """(kind, stage, row that it comes before) of each gather and free of a rank, whose rows are `first` to `end`."""
    rows = first + np.flatnonzero(table.kind[first:end] <= PASSES[-1])
    stages, groups = table.stage[rows].tolist(), first_of_groups(table)[rows].tolist()
    uses: dict[int, list[int]] = {}
    for place in range(len(stages) - 1, -1, -1):
        uses.setdefault(stages[place], []).append(place)
    held: set[int] = set()
    next_use = {stage: places.pop() for stage, places in uses.items()}
    sizes, ended = Counter(groups), False
    for place, stage in enumerate(stages):
        if groups[place] == rows[place] and (stage not in held or ended or len(uses) > most):
            wanted = sorted(next_use, key=next_use.__getitem__)[: max(most, sizes[groups[place]])]
            for kind, which in ((Kind.RESHARD, sorted(held.difference(wanted))), (Kind.UNSHARD, wanted)):
                for each in which:
                    if kind == Kind.RESHARD or each not in held:
                        yield kind, each, groups[place]
            held, ended = set(wanted), False
        if uses[stage]:
            next_use[stage] = uses[stage].pop()
        else:
            del next_use[stage]
            ended = True
    for stage in sorted(held):
        yield Kind.RESHARD, stage, end
