r"""Splits of unequal layers, in order, over the ranks of a pipeline; the best split has the fastest slowest rank.

$$\max_r \sum_{s \in S_r} \sum_{i \in s} t_{r,i} \quad\text{with}\quad
  \sum_{s \in S_r} \sum_{i \in s} (b_i + f_r a_i) \le m_r$$

where $S_r$ are the stages of rank $r$, $t_{r,i}$ the seconds of item $i$ there for one micro-batch, $b_i$ the bytes of
its weights and states, $a_i$ those of its activations, $f_r$ the micro-batches that the schedule has in flight, $m_r$
the memory.

With one stage per rank dynamic programming finds it. With several stages per rank the result is exact if few items
(:data:`MOST_APART`) lie outside the longest run of equal items: each placement of these few is tried, and equal items
go one by one to the least busy rank, which is optimal for one placement. It is exact too if there are at most
:data:`MOST_SPLITS` splits. Otherwise a descent finds a good split, and the solution says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import combinations, islice, product
from math import comb, inf
from typing import Final, NamedTuple

import numpy as np

from steptime.errors import UserError, counted
from steptime.num import Array
from steptime.units import format_bytes

MOST_APART: Final = 12
"""Largest number of items outside the longest run of equal items for which all placements are tried."""
MOST_SPLITS: Final = 4096
"""Largest number of splits for which all are tried."""
SLACKS: Final = (0.0, 0.005, 0.02, 0.06)
"""Slack by which the slowest rank of a candidate may exceed the fastest possible one, as a share."""
CANDIDATES: Final = 24
"""Largest number of candidates with several stages per rank."""
ORIGINS: Final = 4
"""Splits from which simulated neighbours are tried."""
ROUNDS: Final = 200
"""Largest number of moves of a descent."""
REACH: Final = 3
"""Largest number of boundaries that one move of a descent shifts."""
SAME: Final = 1e-12
"""Relative difference below which two times count as equal."""

Counts = tuple[int, ...]
"""Items of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Items of a model, first to last: numbers by item, or by rank and item where devices differ."""

    letters: tuple[str, ...]
    """Letters of each item in a layout (:mod:`steptime.simulation.layout`)."""
    forward_s: Array
    """Seconds of one micro-batch."""
    input_gradient_s: Array
    weight_gradient_s: Array
    state_bytes: Array
    """Weights, gradients, optimiser states."""
    activation_bytes: Array
    """Activations of one micro-batch."""

    @property
    def seconds(self) -> Array:
        """All passes of one micro-batch."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Devices of a pipeline, by rank."""

    speed: Array
    """Relative speed: 0.5 takes twice as long."""
    memory_bytes: Array
    fixed_bytes: Array
    """Memory needed independent of the layers: temporaries, buffers."""
    in_flight: Array
    """Micro-batches whose activations a rank holds (:attr:`steptime.schedule.Schedule.in_flight`), by rank, or by rank
    and item where the number differs between items."""


@dataclass(frozen=True, kw_only=True)
class SplitTask:
    """Items to be split, and the ranks of the stages."""

    seconds: Array
    """By rank and item."""
    held_bytes: Array
    """By rank and item."""
    room_bytes: Array
    """By rank."""
    rank: Array
    """Rank of each stage."""
    other_s: float | Array = 0.0
    """Seconds of each rank independent of its items."""

    @property
    def items(self) -> int:
        """Number of items."""
        return int(self.seconds.shape[1])

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank)

    @cached_property
    def single(self) -> bool:
        """True if each rank has one stage."""
        return len(np.unique(self.rank)) == self.stages

    @cached_property
    def run(self) -> tuple[int, int]:
        """First item of the longest run of equal items, and the item after its last."""
        columns = np.concatenate([self.seconds, self.held_bytes])
        cuts = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        edges = np.concatenate([[0], cuts, [self.items]])
        longest = int(np.argmax(np.diff(edges)))
        return int(edges[longest]), int(edges[longest + 1])

    @property
    def apart(self) -> int:
        """Number of items outside the longest run of equal items."""
        first, end = self.run
        return self.items - (end - first)

    @cached_property
    def sums(self) -> tuple[Array, Array]:
        """Cumulative seconds and bytes of the items before each item, by rank."""
        seconds, held = (
            np.concatenate([np.zeros((len(each), 1)), each.cumsum(axis=1)], axis=1)
            for each in (self.seconds, self.held_bytes)
        )
        return seconds, held

    def by_rank(self, counts: Sequence[int]) -> tuple[Array, Array]:
        """Seconds of one micro-batch, and bytes, of each rank under a split."""
        ends = np.cumsum(counts)
        both = []
        for sums in self.sums:
            of_stages = sums[self.rank, ends] - sums[self.rank, ends - np.asarray(counts)]
            both.append(np.bincount(self.rank, of_stages, len(self.room_bytes)))
        return both[0] + self.other_s, both[1]

    def slowest_s(self, counts: Sequence[int]) -> float:
        """Seconds of the slowest rank."""
        return float(self.by_rank(counts)[0].max())

    def fits(self, counts: Sequence[int]) -> bool:
        """True if the split fits into the memory of all ranks."""
        return bool((self.by_rank(counts)[1] <= self.room_bytes * (1 + SAME)).all())


