"""Graph of a schedule: streams of ranks, links between ranks, and the dependencies of all actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np

from steptime.errors import InternalError, UserError
from steptime.num import Array
from steptime.schedule.actions import COPIES, PASSES, STREAM, STREAMS, ActionTable, Kind
from steptime.simulation.legality import check
from steptime.simulation.waits import NONE, Places, first_of_groups, is_message, needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Model of the messages that carry results of passes between ranks."""

    overlap: bool = True
    """True: a message occupies its link only, and both ranks compute meanwhile. False: the sender computes nothing
    while it sends, and a receiver whose table has receives computes nothing from the receive until the message
    arrives."""
    buffers: int | None = None
    """Messages of one sender that a receiver can hold, 1 or more: the next one starts once a pass that consumed one has
    ended. None: no limit."""
    link: Callable[[Array, Array], Array] | None = None
    """Number of the link between two ranks (sender, receiver), 0 or more. Messages on a link go one after another, in
    the order in which they are ready. None: each sender has a link of its own to each receiver."""
    copies_ahead: int = 1
    """Passes that a rank starts while an earlier copy to the host still runs; the next pass waits for the copy. 1: one
    pass computes while the activations of the pass before it go to the host. 0: passes and copies run one after
    another, and a copy back runs after all earlier copies to the host."""

    def links(self, source: Array, target: Array) -> Array:
        """Link of each message, numbered from 0 on without gaps."""
        if self.link is None:
            link = source * (target.max(initial=0) + 1) + target
        else:
            link = np.broadcast_to(self.link(source, target), source.shape)
        return np.unique(link, return_inverse=True)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTable:
    """Messages between ranks, one entry each: rows of the table of actions, and ranks."""

    producer: Array
    """Row of the pass whose result travels."""
    consumer: Array
    """Row of the pass that needs it."""
    send: Array
    """Row of the send; the producer's row in a table without sends."""
    receive: Array
    """Row of the receive; -1 in a table without receives."""
    source: Array
    """Rank that sends."""
    target: Array
    """Rank that receives."""
    item: Array
    """Item of the graph that is the transfer."""

    def sharing_buffers(self, count: int) -> tuple[Array, Array]:
        """Messages (entries) that wait for one of ``count`` buffers, and the message that holds each buffer before."""
        pair = self.source * (self.target.max(initial=0) + 1) + self.target
        by_pair = np.argsort(pair, kind="stable")
        same = np.flatnonzero(pair[by_pair[:-count]] == pair[by_pair[count:]])
        return by_pair[same + count], by_pair[same]


