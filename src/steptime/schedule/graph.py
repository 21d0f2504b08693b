"""What each action of a schedule waits for: streams of ranks, links between them, and dependencies, as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime.schedule.actions import LETTERS, MESSAGES, PASSES, ActionTable, Kind

DATA = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
"""Kinds that run on the data stream of a rank; passes and UPDATE run on its compute stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How the results of passes travel between ranks."""

    overlap: bool = True
    """True: a message occupies its link alone, while both ranks compute. False: the sender computes nothing while it
    sends, and a receiver whose table has receives computes nothing from there until the message is there."""
    buffers: int | None = None
    """Messages of one sender that a receiver can hold, 1 or more: a further one starts once a pass that took one has
    ended. None: any number."""
    link: Callable[[Array, Array], Array] | None = None
    """Number of the link between two ranks (sender, receiver), 0 or more. Messages on a link go one after another, in
    the order in which they are ready. None: each sender has a link of its own to each receiver."""


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
        """Messages (entries) that wait for a buffer, of so many, and for each the message that has it before."""
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
        """Chain of each item: 2 x rank for compute streams, 2 x rank + 1 for data streams, links above; -1: item 0."""
        return np.concatenate([[-1], np.repeat(np.arange(len(self.first)), self.stop - self.first)])

    @cached_property
    def previous(self) -> Array:
        """Item before each item in its chain; 0: none."""
        previous = np.arange(self.size) - 1
        previous[self.first[self.first < self.stop]] = 0
        previous[0] = 0
        return previous

    def ends_s(self, seconds: Array) -> Array:
        """End of each item (s), each item taking as long as `seconds` (s) says.

        Raises:
            UserError: some actions wait for each other.
        """
        ends, stuck = longest_paths(self.first.tolist(), self.stop.tolist(), self.cross.tolist(), seconds.tolist())
        if stuck:
            raise UserError(self._deadlock(stuck), hint="change the order of the actions of one of these ranks")
        return np.array(ends)

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
        """The first actions that wait for each other, by chain -> item."""
        chain = next(iter(stuck))
        seen: list[int] = []
        while chain not in seen:
            seen.append(chain)
            chain = int(self.chain[self.cross[stuck[chain]]])
        waits = [
            f"{self._name(stuck[each])} waits for {self._name(int(self.cross[stuck[each]]))}"
            for each in seen[seen.index(chain) :][:3]
        ]
        return "actions wait for each other: " + "; ".join(waits)

    def _name(self, item: int) -> str:
        """Words for an item; one of no duration is named after the action that it lets start."""
        while not (rows := np.flatnonzero(self.item == item)).size:
            found = np.flatnonzero(self.messages.item == item)
            if found.size:
                return f"the message of {action_name(self.table, int(self.messages.producer[found[0]]))}"
            item += 1
        return action_name(self.table, int(rows[0]))


def longest_paths(
    first: list[int], stop: list[int], cross: list[int], seconds: list[float]
) -> tuple[list[float | None], dict[int, int]]:
    """End of each item, and chain -> item for the chains that never end.

    Each chain goes on until an item waits for one that has no end yet, which wakes it once it has.
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
    """Words for an action: its rank, and what it does in PyTorch's notation."""
    return f"rank {table.rank[row]}: {table.named(row)}"


# -- rows that depend on each other -----------------------------------------------------------------------------------


