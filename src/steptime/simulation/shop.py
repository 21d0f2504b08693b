"""One-copy schedules as orders of passes: fast timing, and list scheduling by priority rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.schedule.actions import ActionTable, Kind

KINDS: Final = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""Kinds of passes, in the order of their numbers in a shop."""
F, I, W = range(3)  # noqa: E741
LEAST: Final = 1e-9
"""Tolerance for rounding, as a share of a limit or of a span."""

Orders = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages of each rank."""

    name: str
    chunks: int
    stages: Callable[[int], Array]
    """Stage by rank and chunk, as a function of the number of ranks; later chunks are later stages."""


PLACEMENTS: Final = (
    Placement(name="one stage a rank", chunks=1, stages=lambda p: np.arange(p)[:, None]),
    Placement(name="loop", chunks=2, stages=lambda p: np.arange(p)[:, None] + p * np.arange(2)),
    Placement(name="V", chunks=2, stages=lambda p: np.stack((np.arange(p), 2 * p - 1 - np.arange(p)), axis=1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """A pipeline as a job shop: ranks are machines, numbered passes are the operations.

    The number of a pass is `(kind * stages + stage) * micro_batches + micro_batch`; `kind` is a place in :data:`KINDS`.
    """

    placement: Placement
    ranks: int
    micro_batches: int
    stages: Array
    """Stage by rank and chunk."""
    seconds: Array
    """Seconds by kind, of :data:`KINDS`, and stage."""
    lag: Array
    """Seconds of the message from the rank of stage s to the rank of stage s + 1, and back: two rows."""
    limit: tuple[float, ...]
    """Micro-batches whose activations, of a p-th part of the model, fit, by rank."""
    deferred: float
    """Share of the activations that a weight-gradient pass still needs."""
    takes: list[float]
    """Seconds of each pass."""
    awaits: list[int]
    """Pass of the previous stage (next stage in backward) that each pass waits for; the number of passes: none."""
    lags: list[float]
    """Seconds from the end of the awaited pass to the start of the pass that awaits it, at least."""
    owner: list[int]
    """Rank of each pass."""

    @property
    def each(self) -> float:
        """Activations of one stage and micro-batch, in micro-batches of a p-th part of the model."""
        return 1 / self.placement.chunks

    def kind(self, number: int) -> int:
        """Place of the kind of a pass in :data:`KINDS`."""
        return number // (self.stages.size * self.micro_batches)

    def ends_s(self, orders: Orders) -> list[float] | None:
        """End of each pass (s) if each rank keeps its order and starts passes as soon as it can; None: deadlock."""
        takes, awaits, lags = self.takes, self.awaits, self.lags
        ends = [-1.0] * len(takes)
        ends.append(0.0)
        blocked, left = [-1] * len(ends), len(takes)
        place, clock, ready = [0] * self.ranks, [0.0] * self.ranks, list(range(self.ranks))
        while ready:
            rank = ready.pop()
            order, now, at = orders[rank], clock[rank], place[rank]
            for number in order[at:] if at else order:
                before = awaits[number]
                end = ends[before]
                if end < 0:
                    blocked[before] = rank
                    break
                end += lags[number]
                now = (now if now > end else end) + takes[number]
                ends[number] = now
                left -= 1
                at += 1
                if blocked[number] >= 0:
                    ready.append(blocked[number])
            place[rank], clock[rank] = at, now
        return None if left else ends

    def span_s(self, orders: Orders, ends: list[float]) -> float:
        """Longest time of a rank from the start of its first pass to the end of its last (s)."""
        return max(ends[order[-1]] - ends[order[0]] + self.takes[order[0]] for order in orders)

    def fits(self, order: Sequence[int], rank: int) -> bool:
        """True if a rank has the memory for its order, with each weight-gradient pass after its input-gradient pass."""
        each, size = self.each, self.stages.size * self.micro_batches
        most = self.limit[rank] * (1 + LEAST) + LEAST
        change = (each, each * (self.deferred - 1), -each * self.deferred)
        held, done = 0.0, set[int]()
        for number in order:
            kind = number // size
            held += change[kind]
            if held > most or (kind == W and number - size not in done):
                return False
            if kind == I:
                done.add(number)
        return True

    def held(self, orders: Orders) -> tuple[float, ...]:
        """Largest number of activations of each rank, in micro-batches of a p-th part of the model."""
        change = np.array((self.each, self.each * (self.deferred - 1), -self.each * self.deferred))
        size = self.stages.size * self.micro_batches
        return tuple(float(np.cumsum(change[np.array(order) // size]).max()) for order in orders)

    def orders_of(self, table: ActionTable) -> Orders:
        """The orders of a table: backward passes in two parts, micro-batches numbered in order of arrival."""
        count, size = self.micro_batches, self.stages.size
        orders: Orders = [[] for _ in range(self.ranks)]
        made: dict[tuple[int, int], int] = {}
        parts = {Kind.FORWARD: (F,), Kind.BACKWARD: (I, W), Kind.INPUT_GRADIENT: (I,), Kind.WEIGHT_GRADIENT: (W,)}
        for rank, kind, stage in zip(table.rank.tolist(), table.kind.tolist(), table.stage.tolist(), strict=True):
            for part in parts[Kind(kind)]:
                number = made.get((part, stage), 0)
                made[part, stage] = number + 1
                orders[rank].append((part * size + stage) * count + number)
        return orders

    def table(self, orders: Orders) -> ActionTable:
        """The orders as a table of actions."""
        numbers = np.concatenate([np.array(order, np.int64) for order in orders])
        place, micro_batch = np.divmod(numbers, self.micro_batches)
        kind, stage = np.divmod(place, self.stages.size)
        return ActionTable(
            ranks=self.ranks,
            stages=self.stages.size,
            micro_batches=self.micro_batches,
            rank=np.repeat(np.arange(self.ranks), [len(order) for order in orders]),
            kind=np.array(KINDS)[kind],
            stage=stage,
            micro_batch=micro_batch,
            slice=np.zeros_like(stage),
            together=np.full_like(stage, -1),
        )


def shop_of(
    placement: Placement, micro_batches: int, seconds: Array, message_s: Array, limit: Sequence[float], deferred: float
) -> Shop:
    """The shop of a pipeline.

    Args:
        placement: stages of each rank.
        micro_batches: micro-batches of a step.
        seconds: of a pass, by kind of :data:`KINDS` and stage.
        message_s: seconds of a message by sender and receiver.
        limit: micro-batches of a p-th part of the model that fit, by rank.
        deferred: share of the activations that weight-gradient passes need.
    """
    ranks, m = len(limit), micro_batches
    stages = placement.stages(ranks)
    count = stages.size
    owner = np.empty(count, np.int64)
    owner[stages.ravel()] = np.repeat(np.arange(ranks), placement.chunks)
    ahead, behind = owner[:-1], owner[1:]
    moves = ahead != behind
    lag = np.stack((np.where(moves, message_s[ahead, behind], 0.0), np.where(moves, message_s[behind, ahead], 0.0)))
    none = 3 * count * m
    awaits, lags = np.full((3, count, m), none), np.zeros((3, count, m))
    number = np.arange(none).reshape(3, count, m)
    awaits[F, 1:], lags[F, 1:] = number[F, :-1], lag[0][:, None]
    awaits[I, :-1], lags[I, :-1] = number[I, 1:], lag[1][:, None]
    awaits[I, -1] = number[F, -1]
    return Shop(
        placement=placement,
        ranks=ranks,
        micro_batches=m,
        stages=stages,
        seconds=seconds,
        lag=lag,
        limit=tuple(limit),
        deferred=deferred,
        takes=np.repeat(seconds.ravel(), m).tolist(),
        awaits=awaits.ravel().tolist(),
        lags=lags.ravel().tolist(),
        owner=np.tile(np.repeat(owner, m), 3).tolist(),
    )


# -- rules of thumb ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Habits:
    """Priority rule of list scheduling: how a rank chooses among passes that can run."""

    lead: float
    """Limit of forward passes ahead of input-gradient passes, as a share of the number that fills the wait for the
    first gradient."""
    backward_first: bool
    """Prefers input-gradient passes to forward passes."""
    deep_first: bool
    """Prefers the later of two chunks in forward and the earlier one in backward: the one nearer to its end."""
    patience: float
    """Waits for a pass whose input is known to arrive within this share of a weight-gradient pass."""


def listed(shop: Shop, habits: Habits) -> Orders:
    """Orders by list scheduling: in order of time, each free rank runs the pass that its priority rule prefers.

    A forward pass of a chunk leaves room for one pass of each later chunk, so that ranks with full memory can go on.
    """
    return _Lister(shop, habits).orders()


class _Lister:
    """State of all ranks during list scheduling."""

    def __init__(self, shop: Shop, habits: Habits) -> None:
        self.shop, self.habits = shop, habits
        p, v, m = shop.ranks, shop.placement.chunks, shop.micro_batches
        self.size = shop.stages.size * m
        self.first = [
            [(kind * shop.stages.size + int(stage)) * m for kind in range(3) for stage in shop.stages[rank]]
            for rank in range(p)
        ]
        """First pass of each letter, by rank; a letter is kind x chunks + chunk."""
        self.next = [list(letters) for letters in self.first]
        self.ends = [-1.0] * len(shop.takes) + [0.0]
        self.now, self.held = [0.0] * p, [0.0] * p
        self.made: Orders = [[] for _ in range(p)]
        self.coming = [(0.0, rank) for rank in range(p)]
        self.follows = [-1] * (len(shop.takes) + 1)
        for number, before in enumerate(shop.awaits):
            self.follows[before] = number
        forward = [v - 1 - c if habits.deep_first else c for c in range(v)]
        backward = [v + c if habits.deep_first else v + v - 1 - c for c in range(v)]
        self.choice = backward + forward if habits.backward_first else forward + backward
        self.lead = [max(1.0, habits.lead * each) for each in fillers(shop)]

    def orders(self) -> Orders:
        while self.coming:
            now, rank = heappop(self.coming)
            if now >= self.now[rank]:
                self.step(now, rank)
        return self.made

    def step(self, now: float, rank: int) -> None:
        """Run the next pass of a free rank, if there is one."""
        shop, v, m = self.shop, self.shop.placement.chunks, self.shop.micro_batches
        first, nexts = self.first[rank], self.next[rank]
        soonest, short = inf, False
        for letter in self.choice:
            number = nexts[letter]
            if number >= first[letter] + m:
                continue
            ready = self.ends[shop.awaits[number]]
            if ready < 0:
                continue
            ready += shop.lags[number]
            if letter < v:
                if self.full(rank, letter):
                    short = True
                    continue
                if letter == 0 and self.ahead(rank) >= self.lead[rank]:
                    continue
            if ready <= now:
                self.do(now, rank, letter)
                return
            soonest = min(soonest, ready)
        late = [
            letter
            for letter in range(2 * v, 3 * v)
            if nexts[letter] - first[letter] < nexts[letter - v] - first[letter - v]
        ]
        if late:
            letter = min(late, key=lambda each: nexts[each] - first[each])
            if short or soonest - now >= self.habits.patience * shop.takes[nexts[letter]]:
                self.do(now, rank, letter)
                return
        if soonest < inf:
            heappush(self.coming, (soonest, rank))

    def full(self, rank: int, chunk: int) -> bool:
        """True if there is no memory for a forward pass of a chunk."""
        shop = self.shop
        return self.held[rank] + shop.each * (shop.placement.chunks - chunk) > shop.limit[rank] * (1 + LEAST) + LEAST

    def ahead(self, rank: int) -> int:
        """Micro-batches between their first forward pass and their last input-gradient pass on a rank."""
        v, first, nexts = self.shop.placement.chunks, self.first[rank], self.next[rank]
        return nexts[0] - first[0] - nexts[v] + first[v]

    def do(self, now: float, rank: int, letter: int) -> None:
        """Append a pass to the order of its rank."""
        shop, number = self.shop, self.next[rank][letter]
        kind = letter // shop.placement.chunks
        end = now + shop.takes[number]
        self.next[rank][letter] += 1
        self.made[rank].append(number)
        self.ends[number] = self.now[rank] = end
        self.held[rank] += shop.each * (1.0, shop.deferred - 1, -shop.deferred)[kind]
        heappush(self.coming, (end, rank))
        follower = self.follows[number]
        if follower >= 0:
            other = shop.owner[follower]
            heappush(self.coming, (max(end + shop.lags[follower], self.now[other]), other))


def fillers(shop: Shop) -> Array:
    """Micro-batches whose forward passes fill the time until a rank's first gradient arrives, by rank."""
    waits_s = np.array([waited_s(shop, int(stage), int(stage)) for stage in shop.stages[:, 0]])
    found: Array = waits_s / shop.seconds[F][shop.stages].sum(axis=1)
    return found


def waited_s(shop: Shop, first: int, last: int) -> float:
    """From the start of the forward pass of stage `first` to the start of the input-gradient pass of stage `last` of
    the same micro-batch (s), if nothing else runs."""
    forward, inputs = shop.seconds[F], shop.seconds[I]
    return float(
        forward[first:].sum() + shop.lag[0][first:].sum() + inputs[last + 1 :].sum() + shop.lag[1][last:].sum()
    )