@dataclass(frozen=True, kw_only=True)
class ActionGraph:
    """Items in chains: an item starts once the one before it in its chain, and one other item, have ended.

    A chain is a stream of a rank or a link; its items have consecutive numbers. An action that waits for more than one
    item of other chains has items of no duration before it. Item 0 ends at time 0 and belongs to no chain.
    """

    table: ActionTable
    transport: Transport
    first: Array
    """First item of each chain."""
    stop: Array
    """Item after the last of each chain."""
    cross: Array
    """Item of another chain that an item waits for; 0: none."""
    item: Array
    """Item of each row of the table; actions that run together share one."""
    messages: MessageTable

    @property
    def size(self) -> int:
        """Number of items, item 0 included."""
        return len(self.cross)

    @cached_property
    def chain(self) -> Array:
        """Chain of each item: :data:`STREAMS` x rank + stream for a rank, larger for links; -1: item 0."""
        return np.concatenate([[-1], np.repeat(np.arange(len(self.first)), self.stop - self.first)])

    @cached_property
    def previous(self) -> Array:
        """Item before each item in its chain; 0: none."""
        previous = np.arange(self.size) - 1
        previous[self.first[self.first < self.stop]] = 0
        previous[0] = 0
        return previous

    def ends_s(self, seconds: Array) -> Array:
        """End of each item (s); each item takes its entry of `seconds` (s).

        Raises:
            UserError: some actions wait for each other.
        """
        ends, stuck = longest_paths(self.first.tolist(), self.stop.tolist(), self.cross.tolist(), seconds.tolist())
        if stuck:
            raise UserError(self._deadlock(stuck), hint="change the order of the actions of one of these ranks")
        return np.fromiter(ends, np.float64, len(ends))

    @cached_property
    def levels(self) -> list[tuple[Array, Array, Array]]:
        """Items (numbers, item before, item of another chain) in groups, each waiting for items of earlier groups."""
        depth = self.ends_s(np.ones(self.size)).astype(np.int64)
        depth[0] = 0
        order = np.argsort(depth, kind="stable")[1:]
        cuts = np.flatnonzero(np.diff(depth[order])) + 1
        parts = (np.split(array, cuts) for array in (order, self.previous[order], self.cross[order]))
        return list(zip(*parts, strict=True))

    def ends_of_samples_s(self, seconds: Array) -> Array:
        """End of each item (s) by sample; `seconds` (s) has a row for each item and a column for each sample."""
        ends = np.zeros(seconds.shape)
        for items, before, cross in self.levels:
            ends[items] = np.maximum(ends[before], ends[cross]) + seconds[items]
        return ends

    def _deadlock(self, stuck: dict[int, int]) -> str:
        """Description of the first actions that wait for each other; `stuck`: item by chain."""
        chain = next(iter(stuck))
        seen: list[int] = []
        while chain not in seen:
            seen.append(chain)
            chain = int(self.chain[self.cross[stuck[chain]]])
        of_ranks = [each for each in seen[seen.index(chain) :] if each < STREAMS * self.table.ranks]
        waits = [f"{self._name(stuck[each])} waits for {self._name(int(self.cross[stuck[each]]))}" for each in of_ranks]
        return "actions wait for each other: " + "; ".join(sorted(waits)[:3])

    def _name(self, item: int) -> str:
        """Name of an item: of a message, the pass that produces it; of a wait, the action that starts after it."""
        while not (rows := np.flatnonzero(self.item == item)).size:
            found = np.flatnonzero(self.messages.item == item)
            if found.size:
                return action_name(self.table, int(self.messages.producer[found[0]]))
            item += 1
        return action_name(self.table, int(rows[0]))


def longest_paths(
    first: list[int], stop: list[int], cross: list[int], seconds: list[float]
) -> tuple[list[float | None], dict[int, int]]:
    """End of each item, and chain -> item for the chains that never end.

    Each chain advances until an item waits for an item without an end; the chain resumes once that item has ended.
    """
    ends: list[float | None] = [None] * len(cross)
    ends[0] = 0.0
    clock, at = [0.0] * len(first), list(first)
    parked: dict[int, list[int]] = {}
    awake = list(range(len(first)))
    while awake:
        chain = awake.pop()
        now, item, last = clock[chain], at[chain], stop[chain]
        while item < last:
            other = cross[item]
            ready = ends[other]
            if ready is None:
                if other in parked:
                    parked[other].append(chain)
                else:
                    parked[other] = [chain]
                break
            if ready > now:
                now = ready
            now += seconds[item]
            ends[item] = now
            if item in parked:
                awake += parked.pop(item)
            item += 1
        clock[chain], at[chain] = now, item
    return ends, {chain: at[chain] for chains in parked.values() for chain in chains}


def action_name(table: ActionTable, row: int) -> str:
    """Name of an action: its rank, and the action in PyTorch's notation."""
    return f"rank {table.rank[row]}: {table.named(row)}"


# -- rows that depend on each other -----------------------------------------------------------------------------------