class Solution(NamedTuple):
    """A split; `exact`: no split has a faster slowest rank."""

    counts: Counts
    exact: bool


def task_of(items: Items, ranks: Ranks, rank: Array) -> SplitTask:
    """The task of splitting items over ranks.

    Args:
        items: parts of the model.
        ranks: devices.
        rank: rank of each stage.

    Raises:
        UserError: there are more stages than items, or a rank has no stage.
    """
    count, stages, shape = len(items.letters), len(rank), (len(ranks.speed), len(items.letters))
    if stages > count:
        parts = f"{count - 2} layers, embedding and head"
        raise UserError(f"{stages} stages of {parts}: a stage would be empty", hint="give a smaller --pp or --vpp")
    held = items.state_bytes + ranks.in_flight.reshape(shape[0], -1) * items.activation_bytes
    return SplitTask(
        seconds=np.broadcast_to(items.seconds, shape) / ranks.speed[:, None],
        held_bytes=np.broadcast_to(held, shape),
        room_bytes=ranks.memory_bytes - ranks.fixed_bytes,
        rank=np.asarray(rank),
    )


def best_split(task: SplitTask) -> Solution:
    """The split with the fastest slowest rank; among equals, the one with the fewest seconds summed over ranks.

    >>> one = np.ones((2, 5))
    >>> best_split(SplitTask(seconds=one, held_bytes=one, room_bytes=np.full(2, 9.0), rank=np.arange(2))).counts
    (2, 3)

    Raises:
        UserError: no split fits into the memory; the message says which rank lacks least, and how much.
    """
    found = candidates(task, (0.0,))
    if not found:
        raise _too_large(task)
    exact = task.single or task.apart <= MOST_APART or _few(task)
    return Solution(min(found, key=lambda each: _rated(task, each)), exact)


def candidates(
    task: SplitTask, slacks: Sequence[float] = SLACKS, fits: Callable[[Counts], bool] | None = None
) -> list[Counts]:
    """Splits whose slowest rank is within a slack of the fastest; empty if no split fits into the memory.

    They differ in which ranks are less busy, which matters little for the pace and more for the bubble. With several
    stages per rank they include the splits with the fastest slowest stage: ranks wait for each other stage by stage.

    Args:
        task: what to split.
        slacks: share by which the slowest rank may be slower than the fastest possible.
        fits: a further memory check, for splits that pass the task's own.
    """
    fits = task.fits if fits is None else fits
    if task.single:
        found = _chains(task, slacks)
    elif task.apart <= MOST_APART:
        found = _levelled(task, slacks, fits)
    elif _few(task):
        found = _near_the_best(task, slacks)
    else:
        found = _descents(task)
    if not task.single and len(slacks) > 1:
        found = [*found, *(each for each in _chains(_alone(task), slacks) if task.fits(each))]
    return list(dict.fromkeys(found))


def _few(task: SplitTask) -> bool:
    return comb(task.items - 1, task.stages - 1) <= MOST_SPLITS


def _near_the_best(task: SplitTask, slacks: Sequence[float]) -> list[Counts]:
    """All splits within the slack, by enumeration."""
    cuts = combinations(range(1, task.items), task.stages - 1)
    every = (tuple(np.diff([0, *each, task.items]).tolist()) for each in cuts)
    fitting = sorted((each for each in every if task.fits(each)), key=lambda each: _rated(task, each))[:CANDIDATES]
    return [each for each in fitting if task.slowest_s(each) <= _within(task.slowest_s(fitting[0]), max(slacks))]


