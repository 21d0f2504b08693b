"""Closed forms of pipeline schedules that a simulation is held against: bubble, activations, weights, staleness."""

from __future__ import annotations

from steptime.num import Num


def naive_bubble_s(stages: Num, micro_batches: Num, each_s: Num) -> Num:
    r"""Time in which a rank waits where one micro-batch passes all stages forward and back before the next one starts.

    $$t = m\,(p - 1)\,t_1$$

    where $p$ = `stages`, $m$ = `micro_batches` and $t_1$ = `each_s` is the time of one micro-batch in one stage,
    forward and backward, in seconds: $1 - 1/p$ of the step.

    Source: Huang et al., arXiv 1811.06965, figure 2b.

    >>> naive_bubble_s(4, 8, 3.0)
    72.0
    """
    return micro_batches * (stages - 1) * each_s