def _needed(table: ActionTable) -> Array:
    """Rows whose results each action needs (:func:`steptime.simulation.waits.needed`).

    Raises:
        UserError: the table breaks a rule that a simulation rests on.
    """
    for name, low, high in (
        ("kind", 0, len(Kind)),
        ("rank", 0, table.ranks),
        ("stage", 0, table.stages),
        ("slice", 0, table.slices),
        ("micro_batch", -1, table.micro_batches),
    ):
        column = getattr(table, name)
        if column.min(initial=high - 1) < low or column.max(initial=low) >= high:
            _refuse(table)
    places = Places.of(table)
    rows, needs = np.arange(len(table)), needed(table, places)
    single = table.singles
    if (places.rows[table.identity] != rows)[single].any() or (np.diff(table.rank) < 0).any():
        _refuse(table)
    first, own = needs[:, 0], needs[:, 1:]
    backward = (table.kind == Kind.BACKWARD) | (table.kind == Kind.INPUT_GRADIENT)
    ends = ((table.kind == Kind.FORWARD) & (table.stage == 0)) | (backward & (table.stage == table.stages - 1))
    copies = table.kind >= COPIES[0]
    alone = single & ((first != NONE) | ends | copies | (table.kind == Kind.WEIGHT_GRADIENT))
    sends = (table.kind == Kind.SEND_FORWARD) | (table.kind == Kind.SEND_BACKWARD)
    local = sends | (single & ~is_message(table) & is_message(table)[first])
    late = (needs >= rows[:, None]) & (table.rank[needs] == table.rank[:, None])
    apart = (own != NONE) & (table.rank[own] != table.rank[:, None])
    apart[:, 0] |= (own[:, 0] == NONE) & (backward | copies | (table.kind == Kind.WEIGHT_GRADIENT))
    distant = local & (first != NONE) & (table.rank[first] != table.rank)
    lost = np.count_nonzero(table.kind == Kind.OFFLOAD) != np.count_nonzero(table.kind == Kind.RELOAD)
    if (single & ~alone).any() or late.any() or apart.any() or distant.any() or lost:
        _refuse(table)
    return needs


def _refuse(table: ActionTable) -> NoReturn:
    """Raise the error of the check of a table."""
    check(table)
    raise InternalError("a table of actions that passes its check cannot be simulated")


def _messages(table: ActionTable, needs: Array) -> MessageTable:
    """Results that passes need from another rank, in the order of the sends; UserError: a result has no message."""
    consumer = np.flatnonzero((table.kind <= Kind.INPUT_GRADIENT) & (needs[:, 0] != NONE))
    first = needs[consumer, 0]
    message = is_message(table)
    explicit = message[first]
    receive = np.where(explicit, first, NONE)
    send = np.where(explicit, needs[first, 0], first)
    producer = np.where(explicit, needs[send, 0], first)
    far = explicit | (table.rank[producer] != table.rank[consumer])
    if message.any() and not (explicit[far].all() and 2 * far.sum() == message.sum()):
        _refuse(table)
    order = np.flatnonzero(far)
    order = order[np.argsort(send[order], kind="stable")]
    return MessageTable(
        producer=producer[order],
        consumer=consumer[order],
        send=send[order],
        receive=receive[order],
        source=table.rank[send[order]],
        target=table.rank[consumer[order]],
        item=np.zeros(len(order), np.int64),
    )


def _rows(table: ActionTable, *kinds: Kind) -> Array:
    """Rows of these kinds, ascending."""
    return np.flatnonzero(np.isin(table.kind, kinds))


def _data_dependencies(table: ActionTable) -> tuple[Array, Array]:
    """Rows that wait for actions of another stream, data or compute, and the rows that they wait for."""
    count = len(table)
    waits: list[Array] = [np.empty(0, np.int64)]
    needs: list[Array] = [np.empty(0, np.int64)]

    def neighbours(of: Array, among: Array, later: bool) -> None:
        """Pair each row with the next (or the last) row of the same rank and stage; the later of the two waits."""
        if not (of.size and among.size):
            return
        place = (table.rank * table.stages + table.stage).astype(np.int64)
        sorted_rows = among[np.argsort(place[among], kind="stable")]
        keys = place[sorted_rows] * count + sorted_rows
        at = np.searchsorted(keys, place[of] * count + of) - (0 if later else 1)
        found = sorted_rows[np.clip(at, 0, len(sorted_rows) - 1)]
        there = (at >= 0) & (at < len(sorted_rows)) & (place[found] == place[of])
        waits.append((found if later else of)[there])
        needs.append((of if later else found)[there])

    passes, reduce = _rows(table, *PASSES), _rows(table, Kind.REDUCE)
    neighbours(_rows(table, Kind.UNSHARD), passes, later=True)
    neighbours(_rows(table, Kind.RESHARD), passes, later=False)
    neighbours(reduce, passes, later=False)
    if reduce.size:
        for one, last in zip(waits[-1].tolist(), needs[-1].tolist(), strict=True):
            others = reduce[(table.stage[reduce] == table.stage[one]) & (table.rank[reduce] != table.rank[one])]
            waits.append(others)
            needs.append(np.full(len(others), last))
    neighbours(_rows(table, Kind.UPDATE), reduce, later=False)
    return np.concatenate(waits), np.concatenate(needs)