def _rated(task: SplitTask, counts: Counts) -> tuple[float, float]:
    """Sort key of a split: seconds of the slowest rank, to 12 digits, and of all ranks together."""
    seconds = task.by_rank(counts)[0]
    return float(f"{seconds.max():.12g}"), float(seconds.sum())


def _too_large(task: SplitTask) -> UserError:
    """Error for a task that no split fits; it names the split that lacks the least memory."""
    counts = _least_excess(task)
    held = task.by_rank(counts)[1]
    shortage = held - task.room_bytes
    rank = int(np.argmax(shortage))
    stages = np.flatnonzero(task.rank == rank)
    where = f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
    return UserError(
        f"no split fits into the memory: the one that lacks least needs {format_bytes(held[rank])} on rank {rank} "
        f"({where}), {format_bytes(shortage[rank])} more than the {format_bytes(task.room_bytes[rank])} there for "
        f"layers; {counted(int((shortage > 0).sum()), 'rank')} of {len(shortage)} "
        f"{'lacks' if (shortage > 0).sum() == 1 else 'lack'} memory; items by stage: {_shown(counts)}",
        hint="give more stages or ranks, a larger --tp, --recompute, or a smaller micro-batch",
    )


def _shown(counts: Counts) -> str:
    return " ".join(map(str, counts[:64])) + (" ..." if len(counts) > 64 else "")


def _least_excess(task: SplitTask) -> Counts:
    """The split with the smallest memory excess on its worst rank."""
    free = np.zeros_like(task.held_bytes)
    weighed = SplitTask(
        seconds=task.held_bytes, held_bytes=free, room_bytes=free[:, 0], rank=task.rank, other_s=-task.room_bytes
    )
    return best_split(weighed).counts


def _within(time_s: float, slack: float) -> float:
    """A time lengthened by a slack and a tolerance for rounding."""
    return time_s + abs(time_s) * (slack + SAME)


# -- one stage a rank: dynamic programming ----------------------------------------------------------------------------


def _spans(task: SplitTask, stage: int) -> tuple[Array, Array]:
    """Seconds and bytes of a stage by its first item and the item after its last; infinite where it would be empty."""
    rank = task.rank[stage]
    seconds, held = (each[rank][None, :] - each[rank][:, None] for each in task.sums)
    empty = np.tri(task.items + 1, dtype=bool)
    other_s = np.broadcast_to(task.other_s, task.room_bytes.shape)[rank]
    return np.where(empty, inf, seconds + other_s), np.where(empty, inf, held)


def _fitting(task: SplitTask, stage: int) -> Array:
    """Seconds of a stage, infinite where it does not fit into the memory."""
    seconds, held = _spans(task, stage)
    return np.where(held <= task.room_bytes[task.rank[stage]] * (1 + SAME), seconds, inf)


def _chained(
    spans: Iterable[Array], items: int, combine: Callable[[Array, Array], Array], start: float
) -> Counts | None:
    """Items of each stage of the split with the least combined cost of stages; None if all costs are infinite."""
    best, choices = np.full(items + 1, inf), []
    best[0] = start
    for span in spans:
        both = combine(best[:, None], span)
        choices.append(np.argmin(both, axis=0))
        best = both[choices[-1], np.arange(items + 1)]
    if best[items] == inf:
        return None
    counts, end = [], items
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end -= counts[-1]
    return tuple(counts[::-1])


def _chains(task: SplitTask, slacks: Sequence[float]) -> list[Counts]:
    """For each slack, the splits with the fewest seconds over all ranks, under several weights of the ranks."""
    spans = [_fitting(task, stage) for stage in range(task.stages)]
    fastest = _chained(spans, task.items, np.maximum, -inf)
    if fastest is None:
        return []
    ramp = np.linspace(-1.0, 1.0, task.stages)
    prices = np.ones((1, task.stages)) if len(slacks) == 1 else 1 + 0.1 * np.array([0 * ramp, ramp, -ramp, ramp**2])
    limits_s = [_within(task.slowest_s(fastest), slack) for slack in slacks]
    found = [fastest]
    for limit_s, price in product(limits_s, prices):
        weighed = (np.where(span <= limit_s, span * each, inf) for span, each in zip(spans, price, strict=True))
        counts = _chained(weighed, task.items, np.add, 0.0)
        found += [] if counts is None else [counts]
    return found


# -- several stages a rank: equal items one by one to the rank that is least busy -------------------------------------


