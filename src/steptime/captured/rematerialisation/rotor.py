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
:func:`~steptime.captured.rematerialisation.simulate.simulate`, and the fastest one that truly fits is taken. So a limit
is never exceeded, and within one table more memory is never slower. Whether anything fits is decided in bytes.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214, theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from steptime.captured.rematerialisation.chain import (
    Chain,
    Segment,
    check_limit,
    common_divisor,
    keep_all,
)
from steptime.captured.rematerialisation.rotor_table import Costs, bounds_of, filled, least_schedule, sizes_of, walk
from steptime.captured.rematerialisation.solution import Infeasible, Solution, pareto, solution
from steptime.errors import FieldError

#: Slots of a table beyond its limit, as a factor; see above.
HEADROOM = 1.25
SLOTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One filled table: every limit up to ``reach_bytes``."""

    chain: Chain
    costs: Costs
    unit_bytes: float
    reach_bytes: float
    """Largest limit that the table was made for."""
    ends: tuple[Solution, Solution]
    """Least memory, found in bytes; and keeping everything."""
    exact: bool
    """Whether every size is a whole number of slots, so that nothing was rounded."""
    _weighed: dict[int, Solution] = field(default_factory=dict, repr=False, compare=False)

    def best(self, limit_bytes: float) -> Solution | Infeasible:
        """The fastest schedule within a limit; above ``reach_bytes``, the fastest that the table knows.

        Raises :class:`~steptime.errors.FieldError` where the limit is negative or no number.
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
        """The schedules of all entries, from the most slots to the least; none twice."""
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

    Raises :class:`~steptime.errors.FieldError` where the limit is negative or no number, or ``slots`` below 10.
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
    """Least memory, and keeping everything."""
    return solution(chain, least_schedule(bounds_of(sizes_of(chain)))), solution(chain, keep_all(len(chain)))


def solve(chain: Chain, limit_bytes: float, *, slots: int = SLOTS) -> Solution | Infeasible:
    """The fastest schedule within a limit; if none fits, the least memory that would do.

    Raises :class:`~steptime.errors.FieldError` where the limit is negative or no number, or ``slots`` below 10.

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

    One table reaches from 0 to what keeping everything needs, so a slot is coarse beside the least memory; each further
    table covers the lowest quarter of the one before it.
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