def _copy_dependencies(table: ActionTable, needs: Array, ahead: int) -> tuple[Array, Array]:
    """Rows that wait for a copy, copies that wait for a pass or a copy, and the rows that they wait for."""
    copies = _rows(table, *COPIES)
    if not copies.size:
        return copies, copies
    first, passes, ranks = first_of_groups(table), _rows(table, *PASSES), table.ranks
    begins = np.unique(first[passes])
    before = np.searchsorted(passes, copies) - 1
    same_rank = (before >= 0) & (table.rank[passes[before]] == table.rank[copies])
    waits, wanted = [copies[same_rank]], [passes[before[same_rank]]]
    # A backward pass waits for its copy back, and that for the copy to the host.
    chained = np.concatenate((copies[table.kind[copies] == Kind.RELOAD], passes[table.kind[passes] != Kind.FORWARD]))
    chained = chained[np.isin(table.kind[needs[chained, 1]], COPIES)]
    waits.append(chained)
    wanted.append(needs[chained, 1])
    out = copies[table.kind[copies] == Kind.OFFLOAD]
    if not ahead:
        back = np.setdiff1d(copies, out)
        at = np.searchsorted(out, back) - 1
        same = (at >= 0) & (table.rank[out[at]] == table.rank[back])
        waits.append(back[same])
        wanted.append(out[at[same]])
    # The pass that is too far ahead of a copy to the host waits for it.
    turn = np.searchsorted(begins, out) + ahead
    ends = np.searchsorted(table.rank[begins], np.arange(ranks), side="right")[table.rank[out]]
    out, turn = out[turn < ends], turn[turn < ends]
    waits.append(begins[turn])
    wanted.append(out)
    return np.concatenate(waits), np.concatenate(wanted)


# -- items ------------------------------------------------------------------------------------------------------------


def graph_of(table: ActionTable, transport: Transport = Transport(), order: Array | None = None) -> ActionGraph:
    """The graph of a schedule.

    Args:
        table: the schedule. If it has no sends and receives, each result that another rank needs is sent as soon as
            it is complete.
        transport: how messages travel.
        order: place of each message (as :attr:`ActionGraph.messages` lists them) in the order in which links take
            them; None: the order of the sends in the table, rank by rank.

    Raises:
        UserError: an action is missing, duplicated, out of range, or before an action of its rank that it needs.
    """
    if transport.buffers is not None and transport.buffers < 1:
        raise UserError(f"{transport.buffers} buffers for messages", hint="1 or more; None: any number")
    if transport.copies_ahead < 0:
        raise UserError(f"{transport.copies_ahead} passes ahead of copies", hint="0 or more")
    return _Items(table, _needed(table), transport, order).graph()


