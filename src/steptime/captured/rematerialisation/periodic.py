"""The usual recipes: a checkpoint every k segments, and none, selective or full recomputation per block.

They are schedules or choices on the same chain as the optimal ones, weighed by the same simulator, so they can be
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from steptime.captured.rematerialisation.chain import (
    Action,
    Chain,
    Infeasible,
    Kind,
    Ran,
    Schedule,
    Segment,
    Solution,
    check_limit,
    dropped,
    pareto,
    simulate,
    solution,
)
from steptime.errors import FieldError
from steptime.num import Array

#: Partial choices that :func:`choose_blocks` keeps beside each other; more are thinned, each still exact in itself.
MOST_LABELS = 20_000


def every_k_schedule(count: int, k: int, *, last_kept: bool = True) -> Schedule:
    """Groups of ``k`` segments keep only the input of each group and run again before their backward.

    With ``last_kept`` the last group is saved in the first run, as it is needed next; without, it runs twice too.

    Raises :class:`~steptime.errors.FieldError` where ``k`` is no whole number from 1 to ``count``.

    >>> from steptime.captured.rematerialisation.chain import described
    >>> described(every_k_schedule(4, 2))
    'Fck0 Fn1 Fall2 Fall3 B3 B2 Fall0 Fall1 B1 B0'
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= count:
        raise FieldError("every_k", "k", f"is {k!r}; allowed is a whole number from 1 to {count}")
    groups = [range(i, min(i + k, count)) for i in range(0, count, k)]
    out: list[Action] = []
    for number, group in enumerate(groups):
        if not (last_kept and number == len(groups) - 1):
            out += dropped(group)
    for group in reversed(groups):
        out += [Action(Kind.SAVE, i) for i in group]
        out += [Action(Kind.BACKWARD, i) for i in reversed(group)]
    return tuple(out)


def every_k(chain: Chain, k: int, *, last_kept: bool = True) -> Solution:
    """A checkpoint every ``k`` segments; see :func:`every_k_schedule`."""
    return solution(chain, every_k_schedule(len(chain), k, last_kept=last_kept))


def every_sqrt(chain: Chain) -> Solution:
    r"""A checkpoint every $k = \lceil \sqrt N \rceil$ segments: $N / k$ checkpoints and $k$ saved segments live.

    Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174.
    """
    return every_k(chain, math.isqrt(len(chain) - 1) + 1)


def periodic_front(chain: Chain) -> tuple[Solution, ...]:
    """The front of memory and time of every k, least memory first."""
    return pareto(every_k(chain, k) for k in range(1, len(chain) + 1))


class Choice(StrEnum):
    """What one block does."""

    NONE = "none"
    """All is saved."""
    SELECTIVE = "selective"
    """Cheap parts are left out and made again within the backward."""
    FULL = "full"
    """Only the input is kept; the block runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A segment, and the same segment with selective recomputation if it has that."""

    whole: Segment
    selective: Segment | None = None
    """Fewer saved bytes, and a backward that takes longer and may have a higher peak; forward and boundaries are the
    same."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What the block can do."""
        return (Choice.NONE, *([Choice.SELECTIVE] if self.selective else []), Choice.FULL)

    def segment(self, choice: Choice) -> Segment:
        """The segment that runs under a choice.

        Raises :class:`~steptime.errors.FieldError` where there is no selective variant.
        """
        if choice is not Choice.SELECTIVE:
            return self.whole
        if self.selective is None:
            raise FieldError("block", "choice", "is selective; this block has no selective variant")
        return self.selective


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSolution(Ran):
    """One choice per block and what it costs."""

    choices: tuple[Choice, ...]
    extra_s: float
    """Time beyond that of no recomputation at all."""

    @property
    def counts(self) -> dict[Choice, int]:
        """Blocks of each choice."""
        return {choice: self.choices.count(choice) for choice in Choice}


def chosen(chain: Chain, blocks: Sequence[Block], choices: Sequence[Choice]) -> tuple[Chain, Schedule]:
    """The chain with each block's variant, and the schedule: full blocks run again just before their backward."""
    variant = replace(chain, segments=tuple(b.segment(c) for b, c in zip(blocks, choices, strict=True)))
    full = [choice is Choice.FULL for choice in choices]
    out = [Action(Kind.CHECKPOINT if again else Kind.SAVE, i) for i, again in enumerate(full)]
    for i in reversed(range(len(full))):
        out += [*([Action(Kind.SAVE, i)] if full[i] else []), Action(Kind.BACKWARD, i)]
    return variant, tuple(out)


def weigh(blocks: Sequence[Block], choices: Sequence[Choice], chain: Chain) -> BlockSolution:
    """Costs of one choice per block, by the simulator; ``chain`` gives the sizes after the last block."""
    run = simulate(*chosen(chain, blocks, choices))
    base_s = sum(block.whole.forward_s + block.whole.backward_s for block in blocks)
    return BlockSolution(choices=tuple(choices), run=run, extra_s=run.time_s - base_s)


