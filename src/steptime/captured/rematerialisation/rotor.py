r"""The fastest schedule of a chain within a memory limit, by dynamic programming.

$C(s, t, m)$ is the least time of forward and backward of segments $s \dots t$ in $m$ bytes, given $a_s$ and
$\delta_{t+1}$ (symbols as in :mod:`~steptime.captured.rematerialisation.chain`, $u^f_i$ and $u^b_i$ the times of
segment $i$; $a_s$ is not part of $m$, and $d_N$ counts only from the first backward on):

$$C(s, t, m) = \min \begin{cases}
u^f_s + C(s + 1, t, m - s_s - x_{s+1}) + u^b_s & \text{segment } s \text{ saves} \\
\sum_{k=s}^{j-1} u^f_k + C(j, t, m - x_j) + C(s, j - 1, m) & \text{only } a_s \text{ stays, for each } s < j \le t
\end{cases}$$

The first line is open where $m$ holds the peaks of ``Fall`` $s$ and ``B`` $s$, the second where it holds those of the
forward runs of $s \dots j - 1$. The result is the optimum over all schedules that never release a checkpoint before
the backward that it was kept for (memory-persistent schedules); on unequal chains others may be faster.

Bytes are counted in slots of one unit, every size rounded up. Where all sizes are whole multiples of a unit that is
large enough, nothing is rounded and the result is exact. Elsewhere rounding wastes memory, so the table reaches
:data:`HEADROOM` times as far as the limit; each schedule is weighed in bytes by
:func:`~steptime.captured.rematerialisation.chain.simulate`, and the fastest one that truly fits is taken. So a limit
is never exceeded, and within one table more memory is never slower. Whether anything fits is decided in bytes.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214, theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from steptime.captured.rematerialisation.chain import (
    Action,
    Chain,
    Infeasible,
    Kind,
    Schedule,
    Segment,
    Solution,
    check_limit,
    columns_of,
    common_divisor,
    keep_all,
    pareto,
    solution,
)
from steptime.errors import FieldError
from steptime.num import Array

#: Chains up to this many segments are summed in double precision; longer ones in single, where the times of two
#: schedules that differ by less than 1e-5 of the whole may be taken for equal.
DOUBLE_UP_TO = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a chain of N segments for the recursion, in bytes or in slots."""

    x: Array
    """Boundary before each segment."""
    held: Array
    """Memory that a saving run leaves: saved activations and output."""
    after: Array
    """Gradient that lives after each segment while it runs again; 0 after the last."""
    first: Array
    """Peak of a forward without saving, its input not counted."""
    run: Array
    """Peak of a forward without saving, its input counted."""
    saving: Array
    """Peak of a saving forward, its input not counted."""
    backward: Array
    """Peak of the backward, its input not counted."""

    def in_slots(self, unit_bytes: float) -> Sizes:
        """Every entry in whole slots, rounded up: a sum of rounded entries is never below the sum."""
        up = {f.name: np.ceil(getattr(self, f.name) / unit_bytes * (1 - 1e-12)) for f in fields(self)}
        return Sizes(**up)