class _Items:
    """Numbered items: first the items of rows, then the items of messages; `_numbered` sorts them into chains."""

    def __init__(self, table: ActionTable, needs: Array, transport: Transport, order: Array | None) -> None:
        messages = _messages(table, needs)
        self.table, self.needs, self.messages, self.transport = table, needs, messages, transport
        self.order = np.arange(len(messages.send)) if order is None else order
        self.separate = transport.overlap or not (messages.receive >= 0).any()
        """True: messages are items of their own; False: a message is the item of its send and receive."""
        message = is_message(table)
        lead = np.where(table.kind <= Kind.WEIGHT_GRADIENT, first_of_groups(table), np.arange(len(table)))
        self.leaders = np.flatnonzero((lead == np.arange(len(table))) & ~(message & transport.overlap))
        """Rows that are items: the first row of each group that runs together."""
        self.place = np.full(len(table), NONE)
        self.place[self.leaders] = np.arange(len(self.leaders))
        self.place = self.place[lead]
        self.chain = (STREAMS * table.rank + STREAM[table.kind])[self.leaders]
        count = len(self.leaders)
        self.sent = count + np.arange(len(messages.send)) if self.separate else self.place[messages.send]

    def graph(self) -> ActionGraph:
        """The graph."""
        table, messages, transport = self.table, self.messages, self.transport
        chain, key = self.chain, 4 * self.leaders + 1
        if self.separate:
            on = STREAMS * messages.source
            if transport.overlap:
                on = STREAMS * table.ranks + transport.links(messages.source, messages.target)
            chain = np.concatenate([chain, on])
            key = np.concatenate([key, 4 * (self.order if transport.overlap else messages.send) + 3])
        return self._numbered(chain, key, *self._crosses())

    def _crosses(self) -> tuple[Array, Array]:
        """Items that wait for items of other chains, and the items that they wait for."""
        messages, own = self.messages, not self.transport.overlap
        rows = _data_dependencies(self.table), _copy_dependencies(self.table, self.needs, self.transport.copies_ahead)
        targets, sources = ([self.place[each] for each in pair] for pair in zip(*rows, strict=True))
        takes = messages.receive if own and not self.separate else messages.consumer
        targets.append(self.place[takes])
        sources.append(self.sent)
        if not own:
            targets.append(self.sent)
            sources.append(self.place[messages.producer])
        elif self.transport.link is not None:
            link = self.transport.links(messages.source, messages.target)
            by_link = np.lexsort((self.order, link))
            same = np.flatnonzero(np.diff(link[by_link]) == 0)
            targets.append(self.sent[by_link[same + 1]])
            sources.append(self.sent[by_link[same]])
        if (count := self.transport.buffers) is not None:
            later, earlier = messages.sharing_buffers(count)
            targets.append(self.sent[later])
            sources.append(self.place[messages.consumer[earlier]])
        return np.concatenate(targets), np.concatenate(sources)

    def _numbered(self, chain: Array, key: Array, targets: Array, sources: Array) -> ActionGraph:
        """Graph with items sorted by chain; items of no duration come before one that waits for several others."""
        table, messages, count = self.table, self.messages, len(chain)
        cross = np.full(count, -1)
        cross[targets] = sources
        extra = np.flatnonzero(cross[targets] != sources)
        chain = np.concatenate([chain, chain[targets[extra]]])
        key = np.concatenate([key, key[targets[extra]] - 1])
        cross = np.concatenate([cross, sources[extra]])
        order = np.argsort(chain * (4 * len(self.table) + 4) + key, kind="stable")
        number = np.empty(len(order) + 1, np.int64)
        number[order], number[-1] = np.arange(1, len(order) + 1), 0
        chains = max(int(chain.max(initial=-1)) + 1, STREAMS * table.ranks)
        stop = np.cumsum(np.bincount(chain, minlength=chains)) + 1
        item = number[self.place]
        item[messages.send] = np.where(messages.send == messages.producer, item[messages.send], number[self.sent])
        if self.transport.overlap:
            explicit = messages.receive >= 0
            item[messages.receive[explicit]] = number[self.sent[explicit]]
        found = {name: getattr(messages, name) for name in ("producer", "consumer", "send", "receive", "source")}
        return ActionGraph(
            table=table,
            transport=self.transport,
            first=np.concatenate([[1], stop[:-1]])[:chains],
            stop=stop,
            cross=np.concatenate([[0], number[cross[order]]]),
            item=item,
            messages=MessageTable(**found, target=messages.target, item=number[self.sent]),
        )