class _Rows:
    """Rows of a table by what they do."""

    def __init__(self, table: ActionTable) -> None:
        self.table = table
        self.kind = table.kind.astype(np.int64)
        self._check_ranges()
        shape = (len(Kind), table.stages, table.micro_batches + 1, table.slices)
        self._row = np.full(shape, -1, np.int32)
        rows = np.arange(len(self.kind), dtype=np.int32)
        places = (self.kind, table.stage, table.micro_batch + 1, table.slice)
        self._row[places] = rows
        double = np.flatnonzero((self._row[places] != rows) & (table.micro_batch >= 0))
        if double.size:
            raise UserError(
                f"{action_name(table, int(double[0]))} is there twice",
                hint="each action is there once",
            )

    def _check_ranges(self) -> None:
        table = self.table
        for name, low, high in (
            ("rank", 0, table.ranks), ("stage", 0, table.stages), ("micro_batch", -1, table.micro_batches),
            ("slice", 0, table.slices), ("kind", 0, len(Kind)),
        ):  # fmt: skip
            values = getattr(table, name)
            bad = np.flatnonzero((values < low) | (values >= high))
            if bad.size:
                raise UserError(f"row {bad[0]}: {name} is {values[bad[0]]}", hint=f"from {low} to {high - 1}")
        bad = np.flatnonzero(np.diff(table.rank) < 0)
        if bad.size:
            raise UserError(f"row {bad[0] + 1}: rank {table.rank[bad[0] + 1]} after a higher one", hint="rank by rank")

    def of(self, *kinds: Kind) -> Array:
        """Rows of these kinds, ascending."""
        chosen = np.zeros(len(Kind), bool)
        chosen[list(kinds)] = True
        return np.flatnonzero(chosen[self.kind])

    def like(self, rows: Array, *kinds: Kind, stages: int = 0, slices: int = 0) -> Array:
        """For each row the one of one of these kinds, so many stages and slices on, of its micro-batch.

        Raises:
            UserError: there is none.
        """
        table = self.table
        stage, piece = table.stage[rows] + stages, table.slice[rows] + slices
        found = np.full(len(rows), -1, np.int64)
        for kind in kinds:
            found = np.maximum(found, self._row[kind, stage, table.micro_batch[rows] + 1, piece])
        missing = np.flatnonzero(found < 0)
        if missing.size:
            row = int(rows[missing[0]])
            what = f"{stage[missing[0]]}{LETTERS[kinds[0]]}{table.micro_batch[row]}"
            raise UserError(f"{action_name(table, row)} needs {what}, which no rank has", hint="add the action")
        return found

    def check_before(self, rows: Array, others: Array, rule: str) -> None:
        """Each of `others` is on the rank of the row, before it.

        Raises:
            UserError: one is not.
        """
        rank = self.table.rank
        bad = np.flatnonzero((rank[rows] != rank[others]) | (others > rows))
        if bad.size:
            row, other = int(rows[bad[0]]), int(others[bad[0]])
            raise UserError(f"{action_name(self.table, row)} is not after {action_name(self.table, other)}", hint=rule)


def _check_own_passes(rows: _Rows) -> None:
    """Passes of a stage are in order: forward, gradient of inputs, of weights; slices forward, then back."""
    table = rows.table
    backward = rows.of(Kind.BACKWARD, Kind.INPUT_GRADIENT)
    rows.check_before(backward, rows.like(backward, Kind.FORWARD), "a backward pass needs its forward pass")
    weights = rows.of(Kind.WEIGHT_GRADIENT)
    needs = rows.like(weights, Kind.INPUT_GRADIENT)
    rows.check_before(weights, needs, "gradients of weights need the gradients that the stage was given")
    if table.slices > 1:
        later = (forward := rows.of(Kind.FORWARD))[table.slice[forward] > 0]
        rows.check_before(later, rows.like(later, Kind.FORWARD, slices=-1), "slices go forward in their order")
        earlier = backward[table.slice[backward] < table.slices - 1]
        needs = rows.like(earlier, Kind.BACKWARD, Kind.INPUT_GRADIENT, slices=1)
        rows.check_before(earlier, needs, "slices go backward in reverse order")


def _results_between_stages(rows: _Rows) -> tuple[Array, Array]:
    """Passes that need the result of another stage (rows), and the passes that make it."""
    table = rows.table
    forward, backward = rows.of(Kind.FORWARD), rows.of(Kind.BACKWARD, Kind.INPUT_GRADIENT)
    forward = forward[table.stage[forward] > 0]
    backward = backward[table.stage[backward] < table.stages - 1]
    before = rows.like(forward, Kind.FORWARD, stages=-1)
    after = rows.like(backward, Kind.BACKWARD, Kind.INPUT_GRADIENT, stages=1)
    return np.concatenate([forward, backward]), np.concatenate([before, after])


