"""Zero-bubble orders made for given times and memory, by the heuristic of the zero-bubble paper."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import numpy as np

from steptime.schedule.actions import ActionTable
from steptime.schedule.schedules import Pipeline
from steptime.schedule.words import F, I, W, spelled

TRIED = 2
"""Micro-batches per rank on which habits are chosen, 8 in all at least; later micro-batches repeat the pattern."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Choices that the heuristic leaves open; all combinations are tried."""

    late_first: bool
    """A rank makes one more forward pass before its first backward pass even if that delays it."""
    skips: bool
    """A rank that is two forward passes ahead of the next one leaves one out if no rank waits longer for it."""
    fills: bool
    """A wait that is too short for a weight-gradient pass is filled with one even on a rank that waited less than
    others."""


@dataclass(slots=True)
class _Rank:
    """One rank while its order is made."""

    now: float = 0.0
    """Seconds at which its last pass ends."""
    waited: float = 0.0
    """Seconds waited since its first pass."""
    forward: int = 0
    backward: int = 0
    weights: int = 0
    word: list[int] = field(default_factory=list)
    forward_ends: list[float] = field(default_factory=list)
    begins: float = 0.0


class _Player:
    """All ranks while their orders are made, with the times of their passes."""

    def __init__(self, pipeline: Pipeline, habits: Habits, limit: int) -> None:
        times = pipeline.times
        self.m, self.habits, self.limit = pipeline.micro_batches, habits, limit
        self.forward_s, self.input_s, self.weights_s = (
            times.forward_s,
            times.input_gradient_s,
            times.weight_gradient_s,
        )
        self.message_s = times.message_s
        self.ranks = [_Rank() for _ in range(pipeline.ranks)]
        self.most_waited = 0.0

    def waits_until(self, rank: _Rank, ready: float) -> float:
        """Seconds at which the next pass starts, once waiting is counted."""
        if ready <= rank.now:
            return rank.now
        if rank.word:
            rank.waited += ready - rank.now
            self.most_waited = max(self.most_waited, rank.waited)
        else:
            rank.begins = ready
        return ready

    def do_forward(self, place: int) -> None:
        """The next forward pass of a rank."""
        rank = self.ranks[place]
        ready = self.ranks[place - 1].forward_ends[rank.forward] + self.message_s if place else 0.0
        self.make_room(rank)
        self.fill(rank, ready)
        rank.now = self.waits_until(rank, ready) + self.forward_s
        rank.forward_ends.append(rank.now)
        rank.forward += 1
        rank.word.append(F)

    def do_backward(self, place: int, ready: float) -> float:
        """The next input-gradient pass of a rank, whose gradient arrives then; when its own arrives."""
        rank = self.ranks[place]
        self.fill(rank, ready)
        if not place and rank.forward == self.m:
            while rank.weights < rank.backward:
                self.do_weights(rank)
        rank.now = self.waits_until(rank, ready) + self.input_s
        rank.backward += 1
        rank.word.append(I)
        return rank.now + self.message_s

    def do_weights(self, rank: _Rank) -> None:
        """The next weight-gradient pass of a rank."""
        rank.now += self.weights_s
        rank.weights += 1
        rank.word.append(W)

    def make_room(self, rank: _Rank) -> None:
        """Weight-gradient passes until one more micro-batch fits into the memory."""
        while rank.forward - rank.weights >= self.limit and rank.weights < rank.backward:
            self.do_weights(rank)

    def fill(self, rank: _Rank, ready: float) -> None:
        """Weight-gradient passes in the wait for something that arrives then."""
        while rank.weights < rank.backward and rank.now < ready:
            short = ready - rank.now < self.weights_s * (1 - 1e-9)
            if short and not self.habits.fills and ready - rank.now <= self.most_waited - rank.waited:
                return
            self.do_weights(rank)

    def warm_up(self) -> None:
        """Forward passes before the first backward pass of each rank."""
        p = len(self.ranks)
        hop_s = self.forward_s + self.message_s
        counts, arrives = [1] * p, p * hop_s - self.message_s + self.input_s + self.message_s
        for place in range(p - 2, -1, -1):
            fitting = (arrives - place * hop_s) / self.forward_s
            most = int(fitting + 1e-9) + (self.habits.late_first and fitting % 1 > 1e-9)
            counts[place] = max(counts[place + 1] + 1, most)
            arrives = max(arrives, place * hop_s + counts[place] * self.forward_s) + self.input_s + self.message_s
        room = inf
        for place in range(p):
            counts[place] = int(max(1, min(counts[place], self.limit, self.m, room)))
            room = counts[place] - 1 if counts[place] < self.m else self.m
        for place, count in enumerate(counts):
            for _ in range(count):
                self.do_forward(place)

    def skipped(self, place: int) -> bool:
        """True if a rank leaves a forward pass out in this round."""
        rank, behind = self.ranks[place], self.ranks[place + 1] if place + 1 < len(self.ranks) else None
        if behind is None or not self.habits.skips or rank.forward < behind.forward + 2:
            return False
        wanted = behind.now + self.forward_s + self.input_s + self.message_s
        if rank.now >= wanted:
            return True
        full = rank.forward - rank.weights >= self.limit
        ends = rank.now + self.forward_s + self.weights_s * full
        return ends > wanted and wanted - rank.now <= self.most_waited - rank.waited

    def play(self) -> float:
        """Make all orders; seconds from the first to the last pass of the rank that takes longest."""
        self.warm_up()
        places = range(len(self.ranks))
        for turn in range(self.m):
            if turn:
                skips = [rank.forward == self.m or self.skipped(place) for place, rank in enumerate(self.ranks)]
                for place in places:
                    rank, before = self.ranks[place], self.ranks[place - 1] if place else None
                    fed = before is None or before.forward > rank.forward
                    needed = rank.forward == turn
                    if rank.forward < self.m and fed and (needed or not any(skips[place:])):
                        self.do_forward(place)
            arrives = 0.0
            for place in reversed(places):
                arrives = self.do_backward(place, arrives)
        for rank in self.ranks:
            while rank.weights < self.m:
                self.do_weights(rank)
        return max(rank.now - rank.begins for rank in self.ranks)


def by_search(pipeline: Pipeline, limit_per_rank: int) -> ActionTable:
    """Zero-bubble order for the times of a pipeline and a memory, in micro-batches per rank, unless it is given.

    Forward passes fill the time before the first backward pass as far as memory goes; then ranks make one forward and
    one backward pass in turn, and weight-gradient passes where they would wait or memory is full; the rest ends the
    step. What is left open (:class:`Habits`) is tried on a step of few micro-batches.

    Source: Qi et al., arXiv 2401.10241, section 3.1.
    """
    p = pipeline.ranks
    limit = limit_per_rank * p if pipeline.memory_limit == inf else int(pipeline.memory_limit)
    tried = replace(pipeline, micro_batches=min(pipeline.micro_batches, max(TRIED * p, 8)))
    every = [Habits(*values) for values in product((False, True), repeat=3)]
    spans = {habits: _Player(tried, habits, limit).play() for habits in every}
    player = _Player(pipeline, min(spans, key=spans.__getitem__), limit)
    player.play()
    return spelled([rank.word for rank in player.ranks], np.arange(p)[:, None], np.zeros(2, int), pipeline)