def _compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Ways to put items on stages of their own and, last, on the stage that has equal items too (0 or more there)."""
    if not count:
        yield (0,)
        return
    for cuts in product((False, True), repeat=count):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        yield (*np.diff(edges).tolist(), count - edges[-1])


@dataclass(slots=True)
class _Way:
    """One placement of the items outside the longest run, with the equal items levelled over the ranks."""

    fixed: list[int]
    """Items of each stage outside the run."""
    open: range
    """Stages that have equal items."""
    by_rank: Array
    """Equal items of each rank."""
    slowest_s: float


def _ways(task: SplitTask) -> Iterator[_Way]:
    """All placements that fit into the memory."""
    first, end = task.run
    suffixes = [each[::-1] for each in _compositions(task.items - end)]
    each_s, each_bytes = task.seconds[:, first], task.held_bytes[:, first]
    for prefix, suffix in product(_compositions(first), suffixes):
        low, high = len(prefix) - 1, task.stages - len(suffix) + 1
        if not 0 < high - low <= end - first:
            continue
        fixed = [0] * task.stages
        fixed[: low + 1] = prefix
        for stage, count in zip(range(high - 1, task.stages), suffix, strict=True):
            fixed[stage] += count
        least = np.bincount(task.rank[low:high], minlength=len(each_s))
        base_s, base_bytes = _placed(task, fixed, low, end - first)
        room = (task.room_bytes * (1 + SAME) - base_bytes) / np.where(each_bytes > 0, each_bytes, 1)
        most = np.where(least > 0, np.where(each_bytes > 0, room, np.where(base_bytes <= task.room_bytes, inf, -1)), 0)
        alone = (least == 0) & (base_bytes > task.room_bytes * (1 + SAME))
        if alone.any() or (least > most).any():
            continue
        for order in (1, -1):
            counts = _filled(base_s, each_s, least, most, end - first, order)
            if counts is not None:
                slowest_s = float((base_s + counts * each_s).max())
                yield _Way(fixed=fixed, open=range(low, high), by_rank=counts, slowest_s=slowest_s)


def _placed(task: SplitTask, fixed: list[int], low: int, equal: int) -> tuple[Array, Array]:
    """Seconds and bytes by rank of the items outside the run; `low`: the stage of the run's first item."""
    held = np.zeros(len(task.room_bytes))
    seconds = held + task.other_s
    at, first, _ = 0, *task.run
    for stage, count in enumerate(fixed):
        rank = task.rank[stage]
        before = first - at if stage == low else count
        for low_item, number in ((at, before), (at + before + equal, count - before)):
            if number > 0:
                seconds[rank] += task.seconds[rank, low_item : low_item + number].sum()
                held[rank] += task.held_bytes[rank, low_item : low_item + number].sum()
        at += count + (equal if stage == low else 0)
    return seconds, held


def _filled(base_s: Array, each_s: Array, least: Array, most: Array, count: int, order: int) -> Array | None:
    """Number of equal items by rank: each goes to the rank that is least busy with it; None if they do not fit.

    Among equally busy ranks the first (`order` 1) or the last (-1) gets the item.
    """
    counts = least.astype(int)
    open_ = np.flatnonzero(counts + 1 <= most).tolist()
    heap = [(base_s[rank] + (counts[rank] + 1) * each_s[rank], order * rank) for rank in open_]
    heapify(heap)
    for _ in range(count - int(counts.sum())):
        if not heap or heap[0][0] == inf:
            return None
        rank = order * heap[0][1]
        counts[rank] += 1
        full = counts[rank] + 1 > most[rank]
        heapreplace(heap, (inf if full else base_s[rank] + (counts[rank] + 1) * each_s[rank], order * rank))
    return counts


def _levelled(task: SplitTask, slacks: Sequence[float], fits: Callable[[Counts], bool]) -> list[Counts]:
    """The best placements within the slack, with the equal items divided over the stages of each rank."""
    ways = sorted(_ways(task), key=lambda way: way.slowest_s)
    if not ways:
        return []
    limit_s = _within(ways[0].slowest_s, max(slacks))
    near = [way for way in ways if way.slowest_s <= limit_s]
    found = {_divided(task, way, late) for way in near for late in (True, False)}

    def rated(counts: Counts) -> tuple[tuple[float, float], float, Counts]:
        ends = np.cumsum(counts)
        of_stages = task.sums[0][task.rank, ends] - task.sums[0][task.rank, ends - np.asarray(counts)]
        return _rated(task, counts), float(of_stages.max()), counts

    return list(islice(filter(fits, sorted(found, key=rated)), CANDIDATES))


