r"""Lower bounds on the time from one step to the next, for all schedules of one kind.

The kind: each stage is on one rank, given by a placement; each micro-batch has on each stage a forward pass (F), an
input-gradient pass (I) and a weight-gradient pass (W); a rank does one pass at a time; a stage holds the activations of
a micro-batch from the start of F to the end of W (a share of them from the end of I on), and no rank ever holds more
than its limit. The bounded time is the longest span of a rank: from the start of its first pass to the end of its last.
Micro-batches are alike, so that each stage may number them in order of arrival: exchanging two changes no time. A
whole backward pass counts as I followed by W, and a pair that takes as long as both of its passes as one after the
other, so that schedules with either belong to the kind.

The result is the largest of several bounds. Each follows from what one rank cannot do while it waits; passes of
other ranks are assumed to run as soon as their inputs arrive, so that no schedule waits less.
"""

from __future__ import annotations

import numpy as np

from steptime.simulation.shop import LEAST, F, I, Shop, W, waited_s


def least_span_s(shop: Shop) -> float:
    r"""Lower bound on the span of any schedule of a placement under its memory limits (s).

    For rank $r$ with work $w$ (all its passes), with room for $n$ activations of a stage:

    1. *First wait.* The first input-gradient pass of the rank starts no sooner than $A$ after its first forward pass:
       the first micro-batch has to reach the last stage and come back. Before it the rank can only run forward passes,
       at most $n$, because nothing is freed before a weight-gradient pass. It idles at least $A$ minus the $n$ longest.
    2. *Last wait.* The last forward pass of the rank is of its last stage. From its start to the end of the last
       weight-gradient pass of its micro-batch at least $B$ pass. In this time the rank can only do this forward pass
       and backward passes of what it holds, at most $n$ activations. It idles at least $B$ minus their time. If the
       rank makes more forward passes than $n$, the last is behind the first backward pass, and both waits add up:
       span $\ge w$ + first wait + last wait; otherwise their larger one counts.
    3. *Memory.* An activation of stage $s$ is held for at least $h_s$: its way to the last stage and back, and W. The
       limit times the span is at least the sum of all $h_s$, plus what is free at both ends: the $j$-th activation
       comes after $j - 1$ forward passes, and the $j$-th to the last goes $j - 1$ weight-gradient passes before the
       end.
    4. *Rounds.* Forward pass $k + n$ of a stage starts after weight-gradient pass $k$: every $n$ micro-batches a round
       of $h_s$ passes; what is left of the micro-batches adds forward passes and a last $h_s$. (Where weight-gradient
       passes hold less than forward passes, memory frees sooner: at the end of I.)
    5. *Another rank.* Rank $b$ starts when the first micro-batch gets there; rank $a$ ends, after the last
       input-gradient pass of $b$, when the last gradient gets back and its weight-gradient pass is done. In between $b$
       has to do all its work but for the weight-gradient passes that it may still hold, with its own first and last
       waits.

    Source: our own; (1) and (2) give the bubble of ZB-H1 in Qi et al., arXiv 2401.10241, section 2.2, and its zero of
    ZB-H2.
    """
    ranks = [_Rank(shop, rank) for rank in range(shop.ranks)]
    alone = max(max(each.alone_s(), each.memory_s(), each.rounds_s()) for each in ranks)
    return max(alone, _of_others_s(shop, ranks))


