"""Check that ranks can run a table of actions."""

from __future__ import annotations

from itertools import count
from typing import NoReturn

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime.schedule.actions import COPIES, MESSAGES, PASSES, ActionTable, Kind
from steptime.simulation.waits import NONE, Places, awaited_of_others, first_of_groups, is_message, needed, played

_SENDS = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}


def check(table: ActionTable, *, buffers: int = 1) -> None:
    """Refuse a table that ranks cannot run.

    The rules: every micro-batch has on every stage one forward pass and one backward pass, whole or in two parts, all
    on one rank; each action of a rank comes after the actions that it needs; if the table has messages, each needed one
    has a send and a receive, in the same order on both ranks; activations copied to the host come back; weights are
    gathered when a pass needs them; gradients are complete when they are summed; no ranks wait in a circle.

    Args:
        table: the actions.
        buffers: messages from one rank to another that may be sent before their receives begin; 0: a send and its
            receive happen at the same time. A rank does its actions one after another and waits at each.

    Raises:
        UserError: the message names a rank, an action and the rule that is broken.
    """
    _in_range(table)
    _enough(table)
    places = _each_once(table)
    _complete(table, places)
    rows = needed(table, places)
    _after_what_they_need(table, rows)
    if is_message(table).any():
        _both_ends(table, places)
    _copied_back(table, places)
    _gathered(table)
    _reduced_when_complete(table)
    _no_circle(table, awaited_of_others(table, rows), _messages(table, places), buffers)


def _refuse(table: ActionTable, row: int, rule: str) -> NoReturn:
    raise UserError(f"rank {int(table.rank[row])}: {table.named(row)}: {rule}")


def _refuse_where(table: ActionTable, broken: Array, rule: str) -> None:
    """Refuse the first row that breaks a rule."""
    if broken.any():
        _refuse(table, int(np.argmax(broken)), rule)


def _in_range(table: ActionTable) -> None:
    if not len(table):
        raise UserError("a schedule without actions")
    none = ~table.singles
    _refuse_where(table, (table.kind < 0) | (table.kind >= len(Kind)), "unknown kind of action")
    _refuse_where(table, (table.rank < 0) | (table.rank >= table.ranks), f"ranks are 0 to {table.ranks - 1}")
    _refuse_where(table, np.diff(table.rank, prepend=0) < 0, "actions of a rank do not follow each other")
    _refuse_where(table, (table.stage < 0) | (table.stage >= table.stages), f"stages are 0 to {table.stages - 1}")
    outside = (table.micro_batch < np.where(none, -1, 0)) | (table.micro_batch >= table.micro_batches)
    _refuse_where(table, outside, f"micro-batches are 0 to {table.micro_batches - 1}")
    _refuse_where(table, (table.slice < 0) | (table.slice >= table.slices), f"slices are 0 to {table.slices - 1}")