def _divided(task: SplitTask, way: _Way, late: bool) -> Counts:
    """Items by stage: equal items of a rank go to its stage with the fewest; `late` prefers the last among equals."""
    counts = list(way.fixed)
    for stage in way.open:
        counts[stage] += 1
    for rank, number in enumerate(way.by_rank.tolist()):
        own = [stage for stage in way.open if task.rank[stage] == rank]
        for _ in range(number - len(own)):
            least = min(counts[stage] for stage in own)
            counts[[stage for stage in own if counts[stage] == least][-1 if late else 0]] += 1
    return tuple(counts)


# -- several stages a rank, and items that differ: descent -----------------------------------------------------------


def _alone(task: SplitTask) -> SplitTask:
    """The task as if each stage were on a rank of its own, with all the memory of its rank."""
    return SplitTask(
        seconds=task.seconds[task.rank],
        held_bytes=task.held_bytes[task.rank],
        room_bytes=task.room_bytes[task.rank],
        rank=np.arange(task.stages),
    )


def _descents(task: SplitTask) -> list[Counts]:
    """Splits that fit and that no move of boundaries improves, from several starts."""
    starts = [*_chains(_alone(task), SLACKS), even_counts(task.items, task.stages)]
    found = [_descended(task, counts) for counts in dict.fromkeys(starts)]
    fitting = [each for each in found if task.fits(each)]
    if not fitting and np.isfinite(task.room_bytes).all() and task.room_bytes.any():
        fitting = [each for each in (_least_excess(task),) if task.fits(each)]
    return sorted(fitting, key=lambda each: _rated(task, each))


def _descended(task: SplitTask, counts: Counts) -> Counts:
    """Move boundaries by one item while that lowers the memory excess, or else the times of the busiest ranks."""

    def rated(each: Counts) -> tuple[float, tuple[float, ...]]:
        seconds, held = task.by_rank(each)
        return float(np.clip(held - task.room_bytes, 0, None).sum()), tuple(np.sort(seconds)[::-1].tolist())

    best = rated(counts)
    for _ in range(ROUNDS):
        moved = [(rated(each), each) for each in neighbours(counts)]
        if not moved or min(moved)[0] >= best:
            return counts
        best, counts = min(moved)
    return counts


def neighbours(counts: Counts) -> Iterator[Counts]:
    """Splits with one item moved from a stage to another near it: the boundaries between them shift by one item."""
    for reach in range(1, min(len(counts), REACH + 1)):
        for stage in range(len(counts) - reach):
            for giver, taker in ((stage, stage + reach), (stage + reach, stage)):
                if counts[giver] > 1:
                    moved = list(counts)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield tuple(moved)


def fastest(
    task: SplitTask,
    starts: Sequence[Counts],
    seconds_of: Callable[[Counts], float],
    shortage_of: Callable[[Counts], float],
    tries: int,
) -> Counts:
    """The fastest simulated split among the starts, their neighbours, the neighbours of improved splits, and so on.

    Args:
        task: what to split.
        starts: one split or more.
        seconds_of: simulated step time of a split.
        shortage_of: memory that a split lacks when simulated; 0: it fits.
        tries: most neighbours to simulate.
    """
    known = {each: (shortage_of(each), seconds_of(each)) for each in dict.fromkeys(starts)}
    origins = [*sorted(known, key=known.__getitem__)[:ORIGINS], min(known, key=lambda each: known[each][1])]
    for best in dict.fromkeys(origins):
        left = tries // len(origins)
        while left > 0:
            near = [each for each in neighbours(best) if each not in known]
            for each in sorted(near, key=task.slowest_s)[:left]:
                shortage, left = shortage_of(each), left - 1
                known[each] = (shortage, inf if shortage else seconds_of(each))
                if known[each] < (known[best][0], known[best][1] * (1 - SAME)):
                    best = each
                    break
            else:
                break
    return min(known, key=known.__getitem__)


def even_counts(items: int, stages: int) -> Counts:
    """Number of items by stage, as equal as possible; the last stage has the fewest.

    >>> even_counts(10, 4)
    (3, 2, 3, 2)
    """
    return tuple(np.diff(np.ceil(np.arange(stages + 1) * (items / stages) - 1e-9)).astype(int).tolist())