class _Rank:
    """Quantities of one rank that the bounds use."""

    def __init__(self, shop: Shop, rank: int) -> None:
        self.shop, self.m = shop, shop.micro_batches
        self.stages, count = shop.stages[rank], shop.placement.chunks
        self.seconds = shop.seconds[:, self.stages]
        self.limit = min(shop.limit[rank] * count * (1 + LEAST) + LEAST, self.m * count)
        """Activations of a stage that fit; may be a fraction."""
        self.units = int(self.limit)
        self.crowded = self.m * count > self.units
        self.first, self.last = int(self.stages[0]), int(self.stages[-1])
        self.work_s = float(self.m * self.seconds.sum())
        self.first_wait_s = max(0.0, waited_s(shop, self.first, self.last) - self.longest(F, self.units))
        self.back_s = waited_s(shop, self.last, self.first) + float(self.seconds[I, 0])
        """From the start of the last forward pass to the end of the last input-gradient pass."""
        self.ends_s = self._ends_s()
        """Work of the rank from the start of its last forward pass on, at most."""

    def longest(self, kind: int, count: int) -> float:
        """Seconds of the `count` longest passes of a kind; each stage has one per micro-batch."""
        return float(np.sort(np.repeat(self.seconds[kind], self.m))[::-1][:count].sum())

    def _ends_s(self) -> float:
        deferred, every = self.shop.deferred, self.m * len(self.stages)
        backward = np.sort(np.repeat(self.seconds[I] + self.seconds[W], self.m))[::-1].cumsum()
        weights = np.concatenate(([0.0], np.sort(np.repeat(self.seconds[W], self.m))[::-1].cumsum()))
        whole = np.arange(1, self.units + 1)
        spare = every - whole
        if deferred:
            spare = np.minimum(spare, ((self.limit - whole) / deferred + LEAST).astype(np.int64))
        return float(self.seconds[F, -1] + (backward[whole - 1] + weights[spare]).max())

    def both_s(self, last_wait_s: float) -> float:
        """Work of the rank plus its first and last waits."""
        waits = (self.first_wait_s, max(0.0, last_wait_s))
        return self.work_s + (sum(waits) if self.crowded else max(waits))

    def alone_s(self) -> float:
        """Bounds 1 and 2."""
        return self.both_s(self.back_s + float(self.seconds[W, 0]) - self.ends_s)

    def memory_s(self) -> float:
        """Bound 3."""
        shop, n = self.shop, self.units
        held = [
            waited_s(shop, stage, stage) + shop.seconds[I, stage] + shop.deferred * shop.seconds[W, stage]
            for stage in self.stages.tolist()
        ]
        free = n * (n - 1) / 2 * (self.seconds[F].min() + self.seconds[W].min())
        return float((self.m * sum(held) + free) / (n if shop.deferred == 1 else self.limit))

    def rounds_s(self) -> float:
        """Bound 4."""
        shop, found = self.shop, 0.0
        rounds, rest = divmod(self.m - 1, self.units)
        for stage in self.stages.tolist():
            whole_s = waited_s(shop, stage, stage) + shop.seconds[I, stage]
            round_s = whole_s + (shop.seconds[W, stage] if shop.deferred == 1 else 0.0)
            ends_s = _forward_s(shop, self.first, stage) + _backward_s(shop, stage, self.first)
            last_s = whole_s + ends_s + shop.seconds[W, self.first]
            found = max(found, rounds * round_s + rest * shop.seconds[F, stage] + last_s)
        return float(found)

    def until_last_gradient_s(self) -> float:
        """Bound on the time from the start of the rank's first pass to the end of its last input-gradient pass."""
        deferred, every = self.shop.deferred, self.m * len(self.stages)
        count = min(every, 1 + int((self.limit - 1) / deferred + LEAST)) if deferred else every
        after_s = self.longest(W, count)
        return self.both_s(self.back_s - self.ends_s + count * float(self.seconds[W].min())) - after_s


def _of_others_s(shop: Shop, ranks: list[_Rank]) -> float:
    """Bound 5."""
    found = 0.0
    for b, other in enumerate(ranks):
        until_s = other.until_last_gradient_s()
        for each in ranks[: b + 1]:
            way_s = _forward_s(shop, each.first, other.first) + _backward_s(shop, other.first, each.first)
            found = max(found, until_s + way_s + float(each.seconds[W, 0]))
    return found


def _forward_s(shop: Shop, first: int, last: int) -> float:
    """From the start of a forward pass of stage `first` to the arrival at stage `last`, the same or a later one."""
    return float(shop.seconds[F, first:last].sum() + shop.lag[0][first:last].sum())


def _backward_s(shop: Shop, last: int, first: int) -> float:
    """From the end of an input-gradient pass of stage `last` to that of stage `first`, the same or an earlier one."""
    return float(shop.seconds[I, first:last].sum() + shop.lag[1][first:last].sum())