def chain_of(blocks: Sequence[Block], *, output_bytes: float = 0.0, output_gradient_bytes: float = 0.0) -> Chain:
    """The chain of blocks that save everything."""
    return Chain(
        segments=tuple(block.whole for block in blocks), output_bytes=output_bytes,
        output_gradient_bytes=output_gradient_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ledger:
    r"""Bytes and seconds of each choice of each block, at [choice, block]; infinite where there is no such choice.

    Where block i begins, $P_i = x_0 + \sum_{k<i} kept_k$ bytes live: the choice of a block changes the later $P$ and
    no earlier peak. So the peak of any choices is $\max_i (P_i + working_i)$, in both passes.
    """

    kept: Array
    working: Array
    extra_s: Array

    def peak_bytes(self, input_bytes: float, choices: Array) -> float:
        """Peak of one choice per block."""
        each = np.arange(choices.size)
        kept = self.kept[choices, each]
        return float((input_bytes + np.cumsum(kept) - kept + self.working[choices, each]).max())


_CHOICES = tuple(Choice)


def _ledger(blocks: Sequence[Block], chain: Chain) -> _Ledger:
    n, x, d = len(chain), chain.boundary_bytes, chain.gradient_bytes
    table = np.full((3, 3, n), np.inf)
    for i, block in enumerate(blocks):
        for choice in block.choices:
            one = block.segment(choice)
            saving = x[i + 1] + one.saved_bytes + one.saving_transient_bytes
            reads = one.saved_bytes + one.output_in_backward * x[i + 1]
            backward = reads + d[i + 1] + d[i] + one.backward_transient_bytes
            if choice is Choice.FULL:
                beside = d[i + 1] if i < n - 1 else x[n]  # the last block's first output lives while it runs again
                work, kept = max(x[i + 1] + one.forward_transient_bytes, beside + saving, backward), x[i + 1]
                extra_s = one.forward_s
            else:
                work, kept = max(saving, backward), x[i + 1] + one.saved_bytes
                extra_s = one.backward_s - block.whole.backward_s
            table[:, _CHOICES.index(choice), i] = kept, work, extra_s
    return _Ledger(kept=table[0], working=table[1], extra_s=table[2])


def equal_blocks_front(block: Block, count: int, **ends: float) -> tuple[BlockSolution, ...]:
    r"""The front of memory and time of ``count`` equal blocks, least memory first.

    Full blocks come first, selective ones next, blocks that save everything last: the backward begins with the last,
    and each block that is done leaves room for those that run again. Time depends on the counts alone, so all counts
    $n_{none} + n_{selective} + n_{full} = N$ are weighed. ``ends`` are those of :func:`chain_of`.
    """
    blocks = (block,) * count
    chain = chain_of(blocks, **ends)
    ledger, found = _ledger(blocks, chain), []
    for full in range(count + 1):
        for selective in range(count - full + 1 if block.selective else 1):
            codes = np.repeat([2, 1, 0], [full, selective, count - full - selective])
            extra_s = float(ledger.extra_s[codes, np.arange(count)].sum())
            found.append((ledger.peak_bytes(chain.boundary_bytes[0], codes), extra_s, codes))
    out: list[BlockSolution] = []
    for _, extra_s, codes in sorted(found, key=lambda one: one[:2]):
        if not out or extra_s < out[-1].extra_s - 1e-12 * chain.base_s:
            out.append(weigh(blocks, [_CHOICES[code] for code in codes], chain))
    return tuple(out)


def choose_blocks(blocks: Sequence[Block], limit_bytes: float, **ends: float) -> BlockSolution | Infeasible:
    """The choices of unequal blocks that take least time within a limit.

    A knapsack over the blocks in order: a partial choice is the pair (bytes that live where the next block begins,
    extra seconds); one that is beaten in both is dropped. Exact as long as no more than :data:`MOST_LABELS` stay;
    beyond that some are dropped, which keeps the limit but may cost time. ``ends`` are those of :func:`chain_of`.

    Raises :class:`~steptime.errors.FieldError` where there is no block, or the limit is negative or no number.
    """
    check_limit(limit_bytes)
    chain = chain_of(blocks, **ends)
    ledger, start = _ledger(blocks, chain), chain.boundary_bytes[0]
    best = _knapsack(ledger, start, limit_bytes, least_peak=False)
    if best is None:
        least = _knapsack(ledger, start, math.inf, least_peak=True)
        assert least is not None
        return Infeasible(limit_bytes=limit_bytes, least_bytes=ledger.peak_bytes(start, least))
    return weigh(blocks, [_CHOICES[code] for code in best], chain)


def _knapsack(ledger: _Ledger, start: float, limit_bytes: float, *, least_peak: bool) -> Array | None:
    """One choice per block of least extra time within the limit, or of least peak."""
    live, cost = np.array([start]), np.array([0.0])
    steps: list[tuple[Array, Array]] = []
    for kept, working, extra_s in zip(ledger.kept.T, ledger.working.T, ledger.extra_s.T, strict=True):
        peak = live[None, :] + working[:, None]
        costs = np.maximum(cost[None, :], peak) if least_peak else cost[None, :] + extra_s[:, None]
        choice, parent = np.nonzero((peak <= limit_bytes) & np.isfinite(peak))
        if not choice.size:
            return None
        new_live, new_cost = live[parent] + kept[choice], costs[choice, parent]
        order = np.lexsort((new_cost, new_live))
        lowest = np.minimum.accumulate(new_cost[order])
        order = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
        if order.size > MOST_LABELS:
            order = order[np.unique(np.linspace(0, order.size - 1, MOST_LABELS).astype(int))]
        live, cost = new_live[order], new_cost[order]
        steps.append((choice[order], parent[order]))
    label = int(cost.argmin())
    codes = []
    for choice, parent in reversed(steps):
        codes.append(int(choice[label]))
        label = int(parent[label])
    return np.array(codes[::-1])