def _messages(rows: _Rows, consumer: Array, producer: Array) -> MessageTable:
    """Messages from the passes of one rank to those of another, in the order of the sends."""
    table = rows.table
    send, receive = producer, np.full(len(consumer), -1)
    explicit = rows.of(*MESSAGES)
    if explicit.size:
        send, receive = send.copy(), receive.copy()
        forward = rows.kind[consumer] == Kind.FORWARD
        for way, step, sends, receives in (
            (forward, -1, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
            (~forward, 1, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
        ):
            receive[way] = rows.like(consumer[way], receives)
            send[way] = rows.like(consumer[way], sends, stages=step)
        rows.check_before(send, producer, "a result is sent after the pass that makes it")
        rows.check_before(consumer, receive, "a pass is after the receive of what it needs")
        used = np.zeros(len(rows.kind), bool)
        used[send], used[receive] = True, True
        spare = explicit[~used[explicit]]
        if spare.size:
            raise UserError(
                f"{action_name(table, int(spare[0]))}: no pass of another rank needs this message",
                hint="leave out messages between stages of one rank",
            )
    order = np.argsort(send, kind="stable")
    return MessageTable(
        producer=producer[order], consumer=consumer[order], send=send[order], receive=receive[order],
        source=table.rank[producer[order]], target=table.rank[consumer[order]], item=np.zeros(len(order), np.int64),
    )  # fmt: skip


def _data_dependencies(rows: _Rows) -> tuple[Array, Array]:
    """Rows that wait for actions of the data stream or the other way round, and the rows that they wait for."""
    table, count = rows.table, len(rows.kind)
    waits: list[Array] = [np.empty(0, np.int64)]
    needs: list[Array] = [np.empty(0, np.int64)]

    def neighbours(of: Array, among: Array, later: bool) -> None:
        """The next (or the last) row among these of the same rank and stage; the later of both waits."""
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

    passes, reduce = rows.of(*PASSES), rows.of(Kind.REDUCE)
    neighbours(rows.of(Kind.UNSHARD), passes, later=True)
    neighbours(rows.of(Kind.RESHARD), passes, later=False)
    neighbours(reduce, passes, later=False)
    if reduce.size:
        for one, last in zip(waits[-1].tolist(), needs[-1].tolist(), strict=True):
            others = reduce[(table.stage[reduce] == table.stage[one]) & (table.rank[reduce] != table.rank[one])]
            waits.append(others)
            needs.append(np.full(len(others), last))
    neighbours(rows.of(Kind.UPDATE), reduce, later=False)
    return np.concatenate(waits), np.concatenate(needs)


# -- items ------------------------------------------------------------------------------------------------------------


def graph_of(table: ActionTable, transport: Transport = Transport(), order: Array | None = None) -> ActionGraph:
    """What the actions of a schedule wait for.

    Args:
        table: the schedule. Without sends and receives in it, each result that another rank needs is sent as soon as
            it is there.
        transport: how messages travel.
        order: place of each message (as :attr:`ActionGraph.messages` lists them) in the order in which links take
            them; None: that of the sends in the table, rank by rank.

    Raises:
        UserError: an action is missing, is there twice, is before one of its rank that it needs, or is out of range.
    """
    if transport.buffers is not None and transport.buffers < 1:
        raise UserError(f"{transport.buffers} buffers for messages", hint="1 or more; None: any number")
    rows = _Rows(table)
    _check_own_passes(rows)
    consumer, producer = _results_between_stages(rows)
    far = table.rank[consumer] != table.rank[producer]
    rows.check_before(consumer[~far], producer[~far], "a pass is after the one whose result it needs")
    messages = _messages(rows, consumer[far], producer[far])
    return _Items(rows, messages, transport, order).graph()


class _Items:
    """Items are numbered: first those of rows, then those of messages; `_numbered` sorts them into chains."""

    def __init__(self, rows: _Rows, messages: MessageTable, transport: Transport, order: Array | None) -> None:
        self.rows, self.messages, self.transport = rows, messages, transport
        self.order = np.arange(len(messages.send)) if order is None else order
        table = rows.table
        on_compute = np.ones(len(rows.kind), bool)
        on_compute[rows.of(*DATA)] = False
        in_chain = np.ones(len(rows.kind), bool)
        explicit = bool((messages.receive >= 0).any())
        self.separate = transport.overlap or not explicit
        """Whether messages are items of their own."""
        if transport.overlap:
            in_chain[rows.of(*MESSAGES)] = False
        self._lead = _leaders(table, in_chain, rows)
        self.rows_of_items = np.flatnonzero(in_chain & (self._lead == np.arange(len(in_chain))))
        self.place = np.full(len(rows.kind), -1)
        self.place[self.rows_of_items] = np.arange(len(self.rows_of_items))
        self.place = np.where(in_chain, self.place[self._lead], -1)
        self.chain = (2 * table.rank + ~on_compute)[self.rows_of_items]
        self.sent = (
            len(self.rows_of_items) + np.arange(len(messages.send)) if self.separate else self.place[messages.send]
        )

    def graph(self) -> ActionGraph:
        """The graph."""
        table, messages, transport = self.rows.table, self.messages, self.transport
        chain, key = self.chain, 4 * self.rows_of_items + 1
        if self.separate:
            on = 2 * messages.source if not transport.overlap else 2 * table.ranks + self._links()
            chain = np.concatenate([chain, on])
            key = np.concatenate([key, 4 * (self.order if transport.overlap else messages.send) + 3])
        return self._numbered(chain, key, *self._crosses())

    def _links(self) -> Array:
        """Link of each message, numbered from 0 on without gaps."""
        source, target = self.messages.source, self.messages.target
        if self.transport.link is None:
            link = source * self.rows.table.ranks + target
        else:
            link = np.broadcast_to(self.transport.link(source, target), source.shape)
        return np.unique(link, return_inverse=True)[1]

    def _crosses(self) -> tuple[Array, Array]:
        """Items that wait for items of other chains, and the ones that they wait for."""
        messages, waits, needs = self.messages, *_data_dependencies(self.rows)
        own = not self.transport.overlap
        targets, sources = [self.place[waits]], [self.place[needs]]
        takes = messages.receive if own and not self.separate else messages.consumer
        targets.append(self.place[takes])
        sources.append(self.sent)
        if not own:
            targets.append(self.sent)
            sources.append(self.place[messages.producer])
        elif self.transport.link is not None:
            by_link = np.lexsort((self.order, link := self._links()))
            same = np.flatnonzero(np.diff(link[by_link]) == 0)
            targets.append(self.sent[by_link[same + 1]])
            sources.append(self.sent[by_link[same]])
        if (count := self.transport.buffers) is not None:
            later, earlier = messages.sharing_buffers(count)
            targets.append(self.sent[later])
            sources.append(self.place[messages.consumer[earlier]])
        return np.concatenate(targets), np.concatenate(sources)

    def _numbered(self, chain: Array, key: Array, targets: Array, sources: Array) -> ActionGraph:
        """Items by chain and place in it; all but one of what an item waits for are items of no duration before it."""
        table, messages, count = self.rows.table, self.messages, len(chain)
        cross = np.full(count, -1)
        cross[targets] = sources
        extra = np.flatnonzero(cross[targets] != sources)
        chain = np.concatenate([chain, chain[targets[extra]]])
        key = np.concatenate([key, key[targets[extra]] - 1])
        cross = np.concatenate([cross, sources[extra]])
        order = np.argsort(chain * (4 * len(self.rows.kind) + 4) + key, kind="stable")
        number = np.empty(len(order) + 1, np.int64)
        number[order], number[-1] = np.arange(1, len(order) + 1), 0
        chains = int(chain.max(initial=-1)) + 1
        stop = np.cumsum(np.bincount(chain, minlength=chains)) + 1
        item = number[self.place]
        item[messages.send] = np.where(messages.send == messages.producer, item[messages.send], number[self.sent])
        if self.transport.overlap:
            explicit = messages.receive >= 0
            item[messages.receive[explicit]] = number[self.sent[explicit]]
        found = {name: getattr(messages, name) for name in ("producer", "consumer", "send", "receive", "source")}
        return ActionGraph(
            table=table, transport=self.transport, first=np.concatenate([[1], stop[:-1]])[:chains], stop=stop,
            cross=np.concatenate([[0], number[cross[order]]]), item=item,
            messages=MessageTable(**found, target=messages.target, item=number[self.sent]),
        )  # fmt: skip


def _leaders(table: ActionTable, in_chain: Array, rows: _Rows) -> Array:
    """For each row the first of the passes that run together with it; itself where it runs alone."""
    lead = np.arange(len(table.kind))
    grouped = np.flatnonzero((table.together >= 0) & (rows.kind <= Kind.WEIGHT_GRADIENT))
    if not grouped.size:
        return lead
    key = table.rank[grouped] * (int(table.together.max()) + 1) + table.together[grouped]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    lead[grouped] = grouped[first[inverse]]
    compute = np.flatnonzero(in_chain & ~np.isin(rows.kind, DATA))
    numbers = lead[compute]
    runs = numbers[np.concatenate([[True], numbers[1:] != numbers[:-1]])]
    unique, counts = np.unique(runs, return_counts=True)
    if (counts > 1).any():
        row = int(unique[counts > 1][0])
        raise UserError(
            f"{action_name(table, row)}: another action is between those that run together with it",
            hint="actions with the same number in `together` follow each other",
        )
    return lead