def sizes_of(chain: Chain) -> Sizes:
    """The sizes of a chain in bytes."""
    one = columns_of(chain)
    x, held = one.x, one.saved + one.x[1:]
    return Sizes(
        x=x[:-1], held=held, after=np.append(one.d[1:-1], 0.0), first=x[1:] + one.forward,
        run=x[:-1] + x[1:] + one.forward, saving=held + one.saving, backward=one.backward_peak,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Memory that solutions of each range of segments s ... t need, at [s, t]; infinite where s > t."""

    least: Array
    """Least memory of a memory-persistent schedule."""
    keep_all: Array
    """Memory of keeping everything."""
    cut: Array
    """Boundary at which the schedule of least memory cuts the range; 0 where segment s saves."""
    own: Array
    """Peak of the saving forward and of the backward of segment s."""
    sweep: Array
    """Peak of the forward runs of s ... j - 1, at [s, j]; what lives after t is not counted."""


def bounds_of(sizes: Sizes) -> Bounds:
    """The recursion for memory alone, exact in the unit of the sizes."""
    n = len(sizes.x)
    least, keep, sweep = np.full((n, n), np.inf), np.full((n, n), np.inf), np.zeros((n, n))
    cut = np.zeros((n, n), int)
    own = np.maximum(sizes.saving[:, None] + sizes.after[None, :], sizes.backward[:, None])
    for s in range(n - 1):
        runs = sizes.run[s:-1].copy()
        runs[0] = sizes.first[s]
        sweep[s, s + 1 :] = np.maximum.accumulate(runs)
    for t in range(n):
        least[t, t] = keep[t, t] = own[t, t]
        for s in range(t - 1, -1, -1):
            j = slice(s + 1, t + 1)
            keep[s, t] = max(own[s, t], sizes.held[s] + keep[s + 1, t])
            saves = max(own[s, t], sizes.held[s] + least[s + 1, t])
            cuts = np.maximum(sizes.x[j] + least[j, t], least[s, s:t])
            cuts = np.maximum(cuts, sweep[s, j] + sizes.after[t])
            best = int(cuts.argmin())
            least[s, t], cut[s, t] = (cuts[best], s + 1 + best) if cuts[best] < saves else (saves, 0)
    return Bounds(least=least, keep_all=keep, cut=cut, own=own, sweep=sweep)


def walk(count: int, slots: float, choose: Callable[[int, int, float], tuple[int, float, float]]) -> Schedule:
    """The schedule that a table of choices describes.

    ``choose(s, t, m)`` returns the boundary at which to cut the range and the memory of the right and of the left part;
    boundary 0 lets segment s save (the right part is then the rest), -1 keeps everything.
    """
    out: list[Action] = []
    stack: list[Action | tuple[int, int, float]] = [(0, count - 1, slots)]
    while stack:
        item = stack.pop()
        if isinstance(item, Action):
            out.append(item)
            continue
        s, t, memory = item
        cut, right, left = choose(s, t, memory) if s < t else (-1, 0.0, 0.0)
        if cut < 0:
            out += [Action(Kind.SAVE, i) for i in range(s, t + 1)]
            out += [Action(Kind.BACKWARD, i) for i in range(t, s - 1, -1)]
        elif cut == 0:
            out.append(Action(Kind.SAVE, s))
            stack += [Action(Kind.BACKWARD, s), (s + 1, t, right)]
        else:
            out += [Action(Kind.FORWARD if i > s else Kind.CHECKPOINT, i) for i in range(s, cut)]
            stack += [(s, cut - 1, left), (cut, t, right)]
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a chain for the recursion, in seconds."""

    saved_s: Array
    """Forward and backward of each segment."""
    before_s: Array
    """Forward of all segments before each."""
    base_s: Array
    """Forward and backward of all segments before each, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The filled table, for 0 ... ``slots`` slots on top of the chain's input."""

    slots: int
    sizes: Sizes
    bounds: Bounds
    times: Times
    left: Array
    """C(s, t, m) at [s, t, m]; infinite where nothing fits."""
    right: Array
    """C(j, t, m - x_j) + time of the forward runs before j, at [t, j, m]: the last axis is shifted once, here."""

    def choose(self, s: int, t: int, memory: float) -> tuple[int, float, float]:
        """The best choice at one entry, in the form that :func:`walk` takes."""
        m, held = int(memory), int(self.sizes.held[s])
        if m >= self.bounds.keep_all[s, t]:
            return -1, 0.0, 0.0
        best, j = np.inf, slice(s + 1, t + 1)
        if m >= max(self.bounds.own[s, t], held):
            best = float(self.left[s + 1, t, m - held] + self.times.saved_s[s])
        cuts = self.left[s, s:t, m] + self.right[t, j, m] - self.times.before_s[s]
        cuts[self.bounds.sweep[s, j] + self.sizes.after[t] > m] = np.inf
        cut = int(cuts.argmin())
        if cuts[cut] < best:
            return s + 1 + cut, m - self.sizes.x[s + 1 + cut], m
        return 0, m - held, 0.0


def filled(chain: Chain, unit_bytes: float, slots: int) -> Costs:
    """Fill the table: O(N^3 slots) additions, in N^2 / 2 calls of NumPy."""
    sizes = sizes_of(chain).in_slots(unit_bytes)
    n, dtype = len(chain), np.float64 if len(chain) <= DOUBLE_UP_TO else np.float32
    forward = np.array([one.forward_s for one in chain.segments], float)
    both = forward + [one.backward_s for one in chain.segments]
    times = Times(saved_s=both, before_s=np.cumsum(forward) - forward, base_s=np.concatenate([[0.0], np.cumsum(both)]))
    costs = Costs(
        slots=slots, sizes=sizes, bounds=bounds_of(sizes), times=times,
        left=np.full((n, n, slots + 1), np.inf, dtype), right=np.full((n, n, slots + 1), np.inf, dtype),
    )  # fmt: skip
    scratch = np.empty((n, slots + 1), dtype)
    low = np.minimum(costs.bounds.least, slots + 1).astype(int)
    high = np.minimum(costs.bounds.keep_all, slots + 1).astype(int)
    for t in range(n):
        for s in range(t, -1, -1):
            row, x = costs.left[s, t], int(sizes.x[s])
            row[high[s, t] :] = times.base_s[t + 1] - times.base_s[s]
            if low[s, t] < high[s, t]:
                _fill_row(costs, s, t, low, int(high[s, t]), scratch)
            if x <= slots:
                np.add(row[: slots + 1 - x], times.before_s[s], out=costs.right[t, s, x:], casting="same_kind")
    return costs


def _fill_row(costs: Costs, s: int, t: int, low: Array, end: int, scratch: Array) -> None:
    """Fill C(s, t, m) for every m in which some schedule fits but keeping everything does not."""
    begin, depth, j = int(low[s, t]), t - s, slice(s + 1, t + 1)
    sizes, bounds = costs.sizes, costs.bounds
    options = scratch[: depth + 1, begin:end]
    np.add(costs.left[s, s:t, begin:end], costs.right[t, j, begin:end], out=options[:depth])
    # The forward runs before the cut need more than the two parts: rare, so only those rows are touched.
    floor = bounds.sweep[s, j] + sizes.after[t]
    known = np.maximum(np.maximum(low[s, s:t], sizes.x[j] + low[j, t]), begin)
    for k in np.flatnonzero(floor > known):
        options[k, : int(min(floor[k], end)) - begin] = np.inf
    options[:depth] -= costs.times.before_s[s]
    held = int(min(sizes.held[s], costs.slots + 1))
    first = int(max(min(bounds.own[s, t], end), held, begin))
    options[depth] = np.inf
    if first < end:
        rest = costs.left[s + 1, t, first - held : end - held]
        np.add(rest, costs.times.saved_s[s], out=options[depth, first - begin :], casting="same_kind")
    options.min(axis=0, out=costs.left[s, t, begin:end])


#: Factor by which the slots of a table exceed its limit, since rounding wastes memory.
HEADROOM = 1.25
SLOTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A filled table that serves every limit up to ``reach_bytes``."""

    chain: Chain
    costs: Costs
    unit_bytes: float
    reach_bytes: float
    """Largest limit that the table was made for."""
    ends: tuple[Solution, Solution]
    """Schedule of least memory, found in bytes, and the one that keeps everything."""
    exact: bool
    """True if every size is a whole number of slots, so that nothing was rounded."""
    _weighed: dict[int, Solution] = field(default_factory=dict, repr=False, compare=False)

    def best(self, limit_bytes: float) -> Solution | Infeasible:
        """The fastest schedule within a limit; above ``reach_bytes``, the fastest that the table knows.

        Raises :class:`~steptime.errors.FieldError` where the limit is negative or not a number.
        """
        check_limit(limit_bytes)
        least, everything = self.ends
        if everything.peak_bytes <= limit_bytes:
            return everything
        if limit_bytes < least.peak_bytes:
            return Infeasible(limit_bytes=limit_bytes, least_bytes=least.peak_bytes)
        fitting = (one for one in self._fastest_first() if one.peak_bytes <= limit_bytes)
        return min((next(fitting, least), least), key=lambda one: one.time_s)

    def front(self) -> tuple[Solution, ...]:
        """The front of memory and time, least memory first: no solution is better in both."""
        return pareto((*self.ends, *self._fastest_first()))

    def _fastest_first(self) -> Iterable[Solution]:
        """Distinct schedules of all entries, from most to fewest slots."""
        whole = self.costs.left[0, -1]
        for slots in range(self.costs.slots, -1, -1):
            if not math.isfinite(whole[slots]):
                return
            if slots == 0 or whole[slots] < whole[slots - 1]:
                if slots not in self._weighed:
                    self._weighed[slots] = solution(self.chain, walk(len(self.chain), slots, self.costs.choose))
                yield self._weighed[slots]


def fill(chain: Chain, *, limit_bytes: float = math.inf, slots: int = SLOTS) -> Table:
    """Fill one table that serves every limit up to ``limit_bytes``, or all limits.

    Raises :class:`~steptime.errors.FieldError` where the limit is negative or not a number, or ``slots`` below 10.
    """
    check_limit(limit_bytes)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 10:
        raise FieldError("rotor", "slots", f"is {slots!r}; allowed is a whole number of at least 10")
    ends = _ends(chain)
    reach = max(min(limit_bytes, ends[1].peak_bytes), ends[0].peak_bytes)
    room, step = reach - chain.boundary_bytes[0], common_bytes(chain)
    exact = step > 0 and room <= step * slots
    unit = step if exact else room * HEADROOM / slots
    if unit <= 0:  # nothing but the input has a size
        unit, exact = 1.0, True
    costs = filled(chain, unit, max(int(room / unit), 0) if exact else slots)
    return Table(chain=chain, costs=costs, unit_bytes=unit, reach_bytes=reach, ends=ends, exact=exact)


def _ends(chain: Chain) -> tuple[Solution, Solution]:
    """Schedule of least memory, and the one that keeps everything."""
    cut = bounds_of(sizes_of(chain)).cut
    least = walk(len(chain), 0.0, lambda s, t, _: (int(cut[s, t]), 0.0, 0.0))
    return solution(chain, least), solution(chain, keep_all(len(chain)))


def solve(chain: Chain, limit_bytes: float, *, slots: int = SLOTS) -> Solution | Infeasible:
    """The fastest schedule within a limit; if none fits, the smallest feasible limit.

    Raises :class:`~steptime.errors.FieldError` where the limit is negative or not a number, or ``slots`` below 10.

    Two equal segments that save 3 units and read 1 need 2 (3 + 1) = 8 to keep all; with 7 the first runs twice:

    >>> chain = Chain(segments=(Segment(forward_s=1, backward_s=2, input_bytes=1, saved_bytes=3),) * 2)
    >>> solve(chain, 8).time_s, solve(chain, 7).time_s, solve(chain, 4).least_bytes
    (6.0, 7.0, 5.0)
    """
    check_limit(limit_bytes)
    least, everything = _ends(chain)
    if everything.peak_bytes <= limit_bytes:
        return everything
    if limit_bytes < least.peak_bytes:
        return Infeasible(limit_bytes=limit_bytes, least_bytes=least.peak_bytes)
    return fill(chain, limit_bytes=limit_bytes, slots=slots).best(limit_bytes)


def front(chain: Chain, *, slots: int = SLOTS, tables: int = 1) -> tuple[Solution, ...]:
    """The front of memory and time, least memory first.

    One table reaches from 0 to the memory of keeping everything, so its slots are coarse at the least memory; each
    further table covers the lowest quarter of the previous one.
    """
    table = fill(chain, slots=slots)
    found = [*table.front()]
    for _ in range(tables - 1):
        if table.exact or table.reach_bytes / 4 < table.ends[0].peak_bytes:
            break
        table = fill(chain, limit_bytes=table.reach_bytes / 4, slots=slots)
        found += table.front()
    return pareto(found)


def common_bytes(chain: Chain) -> float:
    """Largest whole number of bytes of which every size is a multiple; 0 if there is none.

    >>> common_bytes(Chain(segments=(Segment(forward_s=1, backward_s=2, input_bytes=8, saved_bytes=12),)))
    4.0
    """
    names = [f.name for f in fields(Segment) if f.name.endswith("_bytes")]
    sizes = [getattr(one, name) for one in chain.segments for name in names]
    return common_divisor([*sizes, chain.output_bytes, chain.output_gradient_bytes])