def _enough(table: ActionTable) -> None:
    """Refuse a table with fewer forward passes than stages x micro-batches x slices, before further checks."""
    forward = table.taken(table.kind == Kind.FORWARD)
    if len(forward) >= table.stages * table.micro_batches * table.slices:
        return
    there = set(zip(forward.stage.tolist(), forward.micro_batch.tolist(), forward.slice.tolist(), strict=True))
    numbers, pieces = table.micro_batches, table.slices
    absent = next(
        place
        for place in count()
        if (place // (numbers * pieces), place // pieces % numbers, place % pieces) not in there
    )
    _missing(table, absent // (numbers * pieces), absent // pieces % numbers, absent % pieces, "F")


def _missing(table: ActionTable, stage: int, number: int, piece: int, kind: str) -> NoReturn:
    holders = np.unique(table.rank[table.stage == stage]).tolist()
    whose = f"rank {' or '.join(map(str, holders))}" if holders else "no rank"
    of_slice = f", slice {piece}" * (table.slices > 1)
    raise UserError(
        f"{whose}: {stage}{kind[0]}{number} is missing: each stage needs a pass {kind} for micro-batch {number}"
        f"{of_slice}"
    )


def _each_once(table: ActionTable) -> Places:
    places = Places.of(table)
    _refuse_where(
        table, table.singles & (places.rows[table.identity] != np.arange(len(table))), "is in the schedule twice"
    )
    return places


def _complete(table: ActionTable, places: Places) -> None:
    """Refuse missing passes, and passes of one micro-batch and stage on several ranks."""
    stage, number, piece = (
        each.ravel() for each in np.indices((table.stages, table.micro_batches, table.slices), np.int64)
    )
    whole, inputs, weights, forward = (
        places.at(kind, stage, number, piece)
        for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.FORWARD)
    )
    backward = np.where(whole == NONE, inputs, whole)
    both = (whole != NONE) & ((inputs != NONE) | (weights != NONE))
    if both.any():
        _refuse(table, int(whole[np.argmax(both)]), "a backward pass is whole or in two parts (I and W), not both")
    for found, kind in ((forward, "F"), (backward, "B (or I and W)"), (np.maximum(whole, weights), "W")):
        if (found == NONE).any():
            place = int(np.argmax(found == NONE))
            _missing(table, int(stage[place]), int(number[place]), int(piece[place]), kind)
    for other in (backward, np.maximum(whole, weights)):
        apart = table.rank[other] != table.rank[forward]
        if apart.any():
            place = int(np.argmax(apart))
            _refuse(table, int(other[place]), f"its forward pass is on rank {table.rank[forward[place]]}")


def _after_what_they_need(table: ActionTable, rows: Array) -> None:
    """Refuse actions that come before, or run together with, an action of the same rank that they need."""
    first = first_of_groups(table)
    for column in range(rows.shape[1]):
        before = rows[:, column]
        late = (before != NONE) & (table.rank[before] == table.rank) & (before >= first)
        if late.any():
            row = int(np.argmax(late))
            how = "runs together with" if first[before[row]] == first[row] else "stands before"
            _refuse(table, row, f"{how} {table.named(int(before[row]))}, which it needs")
        lost = (before == NONE) & ~_needs_nothing(table, column)
        _refuse_where(table, lost, "what it needs is not in the schedule")


def _needs_nothing(table: ActionTable, column: int) -> Array:
    """Mask of the actions that need no other in a column of :func:`needed`."""
    kind, stage = table.kind, table.stage
    backward = (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRADIENT)
    ends = ((kind == Kind.FORWARD) & (stage == 0)) | (backward & (stage == table.stages - 1))
    own = backward | (kind == Kind.WEIGHT_GRADIENT) | (kind >= COPIES[0])
    found: Array = np.select(
        [np.full(len(table), column == 0), np.full(len(table), column == 1)],
        [ends | (kind == Kind.WEIGHT_GRADIENT) | (kind > MESSAGES[-1]), ~own],
        True,
    )
    return found


def _both_ends(table: ActionTable, places: Places) -> None:
    """Refuse a result for another rank without a send and a receive, and messages that no rank needs."""
    plain = table.taken(~is_message(table))
    rows = awaited_of_others(plain, needed(plain))
    to, of = np.flatnonzero(rows != NONE), rows[rows != NONE]
    expected = 0
    for send, receive in _SENDS.items():
        which = (plain.kind[to] == Kind.FORWARD) == (send == Kind.SEND_FORWARD)
        for kind, ends in ((send, of[which]), (receive, to[which])):
            stage, number, piece = plain.stage[ends], plain.micro_batch[ends], plain.slice[ends]
            found = places.at(kind, stage, number, piece)
            if (found == NONE).any():
                row, noun = int(ends[np.argmax(found == NONE)]), "send" if kind == send else "receive"
                _refuse(plain, row, f"no {noun} of its {'result' if kind == send else 'input'} in the schedule")
            wrong = table.rank[found] != plain.rank[ends]
            if wrong.any():
                row = int(np.argmax(wrong))
                _refuse(table, int(found[row]), f"its pass is on rank {plain.rank[ends[row]]}")
            expected += len(found)
    if expected != is_message(table).sum():
        _refuse_unneeded(table, plain, rows)


def _refuse_unneeded(table: ActionTable, plain: ActionTable, rows: Array) -> None:
    needs = Places.of(plain.taken(rows != NONE))
    gives = Places.of(plain.taken(np.unique(rows[rows != NONE])))
    for row in np.flatnonzero(is_message(table)).tolist():
        kind, at = Kind(table.kind[row]), (table.stage[[row]], table.micro_batch[[row]], table.slice[[row]])
        side = gives if kind in _SENDS else needs
        forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        if (side.at(Kind.FORWARD, *at) if forward else side.backward(*at))[0] == NONE:
            _refuse(table, row, "a message that no other rank needs")


def _messages(table: ActionTable, places: Places) -> Array:
    """Array of two rows: rows of the sends, and of their receives, ordered by send."""
    pairs = []
    for send, receive in _SENDS.items():
        rows = np.flatnonzero(table.kind == send)
        to = table.stage[rows] + (1 if send == Kind.SEND_FORWARD else -1)
        pairs.append(np.stack((rows, places.at(receive, to, table.micro_batch[rows], table.slice[rows]))))
    both = np.concatenate(pairs, axis=1)
    return both[:, np.argsort(both[0], kind="stable")]


def _no_circle(table: ActionTable, awaited: Array, messages: Array, buffers: int) -> None:
    """Refuse two ranks with different orders of the messages between them, and ranks that wait in a circle."""
    sends, receives = messages
    waits = awaited.copy()
    channel = table.rank[sends] * table.ranks + table.rank[receives]
    by_send, by_receive = (np.lexsort((rows, channel)) for rows in (sends, receives))
    differ = by_send != by_receive
    if differ.any():
        one, other = (int(each[np.argmax(differ)]) for each in (by_send, by_receive))
        _refuse(
            table,
            int(sends[one]),
            f"rank {table.rank[receives[one]]} expects {table.named(int(sends[other]))} "
            f"first: two ranks have the messages between them in the same order",
        )
    if buffers:
        late, before = by_send[buffers:], by_send[: len(by_send) - buffers]
        same = channel[late] == channel[before]
        waits[sends[late[same]]] = receives[before[same]]
    else:
        starts = table.starts[table.rank]
        for rows, others in ((sends, receives), (receives, sends)):
            waits[rows] = np.where(others > starts[others], others - 1, NONE)
    _, stuck = played(table, waits)
    if len(stuck):
        circle = _circle(table, waits, stuck)
        text = "; ".join(
            f"rank {table.rank[row]} at {table.named(row)} for {table.named(int(waits[row]))}" for row in circle
        )
        _refuse(table, circle[0], f"ranks wait for each other in a circle: {text}")


def _circle(table: ActionTable, waits: Array, stuck: Array) -> list[int]:
    """Rows at which ranks wait for each other."""
    at = {int(table.rank[row]): int(row) for row in stuck}
    seen: list[int] = []
    row = int(stuck[0])
    while row not in seen:
        seen.append(row)
        row = at[int(table.rank[waits[row]])]
    return seen[seen.index(row) :]


def _copied_back(table: ActionTable, places: Places) -> None:
    """Refuse copies to the host that do not come back, and copies on another rank than the pass."""
    for one, other, rule in (
        (Kind.OFFLOAD, Kind.RELOAD, "its activations do not come back from the host"),
        (Kind.OFFLOAD, Kind.FORWARD, "its forward pass is on another rank"),
        (Kind.RELOAD, Kind.FORWARD, "its forward pass is on another rank"),
    ):
        rows = np.flatnonzero(table.kind == one)
        found = places.at(other, table.stage[rows], table.micro_batch[rows], table.slice[rows])
        broken = np.zeros(len(table), bool)
        broken[rows] = (found == NONE) | (table.rank[found] != table.rank[rows])
        _refuse_where(table, broken, rule)


def _gathered(table: ActionTable) -> None:
    """If a rank gathers weights: refuse passes without their weights, and gathers and frees that do not alternate."""
    if not (table.kind == Kind.UNSHARD).any():
        _refuse_where(table, table.kind == Kind.RESHARD, "frees weights that were not gathered")
        return
    change = np.select([table.kind == Kind.UNSHARD, table.kind == Kind.RESHARD], [1, -1], 0)
    order = np.lexsort((np.arange(len(table)), table.stage, table.rank))
    place = table.rank[order] * table.stages + table.stage[order]
    total = np.cumsum(change[order])
    begins = np.searchsorted(place, place)
    now = np.empty(len(table), np.int64)
    now[order] = total - np.where(begins > 0, total[begins - 1], 0)
    _refuse_where(table, now > 1, "gathers weights that are gathered")
    _refuse_where(table, now < 0, "frees weights that were not gathered")
    _refuse_where(table, (table.kind <= PASSES[-1]) & (now != 1), "its weights are not gathered")


def _reduced_when_complete(table: ActionTable) -> None:
    """Refuse gradients that are summed twice, or before the last pass that adds to them."""
    place = table.rank * table.stages + table.stage
    sums = np.flatnonzero(table.kind == Kind.REDUCE)
    at = np.full(table.ranks * table.stages, len(table))
    at[place[sums]] = sums
    again = np.zeros(len(table), bool)
    again[sums] = at[place[sums]] != sums
    _refuse_where(table, again & (table.kind == Kind.REDUCE), "sums gradients twice")
    makes = (table.kind == Kind.BACKWARD) | (table.kind == Kind.WEIGHT_GRADIENT)
    _refuse_where(table, makes & (at[place] < np.arange(len(table))), "makes gradients that were already summed")
