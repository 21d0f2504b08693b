"""Plays a table of actions event by event in the order of time: slow, and only there to be compared with."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from steptime.schedule.actions import ActionTable, Kind

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
DATA = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
COPIES = (Kind.OFFLOAD, Kind.RELOAD)
RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@dataclass(eq=False)
class Sent:
    """A message: what makes it, what takes it, when it is ready and when it ends."""

    producer: int
    consumer: int
    source: int
    target: int
    turn: int
    ready: float | None = None
    end: float | None = None
    before: int | None = None
    on: list[Sent] = field(default_factory=list, repr=False)


@dataclass
class Player:
    """Each stream of a rank takes its next actions once what they wait for has ended."""

    table: ActionTable
    seconds: list[float]
    joined: Callable[[float, float, float], float]
    shares: list[float]
    message_s: Callable[[int, int], float]
    overlap: bool = True
    buffers: int | None = None
    link: Callable[[int, int], int] | None = None
    ahead: int = 1
    ends: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)

    def row(self, kind: int, row: int, stages: int = 0) -> int | None:
        t = self.table
        return self.places.get((kind, t.stage[row] + stages, t.micro_batch[row], t.slice[row]))

    def prepare(self) -> None:
        t = self.table
        rows = range(len(t.rank))
        self.places = {(t.kind[i], t.stage[i], t.micro_batch[i], t.slice[i]): i for i in rows}
        explicit = any(kind in SENDS for kind in t.kind)
        self.messages: list[Sent] = []
        for i in rows:
            forward = t.kind[i] == Kind.FORWARD
            if t.kind[i] not in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT):
                continue
            step = -1 if forward else 1
            kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            made = [one for kind in kinds if (one := self.row(kind, i, step)) is not None]
            if made and t.rank[made[0]] != t.rank[i]:
                turn = made[0]
                if explicit:
                    turn = self.row(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, i, step)  # type: ignore[assignment]
                self.messages.append(Sent(made[0], i, int(t.rank[made[0]]), int(t.rank[i]), turn))
        self.into = {m.consumer: m for m in self.messages}
        self.out = {m.turn: m for m in self.messages}
        self.explicit = explicit
        self.needs = {i: self.data_needs(i) for i in rows}
        self.received = {self.receive_of(m): m for m in self.messages}
        for message in self.messages:
            self.relate(message)
        self.queue()

    def relate(self, message: Sent) -> None:
        """Who has its buffer before it, and what else is on its link."""
        pair = [m for m in self.messages if (m.source, m.target) == (message.source, message.target)]
        pair.sort(key=lambda m: m.turn)
        at = pair.index(message) - (self.buffers or 0)
        message.before = pair[at].consumer if self.buffers and at >= 0 else None
        message.on = [m for m in self.messages if self.link_of(m) == self.link_of(message)]

    def queue(self) -> None:
        t, rows = self.table, range(len(self.table.rank))
        self.queues: list[list[list[int]]] = []
        for rank in range(t.ranks):
            compute: list[list[int]] = []
            for i in rows:
                if t.rank[i] != rank or t.kind[i] in DATA + COPIES or (self.overlap and t.kind[i] in SENDS + RECEIVES):
                    continue
                last = compute[-1][-1] if compute else None
                if last is not None and t.together[i] >= 0 and t.together[last] == t.together[i]:
                    compute[-1].append(i)
                else:
                    compute.append([i])
            self.queues.append(self.with_sends(compute))
            for kinds in (DATA, COPIES[:1], COPIES[1:]):
                self.queues.append([[i] for i in rows if t.rank[i] == rank and t.kind[i] in kinds])

    def with_sends(self, compute: list[list[int]]) -> list[list[int]]:
        """Where no message overlaps and the table has none: each is sent after what makes it, as row -1 - turn."""
        if self.overlap or self.explicit:
            return compute
        out = []
        for group in compute:
            out.append(group)
            out += [[-1 - i] for i in group if i in self.out]
        return out

    def data_needs(self, i: int) -> list[int]:
        t = self.table
        same = [j for j in range(len(t.rank)) if t.rank[j] == t.rank[i] and t.stage[j] == t.stage[i]]
        before = [j for j in same if j < i]
        kind = t.kind[i]
        earlier = [j for j in range(i) if t.rank[j] == t.rank[i]]
        if kind in COPIES:
            told = [] if kind == Kind.OFFLOAD else [self.row(Kind.OFFLOAD, i)]
            if told and not self.ahead:
                told += [j for j in earlier if t.kind[j] == Kind.OFFLOAD][-1:]
            return [j for j in earlier if t.kind[j] in PASSES][-1:] + told  # type: ignore[operator]
        if kind in PASSES:
            gathers = [j for j in before if t.kind[j] == Kind.UNSHARD][-1:]
            if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and (back := self.row(Kind.RELOAD, i)) is not None:
                gathers.append(back)
            for j in earlier:
                if t.kind[j] == Kind.OFFLOAD and self.groups_between(j, i) >= self.ahead:
                    gathers.append(j)
            return gathers
        if kind in (Kind.RESHARD, Kind.REDUCE):
            needs = [j for j in before if t.kind[j] in PASSES][-1:]
            if kind == Kind.REDUCE:
                for other in range(len(t.rank)):
                    if t.kind[other] == Kind.REDUCE and t.stage[other] == t.stage[i] and t.rank[other] != t.rank[i]:
                        passes = [
                            j for j in range(other)
                            if t.rank[j] == t.rank[other] and t.stage[j] == t.stage[i] and t.kind[j] in PASSES
                        ]  # fmt: skip
                        needs += passes[-1:]
            return needs
        return [j for j in before if t.kind[j] == Kind.REDUCE][-1:] if kind == Kind.UPDATE else []

    def groups_between(self, one: int, other: int) -> int:
        """Passes, or groups of them, behind a row and before that of another."""

        def name(j: int) -> tuple[int, int]:
            return (int(self.table.together[j]), -1) if self.table.together[j] >= 0 else (-1, j)

        return len({name(j) for j in range(one, other) if self.table.kind[j] in PASSES} - {name(other)})

    def sent_by(self, i: int) -> Sent | None:
        if i < 0:
            return self.out[-1 - i]
        return self.out[i] if self.table.kind[i] in SENDS else None

    def may_start(self, i: int, now: float) -> bool:
        sent = self.sent_by(i)
        if sent is not None:
            return sent.ready is not None and self.is_next(sent, now)
        if self.table.kind[i] in RECEIVES:
            message = self.received[i]
            return message.end is not None and message.end <= now
        if i in self.into and (self.overlap or not self.explicit):
            message = self.into[i]
            if message.end is None or message.end > now:
                return False
        return all(self.ends.get(j, float("inf")) <= now for j in self.needs[i])

    def receive_of(self, message: Sent) -> int | None:
        forward = self.table.kind[message.consumer] == Kind.FORWARD
        return self.row(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, message.consumer)

    def link_of(self, message: Sent) -> object:
        return (message.source, message.target) if self.link is None else self.link(message.source, message.target)

    def has_room(self, message: Sent, now: float) -> bool:
        return message.before is None or self.ends.get(message.before, float("inf")) <= now

    def is_next(self, message: Sent, now: float) -> bool:
        """Whether all that the link takes before it are through: those ready before, or sent before by the table."""
        if self.link is None:
            first = [m for m in message.on if m.turn < message.turn]
        else:
            first = [m for m in message.on if m.ready is not None and (m.ready, m.turn) < (message.ready, message.turn)]
        return all(m.end is not None and m.end <= now for m in first)

    def ready_now(self, at: list[int], free: list[float], now: float) -> None:
        """Note which messages could go, but for their links."""
        heads = [queue[n][0] for queue, n, f in zip(self.queues, at, free, strict=True) if n < len(queue) and f <= now]
        for m in self.messages:
            made = self.ends.get(m.producer, float("inf")) <= now
            if not self.overlap:
                made = any(self.sent_by(i) is m for i in heads)
            if m.ready is None and made and self.has_room(m, now):
                m.ready = now

    def play(self) -> dict[int, float]:
        self.prepare()
        times, at, free, now = [0.0], [0] * len(self.queues), [0.0] * len(self.queues), 0.0
        while times:
            now = heapq.heappop(times)
            moved = True
            while moved:
                moved = False
                self.ready_now(at, free, now)
                for n, queue in enumerate(self.queues):
                    while at[n] < len(queue) and free[n] <= now and all(self.may_start(i, now) for i in queue[at[n]]):
                        free[n] = now + self.taken(queue[at[n]])
                        for i in queue[at[n]]:
                            self.starts[i], self.ends[i] = now, free[n]
                            if (sent := self.sent_by(i)) is not None:
                                sent.end = free[n]
                        heapq.heappush(times, free[n])
                        at[n], moved = at[n] + 1, True
                for message in self.messages if self.overlap else []:
                    if message.end is None and message.ready is not None and self.is_next(message, now):
                        message.end = now + self.message_s(message.source, message.target)
                        heapq.heappush(times, message.end)
                        moved = True
        assert all(at[n] == len(queue) for n, queue in enumerate(self.queues)), "deadlock"
        return self.ends

    def taken(self, group: list[int]) -> float:
        sent = self.sent_by(group[0])
        if sent is not None:
            return self.message_s(sent.source, sent.target)
        each = [self.seconds[i] for i in group]
        collectives = sum(self.seconds[i] * self.shares[self.table.stage[i]] for i in group)
        return each[0] if len(each) == 1 else self.joined(max(each), sum(each), collectives)

    @property
    def step_s(self) -> float:
        return max([*self.ends.values(), *(m.end for m in self.messages if m.end is not None)])
